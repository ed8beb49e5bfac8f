"""Quantized inputs through torch's scaled products, against references that round the inputs alike."""

from __future__ import annotations

import pytest
import torch

from fp4ward.formats import fp8, nvfp4
from fp4ward.formats.formats import FP8_CHANNEL, FP8_TENSOR, NVFP4, Format
from fp4ward.formats.weight import Weight
from fp4ward.kernels import linear, scaled_mm

GPU = torch.cuda.is_available()
SM = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1] if GPU else 0
DEVICE = "cuda" if GPU else "cpu"
SHAPES = [(48, 64), (512, 288), (160, 1856), (704, 640)]  # B19


def make(format: Format, n: int, k: int) -> Weight:
    w = torch.randn(n, k) * torch.rand(n, 1)
    if format is NVFP4:
        packed, scale, glob = nvfp4.encode(w)
        parts = {"packed": packed, "block_scale": scale, "global_scale": nvfp4.expand_global(glob, (n,))}
        parts["global_scale"] = parts["global_scale"] * (1 + torch.rand(n))  # F17
    else:
        data, scale = fp8.encode(w, "tensor" if format is FP8_TENSOR else "channel")
        parts = {"data": data, "scale": fp8.expand_scale(scale, n, k)}
    return Weight(format, parts).to(DEVICE)


def tokens(t: int, k: int) -> torch.Tensor:
    x = torch.randn(t, k, device=DEVICE, dtype=torch.bfloat16) * torch.logspace(-2, 2, t, device=DEVICE)[:, None]
    return x.bfloat16()


def off(y: torch.Tensor, want: torch.Tensor) -> float:
    assert y.isfinite().all() and y.shape == want.shape
    return float((y.double() - want.double()).norm() / want.double().norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("format", [FP8_TENSOR, FP8_CHANNEL], ids=lambda f: f.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_w8a8_equals_its_reference(format: Format, shape: tuple[int, int]) -> None:
    if GPU and SM < 89:
        pytest.skip("no FP8 tensor cores")
    w = make(format, *shape)
    for t in (1, 3, 64, 200):
        x = tokens(t, shape[1])
        assert off(scaled_mm.fp8_linear(x, w), scaled_mm.fp8_reference(x.float(), w)) < 4e-3
    alone = scaled_mm.fp8_linear(x[7:8], w)
    assert off(alone, scaled_mm.fp8_linear(x, w)[7:8]) < 4e-3
    view = w.rows(16, 48)
    assert off(scaled_mm.fp8_linear(x, view), scaled_mm.fp8_reference(x.float(), view)) < 4e-3


@pytest.mark.parametrize(("quantized", "format", "most"), [("fp8", FP8_CHANNEL, 0.04), ("nvfp4", NVFP4, 0.14)])
def test_the_references_lose_what_their_formats_lose(quantized: str, format: Format, most: float) -> None:
    """Rounding of the inputs alone stands between W8A8 or W4A4 and exact inputs: e4m3 has 4 bits, e2m1 2."""
    w, x = make(format, 48, 640), tokens(40, 640).double()
    reference = getattr(scaled_mm, f"{quantized}_reference")
    loss = off(reference(x, w), linear.reference(x, w))
    assert most / 3 < loss < most
    assert off(reference(x[3:4], w), reference(x, w)[3:4]) < 1e-12  # a token's scale is its own; a GPU's order of sums
    assert reference(torch.zeros_like(x[:2]), w).eq(0).all() and reference(x[:0], w).shape == (0, 48)


def test_scales_are_swizzled_as_cublas_reads_them() -> None:
    rows, groups = 160, 18
    scale = torch.randint(1, 127, (rows, groups), dtype=torch.uint8).view(torch.float8_e4m3fn)
    flat = scaled_mm.swizzled(scale).view(torch.uint8)
    assert len(flat) == 256 * 20
    for r, g in ((0, 0), (31, 3), (32, 0), (127, 17), (128, 5), (159, 17)):
        at = ((r // 128) * 5 + g // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + g % 4
        assert flat[at] == scale.view(torch.uint8)[r, g]
    assert int((flat != 0).sum()) == rows * groups


@pytest.mark.parametrize("shape", SHAPES)
def test_w4a4_equals_its_reference(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no FP4 tensor cores, against a product that reads its arguments as cuBLAS would."""

    def product(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *, output_dtype):
        def dense(packed, flat):
            rows, groups = packed.shape[0], packed.shape[1] // 8
            tiles = flat.view(-(-rows // 128), -(-groups // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
            blocks = tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :groups]
            return nvfp4.mantissa(packed.view(torch.uint8), blocks, torch.float64)

        assert recipe_a == recipe_b == torch.nn.functional.ScalingType.BlockWise1x16 and swizzle_a == swizzle_b
        return (dense(a, scale_a) @ dense(b.t(), scale_b).T).to(output_dtype)

    if SM < 100:
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)
    w = make(NVFP4, *shape)
    for t in (1, 3, 130):
        x, prepared = tokens(t, shape[1]), scaled_mm.nvfp4_prepare(w)
        assert off(scaled_mm.nvfp4_linear(x, prepared), scaled_mm.nvfp4_reference(x.float(), w)) < 4e-3
