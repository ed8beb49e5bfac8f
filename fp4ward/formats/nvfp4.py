"""NVFP4 numbers: w = e2m1(code) * e4m3(block scale) * global scale. Slow and obvious: kernels are tested against this.

Storage of a weight [N, K]: packed u8 [N, K/2], element 2j in the low nibble of byte j and 2j+1 in the high one;
block_scale e4m3 [N, K/16], one for 16 columns; one global scale f32 a tensor, here often expanded to one a row.
A code is a sign (bit 3) and one of 0 .5 1 1.5 2 3 4 6. code*block has at most 6 significant bits and lies in
2^-10 ... 2688: exact in bf16 and in f16. The global scale stays f32 (rounding it to bf16 would cost up to 0.39 %).
`...` stands for any leading dimensions.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fp4ward.errors import UserError
from fp4ward.formats.formats import NVFP4_GROUP
from fp4ward.formats.fp8 import E4M3_MAX, E4M3_MIN, first_index, to_e4m3, widen

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_PAIR = {2: torch.int32, 4: torch.int64, 8: torch.complex128}  # a type as wide as two elements


def decode_codes(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """e2m1 values [..., K] of packed u8 [..., K/2], low nibble first.

    One look-up gives both values of a byte: 3 ms for 2048x2048 on one core against 27 for two look-ups.
    """
    out = _pairs(dtype, packed.device).index_select(0, packed.flatten().int()).view(dtype)
    return out.view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Both values of each byte as one element. Kept: on a GPU every new table is a copy that the host waits for."""
    byte = torch.arange(256)
    values = torch.tensor(E2M1, dtype=dtype)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1).view(_PAIR[dtype.itemsize]).squeeze(-1).to(device)


