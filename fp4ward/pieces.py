"""A checkpoint as planning sees it: what is stored, from headers or from JSON alone, cut for every rank. Standard
library only."""

from __future__ import annotations

import fnmatch
import gc
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4ward import facts
from fp4ward.checkpoint.assign import Assignment, assign
from fp4ward.checkpoint.index import Index, open_documents, open_index, sees_tensors
from fp4ward.errors import UserError, shown
from fp4ward.facts import PagedKv, StateSpec
from fp4ward.formats.formats import DENSE, F32, FP8_BLOCK_SCALED, FP8_CHANNEL, FP8_TENSOR, NVFP4, Format
from fp4ward.formats.scheme import Notice, Scheme, kv_notices, read_scheme
from fp4ward.kernels.specs import EXPERTS, LayerDesc
from fp4ward.parallel.placement import Experts, Layout, Replicate, Slot, cut, intervals

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, eq=False)
class Subject:
    """A checkpoint as far as planning goes. formats: slot -> format in the checkpoint. aliases: slots without a tensor
    of their own (a tied head). seen: whether headers were read, or only JSON. cfg and facts: the architecture's. index,
    assigned: for those who then load the weights; assigned is None where tensors were not seen."""

    name: str
    facts: Any
    cfg: Any
    slots: tuple[Slot, ...]
    formats: Mapping[str, Format]
    aliases: Mapping[str, str]
    kv_cache: str | None
    seen: bool
    notices: tuple[Notice, ...] = ()
    index: Index | None = None
    assigned: Assignment | None = None


def read(folder: Path, name: str = "", *, weights: bool = False, dummy: bool = False) -> Subject:
    """From a checkpoint's headers, or from its JSON alone where there are no safetensors and no weights are needed.
    dummy: weights will be drawn, which a notice says. UserError names the fault."""
    collecting = gc.isenabled()
    gc.disable()  # 370,000 headers that all stay alive: 14 s with the collector looking at them, 7 without
    try:
        return _read(folder, name, weights or sees_tensors(folder), dummy)
    finally:
        if collecting:
            gc.enable()


def _read(folder: Path, name: str, seen: bool, dummy: bool) -> Subject:
    index = open_index(folder) if seen else open_documents(folder)
    known = facts.load(index.config)
    cfg = known.parse(index.config)
    scheme = read_scheme(index.config, index.hf_quant_config, known.canonical)
    slots, assigned = tuple(known.weights(cfg)), None
    if seen:
        assigned = assign(index, slots, facts=known, scheme=scheme)
        formats, aliases, notices = assigned.formats, assigned.aliases, assigned.notices
    else:
        formats = _claimed(scheme, slots, cfg.dtype)
        aliases = {s.name: slots[0].name for s in slots if s.optional}  # the embedding
        notices = [*index.notices, *scheme.notices]
        attention = {i for s in slots if (i := known.kv_scale_layer(s.name)) is not None}
        notices += [n for n in kv_notices(scheme, attention, {}) if n.code != "kv-scale-unit"]
    if not facts.has_forward(index.config):
        text = "planned and linted only: the engine has no forward for this architecture yet"
        notices.append(Notice("no-forward", facts.model_class(index.config), text))
    if dummy:
        notices.append(Notice("dummy-weights", "all layers", "dummy weights: random numbers, so answers mean nothing"))
    found = (formats, aliases, scheme.kv_cache, seen, tuple(notices), index, assigned)
    return Subject(name or folder.name, known, cfg, slots, *found)


