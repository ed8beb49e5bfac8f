"""FP8 (e4m3) numbers: w = e4m3(code) * scale, the scale per tensor, per output row (channel) or per 128x128 block.

All 127 non-negative codes are finite: 2^-9 ... 448, 7 subnormals and zero included; 0x80 is minus zero; 0x7f and 0xff
are NaN, there is no infinity. Codes are exact in bf16, f16 and f32. This file is the definition that kernels are tested
against. Legend: N rows, K columns, `...` any leading dimensions, S scales a row (1, or ceil(K/128) for blocks).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fp4ward.errors import UserError
from fp4ward.formats.formats import FP8_BLOCK, FP8_BLOCK_SCALED, FP8_CHANNEL, FP8_TENSOR, fp8_format

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # smallest positive (subnormal) value


def to_e4m3(x: Tensor) -> Tensor:
    """Round to nearest even, saturating at +-448. NaN stays NaN.

    The clamp is explicit because torch's own cast depends on its version: 2.13 saturates on a CPU, older ones give NaN.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def widen(data: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 codes as `dtype` (16 bits or wider), exactly.

    On a CPU by table: torch's cast takes 27 ms for 2048x2048 on one core, the table 6 ms.
    """
    if data.device.type != "cpu":
        return data.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(E4M3).to(dtype)
    return table.index_select(0, data.view(torch.uint8).flatten().int()).view(data.shape)


def expand_scale(scale: Tensor, n: int, k: int, lead: tuple[int, ...] = ()) -> Tensor:
    """f32 [*lead, N, S] from a scale as stored for a weight [*lead, N, K], in any shape that `fp8_format` knows.

    UserError for any other.
    """
    scale, format = scale.float(), fp8_format(tuple(scale.shape), (*lead, n, k))
    if format is FP8_TENSOR:
        one = scale.reshape(*lead, 1, 1) if scale.numel() > 1 else scale.reshape(())
        return one.expand(*lead, n, 1).contiguous()
    if format is FP8_CHANNEL:
        return scale.reshape(*lead, n, 1).contiguous()
    if format is FP8_BLOCK_SCALED:
        by_block = scale.reshape(*lead, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
        return by_block.repeat_interleave(FP8_BLOCK, -2)[..., :n, :].contiguous()
    raise UserError(f"an FP8 scale {list(scale.shape)} does not fit a weight {[*lead, n, k]}")


def decode_rows(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[...,N,K] = data * scale, `scale` f32 [...,N,S] as expand_scale gives it. Computed in f32, or exactly in f64."""
    out = widen(data, torch.float64 if dtype == torch.float64 else torch.float32)
    scale = scale.to(out.dtype)
    if scale.shape[-1] == 1:
        out.mul_(scale)
    else:
        whole = out.shape[-1] // FP8_BLOCK * FP8_BLOCK
        blocks = whole // FP8_BLOCK
        out[..., :whole].view(*out.shape[:-1], blocks, FP8_BLOCK).mul_(scale[..., :blocks, None])
        out[..., whole:].mul_(scale[..., blocks:])
    return out.to(dtype)


def decode(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[...,N,K] from data and a scale in any stored shape."""
    *lead, n, k = data.shape
    return decode_rows(data, expand_scale(scale, n, k, tuple(lead)), dtype)


def encode(w: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """(data e4m3 [...,N,K], scale f32) of float w [...,N,K], scale = amax/448 (1 where amax is 0).

    scaling: "tensor" (scale [...]), "channel" ([...,N,1]) or "block" ([...,N/128,K/128]).
    """
    *lead, n, k = w.shape
    w = w.float()
    if scaling == "tensor":
        amax = w.abs().amax((-2, -1))
    elif scaling == "channel":
        amax = w.abs().amax(-1, keepdim=True)
    elif scaling == "block":
        padded = functional.pad(w, (0, -k % FP8_BLOCK, 0, -n % FP8_BLOCK))
        rows, columns = padded.shape[-2] // FP8_BLOCK, padded.shape[-1] // FP8_BLOCK
        amax = padded.reshape(*lead, rows, FP8_BLOCK, columns, FP8_BLOCK).abs().amax((-3, -1))
    else:
        raise ValueError(f"unknown FP8 scaling {scaling!r}")
    scale = amax / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    wide = expand_scale(scale, n, k, tuple(lead))
    if wide.shape[-1] > 1:
        wide = wide.repeat_interleave(FP8_BLOCK, -1)[..., :k]
    return to_e4m3(w / wide), scale


def check_data(name: str, data: Tensor) -> None:
    """UserError naming tensor and index when FP8 codes hold a NaN (0x7f, 0xff). Two reductions, no temporaries."""
    if data.numel() == 0:
        return
    # 0xff is the largest unsigned byte and 0x7f the largest signed one.
    if int(data.view(torch.uint8).max()) == 0xFF or int(data.view(torch.int8).max()) == 0x7F:
        byte = data.view(torch.uint8)
        where = first_index((byte == 0x7F) | (byte == 0xFF))
        raise UserError(
            f"tensor {name}: NaN (byte {int(byte[where]):#04x}) at {list(where)}; the file is damaged, fetch or export "
            f"it again"
        )


def check_scale(name: str, scale: Tensor, data: Tensor) -> None:
    """UserError unless every scale (as stored) is finite and positive, or zero with only zero codes under it.

    Exporters write amax/448, so an all-zero row has scale 0; a zero scale over other codes would erase weights.
    """
    if check_finite(name, scale):
        *lead, n, k = data.shape
        erased = erased_by(expand_scale(scale, n, k, tuple(lead)), data)
        if bool(erased.any()):
            raise erases(name, first_index(erased))


def erased_by(wide: Tensor, data: Tensor) -> Tensor:
    """Where a scale of zero, as expand_scale gives it, lies over a code that is not zero. [...,N,K]"""
    zero = wide == 0
    if zero.shape[-1] > 1:
        zero = zero.repeat_interleave(FP8_BLOCK, -1)[..., : data.shape[-1]]
    return zero & ((data.view(torch.uint8) & 0x7F) != 0)


def check_finite(name: str, scale: Tensor) -> bool:
    """True when a scale is zero. UserError unless all are finite and not negative."""
    wide = scale.float()
    bad = ~(torch.isfinite(wide) & (wide >= 0))
    if bool(bad.any()):
        where = first_index(bad)
        raise UserError(
            f"tensor {name}: FP8 scale {float(wide[where])} at {list(where)}; scales must be finite and positive, "
            f"export the checkpoint again",
            "fp8-scale",
        )
    return bool((wide == 0).any())


def erases(name: str, where: Sequence[int]) -> UserError:
    return UserError(
        f"tensor {name}: FP8 scale 0 erases the weight at {list(where)}, whose code is not zero; export the checkpoint "
        f"again",
        "fp8-scale",
    )


def first_index(mask: Tensor) -> tuple[int, ...]:
    """Index of the first true element of `mask`, which has one."""
    flat = mask.flatten().to(torch.uint8).argmax()
    return tuple(int(i) for i in torch.unravel_index(flat, mask.shape))
