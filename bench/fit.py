"""Numbers of a kernel's row from measurements: least squares of relative errors. Needs no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp4ward.formats.formats import FORMATS
from fp4ward.hardware import Hardware, parse
from fp4ward.kernels.specs import BF16, F32, ITEM, LAUNCH_US, SPECS, Batch, KernelSpec, LayerDesc, estimate, unfit
from tests.cases import DENSE, MOE, Dense

NEAR = 0.3  # an estimate within 30 % of the measurement serves
ROUNDS, STEP = 60, 1e-4  # of a fit; by how much a logarithm moves to find a slope
PULL = 0.1  # towards today's row: what measurements hardly show stays near it
HELD_OUT = 3  # every third shape
LARGEST_ON_CPU = {"linear": 1 << 23, "experts": 1 << 27}  # weights of a matrix (a stack)


@dataclass(frozen=True)
class Point:
    """A measurement: us of `layer` with `tokens`. held: out of the fit."""

    layer: LayerDesc
    tokens: int
    held: bool
    us: float

    def estimate(self, spec: KernelSpec, hw: Hardware) -> float:
        batch = Batch(self.tokens, self.tokens, 0, ITEM[F32 if hw.cpu else BF16], 2)
        return estimate(spec, self.layer, hw, batch).us

    def line(self, spec: KernelSpec) -> dict[str, object]:
        """For a result file; `read` takes it back."""
        about = {"row": spec.name, "shape": self.layer.path, "format": self.layer.formats[0].name}
        return about | {"tokens": self.tokens, "us": round(self.us, 3)}


def read(files: Sequence[Path]) -> tuple[Hardware, list[tuple[KernelSpec, list[Point]]]]:
    """The machine and the points of each row that it has. Of equal points the last one counts. AssertionError where
    files are of several machines."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    machines = {line["machine"] for line in lines}
    assert len(machines) == 1, f"measurements of one machine are expected, not of {sorted(machines)}"
    hw = parse(*machines)
    us = {(line["row"], line["shape"], line["tokens"]): line["us"] for line in lines}
    out = []
    for spec in (s for s in SPECS if any(s.name == row for row, *_ in us)):
        shapes = {layer.path: (layer, held) for layer, held in layers(spec, hw)}
        mine = [(shape, m, t) for (row, shape, m), t in us.items() if row == spec.name]
        out.append((spec, [Point(shapes[shape][0], m, shapes[shape][1], t) for shape, m, t in mine]))
    return hw, out


def layers(spec: KernelSpec, hw: Hardware) -> Iterator[tuple[LayerDesc, bool]]:
    """The shapes that a row runs here, in a format it reads, and whether they are held out."""
    cases = {"linear": DENSE, "experts": [c for c in MOE if c.gated]}.get(spec.op, ())
    for at, case in enumerate(cases):
        shape, top_k = ((case.n, case.k), 0) if isinstance(case, Dense) else ((case.e, case.i, case.h), case.top_k)
        if hw.cpu and math.prod(shape) > LARGEST_ON_CPU[spec.op]:
            continue
        for f in FORMATS.values():
            f = f.with_activation("none" if spec.input == "high" else spec.input)
            layer = LayerDesc(case.name, spec.op, f.label, (f,), shape, (shape,), top_k=top_k)
            if unfit(spec, layer, hw, F32 if hw.cpu else BF16) is None:
                yield layer, at % HELD_OUT == HELD_OUT - 1
                break


