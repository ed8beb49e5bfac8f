"""How fast does a model decode on this CPU, one request and several, packed and unpacked?

    python bench/cpu_decode.py [MODEL] [--out bench/results/cpu_decode.jsonl]

Tokens a second of greedy decoding after a short prompt: the median of five runs of 64 tokens, the variants in turn.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fp4ward.plan  # noqa: E402
from bench.common import head, write_lines  # noqa: E402
from fp4ward import LLM, SamplingParams  # noqa: E402

TOKENS, RUNS = 64, 5


def rate(llm: LLM, prompts: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([list(range(3, 40))] * prompts, params)
    return prompts * TOKENS / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unpacked = LLM(args.model, device="cpu", show_progress=False)
    fp4ward.plan.UNPACK_BYTES = 0
    models = {"unpacked": unpacked, "packed": LLM(args.model, device="cpu", show_progress=False)}
    variants = list(itertools.product(models, sorted({1, os.cpu_count() or 1}), (1, 16)))
    found: dict[tuple[str, int, int], list[float]] = {v: [] for v in variants}
    for _ in range(RUNS):
        for name, threads, prompts in variants:
            torch.set_num_threads(threads)
            found[name, threads, prompts].append(rate(models[name], prompts))
    about = head(device="cpu")
    lines = []
    print(f"{'weights':10} {'threads':>7} {'requests':>8} {'tokens/s':>9}  (of {RUNS} runs: lowest, highest)")
    for (name, threads, prompts), rates in found.items():
        middle = statistics.median(rates)
        print(f"{name:10} {threads:7} {prompts:8} {middle:9.1f}  ({min(rates):.1f}, {max(rates):.1f})")
        row = {"weights": name, "threads": threads, "requests": prompts, "tokens_per_s": round(middle, 1)}
        lines.append(about | row)
    write_lines(args.out, lines)


if __name__ == "__main__":
    main()
