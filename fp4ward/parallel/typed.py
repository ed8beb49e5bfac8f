"""Sharding checked as types, without a GPU: a model's real forward on tiny tensors under spmd_types.

Each rank of a fake process group is played in turn. Every layer op is a boundary: its inputs must have the types that
the op states (replicated, sharded along a dimension, or partial), its output gets the type that it states; what the
model does between ops, sums above all, is typed by spmd_types' global mode. A collective must meet the type it is for.
So a replicated value added to a partial sum is an error with the names of both, whatever options are set.

What this cannot see: numbers. A shard of the right shape with another rank's values passes here.
"""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fp4ward.errors import UserError, one_line
from fp4ward.facts import PagedKv, StateSpec
from fp4ward.formats.formats import F32
from fp4ward.formats.weight import Weight
from fp4ward.layers.step import KvCache, RecurrentState, SequenceStep, Step
from fp4ward.parallel.collectives import Mesh
from fp4ward.parallel.placement import Layout, OpTypes, P, Placement, R, Replicate, S, Slot, Type
from fp4ward.pieces import block_of, local_shape, whole_blocks

OWN = S(0)  # tokens, on the axis of groups
TOKENS, ROWS = 5, 16  # of the prompt, and of the cache


def check_sharding(
    facts: ModuleType,
    model: ModuleType,
    config: Mapping[str, Any],
    layout: Layout,
    rank: int,
    *,
    replicate: Sequence[str] = (),
    place: Callable[[Slot], Placement] = lambda slot: slot.placement,
) -> None:
    """Run the forward of `model` for the architecture of config.json `config`, cut for `rank` of `layout`.

    facts, model: the architecture's modules. replicate: patterns of blocks that every rank holds whole. place: the
    placement of a slot, where another one is to be tried. UserError when something does not fit: the line of the model,
    both operands with their types and the layers that they came from.
    """
    try:
        import spmd_types
        import spmd_types.checker
    except ImportError:
        raise UserError(
            "checking the sharding needs the package spmd_types; install fp4ward with its [check] extra"
        ) from None
    from torch.distributed.device_mesh import init_device_mesh

    spmd: Any = spmd_types
    if dist.is_initialized():
        raise UserError("checking the sharding needs a process that has joined no process group")
    cfg, whole = _tiny(facts, facts.parse(config), layout.tp, replicate)
    slots = [
        dataclasses.replace(slot, placement=Replicate() if block_of(slot.name) in whole else place(slot))
        for slot in facts.weights(cfg)
    ]
    origins = _Origins()
    dist.init_process_group(backend="fake", rank=rank, world_size=layout.tp)
    try:
        mesh = init_device_mesh("cpu", (layout.adp, layout.attention), mesh_dim_names=("groups", "tensor"))
        typed = _Typed(spmd, mesh.get_group("tensor"), mesh.get_group("groups"), origins)
        here = Mesh(layout, rank, typed.tensor, typed.groups)
        with mock.patch.object(model, "weights", lambda _: slots):
            built = model.Model(cfg, _tensors(slots, rank, layout), torch.float32, here)
        typed.wrap(built, model.__name__)
        each = [facts.state_spec(cfg, r, layout.attention) for r in range(layout.attention)]  # heads must fit on all
        state = [
            _state(full if _mixer_whole(i, whole) else cut)
            for i, (full, cut) in enumerate(zip(facts.state_spec(cfg), each[rank % layout.attention], strict=True))
        ]
        step = _step()
        with spmd.set_current_mesh(mesh), spmd.checker.typecheck(local=False), typed.collectives(model), origins:
            for tensor in (step.token_ids, step.positions, step.cache_at, step.logits_at):
                spmd.assert_type(tensor, typed.of(Type("R")))
            logits = built.forward(step, state)
            spmd.assert_type(logits, typed.of(Type("R")))  # every rank samples the same token
    except Exception as e:
        where = f"sharding over {layout.tp} ranks, seen from rank {rank}"
        raise UserError(f"{where}: {_line_of(model, e)}{origins.operands}{_short(e)}") from e
    finally:
        dist.destroy_process_group()


