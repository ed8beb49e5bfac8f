"""norm.cu on a CPU (emulator.py) and, with more and larger cases, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp4ward.kernels import cuda_norm, norm
from fp4ward.kernels.cuda_norm import choose, rms_norm, rms_norm_gates
from tests.kernels.emulator import DEVICE, GPU, RUN, machine

BF16, F16 = torch.bfloat16, torch.float16
EPS = 1e-6


@pytest.fixture(autouse=True)
def seeded(request, monkeypatch):
    if DEVICE == "cpu":
        cuda_norm._launch.cache_clear()
    with machine(request, monkeypatch):
        yield


def draw(tokens: int, h: int, dtype: torch.dtype = BF16, pad: int = 0) -> Tensor:
    """Rows of different sizes; pad: columns between them."""
    size = torch.logspace(-2, 1, tokens)[:, None] if tokens > 1 else 3.0
    return (torch.randn(tokens, h + pad) * size).to(DEVICE, dtype)[:, pad // 2 : pad // 2 + h]


def draw_weight(h: int) -> Tensor:
    return (1 + torch.randn(h) / 8).to(DEVICE)


def settled() -> None:
    """Weights and gates are constants, read before the kernel ahead has ended; here that one makes them."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def close(n: Tensor, x: Tensor, weight: Tensor) -> None:
    """n is the norm, rounded once: half a unit in the last place, and what f32 adds."""
    want = norm.rms_norm(x.double(), weight, EPS)
    assert n.dtype == x.dtype and n.shape == x.shape and n.is_contiguous() and torch.isfinite(n).all()
    unit, least = (2.0**-8, 0.0) if x.dtype == BF16 else (2.0**-11, 2.0**-25)
    assert ((n.double() - want).abs() <= unit * (1 + 1e-3) * want.abs() + least).all()


def check(x: Tensor, weight: Tensor) -> Tensor:
    settled()
    n = rms_norm(x, weight, EPS)
    close(n, x, weight)
    assert torch.equal(rms_norm(x, weight, EPS), n)  # bit for bit
    return n


def check_gates(x: Tensor, weight: Tensor, gates: Tensor, **tuning: int) -> tuple[Tensor, Tensor]:
    settled()
    n, logits = rms_norm_gates(x, weight, EPS, gates, **tuning)
    close(n, x, weight)
    want, size = n.double() @ gates.double().T, n.double().abs() @ gates.double().abs().T
    assert logits.dtype == torch.float32 and logits.shape == want.shape and logits.is_contiguous()
    assert ((logits.double() - want).abs() <= 1e-5 * size).all()  # summed in f32, by tensor cores
    for one, other in zip(rms_norm_gates(x, weight, EPS, gates, **tuning), (n, logits), strict=True):
        assert torch.equal(one, other)
    return n, logits


@RUN
@pytest.mark.parametrize(("tokens", "h", "dtype"), [(3, 64, BF16), (2, 2048, F16), (1, 2688, BF16), (2, 4096, BF16)])
def test_the_norm_equals_float64(tokens, h, dtype):
    check(draw(tokens, h, dtype), draw_weight(h))


@RUN
def test_wide_rows_take_several_pieces_a_thread():
    check(draw(1, 5128), draw_weight(5128))
    check(draw(1, 16384, F16), draw_weight(16384))


@RUN
@pytest.mark.parametrize(
    ("tokens", "h", "count", "dtype"),
    [(1, 64, 5, BF16), (7, 64, 5, F16), (16, 72, 9, BF16), (3, 2048, 24, BF16), (5, 2688, 3, F16), (1, 4096, 10, BF16)],
)
def test_norm_and_gates_equal_float64(tokens, h, count, dtype):
    x, weight, gates = draw(tokens, h, dtype), draw_weight(h), draw(count, h, dtype) / h**0.5
    n, _ = check_gates(x, weight, gates)
    assert torch.equal(n, rms_norm(x, weight, EPS))


@RUN
def test_many_gates_and_wide_rows():
    for tokens, h, count in ((1, 64, 264), (2, 64, 337), (3, 5120, 9)):
        check_gates(draw(tokens, h), draw_weight(h), draw(count, h) / h**0.5)


@RUN
@pytest.mark.parametrize("tuning", [{"ROWS": 8, "TOKENS": 2}, {"ROWS": 3, "TOKENS": 8}, {"PER": 2, "KIB": 20}])
def test_tuning_leaves_all_bits(tuning):
    x, weight, gates = draw(11, 1032), draw_weight(1032), draw(13, 1032) / 32
    plain, tuned = check_gates(x, weight, gates), check_gates(x, weight, gates, **tuning)
    if "PER" not in tuning:  # which changes the order of sums
        assert torch.equal(tuned[0], plain[0]) and torch.equal(tuned[1], plain[1])


