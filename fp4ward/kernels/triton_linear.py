"""y = x W^T for NVFP4 weights on any NVIDIA GPU from SM80 on: weights exact, activations never quantized (W4A16).

The reference is `kernels.linear.reference`. Legend: T tokens, K in, N out; a group is 16 columns with one block scale.

Mathematics. y[t,n] = 128 g[n] sum_k x[t,k] (2^-7 e2m1(code[n,k]) e4m3(scale[n,k/16])). The bracket is exact in bf16 and
f16: a code's three low bits, moved to the top mantissa bit and the two exponent bits above it, are its value times
2^-126 (bf16) or 2^-14 (f16), subnormal 0.5 included, and one product with the scale times 2^119 or 2^7 finishes it. A
scale byte moved by 7 is an f16 of 2^-8 its value. The factor 2^-7 keeps 448 * 2^119 finite, and comes back with the
row's global scale g, both f32 on the f32 accumulator: unequal globals round nothing, and f16 cannot overflow before y.

Layout. The checkpoint's own (formats.weight): nothing is prepared, no second copy. Weight rows are the matrix unit's
rows (A) and tokens its columns (B), so a small batch wastes little.

Bytes. 0.5625 N K for the weight, times ceil(T / block of tokens) through L2, and 2 T (K + N) for x and y.

Two shapes of one loop. SPLIT > 1 (few tokens): the warps of a program share few rows and part K, each holds low nibbles
and high nibbles as two operands and x as pairs, so that nothing is interleaved; partial sums meet once, in a fixed
order. SPLIT = 1 (many): nibbles are joined and x goes to the matrix unit as it is. No split of K over programs, no
atomics: equal inputs give equal bits, and within one row of BLOCKS a token's result does not depend on its neighbours.

Loses where N / ROWS is less than about two programs a processor (small N at one token), and at T >= 256 to kernels that
feed the matrix unit asynchronously (every decoded tile goes through registers here).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4ward.formats.formats import NVFP4_GROUP
from fp4ward.formats.weight import Weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # f32 for the interpreter, which cannot multiply bf16
_WORD = {2: torch.int32, 4: torch.int64}  # two activations


class Block(NamedTuple):
    """How one program is cut: ROWS of the weight by TOKENS, GROUPS of 16 columns a step and part, K in SPLIT parts."""

    rows: int
    tokens: int
    groups: int
    split: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {
            "ROWS": self.rows, "TOKENS": self.tokens, "GROUPS": self.groups, "SPLIT": self.split,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


# First row whose tokens are enough; the last takes the rest. Few rows on purpose: each is a compilation.
BLOCKS = (
    Block(rows=16, tokens=8, groups=8, split=4, warps=4, stages=4),
    Block(rows=16, tokens=16, groups=8, split=4, warps=4, stages=4),
    Block(rows=32, tokens=32, groups=4, split=4, warps=4, stages=3),
    Block(rows=64, tokens=64, groups=4, split=1, warps=4, stages=4),
    Block(rows=128, tokens=128, groups=4, split=1, warps=8, stages=3),
)


def block_for(tokens: int, blocks: tuple[Block, ...] = BLOCKS) -> Block:
    return next((b for b in blocks if b.tokens >= tokens), blocks[-1])


@triton.jit
def weights(packed, scale, groups: tl.constexpr, dtype: tl.constexpr):
    """2^-7 code * scale of the low and of the high nibbles of u8 [R, 8 G] with scale bytes u8 [R, G], exact."""
    rows: tl.constexpr = packed.shape[0]
    s = ((scale & 0x7F).to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32)  # 0x80 is zero
    p = packed.to(tl.uint16)
    if dtype == tl.bfloat16:
        s = s * 1.7014118346046923e38  # 2^127
        low = ((p & 7) << 6) | ((p & 8) << 12)
        high = ((p & 0x70) << 2) | ((p & 0x80) << 8)
    else:
        s = s * 32768.0
        low = ((p & 7) << 9) | ((p & 8) << 12)
        high = ((p & 0x70) << 5) | ((p & 0x80) << 8)
    part: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    s = tl.broadcast_to(tl.expand_dims(s.to(part), 2), [rows, groups, 8])
    s = tl.reshape(s, [rows, 8 * groups])
    return (low.to(part, bitcast=True) * s).to(dtype), (high.to(part, bitcast=True) * s).to(dtype)


@triton.jit
def halves(word, dtype: tl.constexpr):
    """The two activations of a word: the even and the odd column."""
    if dtype == tl.float32:
        even, odd = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    else:
        even, odd = word.to(tl.uint16), (word >> 16).to(tl.uint16)
    return even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True)


@triton.jit
def multiply(
    acc, first, second, packed, scale, live_s, live_w,
    dtype: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """acc plus one step's weights times its activations: even and odd columns if SPLIT > 1, else the first alone."""
    low, high = weights(tl.load(packed, mask=live_w, other=0), tl.load(scale, mask=live_s, other=0), GROUPS, dtype)
    if SPLIT > 1:
        acc = tl.dot(tl.reshape(low, [SPLIT, ROWS, 8 * GROUPS]), first, acc, input_precision="ieee")
        acc = tl.dot(tl.reshape(high, [SPLIT, ROWS, 8 * GROUPS]), second, acc, input_precision="ieee")
    else:
        acc = tl.dot(tl.reshape(tl.join(low, high), [ROWS, 16 * GROUPS]), first, acc, input_precision="ieee")
    return acc


