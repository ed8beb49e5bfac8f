"""Decides on paper, without a GPU and without weights: which kernel runs each layer of a checkpoint on which machine,
why, what it costs, and what memory remains. Standard library only.

    subject = pieces.read(folder);  plan = make(subject, hardware, options);  print(plan_text.render(plan))

A wish that cannot be honoured raises UserError; what the machine has no room for is a sentence in `Plan.failures`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fp4ward import memory
from fp4ward.config import UNPACK_BYTES, EngineConfig, resolve
from fp4ward.errors import UserError, shown
from fp4ward.formats.scheme import Notice
from fp4ward.hardware import GIB, Hardware
from fp4ward.kernels.specs import (
    DENSE,
    EXPERTS,
    ITEM,
    MOST_CHOSEN,
    NO_ROOM,
    SPECS,
    Batch,
    Cost,
    KernelSpec,
    LayerDesc,
    estimate,
    no_kernel,
    unfit,
    unproven,
)
from fp4ward.parallel.placement import ONE_RANK, Layout
from fp4ward.pieces import NUMBER, Subject, pieces

Wishes = Mapping[str, tuple[str, ...]]  # op -> names of the kernels that it may use
Measured = Callable[[Layout, EngineConfig], memory.Memory]
ASKED, ON_PAPER = "asked for by --kernel", "on paper only: the engine runs one rank so far"
CONTEXT = 1024  # tokens before each sequence in the decode regimes
NOT_COUNTED = Notice(
    "not-counted",
    "speeds on a GPU",
    "launching from Python, collectives and norms: a step takes longer, and prompts much longer (measured: "
    "Qwen3.6-35B-A3B on an H200 takes 2.7 ms for one token, of which 1.9 are counted, and reads 3,010 tok/s)",
)
CACHE_LEFT = 0.25  # of the pages that fit beside the stored weights, so many stay beside kernels' own layouts of them


@dataclass(frozen=True)
class Options:
    """What a user may decide. config: as the engine takes it, "auto" allowed. replicate: patterns of blocks that every
    rank holds whole, such as "layers.*.mlp.shared_expert"."""

    config: EngineConfig
    layout: Layout = ONE_RANK
    replicate: tuple[str, ...] = ()


def parse_wishes(texts: Sequence[str]) -> Wishes:
    """From "linear=reference_linear,torch_linear". UserError with the names that there are."""
    out: dict[str, tuple[str, ...]] = {}
    for text in texts:
        op, _, rest = text.partition("=")
        names = [s.name for s in SPECS if s.op == op]
        if not names or op in out:
            ops = dict.fromkeys(s.op for s in SPECS)
            raise UserError(f"--kernel {shown(text)}: op=name[,name] is expected, once for each op: {', '.join(ops)}")
        for name in rest.split(","):
            if name not in names:
                raise UserError(f"--kernel {shown(text)}: {shown(name)} is no kernel for {op}; {', '.join(names)} are")
        out[op] = tuple(rest.split(","))
    return out


@dataclass(frozen=True)
class Regime:
    """A kind of step: its name, fewest and most tokens in all, and whether they are one prompt's or one a sequence."""

    name: str
    least: int
    tokens: int
    prompt: bool = False


@dataclass(frozen=True)
class Pick:
    """The kernel of one regime, its cost, what others would take (name, us), and most rows of input that it is for: a
    group that attends to its own requests sees its share of the tokens. inside: the experts that this operation is one
    with, and norm and residual too; of experts, themselves."""

    kernel: KernelSpec
    cost: Cost
    others: tuple[tuple[str, float], ...]
    rows: int
    inside: str = ""


