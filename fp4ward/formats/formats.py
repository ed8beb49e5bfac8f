"""What a stored weight can be: one record per format, and recognition from safetensors headers alone.

Standard library only: `fp4ward plan` reads this without torch. The numbers are in nvfp4.py and fp8.py.

A module (the dotted name without its last part) is stored as a handful of tensors whose last name parts ("leaves")
differ between exporters. `recognise` maps leaves to the components of a `Format`:

| format      | ModelOpt leaves                        | compressed-tensors leaves                          |
|-------------|----------------------------------------|----------------------------------------------------|
| nvfp4       | weight U8, weight_scale, weight_scale_2| weight_packed, weight_scale, weight_global_scale   |
| fp8_tensor  | weight F8, weight_scale []             | weight F8, weight_scale [1]                        |
| fp8_channel | weight F8, weight_scale [N]            | weight F8, weight_scale [N,1]                      |
| fp8_block   | weight F8, weight_scale 4-D            | weight F8, weight_scale(_inv) [N/128,K/128]        |
| bf16 f16 f32| weight                                 | weight                                             |

compressed-tensors stores the reciprocal of the global scale; `Component.reciprocal` says so. What is recognised but
cannot run (MXFP8, integer weights, unknown leaves) is refused by name: nothing is ignored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fp4ward.errors import UserError

NVFP4_GROUP = 16
FP8_BLOCK = 128


@dataclass(frozen=True)
class Format:
    """How a weight is stored, and, a separate fact, what its layer's input is quantized to.

    bits: stored bits a weight, block scales included. block: (rows, columns) that share one block scale, None without.
    components: names of the tensors in memory. activation: "none", "fp8" or "nvfp4".
    """

    name: str
    bits: float
    block: tuple[int, int] | None
    components: tuple[str, ...]
    activation: str = "none"

    def with_activation(self, activation: str) -> Format:
        return _with_activation(self, activation)

    @property
    def quantized(self) -> bool:
        return self.bits < 16

    @property
    def column_unit(self) -> int:
        """Columns that a cut along K must keep together: those that share a scale."""
        return self.block[1] if self.block else 1

    @property
    def label(self) -> str:
        """Name for people: the weight's format and the width of the activations."""
        if self.name == "nvfp4":
            return "nvfp4 W4A4" if self.activation == "nvfp4" else "nvfp4 W4A16"
        if self.name.startswith("fp8"):
            return f"{self.name} W8A8" if self.activation == "fp8" else f"{self.name} W8A16"
        return self.name


@functools.cache  # the same few for hundreds of thousands of experts
def _with_activation(format: Format, activation: str) -> Format:
    return replace(format, activation=activation)


NVFP4 = Format("nvfp4", 4.5, (1, NVFP4_GROUP), ("packed", "block_scale", "global_scale"))
FP8_TENSOR = Format("fp8_tensor", 8, None, ("data", "scale"))
FP8_CHANNEL = Format("fp8_channel", 8, None, ("data", "scale"))
FP8_BLOCK_SCALED = Format("fp8_block", 8, (FP8_BLOCK, FP8_BLOCK), ("data", "scale"))
BF16 = Format("bf16", 16, None, ("data",))
F16 = Format("f16", 16, None, ("data",))
F32 = Format("f32", 32, None, ("data",))

FORMATS = {f.name: f for f in (NVFP4, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK_SCALED, BF16, F16, F32)}
DENSE = {"BF16": BF16, "F16": F16, "F32": F32}
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


