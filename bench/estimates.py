"""How far are the planner's estimates from what kernels take here, and which numbers of their rows would be nearer?

    python bench/estimates.py [--rows NAME,NAME] [--tokens 1 16 256] [--seconds 60] [--out FILE] [--commit ID]
    python bench/estimates.py --refit-from FILE... [--rows NAME,NAME]

Every row of kernels/specs.py that this machine runs, on the shapes of tests/cases.py in the first format that it reads.
Every third shape, in the table's order, is held out: the numbers of the row that are not 0 are fitted to the others by
least squares of relative errors. Both kinds are printed, with the estimate of today's row and of the fitted one, and
what to paste into the row. GPU: captured launches, each on weights and routing that are not in the L2 cache, and no
references unless --rows names one that can be captured; CPU: one thread, small shapes. A wrong result is not timed:
exit code 1. --refit-from fits to measurements that --out once wrote, anywhere: of equal points the last one counts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import common  # noqa: E402
from bench.fit import Point, layers, read, report  # noqa: E402
from fp4ward import hardware  # noqa: E402
from fp4ward.errors import one_line  # noqa: E402
from fp4ward.formats.weight import Weight  # noqa: E402
from fp4ward.kernels import experts, linear  # noqa: E402
from fp4ward.kernels.specs import BF16, F32, REFERENCE, SPECS, KernelSpec, LayerDesc  # noqa: E402
from fp4ward.runtime.runner import code  # noqa: E402
from tests.cases import NORM_ERROR  # noqa: E402

Run = partial[Tensor]
QUANTIZED_ERROR = 0.1  # of a kernel that quantizes its input


def sets(layer: LayerDesc) -> list[list[Weight]]:
    """As many copies of a layer's weights as overflow the cache."""
    name, shape = layer.formats[0].name, layer.shape
    turned = (*shape[:-2], shape[-1], shape[-2])
    first = [common.random_weight(name, *s) for s in ((shape,) if layer.op == "linear" else (shape, shape, turned))]
    first = [Weight(layer.formats[0], w.parts) for w in first]
    count = 1 if common.DEVICE == "cpu" else min(64, common.copies_for(sum(w.nbytes for w in first)))
    return [first] + [
        [Weight(w.format, {n: p.clone() for n, p in w.parts.items()}) for w in first] for _ in range(count - 1)
    ]


def calls(spec: KernelSpec, layer: LayerDesc, weights: Sequence[Sequence[object]], x: Tensor) -> list[Run]:
    """Enough of them that none meets a warm cache. Of experts each with a routing of its own."""
    kernel = code(spec, spec.function)
    if layer.op == "linear":
        return [partial(kernel, x, *own) for own in weights]
    met = layer.weight_bytes * min(1.0, len(x) * layer.top_k / layer.shape[0])
    draws = 5 if common.DEVICE == "cpu" else max(len(weights), min(64, math.ceil(common.COLD / met)))
    logits = torch.randn(draws, len(x), layer.shape[0], device=x.device)
    routed = [experts.route(one, layer.top_k) for one in logits]
    return [partial(kernel, x, *weights[i % len(weights)], *route) for i, route in enumerate(routed)]


def microseconds(runs: Sequence[Callable[[], object]]) -> float:
    _ = [run() for run in runs[:2]]
    if common.DEVICE != "cpu":
        return common.abba({"": common.capture(runs, max(8, len(runs)))}, 5)[""][0]
    times = []
    for i in range(max(5, len(runs))):
        start = time.perf_counter()
        runs[i % len(runs)]()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


def error(run: Run, layer: LayerDesc, weights: Sequence[Weight]) -> float:
    """Norm-wise, of the first tokens against float64. run: one of `calls`."""
    x, *_ = run.args
    few = slice(0, 4)
    routed = [t[few] for t in run.args[-2:]] if layer.op == "experts" else []
    truth = experts.reference if routed else linear.reference
    return common.norm_error(run()[few], truth(x[few].double(), *weights, *routed))


def measure(
    spec: KernelSpec, hw: hardware.Hardware, tokens: Sequence[int], deadline: float, points: list[Point]
) -> Iterator[str]:
    """Fills points; what is worth a note comes out."""
    taken = [m for m in tokens if spec.tokens[0] <= m <= spec.tokens[1]]
    dtype = getattr(torch, F32 if hw.cpu else BF16)
    for layer, held in layers(spec, hw) if taken else ():
        if time.monotonic() > deadline:
            yield f"no time left for {spec.name} from {layer.path} on"
            return
        torch.manual_seed(0)
        stored = sets(layer)
        weights = [(code(spec, spec.prepare)(*own),) for own in stored] if spec.prepare else stored
        x = torch.randn(taken[-1], layer.shape[-1], device=common.DEVICE, dtype=dtype)
        for m in taken:
            runs = calls(spec, layer, weights, x[:m])
            wrong = error(runs[0], layer, stored[0]) if m in (taken[0], taken[-1]) else 0.0
            if not wrong <= (NORM_ERROR if spec.input == "high" else QUANTIZED_ERROR):
                yield f"{spec.name} is wrong at {layer.path}, {m} tokens: error {wrong:.1e}"
                break
            points.append(Point(layer, m, held, microseconds(runs)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="names of kernels/specs.py (all but references; on a CPU all)")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step (1 4 16 64 256 2048; on a CPU 1 16 64)")
    parser.add_argument("--seconds", type=float, default=60, help="of measuring (60)")
    parser.add_argument("--refit-from", type=Path, nargs="+", metavar="FILE", help="measure nothing")
    parser.add_argument("--out", type=Path, help="measurements, for --refit-from")
    parser.add_argument("--commit", help="recorded where the tree came without its git folder")
    args = parser.parse_args(argv)
    hw = hardware.detect()
    common.DEVICE = "cpu" if hw.cpu else "cuda"
    tokens = sorted(args.tokens or ((1, 16, 64) if hw.cpu else (1, 4, 16, 64, 256, 2048)))
    default = [s.name for s in SPECS if s.op in ("linear", "experts") and (hw.cpu or s.status != REFERENCE)]
    names, notes, lines = args.rows.split(",") if args.rows else default, [], []
    if unknown := {*names} - {s.name for s in SPECS}:
        parser.error(f"--rows: no kernel {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in SPECS)}")
    if args.refit_from:
        hw, found = read(args.refit_from)
        for spec, points in found:
            if spec.name in names or not args.rows:
                report(spec, points, hw)
        return 0
    rows = [s for s in SPECS if s.name in names and (args.rows or any(layers(s, hw)))]
    if hw.cpu:
        torch.set_num_threads(1)  # on cores that others use too, threads wait for each other
    head = common.head(args.commit)
    start, about = time.monotonic(), {k: head[k] for k in ("date", "gpu", "commit", "torch")} | {"machine": hw.name}
    print(f"on {hw.summary}\n")
    for i, spec in enumerate(rows):
        deadline = start + args.seconds * (i + 1) / len(rows)
        points: list[Point] = []
        try:
            notes += measure(spec, hw, tokens, deadline, points)
        except Exception as e:  # the others are still worth their time
            notes.append(f"{spec.name} fails after {len(points)} measurements: {type(e).__name__}: {one_line(e)}")
        report(spec, points, hw)
        lines += [about | point.line(spec) for point in points]
    for note in notes:
        print(note)
    common.write_lines(args.out, lines)
    return int(any(" is wrong at " in note or " fails after " in note for note in notes))


if __name__ == "__main__":
    sys.exit(main())
