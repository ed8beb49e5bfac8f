"""Routed experts with NVFP4 weights on any NVIDIA GPU from SM80 on, in three or four launches.

The reference is `kernels.experts.reference`. Legend: T tokens, H hidden, E experts, I expert width, k experts a token;
a pair is (token, choice), P = T k of them, pair p = token p // k.

Mathematics. h[p] = silu(gate x) * (up x) in f32, rounded once to x's type; part[p] = down h[p], f32; y[t] = the sum
over a token's choices, in their order, of weight * part, f32, rounded once. A choice whose id is not one of 0..E-1 (an
expert of another rank, or none) is skipped; its part is never read.

Which program does what. A program multiplies some rows of one expert with a block of pairs. Few pairs (an expert
rarely meets two): every pair is its own block, and nothing is sorted. Otherwise a first launch sorts pairs by expert
and cuts each expert's into blocks; their number is bounded by the shapes, so the host never waits and a CUDA graph can
hold all of it. Blocks beyond the need, and those of skipped choices, end at once. Then gate|up|silu, down, and the sum
over a token's choices are a launch each. The product is triton_linear's.

Bytes. 0.5625 * 3 I H for each expert that is met (from L2 for its further blocks), then 2 P (H + 2 I) + 8 P H.
No atomics: equal inputs give equal bits.

Loses at one token to kernels that split an expert's rows finer or fuse the sum into down, and at many tokens where
triton_linear does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4ward.formats.formats import NVFP4_GROUP
from fp4ward.formats.weight import Weight
from fp4ward.kernels.triton_linear import BLOCKS, Block, activations, block_for, parts, product

# As the linear's, but two accumulators need half the rows where there are many tokens.
GATED_BLOCKS = (
    *BLOCKS[:2],
    Block(rows=16, tokens=32, groups=4, split=4, warps=4, stages=4),
    BLOCKS[3],
    Block(rows=64, tokens=128, groups=4, split=1, warps=8, stages=3),
)
SUM_COLUMNS = 512
SORT_CHUNK = 1024


@triton.jit
def _block(expert_B, first_B, end_B, experts, SORTED: tl.constexpr):
    """Expert, first row and end of rows of this program's block; an expert out of range for a dead block."""
    b = tl.program_id(0)
    e = tl.load(expert_B + b).to(tl.int64)
    if SORTED:
        first = tl.load(first_B + b)
        end = tl.load(end_B + b)
    else:
        first = b
        end = b + 1
    return e, first, end, (e >= 0) & (e < experts) & (first < end)


