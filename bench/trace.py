"""One step of a model by kernel and by kind of layer, from torch's profiler."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
MARK = "block "  # in front of the names of our own ranges
KERNELS_SHOWN = 25


class Named:
    """A block whose calls are ranges of the profile, while there is one: a range takes microseconds."""

    profiled = False

    def __init__(self, name: str, inner: Any) -> None:
        self.name = MARK + name
        self.inner = inner

    def __call__(self, *args: Any, **more: Any) -> Any:
        if not Named.profiled:
            return self.inner(*args, **more)
        with record_function(self.name):
            return self.inner(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def name_blocks(model: Any) -> None:
    """Make ranges of a model's blocks: of each layer the mixer, the MLP and its parts, and norms; embedding; head."""
    seen = {"embed_tokens": model, "lm_head": model, "norm": model}
    for name, owner in seen.items():
        setattr(owner, name, Named(name, getattr(owner, name)))
    for layer in model.layers:
        for name in ("experts", "shared_expert", "gate"):
            if hasattr(layer.mlp, name):
                setattr(layer.mlp, name, Named(f"{type(layer.mlp).__name__}.{name}", getattr(layer.mlp, name)))
        for name in ("norm", "mixer", "post_norm", "mlp", "block"):
            block = getattr(layer, name)
            if block is not None:
                setattr(layer, name, Named(type(block).__name__, block))


@dataclass(frozen=True)
class Slice:
    """A kernel on the GPU (on a CPU an operation, without those that it calls): microseconds, and the innermost block
    that launched it; calls: of that block in the step."""

    name: str
    block: str
    us: float
    calls: int


def traced(step: Callable[[], object], gpu: bool) -> list[Slice]:
    """Of one call of `step`; nothing, with a note, where the profiler does not see the GPU."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    Named.profiled = True
    with profile(activities=kinds) as found:
        with record_function(MARK + "rest"):
            step()
        if gpu:
            torch.cuda.synchronize()
    Named.profiled = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    if gpu and not any(e.get("cat") == "kernel" for e in events):
        print("the profiler sees no kernels on this GPU (CUPTI is missing, or another profiler runs)")
        return []
    return slices(events)


def slices(events: Iterable[dict[str, Any]]) -> list[Slice]:
    """Of the events of a Chrome trace. A kernel belongs to the innermost range in which it was launched, not to the one
    during which it ran."""
    done = [e for e in events if e.get("ph") == "X"]
    ranges = sorted(
        (e["ts"], -e["dur"], e["name"][len(MARK) :])
        for e in done
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)
    )
    calls = Counter(name for _, _, name in ranges)
    starts = [start for start, _, _ in ranges]

    def block(at: float) -> str:
        i = bisect_right(starts, at) - 1
        while i >= 0 and ranges[i][0] - ranges[i][1] < at:
            i -= 1
        return ranges[i][2] if i >= 0 else "rest"

    work = [e for e in done if e.get("cat") in ON_GPU]
    launched = {e["args"].get("correlation"): e["ts"] for e in done if e.get("cat") in LAUNCHES and "args" in e}
    if not work:
        work = _own_time(sorted((e for e in done if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])))
    out = []
    for e in work:
        name = block(launched.get(e.get("args", {}).get("correlation"), e["ts"]))
        out.append(Slice(e["name"], name, e["dur"], calls[name] or 1))
    return out


def _own_time(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operations in order of their starts, each without the time of those that it calls."""
    out: list[dict[str, Any]] = []
    open_: list[tuple[float, int]] = []  # end of those that are still running, and where they are in `out`
    for op in ops:
        while open_ and open_[-1][0] <= op["ts"]:
            open_.pop()
        if open_:
            out[open_[-1][1]]["dur"] -= op["dur"]
        open_.append((op["ts"] + op["dur"], len(out)))
        out.append(dict(op))
    return out


def show(found: list[Slice], batch: int, step_ms: float) -> list[dict[str, object]]:
    """Print the step by kind of layer and by kernel; a line of each for a result file. step_ms: without the profiler,
    which slows launches down; what is no work of it is idle time."""
    total, lines = sum(s.us for s in found), []
    idle = max(0.0, 1 - total / 1e3 / step_ms)
    print(f"\na decode step of {batch}: {len(found)} launches, {total / 1e3:.2f} ms of work, idle {idle:.0%}")
    for what, key in (("block", lambda s: s.block), ("kernel", lambda s: s.name)):
        groups: defaultdict[str, list[Slice]] = defaultdict(list)
        for s in found:
            groups[key(s)].append(s)
        print(f"{what:60}{'us':>10}{'share':>7}{'launches':>9}" + (f"{'a call':>8}" if what == "block" else ""))
        for name, own in sorted(groups.items(), key=lambda g: -sum(s.us for s in g[1]))[:KERNELS_SHOWN]:
            us, each = sum(s.us for s in own), len(own) / own[0].calls
            line = {"profile": what, "name": name, "us": us, "share": us / total, "launches": len(own)}
            print(
                f"{name[:59]:60}{us:10.1f}{us / total:7.1%}{len(own):9}" + (f"{each:8.1f}" if what == "block" else "")
            )
            lines.append(line | ({"launches_a_call": each} if what == "block" else {}))
    return [line | {"idle": idle} for line in lines]
