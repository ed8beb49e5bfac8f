"""The house that compiles, keeps and launches CUDA kernels; on a CPU, with a driver that only writes down its calls."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fp4ward import cli, hardware
from fp4ward.errors import UserError
from fp4ward.kernels import nvrtc
from fp4ward.kernels.nvrtc import Source
from fp4ward.kernels.specs import SPECS, TESTED

SOURCE = """
#include "more.cuh"
extern "C" __global__ void scale(const float* x, float* y, int count, float by) {
    if (threadIdx.x < count) y[threadIdx.x] = more(x[threadIdx.x]) * by * TIMES;
}
extern "C" __global__ void spill(const float* x, float* y, int at) {
    float kept[1024];
    for (int i = 0; i < 1024; ++i) kept[i] = x[i * at];
    y[0] = kept[at] + kept[at + 1];
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nvrtc, "folder", tmp_path / "cache")
    monkeypatch.setattr(nvrtc, "_memory", {})
    (tmp_path / "k.cu").write_text(SOURCE)
    (tmp_path / "more.cuh").write_text("__device__ float more(float x) { return x + 1; }\n")
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(str(tmp_path / "k.cu"), (("TIMES", 2),), "scale")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """What the compiler was asked for; the memory of this process is forgotten before each look."""
    asked: list[Source] = []
    real = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda s, arch: asked.append(s) or real(s, arch))
    return asked


def again(source: Source, arch: str = "sm_80") -> nvrtc.Binary:
    nvrtc._memory.clear()
    return nvrtc.binary(source, arch)


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.suffix != ".lock")


# --- compiling and keeping --------------------------------------------------------------------------------------------


def test_names_of_targets() -> None:
    assert [nvrtc.arch(sm) for sm in (80, 86, 89, 90, 100, 103, 120, 121)] == [
        "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_103a", "sm_120f", "sm_120f",
    ]  # fmt: skip


def test_a_kernel_is_machine_code_with_its_registers_and_spills(source: Source) -> None:
    made = nvrtc.binary(source, "sm_90a")
    assert made.code[:4] == b"\x7fELF" and made.code == nvrtc.cubin(source, "sm_90a")
    assert 4 <= made.registers <= 32 and made.spills == 0
    assert nvrtc.binary(Source(source.file, source.defines, "spill"), "sm_90a").spills >= 4096  # an array in memory


def test_the_second_process_reads_what_the_first_compiled(source: Source, compiled: list[Source], folder: Path) -> None:
    first = again(source)
    assert again(source) == first and compiled == [source]
    assert len(entries(folder)) == 1


def test_all_that_decides_the_code_names_the_entry(source: Source, compiled: list[Source], folder: Path) -> None:
    again(source)
    again(source, "sm_86")
    again(Source(source.file, (("TIMES", 3),), "scale"))
    again(Source(source.file, source.defines, "spill"))
    include = Path(source.file).with_name("more.cuh")
    include.write_text(include.read_text().replace("+ 1", "+ 2"))
    again(source)
    Path(source.file).write_text(SOURCE + "\n// changed\n")
    again(source)
    assert len(compiled) == len(entries(folder)) == 6


@pytest.mark.parametrize("damage", [b"", b"not ours", None])
def test_a_damaged_entry_is_compiled_again(
    source: Source, compiled: list[Source], folder: Path, damage: bytes | None
) -> None:
    good = again(source)
    (entry,) = entries(folder)
    data = entry.read_bytes()
    entry.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage is None else damage)
    assert again(source) == good and len(compiled) == 2
    assert again(source) == good and len(compiled) == 2, "the entry was repaired"


def test_a_folder_that_takes_no_files_is_survived(
    source: Source, compiled: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(nvrtc, "folder", tmp_path / "file" / "cache")  # for root too, whom no permission stops
    assert nvrtc.binary(source, "sm_80") == nvrtc.binary(source, "sm_80")
    assert len(compiled) == 1, "memory keeps it"
    assert nvrtc.warm([source], "sm_80") == 0


def test_no_home_and_no_room_are_survived(
    source: Source, compiled: list[Source], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with monkeypatch.context() as m:
        m.setattr(nvrtc, "folder", None)
        m.setattr(Path, "home", homeless)
        again(source)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(nvrtc.os, "replace", full)
        again(source)
    assert entries(folder) == [] and len(compiled) == 2


WAITER = """
import sys, time
from pathlib import Path
from fp4ward.kernels import nvrtc
log, real = Path(sys.argv[1]), nvrtc._compile
def slow(source, arch):
    with log.open("a") as f: f.write("x")
    time.sleep(1)
    return real(source, arch)
nvrtc._compile, nvrtc.folder = slow, Path(sys.argv[2])
print(len(nvrtc.cubin(nvrtc.Source(sys.argv[3], (("TIMES", 2),), "scale"), "sm_80")))
"""


def start(repo: Path, log: Path, folder: Path, source: Source) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITER, str(log), str(folder), source.file]
    return subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE, text=True)


