"""Weights slice and join on logical dimensions, exactly, in every format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward.errors import UserError
from fp4ward.formats import fp8, nvfp4
from fp4ward.formats.formats import FORMATS, FP8_CHANNEL, FP8_TENSOR, NVFP4
from fp4ward.formats.weight import Weight, allocate, concat, part_shapes

UNIT = {"nvfp4": 16, "fp8_block": 128}
DENSE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
relaxed = settings(deadline=None, derandomize=True, max_examples=60)
names = st.sampled_from(sorted(FORMATS))


def make(name: str, *shape: int, seed: int = 0, size: float = 0.05) -> Weight:
    """A random weight, through the stored form of its format."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    *lead, n, k = shape
    format = FORMATS[name]
    if name == "nvfp4":
        packed, block, g = nvfp4.encode(w)
        g = nvfp4.expand_global(g, (*lead, n))
        return Weight(format, {"packed": packed, "block_scale": block, "global_scale": g})
    if name in DENSE:
        return Weight(format, {"data": w.to(DENSE[name])})
    data, scale = fp8.encode(w, name.removeprefix("fp8_"))
    return Weight(format, {"data": data, "scale": fp8.expand_scale(scale, n, k, tuple(lead))})


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("shape", [(160, 288), (3, 20, 288), (1, 640), (5, 704), (2, 1856)])  # B19
def test_dense_is_mantissa_times_row_scale(name, shape):
    weight = make(name, *shape)
    assert weight.shape == shape
    dense = weight.dense(torch.float64)
    scale = weight.row_scale()
    assert (scale is None) == (name == "fp8_block" or name in DENSE)
    mantissa = weight.mantissa(torch.float64)
    if scale is not None:
        assert scale.dtype == torch.float32
        assert scale.shape == shape[:-1]
        mantissa = mantissa * scale.double()[..., None]
        assert torch.equal(weight.mantissa(torch.bfloat16).double(), weight.mantissa(torch.float64))  # exact
    assert torch.equal(dense, mantissa)
    assert torch.equal(weight.dense(), dense.float())
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    error = ((dense - w).norm() / w.norm()).item()
    assert error < {"nvfp4": 0.11, "f32": 1e-12, "f16": 1e-3, "bf16": 3e-3}.get(name, 0.03)