def _tiny(facts: ModuleType, cfg: Any, ranks: int, replicate: Sequence[str]) -> tuple[Any, set[str]]:
    """facts.tiny with one layer of each kind and set of whole blocks; and those blocks by their names there."""
    whole = whole_blocks(facts.weights(cfg), replicate)
    kept = {i: frozenset(b for b in whole if b.startswith(f"layers.{i}.")) for i in range(len(cfg.layer_types))}
    alike = {(kind, frozenset(b.split(".", 2)[2] for b in kept[i])): None for i, kind in enumerate(cfg.layer_types)}
    small = dataclasses.replace(facts.tiny(cfg, ranks), layer_types=tuple(kind for kind, _ in alike))
    inside = {f"layers.{n}.{b}" for n, (_, blocks) in enumerate(alike) for b in blocks}
    return small, inside | {b for b in whole if not b.startswith("layers.")}


def _mixer_whole(layer: int, whole: set[str]) -> bool:
    return any(b in whole for b in (f"layers.{layer}.{m}" for m in ("self_attn", "linear_attn", "mixer")))


def _tensors(slots: Sequence[Slot], rank: int, layout: Layout) -> dict[str, Weight | Tensor]:
    """This rank's share of every weight, all zeros."""
    out: dict[str, Weight | Tensor] = {}
    for slot in slots:
        zeros = torch.zeros(local_shape(slot, F32, layout, rank, False))
        out[slot.name] = zeros if slot.kind == "tensor" else Weight(F32, {"data": zeros})
    return out


def _state(spec: StateSpec) -> KvCache | RecurrentState:
    """Room for one sequence."""
    if isinstance(spec, PagedKv):
        shape = (ROWS, spec.heads, spec.head_dim)
        return KvCache(torch.zeros(shape), torch.zeros(shape))
    return RecurrentState(torch.zeros(1, *spec.conv), torch.zeros(1, *spec.ssm))


def _step() -> Step:
    """A prompt of a few tokens in slot 0."""
    ids, positions, rows, cache = (torch.arange(TOKENS) for _ in range(4))
    none = torch.empty(0, dtype=torch.long)
    whole = SequenceStep(0, TOKENS, 0, 0, cache)
    return Step(ids, positions, rows, torch.tensor([TOKENS - 1]), (whole,), none, none.clone())


def _line_of(model: ModuleType, error: BaseException) -> str:
    """The innermost line of the model's own file in the error's trace, as "file:line `code`: "."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == model.__file__]
    if not frames:
        return ""
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} `{frames[-1].line}`: "


def _short(error: Exception) -> str:
    """spmd_types' first sentence; what follows is advice on code."""
    return one_line(str(error).partition("\n")[0].partition(" (sum of partial sums")[0])


