"""y = x W^T for at most 64 tokens and NVFP4 or FP8 weights, exact: the kernels of linear.cu and warpgroup.cu.

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

FILES = {"narrow": "linear.cu", "wide": "linear.cu", "warpgroup": "warpgroup.cu", "pack": "pack.cu"}
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
    amounts: tuple[float, ...] = ()  # of what COSTS prices
    extra: tuple[int, ...] = ()  # of experts: more of the kernel's arguments

    @property
    def us(self) -> float:
        """As estimated; good for ranking launches of equal shapes and tokens."""
        return sum(cost * amount for cost, amount in zip(COSTS[self.entry], self.amounts, strict=True))


@dataclass(frozen=True)
class Gpu:
    """sms: multiprocessors. room: bytes of shared memory that one block may have. clusters: has them. warpgroups: has
    tensor cores that warpgroups feed from shared memory."""

    sms: int
    room: int
    clusters: bool
    warpgroups: bool = False

    def slots(self, cluster: int) -> int:
        """CTAs in clusters of this size that find a multiprocessor each (an H200: 30 of 4, 18 of 6, 15 of 8)."""
        found = self.sms // cluster * cluster if cluster < 3 else self.sms * (9 if cluster % 4 else 10) // 11
        return max(cluster, found)


def gpu_of(sm: int, sms: int) -> Gpu:
    return Gpu(sms, {80: 163, 90: 227, 100: 227, 103: 227}.get(sm, 99) << 10, sm >= 90, sm == 90)


H200 = gpu_of(90, 132)


def gpu_here(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return gpu_of(10 * properties.major + properties.minor, properties.multi_processor_count)


# Ways that were worth it on an H200; defines that a caller may give (DEPTH names narrow, WN wide, GROUPS warpgroup).
WAYS: dict[str, tuple[dict[str, int], ...]] = {
    "narrow": ({"WARPS": 12, "R": 1}, {"WARPS": 16, "R": 2}),
    "wide": tuple(
        {"WARPS": w, "WN": n, "R": r}
        for w, n, r in ((8, 1, 1), (8, 1, 2), (8, 2, 1), (8, 2, 2), (8, 8, 1), (12, 3, 1), (12, 6, 2), (16, 1, 1))
    ),
    "warpgroup": tuple({"GROUPS": g, "R": r} for g, r in ((2, 1), (2, 2), (3, 1), (4, 1))),
}
CLUSTERS = {"narrow": (1, 2), "wide": (1, 2, 4), "warpgroup": (1, 2, 4, 6, 8)}
TUNED = {
    "narrow": {"DEPTH", "WARPS", "R", "CLUSTER", "PDL"},
    "wide": {"WN", "RING", "WARPS", "CTAS", "R", "CLUSTER", "PDL"},
    "warpgroup": {"GROUPS", "RING", "CTAS", "R", "CLUSTER", "PDL"},
}

# Microseconds on an H200: to begin; in a cluster; for each record that a multiprocessor goes through, for 8 tokens of
# it, once more where a warp has no second tile to read x for, and where a CTA has but 8 warps, or 12; for a KiB of x;
# for each stage, and for 8 tokens of it; for each partial sum; for each CTA beyond the first, and each round of them;
# for a kernel that leaves no room to another CTA. As `python bench/launches.py --refit-from
# bench/results/launches_h200.jsonl` fits them to NVFP4; they rank, no more.
COSTS = {
    "narrow": (1.18, 0.906, 0.0288, 0.00755, 0, 0, 0, 0.0187, 0, 0, 0.0314, 0, 0, 1.18),
    "wide": (0.832, 0.846, 0.0271, 0.00373, 0.000245, 0, 0.00386, 0.00741, 0.102, 0.0362, 0.00493, 0.154, 0.333, 0.276),
    "warpgroup": (1.15, 0.0692, 0.0233, 0.00456, 0, 0, 0, 0, 0.153, 0, 0.0194, 0, 0.846, 0.054),
}


def _amounts(
    cluster: int, records: int, nt: int, r: int, warps: int, x: int, stages: int, sums: int, per: int, ctas: int
) -> tuple[float, ...]:  # fmt: skip
    """per: CTAs that a multiprocessor gets, of which it holds `ctas` at once. stages: of each round of them."""
    products, rounds = records * nt, -(-per // ctas)
    return (
        1, cluster > 1, records, products, products * (r == 1), products * (warps == 8), products * (warps == 12),
        x / 1024, rounds * stages, rounds * stages * nt, sums, per - 1, rounds - 1, ctas == 1,
    )  # fmt: skip


def alone(gpu: Gpu, grid: int, cluster: int, shared: int) -> int:
    """Bytes of shared memory that let a multiprocessor hold only as many CTAs as it needs for this grid. PDL would else
    give this grid's CTAs, several to each, to those multiprocessors that the grid ahead has left, and wait for them."""
    return max(shared, gpu.room // (-(-grid * cluster // gpu.slots(cluster)) + 1) + 1)


def narrow(kind: str, tokens: int, n: int, k: int, gpu: Gpu, way: Mapping[str, int]) -> Launch | None:
    """At most 16 tokens: x lies in shared memory, parted over CLUSTER CTAs. None where it does not fit."""
    nt, warps, r, cluster = -(-tokens // 8), way["WARPS"], way["R"], way["CLUSTER"]
    tiles, share = -(-n // ROWS), -(-k // (COLUMNS * cluster))
    units = -(-tiles // r)
    grid = max(1, min(units, gpu.sms // cluster))
    most = -(-units // grid)
    x = (1 if tokens == 1 else 8 * nt) * share * 256
    fixed = warps * 2 * r * nt * 512 + (cluster > 1) * most * r * nt * 512 + 256 + most * r * 64 + x
    stage = warps * r * SLOT[kind]
    fit = (gpu.room - fixed) // stage
    depth = way.get("DEPTH", 4 if fit >= 4 else 2)
    if nt > 2 or depth > fit or (cluster > 1 and not gpu.clusters) or (cluster - 1) * share * COLUMNS >= k:
        return None
    defines = {"NT": nt, "DEPTH": depth, "R": r, "WARPS": warps, "CLUSTER": cluster}
    sums = (cluster > 1) * most * r * nt
    amounts = _amounts(cluster, most * r * share, nt, r, warps, x, 0, sums, 1, 1)
    shared = alone(gpu, grid, cluster, depth * stage + fixed)
    return Launch(defines, "narrow", (grid, cluster, 1), warps * 32, shared, amounts)


def wide(kind: str, tokens: int, n: int, k: int, gpu: Gpu, way: Mapping[str, int]) -> Launch | None:
    """At most 64 tokens: a CTA computes 16 R WN rows, x goes through shared memory, CLUSTER CTAs part K."""
    warps, wn, r, cluster = way["WARPS"], way["WN"], way["R"], way["CLUSTER"]
    nt, parts = next(t for t in (1, 2, 4, 8) if tokens <= 8 * t), warps // wn
    share, grid = -(-k // (COLUMNS * cluster)), -(-n // (ROWS * r * wn))
    per = -(-grid * cluster // gpu.slots(cluster))
    stage, stages = nt * 8 * parts * 256 + warps * r * SLOT[kind], -(-share // parts)
    held = r * nt * (1 + (kind == "fp8_block"))  # sums want registers, those of a block's scales twice
    two = per > 1 and 2 * stage <= gpu.room // 2 - 1024 and warps * held <= 64
    ctas = way.get("CTAS", 1 + two)
    ring = min(way.get("RING", 6), (gpu.room // ctas - 1024 * (ctas > 1)) // stage)
    if ring < 2 or held > 16 or (cluster > 1 and not gpu.clusters):
        return None
    defines = {"NT": nt, "WN": wn, "R": r, "CLUSTER": cluster, "RING": ring, "WARPS": warps, "CTAS": ctas}
    sums = per * r * wn * nt * (parts + cluster * (cluster > 1))
    x = per * nt * 8 * share * 256
    amounts = _amounts(cluster, per * r * wn * share, nt, r, warps, x, stages, sums, per, ctas)
    shared = max(min(ring, stages) * stage, warps * r * nt * 512 + wn * r * 64)
    return Launch(defines, "wide", (grid, cluster, 1), warps * 32, alone(gpu, grid, cluster, shared), amounts)


def warpgroup(kind: str, tokens: int, n: int, k: int, gpu: Gpu, way: Mapping[str, int]) -> Launch | None:
    """At most 64 tokens on SM90: asynchronous products of decoded registers with x in shared memory."""
    groups, r, cluster = way["GROUPS"], way["R"], way["CLUSTER"]
    nt, rows = next(t for t in (2, 4, 8) if tokens <= 8 * t), groups * 4 * r
    share, grid = -(-k // (COLUMNS * cluster)), -(-n // (ROWS * rows))
    per = -(-grid * cluster // gpu.slots(cluster))
    ctas = way.get("CTAS", 2 if groups < 3 and (r < 2 or nt < 8) else 1)
    stage, room = -(-(nt * 2048 + rows * SLOT[kind]) // 1024) * 1024, gpu.room // ctas - 1024 * (ctas > 1)
    ring = min(way.get("RING", 6), (room - groups * 128) // stage)
    shared = min(ring, share) * stage
    if cluster > 1:  # the last stage and all parts of the sums that a CTA adds up; a barrier for each warp
        shared = max(shared, stage + cluster * groups * 4 * -(-r * nt // cluster) * 512) + groups * 128
    if not gpu.warpgroups or kind == "fp8_block" or ring < 3 or shared > room:
        return None
    defines = {"NT": nt, "GROUPS": groups, "R": r, "CLUSTER": cluster, "RING": ring, "CTAS": ctas}
    sums = per * rows * nt * (cluster > 1)
    amounts = _amounts(cluster, per * rows * share, nt, r, 0, 0, share, sums, per, ctas)
    return Launch(defines, "warpgroup", (grid, cluster, 1), groups * 128, alone(gpu, grid, cluster, shared), amounts)


KERNELS = {"narrow": narrow, "wide": wide, "warpgroup": warpgroup}


def launches(
    kind: str, tokens: int, n: int, k: int, gpu: Gpu, tuning: Mapping[str, int]
) -> list[tuple[dict[str, int], Launch]]:
    """All that fit, each with its way. tuning: defines that override it, of kernels that take all of them."""
    takers = [entry for entry, keys in TUNED.items() if keys.issuperset(tuning)]
    assert takers, f"no kernel takes {', '.join(sorted(tuning))} together"
    found, most = [], max(1, -(-k // COLUMNS) // 2)
    for entry in (entry for entry in takers if entry != "warpgroup" or tokens > 8 or "GROUPS" in tuning):
        ways = [{"CLUSTER": c, **way, **tuning} for way in WAYS[entry] for c in CLUSTERS[entry] if c <= most]
        found += [(way, made) for way in ways if (made := KERNELS[entry](kind, tokens, n, k, gpu, way)) is not None]
    return found


def choose(kind: str, tokens: int, n: int, k: int, gpu: Gpu, tuning: Mapping[str, int]) -> Launch:
    """The one of `launches` with the lowest estimate.

    Depends on tokens only through ceil(tokens / 8) up to 16, whether there is one, and the power of two from there on.
    """
    best = min(launches(kind, tokens, n, k, gpu, tuning), key=lambda found: found[1].us, default=None)
    assert best, f"no kernel for {tokens} tokens by [{n}, {k}] with {dict(tuning)} fits {gpu}"
    return best[1]


def _source(kind: str, entry: str, half: bool = False, defines: Mapping[str, int] | None = None) -> Source:
    own = {} if entry == "pack" else {"PDL": 1, **(defines or {})}
    return Source(FILES[entry], tuple({**DEFINES[kind], "HALF": int(half), **own}.items()), entry)


@functools.cache
def sources(sm: int) -> list[Source]:
    """What `choose` takes for bf16 and weights of most sizes on GPUs of this SM; f16 is compiled when it is met."""
    gpu = gpu_of(sm, H200.sms)
    sizes = sorted(odd << i for odd in (1, 3, 5) for i in range(4, 19) if odd << i < 1 << 18)
    found = [_source(kind, "pack") for kind in DEFINES]
    for kind in DEFINES:
        taken = [choose(kind, t, n, k, gpu, {}) for t in (1, 8, 16, 32, 64) for n in sizes for k in sizes[9:33]]
        found += [_source(kind, made.entry, False, made.defines) for made in taken]
    return list(dict.fromkeys(found))


@functools.cache
def _launch(kind: str, dtype: torch.dtype, tokens: int, n: int, k: int, device: torch.device, tuning: Any) -> Any:
    made = choose(kind, tokens, n, k, gpu_here(device), dict(tuning))
    return nvrtc.kernel(_source(kind, made.entry, dtype == torch.float16, made.defines), device), made


def rows(x: Tensor) -> tuple[Tensor, int]:
    """x [T, K] as kernels read it, 16 bytes of a row at once, and its pitch; a copy where it does not lie so."""
    pitch = x.stride(0) if len(x) > 1 else x.shape[1]  # the stride of a dimension of one means nothing
    if x.stride(1) != 1 or pitch % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format), x.shape[1]
    return x, pitch


def linear(x_TK: Tensor, w: Prepared, bias: Tensor | None = None, **tuning: int) -> Tensor:
    """x [T, K] bf16 or f16, at most 64 tokens; bias [N] of the same type -> [T, N].

    tuning: defines of a kernel that override the choice, for benchmarks. The order of a sum depends on T only through
    its class (1; to 8, 16, 32, 64), not on the other tokens: a row in a batch equals the row in any other batch of its
    class, bit for bit. Graph-capturable, but for a kernel's first call.
    """
    (tokens, k), n = x_TK.shape, w.shape[0]
    assert x_TK.dtype in DTYPES and k == w.shape[1] and tokens <= MAX_TOKENS, f"{x_TK.dtype} {list(x_TK.shape)}"
    assert bias is None or (bias.dtype == x_TK.dtype and bias.shape == (n,) and bias.is_contiguous())
    y = torch.empty(tokens, n, dtype=x_TK.dtype, device=x_TK.device)
    if tokens and n:
        x, pitch = rows(x_TK)
        kernel, made = _launch(w.kind, x.dtype, tokens, n, k, x.device, tuple(sorted(tuning.items())))
        sizes = (tokens, n, k, pitch)
        tensors = (w.records, w.row_scale, x, bias, y)
        kernel(made.grid, made.threads, made.shared, *tensors, *sizes, pdl=tuning.get("PDL", 1) > 0)
    return y
