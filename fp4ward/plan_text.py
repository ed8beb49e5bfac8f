"""A plan as text for people and as JSON. Equal layers become one line."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp4ward.errors import UserError, shown
from fp4ward.hardware import GIB
from fp4ward.kernels.specs import EXPERTS
from fp4ward.pieces import NUMBER
from fp4ward.plan import CONTEXT, Plan, Planned

LENGTHS = (1024, 8192, 32768, 131072)


def render(plan: Plan) -> str:
    """The whole plan: machine, memory, limits, the table, notices, and why it cannot run where it cannot."""
    layout, config, s = plan.options.layout, plan.config, plan.subject
    ranks = f"{layout.tp} x " if layout.tp > 1 else ""
    cuts = f", tp {layout.tp}, ep {layout.ep}, adp {layout.adp}" if layout.tp > 1 else ""
    lines = [
        f"{s.name} on {ranks}{plan.hardware.summary}{cuts}",
        f"{len(plan.layers)} operations, activations {config.dtype}, KV cache {config.kv_cache_dtype}"
        + ("" if s.seen else "; tensors were not seen: formats are what the JSON claims"),
        "",
        *_memory(plan),
        "",
        *_speed(plan),
        "",
        *_table(plan),
    ]
    status = {p.kernel.name: p.kernel.status for x in plan.layers for p in x.choice.picks}
    lines += ["", "kernels"] + [f"  {name}: {text}" for name, text in sorted(status.items())]
    if plan.told:
        lines += ["", "notices"] + [f"  {n.code}: {n.where}: {n.text}" for n in plan.told]
    if plan.failures:
        lines += ["", "it does not fit"] + [f"  {text}" for text in plan.failures]
    return "\n".join(lines)


def _memory(plan: Plan) -> list[str]:
    m, config = plan.memory, plan.config
    where = f"memory of rank {m.rank}, which has the least room" if len(m.weights) > 1 else "memory"
    graphs = f"decoding of up to {plan.graphs} sequences" if plan.graphs else "none"
    second = f"second layout of weights, for {', '.join(plan.copied_for)}; prompts read the stored one"
    rows = [
        ("weights", m.weights[m.rank] - m.copied),
        *([(second, m.copied)] if m.copied else []),
        (f"recurrent state ({config.max_num_seqs} sequences)", m.slots),
        (f"KV cache ({m.pages} pages of {m.block} tokens)", m.pages * m.page),
        (f"checkpoints of recurrent state (no prefix cache yet; one takes {m.slot / 2**20:.1f} MiB)", m.checkpoints),
        *([] if plan.hardware.cpu else [(f"CUDA graphs ({graphs})", m.graphs)]),
        (f"scratch of a step ({config.max_num_batched_tokens} tokens)", m.scratch),
        ("reserved for the driver" if not plan.hardware.cpu else "reserved for Python and torch", m.reserved),
        ("left", m.free - m.scratch),
    ]
    lines = [where, *(f"  {size / GIB:9.3f} GiB  {name}" for name, size in rows)]
    if plan.failures:
        return lines
    lengths = sorted({n for n in LENGTHS if n < m.context} | {m.context})
    fits = ", ".join(f"{min(config.max_num_seqs, m.pages // -(-n // m.block))} of {n}" for n in lengths)
    groups = f" in each of {plan.options.layout.adp} groups" if plan.options.layout.adp > 1 else ""
    seqs = f"--max-num-seqs {config.max_num_seqs}"
    return [*lines, f"  one request may have {m.context} tokens; requests at once{groups} ({seqs}), by tokens: {fits}"]


def _speed(plan: Plan) -> list[str]:
    apart = "norms are not counted" if plan.hardware.cpu else "a part is not-counted: see notices"
    lines = [f"limits of a step (decode after {CONTEXT} tokens each; {apart})"]
    lacking = any(not k.kernel.module for p in plan.layers for k in p.choice.picks)
    for i, regime in enumerate(plan.regimes):
        floor, expected = (plan.step_us(i, floor=f) for f in (True, False))
        name = f"prefill of {regime.tokens}" if regime.prompt else f"decode {regime.tokens}"
        rates = [regime.tokens / us * 1e6 for us in (floor, expected)]
        most, runs = (f"{r:,.0f}" if r >= 9.95 else f"{r:.2g}" for r in rates)
        lines.append(
            f"  {name:<16} floor {floor:12,.1f} us, at most {most:>13} tok/s; "
            f"these kernels {'at least' if lacking else 'about'} {expected:14,.1f} us, {runs:>11} tok/s"
        )
    return lines


def _table(plan: Plan) -> list[str]:
    head = ["operation", "n", "stored as", "runs as", "local shape", "place", "kernel", "us at 1", "bound", "why"]
    rows = [head]
    for name, group in folded(plan.layers):
        x, choice = group[0].layer, group[0].choice
        first = choice.picks[0].cost
        rows.append([
            name, str(len(group)), x.stored, group[0].runs, "x".join(map(str, x.local[0])), x.place,
            _kernels(plan, group[0]), f"{first.us:.1f}", first.bound, choice.why,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.rjust if i in (1, 7) else str.ljust for i in range(len(head))]
    return ["  ".join(a(c, w) for a, c, w in zip(aligned, row, widths, strict=True)).rstrip() for row in rows]


def _kernels(plan: Plan, planned: Planned) -> str:
    """One name, or "a (1, 2-16), b (prefill)" where regimes differ."""
    by_name: dict[str, list[str]] = {}
    for regime, pick in zip(plan.regimes, planned.choice.picks, strict=True):
        by_name.setdefault(pick.kernel.name, []).append(regime.name)
    return ", ".join(f"{k} ({', '.join(v)})" if len(by_name) > 1 else k for k, v in by_name.items())


def folded(layers: Iterable[Planned]) -> list[tuple[str, list[Planned]]]:
    """Operations that differ in their layer's number alone, under a name with *, or numbers where such differ."""
    groups: dict[Any, list[Planned]] = {}
    for p in layers:
        name = NUMBER.sub("*", p.layer.path)
        key = (name, p.layer.stored, p.layer.formats, p.layer.local, p.layer.place, p.choice)
        groups.setdefault(key, []).append(p)
    names = [key[0] for key in groups]
    out = []
    for (name, *_), group in groups.items():
        if names.count(name) > 1 and "*" in name:
            numbers = [m[0] for p in group[:4] if (m := NUMBER.search(p.layer.path))]
            name = name.replace("*", "{" + ",".join([*numbers[:3], "..."][: len(group)]) + "}", 1)
        out.append((name, group))
    return out


