"""What measurements of bench/kernel.py and experts.py say: against targets, as tables, as a chart. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common import geomean

Row = dict[str, Any]  # a line of the result file
OURS = ("cuda", "triton")


def peer(row: Row) -> float | None:
    found = [row[key] for key in ("marlin_us", "humming_us") if key in row]
    return min(found) if found else None


def best(row: Row) -> float | None:
    """The best of the peers and cuBLAS in bf16."""
    found = [t for t in (peer(row), row.get("cublas_us")) if t is not None]
    return min(found) if found else None


@dataclass(frozen=True)
class Target:
    """what: of a row, None where it has none. must, goal: for the geometric mean. slack: the share of `must` that the
    worst shape needs; 1 holds each measurement to all of it."""

    name: str
    formats: tuple[str, ...]
    tokens: tuple[int, ...]
    what: Callable[[Row], float | None]
    must: float
    goal: float
    less: bool = False
    slack: float = 0.9

    def said(self, rows: Iterable[Row]) -> tuple[str, ...] | None:
        """Geometric mean, worst shape, verdict; None when nothing was measured for it."""
        shapes: dict[str, list[float]] = {}
        for row in rows:
            value = self.what(row)
            if row["tokens"] in self.tokens and row["format"] in self.formats and value is not None:
                alone = f" M={row['tokens']}" if self.slack == 1 else ""
                shapes.setdefault(row["shape"] + alone, []).append(value)
        if not shapes:
            return None
        means = {shape: geomean(values) for shape, values in shapes.items()}
        mean = geomean([v for values in shapes.values() for v in values])
        worst = (max if self.less else min)(means, key=lambda shape: means[shape])
        met = mean <= self.must if self.less else mean >= self.must
        near = means[worst] <= self.must / self.slack if self.less else means[worst] >= self.must * self.slack
        goal = mean <= self.goal if self.less else mean >= self.goal
        verdict = "missed" if not met else "a shape misses" if not near else "goal met" if goal else "met"
        sign = "<=" if self.less else ">="
        bars = f"{sign} {self.must:g}, {sign} {self.goal:g}"
        return self.name, f"{mean:.2f}", f"{means[worst]:.2f} {worst}", str(len(shapes)), bars, verdict


def _by(time_of: Callable[[Row], float | None]) -> Callable[[Row], float | None]:
    def times_faster(row: Row) -> float | None:
        other = time_of(row)
        return None if other is None else other / row["us"]

    return times_faster


FP8, FP4, SMALL, MIDDLE = ("fp8_tensor", "fp8_channel", "fp8_block"), ("nvfp4",), (1, 2, 4, 8, 16), (32, 64)
TARGETS = (
    Target("W4A16, M <= 16: x the better peer", FP4, SMALL, _by(peer), 1.5, 1.9),
    Target("W4A16, M <= 16: time / floor", FP4, SMALL, lambda r: 1 / r["of_floor"], 1.5, 1.2, less=True),
    Target("W4A16, M = 32, 64: x the best of peers and cuBLAS", FP4, MIDDLE, _by(best), 1.15, 1.5),
    Target("W4A16, M = 32, 64: x cuBLAS bf16", FP4, MIDDLE, _by(lambda r: r.get("cublas_us")), 1.0, 1.5, slack=1),
    Target("FP8, M <= 16: time / floor", FP8, SMALL, lambda r: 1 / r["of_floor"], 1.5, 1.2, less=True),
)


def shapes_table(rows: Sequence[Row], kernel: str) -> Table:
    """A line a shape: floor, then for each M: us, times the floor, and times faster than the best other."""
    mine = [r for r in rows if r["kernel"] == kernel]
    tokens = sorted({r["tokens"] for r in mine})
    table = Table(
        title=f"{kernel}: us, x floor, x faster than the best of peers and cuBLAS bf16", box=None, padding=(0, 1)
    )
    table.add_column("N x K", no_wrap=True)
    for name in ("floor", *(f"M={m}" for m in tokens)):
        table.add_column(name, justify="right", no_wrap=True)
    for shape in dict.fromkeys(r["shape"] for r in mine):
        cells = {r["tokens"]: r for r in mine if r["shape"] == shape}
        low, high = (f(r["floor_us"] for r in cells.values()) for f in (min, max))
        floor = f"{low:.1f}" if high < 1.5 * low else f"{low:.1f}-{high:.0f}"  # of experts it grows with M
        texts = []
        for m in tokens:
            row = cells.get(m)
            faster = _by(best)(row) if row else None
            text = f"{row['us']:.1f} {1 / row['of_floor']:.2f}" if row else ""
            texts.append(text + ("" if faster is None else f" {faster:.2f}"))
        table.add_row(shape, floor, *texts)
    return table


def kernels_table(rows: Sequence[Row]) -> Table:
    """Geometric means over the shapes for each kernel and M: times the floor; the worst error and spread."""
    tokens = sorted({r["tokens"] for r in rows})
    table = Table(title="time / floor, geometric mean over shapes", box=None, padding=(0, 1))
    table.add_column("kernel", no_wrap=True)
    for name in (*(f"M={m}" for m in tokens), "shapes", "worst error", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for kernel in dict.fromkeys(r["kernel"] for r in rows):
        own = [r for r in rows if r["kernel"] == kernel]
        means = [geomean([1 / r["of_floor"] for r in own if r["tokens"] == m]) for m in tokens]
        spread = sorted(r["spread"] for r in own)[len(own) // 2]
        tail = (str(len({r["shape"] for r in own})), f"{max(r['error'] for r in own):.1e}", f"{spread:.1%}")
        table.add_row(kernel, *("" if math.isnan(v) else f"{v:.2f}" for v in means), *tail)
    return table


def targets_table(rows: Sequence[Row], kernel: str, targets: Sequence[Target] = TARGETS) -> Table:
    table = Table(title=f"{kernel} against its targets", box=None, padding=(0, 1))
    for name in ("target", "geomean", "worst shape", "shapes", "must, goal", ""):
        table.add_column(name, no_wrap=True)
    mine = [r for r in rows if r["kernel"] == kernel]
    for target in targets:
        said = target.said(mine)
        if said:
            table.add_row(*said)
    return table


def plot(rows: Sequence[Row], path: Path) -> None:
    """Times faster than cuBLAS bf16 over M, geometric mean of the shapes that every line has, and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours = next(r["kernel"] for r in rows if r["kernel"].split()[0] in OURS)
    mine = [r for r in rows if r["kernel"] == ours and "cublas_us" in r]
    peers = [p for p in ("humming", "marlin") if any(f"{p}_us" in r for r in mine)]
    shared = [r for r in mine if all(f"{p}_us" in r for p in peers)]
    tokens = sorted({r["tokens"] for r in shared})
    figure, axes = pyplot.subplots(figsize=(7, 4.2), constrained_layout=True)
    lines = {ours: "us", "read-only floor": "floor_us", **{f"{p} (stored ratio)" if any(
        f"{p}_from" in r for r in shared) else p: f"{p}_us" for p in peers}}  # fmt: skip
    for label, key in lines.items():
        means = [geomean([r["cublas_us"] / r[key] for r in shared if r["tokens"] == m]) for m in tokens]
        style = {"linestyle": "--", "color": "grey"} if key == "floor_us" else {"marker": "o"}
        axes.plot(tokens, means, label=label, **style)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens in the batch (M)", ylabel="times faster than cuBLAS in bf16")
    axes.set_xticks(tokens, [str(m) for m in tokens], minor=False)
    axes.minorticks_off()
    axes.set_title(
        f"{shared[0]['format']} dense layers, {len({r['shape'] for r in shared})} shapes, {shared[0]['gpu']}"
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
