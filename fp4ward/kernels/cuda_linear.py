"""y = x W^T for at most 64 tokens and NVFP4 or FP8 weights, exact: linear.cu's kernels, their layout and their choice.

Legend: T tokens, K in, N out. A record is 16 rows by 128 columns of a weight; a lane of a warp is 4 g + t.

Layout. Records [N / 16, K / 128], the rest padded with zeros. NVFP4, 1,152 bytes: for both halves of 64 columns and all
32 lanes 16 bytes, then for all lanes 4 bytes of scales. Lane 4 g + t holds rows g and g + 8 and in each half the 16
columns 16 t ... 16 t + 15, one scale group: word j has columns 4 j ... 4 j + 3 of both rows, as the j-th product of the
half wants them: pair p is row g + 8 (p & 1), columns 4 j + 2 (p >> 1) and the one after it, the first in bits 0-15, the
second in bits 16-31. PLACES says to which bit of its 16 each bit of a code goes, such that one shift and one AND (for
the last pair two) lay a pair out as two bf16. No four of the one pattern {15, 8, 7, 6} and its rotations tile 16 bits;
three do, and the last pair takes what they leave. FP8, 2,048 bytes: the same with two pairs a word, the rows.

Scales of groups become e5m3 with bias 22, in which every e4m3 value but zero is normal: bits 4-11 of a bf16 of 2^119
its value, or 7-14 of an f16 of 2^7. Under a scale of zero the codes become zero, the one thing that `restore` cannot
bring back (the weight is the same). FP8's block scales, f32, lie behind the codes of their record: rows g, g + 8 of
each g.

Bytes. What the checkpoint stores: 0.5625 N K (FP8: N K), and per CTA its part of x.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4ward.formats.formats import Format
from fp4ward.formats.weight import Weight, allocate
from fp4ward.kernels import nvrtc
from fp4ward.kernels.nvrtc import Source

FILE = "linear.cu"
MAX_TOKENS = 64
DTYPES = (torch.bfloat16, torch.float16)
ROWS, COLUMNS = 16, 128
CHUNK = 1 << 22  # weights that are laid out at once where torch does it: 100 MiB of scratch

# What the kernels call the formats, and bytes of a record and of its place in a warp's ring
KINDS = {"nvfp4": "nvfp4", "fp8_tensor": "fp8", "fp8_channel": "fp8", "fp8_block": "fp8_block"}
DEFINES: dict[str, dict[str, int]] = {"nvfp4": {"W4": 1}, "fp8": {"W4": 0}, "fp8_block": {"W4": 0, "BLOCKED": 1}}
RECORD = {"nvfp4": 1152, "fp8": 2048, "fp8_block": 2112}
SLOT = {"nvfp4": 1152, "fp8": 2048, "fp8_block": 2304}

# Where bit b of a code goes in its half of a word, by pair. Beyond 15: in the other half (a rotation brings it back).
PLACES_W4 = ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15))
PLACES_W8 = ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A weight as the kernels read it. records u8 [ceil(N / 16), ceil(K / 128), bytes]; row_scale f32 [N] or None."""

    format: Format
    shape: tuple[int, int]
    records: Tensor
    row_scale: Tensor | None

    @property
    def kind(self) -> str:
        return KINDS[self.format.name]


# --- layout -----------------------------------------------------------------------------------------------------------


