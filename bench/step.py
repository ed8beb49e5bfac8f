"""How long does a step of a whole model take, and where does its time go?

    python bench/step.py MODEL|CONFIG_DIR [--load-format dummy] [--batch 1,16,64] [--context 1024] [--steps 20]
                         [--profile] [--device cpu] [--out FILE] [--commit ID]

For each batch: prefill of so many prompts of --context random tokens, then --steps decode steps, greedy. Milliseconds a
step (median), tokens a second, what the plan expects of the layers, and its floor, which no kernels on this machine
beat, as a share of what was measured. With --profile also one decode step by kernel and by kind of layer: GPU time,
launches, and the share of the step in which the GPU idles (on a CPU: operations, and time outside of them). No weights
are needed with --load-format dummy: a folder with config.json is enough.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.common import head, write_lines  # noqa: E402
from bench.trace import Slice, name_blocks, show, traced  # noqa: E402
from fp4ward import LLM, SamplingParams  # noqa: E402
from fp4ward.kernels.specs import ITEM, Batch, estimate  # noqa: E402
from fp4ward.memory import KV_ITEM  # noqa: E402
from fp4ward.runtime.request import Request  # noqa: E402

WARM = 2  # decode steps that are not timed


def planned(llm: LLM, tokens: int, sequences: int, context: int) -> tuple[float, float]:
    """Milliseconds of a step, without norms and the sampler: expected by the plan's kernels, and the floor."""
    config, regimes = llm.config, llm.plan.regimes
    at = next((i for i, r in enumerate(regimes) if tokens <= r.tokens and not r.prompt), len(regimes) - 1)
    batch = Batch(tokens, sequences, context, ITEM[config.dtype], KV_ITEM[config.kv_cache_dtype])
    costs = [estimate(p.choice.picks[at].kernel, p.layer, llm.plan.hardware, batch) for p in llm.plan.layers]
    return sum(c.us for c in costs) / 1e3, sum(c.floor_us for c in costs) / 1e3


def timed(llm: LLM) -> float:
    """Seconds of one step of the engine, sampling included."""
    start = time.perf_counter()
    llm.engine.step()
    if llm.config.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def started(llm: LLM, batch: int, context: int) -> tuple[list[Request], float]:
    """So many requests past their prompts, and the seconds that these took."""
    random = torch.Generator().manual_seed(batch)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    prompts = torch.randint(llm.engine.vocab_size, (batch, context), generator=random).tolist()
    requests = [llm.engine.add(prompt, params) for prompt in prompts]
    took = 0.0
    while any(not r.output_token_ids for r in requests):
        took += timed(llm)
    return requests, took


def run(llm: LLM, batch: int, context: int, steps: int, profile: bool) -> tuple[dict[str, object], list[Slice]]:
    """Times of one batch, and of one decode step the slices of its profile."""
    most = llm.config.max_num_batched_tokens
    for request in started(llm, min(batch, -(-most // context)), context)[0]:  # first calls compile kernels
        llm.engine.abort(request)
    requests, prefill = started(llm, batch, context)
    times = [timed(llm) for _ in range(WARM + steps)][WARM:]
    slices = traced(llm.engine.step, llm.config.device != "cpu") if profile else []
    for request in requests:
        llm.engine.abort(request)
    expected, floor = planned(llm, batch, batch, context + WARM + steps // 2)
    chunks, rest = divmod(batch * context, most)
    parts = [planned(llm, n, -(-n // context), 0) for n in [most] * chunks + [rest] * (rest > 0)]
    ms = median(times) * 1e3
    row: dict[str, object] = {"batch": batch, "context": context, "steps": steps, "step_ms": ms}
    row |= {"tokens_per_s": batch / ms * 1e3, "expected_ms": expected, "floor_ms": floor, "of_floor": floor / ms}
    row |= {"prefill_s": prefill, "prefill_tokens_per_s": batch * context / prefill}
    row |= {"prefill_of_floor": sum(f for _, f in parts) / 1e3 / prefill}
    return row, slices


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto", help="as of fp4ward generate")
    parser.add_argument("--batch", default="1,16,64", help="sequences at once")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=20, help="decode steps to time")
    parser.add_argument("--kernel", action="append", default=[], help="as of fp4ward generate")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", action="store_true", help="one decode step by kernel and by kind of layer")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="recorded where the tree came without its git folder")
    args = parser.parse_args(argv)
    batches = [int(b) for b in args.batch.split(",")]
    most = max(2048, *batches)
    mixed = -(-max(batches) * args.context // most)  # steps in which the first prompts' answers grow already
    length = args.context + mixed + args.steps + WARM + 4
    start = time.perf_counter()
    llm = LLM(
        args.model, load_format=args.load_format, device=args.device, kernel=args.kernel, max_num_seqs=max(batches),
        max_num_batched_tokens=most, max_model_len=length,
    )  # fmt: skip
    loaded = time.perf_counter() - start
    gpu = llm.config.device != "cpu"
    weights, peak = llm.plan.memory.weights[0] / 2**30, torch.cuda.max_memory_allocated() / 2**30 if gpu else None
    used = f", at most {peak:.2f} GiB with cache" if peak is not None else ""
    print(f"{args.model} on {llm.plan.hardware.summary}\nloaded in {loaded:.1f} s: {weights:.2f} GiB of weights{used}")
    about = head(args.commit) | {"model": args.model, "load_format": args.load_format, "load_s": loaded}
    about |= {"machine": llm.plan.hardware.name, "weights_gib": weights, "peak_gib": peak}
    name_blocks(llm.engine.runner.model)
    lines, profiles = [], {}
    decode = f"{'step ms':>10}{'tok/s':>9}{'plan ms':>9}{'floor ms':>9}{'of floor':>9}"
    print(f"{'batch':>6}{'prefill tok/s':>14}{'of floor':>9}{decode}")
    for batch in batches:
        row, slices = run(llm, batch, args.context, args.steps, args.profile)
        if slices:
            profiles[batch] = slices, row["step_ms"]
        prefill = f"{row['prefill_tokens_per_s']:14.0f}{row['prefill_of_floor']:9.1%}"
        decode = f"{row['step_ms']:10.2f}{row['tokens_per_s']:9.1f}{row['expected_ms']:9.2f}{row['floor_ms']:9.2f}"
        print(f"{batch:6}{prefill}{decode}{row['of_floor']:9.1%}", flush=True)
        lines.append(about | row)
    for batch, (found, step_ms) in profiles.items():
        lines += [about | {"batch": batch} | line for line in show(found, batch, step_ms)]
    write_lines(args.out, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