def fit(spec: KernelSpec, hw: Hardware, points: Sequence[Point]) -> KernelSpec:
    """The row with the numbers that fit `points` best (Levenberg and Marquardt's method, on logarithms). What is 0 in
    the row stays 0, and a share of 1 stays 1: its author says that the kernel has no such cost. What the points do not
    show stays, and no share is above the machine's limit (twice that, where a CPU's is assumed)."""
    numbers, shares = _numbers(spec)
    start = [math.log(v) for v in numbers]
    top = [math.log(2.0 if hw.cpu else 1.0) if share else math.inf for share in shares]

    def wrong(x: list[float]) -> torch.Tensor:
        tried = _with(spec, [math.exp(v) for v in x])
        off = [p.estimate(tried, hw) / p.us - 1 for p in points]
        return torch.tensor(off + [PULL * (v - s) for v, s in zip(x, start, strict=True)], dtype=torch.float64)

    now, damping = start, 1.0
    errors = wrong(now)
    for _ in range(ROUNDS):
        moved = [wrong([v + STEP * (i == j) for j, v in enumerate(now)]) for i in range(len(now))]
        slopes = (torch.stack(moved) - errors) / STEP
        curve = slopes @ slopes.T
        step = torch.linalg.solve(curve + damping * curve.diagonal().diag(), slopes @ errors).tolist()
        tried = [min(v - d, most) for v, d, most in zip(now, step, top, strict=True)]
        if (better := wrong(tried)).square().sum() < errors.square().sum():
            now, errors, damping = tried, better, damping / 4
        else:
            damping *= 4
    return _with(spec, [math.exp(v) for v in now])


def _numbers(spec: KernelSpec) -> tuple[list[float], list[bool]]:
    """What a fit may change, in the order in which `_with` takes it back; whether each is a share of a limit."""
    cuts = [pair for c in spec.cuts for pair in ((c.compute, True), (c.rows, False), (c.columns, False))]
    every = [(spec.memory, True), *cuts, *((v, False) for v in (spec.extra[1], *spec.launches))]
    found = [(v, share) for v, share in every if v and not (share and v == 1)]
    return [v for v, _ in found], [share for _, share in found]


def _with(spec: KernelSpec, numbers: Sequence[float]) -> KernelSpec:
    left = iter(numbers)

    def take(old: float, own: float = 0) -> float:
        return old if old == own else next(left)

    memory = take(spec.memory, 1)
    cuts = [replace(c, compute=take(c.compute, 1), rows=take(c.rows), columns=take(c.columns)) for c in spec.cuts]
    extra, launches = (spec.extra[0], take(spec.extra[1])), (take(spec.launches[0]), take(spec.launches[1]))
    return replace(spec, memory=memory, cuts=tuple(cuts), extra=extra, launches=launches)


def report(spec: KernelSpec, points: Sequence[Point], hw: Hardware) -> None:
    """Print estimates of today's row and of the fitted one beside the measurements, and what to paste into the row."""
    if not (shown := [p for p in points if not p.held]):
        return
    fitted = fit(spec, hw, shown)
    print(f"{spec.name}\n{'shape':16}{'tokens':>7}{'us':>11}{'row says':>11}{'ratio':>7}{'fitted':>11}{'ratio':>7}")
    ratios: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for p in points:
        said, better = p.estimate(spec, hw), p.estimate(fitted, hw)
        ratios[p.held].append((said / p.us, better / p.us))
        each = f"{said:11.1f}{said / p.us:7.2f}{better:11.1f}{better / p.us:7.2f}"
        print(f"{p.layer.path:16}{p.tokens:7}{p.us:11.1f}{each}{'  held out' * p.held}")
    for held, found in ratios.items():
        today, better = (sum(abs(r[i] - 1) <= NEAR for r in found) for i in (0, 1))
        where = "held out" if held else "in the fit"
        print(f"{where}: within {NEAR:.0%}: {today} of {len(found)} today, {better} of {len(found)} fitted")
    print(f"  {spec.name}: {numbers(fitted)}; {LAUNCH_US[hw.cpu]} us a launch\n")


def numbers(spec: KernelSpec) -> str:
    """As they are written in the row."""

    def short(v: float) -> str:
        return f"{float(f'{v:.2g}'):g}"

    cuts = []
    for c in spec.cuts:
        values = [short(c.compute), short(c.rows), short(c.columns), str(c.tokens), str(c.most)]
        while values[-1] in ("0", "inf"):
            values.pop()
        cuts.append(f"Cut({', '.join(values)})")
    extra, launches = (", ".join(map(short, pair)) for pair in (spec.extra, spec.launches))
    return f"memory={short(spec.memory)}, cuts=({', '.join(cuts)},), extra=({extra}), launches=({launches})"