def prepare(w: Weight) -> Prepared:
    """w [N, K], K a multiple of 16, in the kernels' layout on the same device; w is left as it is.

    AssertionError for a format or K that they do not read. Scratch: 100 MiB; on a GPU a copy of a view.
    """
    assert w.format.name in KINDS, f"the CUDA kernels read {', '.join(KINDS)}, not {w.format.name}"
    assert len(w.shape) == 2 and w.shape[1] % 16 == 0, f"a weight {list(w.shape)}: K must be a multiple of 16"
    n, k = w.shape
    kind, tiles, steps = KINDS[w.format.name], -(-n // ROWS), -(-k // COLUMNS)
    records = torch.empty(tiles, steps, RECORD[kind], dtype=torch.uint8, device=w.device)
    assert records.numel() < 1 << 32, f"a weight {list(w.shape)} has offsets beyond 32 bits"
    made = Prepared(w.format, (n, k), records, w.row_scale())
    if w.device.type == "cuda":
        codes, scales = _parts(w)
        pack = nvrtc.kernel(_source(kind, "pack"), w.device)
        for start in range(0, tiles, most := max(1, (1 << 30) // (ROWS * k))):  # a launch's offsets stay below 2^31
            stop = min(n, (start + most) * ROWS)
            part = records[start : start + most]
            rows = slice(start * ROWS, stop)
            grid = (-(-part.shape[0] * steps * 64 // 256), 1, 1)
            taken = codes[rows].contiguous(), None if scales is None else scales[rows].contiguous()
            pack(grid, 256, 0, taken[0], taken[1], part, stop - start * ROWS, k, part.shape[0])
        return made
    step = max(1, CHUNK // (k * ROWS))
    for start in range(0, tiles, step):
        _lay_out(w.rows(start * ROWS, min(n, (start + step) * ROWS)), records[start : start + step])
    return made


def restore(made: Prepared) -> Weight:
    """The weight again, but for codes under a scale of zero and the sign of such a scale."""
    w = allocate(made.format, made.shape, made.records.device)
    if made.row_scale is not None:
        _row_part(w).copy_(made.row_scale)
    tiles, step = made.records.shape[0], max(1, CHUNK // (made.shape[1] * ROWS))
    for start in range(0, tiles, step):
        _take_back(made.records[start : start + step], w.rows(start * ROWS, min(w.shape[0], (start + step) * ROWS)))
    return w


def _parts(w: Weight) -> tuple[Tensor, Tensor | None]:
    """Codes as bytes, and the scales that a record holds."""
    if w.format.name == "nvfp4":
        return w.parts["packed"], w.parts["block_scale"].view(torch.uint8)
    return w.parts["data"].view(torch.uint8), w.parts["scale"] if w.format.name == "fp8_block" else None


def _row_part(w: Weight) -> Tensor:
    return w.parts["global_scale"] if w.format.name == "nvfp4" else w.parts["scale"][:, 0]


@functools.cache
def _e5m3() -> tuple[Tensor, Tensor]:
    """Byte of a scale as the kernels want it, by the checkpoint's byte; and back."""
    value = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num(0)
    fraction, exponent = torch.frexp(value)  # value = fraction * 2^exponent, fraction in [0.5, 1)
    there = torch.where(value > 0, (exponent + 21) * 8 + (fraction * 16 - 8).int(), 0).to(torch.uint8)
    back = torch.zeros(256, dtype=torch.uint8)
    back[there[1:127].int()] = torch.arange(1, 127, dtype=torch.uint8)
    return there.repeat(2), back


def _places(kind: str, device: torch.device) -> list[Tensor]:
    """By bit of a code: the bit of the word, [columns 4 j + 2 i: i, row, column] (FP8: [1, row, column])."""
    pairs = torch.tensor(PLACES_W4 if kind == "nvfp4" else PLACES_W8, device=device)
    wide = (pairs[:, None, :] + 16 * torch.arange(2, device=device)[:, None]) % 32
    return list(wide.view(-1, 2, 2, pairs.shape[1]).unbind(-1))


def _lay_out(w: Weight, records: Tensor) -> None:
    """prepare in torch, of few rows: the definition of the layout."""
    (n, k), (tiles, steps, _) = w.shape, records.shape
    kind = KINDS[w.format.name]
    codes, scales = _parts(w)
    if kind == "nvfp4":
        assert scales is not None
        codes = torch.stack([codes & 15, codes >> 4], -1).view(n, k // 16, 16) * ((scales & 127) != 0)[..., None]
    full = torch.zeros(tiles * ROWS, steps * COLUMNS, dtype=torch.int64, device=w.device)
    full[:n, :k] = codes.reshape(n, k)
    # tile, row, g, step, half, t, j, i, column -> tile, step, half, j, g, t, i, row, column
    full = full.view(tiles, 2, 8, steps, 2, 4, 4, 2, 2).permute(0, 3, 4, 6, 2, 5, 7, 1, 8)
    words = torch.zeros((), dtype=torch.int64, device=w.device)
    for bit, place in enumerate(_places(kind, w.device)):
        words = words + ((full >> bit & 1) << place)
    words = words.sum((-3, -2, -1) if kind == "nvfp4" else (-2, -1))
    words = words.contiguous().view(torch.int32)[..., ::2]  # the lower half
    if kind == "nvfp4":
        laid = words.permute(0, 1, 2, 4, 5, 3)
    else:  # a lane's 16 bytes hold two j
        laid = words.view(tiles, steps, 2, 2, 2, 8, 4, 2).permute(0, 1, 2, 3, 5, 6, 4, 7)
    end = 1024 if kind == "nvfp4" else 2048
    records[..., :end] = laid.contiguous().view(torch.uint8).view(tiles, steps, end)
    if scales is not None and kind == "nvfp4":
        bytes_ = torch.zeros(tiles * ROWS, steps * 8, dtype=torch.uint8, device=w.device)
        bytes_[:n, : k // 16] = _e5m3()[0].to(w.device)[scales.int()]
        bytes_ = bytes_.view(tiles, 2, 8, steps, 2, 4).permute(0, 3, 2, 5, 4, 1)
        records[..., end:] = bytes_.reshape(tiles, steps, 128)
    elif scales is not None:
        floats = torch.zeros(tiles * ROWS, steps, device=w.device)
        floats[:n] = scales
        floats = floats.view(tiles, 2, 8, steps).permute(0, 3, 2, 1).contiguous()
        records[..., end:] = floats.view(torch.uint8).view(tiles, steps, 64)


def _take_back(records: Tensor, w: Weight) -> None:
    """Fill w, of few rows, from records."""
    (n, k), (tiles, steps, _) = w.shape, records.shape
    kind = KINDS[w.format.name]
    end = 1024 if kind == "nvfp4" else 2048
    words = records[..., :end].contiguous().view(torch.int32)
    if kind == "nvfp4":
        words = words.view(tiles, steps, 2, 8, 4, 4, 1).permute(0, 1, 2, 5, 3, 4, 6)
    else:
        words = words.view(tiles, steps, 2, 2, 8, 4, 2, 2).permute(0, 1, 2, 3, 6, 4, 5, 7).reshape(
            tiles, steps, 2, 4, 8, 4, 2
        )  # fmt: skip
    full = torch.zeros((), dtype=torch.int32, device=words.device)
    for bit, place in enumerate(_places(kind, words.device)):
        full = full + ((words[..., None, None] >> place & 1) << bit)
    full = full.permute(0, 7, 4, 1, 2, 5, 3, 6, 8).reshape(tiles * ROWS, steps * COLUMNS)[:n, :k].to(torch.uint8)
    codes, scales = _parts(w)
    codes.copy_(full[:, ::2] | full[:, 1::2] << 4 if kind == "nvfp4" else full)
    if scales is not None and kind == "nvfp4":
        found = records[..., end:].view(tiles, steps, 8, 4, 2, 2).permute(0, 5, 2, 1, 4, 3).reshape(-1, steps * 8)
        scales.copy_(_e5m3()[1].to(w.device)[found[:n, : k // 16].int()])
    elif scales is not None:
        floats = records[..., end:].contiguous().view(torch.float32).view(tiles, steps, 8, 2)
        scales.copy_(floats.permute(0, 3, 2, 1).reshape(-1, steps)[:n])


# --- choice -----------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """defines and entry of a kernel, and all of its launch that does not depend on pointers."""

    defines: dict[str, int]
    entry: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    extra: tuple[int, ...] = ()  # parts and chunks of K


@dataclass(frozen=True)
class Gpu:
    """sms: multiprocessors. room: bytes of shared memory that one block may have. clusters: has them."""

    sms: int
    room: int
    clusters: bool


def gpu_of(sm: int, sms: int) -> Gpu:
    return Gpu(sms, {80: 163, 90: 227, 100: 227, 103: 227}.get(sm, 99) << 10, sm >= 90)


H200 = gpu_of(90, 132)


def narrow(kind: str, tokens: int, n: int, k: int, gpu: Gpu, tuning: Mapping[str, int]) -> Launch:
    """At most 16 tokens: warps part K and keep x in registers while the CTA goes through tiles of rows."""
    nt, warps, ctas = -(-tokens // 8), tuning.get("WARPS", 16), tuning.get("CTAS", 1)
    tiles, steps = -(-n // ROWS), -(-k // COLUMNS)
    fixed = (2 * warps + 8) * nt * 512
    fit = (gpu.room // ctas - fixed) // (warps * SLOT[kind])
    most = tuning.get("STEPS", min(64 // (nt * warps * ctas), 1 << max(0, fit.bit_length() - 1)))  # x fills registers
    chunks = -(-steps // (warps * most))
    records = tuning.get("STEPS", 1)
    while records * warps < -(-steps // chunks):
        records *= 2
    parts = -(-steps // (chunks * records))
    groups = 1 if chunks > 1 else max(1, min(warps // parts, -(-tiles // (gpu.sms * ctas))))
    used = parts * groups
    ring = min(tuning.get("RING", -(-4 // records)), (gpu.room // ctas - fixed) // (warps * records * SLOT[kind]))
    assert ring > 0, f"x of {tokens} tokens by {k} does not fit {gpu.room} bytes of shared memory"
    defines = {"NT": nt, "STEPS": records, "RING": ring, "WARPS": warps, "CTAS": ctas}
    grid = min(gpu.sms * ctas, -(-tiles // groups))
    items = -(-tiles // (grid * groups)) * chunks
    shared = fixed + warps * min(ring, items) * records * SLOT[kind]
    return Launch(defines, "narrow", (grid, 1, 1), used * 32, shared, (parts, chunks))


def wide(kind: str, tokens: int, n: int, k: int, gpu: Gpu, tuning: Mapping[str, int]) -> Launch:
    """At most 64 tokens: a CTA computes 32 WN rows, x goes through shared memory, CLUSTER CTAs part K."""
    nt, ctas = next(t for t in (1, 2, 4, 8) if tokens <= 8 * t), tuning.get("CTAS", 1)
    tiles, steps = -(-n // ROWS), -(-k // COLUMNS)
    room = gpu.room // ctas
    warps = tuning.get("WARPS", 8 if 2 * (nt * 8 * 256 + 16 * SLOT[kind]) <= room else 4)

    def stage(wn: int) -> int:
        return nt * 8 * (warps // wn) * 256 + warps * 2 * SLOT[kind]

    def us(shape: tuple[int, int]) -> float:
        """Expected: bytes through L2 at 42 KB a us and SM, or products at 6.5 cycles of 1.75 GHz, and what is fixed."""
        wn, cluster = shape
        share = -(-steps // cluster)
        sms = (
            gpu.sms if cluster == 1 else max(cluster, gpu.sms // 16 * 16)
        )  # a cluster's lie in one of about eight groups
        waves = -(-(-(-tiles // (2 * wn)) * cluster) // sms)
        read = share * (2 * wn * RECORD[kind] + nt * 8 * 256) / 42e3
        return waves * (max(read, share * wn * nt * 26 / 1750) + 1) + (cluster > 1)

    clusters = [c for c in (1, 2, 4, 8) if c <= max(1, steps // 2) and (c == 1 or gpu.clusters)]
    wn, cluster = min(((w, c) for w in (warps, warps // 2) if 2 * stage(w) <= room for c in clusters), key=us)
    wn, cluster = tuning.get("WN", wn), tuning.get("CLUSTER", cluster)
    ring = min(tuning.get("RING", 6), room // stage(wn))
    assert ring > 1, f"two stages of WN={wn} need more than {room} bytes of shared memory"
    defines = {"NT": nt, "WN": wn, "CLUSTER": cluster, "RING": ring, "WARPS": warps, "CTAS": ctas}
    grid = (-(-tiles // (2 * wn)), cluster, 1)
    stages = -(-steps // (cluster * (warps // wn)))
    return Launch(defines, "wide", grid, warps * 32, max(min(ring, stages) * stage(wn), warps * 2 * nt * 512))


def choose(kind: str, tokens: int, n: int, k: int, gpu: Gpu, tuning: Mapping[str, int]) -> Launch:
    return (wide if tuning.get("WIDE", tokens > 16) else narrow)(kind, tokens, n, k, gpu, tuning)


def _source(kind: str, entry: str, half: bool = False, defines: Mapping[str, int] | None = None) -> Source:
    own = {"PACK": 1} if entry == "pack" else {"PDL": 1, **(defines or {})}
    return Source(FILE, tuple({**DEFINES[kind], "HALF": int(half), **own}.items()), entry)


def sources(sm: int) -> list[Source]:
    """What `choose` takes for weights of any size on GPUs of this SM."""
    gpu = gpu_of(sm, H200.sms)
    sizes, found = [16 << i for i in range(15)], []
    for kind in DEFINES:
        launches = [choose(kind, t, n, k, gpu, {}) for t in (8, 16, 32, 64) for n in sizes for k in sizes]
        found += [_source(kind, made.entry, half, made.defines) for half in (False, True) for made in launches]
        found += [_source(kind, "pack")]
    return list(dict.fromkeys(found))


@functools.cache
def _launch(kind: str, dtype: torch.dtype, tokens: int, n: int, k: int, device: torch.device, tuning: Any) -> Any:
    properties = torch.cuda.get_device_properties(device)
    gpu = gpu_of(10 * properties.major + properties.minor, properties.multi_processor_count)
    made = choose(kind, tokens, n, k, gpu, dict(tuning))
    return nvrtc.kernel(_source(kind, made.entry, dtype == torch.float16, made.defines), device), made


def linear(x_TK: Tensor, w: Prepared, bias: Tensor | None = None, **tuning: int) -> Tensor:
    """x [T, K] bf16 or f16, at most 64 tokens; bias [N] of the same type -> [T, N].

    tuning: defines of linear.cu that override the choice (WIDE=1 takes the kernel for many tokens), for benchmarks. The
    order of a sum depends on ceil(T / 8) up to 16 tokens, and on T > 32 beyond, not on the other tokens: a row alone
    equals the row in a batch of its class, bit for bit. Graph-capturable, but for a kernel's first call.
    """
    (tokens, k), n = x_TK.shape, w.shape[0]
    assert x_TK.dtype in DTYPES and k == w.shape[1] and tokens <= MAX_TOKENS, f"{x_TK.dtype} {list(x_TK.shape)}"
    assert bias is None or (bias.dtype == x_TK.dtype and bias.shape == (n,) and bias.is_contiguous())
    y = torch.empty(tokens, n, dtype=x_TK.dtype, device=x_TK.device)
    if tokens and n:
        x = x_TK
        pitch = x.stride(0) if tokens > 1 else k  # the stride of a dimension of one means nothing
        if x.stride(1) != 1 or pitch % 8 or x.data_ptr() % 16:  # a lane reads 16 bytes at once
            x, pitch = x.clone(memory_format=torch.contiguous_format), k
        kernel, made = _launch(w.kind, x.dtype, tokens, n, k, x.device, tuple(sorted(tuning.items())))
        sizes = (tokens, n, k, pitch, *made.extra)
        tensors = (w.records, w.row_scale, x, bias, y)
        kernel(made.grid, made.threads, made.shared, *tensors, *sizes, pdl=tuning.get("PDL", 1) > 0)
    return y
