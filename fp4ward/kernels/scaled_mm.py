"""y = x W^T on FP8 and FP4 tensor cores through torch, for layers whose checkpoint asks for quantized inputs.

W8A8 (SM89 and newer) for e4m3 weights with a scale a tensor or a row, W4A4 (SM100 and newer) for NVFP4. Legend: T
tokens, K in, N out. A token's own scale s (f32, its largest value over the format's) is computed in each call: finer
than the one input_scale of a checkpoint, which is not needed, and a token's result does not depend on its neighbours.

    W8A8: y = s_t g_n sum_k e4m3(x/s) e4m3(w)        W4A4: y = s_t g_n sum_k e2m1 e4m3(x's block) e2m1 e4m3(w's block)

Sums are f32 (no fast accumulation). The references quantize the same way and multiply exact weights by exact values.
Quantizing by torch's own operations reads x several times: many small launches, so one token is slower than W4A16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from fp4ward.formats import fp8, nvfp4
from fp4ward.formats.weight import Weight
from fp4ward.kernels import linear

NVFP4_MAX = nvfp4.E2M1_MAX * fp8.E4M3_MAX


def _token_scale(x_TK: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """x in f32 (or f64), and f32 [T, 1] that brings each token's largest value to `largest`; never zero."""
    x = x_TK.to(linear.wide(x_TK.dtype))
    return x, (x.abs().amax(-1, keepdim=True) / largest).float().clamp(min=torch.finfo(torch.float32).tiny)


def fp8_quantize(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [T, K] and f32 scales [T, 1]."""
    x, scale = _token_scale(x_TK, fp8.E4M3_MAX)
    return fp8.to_e4m3(x / scale), scale


def fp8_reference(x_TK: Tensor, w: Weight) -> Tensor:
    """W8A8: what `fp8_linear` computes, in float32 (float64 for float64)."""
    codes, scale = fp8_quantize(x_TK)
    acc = linear.wide(x_TK.dtype)
    return linear.reference(codes.to(acc) * scale.to(acc), w).to(x_TK.dtype)


def fp8_linear(x_TK: Tensor, w: Weight) -> Tensor:
    """x [T, K] bf16, w [N, K] fp8_tensor or fp8_channel -> [T, N] bf16; K and N are multiples of 16."""
    codes, scale = fp8_quantize(x_TK)
    data, row = w.parts["data"], w.parts["scale"]
    by_row = ScalingType.RowWise
    return functional.scaled_mm(codes, data.t(), scale, by_row, row.t(), by_row, output_dtype=x_TK.dtype)


def nvfp4_quantize(x_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes [T, K/2], block scales e4m3 [T, K/16] and f32 scales [T, 1]."""
    x, scale = _token_scale(x_TK, NVFP4_MAX)
    return *nvfp4.quantize_activation(x, scale), scale


def nvfp4_reference(x_TK: Tensor, w: Weight) -> Tensor:
    """W4A4: what `nvfp4_linear` computes, in float32 (float64 for float64)."""
    packed, blocks, scale = nvfp4_quantize(x_TK)
    x = nvfp4.decode(packed, blocks, scale[:, 0], linear.wide(x_TK.dtype))
    return linear.reference(x, w).to(x_TK.dtype)


class Nvfp4(NamedTuple):
    """A weight as FP4 tensor cores take it: codes [N, K/2] as stored, swizzled block scales, f32 globals [N]."""

    packed: Tensor
    scale: Tensor
    glob: Tensor


def swizzled(scale_RG: Tensor) -> Tensor:
    """Block scales in cuBLAS's order: tiles of 128 rows by 4, a row of tiles after the other; in a tile row r lies at
    16 (r mod 32) + 4 (r div 32). Zeros fill the last tiles. Source: cuBLAS, "1D block scaling factors layout"."""
    rows, groups = scale_RG.shape
    tiles = functional.pad(scale_RG.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    tiles = tiles.view(-(-rows // 128), 4, 32, -(-groups // 4), 4).permute(0, 3, 2, 1, 4)
    return tiles.flatten().view(scale_RG.dtype)


def nvfp4_prepare(w: Weight) -> Nvfp4:
    """Codes and globals are shared with w; the scales are new."""
    packed, scale, glob = (w.parts[name] for name in w.format.components)
    return Nvfp4(packed.view(torch.float4_e2m1fn_x2), swizzled(scale), glob)


def nvfp4_linear(x_TK: Tensor, w: Nvfp4) -> Tensor:
    """x [T, K] bf16 or f16 -> [T, N] in x's type; K is a multiple of 32, N of 16."""
    packed, blocks, scale = nvfp4_quantize(x_TK)
    codes, by_block, order = packed.view(torch.float4_e2m1fn_x2), ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4
    y = functional.scaled_mm(
        codes, w.packed.t(), swizzled(blocks), by_block, w.scale, by_block, order, order, output_dtype=torch.float32
    )
    return (y * scale * w.glob).to(x_TK.dtype)
