"""How far are the MoE kernels for few tokens from the physical limit, and how far ahead of their peers?

    python bench/experts.py [--kernels cuda,triton,bf16,block,parts] [--shapes REGEX] [--tokens 1,4,16|all]
                            [--routing uniform,zipf,one] [--variants "chosen,deep"|all] [--seconds 60] [--out FILE]
                            [--plot FILE] [--commit ID] | --read FILE [--plot FILE]

What is timed is everything after routing: gate_up, activation, down, weighted sum; routing's own launch, which also
makes the list of work, is reported apart. The floor is a kernel that only reads (bench/floor.cu) as many experts' bytes
as the tokens meet. For each shape of tests/cases.py, number of tokens and routing (uniform; zipf: an expert's share
falls with its rank; one: all tokens take the same experts): microseconds, share of the floor, and how many times faster
than the better of Marlin and humming, whose times are those of bench/results/peers_h200.json, or those scaled by what
torch's grouped product (bf16) takes here where that is less. They were measured with uniform routing, so only that is
compared. block: from norm to residual as one operation, with a shared expert; parts: the same, one by one.

Every kernel is first compared with float64, its output poisoned before; one that is wrong is not timed, and the exit
code is 1. Beyond 4,096 choices ours goes in rounds, each with its routing. Graphs are captured and replayed as in
bench/kernel.py. Without a GPU the exit code is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from bench import common  # noqa: E402
from bench.common import Captured, abba, capture, copies_for, norm_error, random_weight  # noqa: E402
from bench.kernel import GRAPH_US, ROUNDS, STORED, Findings, Floor, limits, numbers, pattern, stored_rows  # noqa: E402
from bench.verdict import FP4, Row, Target, kernels_table, peer, shapes_table, targets_table  # noqa: E402
from fp4ward.errors import UserError  # noqa: E402
from fp4ward.formats.weight import Weight, concat  # noqa: E402
from fp4ward.kernels import cuda_experts, cuda_linear, experts, norm, nvrtc, triton_experts  # noqa: E402
from fp4ward.kernels.cuda_experts import MAX_PAIRS, Block, Prepared  # noqa: E402
from fp4ward.kernels.experts import Router  # noqa: E402
from tests.cases import ALL_TOKENS, MOE, NORM_ERROR, VARIANTS, Moe  # noqa: E402

TOKENS, ROUTINGS = (1, 4, 16, 64, 256), ("uniform", "zipf", "one")
LOOSE = {"bf16": 0.02, "block": 0.02, "parts": 0.02}  # weights rounded to bf16; logits too, which decide
EPS = 1e-6
Call = Callable[[], Tensor]


# ---- what is run -----------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """What one launch gets: x [T, H], router's logits [T, E], and what these choose."""

    x: Tensor
    logits: Tensor
    weights: Tensor
    ids: Tensor

    @classmethod
    def draw(cls, case: Moe, tokens: int, routing: str) -> Load:
        x = torch.randn(tokens, case.h, device=common.DEVICE).bfloat16()
        logits = torch.randn(tokens, case.e, device=common.DEVICE)
        order = torch.randperm(case.e, device=common.DEVICE)
        if routing == "zipf":  # the largest of Gumbel noise + log p is drawn by p
            logits = -(-torch.rand_like(logits).clamp(1e-9).log()).log() - (order + 1.0).log()
        if routing == "one":
            logits[:, order[: case.top_k]] += 50
        logits = logits.bfloat16()
        weights, ids = experts.route(logits, case.top_k)
        return cls(x, logits, weights, ids.int())


class Stored:
    """A block's weights, as many copies as overflow the cache, in the layouts that kernels want."""

    def __init__(self, case: Moe) -> None:
        self.case = case
        shapes = [(case.e, case.i, case.h)] * (1 + case.gated) + [(case.e, case.h, case.i)]
        first = [random_weight("nvfp4", *shape) for shape in shapes]
        self.nbytes = sum(w.nbytes for w in first)
        more = copies_for(self.nbytes) - 1
        self.weights = [first, *([_copy(w) for w in first] for _ in range(more))]
        self.prepare_gb_s = 0.0

    @cached_property
    def prepared(self) -> list[Prepared]:
        torch.cuda.synchronize()
        start = time.monotonic()
        first = cuda_experts.prepare(*self.weights[0])
        torch.cuda.synchronize()
        self.prepare_gb_s = self.nbytes / (time.monotonic() - start) / 1e9
        return [first, *(cuda_experts.prepare(*own) for own in self.weights[1:])]

    @cached_property
    def around(self) -> tuple[Weight, Weight, list[Weight], Tensor]:
        """Router's gate, shared expert's gate, shared expert, and a norm's weight."""
        case = self.case
        gates = [random_weight("bf16", n, case.h) for n in (case.e, 1)]
        shared = [random_weight("nvfp4", *shape) for shape in [(case.i, case.h)] * 2 + [(case.h, case.i)]]
        return *gates, shared, 1 + torch.rand(case.h, device=common.DEVICE)

    @cached_property
    def blocks(self) -> list[Block]:
        gate, shared_gate, shared, _ = self.around
        return [cuda_experts.prepare_block(*own, gate, shared_gate, *shared) for own in self.weights]

    @cached_property
    def dense(self) -> list[Tensor]:
        """[E, 2 I, H] or [E, I, H], and [E, H, I] in bf16. One copy: several times the cache."""
        *rows, down = self.weights[0]
        return [torch.cat([w.dense(torch.bfloat16) for w in rows], 1), down.dense(torch.bfloat16)]


