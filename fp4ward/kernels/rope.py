"""Rotary position embedding on the first `rotary_dim` dimensions of each head, halves convention (NeoX)."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4ward.kernels.linear import wide


def frequencies(rotary_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """theta^(-2j / rotary_dim) for j = 0 .. rotary_dim/2 - 1, in f32 (f64 for f64)."""
    j = torch.arange(0, rotary_dim, 2, dtype=wide(dtype), device=device)
    return theta ** (-j / rotary_dim)


def rotate(x_TND: Tensor, positions_T: Tensor, freq: Tensor) -> Tensor:
    """x [T, heads, D] -> same; dimensions past 2 * len(freq) pass through. Text positions: one row (M-RoPE's three
    rows are equal there, so it is plain RoPE)."""
    angle = positions_T.to(freq.dtype)[:, None, None] * freq
    cos, sin = angle.cos(), angle.sin()
    half = freq.shape[0]
    h = x_TND.to(freq.dtype)
    a, b = h[..., :half], h[..., half : 2 * half]
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin, h[..., 2 * half :]], dim=-1)
    return rotated.to(x_TND.dtype)
