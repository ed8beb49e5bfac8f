"""Numbers of a kernel's row from measurements: least squares of relative errors. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fp4ward.formats.formats import FORMATS
from fp4ward.hardware import Hardware
from fp4ward.kernels.specs import BF16, F32, ITEM, LAUNCH_US, Batch, KernelSpec, LayerDesc, estimate, unfit
from tests.cases import DENSE, MOE, Dense

NEAR = 0.3  # an estimate within 30 % of the measurement serves
FREE = 1e12  # a share that makes a part of the cost vanish
ROUNDS = 20
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

    def parts(self, spec: KernelSpec, hw: Hardware) -> list[float]:
        """us of memory and of products at the machine's limits, of one launch, and of one an expert that is hit."""
        alone = (1.0, FREE, (0, 0)), (FREE, 1.0, (0, 0)), (FREE, FREE, (1, 0)), (FREE, FREE, (0, 1))
        return [self.estimate(replace(spec, memory=m, compute=c, launches=n), hw) for m, c, n in alone]


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
    """The row with the shares and launches that fit `points` best. A share that they do not show stays: that of memory
    where all are bound by products, say. None is above the machine's limit (twice that, where a CPU's is assumed).

    A point is bound by memory or by products; which of them depends on the numbers, so both are found in turn.
    """
    parts = torch.tensor([p.parts(spec, hw) for p in points], dtype=torch.float64)
    parts /= torch.tensor([[p.us] for p in points], dtype=torch.float64)
    least = torch.tensor([0.5 if hw.cpu else 1.0] * 2 + [0.0] * 2, dtype=torch.float64)
    now = torch.tensor([1 / spec.memory, 1 / spec.compute, *spec.launches], dtype=torch.float64)
    best, fewest = now, float("inf")
    for _ in range(ROUNDS):
        memory = parts[:, 0] * now[0] >= parts[:, 1] * now[1]
        bound = torch.stack([parts[:, 0] * memory, parts[:, 1] * ~memory, parts[:, 2], parts[:, 3]], 1)
        shown = [i for i in range(4) if bound[:, i].any() and (i < 3 or spec.launches[1])]
        now = now.clone()
        now[shown] = least[shown] + _non_negative(bound[:, shown], 1 - bound[:, shown] @ least[shown])
        said = torch.maximum(parts[:, 0] * now[0], parts[:, 1] * now[1]) + parts[:, 2:] @ now[2:]
        wrong = float((said - 1).square().sum())
        if wrong < fewest:
            best, fewest = now, wrong
    memory_us, compute_us, first, each = best.tolist()
    return replace(spec, memory=1 / memory_us, compute=1 / compute_us, launches=(first, each))


def _non_negative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """x that makes a x nearest to b, of those without a negative number."""
    out, columns = torch.zeros(a.shape[1], dtype=a.dtype), list(range(a.shape[1]))
    while columns:
        x = torch.linalg.lstsq(a[:, columns], b[:, None], driver="gelsd").solution[:, 0]
        if x.min() >= 0:
            out[columns] = x
            break
        del columns[int(x.argmin())]
    return out


def report(spec: KernelSpec, fitted: KernelSpec, points: Sequence[Point], hw: Hardware) -> list[dict[str, object]]:
    """Print estimates of today's row and of the fitted one beside the measurements, and what to paste into the row. One
    line a point for a result file."""
    print(f"{spec.name}\n{'shape':16}{'tokens':>7}{'us':>11}{'row says':>11}{'ratio':>7}{'fitted':>11}{'ratio':>7}")
    lines: list[dict[str, object]] = []
    ratios: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for p in points:
        said, better = p.estimate(spec, hw), p.estimate(fitted, hw)
        ratios[p.held].append((said / p.us, better / p.us))
        each = f"{said:11.1f}{said / p.us:7.2f}{better:11.1f}{better / p.us:7.2f}"
        print(f"{p.layer.path:16}{p.tokens:7}{p.us:11.1f}{each}{'  held out' * p.held}")
        line = {"row": spec.name, "shape": p.layer.path, "format": p.layer.formats[0].name, "tokens": p.tokens}
        lines.append(line | {"held_out": p.held, "us": p.us, "estimate_us": said, "fitted_us": better})
    for held, found in ratios.items():
        today, better = (sum(abs(r[i] - 1) <= NEAR for r in found) for i in (0, 1))
        where = "held out" if held else "in the fit"
        print(f"{where}: within {NEAR:.0%}: {today} of {len(found)} today, {better} of {len(found)} fitted")
    first, each_hit = (f"{n:.3g}" for n in fitted.launches)
    shares = f"memory={fitted.memory:.2g}, compute={fitted.compute:.2g}, launches=({first}, {each_hit})"
    print(f"  {spec.name}: {shares} of {LAUNCH_US[hw.cpu]} us\n")
    return lines
