"""Each op's reference against a plainer float64 formula, on fresh inputs at odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fp4ward.errors import UserError
from fp4ward.formats import fp8, nvfp4
from fp4ward.formats.formats import BF16, FP8_BLOCK_SCALED, FP8_CHANNEL, NVFP4
from fp4ward.formats.weight import Weight, concat
from fp4ward.kernels import attention, experts, gated_delta, linear, norm, rope
from fp4ward.layers.linear import Linear
from fp4ward.parallel.placement import Replicate

SHAPES = [(160, 288), (1856, 64), (704, 640), (16, 16), (1, 128)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make(kind: str, n: int, k: int) -> Weight:
    w = torch.randn(n, k) / k**0.5
    if kind == "nvfp4":
        packed, block, g = nvfp4.encode(w)
        return Weight(NVFP4, {"packed": packed, "block_scale": block, "global_scale": nvfp4.expand_global(g, (n,))})
    if kind == "bf16":
        return Weight(BF16, {"data": w.bfloat16()})
    scale = w.abs().amax(-1, keepdim=True) / 448
    if kind == "fp8_channel":
        return Weight(FP8_CHANNEL, {"data": fp8.to_e4m3(w / scale), "scale": scale})
    columns = -(-k // 128)
    scale = scale.expand(n, columns).contiguous() * torch.rand(1, columns)
    return Weight(FP8_BLOCK_SCALED, {"data": fp8.to_e4m3(w / scale.repeat_interleave(128, 1)[:, :k]), "scale": scale})


@pytest.mark.parametrize("kind", ["nvfp4", "fp8_channel", "fp8_block", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_linear_equals_float64_on_exact_weights(kind, dtype):  # B19: odd shapes without padding
    for n, k in SHAPES:
        w = make(kind, n, k)
        x = torch.randn(3, k).to(dtype)
        want = x.double() @ w.dense(torch.float64).T
        got = linear.reference(x, w)
        assert got.dtype == dtype
        error = (got.double() - want).norm() / want.norm()
        assert error < {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 4e-3)
    assert linear.reference(x[:0], w).shape == (0, n)


def test_linear_decodes_in_row_blocks(monkeypatch):
    w, x = make("nvfp4", 160, 288), torch.randn(2, 288, dtype=torch.float64)
    whole = linear.reference(x, w)
    monkeypatch.setattr(linear, "BLOCK_WEIGHTS", 288 * 7)
    assert (linear.reference(x, w) - whole).abs().max() < 1e-13


def test_fp16_activations_with_a_large_global_do_not_overflow():  # F24, B10
    w = make("nvfp4", 32, 64)
    big = Weight(NVFP4, {**w.parts, "global_scale": w.parts["global_scale"] * 1000})
    x = (torch.randn(2, 64) / 1000).half()
    want = x.double() @ big.dense(torch.float64).T
    # Half's own mantissa product overflows when the scale is applied first: 2688 * 1000 > 65504.
    assert torch.isfinite(linear.reference(x, big)).all()
    assert (linear.reference(x, big).double() - want).norm() / want.norm() < 4e-3


def test_joined_projections_keep_their_own_globals():  # F17, B25
    parts = [make("nvfp4", n, 64) for n in (16, 48)]
    parts[1] = Weight(NVFP4, {**parts[1].parts, "global_scale": parts[1].parts["global_scale"] * 9.7})
    x = torch.randn(5, 64, dtype=torch.float64)
    apart = torch.cat([linear.reference(x, p) for p in parts], 1)
    assert torch.equal(linear.reference(x, concat(parts)), apart)


def test_a_weight_only_layer_refuses_quantized_input():  # B13
    layer = Linear("layers.0.mlp.down_proj", make("nvfp4", 16, 64), Replicate())
    for x in (torch.zeros(1, 64).to(torch.float8_e4m3fn), torch.zeros(1, 32, dtype=torch.uint8)):
        with pytest.raises(UserError, match=r"layers\.0\.mlp\.down_proj.*needs a high-precision input"):
            layer(x)


def moe_weights(e: int, h: int, i: int) -> tuple[Weight, Weight, Weight]:
    def stack(n: int, k: int) -> Weight:
        each = [make("nvfp4", n, k) for _ in range(e)]
        return Weight(NVFP4, {part: torch.stack([w.parts[part] for w in each]) for part in NVFP4.components})

    return stack(i, h), stack(i, h), stack(h, i)


def test_experts_equal_a_plain_sum_and_skip_foreign_ids():  # F29
    e, h, i, t, k = 5, 64, 32, 7, 3
    gate, up, down = moe_weights(e, h, i)
    x = torch.randn(t, h, dtype=torch.float64)
    weights = torch.rand(t, k, dtype=torch.float64)
    ids = torch.stack([torch.randperm(e)[:k] for _ in range(t)])
    ids[0, 1], ids[3, 0], ids[5] = -1, e, -1
    want = torch.zeros(t, h, dtype=torch.float64)
    for row in range(t):
        for w, expert in zip(weights[row], ids[row].tolist(), strict=True):
            if 0 <= expert < e:
                g, u, d = (m.dense(torch.float64)[expert] for m in (gate, up, down))
                want[row] += w * (d @ (functional.silu(g @ x[row]) * (u @ x[row])))
    got = experts.reference(x, gate, up, down, weights, ids)
    assert (got - want).abs().max() < 1e-12
    assert (got[5] == 0).all()
    assert (experts.reference(x, up, gate, down, weights, ids) - want).abs().max() > 1e-3  # gate and up differ


def test_an_expert_whose_scales_are_all_zero_gives_zero():  # F22
    gate, up, down = moe_weights(2, 32, 16)
    for w in (gate, up, down):
        w.parts["block_scale"][1] = 0
        w.parts["global_scale"][1] = 0
    x = torch.randn(3, 32)
    y = experts.reference(x, gate, up, down, torch.ones(3, 1), torch.tensor([[0], [1], [0]]))
    assert (y[1] == 0).all() and torch.isfinite(y).all() and (y[0] != 0).any()


def test_routing_renormalises_the_top_k():
    weights, ids = experts.route(torch.tensor([[1.0, 3.0, 2.0, -1.0]]), 2)
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights, torch.tensor([[3.0, 2.0]]).softmax(-1))


@pytest.mark.parametrize("first", [0, 5])
def test_attention_equals_a_masked_softmax_in_blocks_of_queries(first, monkeypatch):
    t, nq, nk, d = 9, 6, 2, 8
    s = first + t
    q = torch.randn(t, nq, d, dtype=torch.float64)
    k, v = torch.randn(2, s, nk, d, dtype=torch.float64)
    mask = torch.ones(t, s, dtype=torch.bool).tril(first)
    want = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(3, 1).transpose(0, 1), v.repeat_interleave(3, 1).transpose(0, 1), mask
    ).transpose(0, 1)
    whole = attention.attend(q, k, v, first, d**-0.5)
    assert (whole - want).abs().max() < 1e-12
    monkeypatch.setattr(attention, "BLOCK_SCORES", nq * s * 2)
    assert (attention.attend(q, k, v, first, d**-0.5) - want).abs().max() < 1e-12


def test_the_fp8_cache_saturates_and_scales():
    cache = torch.empty(4, 1, 2).to(torch.float8_e4m3fn)
    x = torch.tensor([[[1.0, 1000.0]], [[-1000.0, 0.3]]])
    attention.store(cache, torch.tensor([3, 0]), x, 0.5)
    got = attention.fetch(cache, torch.tensor([3, 0]), 0.5, torch.float32)
    assert got.flatten().tolist() == [1.0, 224.0, -224.0, torch.tensor(0.6).to(cache.dtype).float().item() * 0.5]


def test_rope_rotates_halves_of_the_first_dimensions_only():
    freq = rope.frequencies(4, 10000.0, torch.float64, torch.device("cpu"))
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    got = rope.rotate(x, torch.tensor([0, 7]), freq)
    assert torch.equal(got[0], x[0]) and torch.equal(got[..., 4:], x[..., 4:])
    for j, f in enumerate([1.0, 0.01]):
        z = torch.complex(x[1, :, j], x[1, :, j + 2]) * torch.exp(torch.tensor(7j * f))
        assert (got[1, :, j] - z.real).abs().max() < 1e-6 and (got[1, :, j + 2] - z.imag).abs().max() < 1e-6


def delta_inputs(t: int, n: int = 3, dk: int = 8, dv: int = 6):
    q, k = (gated_delta.unit(torch.randn(t, n, dk, dtype=torch.float64)) for _ in range(2))
    v = torch.randn(t, n, dv, dtype=torch.float64)
    g = -torch.rand(t, n, dtype=torch.float64) * 3
    return q, k, v, g, torch.rand(t, n, dtype=torch.float64), torch.randn(n, dk, dv, dtype=torch.float64)


@pytest.mark.parametrize("t", [2, 63, 64, 65, 200])
def test_chunked_delta_rule_equals_token_by_token(t):
    q, k, v, g, beta, state = delta_inputs(t)
    out, end = gated_delta.chunked(q, k, v, g, beta, state)
    s = state[None]
    for i in range(t):
        o, s = gated_delta.step(q[i : i + 1], k[i : i + 1], v[i : i + 1], g[i : i + 1], beta[i : i + 1], s)
        assert (o[0] - out[i]).abs().max() < 1e-11
    assert (s[0] - end).abs().max() < 1e-11


def test_strong_decay_does_not_overflow_the_chunk_form():
    q, k, v, g, beta, state = (x.float() for x in delta_inputs(64))
    out, end = gated_delta.chunked(q, k, v, g * 100, beta, state)
    assert torch.isfinite(out).all() and torch.isfinite(end).all()


def test_convolution_in_pieces_equals_the_whole():
    u, w = torch.randn(11, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    zero = torch.zeros(5, 3, dtype=torch.float64)
    whole, end = gated_delta.causal_conv(u, w, zero)
    want = functional.silu(functional.conv1d(functional.pad(u.T, (3, 0))[None], w[:, None], groups=5)[0].T)
    assert (whole - want).abs().max() < 1e-12
    a, past = gated_delta.causal_conv(u[:2], w, zero)
    b, past = gated_delta.causal_conv_step(u[2:3], w, past[None])
    c, past = gated_delta.causal_conv(u[3:], w, past[0])
    assert (torch.cat([a, b, c]) - want).abs().max() < 1e-12 and torch.equal(past, end)


def test_norms():
    x, w, z = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8)
    want = functional.rms_norm(x.double(), (8,), w.double(), 1e-6)
    assert (norm.rms_norm(x, w, 1e-6) - want).abs().max() < 1e-5
    gated = norm.gated_rms_norm(x, z, w, 1e-6)
    assert (gated - want * functional.silu(z.double())).abs().max() < 1e-5  # norm before gate
