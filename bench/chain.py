"""Do a layer's kernels take in a row what each takes alone, and what does a norm between them cost?

    python bench/chain.py [--layers REGEX] [--tokens 1,8,16,64] [--out FILE] [--commit ID] | --read FILE

bench/kernel.py times one shape after itself. In a model each kernel follows another one of another shape, and with
programmatic dependent launch meets the blocks of that one still there. For the NVFP4 products of a layer (joined as
tests/cases.py has them), captured in a CUDA graph layer after layer over as many copies of the weights as overflow the
L2 cache: microseconds of a layer; the sum of its products alone, each after itself; and the layer with an RMS norm
before its first and third product, by our kernel and by torch's. Where the model has experts also what its router adds,
up to 16 tokens: norm and product with all gates in one launch of ours, or in torch's two, ahead of one such product.
All graphs of a layer are replayed in turn, there and back. Without a GPU the exit code is 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench import common  # noqa: E402
from bench.common import abba, capture, copies_for, random_weight  # noqa: E402
from bench.kernel import numbers, pattern, stored_rows  # noqa: E402
from bench.verdict import Row  # noqa: E402
from fp4ward.errors import UserError  # noqa: E402
from fp4ward.kernels import cuda_linear, cuda_norm  # noqa: E402
from fp4ward.kernels.cuda_linear import Prepared  # noqa: E402

Norm = Callable[[Tensor, Tensor, float], Tensor]
EPS, MOST = 1e-6, 16  # layers of a graph, where copies allow
# A mixer's products in and out, then an MLP's
LAYERS = {
    "35B-A3B": ((12288, 2048), (2048, 4096), (1024, 2048), (2048, 512)),
    "27B": ((14336, 5120), (5120, 6144), (34816, 5120), (5120, 17408)),
    "27B TP 8": ((2048, 5120), (5120, 768), (4352, 5120), (5120, 2176)),
    "397B-A17B": ((20480, 4096), (4096, 8192), (2048, 4096), (4096, 1024)),
}
GATES = {"35B-A3B": 264, "397B-A17B": 520}  # rows of the router's product, padded


def torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


NORMS: dict[str, Norm | None] = {"layer": None, "cuda": cuda_norm.rms_norm, "torch": torch_norm}


def layer(weights: Sequence[Prepared], inputs: Sequence[Tensor], gains: Sequence[Tensor], norm: Norm | None) -> None:
    for i, (w, x) in enumerate(zip(weights, inputs, strict=True)):
        cuda_linear.linear(x if norm is None or i % 2 else norm(x, gains[i], EPS), w)


def router(key: str, x: Tensor, gain: Tensor, gates: Tensor, w: Prepared) -> None:
    """Ahead of a product of n."""
    if key == "cuda":
        n, _ = cuda_norm.rms_norm_gates(x, gain, EPS, gates)
    else:
        n = torch_norm(x, gain, EPS)
        functional.linear(n, gates)
    cuda_linear.linear(n, w)


def measure(name: str, tokens: int) -> Row:
    shapes = LAYERS[name]
    made = [cuda_linear.prepare(random_weight("nvfp4", n, k)) for n, k in shapes]
    count = min(MOST, max(2, copies_for(sum(w.records.numel() for w in made))))
    sets = [made] + [
        [Prepared(w.format, w.shape, w.records.clone(), w.row_scale) for w in made] for _ in range(count - 1)
    ]
    x = [torch.randn(tokens, k, device=common.DEVICE).bfloat16() for _, k in shapes]
    gains = [torch.ones(k, device=common.DEVICE) for _, k in shapes]
    calls = {f"{key}_us": [partial(layer, one, x, gains, norm) for one in sets] for key, norm in NORMS.items()}
    for i, (n, k) in enumerate(shapes):
        calls[f"{n}x{k}"] = [partial(cuda_linear.linear, x[i], one[i]) for one in sets]
    if name in GATES and tokens <= cuda_norm.MAX_TOKENS:
        gates = [torch.randn(GATES[name], shapes[0][1], device=common.DEVICE).bfloat16() for _ in sets]
        for key in ("cuda", "torch"):
            calls[f"router_{key}_us"] = [
                partial(router, key, x[0], gains[0], g, one[2]) for g, one in zip(gates, sets, strict=True)
            ]
    for own in calls.values():
        own[0]()
    graphs = {key: capture(own, max(count, 1 if key.endswith("us") else 3 * count)) for key, own in calls.items()}
    times = {key: us for key, (us, _) in abba(graphs, 5).items()}
    for key in [key for key in times if key.startswith("router")]:  # what it adds
        times[key] -= times["{}x{}".format(*shapes[2])]
    alone = sum(times.pop(f"{n}x{k}") for n, k in shapes)
    return {"op": "layer", "format": "nvfp4", "layer": name, "tokens": tokens, "alone_us": alone, **times}


def show(rows: Sequence[Row]) -> None:
    table = Table(title="products of a layer in a row, us; over the sum of them alone; a norm more, us (each of two)")
    norms = ("cuda norm", "torch norm", "cuda router", "torch router")
    for title in ("layer", "tokens", "alone", "in a row", "ratio", *norms):
        table.add_column(title, justify="right" if title != "layer" else "left")
    for r in rows:
        extra = [f"{(r[f'{key}_us'] - r['layer_us']) / 2:.1f}" for key in ("cuda", "torch")]
        extra += [f"{r[key]:.1f}" if (key := f"router_{name}_us") in r else "" for name in ("cuda", "torch")]
        ratio = f"{r['layer_us'] / r['alone_us']:.2f}"
        table.add_row(r["layer"], str(r["tokens"]), f"{r['alone_us']:.1f}", f"{r['layer_us']:.1f}", ratio, *extra)
    Console(width=110, highlight=False).print(table)


def run(args: argparse.Namespace) -> int:
    if args.read:
        show(stored_rows(args.read, "layer", "nvfp4", has="alone_us"))
        return 0
    wanted, tokens = pattern(f"--layers {args.layers}", args.layers), numbers(args.tokens)
    names = [name for name in LAYERS if wanted.search(name)]
    if not names:
        raise UserError(f"--layers {args.layers}: none of {', '.join(LAYERS)} matches")
    if not torch.cuda.is_available():
        raise UserError("bench/chain.py needs a CUDA GPU, and torch finds none")
    with torch.inference_mode():
        head = common.head(args.commit)
        rows = [head | measure(name, m) for name in names for m in tokens]
    common.write_lines(args.out, rows)
    show(rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="", help="regular expression of their names")
    parser.add_argument("--tokens", default="1,8,16,64")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--read", type=Path, help="show what --out wrote")
    parser.add_argument("--commit", help="recorded where the tree came without its git folder")
    return common.command(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
