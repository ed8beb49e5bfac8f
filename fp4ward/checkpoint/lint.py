"""Is a checkpoint healthy? Every fault that loading would stop at, not only the first, and what its scales look like.

Headers are judged by the code that loads (assign, scheme), which hands its faults over one by one instead of stopping;
numbers by scan.py. Legal but telling things (global scales that differ inside a fused group, experts of zeros) are
"info": they run exactly as they are. No torch before scales are read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fp4ward.checkpoint.assign import Assignment, assign, caught
from fp4ward.checkpoint.index import Index, modules, open_documents, open_index, sees_tensors
from fp4ward.errors import UserError
from fp4ward.formats.formats import SCALE_LEAVES, recognise
from fp4ward.formats.scheme import FUSED, NUMBER, read_scheme, settle
from fp4ward.parallel.placement import Slot

SEVERITIES = ("error", "warning", "info")
# Notices that tell what is done with a file, not that two statements disagree.
INFO = "left-out duplicate-file extra-shard ignored-file input-scale-dropped input-scale-ignored scale-unused "
INFO += "formats-unstated kv-scale-unit kv-scale-unasked producer-differs"

FactsOf = Callable[[Mapping[str, Any]], Any]  # config.json -> the facts of its architecture
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Finding:
    """severity: one of SEVERITIES. code: stable, for programs. where: tensor, layer or file. text: a sentence."""

    severity: str
    code: str
    where: str
    text: str


@dataclass
class Kind:
    """Quantized weights of one kind in all layers and experts. Ranges are [least, most] of the positive finite values;
    `scales` are NVFP4's global scales and all of FP8. zeros: codes that are zero; most_zeros: largest share of any."""

    stored_as: str
    weights: int = 0
    block_scales: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    codes: int = 0
    zeros: int = 0
    most_zeros: float = 0.0


@dataclass
class Fused:
    """Projections that other engines compute as one, so with one scale. ratio: the largest, in the layer `where`."""

    groups: int = 0
    differ: int = 0
    ratio: float = 1.0
    where: str = ""


@dataclass
class Report:
    """What was found. seen: whether there were tensors or JSON alone. kinds, fused: by name, with * for numbers."""

    seen: bool = True
    tensors: int = 0
    files: int = 0
    bytes: int = 0
    findings: dict[Finding, None] = field(default_factory=dict)  # in order, each once
    kinds: dict[str, Kind] = field(default_factory=dict)
    fused: dict[str, Fused] = field(default_factory=dict)

    def add(self, severity: str, code: str, where: str, text: str) -> None:
        self.findings[Finding(severity, code, where, text)] = None

    def fault(self, where: str, error: UserError) -> None:
        self.add("error", error.code or "unreadable", where, str(error))

    @property
    def counts(self) -> dict[str, int]:
        return {s: sum(f.severity == s for f in self.findings) for s in SEVERITIES}


def examine(folder: Path, facts_of: FactsOf, *, scales: bool = False, progress: Progress | None = None) -> Report:
    """Everything that can be said of the checkpoint in `folder`; its faults never raise.

    scales: read the scales and codes, too. progress(done, total, tensor) counts their bytes.
    """
    report = Report()
    gc.disable()  # as in planning: hundreds of thousands of headers that all stay alive
    try:
        report.seen = sees_tensors(folder)
        index = open_index(folder, report.fault) if report.seen else open_documents(folder)
        report.tensors, report.bytes = len(index.tensors), sum(t.nbytes for t in index.tensors.values())
        report.files = len({t.file for t in index.tensors.values()})
        assigned = _headers(index, facts_of, report)
    except UserError as e:  # in a document that all the rest depends on
        report.fault("checkpoint", e)
        return report
    finally:
        gc.enable()
    if scales and report.seen:
        from fp4ward.checkpoint import scan

        scan.read(assigned, report, progress)
    return report


