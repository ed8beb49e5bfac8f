"""Attention of few tokens over the paged cache in one launch: attention.cu and how it is cut up.

Legend: T tokens, Nq query heads, Nk key heads, D their size, B sequences, P pages of the longest one.

Bytes. K and V of a context once for each of its tokens in the step: 2 Nk D numbers a position. Loses where a sequence
has many tokens, which share nothing: prompts.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp4ward.kernels import nvrtc
from fp4ward.kernels.cuda_linear import DTYPES, H200, Gpu, alone, gpu_here, gpu_of, rows
from fp4ward.kernels.nvrtc import Source

FILE = "attention.cu"
SIZES = (32, 64, 128, 256)  # of heads
CACHES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
TILE, WARPS = 16, 4
TICKETS = 1 << 16  # CTAs of clusters that may have to wait for each other's sums


class Way(NamedTuple):
    """cluster: CTAs of one, 1 where there are none. depth: halves of tiles that a warp has in flight, fewer where
    they do not fit. span: tiles of a CTA, before a context takes more clusters. most: CTAs of a token."""

    cluster: int = 8
    depth: int = 2
    span: int = 8
    most: int = 256


WAY = Way()


def _size(depth: int, d: int, repeat: int, cache: int) -> int:
    """Bytes of shared memory."""
    heads = -(-repeat // 8) * 8
    own = max(depth * TILE * d * (1 if cache == 2 else 2), heads * (d + 4) * 4)
    return WARPS * own + d * 32 + WARPS * d * 2 + 256 + WARPS * 128 + 16


def _source(d: int, repeat: int, half: bool, cache: int, gpu: Gpu, way: Way) -> Source:
    depth = max((n for n in range(2, way.depth + 1) if _size(n, d, repeat, cache) <= gpu.room), default=2)
    defines = {"D": d, "R": repeat, "X_HALF": int(half), "CACHE": cache, "HALF": int(half or cache > 0), "PDL": 1}
    cut = {"WARPS": WARPS, "DEPTH": depth, "SPAN": way.span, "CLUSTER": way.cluster if gpu.clusters else 1}
    return Source(FILE, tuple({**defines, **cut}.items()), "attend")


def sources(sm: int) -> list[Source]:
    """Of published models on up to 8 ranks, and of small ones, with caches of the activations' type or FP8."""
    gpu, sizes = gpu_of(sm, H200.sms), [(256, repeat) for repeat in (2, 3, 4, 6, 8, 16)] + [(64, 2), (32, 2)]
    ways = ((False, 0), (False, 2), (True, 1), (True, 2))
    return [_source(d, repeat, half, cache, gpu, WAY) for d, repeat in sizes for half, cache in ways]


