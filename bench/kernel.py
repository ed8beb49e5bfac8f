"""How far are the dense W4A16 and W8A16 kernels from the physical limit, and how far ahead of their peers?

    python bench/kernel.py [--kernels cuda,cublas,humming@2048x2048] [--shapes REGEX] [--tokens 1,4,16] [--format nvfp4]
                           [--variants "NAME=1,2 OTHER=4"] [--seconds 60] [--out FILE] [--plot FILE] [--commit ID]
    python bench/kernel.py --read FILE [--format nvfp4] [--plot FILE]

The limits come first: read bandwidth, rate of a bf16 product, and for each shape the floor, a kernel that only reads
the same weight bytes (bench/floor.cu). Then for each shape of tests/cases.py and each number of tokens M: microseconds,
share of the floor, GB/s, TFLOP/s, and how many times faster than cuBLAS in bf16, humming-kernels (where installed;
`@REGEX` keeps it to some shapes, for it compiles for minutes) and Marlin (its ratio to cuBLAS in
bench/results/peers_h200.json times cuBLAS here; only that file's shapes; humming the same way where it is not run).

Every kernel is first compared with a float64 product of the exact weights, its output poisoned before; one that is
wrong is not timed, and the exit code is 1. Launches are captured in CUDA graphs over as many copies of the weight as
overflow the L2 cache, and all graphs of one M are replayed in turn, there and back, so that a drifting clock meets all
alike. The floor is one of them. Without a GPU the exit code is 2. The first kernel of ours in --kernels is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from bench import common  # noqa: E402
from bench.common import Captured, abba, capture, copies_for, norm_error  # noqa: E402
from bench.verdict import OURS, Row, kernels_table, plot, shapes_table, targets_table  # noqa: E402
from fp4ward.errors import UserError, one_line  # noqa: E402
from fp4ward.formats.weight import Weight  # noqa: E402
from fp4ward.kernels import linear, nvrtc  # noqa: E402
from tests.cases import ALL_TOKENS, DECODE_TOKENS, DENSE, NORM_ERROR, ODD, ULPS, Dense  # noqa: E402

Run = Callable[[Tensor], Tensor]  # x [M, K] -> y [M, N]
FORMATS = ("nvfp4", "fp8_tensor", "fp8_channel", "fp8_block")
STORED = ROOT / "bench" / "results" / "peers_h200.json"
PEERS_MORE = 1.5  # times our bar of errors: humming, which rounds more than its result, lies on it (4.0e-3)
GRAPH_US, ROUNDS = 800.0, 5  # of one replay, about; replays of each graph are twice the rounds


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """prepare: copies of a weight -> what multiplies by each of them. row_scales: if not, the first row's for all.
    tokens: at most."""

    prepare: Callable[[Sequence[Weight]], list[Run]]
    formats: tuple[str, ...] = FORMATS
    row_scales: bool = True
    tokens: int = 1 << 31


def _cuda(weights: Sequence[Weight], **tuning: int) -> list[Run]:
    from fp4ward.kernels import cuda_linear

    ready = [cuda_linear.prepare(w) for w in weights]
    return [lambda x, w=w: cuda_linear.linear(x, w, **tuning) for w in ready]


def _triton(weights: Sequence[Weight]) -> list[Run]:
    from fp4ward.kernels import triton_linear

    return [lambda x, w=w: triton_linear.linear(x, w) for w in weights]


def _cublas(weights: Sequence[Weight]) -> list[Run]:
    n, k = weights[0].shape
    dense = weights[0].dense(torch.bfloat16)
    return [partial(torch.nn.functional.linear, weight=dense.clone()) for _ in range(copies_for(2 * n * k))]


def _humming(weights: Sequence[Weight]) -> list[Run]:
    from humming.layer import HummingLayer

    runs: list[Run] = []
    for w in weights:
        n, k = w.shape
        config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).cuda()
        parts = w.parts
        one = parts["global_scale"][:1]
        layer.load_from_tensors(
            {"weight": parts["packed"], "weight_scale": parts["block_scale"], "weight_scale_2": one}
        )
        layer.transform()
        runs.append(layer)
    return runs


KERNELS = {
    "cuda": Kernel(_cuda, tokens=64),
    "triton": Kernel(_triton, ("nvfp4",)),
    "cublas": Kernel(_cublas),
    "humming": Kernel(_humming, ("nvfp4",), row_scales=False),
}


def chosen(text: str, format: str, variants: Sequence[Mapping[str, int]] = ()) -> dict[str, tuple[Kernel, re.Pattern]]:
    """--kernels: name -> kernel and the shapes it runs. Ours come once a variant, where there are any."""
    found: dict[str, tuple[Kernel, re.Pattern[str]]] = {}
    for word in text.split(","):
        name, _, only = word.strip().partition("@")
        if name not in KERNELS:
            raise UserError(f"--kernels {text}: {name!r} is none of {', '.join(KERNELS)}")
        kernel, shapes = KERNELS[name], pattern(f"--kernels {word}", only)
        if format not in kernel.formats:
            raise UserError(f"--kernels {text}: {name} does not read {format}")
        if name == "cuda" and variants:
            for tuning in variants:
                label = "cuda " + " ".join(f"{key}={value}" for key, value in tuning.items())
                found[label] = (replace(kernel, prepare=partial(_cuda, **tuning)), shapes)
        else:
            found[name] = (kernel, shapes)
    return found


def pattern(flag: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as e:
        raise UserError(f"{flag}: no regular expression: {e}") from None


def combinations(text: str) -> list[dict[str, int]]:
    """--variants "A=1,2 B=3" -> every combination."""
    axes = []
    for word in text.split():
        key, equals, values = word.partition("=")
        if not equals or not re.fullmatch(r"\d+(,\d+)*", values):
            raise UserError(f"--variants {text}: {word!r} is no NAME=NUMBER,NUMBER")
        axes.append([(key, int(value)) for value in values.split(",")])
    return [dict(pairs) for pairs in itertools.product(*axes)] if axes else []


class Floor:
    """The read-only kernel over the parts of a weight, in the fastest of some ways to launch it."""

    WAYS = ((256, 4, 8), (512, 4, 4), (1024, 2, 2), (512, 8, 2), (256, 8, 4))  # threads, loads in flight, blocks an SM

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.out = torch.zeros(1, dtype=torch.int32, device=device)
        self.kernels = {way: nvrtc.kernel(self.source(way[0], way[1]), device) for way in self.WAYS}

    @staticmethod
    def source(threads: int, loads: int) -> nvrtc.Source:
        return nvrtc.Source(str(ROOT / "bench" / "floor.cu"), (("THREADS", threads), ("LOADS", loads)), "read_all")

    def call(self, buffers: Sequence[Tensor], way: tuple[int, int, int]) -> Callable[[], None]:
        counts = [b.numel() * b.element_size() // 16 for b in buffers]
        blocks = min(-(-max(counts) // (way[0] * way[1])), self.multiprocessors * way[2])
        three = [*buffers, None, None][:3]
        args = (*three, *[*counts, 0, 0][:3], self.out)
        return lambda: self.kernels[way]((max(1, blocks), 1, 1), way[0], 0, *args)

    def calls(self, sets: Sequence[Sequence[Tensor]]) -> list[Callable[[], None]]:
        graphs = {}
        for way in self.WAYS:
            self.call(sets[0], way)()
            graphs[str(way)] = capture([self.call(s, way) for s in sets], _launches(sets[0], GRAPH_US / 4))
        found = abba(graphs, 2)
        best = min(self.WAYS, key=lambda way: found[str(way)][0])
        return [self.call(s, best) for s in sets]


def _launches(buffers: Sequence[Tensor], graph_us: float, flops: float = 0.0) -> int:
    """How many launches make a graph of about this time: enough that its own start does not count."""
    nbytes = sum(b.numel() * b.element_size() for b in buffers)
    return max(4, min(256, round(graph_us / max(3.0, nbytes / 3e6, flops / 4e8))))


def limits(floor: Floor) -> dict[str, float]:
    """Read bandwidth (TB/s, 2 GiB) and the rate of an 8192^3 bf16 product (TFLOP/s), both on random data."""
    big = [torch.randint(0, 2**31, (1 << 29,), dtype=torch.int32, device="cuda")]
    ways = {str(way): capture([floor.call(big, way)], 2) for way in floor.WAYS}
    read = min(us for us, _ in abba(ways, 3).values())
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    torch.mm(a, b)
    product = abba({"mm": capture([lambda: torch.mm(a, b)], 4)}, 4)["mm"][0]
    return {"read_tb_s": 2**31 / read / 1e6, "matmul_tflop_s": 2 * 8192**3 / product / 1e6}


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """float64 [rows, N] of the tokens `rows`: x W^T, and sum |w| |x|; and [N], what turns each row's scale into the
    first one's."""

    rows: Tensor
    want: Tensor
    span: Tensor
    to_first: Tensor | None

    @classmethod
    def of(cls, x: Tensor, w: Weight, tokens: Sequence[int]) -> Truth:
        """Of all tokens up to 64; of larger batches the first 64 and the last 16."""
        some = {*range(min(64, len(x))), *(row for m in tokens for row in range(max(0, m - 16), m))}
        rows = torch.tensor(sorted(some), device=x.device)
        signless = {"packed": 0x77, "data": 0x7F}
        bare = {
            name: (p.view(torch.uint8) & signless[name]).view(p.dtype) if name in signless else p
            for name, p in w.parts.items()
        }
        scale = w.row_scale()
        first = None if scale is None else scale[0].double() / scale.double()
        x = x[rows].double()
        span = linear.reference(x.abs(), Weight(w.format, bare))
        return cls(rows, linear.reference(x, w), span, first)

    def errors(self, run: Run, x: Tensor, row_scales: bool) -> tuple[float, float]:
        """Norm-wise error, and the worst element in units of 2^-8 of its sum |w| |x|; NaN when one was not written."""
        rows = self.rows[self.rows < len(x)]
        want, span = self.want[: len(rows)], self.span[: len(rows)]
        if not row_scales and self.to_first is not None:
            want, span = want * self.to_first, span * self.to_first
        poison = torch.full((len(x), want.shape[1]), math.nan, dtype=x.dtype, device=x.device)
        del poison  # the next tensor of this size gets its memory
        y = run(x)
        if not y.isfinite().all():
            return math.nan, math.nan
        got = y[rows].double()
        return norm_error(got, want), ((got - want).abs() / span).max().item() * 256