def _copy(w: Weight) -> Weight:
    return Weight(w.format, {name: p.clone() for name, p in w.parts.items()})


def _cuda(stored: Stored, loads: Sequence[Load], name: str = "chosen") -> list[Call]:
    up, down = VARIANTS[name]
    k, calls = stored.case.top_k, []
    for load, w in _each(loads, stored.prepared):
        if len(load.x) * k > MAX_PAIRS:
            calls.append(partial(cuda_experts.routed, load.x, w, load.logits, Router(k)))
        else:
            choice = cuda_experts.route(load.logits, k, w, load.x.dtype, up=up, down=down)
            calls.append(partial(cuda_experts.run, load.x, w, choice, up, down))
    return calls


def _route(stored: Stored, loads: Sequence[Load]) -> list[Callable[[], object]]:
    k = stored.case.top_k
    pairs = _each(loads, stored.prepared)
    return [partial(cuda_experts.route, load.logits, k, w, load.x.dtype) for load, w in pairs]


def _triton(stored: Stored, loads: Sequence[Load]) -> list[Call]:
    pairs = _each(loads, stored.weights)
    return [partial(triton_experts.experts, load.x, *w, load.weights, load.ids) for load, w in pairs]


def _bf16(stored: Stored, loads: Sequence[Load]) -> list[Call]:
    """torch's grouped product, its tokens sorted by expert beforehand."""
    grouped = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    first, second = (w.transpose(1, 2) for w in stored.dense)

    def one(x: Tensor, weights: Tensor, token: Tensor, ends: Tensor, back: Tensor) -> Tensor:
        h = grouped(x[token], first, offs=ends)
        if stored.case.gated:
            gate, up = h.chunk(2, -1)
            h = functional.silu(gate) * up
        else:
            h = h.relu().square()
        y = grouped(h, second, offs=ends)[back].view(*weights.shape, -1)
        return (y * weights[..., None]).sum(1)

    calls = []
    for load in loads:
        ids = load.ids.flatten()
        order = ids.argsort(stable=True)
        ends = torch.bincount(ids, minlength=stored.case.e).cumsum(0).int()
        weights = load.weights.bfloat16()
        calls.append(partial(one, load.x, weights, order // stored.case.top_k, ends, order.argsort()))
    return calls


def _block(stored: Stored, loads: Sequence[Load]) -> list[Call]:
    _, _, _, weight = stored.around
    pairs = _each(loads, stored.blocks)
    return [partial(cuda_experts.block, load.x, w, weight, EPS, Router(stored.case.top_k)) for load, w in pairs]


def _parts(stored: Stored, loads: Sequence[Load]) -> list[Call]:
    gate, shared_gate, shared, weight = stored.around
    gates, router = [g.parts["data"] for g in (gate, shared_gate)], Router(stored.case.top_k)
    joined, down = (cuda_linear.prepare(w) for w in (concat(shared[:2]), shared[2]))

    def one(x: Tensor, w: Prepared) -> Tensor:
        n = norm.rms_norm(x, weight, EPS)
        routed = cuda_experts.routed(n, w, functional.linear(n, gates[0]), router)
        a, b = cuda_linear.linear(n, joined).chunk(2, -1)
        own = cuda_linear.linear(functional.silu(a) * b, down)
        return x + (routed + functional.linear(n, gates[1]).sigmoid() * own)

    return [partial(one, load.x, w) for load, w in _each(loads, stored.prepared)]


def _each(loads: Sequence[Load], copies: Sequence) -> list[tuple]:
    return [(load, copies[i % len(copies)]) for i, load in enumerate(loads)]


@dataclass(frozen=True)
class Kernel:
    """calls: of each load. gated: only experts with a gate. whole: a block, norm to residual, which routes itself.
    tokens: at most."""

    calls: Callable[[Stored, Sequence[Load]], list[Call]]
    gated: bool = False
    whole: bool = False
    tokens: int = 1 << 31


KERNELS = {
    "cuda": Kernel(_cuda),
    "triton": Kernel(_triton, gated=True),
    "bf16": Kernel(_bf16),
    "block": Kernel(_block, gated=True, whole=True, tokens=256),
    "parts": Kernel(_parts, gated=True, whole=True, tokens=64),
}


# ---- what was asked for ----------------------------------------------------------------------------------------------


def names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """A list of known names, or all."""
    found = list(known) if text == "all" else list(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [name for name in found if name not in known]:
        raise UserError(f"{flag} {text}: {unknown[0]!r} is none of {', '.join(known)}")
    return found


def select(regex: str) -> list[Moe]:
    wanted = pattern(f"--shapes {regex}", regex)
    found = [case for case in MOE if wanted.search(case.name) or wanted.search(case.module)]
    if not found:
        raise UserError(f"--shapes {regex}: no shape of tests/cases.py matches")
    return found


def chosen(kernels: str, variants: str) -> dict[str, Kernel]:
    found = {name: KERNELS[name] for name in names("--kernels", kernels, list(KERNELS))}
    for name in names("--variants", variants, list(VARIANTS)) if "cuda" in found else ():
        if name != "chosen":
            found[f"variant {name}"] = Kernel(partial(_cuda, name=name))
    return found


# ---- measuring -------------------------------------------------------------------------------------------------------


def launches(met: float) -> int:
    """Of a graph: as many as take about its time, and as overflow the cache with `met` bytes each."""
    return max(6, min(192, max(round(GRAPH_US / (met / 3e6 + 6)), math.ceil(common.COLD / 2 / met))))


def error(name: str, call: Call, load: Load, stored: Stored) -> float:
    """Norm-wise, of a few tokens against float64; NaN where something was not written."""
    at, case = sorted({0, 1 % len(load.x), len(load.x) - 1}), stored.case
    x, own = load.x[at].double(), stored.weights[0]
    if name in KERNELS and KERNELS[name].whole:
        gate, shared_gate, shared, weight = stored.around
        want = experts.block(x, weight.double(), EPS, Router(case.top_k), own, gate, shared_gate, shared)
    else:
        reference = experts.reference if case.gated else experts.relu2_reference
        want = reference(x, *own, load.weights[at].double(), load.ids[at].long())
    poison = torch.full_like(load.x, math.nan)
    del poison  # the next tensor of this size gets its memory
    y = call()
    return norm_error(y[at], want) if y.isfinite().all() else math.nan


def floor_sets(stored: Stored, hit: int, count: int) -> list[list[Tensor]]:
    """As many experts in a row, of each copy in turn, somewhere."""
    sets = []
    for i in range(count):
        w = stored.prepared[i % len(stored.prepared)]
        at = int(torch.randint(w.shape[0] - hit + 1, ()))
        sets.append([w.up[at : at + hit], w.down[at : at + hit]])
    return sets


def measure(
    case: Moe, tokens: Sequence[int], routings: Sequence[str], kernels: Mapping[str, Kernel], floor: Floor,
    found: Findings, deadline: float,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    stored = Stored(case)
    each = stored.nbytes / case.e
    for m in tokens:
        for routing in routings:
            where = f"{case.name}, {m} tokens, {routing}"
            if time.monotonic() > deadline:
                found.notes.append(f"no time left for {where} and what follows")
                return
            met = min(case.e, case.e * (1 - (1 - case.top_k / case.e) ** (1 if routing == "one" else m)))
            loads = [Load.draw(case, m, routing) for _ in range(launches(met * each))]
            hit = sum(len(load.ids.unique()) for load in loads) / len(loads)
            reads = floor.calls(floor_sets(stored, max(1, round(hit)), len(loads)))
            graphs: dict[str, Captured] = {"floor": capture(reads, len(loads))}
            errors: dict[str, float] = {}
            alive = []  # what graphs read, routing above all, until they have been replayed
            for name, one in kernels.items():
                if m > one.tokens or (one.gated and not case.gated) or (one.whole and routing != "uniform"):
                    continue
                try:
                    calls = one.calls(stored, loads)
                    alive.append(calls)
                    errors[name] = error(name, calls[0], loads[0], stored)
                    if errors[name] <= LOOSE.get(name, NORM_ERROR):
                        graphs[name] = capture(calls, len(calls))
                    else:
                        found.notes.append(f"{name} is wrong at {where}: error {errors[name]:.1e}")
                        found.wrong = True
                except Exception as e:
                    found.failed(name, where, e)
                    found.wrong |= one.whole
            if m * case.top_k <= MAX_PAIRS and "cuda" in graphs:
                graphs["route"] = capture(_route(stored, loads), len(loads))
            times = abba(graphs, ROUNDS)
            about: Row = {"op": "experts", "format": "nvfp4", "shape": case.name, "module": case.module, "tokens": m}
            about |= {"routing": routing, "experts": hit, "floor_us": times["floor"][0]}
            about |= {f"{name}_us": times[name][0] for name in ("route", "triton", "bf16") if name in times}
            about |= against(case, m, about) if routing == "uniform" else {}
            for name in errors:
                if name in times:
                    us, spread = times[name]
                    row = about | {"kernel": name, "us": us, "spread": spread, "error": errors[name]}
                    row |= {"of_floor": times["floor"][0] / us, "gb_s": hit * each / us / 1e3}
                    row["tflop_s"] = 2e-6 * m * case.top_k * (2 + case.gated) * case.i * case.h / us
                    found.rows.append(row | ({"prepare_gb_s": stored.prepare_gb_s} if name == "cuda" else {}))


def against(case: Moe, tokens: int, row: Row) -> Row:
    """The peers' stored times; scaled by torch's grouped product where it ran here and is faster than there."""
    stored = json.loads(STORED.read_text())
    for line in stored["moe"]:
        there = dict(zip(stored["moe_columns"], line, strict=True))
        if [there[key] for key in ("e", "top_k", "i", "h", "tokens")] == [case.e, case.top_k, case.i, case.h, tokens]:
            scale = min(1.0, row.get("bf16_us", math.inf) / there["bf16_us"])
            found = {f"{name}_us": scale * there[f"{name}_us"] for name in ("marlin", "humming")}
            return found | {"peers_from": "stored" if scale == 1 else "stored, scaled", "peers_met": there["experts"]}
    return {}


def warm(cases: Sequence[Moe], tokens: Sequence[int], kernels: Mapping[str, Kernel]) -> None:
    """Compile on all cores what would be compiled one by one; what fails fails again, and is noted, where it is run."""
    device = torch.device("cuda", torch.cuda.current_device())
    always = cuda_linear._source("nvfp4", "pack"), cuda_experts._source("combine", {"COMBINE": 1})
    jobs: list[Callable[[], object]] = [partial(nvrtc.kernel, source, device) for source in always]
    for case in cases:
        jobs.append(partial(nvrtc.kernel, cuda_experts._route_source("route", case.e), device))
        for m in tokens:
            step = min(m, MAX_PAIRS // case.top_k)
            for name in kernels:
                up, down = VARIANTS.get(name.removeprefix("variant "), ({}, {}))
                more = int(name == "block")
                shape = (case.e + more, case.i, case.h)
                options = tuple(tuple(sorted(o.items())) for o in (up, down))
                args = (step, case.top_k + more, shape, more, case.gated, False, device, *options)
                jobs.append(partial(cuda_experts._plan, *args))

    def run(job: Callable[[], object]) -> None:
        with contextlib.suppress(AssertionError, UserError):
            job()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, jobs))


# ---- what it says ----------------------------------------------------------------------------------------------------

_MUST = {
    "35B-A3B": ("256x8x512x2048", ((2.6, 3.8), (1.7, 2.4), (1.5, 1.8), (1.4, 1.7), (1.25, 1.7))),
    "397B-A17B": ("512x10x1024x4096", ((1.7, 2.4), (1.4, 1.8), (1.3, 1.5), (1.2, 1.4), (1.15, 1.4))),
}


def _ahead(shape: str, row: Row) -> float | None:
    other = peer(row)
    return None if other is None or row["shape"] != shape else other / row["us"]


def _of_triton(row: Row) -> float | None:
    return row["triton_us"] / row["us"] if "triton_us" in row else None


TARGETS = (
    *(
        Target(f"{model}, {m} tokens: x the better peer", FP4, (m,), partial(_ahead, shape), *bars, slack=1)
        for model, (shape, every) in _MUST.items()
        for m, bars in zip(TOKENS, every, strict=True)
    ),
    Target("all: x the portable kernel", FP4, ALL_TOKENS, _of_triton, 1.0, 2.0, slack=1),
)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Microseconds over tokens with uniform routing: a panel for each shape that the peers were measured on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mine = [r for r in rows if r["kernel"] == "cuda" and r["routing"] == "uniform"]
    shapes = list(dict.fromkeys(r["shape"] for r in mine if peer(r) is not None)) or [r["shape"] for r in mine[:1]]
    figure, panels = pyplot.subplots(
        1, len(shapes), figsize=(5.2 * len(shapes), 4.2), constrained_layout=True, squeeze=False
    )
    lines = {"cuda": "us", "read-only floor": "floor_us", "marlin": "marlin_us", "humming": "humming_us"}
    lines |= {"triton": "triton_us", "bf16 (torch)": "bf16_us"}
    for axes, shape in zip(panels[0], shapes, strict=True):
        for label, key in lines.items():
            found = [(r["tokens"], r[key]) for r in mine if r["shape"] == shape and key in r]
            style = {"linestyle": "--", "color": "grey"} if key == "floor_us" else {"marker": "o"}
            axes.plot(*zip(*found, strict=True), label=label, **style) if found else None
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", title=shape)
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def show(console: Console, rows: Sequence[Row], chart: Path | None) -> None:
    """Tables: by routing, by kernel, against the targets; and a line for each uniform measurement that has more."""
    mine = [r for r in rows if r["kernel"] == "cuda"]
    for routing in dict.fromkeys(r["routing"] for r in mine):
        table = shapes_table([r for r in mine if r["routing"] == routing], "cuda")
        table.title = f"cuda, {routing} routing: us, x floor, x faster than the better peer"
        console.print(table)
    for r in mine:
        if r["routing"] == "uniform":
            also = [(key, r.get(f"{key}_us")) for key in ("route", "triton", "bf16", "marlin", "humming")]
            same = [q for q in rows if all(q[key] == r[key] for key in ("shape", "tokens", "routing"))]
            here = [(q["kernel"], q["us"]) for q in same if q["kernel"] in ("block", "parts")]
            text = ", ".join(f"{key} {us:.1f}" for key, us in (*also, *here) if us is not None)
            there = f" ({r['peers_met']} there)" if "peers_met" in r else ""
            console.print(f"{r['shape']} {r['tokens']} tokens: {r['experts']:.1f} experts{there}; us: {text}")
    console.print(kernels_table([r for r in rows if r["routing"] == "uniform"]))
    console.print(targets_table(rows, "cuda", TARGETS))
    if chart:
        plot(rows, chart)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="cuda,triton,bf16", help=f"of {', '.join(KERNELS)}, or all")
    parser.add_argument("--shapes", default="", metavar="REGEX", help="of names such as 256x8x512x2048 or models (all)")
    parser.add_argument("--tokens", help="such as 1,4,16 (1 to 256), or all (to 8192)")
    parser.add_argument("--routing", default="all", help=f"of {', '.join(ROUTINGS)} (all)")
    parser.add_argument("--variants", default="chosen", metavar="LIST", help="of VARIANTS in tests/cases.py, or all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no measurement after so many")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: tables and chart of these lines")
    parser.add_argument("--plot", type=Path, help="a chart (.png, .svg); needs matplotlib")
    parser.add_argument("--commit", help="recorded where the tree came without its git folder")
    return parser


def run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    if args.read:
        show(Console(width=180, highlight=False), stored_rows(args.read, "experts", "nvfp4"), args.plot)
        return 0
    tokens, cases = numbers(args.tokens) if args.tokens else TOKENS, select(args.shapes)
    routings, kernels = names("--routing", args.routing, ROUTINGS), chosen(args.kernels, args.variants)
    if not torch.cuda.is_available():
        raise UserError("bench/experts.py needs a CUDA GPU, and torch finds none")
    console = Console(width=180, highlight=False)
    found = Findings()
    with torch.inference_mode():
        floor = Floor()
        head = common.head(args.commit) | limits(floor)
        console.print(f"{head['gpu']}: reads {head['read_tb_s']:.2f} TB/s")
        warm(cases, tokens, kernels)
        console.print(f"compiled, {time.monotonic() - begin:.0f} s since the start")
        for case in cases:
            measure(case, tokens, routings, kernels, floor, found, begin + args.seconds)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    rows = [head | row for row in found.rows]
    common.write_lines(args.out, rows)
    for note in dict.fromkeys(found.notes):
        console.print(note)
    if rows:
        show(console, rows, args.plot)
    console.print(f"{len(rows)} measurements, {time.monotonic() - begin:.0f} s")
    return int(found.wrong)


def main(argv: Sequence[str] | None = None) -> int:
    return common.command(run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