@given(names, st.integers(1, 200), st.data())
@relaxed
def test_decoding_a_slice_is_slicing_the_decoded(name, n, data):
    unit = UNIT.get(name, 1)
    k = data.draw(st.integers(1, 20)) * 16
    lead = data.draw(st.sampled_from([(), (3,)]))
    weight = make(name, *lead, n, k)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    left = data.draw(st.integers(0, k // unit)) * unit
    right = data.draw(st.sampled_from([*range(left, k, unit), k]))
    whole = weight.dense()
    want = whole[..., start:stop, left:right]
    for piece in (weight.rows(start, stop).columns(left, right), weight.columns(left, right).rows(start, stop)):
        assert piece.shape == want.shape
        assert torch.equal(piece.dense(), want)
        assert torch.equal(piece.mantissa(torch.bfloat16), weight.mantissa(torch.bfloat16)[..., start:stop, left:right])
    if lead:
        assert torch.equal(weight.expert(2).dense(), whole[2])


@given(names, st.lists(st.integers(1, 150), min_size=1, max_size=4), st.integers(1, 20), st.sampled_from([(), (2,)]))
@relaxed
def test_decoding_a_concatenation_is_concatenating_the_decoded(name, heights, columns, lead):  # F17, B25
    pieces = [
        make(name, *lead, n, 16 * columns, seed=i, size=0.01 * 3**i)  # global scales differ widely
        for i, n in enumerate(heights)
    ]
    joined = concat(pieces)
    assert joined.shape == (*lead, sum(heights), 16 * columns)
    assert torch.equal(joined.dense(torch.float64), torch.cat([p.dense(torch.float64) for p in pieces], -2))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_stacked_experts_index_back(name):
    experts = [make(name, 24, 144, seed=i, size=0.1 + i) for i in range(3)]
    names = experts[0].parts
    stacked = Weight(experts[0].format, {part: torch.stack([w.parts[part] for w in experts]) for part in names})
    assert stacked.shape == (3, 24, 144)
    for e, expert in enumerate(experts):
        assert torch.equal(stacked.expert(e).dense(), expert.dense())
    for e in (-1, 3):  # F29
        with pytest.raises(IndexError, match="does not exist"):
            stacked.expert(e)
    with pytest.raises(IndexError):
        experts[0].expert(0)


def test_unequal_globals_stay_exact_per_row():  # F17, B25
    parts = []
    for g in (3.85e-5, 4.83e-5, 1 / 12343.1):
        block = torch.full((2, 1), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        rows = torch.full((2,), g)
        packed = torch.full((2, 8), 0x22, dtype=torch.uint8)
        parts.append(Weight(NVFP4, {"packed": packed, "block_scale": block, "global_scale": rows}))
    joined = concat(parts)
    want = torch.tensor([3.85e-5, 3.85e-5, 4.83e-5, 4.83e-5, 1 / 12343.1, 1 / 12343.1])
    assert torch.equal(joined.dense()[:, 0], want)
    assert torch.equal(joined.row_scale(), want)


def test_row_chunks_are_views_and_give_the_whole():
    weight = make("nvfp4", 50, 64)
    for start in range(0, 50, 16):
        chunk = weight.rows(start, min(50, start + 16))
        for name, part in chunk.parts.items():
            assert part.untyped_storage().data_ptr() == weight.parts[name].untyped_storage().data_ptr()
        assert torch.equal(chunk.mantissa(torch.float32), weight.mantissa(torch.float32)[start : start + 16])


def test_f16_row_scale_stays_f32():  # F19, F24
    weight = make("nvfp4", 4, 32, size=1e5)
    assert weight.mantissa(torch.float16).abs().max() <= 2688
    assert weight.row_scale().dtype == torch.float32
    assert weight.dense().isfinite().all()


def test_misaligned_or_missing_ranges_are_refused():
    for name, start, stop in [("nvfp4", 8, 32), ("nvfp4", 0, 24), ("fp8_block", 64, 128), ("fp8_block", 0, 200)]:
        with pytest.raises(UserError, match=f"columns {start}:{stop} of a {name} weight .* cut through a block"):
            make(name, 4, 288).columns(start, stop)
    weight = make("bf16", 4, 288)
    for start, stop in [(-1, 2), (3, 2), (0, 5)]:
        with pytest.raises(UserError, match="rows"):
            weight.rows(start, stop)
    with pytest.raises(UserError, match="columns 0:289"):
        weight.columns(0, 289)


def test_joining_needs_one_format():
    nv, channel, tensor = make("nvfp4", 4, 32), make("fp8_channel", 4, 32), make("fp8_tensor", 4, 32)
    with pytest.raises(UserError, match=r"different formats .*: fp8_channel W8A16, nvfp4 W4A16"):  # F4
        concat([nv, channel])
    with pytest.raises(ValueError, match="no weights"):
        concat([])
    a4 = Weight(NVFP4.with_activation("nvfp4"), nv.parts)
    with pytest.raises(UserError, match="nvfp4 W4A16, nvfp4 W4A4"):
        concat([nv, a4])
    assert concat([a4, a4]).format == a4.format
    mixed = concat([tensor, channel])
    assert mixed.format == FP8_CHANNEL
    assert concat([tensor, tensor]).format == FP8_TENSOR
    assert torch.equal(mixed.dense(), torch.cat([tensor.dense(), channel.dense()]))
    with pytest.raises(UserError, match="along N"):
        concat([nv, make("nvfp4", 4, 48)])


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("shape", [(20, 160), (3, 20, 160), (0, 160)])
def test_allocated_parts_take_a_weight_of_the_same_shape(name, shape):
    empty = allocate(FORMATS[name], shape)
    assert empty.shape == shape
    assert empty.nbytes == sum(p.nbytes for p in empty.parts.values())
    if 0 in shape:
        return
    full = make(name, *shape)
    for part, tensor in full.parts.items():
        empty.parts[part].copy_(tensor)
    assert torch.equal(empty.dense(), full.dense())
    assert empty.nbytes == full.nbytes
    assert full.to("cpu").device == torch.device("cpu")
    assert full.to("meta").device.type == "meta"


def test_bytes_match_the_format():
    n, k = 256, 512
    assert make("nvfp4", n, k).nbytes == n * k * NVFP4.bits / 8 + 4 * n
    assert make("fp8_block", n, k).nbytes == n * k + 4 * n * k // 128
    assert make("bf16", n, k).nbytes == 2 * n * k


def test_parts_that_do_not_match_are_refused():
    good = make("nvfp4", 4, 32)
    wrong = {
        "global_scale": torch.ones(1),
        "block_scale": good.parts["block_scale"].float(),
        "packed": good.parts["packed"][:3],
    }
    for part, tensor in wrong.items():
        with pytest.raises(ValueError, match="do not make a nvfp4 weight"):
            Weight(NVFP4, {**good.parts, part: tensor})
    with pytest.raises(UserError, match="K=24 must be a multiple of 16"):
        part_shapes(NVFP4, (4, 24))