@dataclass
class Findings:
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: bool = False

    def failed(self, kernel: str, where: str, error: Exception) -> None:
        """A peer that cannot run a shape is worth a note, no more."""
        self.notes.append(f"{kernel} does not run {where}: {type(error).__name__}: {one_line(error)}")
        self.wrong |= kernel.split()[0] in OURS


def measure(
    case: Dense, format: str, tokens: Sequence[int], kernels: Mapping[str, Kernel], floor: Floor, found: Findings,
    deadline: float,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    w = common.random_weight(format, case.n, case.k)
    copies = [w] + [
        Weight(w.format, {name: p.clone() for name, p in w.parts.items()}) for _ in range(copies_for(w.nbytes) - 1)
    ]
    x = torch.randn(max(tokens), case.k, device=common.DEVICE).bfloat16()
    truth = Truth.of(x, w, tokens)
    runs: dict[str, list[Run]] = {}
    prepared: dict[str, float] = {}  # GB/s of stored weight
    for name, kernel in kernels.items():
        try:
            runs[name] = kernel.prepare(copies)
            if name.split()[0] == "cuda":
                prepared[name] = w.nbytes / common.microseconds(partial(kernel.prepare, copies[:1])) / 1e3
        except Exception as e:
            found.failed(name, case.name, e)
    sets = [[*one.parts.values()] for one in copies]
    reads = floor.calls(sets)
    for m in tokens:
        if time.monotonic() > deadline:
            found.notes.append(f"no time left for {case.name} from M = {m} on")
            return
        errors: dict[str, tuple[float, float]] = {}
        graphs: dict[str, Captured] = {"floor": capture(reads, _launches(sets[0], GRAPH_US))}
        for name, calls in runs.items():
            if m > kernels[name].tokens:
                continue
            try:
                error, ulps = errors[name] = truth.errors(calls[0], x[:m], kernels[name].row_scales)
                if error <= NORM_ERROR * (1 if name.split()[0] in OURS else PEERS_MORE) and ulps <= ULPS:
                    launches = _launches(sets[0], GRAPH_US, 2.0 * m * case.n * case.k)
                    graphs[name] = capture([partial(call, x[:m]) for call in calls], launches)
                else:
                    found.notes.append(f"{name} is wrong at {case.name}, M = {m}: error {error:.1e}, {ulps:.1f} ulp")
                    found.wrong = True
            except Exception as e:
                found.failed(name, f"{case.name}, M = {m}", e)
        times = abba(graphs, ROUNDS)
        for name in graphs:
            if name != "floor":
                row = _row(case, w, m, name, times, errors[name])
                found.rows.append(row | ({"prepare_gb_s": prepared[name]} if name in prepared else {}))


def _row(
    case: Dense, w: Weight, m: int, name: str, times: Mapping[str, tuple[float, float]], error: tuple[float, float]
) -> Row:
    us, spread = times[name]
    moved = (2 * case.n * case.k if name == "cublas" else w.nbytes) + 2 * m * (case.n + case.k)
    row: Row = {"op": "linear", "format": w.format.name, "shape": case.name, "module": case.module, "tokens": m}
    row |= {"kernel": name, "us": us, "spread": spread, "error": error[0], "ulps": error[1]}
    row |= {"floor_us": times["floor"][0], "of_floor": times["floor"][0] / us}
    return row | {"gb_s": moved / us / 1e3, "tflop_s": 2e-6 * m * case.n * case.k / us} | against(times, case, w, m)


def against(times: Mapping[str, tuple[float, float]], case: Dense, w: Weight, m: int) -> Row:
    """What the others take, in us: measured in this run, else by their stored ratio to cuBLAS, else left out."""
    row: Row = {f"{name}_us": times[name][0] for name in ("cublas", "humming") if name in times}
    stored = json.loads(STORED.read_text())
    for line in stored["dense"] if w.format.name == "nvfp4" and "cublas" in times else ():
        there = dict(zip(stored["columns"], line, strict=True))
        if (there["n"], there["k"], there["tokens"]) == (case.n, case.k, m):
            for peer in ("marlin", "humming"):
                if f"{peer}_us" not in row:
                    row[f"{peer}_us"] = times["cublas"][0] * there[f"{peer}_us"] / there["cublas_us"]
                    row[f"{peer}_from"] = "stored ratio to cuBLAS"
    return row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="cuda,cublas", help=f"of {', '.join(KERNELS)}; NAME@REGEX for some shapes")
    parser.add_argument("--format", choices=FORMATS, default="nvfp4", help="of the weights")
    parser.add_argument("--shapes", default="", metavar="REGEX", help="of names such as 8192x2048 or modules (all)")
    parser.add_argument("--odd", action="store_true", help="also the odd shapes that are there for correctness")
    parser.add_argument("--tokens", help="such as 1,4,16 (1 to 64), or all (to 8192)")
    parser.add_argument("--variants", default="", metavar="LIST", help='"NAME=1,2 OTHER=4": tuning of our CUDA kernel')
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing so long after compiling")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: tables and chart of these lines")
    parser.add_argument("--plot", type=Path, help="a chart (.png, .svg); needs matplotlib")
    parser.add_argument("--commit", help="recorded where the tree came without its git folder")
    return parser


