"""Routing and the routed experts of a mixture-of-experts block.

Shapes: T tokens, H hidden, E experts, I expert width, k experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fp4ward.formats.weight import Weight
from fp4ward.kernels import linear


def route_softmax(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in f32, the top k, renormalised to sum 1 (Qwen3.5). -> weights [T, k], ids [T, k]."""
    p = logits_TE.to(linear.wide(logits_TE.dtype)).softmax(-1)
    weights, ids = p.topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


def reference(x_TH: Tensor, gate: Weight, up: Weight, down: Weight, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
    """sum over a token's experts e of weight_e * down_e(silu(gate_e x) * (up_e x)); [T, H] in x's type.

    gate and up are [E, I, H], down [E, H, I]. The sum runs in ascending expert id in f32, so a token's result does not
    depend on its neighbours. An id outside 0..E-1 (an expert of another rank, or none) contributes nothing.
    """
    experts, k = gate.shape[0], ids_Tk.shape[1]
    y = torch.zeros_like(x_TH, dtype=linear.wide(x_TH.dtype))
    ids = ids_Tk.flatten()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = ids.argsort(stable=True)  # pairs of token and expert, by expert
    start = 0
    for e, count in enumerate(torch.bincount(ids, minlength=experts + 1).tolist()[:experts]):
        if count:
            pair = order[start : start + count]
            token = pair // k
            x = x_TH[token]
            h = functional.silu(linear.reference(x, gate.expert(e))) * linear.reference(x, up.expert(e))
            out = linear.reference(h, down.expert(e)).to(y.dtype)
            y.index_add_(0, token, out * weights_Tk.flatten()[pair, None].to(y.dtype))
            start += count
    return y.to(x_TH.dtype)
