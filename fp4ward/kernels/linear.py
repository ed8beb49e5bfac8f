"""y = x W^T for a weight in any stored format, exact weights, activations never quantized (W4A16, W8A16, dense).

Shapes: T tokens, K in, N out. w = mantissa * row_scale: the mantissa (code * block scale for NVFP4, the e4m3 value for
FP8) is exact in bf16, and the row scale stays f32 and multiplies the accumulator, so unequal global scales of
concatenated projections cost nothing and round nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fp4ward.formats.weight import Weight

# Rows are decoded in blocks of about this many weights: a vocabulary of 248,320 must not be decoded whole.
BLOCK_WEIGHTS = 1 << 23


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference(x_TK: Tensor, w: Weight) -> Tensor:
    """x [T, K] of any float type, w [N, K] -> [T, N] in x's type; computed in float32 (float64 for float64)."""
    if w.parts.keys() == {"data"} and w.parts["data"].dtype == x_TK.dtype:
        return functional.linear(x_TK, w.parts["data"])
    n, k = w.shape
    acc = wide(x_TK.dtype)
    x = x_TK.to(acc)
    y = torch.empty(x.shape[0], n, dtype=acc, device=x.device)
    step = max(1, BLOCK_WEIGHTS // k)
    for start in range(0, n, step):
        part = w.rows(start, min(n, start + step))
        block = x @ part.mantissa(acc).T
        scale = part.row_scale()
        y[:, start : start + block.shape[1]] = block if scale is None else block * scale.to(acc)
    return y.to(x_TK.dtype)
