"""FP8 numbers: every code, every stored shape of a scale, saturation, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from fp4ward.errors import UserError
from fp4ward.formats import fp8

INTS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def e4m3(byte: int) -> float:
    """From the bit fields: sign, four exponent bits with bias 7, three mantissa bits."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    value = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 0x80 else value


def codes(data: list[int]) -> torch.Tensor:
    return torch.tensor(data, dtype=torch.uint8).view(torch.float8_e4m3fn)


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05


@pytest.mark.parametrize("dtype", sorted(INTS, key=str))
def test_every_code_widens_exactly(dtype):
    finite = [b for b in range(256) if b & 0x7F != 0x7F]
    assert len([b for b in finite if b < 128]) == 127
    got = fp8.widen(codes(finite), dtype)
    exact = torch.tensor([e4m3(b) for b in finite], dtype=torch.float64)
    assert torch.equal(got.double(), exact)
    assert torch.equal(got.view(INTS[dtype]), exact.to(dtype).view(INTS[dtype]))  # the sign of zero too
    assert fp8.widen(codes([0x7F, 0xFF]), dtype).isnan().all()


def test_widen_follows_views():
    data = codes(list(range(96))).view(8, 12)
    assert torch.equal(fp8.widen(data[2:5, 3:7], torch.float32), data.float()[2:5, 3:7])
    assert fp8.widen(data[:0], torch.float32).shape == (0, 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_casting_saturates_and_rounds_to_even(dtype):
    x = torch.tensor([448, 464, 465, 1e30, -500, math.inf, -math.inf, 0, 2**-10, 2**-9, 17, 19], dtype=dtype)
    want = [448, 448, 448, 448, -448, 448, -448, 0, 0, 2**-9, 16, 20]
    assert fp8.to_e4m3(x).float().tolist() == want
    assert fp8.to_e4m3(torch.tensor([math.nan], dtype=dtype)).float().isnan().all()


@pytest.mark.parametrize(
    ("stored", "lead", "wide"),
    [
        ((), (), 1),
        ((1,), (), 1),
        ((160,), (), 1),
        ((160, 1), (), 1),
        ((2, 3), (), 3),
        ((2, 1, 3, 1), (), 3),
        ((), (4,), 1),
        ((4,), (4,), 1),
        ((4, 1), (4,), 1),
        ((4, 160), (4,), 1),
        ((4, 160, 1), (4,), 1),
        ((4, 2, 3), (4,), 3),
        ((4, 2, 1, 3, 1), (4,), 3),
    ],
)
def test_every_stored_scale_expands_to_rows(stored, lead, wide):
    n, k = 160, 288  # B19: the last blocks are short
    scale = torch.arange(1, math.prod(stored) + 1, dtype=torch.bfloat16).reshape(stored) / 4
    got = fp8.expand_scale(scale, n, k, lead)
    assert got.shape == (*lead, n, wide)
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    values = scale.float()
    if not stored or stored == (1,):
        want = values.reshape(()).expand(got.shape)
    elif math.prod(stored) == math.prod(lead):
        want = values.reshape(*lead, 1, 1).expand(got.shape)
    elif wide == 1:
        want = values.reshape(*lead, n, 1)
    else:
        rows = torch.arange(n) // 128
        want = values.reshape(*lead, 2, 3)[..., rows, :]
    assert torch.equal(got, want)


def test_a_scale_of_another_shape_is_refused():
    for stored in [(3,), (288,), (1, 160), (3, 2), (2, 160)]:
        with pytest.raises(UserError, match="does not fit a weight"):
            fp8.expand_scale(torch.ones(stored), 160, 288)


@pytest.mark.parametrize("shape", [(160, 288), (256, 256), (130, 100), (2, 160, 288)])
@pytest.mark.parametrize("scaling", ["tensor", "channel", "block"])
def test_decode_is_the_inverse_of_encode(shape, scaling):
    w = weight(*shape)
    data, scale = fp8.encode(w, scaling)
    got = fp8.decode(data, scale, torch.float64)
    *lead, n, k = shape
    if scaling == "block":
        assert scale.shape == (*lead, -(-n // 128), -(-k // 128))
        each = scale[..., torch.arange(n) // 128, :][..., torch.arange(k) // 128]
    else:
        each = scale.reshape(*lead, 1, 1) if scaling == "tensor" else scale
    assert torch.equal(got, data.double() * each.double())
    assert torch.equal(fp8.decode(data, scale), (data.double() * each.double()).float())
    assert torch.equal(fp8.decode(data, scale, torch.bfloat16), (data.double() * each.double()).float().bfloat16())
    # Half of the last of 3 mantissa bits, or half the smallest subnormal.
    assert ((got - w).abs() <= torch.maximum(w.abs() * 2**-4, each * 2**-10) * 1.001).all()
    again, same = fp8.encode(got, scaling)
    assert torch.equal(again.float(), data.float())
    assert torch.allclose(same, scale, rtol=2**-22, atol=0)


def test_a_four_dimensional_block_scale_means_the_same():
    data, scale = fp8.encode(weight(160, 288), "block")
    assert torch.equal(fp8.decode(data, scale[:, None, :, None]), fp8.decode(data, scale))


def test_a_zero_weight_encodes_legally():
    for scaling in ("tensor", "channel", "block"):
        data, scale = fp8.encode(torch.zeros(3, 200), scaling)
        fp8.check_scale("s", scale, data)
        assert (scale == 1).all()
        assert not fp8.decode(data, scale).any()
    with pytest.raises(ValueError, match="unknown FP8 scaling"):
        fp8.encode(torch.zeros(3, 200), "token")


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_codes_are_named_with_their_index(byte):
    data = torch.full((3, 4, 5), 0xB8, dtype=torch.uint8)
    fp8.check_data("w", data.view(torch.float8_e4m3fn))
    fp8.check_data("w", data.view(torch.float8_e4m3fn)[:0])
    data[1, 3, 0] = byte
    data[2] = 0x7E
    with pytest.raises(UserError, match=rf"tensor a\.weight: NaN \(byte {byte:#x}\) at \[1, 3, 0\]"):
        fp8.check_data("a.weight", data.view(torch.float8_e4m3fn))


def test_every_finite_code_is_legal():
    fp8.check_data("w", codes([b for b in range(256) if b & 0x7F != 0x7F]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5])
def test_a_bad_scale_is_named_with_its_index(value):
    data, scale = fp8.encode(weight(160, 288), "block")
    scale = scale[:, None, :, None].clone()
    fp8.check_scale("s", scale, data)
    scale[1, 0, 2, 0] = value
    with pytest.raises(UserError, match=r"tensor a\.weight_scale: FP8 scale \S+ at \[1, 0, 2, 0\]"):
        fp8.check_scale("a.weight_scale", scale, data)


@pytest.mark.parametrize(("scaling", "where"), [("channel", "[5, 0]"), ("block", "[128, 256]")])
def test_a_zero_scale_is_legal_over_zero_codes_only(scaling, where):
    data, scale = fp8.encode(weight(160, 288), scaling)
    row, column = (5, slice(None)) if scaling == "channel" else (slice(128, None), slice(256, None))
    scale[(5, 0) if scaling == "channel" else (1, 2)] = 0
    with pytest.raises(UserError, match="erases the weight at " + where.replace("[", r"\[")):
        fp8.check_scale("s", scale, data)
    data.view(torch.uint8)[row, column] = 0x80  # minus zero is zero
    fp8.check_scale("s", scale, data)