@RUN
def test_a_token_alone_has_the_bits_that_it_has_among_others():
    weight, gates, x = draw_weight(1096), draw(7, 1096) / 33, draw(16, 1096)
    n, (also, logits) = check(x, weight), check_gates(x, weight, gates)
    assert torch.equal(n, also)
    for part in (slice(3, 4), slice(2, 5), slice(15, 16), slice(0, 9)):
        assert torch.equal(rms_norm(x[part], weight, EPS), n[part])
        own, few = rms_norm_gates(x[part], weight, EPS, gates)
        assert torch.equal(own, n[part]) and torch.equal(few, logits[part])


@RUN
def test_views_of_x_and_nothing_at_all():
    weight, gates = draw_weight(64), draw(5, 64)
    for x in (draw(6, 64, pad=16), draw(6, 64, pad=16)[1:4], draw(6, 64, pad=6), draw(64, 3).T[:, :64]):
        assert torch.equal(check(x, weight), check(x.contiguous(), weight))
        check_gates(x, weight, gates)
    assert rms_norm(draw(0, 64), weight, EPS).shape == (0, 64)
    n, logits = rms_norm_gates(draw(0, 64), weight, EPS, gates)
    assert n.shape == (0, 64) and logits.shape == (0, 5)


@RUN
def test_zeros_stay_zeros_and_large_values_finite():  # F24
    x, weight, gates = draw(3, 64, F16), draw_weight(64), draw(5, 64, F16)
    x[0], x[1] = 0, x[1].sign() * 60000
    n, logits = check_gates(x, weight, gates)
    assert not n[0].any() and not logits[0].any()


def test_what_it_does_not_take_is_refused():
    weight, gates = draw_weight(64), draw(5, 64)
    for x, w, g in (
        (draw(1, 64).float(), weight, gates), (draw(17, 64), weight, gates), (draw(1, 64), weight.bfloat16(), gates),
        (draw(1, 64), weight, gates.half()), (draw(1, 60), weight[:60], gates), (draw(1, 64), weight, gates[:, ::2]),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            rms_norm_gates(x, w, EPS, g)
    with pytest.raises(AssertionError, match="WRAPS"):
        choose(64, 5, 1, {"WRAPS": 1})


def test_what_a_block_runs_is_compiled_ahead():
    known = set(cuda_norm.sources(90))
    for h in (2048, 2688, 4096, 5120, 7168):
        for tokens in range(1, 17):
            for gates in (136, 257, 264, 520):
                assert cuda_norm._source(False, choose(h, gates, tokens)) in known
        assert cuda_norm._source(True, choose(h)) in known


@GPU
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 300])
@pytest.mark.parametrize("h", [64, 2048, 2688, 4096, 5120, 7168, 12288])
def test_every_norm_equals_float64(h, tokens, dtype):
    weight, x = draw_weight(h), draw(tokens, h, dtype, pad=64)
    n = check(x, weight)
    for t in (0, tokens // 2, tokens - 1):
        assert torch.equal(rms_norm(x[t : t + 1], weight, EPS), n[t : t + 1])


@GPU
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("h", [64, 2048, 2688, 4096, 7168])
@pytest.mark.parametrize("count", [5, 136, 264, 520, 1032])
def test_every_product_with_gates_equals_float64(count, h, dtype):
    weight, gates, x = draw_weight(h), draw(count, h, dtype) / h**0.5, draw(16, h, dtype)
    n, logits = check_gates(x, weight, gates)
    assert torch.equal(n, rms_norm(x, weight, EPS))
    for tokens in range(1, 16):
        own, few = check_gates(x[16 - tokens :], weight, gates)
        assert torch.equal(own, n[16 - tokens :]) and torch.equal(few, logits[16 - tokens :])


@GPU
@pytest.mark.parametrize("tokens", [1, 6, 16])
def test_a_graph_holds_a_chain_of_norms(tokens):  # each may start before the one ahead of it ends
    weights, x = [draw_weight(2048) for _ in range(4)], draw(tokens, 2048)
    gates = [draw(count, 2048) / 2048**0.5 for count in (264, 5, 520, 136)]

    def chain() -> list[Tensor]:
        y, all_logits = x, []
        for weight, own in zip(weights, gates, strict=True):
            y, logits = rms_norm_gates(rms_norm(y, weight, EPS), weight, EPS, own)
            all_logits.append(logits)
        return [y, *all_logits]

    settled()
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(4):
        x.copy_(draw(tokens, 2048))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, chain(), strict=True))
