"""RMS norms in one launch, and the norm ahead of a router with the product that reads it: norm.cu.

Legend: T tokens, H hidden, E gates (a row an expert).

With programmatic dependent launch what is constant (weight, gates: not what the kernel ahead writes) is on its way to
registers while that one still runs. There remain x from L2, two sums over a CTA, and what a launch costs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4ward.kernels import nvrtc
from fp4ward.kernels.cuda_linear import DTYPES, rows
from fp4ward.kernels.nvrtc import Source

MAX_TOKENS, MAX_HIDDEN = 16, 8192  # of rms_norm_gates
TUNED = {"PER", "ROWS", "TOKENS", "KIB"}


def choose(h: int, gates: int = 0, tokens: int = 1, tuning: Mapping[str, int] | None = None) -> dict[str, int]:
    """Defines of norm.cu, of rms_norm_gates where there are gates. Depends on tokens only through whether there is one.

    tuning: PER pieces of 8 columns a thread; ROWS of gates a CTA, else so many that each of some 130 multiprocessors
    has one; TOKENS at once, else as many as registers allow; KIB of shared memory that a CTA has at least, no define.
    """
    tuning = tuning or {}
    assert TUNED.issuperset(tuning), f"the norm takes {', '.join(sorted(TUNED))}, not {dict(tuning)}"
    per = tuning.get("PER", -(-h // 4096))
    found = {"PER": per, "THREADS": -(-h // (per * 1024)) * 128}
    if gates:
        found["ROWS"] = tuning.get("ROWS", max(per, 1 if gates <= 160 else 2 if gates <= 320 else 4))
        found["TOKENS"] = 1 if tokens == 1 else tuning.get("TOKENS", 4 // per)
    return found


def _source(half: bool, defines: Mapping[str, int]) -> Source:
    entry = "rms_norm_gates" if "ROWS" in defines else "rms_norm"
    return Source("norm.cu", tuple({"HALF": int(half), "PDL": 1, **defines}.items()), entry)


def sources(sm: int) -> list[Source]:
    """Of the hidden sizes of most models with up to 128, 256 and 512 experts; the same for every SM."""
    hiddens = (2048, 2688, 4096, 5120, 7168)
    ways = [choose(h, gates, tokens) for h in hiddens for gates in (0, 136, 264, 520) for tokens in (1, MAX_TOKENS)]
    return list(dict.fromkeys(_source(half, way) for way in ways for half in (False, True)))


@functools.cache
def _launch(h: int, gates: int, one: bool, half: bool, device: torch.device, tuning: Any) -> tuple[Any, dict[str, int]]:
    way = choose(h, gates, 1 if one else MAX_TOKENS, dict(tuning))
    return nvrtc.kernel(_source(half, way), device), way


def _read(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, int]:
    """x as the kernels read it, and its pitch."""
    h = x_TH.shape[1]
    assert x_TH.dtype in DTYPES and h % 8 == 0, f"the norm takes bf16 or f16, 8 columns at once, not {x_TH.dtype} {h}"
    assert weight_H.dtype == torch.float32 and weight_H.shape == (h,) and weight_H.is_contiguous()
    assert weight_H.data_ptr() % 16 == 0
    return rows(x_TH)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """norm.rms_norm of x bf16 or f16 [T, H], H a multiple of 8 up to 16384, weight f32. A row's bits depend neither on
    the others nor on how many there are. Graph-capturable, but for a kernel's first call."""
    x, pitch = _read(x_TH, weight_H)
    (tokens, h), y = x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        kernel, way = _launch(h, 0, True, x.dtype == torch.float16, x.device, ())
        threads = way["THREADS"]
        kernel((tokens, 1, 1), threads, threads // 8, x, weight_H, y, h, pitch, 1 / h, float(eps), pdl=True)
    return y


def rms_norm_gates(
    x_TH: Tensor, weight_H: Tensor, eps: float, gates_EH: Tensor, **tuning: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """n = rms_norm(x), and n times gates (of x's type, contiguous) summed in f32: [T, H] in x's type and f32 [T, E].

    At most MAX_TOKENS and MAX_HIDDEN. n has the bits that rms_norm gives; those of a token's logits depend neither on
    the others nor on how many there are. tuning: as at `choose`, for benchmarks. Graph-capturable, but for a kernel's
    first call.
    """
    x, pitch = _read(x_TH, weight_H)
    (tokens, h), count = x.shape, gates_EH.shape[0]
    assert tokens <= MAX_TOKENS and h <= MAX_HIDDEN, f"{tokens} tokens by {h}: at most {MAX_TOKENS} by {MAX_HIDDEN}"
    assert gates_EH.dtype == x.dtype and gates_EH.shape[1] == h and gates_EH.is_contiguous()
    assert count and gates_EH.data_ptr() % 16 == 0
    n = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    logits = torch.empty(tokens, count, device=x.device)
    if tokens:
        half, options = x.dtype == torch.float16, tuple(sorted(tuning.items()))
        kernel, way = _launch(h, count, tokens == 1, half, x.device, options)
        own, threads = way["ROWS"], way["THREADS"]
        shared = way["TOKENS"] * way["PER"] * threads * 16 + (MAX_TOKENS + tokens * own) * threads // 8
        kernel(
            (-(-count // own), 1, 1), threads, max(shared, tuning.get("KIB", 0) << 10),
            x, weight_H, gates_EH, n, logits, tokens, h, pitch, count, 1 / h, float(eps), pdl=True,
        )  # fmt: skip
    return n, logits