def mantissa(packed: Tensor, block_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * block scale [..., K]: exact in bf16, f16, f32 and f64."""
    out = decode_codes(packed, dtype)
    out.view(*block_scale.shape, NVFP4_GROUP).mul_(widen(block_scale, dtype)[..., None])
    return out


def expand_global(global_scale: Tensor | float, rows: tuple[int, ...]) -> Tensor:
    """f32 of shape `rows` = (..., N) from one global scale, one a leading index (...), or one a row (..., N)."""
    value = torch.as_tensor(global_scale, dtype=torch.float32)
    if tuple(value.shape) == rows:
        return value
    if value.numel() == 1:
        return value.reshape(()).expand(rows).contiguous()
    if value.numel() == math.prod(rows[:-1]):
        return value.reshape(*rows[:-1], 1).expand(rows).contiguous()
    raise UserError(f"a global scale {list(value.shape)} does not fit the rows {list(rows)} of an NVFP4 weight")


def decode(
    packed: Tensor, block_scale: Tensor, global_scale: Tensor | float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(code * block) * global [..., N, K]; global_scale as expand_global takes it.

    The first product is exact, so f32 rounds once and f64 not at all; bf16 and f16 are the f32 value rounded again.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = expand_global(global_scale, tuple(packed.shape[:-1])).to(packed.device, wide)
    return mantissa(packed, block_scale, wide).mul_(rows[..., None]).to(dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """Codes (u8, one an element) of the nearest e2m1 values; ties go to the even code, beyond 6 saturates."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    code = torch.bucketize(magnitude, torch.tensor(_MIDPOINTS, dtype=x.dtype, device=x.device), out_int32=True)
    # bucketize gives a tie to the lower neighbour, which is the odd one at every second midpoint.
    for midpoint in _MIDPOINTS[1::2]:
        code += magnitude == midpoint
    return (code + 8 * (x < 0)).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """u8 [..., K/2] from codes [..., K]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def encode(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, block_scale, global_scale) of finite w [..., N, K]; global_scale f32 [...], one for each [N, K].

    As ModelOpt quantizes weights: g = amax/(6*448), s = e4m3(block amax/(6*g)) but at least 2^-9, and 1 for a zero
    block; codes round to nearest even. An all-zero weight gets g = 1, which is legal everywhere. Computed in f32, or in
    f64 for f64 input. Encoding a decoded weight gives it back (a -0 as +0, as the exporters do) if its block scales are
    2^-7 or more: below, e4m3 is so coarse that a block may not reach code 6.
    """
    if w.shape[-1] % NVFP4_GROUP:
        raise UserError(f"a weight {list(w.shape)} cannot be NVFP4: K must be a multiple of {NVFP4_GROUP}")
    w = w if w.dtype == torch.float64 else w.float()
    g = (w.abs().amax((-2, -1)) / (E2M1_MAX * E4M3_MAX)).float()
    if not bool(torch.isfinite(g).all()):
        raise UserError("a weight with NaN or Inf cannot be encoded as NVFP4")
    g = torch.where(g >= torch.finfo(torch.float32).tiny, g, 1.0)
    packed, scale = _quantize(w, g[..., None, None], zero_block=1.0)
    return packed, scale, g


def quantize_activation(x: Tensor, input_scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """(packed, block_scale) of activations x [..., K] in a W4A4 layer; their value is decode(both, input_scale).

    s = e4m3(clamp(block amax/(6*input_scale), 2^-9, 448)), codes = nearest even e2m1 of x/(s*input_scale).
    """
    x = x if x.dtype == torch.float64 else x.float()
    return _quantize(x, torch.as_tensor(input_scale, dtype=torch.float32, device=x.device), zero_block=0.0)


def _quantize(x: Tensor, g: Tensor, zero_block: float) -> tuple[Tensor, Tensor]:
    """Packed codes and block scales of x [..., K] for a given global scale that broadcasts against [..., K/16]."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // NVFP4_GROUP, NVFP4_GROUP)
    g = g.to(x.dtype)
    ratio = blocks.abs().amax(-1) / (E2M1_MAX * g)
    scale = to_e4m3(torch.where(ratio == 0, zero_block, ratio).clamp(min=E4M3_MIN))
    codes = round_e2m1(blocks / (scale.to(x.dtype) * g)[..., None])
    return pack(codes.flatten(-2)), scale


def check_block_scale(name: str, scale: Tensor) -> bool:
    """True when every block scale is zero. UserError naming tensor and index for a NaN (0x7f, 0xff) or a negative one.

    0x80 (minus zero) counts as zero. A good tensor costs one reduction over its bytes and no temporary.
    """
    if scale.numel() == 0:
        return True
    byte = scale.view(torch.uint8)
    largest = int(byte.max())
    if largest < 0x7F:
        return largest == 0
    bad = (byte == 0x7F) | (byte > 0x80)
    if bool(bad.any()):
        where = first_index(bad)
        value = int(byte[where])
        what = "NaN" if value & 0x7F == 0x7F else f"negative ({float(scale[where])})"
        raise UserError(
            f"tensor {name}: block scale at {list(where)} is {what} (byte {value:#04x}); NVFP4 scales are finite and "
            f"not negative, so the file is damaged: fetch or export it again"
        )
    return not bool((byte & 0x7F).any())


def check_global(name: str, value: float, *, all_zero_blocks: bool, expert: bool) -> float:
    """The global scale to use, given the multiplier read from tensor `name` (after any reciprocal).

    UserError for 0, negative, NaN or Inf, except that an expert that was never used may have all-zero blocks with a
    global of 0, or Inf (the reciprocal of a stored 0): its weight is zero, and 0 is returned so that no 0*Inf arises.
    """
    if math.isfinite(value) and value > 0:
        return value
    if expert and all_zero_blocks and (value == 0 or value == math.inf):
        return 0.0
    raise UserError(
        f"tensor {name}: the global scale is {value}; it must be finite and positive, so the checkpoint is damaged: "
        f"export it again",
        "global-scale",
    )
