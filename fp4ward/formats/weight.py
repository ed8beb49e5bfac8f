"""A weight in memory: its format and its parts, sliced and joined on logical dimensions.

Legend: N output rows, K input columns, `...` nothing or (E,) for stacked experts. Parts by format:

| format                  | parts                                                                               |
|-------------------------|-------------------------------------------------------------------------------------|
| nvfp4                   | packed u8 [...,N,K/2], block_scale e4m3 [...,N,K/16], global_scale f32 [...,N]      |
| fp8_tensor, fp8_channel | data e4m3 [...,N,K], scale f32 [...,N,1]                                            |
| fp8_block               | data e4m3 [...,N,K], scale f32 [...,N,ceil(K/128)]                                  |
| bf16, f16, f32          | data [...,N,K]                                                                      |

Scales that a file stores once per tensor or per 128 rows are expanded to rows, so that q|k|v with unequal scales join
exactly and any row range is a view: after the leading dimensions, N is the first dimension of every part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4ward.errors import UserError
from fp4ward.formats import fp8, nvfp4
from fp4ward.formats.formats import F32, FP8_BLOCK, FP8_CHANNEL, NVFP4_GROUP, Format

_DENSE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def part_shapes(format: Format, shape: Sequence[int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of every part of a weight of logical `shape` (..., N, K). UserError when K does not fit."""
    *lead, n, k = shape
    rows = (*lead, n)
    if format.name == "nvfp4":
        if k % NVFP4_GROUP:
            raise UserError(f"an NVFP4 weight {list(shape)}: K={k} must be a multiple of {NVFP4_GROUP}")
        return {
            "packed": (torch.uint8, (*rows, k // 2)),
            "block_scale": (torch.float8_e4m3fn, (*rows, k // NVFP4_GROUP)),
            "global_scale": (torch.float32, rows),
        }
    if format.name in _DENSE:
        return {"data": (_DENSE[format.name], (*rows, k))}
    scales = -(-k // FP8_BLOCK) if format.name == "fp8_block" else 1
    return {"data": (torch.float8_e4m3fn, (*rows, k)), "scale": (torch.float32, (*rows, scales))}


@dataclass(frozen=True, eq=False)
class Weight:
    """Format and parts of one weight; immutable, though slices share memory. ValueError when the parts do not match."""

    format: Format
    parts: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        found = {name: (part.dtype, tuple(part.shape)) for name, part in self.parts.items()}
        if found != part_shapes(self.format, self.shape):
            raise ValueError(f"parts {found} do not make a {self.format.name} weight")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape (..., N, K)."""
        if self.format.name == "nvfp4":
            *rows, half = self.parts["packed"].shape
            return (*rows, 2 * half)
        return tuple(self.parts["data"].shape)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    def mantissa(self, dtype: torch.dtype) -> Tensor:
        """[...,N,K]: the weight without its per-row scale. May be the stored tensor itself: do not write into it.

        NVFP4 code*block and FP8 codes are exact in bf16, f16, f32 and f64. fp8_block has no per-row scale: data*scale,
        computed in f32 or wider and rounded once to `dtype`.
        """
        if self.format.name == "nvfp4":
            return nvfp4.mantissa(self.parts["packed"], self.parts["block_scale"], dtype)
        data = self.parts["data"]
        if self.format.name == "fp8_block":
            return fp8.decode_rows(data, self.parts["scale"], dtype)
        return fp8.widen(data, dtype) if self.format.quantized else data.to(dtype)

    def row_scale(self) -> Tensor | None:
        """f32 [...,N] that multiplies the rows of `mantissa`; None for fp8_block and unquantized weights."""
        if self.format.name == "nvfp4":
            return self.parts["global_scale"]
        if self.format.name in ("fp8_tensor", "fp8_channel"):
            return self.parts["scale"][..., 0]
        return None

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[...,N,K]: the dequantized weight: exact in f64, rounded once in f32, and from f32 once more in 16 bits."""
        if self.format.name == "nvfp4":
            return nvfp4.decode(self.parts["packed"], self.parts["block_scale"], self.parts["global_scale"], dtype)
        if self.format.quantized:
            return fp8.decode_rows(self.parts["data"], self.parts["scale"], dtype)
        return self.parts["data"].to(dtype)

    def unpacked(self) -> Weight:
        """The same weight as plain f32, dequantized once: seven times NVFP4's memory, and no decoding any more."""
        return Weight(F32.with_activation(self.format.activation), {"data": self.dense(torch.float32)})

    def rows(self, start: int, stop: int) -> Weight:
        """Rows start:stop along N, as views. UserError when they are out of range."""
        *lead, n, k = self.shape
        if not 0 <= start <= stop <= n:
            raise UserError(f"rows {start}:{stop} of a weight {[*lead, n, k]} do not exist")
        return self._each(lambda part: part.narrow(len(lead), start, stop - start))

    def columns(self, start: int, stop: int) -> Weight:
        """Columns start:stop along K, as views.

        UserError unless both ends fall on a scale boundary: 16 for nvfp4, 128 (or the end of K) for fp8_block.
        """
        *_, k = self.shape
        unit = self.format.column_unit
        if not 0 <= start <= stop <= k:
            raise UserError(f"columns {start}:{stop} of a weight {list(self.shape)} do not exist")
        if start % unit or (stop % unit and stop != k):
            raise UserError(
                f"columns {start}:{stop} of a {self.format.name} weight {list(self.shape)} cut through a block; "
                f"cut at multiples of {unit}"
            )
        if self.format.name == "nvfp4":
            packed, block, glob = (self.parts[name] for name in self.format.components)
            cut = (start // NVFP4_GROUP, stop // NVFP4_GROUP)
            parts = {
                "packed": packed[..., start // 2 : stop // 2],
                "block_scale": block[..., cut[0] : cut[1]],
                "global_scale": glob,
            }
            return Weight(self.format, parts)
        parts = dict(self.parts)
        parts["data"] = parts["data"][..., start:stop]
        if self.format.name == "fp8_block":
            parts["scale"] = parts["scale"][..., start // FP8_BLOCK : -(-stop // FP8_BLOCK)]
        return Weight(self.format, parts)

    def expert(self, e: int) -> Weight:
        """Weight [N,K] of expert `e` of stacked experts, as a view. IndexError unless 0 <= e < E."""
        shape = self.shape
        if len(shape) < 3 or not 0 <= e < shape[0]:
            raise IndexError(f"expert {e} of a weight {list(shape)} does not exist")
        return self._each(lambda part: part[e])

    def to(self, device: torch.device | str) -> Weight:
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Weight:
        # Not through __init__: a view of checked parts needs no check, and decoding makes thousands of them a second.
        new = object.__new__(Weight)
        object.__setattr__(new, "format", self.format)
        object.__setattr__(new, "parts", {name: change(part) for name, part in self.parts.items()})
        return new


def concat(weights: Sequence[Weight]) -> Weight:
    """Join along N; every row keeps its own scales, nothing is requantized.

    UserError when storage formats, activations, K or leading dimensions differ. fp8_tensor with fp8_channel gives
    fp8_channel (in memory they are the same).
    """
    format = _common(weights)
    shapes = {(*w.shape[:-2], w.shape[-1]) for w in weights}
    if len(shapes) > 1:
        raise UserError(f"weights {[list(w.shape) for w in weights]} cannot be concatenated along N")
    dim = len(weights[0].shape) - 2
    parts = {name: torch.cat([w.parts[name] for w in weights], dim) for name in format.components}
    return Weight(format, parts)


def allocate(format: Format, shape: Sequence[int], device: torch.device | str = "cpu") -> Weight:
    """Uninitialized parts for a weight of logical `shape` (this rank's share), to be filled while loading."""
    wanted = part_shapes(format, shape)
    return Weight(format, {name: torch.empty(s, dtype=d, device=device) for name, (d, s) in wanted.items()})


def _common(weights: Sequence[Weight]) -> Format:
    """The one format of all weights; the activation must agree too, for it holds for the joined layer's one input."""
    if not weights:
        raise ValueError("no weights to be concatenated")
    names = {w.format.name for w in weights}
    if names == {"fp8_tensor", "fp8_channel"}:
        names = {FP8_CHANNEL.name}
    labels = sorted({w.format.label for w in weights})
    if len(names) > 1 or len({w.format.activation for w in weights}) > 1:
        raise UserError(f"weights of different formats cannot be concatenated: {', '.join(labels)}; keep them apart")
    first = weights[0].format
    return first if first.name in names else FP8_CHANNEL.with_activation(first.activation)