# Headers and what is made of them are never changed, but not frozen: there are hundreds of thousands of them in a large
# checkpoint, and a frozen one takes four times as long to make.
@dataclass(unsafe_hash=True, slots=True)
class Header:
    """One tensor as a safetensors header describes it. name is the raw name in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(unsafe_hash=True, slots=True)
class Component:
    """Where one component of a weight is stored: a raw tensor, and whether it holds the reciprocal."""

    header: Header
    reciprocal: bool = False


@dataclass(unsafe_hash=True, slots=True)
class Stored:
    """One module's weight as found in the headers. shape is logical: (N, K), or (E, N, K) when experts are stacked.

    components: component name -> where it is. extras: leaves that belong to the weight without being part of it
    ("bias", "input_scale", "pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "k_scale", "v_scale").
    """

    module: str
    format: Format
    shape: tuple[int, ...]
    components: Mapping[str, Component]
    extras: Mapping[str, Component]


# Leaves that describe the activation or the cache rather than the weight.
_OWN = ("input_scale", "bias", "pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
EXTRA_LEAVES = {leaf: leaf for leaf in (*_OWN, "k_scale", "v_scale", "q_scale", "output_scale")}
EXTRA_LEAVES["input_global_scale"] = "input_scale"  # compressed-tensors' reciprocal
SCALE_LEAVES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")
KV_LEAVES = ("k_scale", "v_scale")
WEIGHT_LEAVES = {"weight", "weight_packed", *SCALE_LEAVES}


def recognise(module: str, leaves: Mapping[str, Header]) -> Stored | None:
    """Format and components of `module` from its leaves; None when it holds no weight (KV scales only, say).

    Raises UserError naming the module and tensor for anything that is not understood.
    """
    extras: dict[str, Component] = {}
    for leaf, h in leaves.items():
        if leaf in EXTRA_LEAVES:
            extras[EXTRA_LEAVES[leaf]] = Component(h, leaf == "input_global_scale")
        elif leaf not in WEIGHT_LEAVES:
            raise UserError(
                f"tensor {h.name}: '{leaf}' is no part of a format that fp4ward knows "
                f"(NVFP4, FP8, BF16, F16, F32), so the layer {module} cannot be read"
            )
    packed, weight, scale = (leaves.get(leaf) for leaf in ("weight_packed", "weight", "weight_scale"))
    if packed is not None and weight is not None:
        raise UserError(f"layer {module}: both {packed.name} and {weight.name} are stored; one weight is expected")
    if packed is None and weight is None:
        orphan = next((leaves[leaf] for leaf in SCALE_LEAVES if leaf in leaves), None)
        if orphan is not None:
            raise UserError(f"tensor {orphan.name}: a scale without its weight; the checkpoint is incomplete")
        return None
    if packed is not None:
        return _nvfp4(module, leaves, ("weight_packed", "weight_scale", "weight_global_scale"), extras)
    assert weight is not None
    if weight.dtype == "U8" and "weight_scale_2" in leaves:
        return _nvfp4(module, leaves, ("weight", "weight_scale", "weight_scale_2"), extras)
    if weight.dtype == "F8_E4M3":
        return _fp8(module, weight, leaves, extras)
    if weight.dtype in DENSE:
        for leaf in SCALE_LEAVES:
            if leaf in leaves:
                raise UserError(f"tensor {leaves[leaf].name}: a scale beside {weight.name}, stored as {weight.dtype}")
        return Stored(module, DENSE[weight.dtype], weight.shape, {"data": Component(weight)}, extras)
    if weight.dtype == "U8":
        raise UserError(
            f"tensor {weight.name}: packed bytes without weight_scale_2, so not NVFP4 "
            f"(MXFP4 and integer formats are not supported)"
        )
    hint = " (MXFP8 is not supported)" if scale is not None and scale.dtype in ("U8", "F8_E8M0") else ""
    raise UserError(f"tensor {weight.name}: stored as {weight.dtype}, which fp4ward cannot run{hint}")


def _nvfp4(
    module: str, leaves: Mapping[str, Header], names: tuple[str, str, str], extras: Mapping[str, Component]
) -> Stored:
    """names: the leaves of packed codes, block scales and global scale (weight_global_scale holds its reciprocal)."""
    _no_other_scale(leaves, set(names))
    packed = leaves[names[0]]
    if packed.dtype != "U8" or len(packed.shape) < 2:
        raise UserError(f"tensor {packed.name}: {packed.dtype} {list(packed.shape)}; NVFP4 packs U8 [N, K/2]")
    *lead, n, half = packed.shape
    k = 2 * half
    if k == 0 or k % NVFP4_GROUP:
        raise UserError(f"tensor {packed.name}: K={k} is not a multiple of {NVFP4_GROUP}, which NVFP4 requires")
    for leaf in names:
        if leaf not in leaves:
            raise UserError(f"layer {module}: {packed.name} is packed FP4 but {module}.{leaf} is missing")
    scale, global_ = leaves[names[1]], leaves[names[2]]
    want = (*lead, n, k // NVFP4_GROUP)
    if scale.dtype != "F8_E4M3" or scale.shape != want:
        raise UserError(
            f"tensor {scale.name}: {scale.dtype} {list(scale.shape)}; NVFP4 wants F8_E4M3 {list(want)} "
            f"(one scale for every {NVFP4_GROUP} columns of {packed.name})"
        )
    if global_.dtype != "F32" or math.prod(global_.shape) not in (1, math.prod(lead)):
        raise UserError(
            f"tensor {global_.name}: {global_.dtype} {list(global_.shape)}; one F32 global scale is expected"
        )
    parts = {
        "packed": Component(packed),
        "block_scale": Component(scale),
        "global_scale": Component(global_, reciprocal=names[2] == "weight_global_scale"),
    }
    return Stored(module, NVFP4, (*lead, n, k), parts, extras)


def _fp8(module: str, weight: Header, leaves: Mapping[str, Header], extras: Mapping[str, Component]) -> Stored:
    _no_other_scale(leaves, {"weight", "weight_scale", "weight_scale_inv"})
    found = [leaves[leaf] for leaf in ("weight_scale", "weight_scale_inv") if leaf in leaves]
    if len(found) != 1:
        what = "no scale" if not found else "two scales"
        raise UserError(f"tensor {weight.name}: FP8 with {what}; one weight_scale or weight_scale_inv is expected")
    scale = found[0]
    if len(weight.shape) < 2:
        raise UserError(f"tensor {weight.name}: FP8 {list(weight.shape)}; [N, K] is expected")
    n, k = weight.shape[-2:]
    if scale.dtype not in DENSE:
        raise UserError(f"tensor {scale.name}: {scale.dtype}; FP8 scales are F32, F16 or BF16 (MXFP8 is not supported)")
    fmt = fp8_format(scale.shape, weight.shape)
    if fmt is None:
        blocks = [-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)]
        raise UserError(
            f"tensor {scale.name}: {list(scale.shape)} fits no FP8 scaling of {weight.name} {list(weight.shape)}: "
            f"[] (tensor), [{n}, 1] (channel) or {blocks} (128x128 blocks)"
        )
    return Stored(module, fmt, weight.shape, {"data": Component(weight), "scale": Component(scale)}, extras)


def fp8_format(scale: tuple[int, ...], weight: tuple[int, ...]) -> Format | None:
    """How a scale of this stored shape scales an FP8 weight (*lead, N, K); None if it cannot.

    () or (1,) is one scale; *lead followed by () or (1,) one a tensor, by (N,) or (N, 1) one a row (channel), by
    (N/128, K/128) or ModelOpt's (N/128, 1, K/128, 1) one a block, of which the last may be short.
    """
    *lead, n, k = weight
    blocks = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    rest = scale[len(lead) :] if scale[: len(lead)] == tuple(lead) else None
    if scale in ((), (1,)) or rest in ((), (1,)):
        return FP8_TENSOR
    if rest in ((n,), (n, 1)):
        return FP8_CHANNEL
    return FP8_BLOCK_SCALED if rest in (blocks, (blocks[0], 1, blocks[1], 1)) else None


def _no_other_scale(leaves: Mapping[str, Header], used: set[str]) -> None:
    for leaf in SCALE_LEAVES:
        if leaf in leaves and leaf not in used:
            raise UserError(f"tensor {leaves[leaf].name}: unexpected beside {', '.join(sorted(used))}")