def why(plan: Plan, path: str) -> str:
    """The whole trail of one layer, or of the first of each kind that `path` means: a name as the table has it, or
    a pattern. UserError naming what is like `path` when there is no such layer."""
    rows = folded(plan.layers)
    kinds = [[p for p in of if path == name or fnmatch.fnmatchcase(p.layer.path, path)] for name, of in rows]
    if not any(kinds):
        every = [name for name, _ in rows]
        alike = [name for name in every if name.endswith(path.rpartition(".")[2])] or every
        raise UserError(f"--why {shown(path)}: the plan has no such layer; there is {', '.join(alike[:6])}")
    return "\n\n".join(_trail(plan, of[0], len(of)) for of in kinds if of)


def _trail(plan: Plan, found: Planned, count: int) -> str:
    x, choice = found.layer, found.choice
    lines = [
        f"{x.path}{f' and {count - 1} more like it' * (count > 1)}: {x.op}, logical shape {list(x.shape)}",
        f"stored as {x.stored}, runs as {found.runs}; {x.weight_bytes / 2**20:.2f} MiB on the rank with the most",
        f"place: {x.place}; local shapes {', '.join(str(list(s)) for s in x.local)}",
        f"its input is {'handed over in high precision' if found.takes == 'high' else f'quantized to {found.takes}'}",
        f"kernel: {choice.why}",
    ]
    for regime, pick in zip(plan.regimes, choice.picks, strict=True):
        c = pick.cost
        others = "".join(f"; {name} {us:,.1f} us" for name, us in pick.others)
        where = " as a block, norm to residual," if x.op in EXPERTS else f" inside {pick.inside},"
        lines.append(
            f"  {regime.name:<8} {pick.kernel.name}{where * bool(pick.inside)} {c.us:,.1f} us, bound by {c.bound} "
            f"(floor {c.floor_us:,.2f} us: {c.bytes / 1e6:,.2f} MB, {c.flops / 1e9:,.2f} GFLOP){others}"
        )
    lines += [f"rejected: {name} {reason}" for name, reason in choice.rejected]
    statuses = {p.kernel.name: p.kernel.status for p in choice.picks}
    return "\n".join([*lines, *(f"{name} is {status}" for name, status in statuses.items())])


def record(plan: Plan) -> dict[str, Any]:
    """Everything as JSON values: bytes, microseconds, every layer."""
    layers = []
    for p in plan.layers:
        x, choice = p.layer, p.choice
        picks = {
            r.name: {"kernel": k.kernel.name if k.kernel.module else None, "inside": k.inside, **asdict(k.cost)}
            for r, k in zip(plan.regimes, choice.picks, strict=True)
        }
        layers.append({
            "path": x.path, "op": x.op, "stored": x.stored, "runs": p.runs, "input": p.takes, "shape": x.shape,
            "local": x.local, "place": x.place, "bytes": x.weight_bytes, "kernels": picks, "why": choice.why,
            "rejected": dict(choice.rejected),
        })  # fmt: skip
    steps = [
        {"tokens": r.tokens, "prompt": r.prompt, "floor_us": plan.step_us(i, floor=True), "us": plan.step_us(i)}
        for i, r in enumerate(plan.regimes)
    ]
    return {
        "model": plan.subject.name, "tensors_seen": plan.subject.seen,
        "hardware": asdict(plan.hardware) | {"summary": plan.hardware.summary},
        "layout": asdict(plan.options.layout), "replicate": plan.options.replicate, "engine": asdict(plan.config),
        "memory": asdict(plan.memory) | {"copied_for": plan.copied_for}, "captured_sequences": plan.graphs,
        "steps": steps, "layers": layers,
        "notices": [asdict(n) for n in plan.told], "failures": plan.failures,
    }  # fmt: skip


def html(plan: Plan) -> str:
    """The plan as one page that needs nothing else: memory of each rank, time by kind of layer, the table."""
    data = json.dumps(record(plan), allow_nan=False).replace("<", "\\u003c")  # no tag can close the script
    return Path(__file__).with_name("plan.html").read_text(encoding="utf-8").replace("{{ plan }}", data)