def numbers(text: str | None) -> tuple[int, ...]:
    """--tokens."""
    if text is None or text == "all":
        return DECODE_TOKENS if text is None else ALL_TOKENS
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        raise UserError(f"--tokens {text}: a list such as 1,4,16, or all")
    return tuple(sorted({int(word) for word in text.split(",")}))


def select(regex: str, odd: bool) -> list[Dense]:
    wanted = pattern(f"--shapes {regex}", regex)
    found = [case for case in (*DENSE, *(ODD if odd else ())) if wanted.search(case.name) or wanted.search(case.module)]
    if not found:
        raise UserError(f"--shapes {regex}: no shape of tests/cases.py matches")
    return found


def stored_rows(path: Path, op: str, format: str, has: str = "of_floor") -> list[Row]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as e:
        raise UserError(f"--read {path}: {one_line(e)}") from None
    mine = [r for r in rows if r.get("op") == op and r.get("format") == format and has in r]
    if not mine:
        raise UserError(f"--read {path}: no line of it is a measurement of {op} in {format} by this benchmark")
    return mine


def show(console: Console, rows: Sequence[Row], chart: Path | None) -> None:
    judged = next((r["kernel"] for r in rows if r["kernel"].split()[0] in OURS), rows[0]["kernel"])
    for table in (shapes_table(rows, judged), kernels_table(rows), targets_table(rows, judged)):
        console.print(table)
    packed = [r for r in rows if "prepare_gb_s" in r]
    if packed:
        large = max(packed, key=lambda r: r["floor_us"])
        console.print(f"prepare of {large['shape']}: {large['prepare_gb_s']:.0f} GB/s of stored weight")
    if chart:
        plot(rows, chart)