def _claimed(scheme: Scheme, slots: Sequence[Slot], dtype: str) -> dict[str, Format]:
    """Formats that JSON claims; what it says nothing of is in the model's own type."""
    plain = DENSE.get({"float16": "F16", "float32": "F32"}.get(dtype.removeprefix("torch."), "BF16"), F32)
    out = {}
    for slot in slots:
        if slot.kind == "tensor":
            continue
        parent, _, last = slot.name.rpartition(".")
        # Only where the JSON lists modules can experts differ.
        count = (slot.shape[0] if scheme.entries.exact else 1) if slot.kind == "experts" else 0
        names = [f"{parent}.{e}.{last}" for e in range(count)] or [slot.name]
        claims = {scheme.claim(n): n for n in names}
        if len({(c.format, c.activation) for c in claims}) > 1:
            (a, m), (b, n), *_ = claims.items()
            raise UserError(f"experts of one layer must share a format: of {m} {a.sentence}, of {n} {b.sentence}")
        claim = next(iter(claims))
        if claim.format.startswith("other:"):
            raise UserError(f"layer {slot.name}: {claim.sentence}, which fp4ward cannot run")
        label = claim.label.upper()
        fp8 = FP8_CHANNEL if "CHANNEL" in label else FP8_BLOCK_SCALED if re.search("BLOCK|PB_", label) else FP8_TENSOR
        if claim.format == "nvfp4" and slot.shape[-1] % NVFP4.column_unit:
            raise UserError(f"layer {slot.name}: nvfp4 needs rows in multiples of 16, config.json has {slot.shape[-1]}")
        out[slot.name] = {"nvfp4": NVFP4, "fp8": fp8, "none": plain}[claim.format].with_activation(claim.activation)
    return out


# ---- where each rank's piece lies ------------------------------------------------------------------------------------


def local_shape(slot: Slot, format: Format | None, layout: Layout, rank: int, whole: bool) -> tuple[int, ...]:
    """Shape of `rank`'s piece of a slot. UserError where the cut is impossible or parts what shares a scale."""
    if whole:
        return slot.shape
    held = intervals(slot, layout, rank, 1 if format is None else format.column_unit)
    return tuple(sum(stop - start for start, stop in spans) for spans in held)


