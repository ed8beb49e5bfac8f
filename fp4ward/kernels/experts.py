"""Routing, the routed experts of a mixture-of-experts block, and such a block.

Shapes: T tokens, H hidden, E experts, I expert width, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fp4ward.formats.weight import Weight
from fp4ward.kernels import linear, norm


def route(
    logits_TE: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    bias_E: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    factor: float = 1.0,
    copies_EC: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] and experts [T, k] of every token, the best first, equal ones by lower number.

    Scores are a softmax over all experts or sigmoids, in f32 or wider. Choice: by logit; with a bias or groups by score
    + bias, after all but the top_groups groups of neighbours with the largest sum of their two best choices are left
    out (DeepSeek-V3, Nemotron-H). Weights are scores without the bias, divided by their sum if normalize, times factor.
    copies_EC: where the copies of each expert are, -1 on other ranks: token t takes column t % C; see kernels' callers.
    """
    logits = logits_TE.to(linear.wide(logits_TE.dtype))
    score = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice = logits if bias_E is None and groups == 1 else score if bias_E is None else score + bias_E
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1)[0].sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True)[1][:, :top_groups]
        out = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
        choice = grouped.masked_fill(out[..., None], -torch.inf).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = score.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if copies_EC is not None:
        token = torch.arange(len(ids), device=ids.device) % copies_EC.shape[1]
        ids = copies_EC[ids, token[:, None]].long()
    return weights * factor, ids


@dataclass(frozen=True)
class Router:
    """How a block chooses: the arguments of `route`."""

    top_k: int
    sigmoid: bool = False
    bias_E: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    factor: float = 1.0
    copies_EC: Tensor | None = None

    def __call__(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        return route(logits_TE, **vars(self))


def reference(x_TH: Tensor, gate: Weight, up: Weight, down: Weight, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
    """sum over a token's experts e of weight_e * down_e(silu(gate_e x) * (up_e x)); [T, H] in x's type.

    gate and up are [E, I, H], down [E, H, I]. The sum runs in ascending expert id in f32, so a token's result does not
    depend on its neighbours. An id outside 0..E-1 (an expert of another rank, or none) contributes nothing.
    """

    def inner(x: Tensor, e: int) -> Tensor:
        return functional.silu(linear.reference(x, gate.expert(e))) * linear.reference(x, up.expert(e))

    return _mixed(x_TH, inner, down, weights_Tk, ids_Tk)


def block(
    x_TH: Tensor, norm_H: Tensor, eps: float, router: Router, experts: Sequence[Weight], gate: Weight,
    shared_gate: Weight, shared: Sequence[Weight],
) -> Tensor:  # fmt: skip
    """x + the chosen experts of n + sigmoid(shared_gate n) * shared(n), n = rms_norm(x): a whole block of Qwen3.5.

    experts: gate, up [E, I, H], down [E, H, I]; shared: the same without E; gate [E, H]; shared_gate [1, H].
    """
    n = norm.rms_norm(x_TH, norm_H, eps)
    (first, up, down), own = experts, linear.reference(n, shared_gate).sigmoid()
    routed = reference(n, first, up, down, *router(linear.reference(n, gate)))
    first, up, down = shared
    inner = functional.silu(linear.reference(n, first)) * linear.reference(n, up)
    return x_TH + (routed + own * linear.reference(inner, down))


def relu2_reference(x_TH: Tensor, up: Weight, down: Weight, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
    """The same with down_e(relu(up_e x)^2) (Nemotron-H)."""
    return _mixed(x_TH, lambda x, e: linear.reference(x, up.expert(e)).relu().square(), down, weights_Tk, ids_Tk)


def _mixed(
    x_TH: Tensor, inner: Callable[[Tensor, int], Tensor], down: Weight, weights_Tk: Tensor, ids_Tk: Tensor
) -> Tensor:
    experts, k = down.shape[0], ids_Tk.shape[1]
    y = torch.zeros_like(x_TH, dtype=linear.wide(x_TH.dtype))
    ids, weights = ids_Tk.flatten(), weights_Tk.reshape(-1, 1).to(y.dtype)
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = ids.argsort(stable=True)  # pairs of token and expert, by expert
    start = 0
    for e, count in enumerate(torch.bincount(ids, minlength=experts + 1).tolist()[:experts]):
        if count:
            pair = order[start : start + count]
            token = pair // k
            x = x_TH if len(x_TH) == 1 else x_TH[token]  # decoding on a CPU is made of such small operations
            out = linear.reference(inner(x, e), down.expert(e)).to(y.dtype)
            y.index_add_(0, token, out * weights[pair])
            start += count
    return y.to(x_TH.dtype)
