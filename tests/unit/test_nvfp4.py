"""NVFP4 numbers against Python arithmetic, compressed-tensors and real exporter output."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fp4ward.errors import UserError
from fp4ward.formats import nvfp4

FIXTURES = Path(__file__).parent.parent / "fixtures"
INTS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
ALL_DTYPES = sorted(INTS, key=str)


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(INTS[x.dtype]).flatten().tolist()


def e2m1(code: int) -> float:
    """From the bit fields: sign, two exponent bits with bias 1, one mantissa bit."""
    exponent, fraction = code >> 1 & 3, code & 1
    value = fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -value if code & 8 else value


def e4m3(byte: int) -> float:
    exponent, fraction = byte >> 3 & 15, byte & 7
    value = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 0x80 else value


def f32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def scales(data: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(data, dtype=torch.uint8).view(torch.float8_e4m3fn)


def weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


BYTES = [b for b in range(256) if b & 0x7F != 0x7F]
EVERY_CODE = torch.tensor([[(2 * i + 1) << 4 | 2 * i for i in range(8)]] * len(BYTES), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_code_times_every_scale_is_exact(dtype):
    got = nvfp4.mantissa(EVERY_CODE, scales([[b] for b in BYTES]), dtype)
    # A Python float holds the product exactly; the cast to `dtype` below must not change it.
    exact = [e2m1(code) * e4m3(b) for b in BYTES for code in range(16)]
    assert got.double().flatten().tolist() == exact
    assert bits(got) == bits(torch.tensor(exact, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("g", [8.1017e-5, 3.85e-5, 1.0, 7.25e-12, 301.7])
def test_decode_rounds_once_in_f32_and_not_at_all_in_f64(g):
    g = f32(g)
    exact = [e2m1(code) * e4m3(b) * g for b in BYTES for code in range(16)]  # 6 + 24 bits: exact in a double
    block = scales([[b] for b in BYTES])
    assert bits(nvfp4.decode(EVERY_CODE, block, g, torch.float64)) == bits(torch.tensor(exact, dtype=torch.float64))
    rounded = torch.tensor([f32(x) for x in exact])
    assert bits(nvfp4.decode(EVERY_CODE, block, g)) == bits(rounded)
    assert bits(nvfp4.decode(EVERY_CODE, block, g, torch.bfloat16)) == bits(rounded.bfloat16())


def test_low_nibble_comes_first():
    packed = torch.tensor([[0x21, 0xF9]], dtype=torch.uint8)
    assert nvfp4.decode_codes(packed).tolist() == [[0.5, 1.0, -0.5, -6.0]]


def test_scale_bytes_of_both_ends_live_in_one_tensor():  # F18, F20
    block = scales([[0x38, 0x40, 0x3C, 0x48, 0x7E, 0x01, 0x07, 0x00, 0x80]])
    ones = torch.full((1, 8 * 9), 0x22, dtype=torch.uint8)
    for dtype in ALL_DTYPES:
        values = nvfp4.mantissa(ones, block, dtype)[0, ::16]
        assert values.tolist() == [1, 2, 1.5, 4, 448, 2**-9, 7 * 2**-9, 0, 0]


def test_global_scale_keeps_f32():  # F19
    packed, block, _ = nvfp4.encode(weight(8, 32))
    g = torch.tensor(1.00390e-4)  # close to half-way between two bf16 numbers
    rough = nvfp4.decode(packed, block, g.bfloat16())
    fine = nvfp4.decode(packed, block, g)
    error = ((rough - fine).abs().max() / fine.abs().max()).item()
    assert 1e-3 < error < 4e-3
    exact = nvfp4.decode(packed, block, g, torch.float64)
    assert ((fine - exact).abs() <= 2**-24 * exact.abs()).all()


def test_large_global_scale_does_not_overflow_f16():  # F24
    packed = torch.full((1, 8), 0x77, dtype=torch.uint8)
    block = scales([[0x7E]])
    assert nvfp4.mantissa(packed, block, torch.float16).max() == 2688
    assert nvfp4.decode(packed, block, 1e6).max() == f32(2688e6)


def test_global_scale_per_tensor_per_expert_and_per_row():
    w = torch.stack([weight(5, 32, seed) * (seed + 1) for seed in range(3)])
    packed, block, g = nvfp4.encode(w)
    assert g.shape == (3,)
    rows = nvfp4.expand_global(g, (3, 5))
    assert torch.equal(rows, g[:, None].expand(3, 5))
    whole = nvfp4.decode(packed, block, g)
    assert torch.equal(whole, nvfp4.decode(packed, block, rows))
    assert torch.equal(nvfp4.decode(packed, block, g.reshape(3, 1)), whole)
    for e in range(3):
        assert torch.equal(nvfp4.decode(packed[e], block[e], g[e]), whole[e])
        assert [t.tolist() for t in nvfp4.encode(w[e])[0::2]] == [packed[e].tolist(), g[e].tolist()]
    assert torch.equal(nvfp4.decode(packed[0], block[0], g[:1]), whole[0])  # F11: shape [1] as well as []
    with pytest.raises(UserError, match=r"\[4\] does not fit"):
        nvfp4.decode(packed, block, torch.ones(4))


@pytest.mark.parametrize(
    ("x", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.01, 7), (1e9, 7), (0.2501, 1)],
)
def test_ties_round_to_the_even_code_and_large_values_saturate(x, code):
    assert nvfp4.round_e2m1(torch.tensor([x, -x])).tolist() == [code, code | 8]


def test_rounding_picks_the_nearest_value():
    x = torch.linspace(-7, 7, 2801, dtype=torch.float64)
    grid = torch.tensor(nvfp4.E2M1, dtype=torch.float64)
    got = grid[nvfp4.round_e2m1(x).long()]
    best = (x[:, None] - grid).abs().amin(-1)
    assert torch.equal((x - got).abs(), best)


@pytest.mark.parametrize(("n", "k"), [(160, 288), (7, 1856), (3, 704), (1, 640), (2, 16)])  # B19
def test_odd_shapes_encode_within_half_a_step(n, k):
    w = weight(n, k)
    packed, block, g = nvfp4.encode(w)
    assert (packed.shape, block.shape, g.shape) == ((n, k // 2), (n, k // 16), ())
    # Half the widest step is 1 (between 4 and 6), and 6 may stand for up to 6.4 after the scale was rounded.
    step = (block.double() * g.double()).repeat_interleave(16, -1)
    assert ((nvfp4.decode(packed, block, g, torch.float64) - w).abs() <= step * 1.001).all()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31), st.sampled_from([1e-6, 0.02, 1.0, 4e3]), st.booleans()
)
def test_encoding_a_decoded_weight_gives_the_same_bytes(n, blocks, seed, size, zero):
    w = weight(n, 16 * blocks, seed) * size
    if zero:
        w[0, :16] = 0
    packed, block, g = nvfp4.encode(w)
    again = nvfp4.encode(nvfp4.decode(packed, block, g, torch.float64))
    assert torch.equal(again[0] & 0x77, packed & 0x77)  # a value that rounded to -0 comes back as +0
    assert torch.equal(again[1].float(), block.float())
    assert again[2] == g
    fast = nvfp4.encode(nvfp4.decode(packed, block, g))
    assert torch.equal(fast[0] & 0x77, packed & 0x77)
    assert math.isclose(fast[2], g, rel_tol=2**-23)


def test_an_all_zero_weight_encodes_legally():
    packed, block, g = nvfp4.encode(torch.zeros(2, 32))
    assert nvfp4.check_block_scale("w", block) is False
    assert nvfp4.check_global("w", g.item(), all_zero_blocks=False, expert=False) == 1
    assert not nvfp4.decode(packed, block, g).any()


def test_weights_that_cannot_be_encoded_are_refused():
    with pytest.raises(UserError, match="multiple of 16"):
        nvfp4.encode(torch.ones(2, 24))
    with pytest.raises(UserError, match="NaN or Inf"):
        nvfp4.encode(torch.full((2, 16), float("nan")))


def test_activations_are_quantized_as_the_exporter_calibrated_them():
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(5))
    x[1, 16:32] = 0
    x[2] *= 1e-5
    scale = x.abs().max().item() / (6 * 448) * 0.5  # amax seen in calibration was smaller: blocks must saturate
    packed, block = nvfp4.quantize_activation(x, scale)
    assert block.float().max() == 448
    assert block[1, 1].float() == 2**-9
    got = nvfp4.decode(packed, block, scale).reshape(-1, 16)
    grid = sorted({e2m1(c) for c in range(16)})
    even = {e2m1(c) for c in range(0, 16, 2)}
    g = torch.tensor(scale)
    for group, values in zip(x.reshape(-1, 16), got, strict=True):
        s = (group.abs().max() / (6 * g)).clamp(2**-9, 448).to(torch.float8_e4m3fn).float() * g
        for element, value in zip((group / s).tolist(), values, strict=True):
            near = min(grid, key=lambda q: (abs(q - element), q not in even))
            assert value.item() == pytest.approx(near * s.item(), rel=2e-7, abs=0)


@pytest.mark.parametrize(("byte", "what"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0xB8, r"negative \(-1")])
@pytest.mark.parametrize("zero", [0x80, 0x00])
def test_a_bad_block_scale_is_named_with_its_index(byte, what, zero):  # F21
    block = torch.full((2, 3, 5), 0x38, dtype=torch.uint8)
    block[0, 1, 1] = zero
    block[1, 2, 3] = block[1, 2, 4] = byte
    with pytest.raises(UserError, match=rf"tensor a\.weight_scale: .*\[1, 2, 3\] is {what}"):
        nvfp4.check_block_scale("a.weight_scale", block.view(torch.float8_e4m3fn))


def test_zero_block_scales_are_legal_and_reported():  # F22
    assert nvfp4.check_block_scale("s", scales([[0, 0], [0, 0]])) is True
    assert nvfp4.check_block_scale("s", scales([[0, 0x80]])) is True
    assert nvfp4.check_block_scale("s", scales([[0, 0x01]])) is False
    assert nvfp4.check_block_scale("s", scales([[0x80, 0x7E]])) is False


@pytest.mark.parametrize("value", [0.0, -1e-4, math.nan, math.inf, -math.inf])  # B26
def test_a_bad_global_scale_is_refused(value):
    for zero, expert in [(False, False), (True, False), (False, True)]:
        with pytest.raises(UserError, match=r"tensor m\.weight_scale_2: the global scale is"):
            nvfp4.check_global("m.weight_scale_2", value, all_zero_blocks=zero, expert=expert)


def test_an_expert_that_was_never_used_outputs_zero():  # F22, B26
    packed = torch.full((2, 8), 0x77, dtype=torch.uint8)
    for stored in (0.0, math.inf):
        g = nvfp4.check_global("g", stored, all_zero_blocks=True, expert=True)
        assert not nvfp4.decode(packed, scales([[0], [0]]), g).any()
    for stored in (-1.0, math.nan):
        with pytest.raises(UserError):
            nvfp4.check_global("g", stored, all_zero_blocks=True, expert=True)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (160, 288), (3, 704)])
def test_compressed_tensors_packs_and_unpacks_the_same(n, k):
    base = pytest.importorskip("compressed_tensors.compressors.base")
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    w = weight(n, k, seed=3)
    w[1, 0] = 1.3
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    stored_global = generate_gparam(w.min(), w.max())
    groups = w.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=stored_global)
    tool = base.BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    stored = tool.compress({"weight": w, "weight_scale": scale, "weight_global_scale": stored_global}, scheme)
    packed, block, g = nvfp4.encode(w)
    assert torch.equal(packed, stored["weight_packed"])
    assert torch.equal(block.float(), stored["weight_scale"].float())
    assert math.isclose(g, 1 / stored_global, rel_tol=2**-22)
    ours = nvfp4.decode(packed, block, 1 / stored_global)
    theirs = tool.decompress(dict(stored), scheme)["weight"]  # computed in bf16: scale, global and product rounded
    assert ((theirs.float() - ours).abs() <= 2**-7 * ours.abs()).all()


@pytest.mark.parametrize("folder", sorted(p.name for p in FIXTURES.iterdir()))
def test_exported_tensors_are_legal_and_encode_back_to_their_bytes(folder):
    count = 0
    with safe_open(FIXTURES / folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        for name in sorted(names):
            stem, _, leaf = name.rpartition(".")
            ct = leaf == "weight_packed"
            if not ct and not (leaf == "weight" and f"{stem}.weight_scale_2" in names):
                continue
            packed, block = file.get_tensor(name), file.get_tensor(f"{stem}.weight_scale")
            g = file.get_tensor(f"{stem}.weight_{'global_scale' if ct else 'scale_2'}")
            g = 1 / g if ct else g
            assert not nvfp4.check_block_scale(name, block)
            nvfp4.check_global(name, g.item(), all_zero_blocks=False, expert=False)
            w = nvfp4.decode(packed, block, g, torch.float64)
            again, scale = nvfp4.quantize_activation(w, g)  # the same formula, with a given global scale
            assert torch.equal(again & 0x77, packed & 0x77)
            assert torch.equal(scale.float(), block.float())
            count += 1
            if count == 24:
                break
    assert count
