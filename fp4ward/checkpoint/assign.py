"""Which stored tensors fill which slots of the model: every tensor is used, or left out on purpose, or an error.

Pure (headers only), so that planning and linting see exactly what loading will do.

Experts come in three layouts: one module an expert (`experts.7.gate_proj.weight`), one tensor for all
(`experts.gate_up_proj`, gate rows first, with or without `.weight`), and the same quantized, where scales are leaves
(`experts.gate_up_proj.weight_scale`) or carry the name as a prefix (`experts.gate_up_proj_weight_scale`). All become
the same list of `Piece`s, one an expert.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fp4ward.checkpoint.index import Index, Located, OnFault, modules
from fp4ward.errors import UserError, stop
from fp4ward.formats.formats import F32, KV_LEAVES, Format, Stored, recognise
from fp4ward.formats.scheme import Notice, Scheme, kv_notices, read_scheme, settle
from fp4ward.parallel.placement import Slot

# Extras that change the result, so that ignoring them would be wrong; and those that only describe a quantized input.
REFUSED = {
    "bias": "a bias on a linear layer, which this architecture does not have",
    "pre_quant_scale": "an AWQ scale of the layer's input, which is not supported; use an export that folds it",
    "svdquant_lora_a": "an SVDQuant side branch, which is not supported; use an NVFP4 export without it",
    "svdquant_lora_b": "an SVDQuant side branch, which is not supported; use an NVFP4 export without it",
}
UNUSED = ("q_scale", "output_scale")
BROKEN = Stored("", F32, (), {}, {})  # stands for a stack of experts that cannot be read


class Facts(Protocol):
    """What is asked of an architecture's facts (the modules of fp4ward.facts have it)."""

    @property
    def LEFT_OUT(self) -> Mapping[str, str]: ...
    @property
    def canonical(self) -> Callable[[str], str]: ...
    @property
    def kv_scale_layer(self) -> Callable[[str], int | None]: ...


@dataclass(frozen=True)
class Piece:
    """One matrix [N, K] inside a stored weight: rows from `first_row` of entry `lead` of the stacked dimension."""

    stored: Stored
    lead: int = 0
    first_row: int = 0