@triton.jit(do_not_specialize=["top_k"])
def _gate_up(
    x, gate, gate_scale, gate_glob, up, up_scale, up_glob, h, expert_B, first_B, end_B, order_P,
    experts, n, pitch, expert_pitch, glob_pitch, groups, x_pitch, top_k,
    dtype: tl.constexpr, SORTED: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    e, first, end, live = _block(expert_B, first_B, end_B, experts, SORTED)
    if live:
        n0 = tl.program_id(1) * ROWS
        row = n0 + tl.arange(0, SPLIT * ROWS) % ROWS
        at = first + tl.arange(0, SPLIT * TOKENS) % TOKENS
        pair = at
        if SORTED:
            pair = tl.load(order_P + at, mask=at < end, other=0)
        base = e * expert_pitch
        g, u = product(
            x, (pair // top_k).to(tl.int64) * x_pitch, at < end,
            gate + base * 8, gate_scale + base, up + base * 8, up_scale + base, row, row < n, pitch, groups,
            dtype, True, ROWS, TOKENS, GROUPS, SPLIT,
        )  # fmt: skip
        row = n0 + tl.arange(0, ROWS)
        at = first + tl.arange(0, TOKENS)
        g *= (tl.load(gate_glob + e * glob_pitch + row, mask=row < n, other=0.0) * 128.0)[:, None]
        u *= (tl.load(up_glob + e * glob_pitch + row, mask=row < n, other=0.0) * 128.0)[:, None]
        out = g / (1.0 + tl.exp(-g)) * u
        to = h + at.to(tl.int64)[None, :] * n + row[:, None]
        tl.store(to, out.to(h.dtype.element_ty), mask=(row < n)[:, None] & (at < end)[None, :])


@triton.jit
def _down(
    h, down, down_scale, down_glob, part, expert_B, first_B, end_B, order_P,
    experts, n, pitch, expert_pitch, glob_pitch, groups, h_pitch,
    dtype: tl.constexpr, SORTED: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    e, first, end, live = _block(expert_B, first_B, end_B, experts, SORTED)
    if live:
        n0 = tl.program_id(1) * ROWS
        row = n0 + tl.arange(0, SPLIT * ROWS) % ROWS
        at = first + tl.arange(0, SPLIT * TOKENS) % TOKENS
        base = e * expert_pitch
        down += base * 8
        down_scale += base
        acc, _ = product(
            h, at.to(tl.int64) * h_pitch, at < end, down, down_scale, down, down_scale, row, row < n, pitch, groups,
            dtype, False, ROWS, TOKENS, GROUPS, SPLIT,
        )  # fmt: skip
        row = n0 + tl.arange(0, ROWS)
        at = first + tl.arange(0, TOKENS)
        acc *= (tl.load(down_glob + e * glob_pitch + row, mask=row < n, other=0.0) * 128.0)[:, None]
        pair = at
        if SORTED:
            pair = tl.load(order_P + at, mask=at < end, other=0)
        to = part + pair.to(tl.int64)[None, :] * n + row[:, None]
        tl.store(to, acc, mask=(row < n)[:, None] & (at < end)[None, :])


@triton.jit(do_not_specialize=["top_k"])
def _sum(part, weight_Tk, ids_Tk, y, experts, n, top_k, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.full([COLUMNS], 0.0, tl.float32)
    for j in range(0, top_k):
        p = t * top_k + j
        e = tl.load(ids_Tk + p)
        weight = tl.load(weight_Tk + p).to(tl.float32)
        acc += tl.load(part + p * n + column, mask=(column < n) & (e >= 0) & (e < experts), other=0.0) * weight
    tl.store(y + t * n + column, acc.to(y.dtype.element_ty), mask=column < n)


@triton.jit(do_not_specialize=["pairs", "cells"])
def _sort(
    ids_P, expert_B, first_B, end_B, order_P, pairs, cells, experts, TOKENS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Program e finds its expert's pairs and writes its blocks; the last one (e = experts) marks the rest as dead."""
    e = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    start = 0
    count = 0
    for at in range(0, pairs, CHUNK):
        id = tl.load(ids_P + at + chunk, mask=at + chunk < pairs, other=-1)
        start += tl.sum(((id >= 0) & (id < e)).to(tl.int32), 0)
        count += tl.sum((id == e).to(tl.int32), 0)
    done = start
    for at in range(0, pairs, CHUNK):
        id = tl.load(ids_P + at + chunk, mask=at + chunk < pairs, other=-1)
        hit = (id == e).to(tl.int32)
        tl.store(order_P + done + tl.cumsum(hit, 0) - 1, at + chunk, mask=id == e)
        done += tl.sum(hit, 0)
    # sum over e' < e of ceil(count / TOKENS) <= start // TOKENS + e: everyone knows its place without its neighbours.
    cell = start // TOKENS + e
    stop = (start + count) // TOKENS + e + 1
    if e == experts:
        stop = cells
    for b in range(cell, stop):
        tl.store(expert_B + b, e)
        tl.store(first_B + b, start + (b - cell) * TOKENS)
        tl.store(end_B + b, start + count)


def sorted_blocks(ids_P: Tensor, experts: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs by expert, cut into blocks of `tokens`: expert, first and end of each block, and the order of pairs.

    Enough blocks for any routing. One that is not needed is empty or has an expert out of range; pairs whose id is out
    of range are in none. In one launch: torch would need twenty, and its bincount waits for the device.
    """
    pairs = ids_P.numel()
    cells = pairs // tokens + experts
    expert, first, end = (torch.empty(cells, dtype=torch.int32, device=ids_P.device) for _ in range(3))
    order = torch.empty(pairs, dtype=torch.int32, device=ids_P.device)
    _sort[(experts + 1,)](
        ids_P, expert, first, end, order, pairs, cells, experts, TOKENS=tokens, CHUNK=SORT_CHUNK
    )  # fmt: skip
    return expert, first, end, order


def experts(x_TH: Tensor, gate: Weight, up: Weight, down: Weight, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
    """[T, H] in x's type: sum over a token's choices of weight * down(silu(gate x) * (up x)).

    x is bf16 or f16 (f32 under the interpreter only); gate and up are NVFP4 [E, I, H] of one layout, down [E, H, I]; H
    and I are multiples of 16; ids int32 or int64, weights of any float type. Graph-capturable: no host synchronisation.
    """
    count, width, hidden = gate.shape
    assert up.shape == gate.shape and down.shape == (count, hidden, width), (
        f"gate {list(gate.shape)}, up {list(up.shape)} and down {list(down.shape)} are not one block of experts"
    )
    assert weights_Tk.shape == ids_Tk.shape and ids_Tk.shape[0] == x_TH.shape[0]
    assert ids_Tk.dtype in (torch.int32, torch.int64), f"expert ids must be integers, not {ids_Tk.dtype}"
    tokens, top_k = ids_Tk.shape
    pairs = tokens * top_k
    y = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    if pairs == 0:
        return y.zero_()
    ids_Tk, weights_Tk = ids_Tk.contiguous(), weights_Tk.contiguous()
    pick = max(count // 2, top_k)
    is_sorted = pairs > pick  # else an expert rarely meets two pairs
    mean = -(-pairs // count) if is_sorted else 1
    wide, narrow = block_for(mean, GATED_BLOCKS), block_for(mean)
    assert wide.tokens == narrow.tokens, "both products share one cut into blocks"
    ids = ids_Tk.flatten()
    blocks = sorted_blocks(ids, count, narrow.tokens) if is_sorted else (ids, ids, ids, ids)
    g, u, d = parts(gate), parts(up), parts(down)
    assert g[3:] == u[3:], "gate and up must have one layout"
    x, x_pitch, dtype = activations(x_TH, wide, hidden)
    h = torch.empty(pairs, width, dtype=x_TH.dtype, device=x_TH.device)
    cells = blocks[0].numel()
    _gate_up[(cells, -(-width // wide.rows))](
        x, *g[:3], *u[:3], h, *blocks, count, width, *g[3:], hidden // NVFP4_GROUP, x_pitch, top_k,
        dtype, is_sorted, **wide.options(),
    )  # fmt: skip
    h, h_pitch, _ = activations(h, narrow, width)
    part = torch.empty(pairs, hidden, dtype=torch.float32, device=x_TH.device)
    _down[(cells, -(-hidden // narrow.rows))](
        h, *d[:3], part, *blocks, count, hidden, *d[3:], width // NVFP4_GROUP, h_pitch,
        dtype, is_sorted, **narrow.options(),
    )  # fmt: skip
    _sum[(tokens, -(-hidden // SUM_COLUMNS))](
        part, weights_Tk, ids_Tk, y, count, hidden, top_k, COLUMNS=SUM_COLUMNS
    )  # fmt: skip
    return y