@dataclass(frozen=True)
class Choice:
    """One pick a regime; why, and what was rejected for what reason."""

    picks: tuple[Pick, ...]
    why: str
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Planned:
    """A layer and the kernels that run it."""

    layer: LayerDesc
    choice: Choice

    @property
    def inputs(self) -> tuple[str, ...]:
        """What its kernels, in the order of regimes, quantize their input to: "nvfp4", "fp8", or "high" for nothing."""
        return tuple(dict.fromkeys(pick.kernel.input for pick in self.choice.picks))

    @property
    def takes(self) -> str:
        """What all of them quantize it to, "high" where one of them does not."""
        return self.inputs[0] if len(self.inputs) == 1 else "high"

    @property
    def runs(self) -> str:
        activations = ["none" if taken == "high" else taken for taken in self.inputs]
        formats = [f.with_activation(a) for a in activations for f in self.layer.formats]
        return " + ".join(dict.fromkeys(f.label for f in formats)) or "-"

    def copies(self, *, tied: bool) -> float:
        """How many times its weights are held beside the ones that are counted: kernels want layouts of their own, and
        some share a part with the stored one."""
        new = {pick.kernel.name: pick.kernel.copied for pick in self.choice.picks if pick.kernel.prepare}
        stored = tied or any(not pick.kernel.prepare for pick in self.choice.picks)
        return sum(new.values()) - (0 if stored else min(new.values()))


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that was decided. config: resolved. unpacked: weights live as plain f32. failures: why it cannot run,
    in sentences; () if it can."""

    subject: Subject
    hardware: Hardware
    config: EngineConfig
    options: Options
    regimes: tuple[Regime, ...]
    layers: tuple[Planned, ...]
    memory: memory.Memory
    unpacked: bool
    notices: tuple[Notice, ...]
    failures: tuple[str, ...]

    @property
    def copied_for(self) -> list[str]:
        """Kernels whose own layout of a weight is held beside another one."""
        held = [p for p in self.layers if p.copies(tied=p.layer.path in self.subject.aliases) > 0]
        return sorted({k.kernel.name for p in held for k in p.choice.picks if k.kernel.prepare})

    @property
    def graphs(self) -> int:
        """Sequences up to which a step of one token each is replayed as a CUDA graph; 0: never."""
        most = 0
        never = self.hardware.cpu or self.config.enforce_eager or self.options.layout.tp > 1
        for i, regime in enumerate(self.regimes):
            if never or regime.prompt or not all(p.choice.picks[i].kernel.captured for p in self.layers):
                break
            most = regime.tokens
        return most

    @property
    def told(self) -> tuple[Notice, ...]:
        """The notices, after what speeds leave out: that concerns no run."""
        return self.notices if self.hardware.cpu else (NOT_COUNTED, *self.notices)

    def step_us(self, regime: int, *, floor: bool = False) -> float:
        """One step on the rank with the most work: expected, or what no kernels on this machine can beat. Without
        collectives and norms."""
        return sum(c.floor_us if floor else c.us for c in (p.choice.picks[regime].cost for p in self.layers))


def may_quantize_activations(layer: str, plan: Plan) -> bool:
    """Whether an op in front of `layer` may hand it activations that are already quantized: asked by every fusion that
    would, at the time of use. Only where each of the layer's kernels takes them so; never for W4A16."""
    found = next((p for p in plan.layers if p.layer.path == layer), None)
    if found is None:
        raise UserError(f"the plan has no layer {shown(layer)}")
    return found.takes != "high"


def choose(
    layer: LayerDesc, batches: Sequence[Batch], hw: Hardware, dtype: str, wishes: Wishes, specs: Sequence[KernelSpec]
) -> Choice:
    """The kernel with the lowest estimate in each regime, of those that are legal and, where wished, allowed.

    A wish concerns the layers whose formats one of its kernels reads. UserError when nothing can run the layer.
    """
    every, kv = [s for s in specs if s.op == layer.op], max((batch.kv for batch in batches), default=2)
    none = no_kernel(layer.op)
    if none is not None and not every:
        floors = (Pick(none, estimate(none, layer, hw, batch), (), batch.tokens) for batch in batches)
        return Choice(tuple(floors), "no kernel is written yet: its floor", ())
    wish = wishes.get(layer.op, ())
    allowed = [s for s in every if s.name in wish and all(f.name in s.formats for f in layer.formats)]
    waits = {s.name: f"is {NO_ROOM} (notice no-room)" if s.status == NO_ROOM else unproven(s) for s in every}
    reasons = {s.name: unfit(s, layer, hw, dtype, kv) or (None if s.name in wish else waits[s.name]) for s in every}
    rejected = [(name, reason) for name, reason in reasons.items() if reason is not None]
    works = [name for name, reason in reasons.items() if reason is None]
    legal = [s for s in allowed or every if s.name in works]
    head = f"layer {layer.path} ({layer.stored}) on {hw.name}"
    if not legal:
        lines = "; ".join(f"{s.name} {reasons[s.name]}" for s in allowed or every)
        what = f"--kernel {layer.op}={','.join(wish)} cannot run {head}" if allowed else f"no kernel can run {head}"
        raise UserError(f"{what}: {lines}; what works: {', '.join(works) or 'nothing here'}")
    if allowed:
        rejected += [(name, "is not among those that --kernel allows") for name in works if name not in wish]
    picks = []
    for batch in batches:
        least, most = batch.least or batch.tokens, batch.most or batch.tokens
        fit = [s for s in legal if s.tokens[0] <= least and most <= s.tokens[1]]
        if not fit:
            spans = ", ".join(f"{s.name} {s.tokens[0]} to {s.tokens[1]}" for s in legal)
            more = [s.name for s in every if s.name in works and s not in legal and s.tokens[1] >= most]
            advice = f"; add to --kernel one of {', '.join(more)}" if more else ""
            raise UserError(f"no kernel can run {head} with {most} tokens: {spans}{advice}")
        costs = sorted(((estimate(s, layer, hw, batch), s) for s in fit), key=lambda pair: pair[0].us)
        picks.append(Pick(costs[0][1], costs[0][0], tuple((s.name, cost.us) for cost, s in costs[1:]), batch.tokens))
    why = ASKED if allowed else "the only one that fits" if len(legal) == 1 else "lowest estimate"
    return Choice(tuple(picks), why, tuple(rejected))


