"""Causal grouped-query attention over a paged cache.

Shapes: T tokens of the step, Nq query heads, Nk key/value heads (query head h reads key head h // (Nq/Nk)), D head
dimension, C cache positions. K and V are read as the cache stores them, those of the current step included: a step's
result does not depend on how a prompt was cut into chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4ward.formats.fp8 import to_e4m3
from fp4ward.kernels.linear import wide

# Scores of one block of queries are kept under this many elements.
BLOCK_SCORES = 1 << 25


def store(cache_CND: Tensor, at_T: Tensor, x_TND: Tensor, scale: float) -> None:
    """Write x at flat cache positions. An FP8 cache holds x / scale, saturated at 448."""
    if cache_CND.dtype == torch.float8_e4m3fn:
        cache_CND[at_T] = to_e4m3(x_TND.to(wide(x_TND.dtype)) / scale)
    else:
        cache_CND[at_T] = x_TND.to(cache_CND.dtype)


def fetch(cache_CND: Tensor, at: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Cache positions as `dtype`; an FP8 cache is multiplied by its scale."""
    x = cache_CND[at].to(dtype)
    return x * scale if cache_CND.dtype == torch.float8_e4m3fn else x


def attend(q_TND: Tensor, k_SND: Tensor, v_SND: Tensor, first: int, scale: float) -> Tensor:
    """One sequence: queries at positions first, first+1, ... over keys at positions 0 .. S-1 -> [T, Nq, D], q's type.

    Scores, softmax and sums in f32 (f64 for f64).
    """
    acc = wide(q_TND.dtype)
    t, nq, d = q_TND.shape
    s, nk = k_SND.shape[:2]
    q = q_TND.to(acc).view(t, nk, nq // nk, d)
    k, v = k_SND.to(acc), v_SND.to(acc)
    out = torch.empty(t, nq, d, dtype=acc, device=q.device)
    step = max(1, BLOCK_SCORES // (nq * s))
    for a in range(0, t, step):
        b = min(t, a + step)
        reach = first + b  # no query of this block looks further
        scores = torch.einsum("tgrd,sgd->grts", q[a:b], k[:reach]) * scale
        at = torch.arange(first + a, first + b, device=q.device)
        hidden = torch.arange(reach, device=q.device)[None, :] > at[:, None]
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[a:b] = torch.einsum("grts,sgd->tgrd", p, v[:reach]).reshape(b - a, nq, d)
    return out.to(q_TND.dtype)