@dataclass
class Assignment:
    """pieces: linear and experts slot -> one piece, or one an expert. plain: tensor slot -> where. formats: slot ->
    settled format. aliases: absent tied slot -> the slot it shares. kv: layer -> leaf -> tensor, for every layer with
    a cache. left_out: reason -> (tensors, bytes); passed_over: the weights among that."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    plain: dict[str, Stored] = field(default_factory=dict)
    formats: dict[str, Format] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    kv: dict[int, dict[str, Located]] = field(default_factory=dict)
    left_out: dict[str, tuple[int, int]] = field(default_factory=dict)
    passed_over: dict[str, Stored] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)


Pool = dict[str, dict[str, Located]]


def assign(
    index: Index,
    slots: Sequence[Slot],
    *,
    facts: Facts,
    scheme: Scheme | None = None,
    on_fault: OnFault = stop,
) -> Assignment:
    """Fill every slot from the headers. UserError names the first tensor without a place or place without a tensor.

    on_fault: is given every such fault; where it returns, the slot stays empty and the rest is done.
    """
    scheme = scheme or read_scheme(index.config, index.hf_quant_config, facts.canonical)
    out = Assignment(notices=[*index.notices, *scheme.notices])
    pool = modules(index, facts.canonical, on_fault)
    _leave_out(pool, facts.LEFT_OUT, out)
    _take_kv_scales(pool, slots, facts, out, on_fault)
    for slot in slots:
        if slot.kind == "tensor":
            with caught(slot.name, on_fault):
                out.plain[slot.name] = _take_plain(pool, slot)
    stack_rows = _stack_rows(slots)
    stacks: dict[str, Stored | None] = {}
    for slot in slots:
        if slot.kind == "linear":
            with caught(slot.name, on_fault):
                _take_linear(pool, slot, slots, out)
        elif slot.kind == "experts":
            with caught(slot.name, on_fault):
                _take_experts(pool, slot, stack_rows, stacks, out.pieces.setdefault(slot.name, []), on_fault)
    _nothing_left(pool, on_fault)
    _settle(scheme, out, on_fault)
    out.notices += kv_notices(scheme, out.kv, out.kv)
    return out


# ---- taking tensors out of the pool ---------------------------------------------------------------------------------


@contextlib.contextmanager
def caught(where: str, on_fault: OnFault) -> Iterator[None]:
    try:
        yield
    except UserError as e:
        on_fault(where, e)


def _leave_out(pool: Pool, reasons: Mapping[str, str], out: Assignment) -> None:
    """What is not loaded on purpose, counted; what of it can be recognised, so that the JSON is held against it too."""
    for module in list(pool):
        reason = reasons.get(module.partition(".")[0])
        if reason is not None:
            leaves = pool.pop(module)
            count, size = out.left_out.get(reason, (0, 0))
            out.left_out[reason] = (count + len(leaves), size + sum(t.nbytes for t in leaves.values()))
            with contextlib.suppress(UserError):  # in a form that could not run, which is no fault here
                stored = recognise(module, leaves)
                if stored is not None:
                    out.passed_over[module] = stored
    for part, reason in reasons.items():
        if reason in out.left_out:
            count, size = out.left_out[reason]
            text = f"{reason}; {count} tensors ({size / 2**20:.1f} MiB) are not loaded"
            out.notices.append(Notice("left-out", part, text))


def _take_kv_scales(pool: Pool, slots: Sequence[Slot], facts: Facts, out: Assignment, on_fault: OnFault) -> None:
    """k_scale and v_scale of every layer that has a cache; such a scale anywhere else stays, and is an error later."""
    for slot in slots:
        layer = facts.kv_scale_layer(slot.name)
        if layer is not None:
            out.kv.setdefault(layer, {})
    unused: Counter[str] = Counter()
    for module, leaves in pool.items():
        layer = facts.kv_scale_layer(module)
        if layer is None or layer not in out.kv:
            continue
        for leaf in KV_LEAVES:
            scale = leaves.pop(leaf, None)
            if scale is None:
                continue
            if leaf in out.kv[layer]:
                other = out.kv[layer][leaf].name
                text = f"tensors {other} and {scale.name} both give {leaf} of layer {layer}; remove one"
                on_fault(scale.name, UserError(text, "duplicate"))
            elif scale.dtype not in ("F32", "F16", "BF16") or scale.shape not in ((), (1,)):
                text = f"tensor {scale.name}: {scale.dtype} {list(scale.shape)}; one float is expected"
                on_fault(scale.name, UserError(text, "shape"))
            else:
                out.kv[layer][leaf] = scale
        if "weight" not in leaves and "weight_packed" not in leaves:  # directly under self_attn, not under a weight
            unused.update(leaf for leaf in UNUSED if leaves.pop(leaf, None))
    _report_unused(unused, out)


def _take_plain(pool: Pool, slot: Slot) -> Stored:
    """A float tensor, or one stored in FP8 with its scale (a convolution in some recipes)."""
    module, _, leaf = slot.name.rpartition(".")
    leaves = pool.get(module, {})
    found = leaves.pop(leaf, None)
    if found is None:
        raise _missing(slot.name, slot.shape)
    own = {"weight": found}
    if leaf == "weight":
        for other in [n for n in leaves if n.startswith("weight_") or n in ("input_scale", "input_global_scale")]:
            own[other] = leaves.pop(other)
    stored = recognise(module if leaf == "weight" else slot.name, own)
    if stored is None or stored.format.name not in ("bf16", "f16", "f32", "fp8_tensor", "fp8_channel"):
        kind = "nothing" if stored is None else stored.format.name
        raise UserError(f"tensor {found.name}: stored as {kind}; a plain float tensor is expected here")
    if stored.shape != slot.shape:
        raise _misshapen(found.name, stored.shape, slot.shape)
    return stored


def _take_linear(pool: Pool, slot: Slot, slots: Sequence[Slot], out: Assignment) -> None:
    leaves = pool.pop(slot.name, {})
    stored = recognise(slot.name, leaves) if leaves else None
    if stored is None:
        pool[slot.name] = leaves
        tied = _tied_to(slot, slots) if slot.optional and not leaves else None
        if tied is None:
            raise _missing(f"{slot.name}.weight", slot.shape)
        out.aliases[slot.name] = tied
        return
    out.pieces[slot.name] = [Piece(stored)]
    if slot.optional:
        text = "config.json ties it to the embedding, yet a tensor of its own is stored; the stored one is used"
        out.notices.append(Notice("untied-head", slot.name, text))
    _same_shape(stored, slot.shape)


def _tied_to(slot: Slot, slots: Sequence[Slot]) -> str | None:
    """The embedding that an absent output head shares: the first table of the same shape that is always there."""
    alike = (s.name for s in slots if s.kind == "linear" and s.shape == slot.shape and not s.optional)
    return next((name for name in alike if name.startswith("embed")), None)


def _take_experts(
    pool: Pool,
    slot: Slot,
    stack_rows: Mapping[str, int],
    stacks: dict[str, Stored | None],
    pieces: list[Piece],
    on_fault: OnFault,
) -> None:
    count, rows, columns = slot.shape
    prefix, _, last = slot.name.rpartition(".")
    names = [f"{prefix}.{e}.{last}" for e in range(count)]
    stack = None
    if slot.stacked is not None:
        module, start = slot.stacked
        if module not in stacks:
            try:
                stacks[module] = _take_stack(pool, module)
            except UserError as e:
                on_fault(module, e)
                stacks[module] = BROKEN
        stack = stacks[module]
        if stack is BROKEN:  # which was said
            return
    present = [n for n in names if n in pool]
    if stack is not None:
        if present:
            name = next(iter(pool[present[0]].values())).name
            for other in present:
                del pool[other]
            text = f"tensor {name}: the experts are stored one by one and stacked ({stack.module}) at once"
            raise UserError(text, "duplicate")
        pieces += [Piece(stack, e, start) for e in range(count)]
        _same_shape(stack, (count, stack_rows[stack.module], columns))
        return
    for name in names:
        with caught(name, on_fault):
            stored = recognise(name, pool.pop(name, {}))
            if stored is None:
                raise _missing(f"{name}.weight", (rows, columns))
            pieces.append(Piece(stored))
            _same_shape(stored, (rows, columns))


def _take_stack(pool: Pool, module: str) -> Stored | None:
    """All experts in one tensor: leaves of `module` itself, and of its parent those that carry its name in front."""
    parent, _, last = module.rpartition(".")
    leaves = pool.pop(module, {})
    siblings = pool.get(parent, {})
    for leaf in [n for n in siblings if n == last or n.startswith(last + "_")]:
        own = "weight" if leaf == last else leaf[len(last) + 1 :]
        if own in leaves:
            text = f"tensors {leaves[own].name} and {siblings[leaf].name} are two names for one weight"
            raise UserError(text, "duplicate")
        leaves[own] = siblings.pop(leaf)
    return recognise(module, leaves) if leaves else None


def _stack_rows(slots: Sequence[Slot]) -> dict[str, int]:
    """Rows of each stacked tensor: its slots lie one after the other."""
    rows: dict[str, int] = {}
    for slot in slots:
        if slot.stacked is not None:
            module, start = slot.stacked
            rows[module] = max(rows.get(module, 0), start + slot.shape[1])
    return rows


def _nothing_left(pool: Pool, on_fault: OnFault) -> None:
    left = sorted(t.name for leaves in pool.values() for t in leaves.values())
    more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    for name in left:
        text = f"unexpected tensor {name}{more}: the model in config.json has no place for it"
        on_fault(name, UserError(text, "unexpected"))
        more = ""


# ---- after everything has its place ---------------------------------------------------------------------------------


def _settle(scheme: Scheme, out: Assignment, on_fault: OnFault) -> None:
    """Final formats; what belongs to weights without being part of them is refused or reported here."""
    stored = {p.stored.module: p.stored for pieces in out.pieces.values() for p in pieces}
    stored |= {s.module: s for s in out.plain.values()}
    formats, notices = settle(scheme, {**stored, **out.passed_over}, on_fault)
    out.notices += notices
    unused: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for module, s in stored.items():
        for name, component in s.extras.items():
            if name in REFUSED:
                on_fault(module, UserError(f"tensor {component.header.name}: {REFUSED[name]}", "unsupported"))
            elif name in UNUSED:
                unused[name] += 1
            elif name == "input_scale":
                dropped[formats[module].label] += 1
            else:
                text = f"unexpected tensor {component.header.name}: layer {module} has no place for it"
                on_fault(component.header.name, UserError(text, "unexpected"))
    _report_unused(unused, out)
    for label, n in sorted(dropped.items()):
        text = f"{n} activation scales (input_scale) are not loaded: where inputs are quantized, each token has its own"
        out.notices.append(Notice("input-scale-dropped", label, text))
    for name, pieces in out.pieces.items():
        for piece in pieces[:1]:  # of all: experts of one layer that are stored differently are a fault for settle
            out.formats[name] = formats[piece.stored.module]
    out.formats |= {name: out.formats[target] for name, target in out.aliases.items() if target in out.formats}


def _report_unused(unused: Mapping[str, int], out: Assignment) -> None:
    for leaf, n in sorted(unused.items()):
        out.notices.append(Notice("scale-unused", leaf, f"{n} tensors {leaf} are not loaded: no kernel uses them"))


def _same_shape(stored: Stored, want: tuple[int, ...]) -> None:
    if stored.shape != want:
        first = stored.components.get("packed") or stored.components["data"]
        raise _misshapen(first.header.name, stored.shape, want)


def _misshapen(name: str, shape: tuple[int, ...], want: tuple[int, ...]) -> UserError:
    text = f"tensor {name}: the weight has shape {list(shape)}, config.json asks for {list(want)}"
    return UserError(text, "shape")


def _missing(name: str, shape: tuple[int, ...]) -> UserError:
    text = f"missing tensor {name}, expected with shape {list(shape)}; is the download complete?"
    return UserError(text, "missing")
