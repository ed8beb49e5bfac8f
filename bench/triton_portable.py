"""How far are the portable Triton kernels from reading memory, and from torch's bf16 product?

    python bench/triton_portable.py [--op linear moe] [--tokens 1 16 256] [--block 16,8,8,4,4,4] [--out FILE]

For each shape and number of tokens: the floor (packed weight bytes that must be read over --bandwidth, or products over
--flops, whichever is more), the kernel, the fraction of the floor it reaches, bf16 by torch's matmul (linear only), and
the norm-wise relative error against float64. Launches are captured in one CUDA graph over as many copies of the weight
as overflow the L2 cache, so every one of them is cold. --block tries other sizes than the table's (rows, tokens,
groups, split, warps, stages). Exit code 1 when an error exceeds 4e-3. Needs a GPU.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.common import COLD, abba, capture, copies_for, head, norm_error, random_weight, write_lines  # noqa: E402
from fp4ward.errors import UserError  # noqa: E402
from fp4ward.formats.formats import NVFP4  # noqa: E402
from fp4ward.formats.weight import Weight  # noqa: E402
from fp4ward.kernels import experts, triton_experts, triton_linear  # noqa: E402

LINEAR = [(2048, 2048), (8192, 2048), (4096, 4096), (16384, 4096), (4096, 8192), (12288, 4096)]  # N, K
MOE = {"35B-A3B": (256, 8, 2048, 512), "397B-A17B": (512, 10, 4096, 1024)}  # E, k, H, I


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Median time of one of `calls`, all captured in one graph."""
    for call in calls[:2]:
        call()
    return abba({"": capture(calls, len(calls))}, 7)[""][0]


def copies(w: list[Weight]) -> list[list[Weight]]:
    count = min(64, copies_for(sum(one.nbytes for one in w)))
    return [w] + [[Weight(NVFP4, {n: p.clone() for n, p in one.parts.items()}) for one in w] for _ in range(count - 1)]


def bench_linear(n: int, k: int, tokens: int) -> dict[str, float]:
    sets = copies([random_weight("nvfp4", n, k)])
    w = sets[0][0]
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    wrong = norm_error(triton_linear.linear(x, w), x.double() @ w.dense(torch.float64).T)
    us = microseconds([lambda w=s[0]: triton_linear.linear(x, w) for s in sets])
    dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies_for(2 * n * k))]
    torch_us = microseconds([lambda d=d: x @ d.T for d in dense])
    return {"bytes": w.nbytes, "flops": 2 * tokens * n * k, "us": us, "torch_bf16_us": torch_us, "error": wrong}


def bench_moe(e: int, top_k: int, h: int, i: int, tokens: int) -> dict[str, float]:
    sets = copies([random_weight("nvfp4", e, i, h), random_weight("nvfp4", e, i, h), random_weight("nvfp4", e, h, i)])
    x = torch.randn(tokens, h, device="cuda").bfloat16()
    # One routing of one token meets so few experts that they would stay in the cache: many routings, each cold.
    size = sum(w.nbytes for w in sets[0])
    draws = max(len(sets), min(64, math.ceil(COLD / (size * min(1, tokens * top_k / e)))))
    routes = [experts.route(torch.randn(tokens, e, device="cuda"), top_k) for _ in range(draws)]
    few = min(tokens, 4)  # the reference decodes an expert a pair
    weights, ids = routes[0]
    want = experts.reference(x[:few].double(), *sets[0], weights[:few].double(), ids[:few])
    wrong = norm_error(triton_experts.experts(x, *sets[0], weights, ids)[:few], want)
    work = [(sets[j % len(sets)], *route) for j, route in enumerate(routes)]
    us = microseconds([lambda s=s, w=w, i=i: triton_experts.experts(x, *s, w, i) for s, w, i in work])
    met = sum(int(ids.unique().numel()) for _, ids in routes) / draws
    return {"bytes": size * met / e, "flops": 6 * tokens * top_k * h * i, "us": us, "error": wrong, "experts_met": met}


def run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=("linear", "moe"), default=["linear", "moe"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--block", help="rows,tokens,groups,split,warps,stages for every launch")
    parser.add_argument("--bandwidth", type=float, default=4.47, help="TB/s that this GPU reads (an H200: 4.47)")
    parser.add_argument("--flops", type=float, default=750, help="TFLOP/s of a bf16 product (an H200: 690 to 800)")
    parser.add_argument("--commit", help="recorded where the tree came without its git folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("bench/triton_portable.py needs a CUDA GPU, and torch finds none")
    if args.block:
        if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3}){5}", args.block):
            raise UserError(f"--block {args.block}: six whole numbers are expected, such as 16,8,8,4,4,4")
        forced = triton_linear.Block(*map(int, args.block.split(",")))
        triton_linear.block_for = triton_experts.block_for = lambda *_: forced
    about = head(args.commit) | {"triton": triton.__version__}
    cases = [("linear", f"{n}x{k}", (n, k)) for n, k in LINEAR] if "linear" in args.op else []
    cases += [("moe", name, shape) for name, shape in MOE.items()] if "moe" in args.op else []
    lines, worst = [], 0.0
    print(f"{'op':7}{'shape':12}{'tokens':>7}{'floor us':>10}{'us':>10}{'of floor':>9}{'torch bf16':>11}{'error':>9}")
    for op, name, shape in cases:
        for tokens in args.tokens:
            torch.manual_seed(0)
            row = bench_linear(*shape, tokens) if op == "linear" else bench_moe(*shape, tokens)
            floor = max(row["bytes"] / args.bandwidth, row["flops"] / args.flops) / 1e6
            worst = max(worst, row["error"])
            torch_us = f"{row['torch_bf16_us']:11.1f}" if op == "linear" else f"{'':11}"
            share = f"{floor / row['us']:9.0%}"
            print(
                f"{op:7}{name:12}{tokens:7}{floor:10.1f}{row['us']:10.1f}{share}{torch_us}{row['error']:9.1e}",
                flush=True,
            )
            lines.append(about | {"op": op, "shape": name, "tokens": tokens, "floor_us": floor} | row)
    write_lines(args.out, lines)
    return int(worst > 4e-3)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(argv)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
