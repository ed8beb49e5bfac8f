"""The Triton kernels against float64: on a GPU as they are, elsewhere under Triton's interpreter.

The interpreter multiplies bf16 wrongly, so bf16 is tested on a GPU only. Outputs and intermediates start as NaN.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")
GPU = torch.cuda.is_available()  # without one, conftest.py chose the interpreter

from fp4ward.formats import nvfp4  # noqa: E402
from fp4ward.formats.formats import BF16, NVFP4  # noqa: E402
from fp4ward.formats.weight import Weight, concat  # noqa: E402
from fp4ward.kernels import experts, triton_experts, triton_linear  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16 if GPU else torch.float32]
LIMIT = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-3}  # norm-wise, against float64
STEP = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # two ulp (f32: the sum's own noise)


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, and every test draws its own fixed numbers."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def make(*shape: int) -> Weight:
    packed, block, g = nvfp4.encode(torch.randn(*shape) / shape[-1] ** 0.5)
    glob = nvfp4.expand_global(g, shape[:-1])
    return Weight(NVFP4, {"packed": packed, "block_scale": block, "global_scale": glob}).to(DEVICE)


def scaled(w: Weight, by: torch.Tensor | float) -> Weight:
    return Weight(NVFP4, {**w.parts, "global_scale": w.parts["global_scale"] * by})


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    assert torch.isfinite(got).all()
    assert (got.double() - want).norm() <= LIMIT[dtype] * want.norm()


def check_linear(x: torch.Tensor, w: Weight) -> torch.Tensor:
    y = triton_linear.linear(x, w)
    dense = w.dense(torch.float64)
    want = x.double() @ dense.T
    check(y, want, x.dtype)
    assert ((y.double() - want).abs() <= STEP[x.dtype] * (x.double().abs() @ dense.abs().T)).all()
    return y


# --- linear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 9, 17, 64, 130])  # one for each row of BLOCKS, and one beyond the last
def test_linear_equals_float64(tokens, dtype):  # B19: odd shapes without padding
    check_linear(draw(tokens, 288, dtype=dtype), make(160, 288))


@pytest.mark.parametrize(
    ("n", "k", "tokens"), [(1856, 64, 3), (704, 640, 17), (16, 16, 1), (1, 128, 40), (33, 1040, 2)]
)
def test_linear_at_odd_shapes(n, k, tokens):
    check_linear(draw(tokens, k, dtype=torch.float16), make(n, k))


def test_linear_of_nothing():
    w = make(160, 288)
    assert triton_linear.linear(draw(0, 288, dtype=torch.float16), w).shape == (0, 160)
    assert triton_linear.linear(draw(2, 288, dtype=torch.float16), w.rows(5, 5)).shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [16, 64])  # both shapes of the loop
def test_every_code_with_every_scale_is_exact(tokens, dtype):
    codes = torch.arange(16, dtype=torch.uint8).repeat(tokens // 16)
    scale = torch.tensor([*range(0x7F), 0x80], dtype=torch.uint8)[:, None].repeat(1, tokens // 16)
    glob = torch.tensor([1.0, 2**-8]).repeat(64)  # powers of two: the epilogue is exact too
    packed = nvfp4.pack(codes).repeat(128, 1)
    parts = {"packed": packed, "block_scale": scale.view(torch.float8_e4m3fn), "global_scale": glob}
    w = Weight(NVFP4, parts).to(DEVICE)
    y = triton_linear.linear(torch.eye(tokens, dtype=dtype, device=DEVICE), w)
    assert torch.equal(y.T, w.dense(torch.float32).to(dtype))


@pytest.mark.parametrize("tokens", [2, 64])
def test_a_view_reads_nothing_beside_itself(tokens):
    whole = make(96, 512)
    bad = {
        **whole.parts,
        "block_scale": torch.full_like(whole.parts["block_scale"].float(), 448).to(torch.float8_e4m3fn),
    }
    bad["block_scale"][17:54, 3:20] = whole.parts["block_scale"][17:54, 3:20]
    bad["global_scale"] = whole.parts["global_scale"].clone()
    bad["global_scale"][:17] = bad["global_scale"][54:] = float("nan")
    x = draw(tokens + 2, 272, dtype=torch.float16)
    x[0] = x[-1] = float("nan")
    check_linear(x[1:-1], Weight(NVFP4, bad).rows(17, 54).columns(48, 320))
    odd = draw(1 + tokens * 272, dtype=torch.float16)[1:].view(tokens, 272)  # no word starts at its first element
    check_linear(odd, whole.rows(17, 54).columns(48, 320))


def test_joined_projections_keep_their_own_globals():  # F17, B25
    parts = [make(16, 64), scaled(make(48, 64), 9.7), scaled(make(32, 64), torch.rand(32, device=DEVICE))]
    x = draw(5, 64, dtype=torch.float16)
    apart = torch.cat([triton_linear.linear(x, p) for p in parts], 1)
    assert torch.equal(check_linear(x, concat(parts)), apart)


@pytest.mark.parametrize("tokens", [2, 40])
def test_f16_with_a_large_global_does_not_overflow(tokens):  # F24, B10
    check_linear(draw(tokens, 64, dtype=torch.float16) / 1000, scaled(make(32, 64), 1000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_inputs_give_equal_bits_and_neighbours_do_not_matter(dtype):
    w, x = make(48, 288), draw(8, 288, dtype=dtype)
    y = triton_linear.linear(x, w)
    assert torch.equal(triton_linear.linear(x, w), y)
    alone = torch.cat([triton_linear.linear(x[t : t + 1], w) for t in range(8)])
    assert torch.equal(alone, y)  # holds within one row of BLOCKS


def test_the_linear_states_its_limits():
    x, w = draw(1, 64, dtype=torch.float16), make(16, 64)
    with pytest.raises(AssertionError, match="not bf16"):
        triton_linear.linear(x, Weight(BF16, {"data": torch.zeros(16, 64, dtype=torch.bfloat16)}))
    with pytest.raises(AssertionError, match=r"not torch\.float64"):
        triton_linear.linear(x.double(), w)
    with pytest.raises(AssertionError, match="do not fit K=64"):
        triton_linear.linear(x[:, :32], w)


# --- experts ----------------------------------------------------------------------------------------------------------

E, WIDTH, HIDDEN = 8, 48, 80


def check_experts(x, weights, ids, gate=None, up=None, down=None):
    gate, up, down = gate or make(E, WIDTH, HIDDEN), up or make(E, WIDTH, HIDDEN), down or make(E, HIDDEN, WIDTH)
    y = triton_experts.experts(x, gate, up, down, weights, ids)
    want = experts.reference(x.double(), gate, up, down, weights.double(), ids.long())
    check(y, want, x.dtype)
    return y


def routed(tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return experts.route(torch.randn(tokens, E, device=DEVICE), top_k)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_experts_equal_float64(top_k):
    for tokens in (1, 3) if top_k in (1, 8) else (1,):  # sorted from 5 pairs on, but never for one token
        check_experts(draw(tokens, HIDDEN, dtype=torch.float16), *routed(tokens, top_k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [17, 130])
def test_experts_with_many_tokens(tokens, dtype):
    check_experts(draw(tokens, HIDDEN, dtype=dtype), *routed(tokens, 2))


@pytest.mark.parametrize("tokens", [3, 20, 70])
def test_all_tokens_on_one_expert_leave_the_others_empty(tokens):
    ids = torch.full((tokens, 1), 5, device=DEVICE, dtype=torch.int32)
    check_experts(draw(tokens, HIDDEN, dtype=torch.float16), torch.rand(tokens, 1, device=DEVICE), ids)


@pytest.mark.parametrize("tokens", [2, 7])
def test_an_id_out_of_range_contributes_nothing(tokens):
    weights, ids = routed(tokens, 2)
    ids[0, 0], ids[1, 1], ids[1, 0] = -1, E, 2**40
    y = check_experts(draw(tokens, HIDDEN, dtype=torch.float16), weights, ids)
    assert not y[1].any()
    x = draw(tokens, HIDDEN, dtype=torch.float16)
    assert not check_experts(x, weights, torch.full_like(ids, -7)).any()


def test_experts_of_no_tokens():
    assert check_experts(draw(0, HIDDEN, dtype=torch.float16), *routed(0, 2)).shape == (0, HIDDEN)


def test_experts_read_views_of_joined_weights_and_unequal_globals():
    joined = scaled(make(E, 2 * WIDTH, HIDDEN), 0.5 + torch.rand(E, 2 * WIDTH, device=DEVICE))
    gate, up = joined.rows(0, WIDTH), joined.rows(WIDTH, 2 * WIDTH)
    down = make(E, HIDDEN, 2 * WIDTH).columns(WIDTH, 2 * WIDTH)
    for tokens in (1, 20):
        check_experts(draw(tokens, HIDDEN, dtype=torch.float16), *routed(tokens, 2), gate=gate, up=up, down=down)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # silu of a large negative number: x / inf is 0
def test_f16_experts_with_a_large_global_do_not_overflow():  # F24
    gate, up = scaled(make(E, WIDTH, HIDDEN), 1000), scaled(make(E, WIDTH, HIDDEN), 1e-3)
    check_experts(draw(3, HIDDEN, dtype=torch.float16), *routed(3, 2), gate=gate, up=up)


def test_experts_give_equal_bits_again():
    x, route = draw(5, HIDDEN, dtype=torch.float16), routed(5, 2)
    weights = (make(E, WIDTH, HIDDEN), make(E, WIDTH, HIDDEN), make(E, HIDDEN, WIDTH))
    first, second = (triton_experts.experts(x, *weights, *route) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("pairs", [1, 5, 64, 1500])
@pytest.mark.parametrize("tokens", [8, 128])
def test_sorted_blocks_hold_every_pair_once(pairs, tokens):
    routings = (torch.randint(-2, E + 2, (pairs,)), torch.full((pairs,), 3), torch.full((pairs,), E))
    for ids in (r.to(DEVICE) for r in routings):
        expert, first, end, order = triton_experts.sorted_blocks(ids, E, tokens)
        seen = []
        for e, a, b in zip(expert.tolist(), first.tolist(), end.tolist(), strict=True):
            if 0 <= e < E and a < b:
                rows = order[a : min(b, a + tokens)]
                assert (ids[rows] == e).all()
                seen += rows.tolist()
        assert sorted(seen) == [p for p, e in enumerate(ids.tolist()) if 0 <= e < E]


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_call_is_few_launches(tokens, monkeypatch):
    launched, launch = [], type(triton_experts._sum).__getitem__
    monkeypatch.setattr(
        type(triton_experts._sum), "__getitem__", lambda kernel, grid: launched.append(1) or launch(kernel, grid)
    )
    check_linear(draw(tokens, 64, dtype=torch.float16), make(32, 64))
    assert len(launched) == 1
    launched.clear()
    check_experts(draw(tokens, HIDDEN, dtype=torch.float16), *routed(tokens, 2))
    assert len(launched) == 4 - (tokens == 1)  # a single token is not sorted


def test_the_benchmark_says_that_it_needs_a_gpu(capsys):
    if GPU:
        pytest.skip("there is a GPU")
    from bench import triton_portable

    assert triton_portable.main([]) == 2
    assert capsys.readouterr().err == "error: bench/triton_portable.py needs a CUDA GPU, and torch finds none\n"


# --- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not GPU, reason="captures a CUDA graph")
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_graph_holds_both_ops(tokens):
    w, weights = make(HIDDEN, HIDDEN), (make(E, WIDTH, HIDDEN), make(E, WIDTH, HIDDEN), make(E, HIDDEN, WIDTH))
    x, (weight, ids) = draw(tokens, HIDDEN, dtype=torch.bfloat16), routed(tokens, 2)

    def both():
        return triton_experts.experts(triton_linear.linear(x, w), *weights, weight, ids)

    both()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = both()
    x.copy_(draw(tokens, HIDDEN, dtype=torch.bfloat16))
    ids.copy_(routed(tokens, 2)[1])
    graph.replay()
    assert torch.equal(y, both())


def test_they_compile_for_other_gpus_without_spilling(tmp_path):
    """The block with most registers, on the path with mma.sync (SM80) and with wgmma (SM90)."""
    script = Path(__file__).with_name("triton_targets.py")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(script), "--sm", "80", "90", "--block", "last"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 10