def make(subject: Subject, hw: Hardware, options: Options, *, specs: Sequence[KernelSpec] = SPECS) -> Plan:
    """The plan. UserError for an impossible layout or wish; `failures` when the machine has no room."""
    cfg, layout = subject.cfg, options.layout
    config = resolve(
        options.config,
        cuda=not hw.cpu,
        checkpoint_dtype=cfg.dtype,
        checkpoint_kv=subject.kv_cache,
        max_position_embeddings=cfg.max_position_embeddings,
    )
    total = sum(4 * math.prod(s.shape) for s in subject.slots if s.kind != "tensor" and s.name not in subject.aliases)
    unpacked = hw.cpu and config.dtype == "float32" and total <= UNPACK_BYTES

    cut_ = pieces(subject, layout, unpacked=unpacked, replicated=options.replicate)
    regimes = _regimes(config, layout)
    wishes = parse_wishes(config.kernel)
    cache: dict[LayerDesc, Choice] = {}
    layers = []
    for layer in cut_.layers:
        key = replace(layer, path=NUMBER.sub("*", layer.path))
        if key not in cache:
            batches = [_batch(layer, r, layout, config) for r in regimes]
            cache[key] = choose(layer, batches, hw, config.dtype, wishes, specs)
        layers.append(Planned(layer, cache[key]))

    def cost(spec: KernelSpec, layer: LayerDesc, regime: int) -> Cost:
        return estimate(spec, layer, hw, _batch(layer, regimes[regime], layout, config))

    layers = _blocks(layers, getattr(subject.facts, "MOE_BLOCK", ()), cost, layout.tp, config.dtype)
    _wishes_met(wishes, cut_.layers, specs)
    copies = {p.layer.path: p.copies(tied=p.layer.path in subject.aliases) for p in layers}

    def measured(other: Layout, tried: EngineConfig) -> memory.Memory:
        cut = cut_ if other is layout else pieces(subject, other, unpacked=unpacked, replicated=options.replicate)
        return memory.measure(cut, hw, tried, sum(math.ceil(x.weight_bytes * copies[x.path]) for x in cut.layers))

    need, stored = measured(layout, config), memory.measure(cut_, hw, config, 0)
    failures = memory.failures(need, hw, config, options.config.max_model_len)
    if (failures or need.pages < CACHE_LEFT * stored.pages) and (name := _dearest(layers, copies, wishes)):
        rows = [replace(s, status=NO_ROOM) if s.name == name else s for s in specs]
        return make(subject, hw, options, specs=rows)
    if failures:
        failures = (*failures, _advice(need, hw, config, options, measured))
    waiting = [s for s in specs if s.status == NO_ROOM and s.name not in wishes.get(s.op, ())]
    used = {name for p in layers for pick in p.choice.picks for name in (pick.kernel.name, *dict(pick.others))}

    def no_room(spec: KernelSpec) -> Notice:
        """What a kernel lacks that was left out, and the whole flag that asks for it where that would fit."""
        flag = f"{spec.op}={','.join(s.name for s in specs if s.op == spec.op and (s is spec or s.name in used))}"
        wish = [*(w for w in options.config.kernel if not w.startswith(f"{spec.op}=")), flag]
        rows = [s for s in specs if s is spec or s not in waiting]
        asked = make(subject, hw, replace(options, config=replace(options.config, kernel=wish)), specs=rows)
        of = [p.layer.weight_bytes for p in asked.layers if any(k.kernel.name == spec.name for k in p.choice.picks)]
        free = max(need.free + need.pages * need.page - need.scratch, 0) / GIB
        text = f"{NO_ROOM}: {sum(of) * spec.copied / GIB:.2f} GiB, where {free:.2f} are free for it and the cache; "
        what = "with these settings it does not fit on this GPU" if asked.failures else f"--kernel {flag} asks for it"
        return Notice("no-room", spec.name, text + what)

    notices = (*_slow(hw, config, specs), *subject.notices, *map(no_room, waiting), *_remarks(layers, layout))
    return Plan(subject, hw, config, options, regimes, tuple(layers), need, unpacked, notices, failures)


