"""Qwen3.5's linear attention for few tokens in one launch: gated_delta.cu and how it is cut up.

Bytes. A state, 4 Nv Dk Dv, read and written once for each sequence, whatever its tokens; the rest is small.

Loses from some tens of tokens of one sequence on: it walks them one by one, where chunks would use tensor cores.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fp4ward.kernels import nvrtc
from fp4ward.kernels.cuda_linear import DTYPES, H200, Gpu, alone, gpu_here, gpu_of
from fp4ward.kernels.nvrtc import Source

FILE = "gated_delta.cu"
SIZES = (16, 32, 64, 128)  # of heads
TAPS = 4  # of the convolution


class Cut(NamedTuple):
    """repeat: value heads of a key head; heads: of them at once, by a cluster. rows: of the state, that a lane has in 4
    columns."""

    repeat: int
    heads: int
    cluster: int
    rows: int
    threads: int


def cut(repeat: int, dk: int, dv: int, gpu: Gpu, cluster: int = 8, rows: int = 4) -> Cut:
    """cluster: CTAs at most; fewer where columns run out, 1 where there are none. rows: doubled where there were more
    than 512 threads. AssertionError for sizes that are not compiled."""
    assert dk in SIZES and dv in SIZES, f"heads of {dk} and {dv}: made for {SIZES}"
    clusters = gpu.clusters and cluster > 1
    heads = max(n for n in (1, 2, 3, 4) if repeat % n == 0) if clusters else 1
    groups, rows = heads * dv // 16, min(rows, dk // 8)
    cluster = max(n for n in range(1, cluster + 1) if groups % n == 0) if clusters else 1
    while (threads := groups // cluster * (dk // 8 // rows) * 32) > 512:
        rows *= 2
    return Cut(repeat, heads, cluster, rows, threads)


def _source(c: Cut, dk: int, dv: int, half: bool) -> Source:
    sizes = {"DK": dk, "DV": dv, "TAPS": TAPS, "REPEAT": c.repeat, "HEADS": c.heads, "R": c.rows, "CLUSTER": c.cluster}
    return Source(FILE, tuple({**sizes, "HALF": int(half), "PDL": 1}.items()), "mix")


def sources(sm: int) -> list[Source]:
    """Of heads of equal sizes, up to 4 value heads for a key head."""
    gpu = gpu_of(sm, H200.sms)
    cuts = [(cut(repeat, d, d, gpu), d) for d in SIZES for repeat in (1, 2, 3, 4)]
    return list(dict.fromkeys(_source(c, d, d, half) for c, d in cuts for half in (False, True)))


@functools.cache
def _plan(
    tokens: int, sequences: int, key_heads: int, repeat: int, dk: int, dv: int, half: bool, device: torch.device,
    way: tuple[int, int],
) -> tuple[nvrtc.Kernel, tuple[int, int, int], int, int, int]:  # fmt: skip
    """The kernel, its grid, threads and bytes of shared memory, and tokens of a chunk: what a sequence has at most when
    each has one."""
    gpu = gpu_here(device)
    c = cut(repeat, dk, dv, gpu, *way)
    parts, columns = dk // 8 // c.rows, c.heads * dv // c.cluster
    most, here, channels = min(8 * parts, max(1, tokens - sequences + 1)), columns // 16, 2 * dk + columns
    words = 4 + 4 * parts * columns + 8 * parts + channels * TAPS + dv + c.threads // 2 + channels * (TAPS - 1) // 2
    words += most * (channels + columns + 2 * here + 2 * here * c.cluster)
    shared = alone(gpu, key_heads * sequences, c.cluster, 4 * words)
    kernel = nvrtc.kernel(_source(c, dk, dv, half), device)
    return kernel, (key_heads, c.cluster, sequences), c.threads, shared, most


def mix(
    qkv_TC: Tensor, z_TV: Tensor, a_TN: Tensor, b_TN: Tensor, conv_CW: Tensor, minus_a_N: Tensor, dt_bias_N: Tensor,
    norm_D: Tensor, eps: float, key_dim: int, starts_B1: Tensor, slots_B: Tensor, conv_state_SCV: Tensor,
    ssm_SNKV: Tensor, way: tuple[int, int] = (8, 4),
) -> Tensor:  # fmt: skip
    """Of B sequences' T tokens: qkv [T, 2 Nk Dk + Nv Dv], z [T, Nv Dv], a, b [T, Nv] as projected, bf16 or f16, rows
    of any stride (of qkv even and of z a multiple of 4) -> o [T, Nv Dv], what out_proj takes: layers.gated_delta's
    GatedDelta, then layers.basic's GatedHeadNorm.

    f32: conv [C, 4], minus_a, dt_bias [Nv], norm [Dv]. int32 on the device: starts [B + 1], where sequence b has rows
    starts[b] .. starts[b + 1] - 1, any number; slots [B], no two of them the same but for -1, which is padding. Rows of
    padding and of no sequence give zeros. In place: conv_state [slots, C, 3] of qkv's type, ssm [slots, Nv, Dk, Dv]
    f32; a sequence without rows leaves them alone. way: what `cut` takes.

    Equal inputs give equal bits, whatever other sequences there are. Graph-capturable, but for a kernel's first call.
    """
    (tokens, channels), (known, heads, dk, dv) = qkv_TC.shape, ssm_SNKV.shape
    dtype, sequences, key_heads = qkv_TC.dtype, len(slots_B), (channels - heads * dv) // (2 * dk)
    numbers, inputs = (conv_CW, minus_a_N, dt_bias_N, norm_D), (qkv_TC, z_TV, a_TN, b_TN)
    assert dtype in DTYPES and dk == key_dim and channels == 2 * key_heads * dk + heads * dv and heads % key_heads == 0
    assert z_TV.shape == (tokens, heads * dv) and a_TN.shape == b_TN.shape == (tokens, heads)
    assert z_TV.dtype == a_TN.dtype == b_TN.dtype == conv_state_SCV.dtype == dtype
    assert conv_CW.dtype == minus_a_N.dtype == dt_bias_N.dtype == norm_D.dtype == ssm_SNKV.dtype == torch.float32
    assert conv_CW.shape == (channels, TAPS) and minus_a_N.shape == dt_bias_N.shape == (heads,) and len(norm_D) == dv
    assert conv_state_SCV.shape == (known, channels, TAPS - 1) and starts_B1.shape == (sequences + 1,)
    assert starts_B1.dtype == slots_B.dtype == torch.int32 and conv_state_SCV.is_contiguous()
    assert ssm_SNKV.is_contiguous() and conv_CW.is_contiguous() and starts_B1.stride(0) == 1
    assert qkv_TC.stride(1) == z_TV.stride(1) == 1 and (heads == 1 or a_TN.stride(1) == b_TN.stride(1) == 1)
    pitches = [x.stride(0) if tokens > 1 else 0 for x in inputs]
    assert pitches[0] % 2 == pitches[1] % 4 == qkv_TC.data_ptr() % 4 == z_TV.data_ptr() % 8 == 0
    o = torch.empty(tokens, heads * dv, dtype=dtype, device=qkv_TC.device)
    if tokens == 0 or sequences == 0:
        return o.zero_()
    kernel, grid, threads, shared, most = _plan(
        tokens, sequences, key_heads, heads // key_heads, dk, dv, dtype == torch.float16, qkv_TC.device, way
    )
    kernel(
        grid, threads, shared, *inputs, *numbers, starts_B1, slots_B, conv_state_SCV, ssm_SNKV, o,
        tokens, most, known, *pitches, float(eps), pdl=True,
    )  # fmt: skip
    return o