def test_ranks_that_start_together_compile_once(repo: Path, tmp_path: Path, source: Source, folder: Path) -> None:
    log = tmp_path / "log"
    ranks = [start(repo, log, folder, source) for _ in range(2)]
    sizes = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0] and len(sizes) == 1
    assert log.read_text() == "x"


def test_a_rank_that_dies_while_it_compiles_holds_up_nobody(
    repo: Path, tmp_path: Path, source: Source, folder: Path, compiled: list[Source]
) -> None:
    log = tmp_path / "log"
    rank = start(repo, log, folder, source)
    while not log.exists():
        assert rank.poll() is None
        time.sleep(0.02)
    rank.kill()
    assert nvrtc.binary(source, "sm_80").registers > 0 and compiled == [source]
    rank.communicate()


def test_many_are_compiled_with_progress(source: Source, folder: Path) -> None:
    sources = [Source(source.file, (("TIMES", i),), "scale") for i in range(3)]
    seen: list[tuple[int, int, str]] = []
    assert nvrtc.warm(sources, "sm_80", lambda *a: seen.append(a)) == 3
    assert seen == [(done, 3, "scale") for done in (1, 2, 3)] and len(entries(folder)) == 3


def test_a_source_that_does_not_compile_says_where(source: Source) -> None:
    with pytest.raises(
        UserError, match=r"k\.cu \(scale\) does not compile for sm_80 with NVRTC \d+\.\d+: .*TIMES"
    ) as e:
        nvrtc.binary(Source(source.file, (), "scale"), "sm_80")
    assert "k.cu(4)" in e.value.__notes__[0] and "\n" not in str(e.value)
    with pytest.raises(UserError, match="no such kernel in it"):
        nvrtc.binary(Source(source.file, source.defines, "nothing"), "sm_80")
    with pytest.raises(UserError, match="sm_33"):
        nvrtc.binary(source, "sm_33")