@triton.jit
def product(
    x, x_row, x_live, packed, scale, packed_2, scale_2, row, row_live, pitch, groups,
    dtype: tl.constexpr, TWO: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """f32 [ROWS, TOKENS]: 2^-7 of mantissa times x, for one weight or (TWO) for two of equal layout in one pass over x.

    row and row_live are [SPLIT * ROWS], x_row (in words if SPLIT > 1) and x_live [SPLIT * TOKENS]: each part repeats
    them. `pitch` is the distance of weight rows in groups, `groups` K / 16. A dead row or token reads as zero.
    """
    HALF: tl.constexpr = 8 * GROUPS
    WIDTH: tl.constexpr = HALF if SPLIT > 1 else 2 * HALF  # loads of x in a row: words or columns
    part_w = (tl.arange(0, SPLIT * ROWS) // ROWS)[:, None]
    part_x = (tl.arange(0, SPLIT * TOKENS) // TOKENS)[:, None]
    group = part_w * GROUPS + tl.arange(0, GROUPS)[None, :]
    byte = part_w * HALF + tl.arange(0, HALF)[None, :]
    column = part_x * WIDTH + tl.arange(0, WIDTH)[None, :]
    x += x_row[:, None] + column
    at_s = row[:, None] * pitch + group
    at_w = row[:, None] * (8 * pitch) + byte
    if SPLIT > 1:
        acc = tl.full([SPLIT, ROWS, TOKENS], 0.0, tl.float32)
    else:
        acc = tl.full([ROWS, TOKENS], 0.0, tl.float32)
    acc_2 = acc
    for start in range(0, groups, SPLIT * GROUPS):
        left = groups - start
        live_s = row_live[:, None] & (group < left)
        live_w = row_live[:, None] & (byte < left * 8)
        first = tl.load(
            x + start * (WIDTH // GROUPS), mask=x_live[:, None] & (column < left * (WIDTH // GROUPS)), other=0
        )
        if SPLIT > 1:
            first, second = halves(first, dtype)
            first = tl.permute(tl.reshape(first, [SPLIT, TOKENS, HALF]), [0, 2, 1])
            second = tl.permute(tl.reshape(second, [SPLIT, TOKENS, HALF]), [0, 2, 1])
        else:
            first = tl.trans(first)
            second = first
        at = (packed + start * 8 + at_w, scale + start + at_s)
        acc = multiply(acc, first, second, at[0], at[1], live_s, live_w, dtype, ROWS, GROUPS, SPLIT)
        if TWO:
            at = (packed_2 + start * 8 + at_w, scale_2 + start + at_s)
            acc_2 = multiply(acc_2, first, second, at[0], at[1], live_s, live_w, dtype, ROWS, GROUPS, SPLIT)
    if SPLIT > 1:
        acc = tl.sum(acc, 0)
        acc_2 = tl.sum(acc_2, 0)
    return acc, acc_2


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x, packed, scale, glob, y, tokens, n, pitch, groups, x_pitch,
    dtype: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    t0 = tl.program_id(0) * TOKENS  # blocks of tokens that share rows run side by side: the rows stay in L2
    n0 = tl.program_id(1) * ROWS
    row = n0 + tl.arange(0, SPLIT * ROWS) % ROWS
    t = t0 + tl.arange(0, SPLIT * TOKENS) % TOKENS
    acc, _ = product(
        x, t.to(tl.int64) * x_pitch, t < tokens, packed, scale, packed, scale, row, row < n, pitch, groups,
        dtype, False, ROWS, TOKENS, GROUPS, SPLIT,
    )  # fmt: skip
    row = n0 + tl.arange(0, ROWS)
    t = t0 + tl.arange(0, TOKENS)
    acc = acc * (tl.load(glob + row, mask=row < n, other=0.0) * 128.0)[:, None]
    at = y + t.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(row < n)[:, None] & (t < tokens)[None, :])


class Parts(NamedTuple):
    """Codes and scales of a weight as bytes, its globals, and distances: of rows in groups, of experts in groups and
    in globals."""

    packed: Tensor
    scale: Tensor
    glob: Tensor
    pitch: int
    expert_pitch: int
    glob_pitch: int


def parts(w: Weight) -> Parts:
    """What a kernel is given of w [..., N, K]; AssertionError for a weight that it does not read."""
    assert w.format.name == "nvfp4", f"the Triton kernels read NVFP4 weights, not {w.format.name}"
    packed, scale, glob = (w.parts[name] for name in ("packed", "block_scale", "global_scale"))
    n, k = w.shape[-2:]
    pitch = scale.stride(-2) if n > 1 else k // NVFP4_GROUP  # the stride of a dimension of one means nothing
    expert_pitch, glob_pitch = (scale.stride(0), glob.stride(0)) if len(w.shape) == 3 else (0, 0)
    wanted = ((packed, (8 * expert_pitch, 8 * pitch, 1)), (scale, (expert_pitch, pitch, 1)), (glob, (glob_pitch, 1)))
    for part, strides in wanted:
        found = zip(part.shape, part.stride(), strides[-part.dim() :], strict=True)
        assert all(size == 1 or a == b for size, a, b in found), "an NVFP4 weight's parts must share one layout"
    assert n * pitch * 8 < 2**31, f"a weight {list(w.shape)} has offsets beyond 32 bits"
    return Parts(packed, scale.view(torch.uint8), glob, pitch, expert_pitch, glob_pitch)


def activations(x: Tensor, block: Block, k: int) -> tuple[Tensor, int, Any]:
    """x as the kernel wants it (words of two columns for SPLIT > 1), its row distance and its Triton type."""
    assert x.dtype in DTYPES, f"activations must be one of {DTYPES}, not {x.dtype}"
    assert x.dtype != torch.float32 or not x.is_cuda, "on a GPU activations must be bf16 or f16: f32 tiles do not fit"
    assert x.dim() == 2 and x.shape[1] == k, f"activations {list(x.shape)} do not fit K={k}"
    dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[x.dtype]
    x = x.contiguous()
    if block.split == 1:
        return x, k, dtype
    if x.storage_offset() % 2:  # a word may not start at an odd element
        x = x.clone()
    return x.view(_WORD[x.dtype.itemsize]), k // 2, dtype


def linear(x_TK: Tensor, w: Weight) -> Tensor:
    """x [T, K] bf16 or f16, w NVFP4 [N, K] (any view by rows or columns) -> [T, N] in x's type.

    f32 under the interpreter only. N is any number, K a multiple of 16. Graph-capturable: no host synchronisation.
    """
    n, k = w.shape
    tokens = x_TK.shape[0]
    block = block_for(tokens)
    p = parts(w)
    x, x_pitch, dtype = activations(x_TK, block, k)
    y = torch.empty(tokens, n, dtype=x_TK.dtype, device=x_TK.device)
    if tokens and n:
        grid = (-(-tokens // block.tokens), -(-n // block.rows))
        groups = k // NVFP4_GROUP
        _linear[grid](
            x, p.packed, p.scale, p.glob, y, tokens, n, p.pitch, groups, x_pitch, dtype, **block.options()
        )  # fmt: skip
    return y