def _dearest(layers: Sequence[Planned], copies: Mapping[str, float], wishes: Wishes) -> str:
    """Of the kernels whose layouts are held beside others and that nobody asked for, the one that saves the least time
    for its bytes; "" if there is none."""
    saved: dict[str, float] = {}
    bytes_: dict[str, float] = {}
    for p in layers:
        for pick in p.choice.picks if copies[p.layer.path] > 0 else ():
            k, instead = pick.kernel, pick.others[0][1] if pick.others else pick.cost.us
            if k.prepare and (pick.others or pick.inside) and k.name not in wishes.get(k.op, ()):
                saved[k.name] = saved.get(k.name, 0) + instead - pick.cost.us
                bytes_[k.name] = bytes_.get(k.name, 0) + p.layer.weight_bytes * k.copied
    return min(saved, key=lambda name: saved[name] / bytes_[name], default="")


def _blocks(
    layers: Sequence[Planned], names: Sequence[str], cost: Callable[[KernelSpec, LayerDesc, int], Cost], ranks: int,
    dtype: str,
) -> list[Planned]:  # fmt: skip
    """Blocks of experts as one operation in the regimes where the kernel of the experts has that: gates and shared
    expert (`names`) are inside, each with its own share of the cost and, but for the gates' one product, no launch."""
    out = {p.layer.path: p for p in layers}
    for p in layers:
        spec = next((pick.kernel for pick in p.choice.picks if pick.kernel.routes), None)
        if spec is None:
            continue
        parent = p.layer.path.rpartition(".")[0]
        parts = [out[path] for path in (f"{parent}.{name}" for name in names) if path in out]
        reason = _apart(spec, p.layer, parts if len(parts) == len(names) and ranks == 1 else [], dtype)
        if reason is not None:
            out[p.layer.path] = replace(p, choice=replace(p.choice, rejected=(*p.choice.rejected, ("block", reason))))
            continue
        where = NUMBER.sub("*", p.layer.path)
        for part in (p, *parts):
            picks = list(part.choice.picks)
            for i, own in enumerate(p.choice.picks):
                if own.kernel.routes and part is p:
                    picks[i] = replace(own, inside=where)
                elif own.kernel.routes:
                    inner = replace(own.kernel, launches=(float(part is parts[0]), 0))
                    picks[i] = Pick(inner, cost(inner, part.layer, i), (), own.rows, where)
            out[part.layer.path] = replace(part, choice=replace(part.choice, picks=tuple(picks)))
    return list(out.values())


def _apart(spec: KernelSpec, experts: LayerDesc, parts: Sequence[Planned], dtype: str) -> str | None:
    """Why a block stays several operations; None if it can be one."""
    if not parts:
        return "is for experts beside a shared one, on one rank"
    if any(p.choice.why == ASKED for p in parts):
        return "leaves to --kernel what it names kernels for"
    gates, shared = ({f.name for p in some for f in p.layer.formats} for some in (parts[:2], parts[2:]))
    if {DENSE.get(name) for name in gates} != {dtype}:
        return f"needs gates in {dtype}, not {', '.join(sorted(gates))}"
    width, wide = experts.shape[1], parts[2].layer.shape[0]
    if not shared <= set(spec.formats) or wide % width or experts.top_k + wide // width > MOST_CHOSEN:
        return f"needs a shared expert in {', '.join(spec.formats)}, as wide as one or some experts"
    return None


def _regimes(config: EngineConfig, layout: Layout) -> tuple[Regime, ...]:
    """One token, few, some and many, as far as a step goes; a prompt's where so many sequences never run at once:
    max_num_seqs in each group."""
    most, sequences = config.max_num_batched_tokens, min(config.max_num_seqs * layout.adp, 64)
    out: list[Regime] = []
    for stop in sorted({n for n in (1, 16, 64, sequences, most) if n <= most}):
        least = out[-1].tokens + 1 if out else 1
        name = "prefill" if least > 64 else f"{least}-{stop}" if least < stop else str(stop)
        out.append(Regime(name, least, stop, least > sequences))
    return tuple(out)