def test_without_a_compiler_it_says_what_to_install(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_places", lambda: [])
    nvrtc._nvrtc.cache_clear()
    try:
        with pytest.raises(UserError, match=r"fp4ward\[cuda\]"):
            nvrtc.binary(source, "sm_80")
    finally:
        nvrtc._nvrtc.cache_clear()


# --- launching --------------------------------------------------------------------------------------------------------


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class Config(ctypes.Structure):  # CUlaunchConfig of cuda.h
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Driver:
    """Returns success and writes down; `answers` gives other codes in turn."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launches: list[tuple[Config, list[int | float]]] = []
        self.answers: dict[str, list[int]] = {}
        self.kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float)

    def cuLaunchKernelEx(self, config: int, function: int, values: int, extra: None) -> int:
        self.calls.append("cuLaunchKernelEx")
        copy = Config.from_buffer_copy(ctypes.string_at(config, ctypes.sizeof(Config)))
        at = ctypes.cast(values, ctypes.POINTER(ctypes.c_void_p))
        self.launches.append((copy, [kind.from_address(at[i]).value for i, kind in enumerate(self.kinds)]))
        return self._answer("cuLaunchKernelEx")

    def cuGetErrorString(self, code: int, words: object) -> int:
        words._obj.value = b"words of the driver"  # type: ignore[attr-defined]
        return 0

    def cuModuleGetFunction(self, function: object, module: object, name: bytes) -> int:
        function._obj.value = 77  # type: ignore[attr-defined]
        return 0

    def _answer(self, name: str) -> int:
        return self.answers.get(name, []).pop(0) if self.answers.get(name) else 0

    def __getattr__(self, name: str) -> object:
        return lambda *a: self.calls.append(name) or self._answer(name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 4321, raising=False)
    nvrtc._kernel.cache_clear()
    yield fake
    nvrtc._kernel.cache_clear()


def test_a_launch_hands_the_driver_grid_stream_and_arguments(source: Source, driver: Driver) -> None:
    kernel = nvrtc.kernel(source, torch.device("cuda", 0))
    assert nvrtc.kernel(source, torch.device("cuda", 0)) is kernel, "loaded once"
    x, y = torch.zeros(4), torch.zeros(4)
    kernel((3, 2, 1), 128, 1024, x, y, -5, 0.5)
    kernel((7, 1, 1), 64, 0, None, y, 6, 2, pdl=True)
    (a, first), (b, second) = driver.launches
    assert first == [x.data_ptr(), y.data_ptr(), -5, 0.5] and second == [None, y.data_ptr(), 6, 2.0]
    assert [a.gx, a.gy, a.gz, a.bx, a.by, a.bz, a.shared, a.stream, a.count] == [3, 2, 1, 128, 1, 1, 1024, 4321, 0]
    assert [b.gx, b.bx, b.count, b.attributes[0].id, b.attributes[0].value] == [7, 64, 1, 6, 1]
    assert ctypes.sizeof(Config) == 56 and ctypes.sizeof(Attribute) == 72


def test_shared_memory_is_asked_for_when_it_grows(source: Source, driver: Driver) -> None:
    kernel = nvrtc.kernel(source, torch.device("cuda", 0))
    for shared in (0, 48 << 10, 100 << 10, 100 << 10, 60 << 10):
        kernel((1, 1, 1), 32, shared, None, None, 1, 1.0)
    assert driver.calls.count("cuFuncSetAttribute") == 2


def test_a_thread_without_a_context_gets_one(source: Source, driver: Driver) -> None:
    kernel = nvrtc.kernel(source, torch.device("cuda", 0))
    driver.answers["cuLaunchKernelEx"] = [nvrtc.INVALID_CONTEXT, 0]
    kernel((1, 1, 1), 32, 0, None, None, 1, 1.0)
    assert driver.calls[-3:] == ["cuLaunchKernelEx", "cuCtxSetCurrent", "cuLaunchKernelEx"]


def test_the_drivers_refusals_are_errors(source: Source, driver: Driver) -> None:
    kernel = nvrtc.kernel(source, torch.device("cuda", 0))
    driver.answers["cuLaunchKernelEx"] = [1]
    with pytest.raises(RuntimeError, match=r"scale: a launch of \(0, 1, 1\) blocks.*words of the driver.*error 1"):
        kernel((0, 1, 1), 32, 0, None, None, 1, 1.0)
    with pytest.raises(Exception, match=r"int|format"):
        kernel((1, 1, 1), 32, 0, None, None, 2**31, 1.0)
    driver.answers["cuModuleLoadData"] = [209]
    nvrtc._kernel.cache_clear()
    with pytest.raises(RuntimeError, match="scale: cuModuleLoadData: words"):
        nvrtc.kernel(source, torch.device("cuda", 0))
    assert driver.calls[-1] == "cuCtxPopCurrent_v2"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_computes_on_the_current_stream_in_graphs_and_in_threads(source: Source) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = nvrtc.kernel(source, device)
    x = torch.randn(100, device=device)
    want = (x + 1) * 0.5 * 2

    def launched(pdl: bool = False) -> torch.Tensor:
        y = torch.full((100,), float("nan"), device=device)
        kernel((1, 1, 1), 128, 0, x, y, 100, 0.5, pdl=pdl)
        return y

    assert torch.equal(launched(), want) and torch.equal(launched(pdl=True), want)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        got = launched()
    side.synchronize()
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = launched()
        second = launched(pdl=True)
    graph.replay()
    assert torch.equal(first, want) and torch.equal(second, want)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(launched).result(), want)


# --- the command ------------------------------------------------------------------------------------------------------


def test_warm_fills_the_users_cache(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvrtc, "rows", lambda sm: [source])
    monkeypatch.setenv("FP4WARD_CACHE", str(tmp_path / "own"))
    assert cli.main(["warm", "--gpu", "H200"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"1 kernels for sm_90a are in {tmp_path / 'own'}, ")
    for s in SPECS:
        assert (f"{s.op}={s.name}" in said.err) == (s.module in nvrtc.HOLDERS and s.status != TESTED)
    assert len(entries(tmp_path / "own")) == 1
    monkeypatch.delenv("FP4WARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cli.main(["warm", "--gpu", "sm=80"]) == 0
    assert [p.name.split("-")[1] for p in entries(tmp_path / "xdg" / "fp4ward")] == ["sm_80"]


def test_warm_says_before_it_compiles_that_it_cannot(
    source: Source, compiled: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(nvrtc, "rows", lambda sm: [source])
    monkeypatch.setenv("FP4WARD_CACHE", str(tmp_path / "k.cu"))
    assert cli.main(["warm", "--gpu", "H200"]) == 2
    assert "FP4WARD_CACHE" in capsys.readouterr().err
    assert cli.main(["warm", "--gpu", "cpu"]) == 2
    assert "--gpu" in capsys.readouterr().err
    monkeypatch.setenv("FP4WARD_CACHE", str(tmp_path / "cache"))
    for sm in (7, 12, 75, 999):
        assert cli.main(["warm", "--gpu", f"sm={sm}"]) == 2
        assert f"not compiled for SM {sm}, but for 80, 86," in capsys.readouterr().err
    assert compiled == []
    monkeypatch.setattr(nvrtc, "_write", lambda *_: None)  # a folder that was filled meanwhile
    assert cli.main(["warm", "--gpu", "sm=80"]) == 2
    assert "kept 0 of 1 kernels" in capsys.readouterr().err


def test_warm_knows_every_gpu_of_the_table() -> None:
    assert {hw.sm for hw in hardware.ROWS} <= {0, *nvrtc.TARGETS, 121}
