"""linear.cu: its layout and its arithmetic on a CPU, bit by bit; the kernels themselves where a GPU is."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4ward.formats import nvfp4
from fp4ward.formats.formats import BF16, FORMATS, NVFP4
from fp4ward.formats.weight import Weight, concat, part_shapes
from fp4ward.kernels import cuda_linear
from fp4ward.kernels.cuda_linear import H200, Prepared, choose, gpu_of, linear, prepare, restore
from tests.cases import DENSE, NORM_ERROR, ODD, ULPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
QUANTIZED = ("nvfp4", "fp8_tensor", "fp8_channel", "fp8_block")
TOKENS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make(format: str, n: int, k: int) -> Weight:
    """Every code; every block scale but zero."""
    parts = {}
    for name, (dtype, size) in part_shapes(FORMATS[format], (n, k)).items():
        if dtype == torch.uint8:
            parts[name] = torch.randint(0, 256, size, dtype=torch.uint8)
        elif dtype == torch.float8_e4m3fn:
            sign = 0 if name == "block_scale" else 128
            code = torch.randint(1, 127, size, dtype=torch.uint8)
            parts[name] = (code + sign * torch.randint(0, 2, size, dtype=torch.uint8)).view(dtype)
        else:
            parts[name] = (torch.rand(size) + 0.5) / (200 * k**0.5)
    return Weight(FORMATS[format], parts).to(DEVICE)


def all_pairs() -> Weight:
    """[254, 128]: every code with every non-negative scale and with 0x80, in every pair and place of a word."""
    scale = torch.tensor([*range(0x7F), 0x80], dtype=torch.uint8)[:, None].repeat(2, 8)
    code = (torch.arange(256)[:, None] // 128 * 8 + torch.arange(128)) % 16
    glob = torch.tensor([1.0, 2**-8]).repeat(128)  # powers of two: the epilogue is exact too
    packed = nvfp4.pack(code.to(torch.uint8))
    return Weight(NVFP4, {"packed": packed, "block_scale": scale.view(torch.float8_e4m3fn), "global_scale": glob})


# --- layout -----------------------------------------------------------------------------------------------------------


def same(a: Weight, b: Weight) -> bool:
    bits = [[part.contiguous().view(torch.uint8) for part in w.parts.values()] for w in (a, b)]
    return a.format == b.format and all(torch.equal(x, y) for x, y in zip(*bits, strict=True))


@pytest.mark.parametrize("format", QUANTIZED)
def test_restore_brings_a_prepared_weight_back(format):
    for shape in ODD[:3] if DEVICE == "cuda" else ODD[3:]:
        w = make(format, shape.n, shape.k)
        before = {name: part.clone() for name, part in w.parts.items()}
        assert same(restore(prepare(w)), w)
        assert same(Weight(w.format, before), w)  # prepare is pure


def test_views_and_small_chunks_are_laid_out_alike(monkeypatch):
    w = make("nvfp4", 96, 512)
    view = w.rows(17, 90).columns(64, 400)
    whole = prepare(Weight(NVFP4, {name: part.contiguous() for name, part in view.parts.items()}))
    monkeypatch.setattr(cuda_linear, "CHUNK", 1)
    assert torch.equal(prepare(view).records, whole.records) and same(restore(whole), view)


def test_a_scale_of_zero_or_minus_zero_clears_its_codes():  # nothing else is lost
    w = all_pairs()
    back = restore(prepare(w))
    assert torch.equal(back.dense(torch.float64), w.dense(torch.float64))
    zero = (w.parts["block_scale"].view(torch.uint8) & 127) == 0
    assert not back.parts["packed"][zero.repeat_interleave(8, 1)].any()
    assert not back.parts["block_scale"].view(torch.uint8)[zero].any()


def test_prepare_states_what_it_reads():
    with pytest.raises(AssertionError, match="not bf16"):
        prepare(Weight(BF16, {"data": torch.zeros(16, 64, dtype=torch.bfloat16)}))
    with pytest.raises(AssertionError, match="multiple of 16"):
        prepare(make("fp8_channel", 16, 40))


# --- arithmetic: what linear.cu does with a record, on whole tensors --------------------------------------------------

SIGN, M32 = 0x80008000, 0xFFFFFFFF


def fragments(w: Prepared, half: bool) -> torch.Tensor:
    """The A operands of a prepared weight as 32-bit integers [tile, step, h, j, lane, 4], as `decode` makes them."""
    (tiles, steps), four = w.records.shape[:2], w.kind == "nvfp4"
    end = 1024 if four else 2048
    words = w.records[..., :end].contiguous().view(torch.int32).long() & M32
    rest = 0x01C001C0 if four else 0x07F007F0

    def place(v):
        return (v & SIGN) | (v << 3 & rest << 3) if half else v & (SIGN | rest)

    def merge(mask, a, b):
        return (a & mask) | (b & (M32 ^ mask))

    def product(a, b):  # of two pairs; exact, or this test would see it
        dtype = torch.float16 if half else torch.bfloat16
        halves = [[(v >> s & 0xFFFF).to(torch.int32).to(torch.int16).view(dtype) for s in (0, 16)] for v in (a, b)]
        out = [(x.double() * y.double()) for x, y in zip(*halves, strict=True)]
        assert all(torch.equal(v.to(dtype).double(), v) for v in out)
        low, high = (v.to(dtype).view(torch.int16).long() & 0xFFFF for v in out)
        return low | high << 16

    if four:
        v = words.view(tiles, steps, 2, 32, 4).transpose(3, 4)
        left = 7 if half else 4
        scale = w.records[..., end:].contiguous().view(torch.int32).long().view(tiles, steps, 1, 1, 32) & M32
        both = []
        for moved in ((scale << left) & M32, scale >> (8 - left)):
            h = torch.cat([moved & 0xFFFF, moved >> 16], 2)
            h = h | h << 16
            both.append(h & 0x7F807F80 if half else (h & 0x0FF00FF0) | 0x70007000)
        up, down = (b.expand(v.shape) for b in both)
        rotated = (v >> 4 | v << 28) & M32
        pairs = ((v << 6, up), (v << 2, down), (rotated, up), (merge(0x00400040, v >> 8, v), down))
        return torch.stack([product(place(a & M32), b) for a, b in pairs], -1)
    v = words.view(tiles, steps, 2, 2, 32, 2, 2).permute(0, 1, 2, 3, 5, 4, 6).reshape(tiles, steps, 2, 4, 32, 2)
    one = torch.full_like(v, 0x5C005C00 if half else 0x7B807B80)
    made = [product(place(v), one), product(place(merge(0x07000700, v >> 4, (v << 4) & M32)), one)]
    return torch.stack(made, -1).flatten(-2)


def emulated(x: torch.Tensor, w: Prepared) -> torch.Tensor:
    """y in float64 [T, N] (without block scales of FP8): mma.m16n8k16 as the PTX ISA lays it out, with 16 t + 4 j of a
    lane's columns in its j-th product."""
    half = x.dtype == torch.float16
    a = fragments(w, half)
    tiles, steps = a.shape[:2]
    values = torch.stack([a & 0xFFFF, a >> 16], -1).to(torch.int32).to(torch.int16).view(x.dtype).double()
    # lane (g, t), register r, element e -> row g + 8 (r & 1), position 2 t + e + 8 (r >> 1) of the product
    values = values.view(tiles, steps, 2, 4, 8, 4, 2, 2, 2)  # tile step h j | g t (r >> 1) (r & 1) e
    matrix = values.permute(0, 1, 2, 3, 7, 4, 6, 5, 8).reshape(tiles, steps, 2, 4, 16, 16)
    k = steps * 128
    padded = torch.zeros(x.shape[0], k, dtype=torch.float64)
    padded[:, : x.shape[1]] = x.double()
    # B: lane t's register b (0, 1) of product j is columns 16 t + 4 j + 2 b + e, at positions 2 t + e + 8 b
    b = padded.view(-1, steps, 2, 4, 4, 2, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(-1, steps, 2, 4, 16)
    y = torch.einsum("tshjrk,nshjk->ntr", matrix, b).flatten(1)[:, : w.shape[0]]
    return y * (128 if w.kind == "nvfp4" else 1) * (1 if w.row_scale is None else w.row_scale.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["nvfp4", "fp8_channel"])
def test_the_decoded_fragments_multiply_to_the_exact_product(format, dtype):
    w = make(format, 33, 272).to("cpu")
    x = torch.randint(-8, 8, (3, 272)).to(dtype)
    want = x.double() @ w.dense(torch.float64).T
    torch.testing.assert_close(emulated(x, prepare(w)), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_with_every_scale_decodes_exactly(dtype):
    w = all_pairs()
    assert torch.equal(emulated(torch.eye(128, dtype=dtype), prepare(w)).T, w.dense(torch.float64))
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where((codes & 127) == 127, 0, codes).repeat(16, 1).view(torch.float8_e4m3fn)
    w = Weight(FORMATS["fp8_channel"], {"data": codes, "scale": torch.ones(16, 1)})
    assert torch.equal(emulated(torch.eye(256, dtype=dtype), prepare(w)).T, w.dense(torch.float64))


# --- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [H200, gpu_of(80, 108), gpu_of(86, 84), gpu_of(120, 170)])
def test_every_row_has_one_warp_and_fits_shared_memory(gpu):
    for n, k in ((1, 16), (160, 288), (2048, 512), (2048, 2048), (5120, 17408), (248320, 5120)):
        for tokens in (1, 8, 9, 16, 17, 32, 33, 64):
            for kind in cuda_linear.DEFINES:
                made = choose(kind, tokens, n, k, gpu, {})
                assert made.shared <= gpu.room and made.threads % 32 == 0 and made.defines["NT"] * 8 >= tokens
                tall = made.defines["R"] * (made.defines.get("WN") or 4 * made.defines.get("GROUPS", 0))
                assert made.grid[1] == made.defines["CLUSTER"] <= (8 if gpu.clusters else 1)
                assert made.entry == "narrow" or made.grid[0] * tall * 16 >= n > (made.grid[0] - 1) * tall * 16
                assert made.entry != "warpgroup" or (gpu.warpgroups and kind != "fp8_block")


def test_choice_depends_on_the_class_of_the_tokens_alone():
    for n, k in ((2048, 2048), (5120, 17408), (248320, 2048)):
        for some in ((2, 5, 8), (9, 16), (17, 25, 32), (33, 64)):
            assert len({str(choose("nvfp4", tokens, n, k, H200, {})) for tokens in some}) == 1


def test_a_multiprocessor_holds_no_more_blocks_than_its_share():  # else those that are idle take several of a grid
    for case, tokens in itertools.product(DENSE, (1, 8, 16, 32, 64)):
        for _, made in cuda_linear.launches("nvfp4", tokens, case.n, case.k, H200, {}):
            share = -(-made.grid[0] * made.grid[1] // H200.slots(made.grid[1]))
            assert H200.room // made.shared <= share, (case, tokens, made)


def test_no_rank_of_a_cluster_is_without_columns_and_no_define_is_unknown():
    way = {"WARPS": 8, "R": 1}
    assert cuda_linear.narrow("nvfp4", 1, 900, 1152, H200, {**way, "CLUSTER": 3}) is not None
    for k, cluster in ((1152, 4), (128, 2)):  # of 9 records each rank would have 3, 3, 3 and none
        assert cuda_linear.narrow("nvfp4", 1, 900, k, H200, {**way, "CLUSTER": cluster}) is None
    with pytest.raises(AssertionError, match="takes WRAPS together"):
        choose("nvfp4", 1, 64, 64, H200, {"WRAPS": 8})


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_launch_is_chosen_again_by_its_defines(tokens):  # so that benchmarks and tests can name one
    for _, made in cuda_linear.launches("nvfp4", tokens, 800, 1152, H200, {}):
        named = {name: value for name, value in made.defines.items() if name != "NT"}
        assert choose("nvfp4", tokens, 800, 1152, H200, named) == made


@pytest.mark.parametrize(("key", "entry"), [("DEPTH", "narrow"), ("WN", "wide"), ("GROUPS", "warpgroup")])
def test_a_define_names_its_kernel(key, entry):
    made = choose("nvfp4", 16, 2048, 2048, H200, {key: 2})
    assert made.entry == entry and made.defines[key] == 2
    with pytest.raises(AssertionError, match="together"):  # nothing is taken and left aside
        choose("nvfp4", 16, 2048, 2048, H200, {key: 2, "RING" if key == "DEPTH" else "DEPTH": 2})


def test_nearly_every_choice_is_among_the_sources_that_are_compiled_ahead():
    known = set(cuda_linear.sources(90))
    made = [choose("nvfp4", tokens, shape.n, shape.k, H200, {}) for shape in DENSE for tokens in (1, 8, 16, 32, 64)]
    met = [cuda_linear._source("nvfp4", one.entry, False, one.defines) in known for one in made]
    assert len(known) < 400 and sum(met) > 0.9 * len(met)


# --- the kernels ------------------------------------------------------------------------------------------------------


def poison(tokens: int, n: int, dtype: torch.dtype) -> None:
    """The next allocation of this size is NaN."""
    torch.full((tokens, n), float("nan"), dtype=dtype, device=DEVICE)


def check(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None, **tuning: int) -> torch.Tensor:
    ready, dense = prepare(w), w.dense(torch.float64)
    poison(x.shape[0], w.shape[0], x.dtype)
    y = linear(x, ready, bias, **tuning)
    want, size = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    if bias is not None:
        want, size = want + bias, size + bias.abs()
    assert y.dtype == x.dtype and y.shape == want.shape and torch.isfinite(y).all()
    assert (y.double() - want).norm() <= NORM_ERROR * want.norm()
    assert ((y.double() - want).abs() <= ULPS * 2.0 ** (-8 if x.dtype == torch.bfloat16 else -11) * size).all()
    assert torch.equal(linear(x, ready, bias, **tuning), y)  # bit for bit
    return y


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@GPU
@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_equals_float64(tokens, format):  # B19: odd shapes without padding copies
    for i, shape in enumerate(ODD):
        dtype = (torch.bfloat16, torch.float16)[(tokens + i) % 2]
        bias = draw(shape.n, dtype=dtype) if (tokens + i) % 3 == 0 else None
        check(draw(tokens, shape.k, dtype=dtype), make(format, shape.n, shape.k), bias)


@GPU
@pytest.mark.parametrize(("n", "k"), [(2048, 8192), (272, 17408), (4096, 512)])
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_linear_with_long_and_short_k(tokens, n, k):
    check(draw(tokens, k), make("nvfp4", n, k))


@GPU
@pytest.mark.parametrize("tokens", [1, 7, 16, 30, 64])
def test_every_way_to_launch_equals_float64(tokens):
    x, w, gpu = draw(tokens, 1152), make("nvfp4", 800, 1152), cuda_linear.gpu_here(torch.device(DEVICE))
    for entry, ways in cuda_linear.WAYS.items():
        for way in ways:
            for cluster in cuda_linear.CLUSTERS[entry]:
                made = getattr(cuda_linear, entry)("nvfp4", tokens, 800, 1152, gpu, {"CLUSTER": cluster, **way})
                if made is not None:
                    check(x, w, **{name: value for name, value in made.defines.items() if name != "NT"})


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
def test_every_code_with_every_scale_is_exact_on_the_gpu(tokens, dtype):
    w = all_pairs().to(DEVICE)
    eye = torch.eye(128, dtype=dtype, device=DEVICE)
    y = torch.cat([linear(part, prepare(w)) for part in eye.split(tokens)])
    assert torch.equal(y.T, w.dense(torch.float32).to(dtype))


@GPU
@pytest.mark.parametrize("format", QUANTIZED)
def test_both_layouts_are_one(format):
    for shape in ODD:
        w = make(format, shape.n, shape.k)
        assert torch.equal(prepare(w).records.cpu(), prepare(w.to("cpu")).records)


@GPU
@pytest.mark.parametrize(("most", "fewer"), [(8, (2, 3)), (16, (9,)), (32, (17,)), (64, (33,))])
def test_a_row_does_not_depend_on_its_neighbours(most, fewer):
    w, x = prepare(make("nvfp4", 704, 2688)), draw(most, 2688)
    y = linear(x, w)
    for tokens in fewer:
        assert torch.equal(linear(x[most - tokens :], w), y[most - tokens :])


@GPU
def test_joined_projections_keep_their_own_globals():  # F17, B25
    parts = [make("nvfp4", n, 288) for n in (16, 48, 32)]
    parts[1].parts["global_scale"].mul_(9.7)
    x = draw(5, 288)
    apart = torch.cat([linear(x, prepare(p)) for p in parts], 1)
    assert torch.equal(check(x, concat(parts)), apart)


@GPU
def test_views_of_x_and_nothing_at_all():
    w = make("nvfp4", 160, 288)
    check(draw(6, 320)[1:4, 8:296], w)  # 16-byte aligned: read in place
    check(draw(6, 320)[1:4, 3:291], w)
    assert linear(draw(0, 288), prepare(w)).shape == (0, 160)
    assert linear(draw(2, 288), prepare(w.rows(5, 5))).shape == (2, 0)


@GPU
def test_f16_with_a_large_global_does_not_overflow():  # F24, B10
    w = make("nvfp4", 32, 64)
    w.parts["global_scale"].mul_(1000)
    check(draw(2, 64, dtype=torch.float16) / 1000, w)


@GPU
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_graph_holds_a_chain_of_launches(tokens):  # each may start before the one ahead of it ends
    first, second = (prepare(make("nvfp4", 2048, 2048)) for _ in range(2))
    x = draw(tokens, 2048)

    def chain():
        y = x
        for _ in range(4):
            y = linear(linear(y, first), second)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    x.copy_(draw(tokens, 2048))
    graph.replay()
    assert torch.equal(y, chain())