@functools.cache
def _plan(
    tokens: int, key_heads: int, repeat: int, d: int, positions: int, half: bool, cache: int, device: torch.device,
    way: Way,
) -> tuple[nvrtc.Kernel, tuple[int, int, int], int, int, int]:  # fmt: skip
    """The kernel, its grid, bytes of shared memory, most clusters of a token and key head, float4s of their sums."""
    gpu = gpu_here(device)
    source = _source(d, repeat, half, cache, gpu, way)
    defines = dict(source.defines)
    cluster = int(defines["CLUSTER"])
    most = min(-(-positions // (TILE * way.span * cluster)), max(1, way.most // (key_heads * cluster)))
    shared = alone(gpu, tokens * key_heads * most, cluster, _size(int(defines["DEPTH"]), d, repeat, cache))
    grid = (tokens * key_heads, most * cluster, 1)
    return nvrtc.kernel(source, device), grid, shared, most, tokens * key_heads * most * repeat * d // 2


@functools.cache
def _tickets(device: torch.device) -> Tensor:
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


def attend(
    q_TQ: Tensor, k_TK: Tensor, v_TK: Tensor, q_norm_D: Tensor, k_norm_D: Tensor, eps: float, freq_R: Tensor,
    positions_T: Tensor, cache_at_T: Tensor, owner_T: Tensor, pages_BP: Tensor, page_size: int, cache_k: Tensor,
    cache_v: Tensor, k_scale: float, v_scale: float, way: Way = WAY,
) -> Tensor:  # fmt: skip
    """What o_proj takes, [T, Nq D] in q's type: layers.attention.FusedAttention.

    q [T, Nq 2 D], head by head q and then its gate, k, v [T, Nk D], bf16 or f16, as projected; Nq / Nk at most 16. f32:
    norms [D] (1 + w) and freq [rotary / 2]. positions, cache_at (rows of the cache) int64 [T]; owner int32 [T], the row
    of pages int32 [B, P] that is the token's sequence, or -1 for padding, which gives zeros and is not stored. Tokens
    of a sequence lie one behind the other, and so do their positions; all positions before are in the cache
    [rows, Nk, D], bf16, f16 or FP8 with scales, to which K and V of this step are written. way: for benchmarks.

    Equal inputs give equal bits, and so does a token without the others. Of one stream of a device at a time: launches
    share counters. Graph-capturable, but for a kernel's first call.
    """
    (tokens, width), (_, key_heads, d), dtype = k_TK.shape, cache_k.shape, q_TQ.dtype
    repeat = q_TQ.shape[1] // (2 * width)
    assert dtype in DTYPES and d in SIZES and 1 <= repeat <= 16, f"{repeat} heads of {d} for one, {dtype}"
    assert width == key_heads * d and q_TQ.shape == (tokens, 2 * repeat * width) and v_TK.shape == k_TK.shape
    assert k_TK.dtype == v_TK.dtype == dtype and cache_k.dtype in CACHES, f"a cache in {cache_k.dtype}"
    assert cache_v.dtype == cache_k.dtype and cache_v.shape == cache_k.shape
    assert cache_k.is_contiguous() and cache_v.is_contiguous()
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (q_norm_D, k_norm_D, freq_R))
    assert q_norm_D.shape == k_norm_D.shape == (d,) and 0 < len(freq_R) <= d // 2
    assert q_norm_D.data_ptr() % 16 == k_norm_D.data_ptr() % 16 == 0
    assert all(x.shape == (tokens,) and x.stride(0) == 1 for x in (positions_T, cache_at_T, owner_T) if tokens > 1)
    assert positions_T.dtype == cache_at_T.dtype == torch.int64 and owner_T.dtype == pages_BP.dtype == torch.int32
    assert pages_BP.stride(1) == 1 or pages_BP.shape[1] == 1
    out = torch.empty(tokens, repeat * width, dtype=dtype, device=q_TQ.device)
    if tokens == 0:
        return out
    (q, q_pitch), (k, k_pitch), (v, v_pitch) = rows(q_TQ), rows(k_TK), rows(v_TK)
    cache, positions = CACHES[cache_k.dtype], pages_BP.shape[1] * page_size
    kernel, grid, shared, most, quads = _plan(
        tokens, key_heads, repeat, d, positions, dtype == torch.float16, cache, q.device, way
    )
    assert grid[0] * way.cluster <= TICKETS
    parts = torch.empty(quads * 4, device=q.device) if most > 1 else None
    scales = (float(k_scale), float(v_scale)) if cache == 2 else (1.0, 1.0)
    kernel(
        grid, WARPS * 32, shared, q, k, v, q_norm_D, k_norm_D, freq_R, positions_T, cache_at_T, owner_T, pages_BP,
        cache_k, cache_v, parts, _tickets(q.device), out, key_heads, len(freq_R), page_size, pages_BP.stride(0),
        q_pitch, k_pitch, v_pitch, most, float(eps), d**-0.5 * math.log2(math.e) * scales[0], *scales, pdl=True,
    )  # fmt: skip
    return out