def run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    if args.read:
        show(Console(width=180, highlight=False), stored_rows(args.read, "linear", args.format), args.plot)
        return 0
    tokens, cases = numbers(args.tokens), select(args.shapes, args.odd)
    variants = combinations(args.variants)
    kernels = chosen(args.kernels, args.format, variants)
    if not torch.cuda.is_available():
        raise UserError("bench/kernel.py needs a CUDA GPU, and torch finds none")
    if any(name == "humming" and find_spec("humming") is None for name in kernels):
        raise UserError("--kernels humming: humming-kernels is not installed")
    console = Console(width=180, highlight=False)
    with torch.inference_mode():
        floor = Floor()
        most = limits(floor)
        head = common.head(args.commit) | most
        read, rate = most["read_tb_s"], most["matmul_tflop_s"]
        console.print(
            f"{head['gpu']}: reads {read:.2f} TB/s, multiplies bf16 at {rate:.0f} TFLOP/s (8192 x 8192 x 8192)"
        )
        if any(name.split()[0] == "cuda" for name in kernels):
            warm_cuda(cases, tokens, args.format, variants or [{}])
            console.print(f"compiled, {time.monotonic() - begin:.0f} s since the start")
        if "humming" in kernels:
            warm_humming([case for case in cases if kernels["humming"][1].search(case.name)], max(tokens))
            console.print(f"humming compiled, {time.monotonic() - begin:.0f} s since the start")
        found, last = Findings(), time.monotonic() + args.seconds
        for case in cases:
            here = {name: kernel for name, (kernel, only) in kernels.items() if only.search(case.name)}
            measure(case, args.format, tokens, here, floor, found, last)
            torch.cuda.synchronize()
    rows = [head | row for row in found.rows]
    common.write_lines(args.out, rows)
    for note in dict.fromkeys(found.notes):
        console.print(note)
    if rows:
        show(console, rows, args.plot)
    console.print(f"{len(rows)} measurements, {time.monotonic() - begin:.0f} s")
    return int(found.wrong)