def _headers(index: Index, facts_of: FactsOf, report: Report) -> Assignment:
    known: Any = None
    cfg = slots = None
    try:
        known = facts_of(index.config)
        cfg = known.parse(index.config)
        slots = tuple(known.weights(cfg))
    except UserError as e:
        severity, code = ("warning", "architecture") if known is None else ("error", "config")
        report.add(severity, code, "model", f"{e}; so the tensors are not held against the model")
    canonical: Callable[[str], str] = known.canonical if known is not None else lambda name: name
    scheme = None
    with caught("quantization", report.fault):
        scheme = read_scheme(index.config, index.hf_quant_config, canonical)
    scheme = scheme or read_scheme({}, None, canonical)
    # A tensor that the index promises leaves a slot empty, too: one finding is enough.
    told = {canonical(f.where) for f in report.findings if f.code == "missing"}
    told |= {name.rpartition(".")[0] for name in told}

    def on_fault(where: str, error: UserError) -> None:
        if error.code != "missing" or where not in told:
            report.fault(where, error)

    if slots is not None and index.tensors:
        out = assign(index, slots, facts=known, scheme=scheme, on_fault=on_fault)
        for name in _draft_lacks(index, known, cfg, slots):
            on_fault(
                name,
                UserError(f"missing tensor {name} of multi-token prediction, parts of which are stored", "missing"),
            )
    else:
        out = Assignment(notices=[*index.notices, *scheme.notices])
        for module, leaves in modules(index, canonical, on_fault).items():
            if any(leaf in SCALE_LEAVES for leaf in leaves):  # what else there may be is for an architecture to say
                with caught(module, on_fault):
                    stored = recognise(module, leaves)
                    out.passed_over |= {} if stored is None else {module: stored}
        if index.tensors:
            out.formats, notices = settle(scheme, out.passed_over, on_fault)
            out.notices += notices
    for notice in out.notices:
        report.add("info" if notice.code in INFO.split() else "warning", notice.code, notice.where, notice.text)
    for whole, parts in groups(out.formats):
        if len({out.formats[p] for p in parts}) > 1:
            text = ", ".join(f"{p.rpartition('.')[2]} is {out.formats[p].label}" for p in parts)
            report.add("info", "fused-formats", whole, f"{text}: not fused, each runs in its own format")
    return out


def _draft_lacks(index: Index, known: Any, cfg: Any, slots: Sequence[Slot]) -> Iterator[str]:
    """What multi-token prediction lacks, although loading leaves it out. Nothing where none of it is stored."""
    names = {name for t in index.tensors if (name := known.canonical(t)).startswith("mtp.")}
    names |= {name.rpartition(".")[0] for name in names}  # modules
    if not names or known.draft_like(cfg, 0) is None:
        return
    yield from (name for name in known.DRAFT if name not in names)
    for layer in sorted({n for name in names if name.count(".") > 2 and (n := name.split(".")[2]).isdigit()} or {"0"}):
        prefix = f"layers.{known.draft_like(cfg, int(layer))}."
        for slot in slots:
            if slot.name.startswith(prefix):
                own, stack = (
                    f"mtp.layers.{layer}.{name.removeprefix(prefix)}"
                    for name in (slot.name, slot.stacked[0] if slot.stacked else slot.name)
                )
                parent, _, last = own.rpartition(".")
                each = [f"{parent}.{e}.{last}" for e in range(slot.shape[0])] if slot.kind == "experts" else [own]
                yield from (name for name in each if name not in names and stack not in names)


def groups(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Fused name and parts of each group of projections whose parts are all among `names`."""
    known = set(names)
    heads = {parts.split()[0]: (whole, parts.split()) for whole, parts in FUSED.items()}
    for name in sorted(known):
        parent, _, last = name.rpartition(".")
        if last in heads:
            parts = [f"{parent}.{p}" for p in heads[last][1]]
            if known.issuperset(parts):
                yield f"{parent}.{heads[last][0]}", parts


# ---- output ----------------------------------------------------------------------------------------------------------


def record(report: Report) -> dict[str, Any]:
    """Everything, for programs: findings one by one, not folded over layers."""
    rest = asdict(replace(report, findings={}))
    return rest | {"counts": report.counts, "findings": [asdict(f) for f in report.findings]}


def render(report: Report, name: str) -> str:
    """For people: findings by severity with equal ones of all layers in one line, then what the scales are."""
    size = f"{report.tensors} tensors in {_many(report.files, 'file')}, {report.bytes / 2**30:.2f} GiB"
    counts = ", ".join(_many(n, s) if s != "info" else f"{n} info" for s, n in report.counts.items())
    lines = [f"{name}: {size if report.seen else 'only JSON, tensors were not seen'}; {counts}"]
    folded: dict[tuple[str, str, str], list[Finding]] = {}
    for f in report.findings:
        folded.setdefault((f.severity, f.code, NUMBER.sub("*", f.where)), []).append(f)
    for severity in SEVERITIES:
        of = {key: each for key, each in folded.items() if key[0] == severity}
        lines += ["", severity] if of else []
        for (_, code, where), each in of.items():
            where = each[0].where if len(each) == 1 else f"{where} ({len(each)}), the first"
            lines.append(f"  {code}: {where}: {each[0].text}")
    if report.kinds:
        rows = [
            ["quantized weights", "n", "stored as", "block scales", "global or FP8 scales", "zero codes", "at most"]
        ]
        for kind, k in sorted(report.kinds.items()):
            ranges = [" .. ".join(f"{v:.4g}" for v in r) or "-" for r in (k.block_scales, k.scales)]
            shares = f"{k.zeros / max(k.codes, 1):.1%}", f"{k.most_zeros:.1%}"
            rows.append([kind, str(k.weights), k.stored_as, *ranges, *shares])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", *("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)]
    return "\n".join(lines)


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
