"""Where each rank's piece of a weight lies, and what an activation is on the axes of ranks. Pure.

A `Placement` is declared on the *logical* weight; the format derives the slices of packed codes and scales. Units keep
a cut where the storage allows one (16 along K for NVFP4, a head, an expert); a rank count that does not divide the
units gives the first ranks one unit more (1856 rows in units of 64 over 8 ranks: five ranks of 256, three of 192).

Ranks are groups of `Layout.attention` ranks, group by group: the tensor axis runs within a group, the other one over
groups. Activations carry one of three types on each axis: replicated (R), sharded along a dimension (S), or partial
(P), a pending sum. Each layer op states its input and output types. P times R is P, and P plus P; adding R to P is an
error. Over groups tokens are S(0), each group its own, but for experts that are spread over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp4ward.errors import UserError


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole weight."""


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` of the logical weight is cut over the ranks in whole `unit`s.

    parts: (size, unit) of concatenated pieces that are cut one by one (q|k|v in one projection); () for one piece.
    on_short: what to do when there are fewer units than ranks: "replicate" each unit on several ranks, or "error".
    """

    dim: int
    unit: int = 1
    parts: tuple[tuple[int, int], ...] = ()
    on_short: str = "error"


@dataclass(frozen=True)
class Experts:
    """Dimension 0 counts experts. Under tensor parallelism each expert is cut by `inner`; under expert parallelism
    whole experts are dealt to ranks."""

    inner: Shard | Replicate


Placement = Replicate | Shard | Experts


@dataclass(frozen=True)
class Slot:
    """A place in the model that tensors of a checkpoint fill, and how ranks share it.

    name: canonical. kind: "linear" (module with a weight [N, K] in any format), "experts" (a stack [E, N, K]),
    "tensor" (a plain float tensor: norms, convolution, A_log).
    stacked: for experts, the module that may hold all experts in one tensor, and the first of its rows that belongs
    here (gate_up_proj holds gate rows, then up rows). Per expert, the module is `experts.{e}.{last part of name}`.
    optional: may be absent (a tied lm_head).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    placement: Placement
    stacked: tuple[str, int] | None = None
    optional: bool = False


@dataclass(frozen=True)
class Layout:
    """Ranks. tp: of them in all. ep: groups that experts are dealt to, each cutting its own over tp/ep ranks. adp:
    groups that attend to requests of their own; attention, shared expert and head are cut over the tp/adp of one."""

    tp: int = 1
    ep: int = 1
    adp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("ep", self.ep), ("adp", self.adp)):
            if not 1 <= value <= 1024:
                raise UserError(f"--{name} {value}: a number of ranks from 1 to 1024 is expected")
            if self.tp % value:
                raise UserError(f"--{name} {value} does not divide --tp {self.tp}, the number of ranks")

    @property
    def attention(self) -> int:
        return self.tp // self.adp

    def experts(self, count: int, rank: int) -> tuple[int, int]:
        """First and last plus one of the experts that `rank` holds, whole or a part of each."""
        return cut(count, 1, rank * self.ep // self.tp, self.ep)


ONE_RANK = Layout()


def cut(size: int, unit: int, rank: int, ranks: int, on_short: str = "error") -> tuple[int, int]:
    """Start and stop of `rank`'s share of `size` in whole units (the last unit may be short)."""
    units = -(-size // unit)
    if units < ranks:
        if on_short != "replicate":
            raise UserError(f"{size} in units of {unit} cannot be shared by {ranks} ranks; use at most {units}")
        first = rank * units // ranks
        return first * unit, min(size, (first + 1) * unit)
    base, extra = divmod(units, ranks)
    first = rank * base + min(rank, extra)
    last = first + base + (rank < extra)
    return first * unit, min(size, last * unit)


def ranges(placement: Shard, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """The intervals of dimension `placement.dim` (of length `size`) that `rank` holds, one per concatenated part."""
    parts = placement.parts or ((size, placement.unit),)
    if sum(part for part, _ in parts) != size:
        raise UserError(f"a dimension of {size} cannot be made of parts {[part for part, _ in parts]}")
    out, base = [], 0
    for part, unit in parts:
        start, stop = cut(part, unit, rank, ranks, placement.on_short)
        out.append((base + start, base + stop))
        base += part
    return out


def intervals(slot: Slot, layout: Layout, rank: int, block: int = 1) -> list[list[tuple[int, int]]]:
    """What `rank` holds of each dimension of a slot. block: columns that share a scale. UserError where the cut is
    impossible or parts such a block."""
    out = [[(0, size)] for size in slot.shape]
    inner, ranks = slot.placement, layout.attention
    try:
        if isinstance(inner, Experts):
            out[0] = [layout.experts(slot.shape[0], rank)]
            inner, ranks = inner.inner, layout.tp // layout.ep
        if isinstance(inner, Shard):
            dim = inner.dim + (slot.kind == "experts")
            out[dim] = ranges(inner, slot.shape[dim], rank % ranks, ranks)
    except UserError as e:
        raise UserError(f"layer {slot.name}: {e}") from None
    for start, stop in out[-1]:
        if start % block or (stop % block and stop != slot.shape[-1]):
            raise UserError(
                f"layer {slot.name}: columns {start}:{stop} on rank {rank} of {layout.tp} cut through a block of "
                f"{block} that shares one scale; use another number of ranks"
            )
    return out


@dataclass(frozen=True)
class Type:
    """Type of an activation on an axis: "R" replicated, "S" sharded along `dim`, "P" partial sum."""

    kind: str
    dim: int | None = None

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind


R = Type("R")
P = Type("P")


def S(dim: int) -> Type:
    return Type("S", dim)


@dataclass(frozen=True)
class OpTypes:
    """What a layer op takes and gives on the tensor axis, in the order of its tensor arguments.

    groups: of all its inputs and of its output on the axis of groups. None for an op that treats each token by itself:
    it gives tokens as it takes them, one group's own (S(0)) or all (R).
    """

    inputs: tuple[Type, ...]
    output: Type
    groups: tuple[Type, Type] | None = None


COLUMN = OpTypes((R,), S(-1))
ROW = OpTypes((S(-1),), P)
LOCAL = OpTypes((R,), R)


def linear_types(placement: Placement) -> OpTypes:
    """Types of y = x W^T for a weight [N, K]: cut along N gives a sharded output, along K a partial one."""
    if isinstance(placement, Shard):
        return COLUMN if placement.dim == 0 else ROW
    return LOCAL


def experts_types(name: str, placements: tuple[Placement, ...]) -> OpTypes:
    """Types of x, router logits -> sum of the chosen experts: of all tokens, where experts are spread over all ranks.

    placements: of gate and up (cut along their rows) and down (along its columns). UserError when they do not compose.
    """
    if all(isinstance(p, Replicate) for p in placements):
        return OpTypes((R, R), R)
    cuts = [p.inner.dim if isinstance(p, Experts) and isinstance(p.inner, Shard) else None for p in placements]
    if cuts != [0, 0, 1]:
        raise UserError(f"{name}: gate and up cut along their rows and down along its columns is expected, not {cuts}")
    return OpTypes((R, R), P, groups=(R, P))
