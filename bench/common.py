"""What the benchmarks share: the head of a result line, random weights, and timing of captured graphs in turn."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fp4ward.errors import UserError  # noqa: E402
from fp4ward.formats.formats import FORMATS  # noqa: E402
from fp4ward.formats.weight import Weight, part_shapes  # noqa: E402
from fp4ward.kernels import nvrtc  # noqa: E402

DEVICE = "cuda"
COLD = 256 << 20  # bytes of weights that launches go through before they meet one again: 4 times an H200's L2 cache


def head(commit: str | None = None, *, device: str = "cuda") -> dict[str, str]:
    """Of every result line. commit: where the tree came without its git folder. device: what is measured."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") and torch.cuda.is_available() else "none",
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "commit": commit or described.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
    }


def kernel_cache() -> None:
    """Compiled kernels lie where FP4WARD_CACHE says, as for the command line."""
    if place := os.environ.get("FP4WARD_CACHE"):
        nvrtc.folder = Path(place)


def command(
    run: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> int:
    """The exit code of a benchmark: 2 and a sentence for what cannot be done."""
    kernel_cache()
    try:
        return run(parser.parse_args(argv))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def write_lines(path: Path | None, rows: Sequence[Mapping[str, object]]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def random_weight(format: str, *shape: int) -> Weight:
    """Every code; NVFP4 block scales from 2^-6 to 2^5, and scales of rows that give outputs of about 1."""
    parts, device = {}, DEVICE
    spread = {"nvfp4": 12.0, "bf16": 0.0}.get(format, 200.0) * shape[-1] ** 0.5
    for name, (dtype, size) in part_shapes(FORMATS[format], shape).items():
        if dtype == torch.uint8:
            parts[name] = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
        elif name == "block_scale":
            parts[name] = torch.randint(8, 96, size, dtype=torch.uint8, device=device).view(dtype)
        elif dtype == torch.float8_e4m3fn:  # 0x7f and 0xff are NaN
            code = torch.randint(0, 127, size, dtype=torch.uint8, device=device)
            parts[name] = (code + 128 * torch.randint(0, 2, size, dtype=torch.uint8, device=device)).view(dtype)
        elif dtype == torch.float32:
            parts[name] = (torch.rand(size, device=device) + 0.5) / spread
        else:
            parts[name] = (torch.randn(size, device=device) / shape[-1] ** 0.5).to(dtype)
    return Weight(FORMATS[format], parts)


def copies_for(nbytes: int) -> int:
    """How many copies of so many bytes overflow the cache; a weight that is far larger needs no other. 192 of the
    smallest in tests/cases.py (0.6 MB) are still twice an H200's."""
    return min(192, max(1 if nbytes > 2 * COLD else 2, math.ceil(COLD / nbytes)))


Captured = tuple[torch.cuda.CUDAGraph, int]


def capture(calls: Sequence[Callable[[], object]], launches: int) -> Captured:
    """`launches` calls, going round through `calls`, as one graph. They must have run before."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch.cuda.graph() also collects garbage and empties the allocator, every time
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(launches):
                calls[i % len(calls)]()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, launches


def abba(graphs: Mapping[str, Captured], rounds: int) -> dict[str, tuple[float, float]]:
    """Microseconds a launch and their spread (half the distance of the quartiles over the median) of each graph.

    A round replays all of them in order and then in reverse, so that drifting clocks and temperatures meet all alike.
    """
    order = [*graphs, *reversed(graphs)]
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    for graph, _ in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name in order:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name][0].replay()
            end.record()
            events.append((name, begin, end))
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for name, begin, end in events:
        times[name].append(begin.elapsed_time(end) * 1000 / graphs[name][1])
    return {name: _middle(found) for name, found in times.items()}


def _middle(times: list[float]) -> tuple[float, float]:
    low, middle, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    return median(times), (high - low) / 2 / middle


def microseconds(call: Callable[[], object]) -> float:
    """Of one call that is not captured, after another of the same."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


def norm_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