class _Typed:
    """Turns our types into spmd_types', on both axes."""

    def __init__(self, spmd: Any, tensor: dist.ProcessGroup, groups: dist.ProcessGroup, origins: _Origins) -> None:
        self.spmd = spmd
        self.tensor, self.groups = tensor, groups
        self.origins = origins

    def of(self, tensor: Type, groups: Type = OWN) -> dict[Any, Any]:
        def one(t: Type) -> Any:
            return self.spmd.S(t.dim) if t.kind == "S" else {"R": self.spmd.R, "P": self.spmd.P}[t.kind]

        return {self.tensor: one(tensor), self.groups: one(groups)}

    def _on_groups(self, op: OpTypes, args: Sequence[Tensor]) -> tuple[Type, Type]:
        """What an op takes and gives over groups; if it says nothing, tokens as the arguments have them."""
        several = self.groups.size() > 1  # an axis of one rank has no types
        given = {self.spmd.get_axis_local_type(x, self.groups) for x in args if several}
        return op.groups or ((R, R) if given == {self.spmd.R} else (OWN, OWN))

    def _text(self, tensor: Type, groups: Type) -> str:
        return str(tensor) if self.groups.size() == 1 else f"{tensor}, {groups} over groups"

    def wrap(self, part: Any, models: str) -> None:
        """Make every layer op below `part`, a block of the module `models`, a boundary with the types it states."""
        whole = getattr(part, "output", None) == R
        for name, value in list(vars(part).items()):
            if hasattr(value, "types"):
                setattr(part, name, self._boundary(value, whole))
            for inner in value if isinstance(value, list) else [value]:
                if type(inner).__module__ == models:
                    self.wrap(inner, models)

    def _boundary(self, op: Any, whole: bool) -> Any:
        types, name = op.types, getattr(op, "name", type(op).__name__)
        if whole and "types" not in vars(op):  # an op on heads, in a block that has all of them on every rank
            types = OpTypes(tuple(R if t.kind == "S" else t for t in types.inputs), R, types.groups)
        count = len(types.inputs)

        def call(*args: Any) -> Tensor:
            def body(*tensors: Tensor) -> Tensor:
                with self.spmd.no_typecheck():
                    result: Tensor = op(*tensors, *args[count:])
                return result

            body.__qualname__ = name
            before, after = self._on_groups(types, args[:count])
            wanted = tuple(self.of(t, before) for t in types.inputs)
            bounded = self.spmd.local_map(in_types=wanted, out_types=self.of(types.output, after))
            with self.origins.inside(name, args[:count], [self._text(t, before) for t in types.inputs]):
                out: Tensor = bounded(body)(*args[:count])
            self.origins.name(out, f"{name}: {self._text(types.output, after)}")
            return out

        return call

    @contextmanager
    def collectives(self, model: ModuleType) -> Iterator[None]:
        """The model's communication, checked: a value must have the type that it is declared to have."""
        spmd = self.spmd

        def all_tokens(x: Tensor, groups: Any) -> Any:
            return x if groups is None else spmd.all_gather(x, groups, src=spmd.S(0), dst=spmd.R)

        def own_tokens(x: Tensor, groups: Any) -> Any:
            return x if groups is None else spmd.reduce_scatter(x, groups, src=spmd.P, dst=spmd.S(0))

        def replicated(x: Tensor, kind: Type, tensor: Any) -> Any:
            if kind == R:
                spmd.assert_type(x, self.of(R))
                return x
            collective, last = (spmd.all_reduce, spmd.P) if kind == P else (spmd.all_gather, spmd.S(x.dim() - 1))
            return collective(x, tensor, src=last, dst=spmd.R)

        found = {"replicated": replicated, "all_tokens": all_tokens, "own_tokens": own_tokens}
        # torch has new names for what spmd_types calls
        with mock.patch.dict(vars(model), found), warnings.catch_warnings(action="ignore", category=FutureWarning):
            yield


class _Origins(TorchFunctionMode):
    """Remembers which layers a value came from, to name the operands of what fails."""

    def __init__(self) -> None:
        super().__init__()
        self.operands = ""

    def name(self, x: Tensor, name: str) -> None:
        x._came_from = name  # type: ignore[attr-defined]

    def _of(self, x: Tensor) -> str:
        return getattr(x, "_came_from", "an input")

    @contextmanager
    def inside(self, name: str, args: Sequence[Any], wanted: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except Exception:
            given = ", ".join(f"{self._of(a)} where {w} is wanted" for a, w in zip(args, wanted, strict=True))
            self.operands = self.operands or f"{name} takes ({given}): "
            raise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            named = " and ".join(f"({self._of(x)})" for x in tensors)
            self.operands = self.operands or f"{getattr(func, '__name__', func)} of {named}: "
            raise
        known = list(dict.fromkeys(self._of(x) for x in tensors if hasattr(x, "_came_from")))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and known and not hasattr(made, "_came_from"):
                self.name(made, " with ".join(known[-2:]))
        return out