def _place(slot: Slot, layout: Layout, locals_: Sequence[tuple[int, ...]], whole: bool) -> str:
    ranks, placement = layout.attention, slot.placement
    if layout.tp == 1 or whole or isinstance(placement, Replicate):
        return "whole" if layout.tp == 1 else "on every rank"
    if isinstance(placement, Experts):
        parts = (("experts", layout.ep), ("width", layout.tp // layout.ep))
        text = ", ".join(f"{what} / {n}" for what, n in parts if n > 1)
    elif ranks == 1:
        return f"on each of {layout.adp}"
    else:
        units = slot.shape[placement.dim] // placement.unit
        short = placement.on_short == "replicate" and units < ranks
        text = f"{('rows', 'columns')[placement.dim]} / {units if short else ranks}"
        text += f", each on {ranks // units}" if short and ranks % units == 0 else ", repeated" if short else ""
    if len(locals_) > 1:
        at = next(i for i in range(len(slot.shape)) if len({s[i] for s in locals_}) > 1)
        text += f" ({'/'.join(str(s[at]) for s in locals_[:3])})"
    return text


@dataclass(frozen=True, eq=False)
class Pieces:
    """Everything on the ranks: operations, bytes of weights a rank, state a rank."""

    layers: tuple[LayerDesc, ...]
    weights: tuple[int, ...]
    states: tuple[tuple[StateSpec, ...], ...]


def pieces(subject: Subject, layout: Layout, *, unpacked: bool = False, replicated: Sequence[str] = ()) -> Pieces:
    """Cut the model for every rank. unpacked: weights live as plain f32. replicated: see Options."""
    whole = whole_blocks(subject.slots, replicated)
    ranks = range(layout.tp)
    weights = [0] * layout.tp
    known: dict[Any, list[tuple[int, ...]]] = {}
    layers: list[LayerDesc] = []
    stacks: dict[str, list[Slot]] = {}

    def on_ranks(slot: Slot) -> list[tuple[int, ...]]:
        stored, keep = subject.formats.get(slot.name), block_of(slot.name) in whole
        key = (slot.kind, slot.shape, slot.placement, stored, keep)
        if key not in known:
            known[key] = [local_shape(slot, stored, layout, r, keep) for r in ranks]
        return known[key]

    for slot in subject.slots:  # first of all: a weight that cannot be cut is named
        on_ranks(slot)
    states = [subject.facts.state_spec(subject.cfg, r % layout.attention, layout.attention) for r in ranks]
    full = subject.facts.state_spec(subject.cfg)
    for block in whole:
        if m := re.fullmatch(r"layers\.(\d+)\.(\w+_attn|mixer)", block):
            for state in states:
                state[int(m[1])] = full[int(m[1])]
    matrices = Counter(s.name.rpartition(".")[0] for s in subject.slots if s.kind == "experts")
    for slot in subject.slots:
        keep, stored = block_of(slot.name) in whole, subject.formats.get(slot.name)
        form = F32 if unpacked and stored is not None else stored
        each = on_ranks(slot)
        if stored is None or form is None:  # a plain tensor, and what is derived from it (1 + w): at most f32 both
            weights = [w + 8 * math.prod(s) for w, s in zip(weights, each, strict=True)]
            continue
        m = re.fullmatch(r"layers\.(\d+)\.\w+\.(o|out)_proj", slot.name)
        if m:  # a mixer's own operation comes before its output projection
            i = int(m[1])
            own = [s[i] for s in states]
            layers.append(_state_layer(subject, i, own, 1 if own[0] is full[i] else layout.attention))
        if slot.kind == "experts":
            prefix = slot.name.rpartition(".")[0]
            stacks.setdefault(prefix, []).append(slot)
            if len(stacks[prefix]) < matrices[prefix]:
                continue
            slot, of = stacks[prefix][0], [subject.formats[s.name] for s in stacks[prefix]]
            each = on_ranks(slot)
            forms = tuple(F32 if unpacked else f for f in (of if len(set(of)) > 1 else of[:1]))
            path, text = prefix, " + ".join(dict.fromkeys(f.label for f in of))
            op = next(op for op, count in EXPERTS.items() if count == matrices[prefix])
        else:
            path, op, forms = slot.name, "embedding" if slot.name.startswith("embed") else "linear", (form,)
            text = "tied" if slot.name in subject.aliases else stored.label
        local = _distinct(each)
        place = _place(slot, layout, local, keep)
        top_k = subject.cfg.num_experts_per_tok if op in EXPERTS else 0
        layer = LayerDesc(path, op, text, forms, slot.shape, local, place, top_k, scored=path == "lm_head")
        layers.append(layer)
        if slot.name not in subject.aliases:
            weights = [w + layer.bytes_of(s) for w, s in zip(weights, each, strict=True)]
    return Pieces(tuple(layers), tuple(weights), tuple(map(tuple, states)))


def _distinct(shapes: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(set(shapes), key=lambda s: (-math.prod(s), s)))


def _state_layer(subject: Subject, i: int, states: Sequence[StateSpec], ranks: int) -> LayerDesc:
    """The operation on layer `i`'s state; ranks: that share its heads."""
    queries, full = subject.cfg.num_attention_heads, subject.facts.state_spec(subject.cfg)[i]
    shapes: set[tuple[int, ...]] = set()
    for rank, s in enumerate(states):
        if isinstance(s, PagedKv):
            first, last = cut(queries, 1, rank % ranks, ranks)
            shapes.add((last - first, s.heads, s.head_dim))
        else:
            shapes.add(s.ssm)
    shape = (queries, full.heads, full.head_dim) if isinstance(full, PagedKv) else full.ssm
    op = "attention" if isinstance(full, PagedKv) else subject.facts.RECURRENT
    local = _distinct(shapes)
    place = "whole" if len(states) == 1 else "on every rank" if local == (shape,) else f"heads / {ranks}"
    return LayerDesc(f"layers.{i}.{op}", op, "-", (), shape, local, place)


def block_of(name: str) -> str:
    """The block that a weight is cut with: "layers.3.self_attn", "layers.3.mlp.experts", "lm_head"."""
    m = re.match(r"layers\.\d+\.(\w+_attn|(mlp|mixer)\.(shared_experts?|experts)(?=\.)|mlp|mixer)", name)
    return m[0] if m else name


def whole_blocks(slots: Iterable[Slot], patterns: Sequence[str]) -> set[str]:
    """Blocks of the model that match a pattern."""
    blocks = list(dict.fromkeys(block_of(s.name) for s in slots if s.kind != "tensor"))
    for pattern in patterns:
        if not fnmatch.filter(blocks, pattern):
            kinds = ", ".join(dict.fromkeys(NUMBER.sub("*", b + ".")[:-1] for b in blocks))
            raise UserError(f"--replicate {shown(pattern)}: no such block, which is what is cut as one, among {kinds}")
    return {block for pattern in patterns for block in fnmatch.filter(blocks, pattern)}
