"""Root-mean-square norms. x [..., D], weight [D]; statistics and products in f32 (f64 for f64), result in x's type."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from fp4ward.kernels.linear import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. Where a checkpoint stores zero-centred weights, 1 was added at load."""
    h = x.to(wide(x.dtype))
    return functional.rms_norm(h, weight.shape, weight.to(h.dtype), eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate): the norm comes before the gate (Qwen3.5's linear attention)."""
    h = rms_norm(x.to(wide(x.dtype)), weight, eps)
    return (h * functional.silu(gate.to(h.dtype))).to(gate.dtype)
