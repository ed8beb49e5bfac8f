"""How much do the launches that cuda_linear.choose takes lose to the best ones, and which COSTS would lose less?

    python bench/launches.py [--shapes REGEX] [--tokens 1,8,16,32,64] [--seconds 60] [--out FILE] [--commit ID]
    python bench/launches.py --refit-from FILE

On a GPU: every way to launch NVFP4's kernels (cuda_linear.WAYS with each of CLUSTERS) that fits a shape of
tests/cases.py, timed in turn on weights that are not in the L2 cache; correctness is bench/kernel.py's matter. Printed
is by how much the ways that choose takes are slower than the best ones. --refit-from reads what --out wrote, anywhere,
fits COSTS by least squares of relative errors without negative costs, near the best ways more closely, and prints the
losses with today's and with the fitted ones.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench import common  # noqa: E402
from bench.kernel import numbers, select  # noqa: E402
from fp4ward.errors import UserError, one_line  # noqa: E402
from fp4ward.kernels import cuda_linear, nvrtc  # noqa: E402
from fp4ward.kernels.cuda_linear import COSTS, Gpu, Launch  # noqa: E402

Costs = Mapping[str, Sequence[float]]
Cell = list[tuple[Launch, float]]  # ways of a shape and a number of tokens, and their microseconds


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    device, deadline, rows = torch.device(common.DEVICE), time.monotonic() + args.seconds, []
    gpu, cases = cuda_linear.gpu_here(device), select(args.shapes, odd=False)
    tokens = [m for m in numbers(args.tokens) if m <= cuda_linear.MAX_TOKENS]
    ways = {(c, m): cuda_linear.launches("nvfp4", m, c.n, c.k, gpu, {}) for c in cases for m in tokens}
    every = [launch for own in ways.values() for _, launch in own]
    sources = dict.fromkeys(cuda_linear._source("nvfp4", one.entry, False, one.defines) for one in every)
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(nvrtc.kernel, device=device), sources))
    for case in cases:
        first = cuda_linear.prepare(common.random_weight("nvfp4", case.n, case.k))
        copies = [first] + [
            cuda_linear.Prepared(first.format, first.shape, first.records.clone(), first.row_scale)
            for _ in range(common.copies_for(first.records.numel()) - 1)
        ]
        for m in tokens if time.monotonic() < deadline else ():
            x = torch.randn(m, case.k, device=device).bfloat16()
            graphs = {}
            for way, launch in ways[case, m]:
                tuning = {name: v for name, v in launch.defines.items() if name != "NT"}
                calls = [partial(cuda_linear.linear, x, w, **tuning) for w in copies]
                calls[0]()
                each = first.records.numel() / 4e6 + 3  # microseconds, about; of graphs of 400
                graphs[json.dumps([launch.entry, way])] = common.capture(
                    calls, max(len(copies), min(96, int(400 / each)))
                )
            times = {key: us for key, (us, _) in common.abba(graphs, 2).items()}
            rows.append({"n": case.n, "k": case.k, "tokens": m, "us": times})
    return rows


def cells(rows: Sequence[Mapping[str, object]], gpu: Gpu) -> dict[tuple[int, int, int], Cell]:
    found: dict[tuple[int, int, int], Cell] = {}
    for row in rows:
        n, k, m = (int(row[name]) for name in ("n", "k", "tokens"))  # type: ignore[call-overload]
        pairs = ((json.loads(key), us) for key, us in row["us"].items())  # type: ignore[attr-defined]
        launched = [(cuda_linear.KERNELS[entry]("nvfp4", m, n, k, gpu, way), us) for (entry, way), us in pairs]
        found[n, k, m] = [(launch, us) for launch, us in launched if launch is not None]
    return found


def fitted(found: Mapping[tuple[int, int, int], Cell]) -> Costs:
    costs = {}
    for entry in COSTS:
        points = [
            (launch.amounts, us, min(t for _, t in cell))
            for cell in found.values()
            for launch, us in cell
            if launch.entry == entry
        ]
        amounts, us, best = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
        weighed, want = amounts * (best / us**2)[:, None], best / us
        live = [i for i in range(amounts.shape[1]) if amounts[:, i].any()]
        while True:  # whatever would cost less than nothing costs nothing
            part = torch.linalg.lstsq(weighed[:, live], want[:, None], driver="gelsd").solution[:, 0].tolist()
            if min(part) >= 0:
                break
            live.pop(part.index(min(part)))
        own = dict(zip(live, part, strict=True))
        costs[entry] = tuple(float(f"{own.get(i, 0.0):.3g}") for i in range(amounts.shape[1]))
    return costs


def estimate(costs: Costs, launch: Launch) -> float:
    return sum(cost * amount for cost, amount in zip(costs[launch.entry], launch.amounts, strict=True))


def report(found: Mapping[tuple[int, int, int], Cell], costs: Costs, title: str) -> None:
    """Time of the way with the lowest estimate over the best time."""
    losses, console = defaultdict(list), Console()
    for (n, k, m), cell in found.items():
        taken, best = min(cell, key=lambda pair: estimate(costs, pair[0])), min(cell, key=lambda pair: pair[1])
        losses[m].append((taken[1] / best[1], f"{n}x{k}"))
    table = Table("tokens", "loss, geometric mean", "worst", "shape", title=title)
    for m, every in sorted(losses.items()):
        mean = math.exp(sum(math.log(loss) for loss, _ in every) / len(every))
        table.add_row(str(m), f"{mean - 1:.1%}", f"{max(every)[0] - 1:.0%}", max(every)[1])
    console.print(table)


def run(args: argparse.Namespace) -> int:
    if args.refit_from is None and not torch.cuda.is_available():
        raise UserError("this needs a GPU; --refit-from FILE fits to what one measured")
    if args.refit_from is None:
        rows, gpu = measure(args), cuda_linear.gpu_here(torch.device(common.DEVICE))
        common.write_lines(args.out, [common.head(args.commit) | row for row in rows])
    else:
        try:
            rows, gpu = [json.loads(line) for line in args.refit_from.read_text().splitlines()], cuda_linear.H200
            assert rows and all({"n", "k", "tokens", "us"} <= row.keys() for row in rows), "no lines of this benchmark"
        except (OSError, ValueError, AssertionError) as e:
            raise UserError(f"--refit-from {args.refit_from}: {one_line(e)}") from None
    found = cells(rows, gpu)
    report(found, COSTS, "ways that COSTS take")
    if args.refit_from is not None:
        report(found, costs := fitted(found), "with these instead:")
        for entry, own in costs.items():
            print(f'    "{entry}": {re.sub(r"0[.]0(?=[,)])", "0", str(own))},')
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", metavar="REGEX", help="of names such as 8192x2048 or modules (all)")
    parser.add_argument("--tokens", default="1,8,16,32,64")
    parser.add_argument("--seconds", type=float, default=60, help="begin no shape after so many (60)")
    parser.add_argument("--refit-from", type=Path, metavar="FILE", help="measure nothing")
    parser.add_argument("--out", type=Path, help="JSON lines, for --refit-from")
    parser.add_argument("--commit", help="recorded where the tree came without its git folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return common.command(run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
