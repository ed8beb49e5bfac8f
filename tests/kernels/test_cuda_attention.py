"""attention.cu on a CPU (emulator.py) and, with more and larger cases, on a GPU, against attention.py in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4ward.kernels import attention, cuda_attention
from fp4ward.kernels.cuda_attention import WAY, Way, attend
from fp4ward.kernels.cuda_linear import Gpu
from fp4ward.kernels.norm import rms_norm
from fp4ward.kernels.rope import frequencies, rotate
from tests.kernels.emulator import DEVICE, GPU, RUN, machine

BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
FEW = Way(cluster=2, span=1, most=8)  # a tile a CTA, two clusters' CTAs, so that short contexts are cut up
EPS, ERROR = 1e-6, 4e-3


@pytest.fixture(autouse=True)
def seeded(request, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_attention, "gpu_here", lambda device: Gpu(3, 227 << 10, True))
        cuda_attention._plan.cache_clear()
    with machine(request, monkeypatch):
        yield


def make(
    steps: Sequence[tuple[int, int]], d: int = 32, repeat: int = 2, heads: int = 2, dtype: torch.dtype = BF16,
    cache: torch.dtype = BF16, page: int = 16, rotary: int | None = None, padding: int = 0,
) -> SimpleNamespace:  # fmt: skip
    """steps: of each sequence, positions before this step, and tokens in it. Whatever nobody may read is NaN, or a page
    that does not exist."""
    n, tokens, rotary = len(steps), sum(s for _, s in steps), rotary or d // 4
    counts = [-(-(a + b) // page) for a, b in steps]
    slots = (torch.randperm(n + 3)[:n]).tolist()
    order, pages, at = torch.randperm(sum(counts) + 2), torch.full((n + 3, max(counts) * 2), 1 << 30).int(), 0
    for slot, count in zip(slots, counts, strict=True):
        pages[slot, :count] = order[at : at + count].int()
        at += count
    spots = [(slot, p) for slot, (a, b) in zip(slots, steps, strict=True) for p in range(a, a + b)]
    owner = torch.tensor([slot for slot, _ in spots] + [-1] * padding).int()
    rows = [int(pages[slot, p // page]) * page + p % page for slot, p in spots]
    spare = int(order[-1]) * page
    rows += [spare] * padding
    c = SimpleNamespace(
        steps=steps, slots=slots, d=d, repeat=repeat, heads=heads, page_size=page, spare=spare,
        scales=(1.0, 1.0), owner=owner,
        positions=torch.tensor([p for _, p in spots] + [0] * padding), cache_at=torch.tensor(rows),
    )  # fmt: skip
    size = (len(order) * page, heads, d)
    c.cache_k, c.cache_v = (torch.full(size, torch.nan).to(cache) for _ in range(2))
    if cache == FP8:
        c.scales = (0.037, 0.011)
    for slot, (before, _) in zip(slots, steps, strict=True):
        old = places(pages[slot], page, before)
        for kept, scale in ((c.cache_k, c.scales[0]), (c.cache_v, c.scales[1])):
            attention.store(kept, old, torch.randn(before, heads, d), scale)
    c.pages = pages
    c.norms = [1 + torch.randn(d) / 4 for _ in range(2)]
    c.freq = frequencies(rotary, 1e4, torch.float32, torch.device("cpu"))
    joined = torch.randn(tokens + padding, heads * d * (2 * repeat + 2) + 8).to(dtype)
    joined[tokens:] = torch.nan
    c.joined = joined
    for name in ("owner", "positions", "cache_at", "cache_k", "cache_v", "pages", "freq", "joined"):
        setattr(c, name, getattr(c, name).to(DEVICE))
    c.norms = [w.to(DEVICE) for w in c.norms]
    return c


def places(pages: Tensor, page: int, count: int) -> Tensor:
    at = torch.arange(count, device=pages.device)
    return pages[at // page].long() * page + at % page


def projected(c: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """q with gates, k and v as slices of one projection."""
    width = c.heads * c.d
    q, k, v, _ = c.joined.split([2 * c.repeat * width, width, width, 8], 1)
    return q, k, v


def call(c: SimpleNamespace, way: Way = WAY, rows: slice = slice(None), **changed: Any) -> Tensor:
    v = SimpleNamespace(**{**vars(c), **changed})
    q, k, v_ = (x[rows] for x in projected(v))
    cut = (v.positions[rows], v.cache_at[rows], v.owner[rows])
    return attend(q, k, v_, *v.norms, EPS, v.freq, *cut, v.pages, v.page_size, v.cache_k, v.cache_v, *v.scales, way)


def reference(c: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """The output in float64 and both caches, of inputs rounded where the engine rounds them."""
    q, k, v = (x.unflatten(-1, (-1, c.d)) for x in projected(c))
    tokens, dtype = sum(s for _, s in c.steps), c.joined.dtype
    (q, gate), k, v = q[:tokens].unflatten(1, (-1, 2)).unbind(2), k[:tokens], v[:tokens]
    where, kept = c.positions[:tokens], [c.cache_k.clone(), c.cache_v.clone()]
    q, k = (rotate(rms_norm(x, w, EPS), where, c.freq) for x, w in zip((q, k), c.norms, strict=True))
    assert q.dtype == k.dtype == dtype
    for cache, x, scale in zip(kept, (k, v), c.scales, strict=True):
        attention.store(cache, c.cache_at[:tokens], x, scale)
    out, at = torch.zeros(len(c.owner), *q.shape[1:], dtype=torch.float64, device=q.device), 0
    for slot, (before, count) in zip(c.slots, c.steps, strict=True):
        rows = places(c.pages[slot], c.page_size, before + count)
        found = [attention.fetch(x, rows, s, torch.float64) for x, s in zip(kept, c.scales, strict=True)]
        mine = slice(at, at + count)
        out[mine] = attention.attend(q[mine].double(), *found, before, c.d**-0.5) * gate[mine].double().sigmoid()
        at += count
    return out.flatten(1), *kept


def check(c: SimpleNamespace, way: Way = WAY) -> Tensor:
    """Output and caches; again, which must give the same bits; and each sequence without the others."""
    want, want_k, want_v = reference(c)
    c.cache_k, c.cache_v = c.cache_k.clone(), c.cache_v.clone()
    got = call(c, way)
    tokens, scale = sum(s for _, s in c.steps), want.norm(dim=1)
    assert got.dtype == c.joined.dtype and got.shape == want.shape
    assert ((got.double() - want).norm(dim=1) <= ERROR * scale).all(), (got.double() - want).norm(dim=1) / scale
    assert same(c.cache_v, want_v)  # what is stored, and nothing else
    stored = c.cache_at[:tokens]
    k, want_k_here = (x[stored].double() for x in (c.cache_k, want_k))
    off = 1e-2 if c.cache_k.dtype == FP8 else 2e-3  # the last bit of a norm may differ, and so what is rounded
    assert (k - want_k_here).norm() <= off * want_k_here.norm()
    c.cache_k[stored] = want_k[stored]
    assert same(c.cache_k, want_k)
    assert torch.equal(call(c, way), got)
    at = 0
    for _, count in c.steps:
        assert torch.equal(call(c, way, slice(at, at + count)), got[at : at + count])
        at += count
    assert not cuda_attention._tickets(got.device).any()
    return got


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@RUN
@pytest.mark.parametrize("cache", [BF16, FP8, F16])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_type_of_activations_and_cache(dtype, cache):
    check(make([(0, 1), (6, 1), (36, 1)], dtype=dtype, cache=cache, page=4), FEW)


@RUN
@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_contexts_of_any_length_in_any_number_of_parts(cluster):
    """One token, ends of tiles and pages, several clusters, CTAs without a tile, warps with several."""
    way = FEW._replace(cluster=cluster)
    check(make([(0, 1), (15, 1), (16, 1), (31, 1), (70, 1), (335, 1)], page=8, rotary=32), way)
    check(make([(199, 1)], d=64, repeat=1, heads=1), way._replace(most=2))


@RUN
def test_several_tokens_of_a_sequence_beside_single_ones_and_padding():
    c = make([(5, 1), (0, 20), (13, 1), (30, 5)], padding=2, page=3)
    got = check(c, FEW)
    assert not got[-2:].any()
    for cache in (c.cache_k, c.cache_v):  # no token waits for what another stores
        cache[c.cache_at] = torch.nan
    assert torch.equal(call(c, FEW, cache_at=torch.full_like(c.cache_at, c.spare)), got)


@RUN
@pytest.mark.parametrize(("repeat", "cache"), [(6, BF16), (8, FP8), (16, BF16), (16, FP8)])
def test_heads_of_published_models(repeat, cache):
    check(make([(3, 1), (44, 1)], d=256, repeat=repeat, heads=1, cache=cache))


@RUN
def test_the_largest_codes_of_an_fp8_cache_saturate_and_small_ones_are_kept():
    c = make([(40, 1)], d=128, heads=1, cache=FP8)
    c.scales = (2.0**-6, 2.0**-9)  # values beyond 7, and beyond 0.875
    check(c)
    c = make([(40, 1)], d=128, heads=1, cache=FP8)
    c.scales = (64.0, 32.0)  # most are subnormal codes
    check(c)


@RUN
def test_wider_page_tables_and_unaligned_inputs_change_no_bit():
    c = make([(3, 1), (37, 1)])
    got = check(c, FEW)
    wide = torch.cat([c.pages, c.pages, c.pages], 1)
    assert torch.equal(call(c, FEW, pages=wide), got)
    assert torch.equal(call(c, FEW, pages=c.pages[:, :3]), got)
    odd = torch.cat([c.joined[:, :0], c.joined, c.joined[:, :1]], 1)
    assert torch.equal(call(c, FEW, joined=odd[:, :-1]), got)
    assert call(c, FEW, rows=slice(0, 0)).shape == (0, got.shape[1])


@GPU
@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize(("repeat", "heads"), [(8, 2), (6, 4), (16, 2), (8, 1)])
def test_large_contexts(repeat, heads, cache):
    kind = {"d": 256, "repeat": repeat, "heads": heads, "cache": cache}
    check(make([(255, 1)], **kind))
    check(make([(20000, 1)], **kind))
    check(make([(1023 + 100 * i, 1) for i in range(16)], **kind))
    check(make([(i * 37, 1) for i in range(40)] + [(900, 24)], **kind))


@GPU
@pytest.mark.parametrize("d", cuda_attention.SIZES)
@pytest.mark.parametrize("way", [WAY, Way(cluster=1), Way(span=2, most=16), Way(cluster=4, depth=3)])
def test_every_way(d, way):
    check(make([(5000, 1), (0, 1), (300, 3)], d=d, dtype=F16, cache=F16), way)


@GPU
def test_the_longest_context():
    check(make([(262143, 1)], d=256, repeat=8, heads=1, cache=FP8))


@GPU
@pytest.mark.parametrize("cache", [BF16, FP8])
def test_a_graph_follows_what_its_tensors_hold(cache):
    """Six layers, one behind the other, of which each may start before the one ahead of it ends."""
    c = make([(2200, 1)] * 5, d=256, repeat=8, cache=cache, padding=1)
    caches = [[torch.randn(x.shape, device=DEVICE).to(cache) for x in (c.cache_k, c.cache_v)] for _ in range(6)]

    def chain() -> list[Tensor]:
        outs: list[Tensor] = []
        joined = c.joined
        for k, v in caches:
            outs.append(call(c, joined=joined, cache_k=k, cache_v=v))
            joined = c.joined.clone()
            joined[:, : outs[-1].shape[1]] += outs[-1]
        return outs

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain()
    for positions in ((2200, 0, 15, 16, 1023), (1024, 40, 1, 2047, 2199), (7, 8, 9, 10, 11)):
        for i, (slot, p) in enumerate(zip(c.slots, positions, strict=True)):
            c.positions[i], c.cache_at[i] = p, int(c.pages[slot, p // 16]) * 16 + p % 16
        c.joined.copy_(torch.randn(c.joined.shape))
        graph.replay()
        got = [out.clone() for out in outs]
        for a, b in zip(got, chain(), strict=True):
            assert torch.isfinite(a).all() and torch.equal(a, b)