def warm_cuda(cases: Sequence[Dense], tokens: Sequence[int], format: str, tunings: Sequence[Mapping[str, int]]) -> None:
    """Compile and load on all cores what `linear` would one by one; what fails fails again, and is noted, where it is
    measured."""
    from fp4ward.kernels import cuda_linear

    def one(case: Dense, m: int, tuning: Mapping[str, int]) -> None:
        with contextlib.suppress(AssertionError, UserError):
            kind, options = cuda_linear.KINDS[format], tuple(sorted(tuning.items()))
            cuda_linear._launch(kind, torch.bfloat16, m, case.n, case.k, device, options)

    device = torch.device("cuda", torch.cuda.current_device())
    jobs = itertools.product(cases, [m for m in tokens if m <= KERNELS["cuda"].tokens], tunings)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: one(*job), jobs))


def warm_humming(cases: Sequence[Dense], most: int) -> None:
    """Its compilers at work for all shapes at once; what fails here fails again, and is noted, where it is measured."""

    def one(case: Dense) -> None:
        try:
            (layer,) = _humming([common.random_weight("nvfp4", case.n, case.k)])
            layer(torch.zeros(most, case.k, dtype=torch.bfloat16, device="cuda"))
        except Exception as e:
            print(f"humming, {case.name}: {e}"[:200], file=sys.stderr)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, cases))


def main(argv: Sequence[str] | None = None) -> int:
    return common.command(run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
