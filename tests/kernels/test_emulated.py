"""The CUDA kernels' own source, run on a CPU thread by thread: numbers, bounds, alignment, what is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp4ward.formats.formats import FORMATS
from fp4ward.formats.weight import Weight, part_shapes
from fp4ward.kernels import cuda_linear
from fp4ward.kernels.cuda_linear import Gpu
from tests.kernels.emulator import COMPILER, Emulated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
BF16, F16 = torch.bfloat16, torch.float16
SMALL, OLD, HOPPER = Gpu(3, 227 << 10, True), Gpu(8, 99 << 10, True), Gpu(3, 227 << 10, True, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def weight(name: str, n: int, k: int) -> Weight:
    """Random codes and every block scale; nothing under a scale of zero, which prepare drops."""
    torch.manual_seed(n * k)
    parts: dict[str, Tensor] = {}
    for part, (dtype, shape) in part_shapes(FORMATS[name], (n, k)).items():
        codes = torch.randint(0, 256 if dtype == torch.uint8 else 127, shape, dtype=torch.uint8)
        parts[part] = codes if dtype == torch.uint8 else codes.view(dtype) if dtype.itemsize == 1 else codes / 6e3 / k
    if name == "nvfp4":
        parts["packed"].view(n, k // 16, 8).mul_((parts["block_scale"].view(torch.uint8) != 0)[..., None])
    return Weight(FORMATS[name], parts)


CASES = (
    # narrow: all of x in shared memory, records dealt to warps
    ("nvfp4", 3, 160, 288, BF16, SMALL, {"DEPTH": 4, "WARPS": 8}),
    ("nvfp4", 9, 72, 2304, F16, SMALL, {"DEPTH": 2, "R": 2, "WARPS": 8}),
    ("nvfp4", 16, 48, 4352, BF16, SMALL, {"DEPTH": 2, "CLUSTER": 2, "R": 2, "WARPS": 8}),
    ("nvfp4", 2, 400, 640, BF16, SMALL, {"WARPS": 3, "DEPTH": 1}),
    ("nvfp4", 8, 900, 400, BF16, Gpu(9, 227 << 10, True), {"DEPTH": 4, "CLUSTER": 4, "WARPS": 4}),
    ("nvfp4", 1, 1, 48, BF16, SMALL, {"DEPTH": 4}),
    ("fp8_channel", 7, 100, 1040, BF16, SMALL, {"DEPTH": 2, "R": 2, "WARPS": 5}),
    ("fp8_tensor", 2, 33, 80, F16, SMALL, {}),
    ("fp8_block", 16, 48, 640, BF16, SMALL, {"DEPTH": 4, "CLUSTER": 2, "WARPS": 4}),
    # warpgroup: x in shared memory in the order of the products
    ("nvfp4", 64, 300, 400, BF16, HOPPER, {"GROUPS": 1, "R": 2, "CLUSTER": 1}),
    ("nvfp4", 19, 260, 1040, F16, HOPPER, {"GROUPS": 2, "R": 1, "CLUSTER": 4}),
    ("fp8_channel", 16, 64, 640, BF16, HOPPER, {"GROUPS": 1, "R": 1, "CLUSTER": 2}),
    ("nvfp4", 40, 400, 2176, BF16, HOPPER, {"GROUPS": 3, "R": 1, "CLUSTER": 3, "RING": 3}),
    ("nvfp4", 9, 100, 1152, F16, HOPPER, {"GROUPS": 3, "R": 1, "CLUSTER": 8}),  # CTAs without a stage, or without sums
    ("nvfp4", 33, 600, 1664, BF16, HOPPER, {"GROUPS": 4, "R": 2, "CLUSTER": 2, "CTAS": 1}),
    ("nvfp4", 20, 96, 880, BF16, HOPPER, {"GROUPS": 1, "R": 1, "CLUSTER": 6}),  # two blocks of six without columns
    # wide: x in shared memory, warps and clusters part K
    ("nvfp4", 17, 160, 288, BF16, SMALL, {}),
    ("nvfp4", 64, 140, 1040, F16, SMALL, {"CLUSTER": 2, "WN": 8}),
    ("nvfp4", 32, 80, 2048, BF16, SMALL, {"CLUSTER": 8, "WN": 4}),
    ("nvfp4", 1, 80, 1024, BF16, SMALL, {"CLUSTER": 1, "WN": 4}),
    ("fp8_block", 33, 80, 512, BF16, OLD, {}),
    ("nvfp4", 13, 100, 1088, BF16, SMALL, {"WARPS": 12, "WN": 3, "R": 1, "CLUSTER": 1}),
    ("nvfp4", 20, 33, 2048, F16, SMALL, {"WARPS": 8, "WN": 1, "R": 2, "CLUSTER": 1}),
    ("fp8_channel", 31, 33, 512, BF16, SMALL, {"CLUSTER": 1, "WN": 4}),
)


@pytest.mark.parametrize(("name", "m", "n", "k", "dtype", "gpu", "tuning"), CASES)
def test_a_kernel_computes_its_reference(
    folder: Path, name: str, m: int, n: int, k: int, dtype: torch.dtype, gpu: Gpu, tuning: dict[str, int]
) -> None:
    w = weight(name, n, k)
    made = cuda_linear.prepare(w)
    x = torch.randn(m, k).to(dtype)
    bias = torch.randn(n).to(dtype) if m % 2 else None
    y = torch.full((m, n), float("nan"), dtype=dtype)
    plan = cuda_linear.choose(made.kind, m, n, k, gpu, tuning)
    source = cuda_linear._source(made.kind, plan.entry, dtype == F16, plan.defines)
    tensors = (made.records, made.row_scale, x, bias, y)
    Emulated(source, folder)(plan.grid, plan.threads, plan.shared, *tensors, m, n, k, k)
    dense, off = w.dense(torch.float64), 0 if bias is None else bias.double()
    want = x.double() @ dense.T + off
    assert (y.double() - want).norm() <= 4e-3 * want.norm()
    room = x.double().abs() @ dense.abs().T + (0 if bias is None else bias.double().abs())
    assert ((y.double() - want).abs() <= torch.finfo(dtype).eps * room + 1e-30).all()


@pytest.mark.parametrize("name", ["nvfp4", "fp8_channel", "fp8_block"])
def test_packing_on_the_gpu_equals_the_definition(folder: Path, name: str) -> None:
    w = weight(name, 33, 144)
    made = cuda_linear.prepare(w)
    out = torch.zeros_like(made.records)
    tiles, steps, _ = out.shape
    codes, scales = cuda_linear._parts(w)
    grid = (-(-tiles * steps * 64 // 256), 1, 1)
    Emulated(cuda_linear._source(made.kind, "pack"), folder)(grid, 256, 16, codes, scales, out, 33, 144, tiles)
    assert torch.equal(out, made.records)