def _batch(layer: LayerDesc, regime: Regime, layout: Layout, config: EngineConfig) -> Batch:
    all_tokens = layer.op in EXPERTS or layer.path.endswith(".gate")  # every group's: what is routed, and its scores
    groups = 1 if all_tokens else layout.adp
    least, tokens = (-(-n // groups) for n in (regime.least, regime.tokens))
    most = tokens if regime.tokens < config.max_num_batched_tokens else regime.tokens  # all may be one group's
    context = min(CONTEXT, config.max_model_len or CONTEXT)
    sequences, before = (1, 0) if regime.prompt else (tokens, context)
    return Batch(tokens, sequences, before, ITEM[config.dtype], memory.KV_ITEM[config.kv_cache_dtype], least, most)


def _wishes_met(wishes: Wishes, layers: Sequence[LayerDesc], specs: Sequence[KernelSpec]) -> None:
    for spec in (s for s in specs if s.name in wishes.get(s.op, ())):
        of = [x.formats for x in layers if x.op == spec.op]
        if not any(all(f.name in spec.formats for f in formats) for formats in of):
            raise UserError(
                f"--kernel {spec.op}={spec.name} has nothing to run: it reads {', '.join(spec.formats)}, but layers "
                f"here are {', '.join(sorted({f.name for formats in of for f in formats})) or 'of other kinds'}"
            )


def _slow(hw: Hardware, config: EngineConfig, specs: Sequence[KernelSpec]) -> Iterator[Notice]:
    """What makes everything slow, and is not meant."""
    if 0 < hw.sm < (oldest := min((s.min_sm for s in specs if s.min_sm), default=0)):
        text = f"fp4ward's kernels need SM {oldest}: here PyTorch and the reference operations do everything, slowly"
        yield Notice("old-gpu", f"{hw.name}, SM {hw.sm}", text)
    if hw.cpu and ITEM[config.dtype] == 2:
        text = "on most CPUs much slower than --dtype float32, which is not emulated and keeps small models unpacked"
        yield Notice("slow-dtype", f"--dtype {config.dtype}", text)


def _remarks(layers: Sequence[Planned], layout: Layout) -> Iterator[Notice]:
    lacking = [p.layer.path for p in layers if not p.choice.picks[0].kernel.module]
    if lacking:
        kinds = ", ".join(dict.fromkeys(NUMBER.sub("*", path) for path in lacking))
        text = f"{len(lacking)} operations have no kernel that the engine could run yet: they count with their floor"
        yield Notice("no-kernel", kinds, text)
    asked: dict[str, list[Planned]] = {}
    for p in layers:
        for activation in {f.activation for f in p.layer.formats} - {"none", *p.inputs}:
            asked.setdefault(activation, []).append(p)
    for activation, found in asked.items():
        names = list(dict.fromkeys(NUMBER.sub("*", p.layer.path) for p in found))
        kinds = ", ".join(names[:3]) + (f" and {len(names) - 3} more kinds" if len(names) > 3 else "")
        text = f"{len(found)} layers ask for {activation} inputs, but their kernels take unquantized ones"
        yield Notice("activation-unused", kinds, text)
    if layout.tp > 1:
        yield Notice("one-rank", f"--tp {layout.tp}", ON_PAPER)


def _advice(need: memory.Memory, hw: Hardware, config: EngineConfig, options: Options, measured: Measured) -> str:
    """What to change so that it fits: a smaller cache, more GPUs, or what else there is."""

    def fits(layout: Layout, tried: EngineConfig) -> bool:
        return not memory.failures(measured(layout, tried), hw, tried, options.config.max_model_len)

    here, wanted = options.layout, memory.wanted(config) * need.page
    smaller = min(need.free + need.pages * need.page - need.scratch, wanted + 2**20)
    smaller -= smaller % 2**20  # whole MiB
    if need.page > 0 and smaller >= min(wanted, 1 << 25) and fits(here, replace(config, kv_cache_memory_bytes=smaller)):
        return f"--kv-cache-memory-bytes {smaller >> 20}MiB fits"
    large = need.weights[need.rank] > hw.memory - need.reserved
    advice = "it takes" if large else "try a shorter --max-model-len, a smaller --max-num-seqs or"
    for tp in (tp for tp in (2, 4, 8, 16, 32) if tp > here.tp and not hw.cpu):
        with contextlib.suppress(UserError):
            if fits(replace(here, tp=tp), config):
                return f"{advice} a machine with more memory; --tp {tp} fits, but {ON_PAPER}"
    return f"{advice} a machine with more memory"
