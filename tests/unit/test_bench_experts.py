"""bench/experts.py without a GPU: what it refuses, and whole runs with kernels emulated and clocks stood in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from bench import common
from bench import experts as bench
from fp4ward.errors import UserError
from fp4ward.kernels import cuda_experts, cuda_linear, linear, nvrtc, triton_experts
from fp4ward.kernels import experts as reference
from fp4ward.kernels.cuda_linear import Gpu
from tests import cases
from tests.kernels import emulator

PEERS = json.loads(bench.STORED.read_text())
QWEN = cases.MOE[0]


def test_without_a_gpu_it_says_so(repo: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "bench/experts.py"], cwd=repo, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: bench/experts.py needs a CUDA GPU, and torch finds none\n"


def test_the_flags_choose() -> None:
    assert list(bench.chosen("cuda,bf16", "chosen,deep")) == ["cuda", "bf16", "variant deep"]
    assert len(bench.chosen("cuda", "all")) == len(cases.VARIANTS) and list(bench.chosen("triton", "all")) == ["triton"]
    assert [c.name for c in bench.select("Nano")] == ["128x6x1856x2688", "128x6x256x2688"]
    assert bench.names("--routing", "all", bench.ROUTINGS) == list(bench.ROUTINGS)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: bench.chosen("cuda,fast", "all"), "--kernels cuda,fast: 'fast' is none of cuda, triton"),
        (lambda: bench.chosen("cuda", "fast"), "--variants fast"),
        (lambda: bench.names("--routing", "even", bench.ROUTINGS), "none of uniform, zipf, one"),
        (lambda: bench.select("nothing"), "no shape"),
    ],
)
def test_a_bad_flag_is_one_sentence(ask: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ask()


def test_routing_meets_as_many_experts_as_where_the_peers_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "DEVICE", "cpu")
    torch.manual_seed(0)
    for case in (QWEN, cases.MOE[3]):
        for tokens in (1, 4, 16, 64):
            there = bench.against(case, tokens, {})["peers_met"]
            small = cases.Moe(case.e, case.top_k, 16, 16, "")
            met = [len(bench.Load.draw(small, tokens, "uniform").ids.unique()) for _ in range(24)]
            assert sum(met) / len(met) == pytest.approx(there, rel=0.04)
    one, zipf = (bench.Load.draw(QWEN, 64, routing).ids for routing in ("one", "zipf"))
    assert len(one.unique()) == 8 and 20 < len(zipf.unique()) < 200
    assert torch.bincount(zipf.flatten().long()).max() > 40  # of 64 tokens


def test_peers_are_as_stored_or_scaled_down() -> None:
    (line,) = (x for x in PEERS["moe"] if x[:5] == [256, 8, 512, 2048, 16])
    bf16, marlin, humming = line[-3:]
    got = bench.against(QWEN, 16, {"bf16_us": bf16 * 2})
    assert (got["marlin_us"], got["humming_us"], got["peers_from"]) == (marlin, humming, "stored")
    got = bench.against(QWEN, 16, {"bf16_us": bf16 / 2})
    assert got["humming_us"] == pytest.approx(humming / 2) and got["peers_from"] == "stored, scaled"
    assert bench.against(QWEN, 2, {}) == {} == bench.against(cases.MOE[1], 1, {})


def test_the_targets_are_held_against_each_measurement() -> None:
    base = {"format": "nvfp4", "shape": QWEN.name, "tokens": 1, "marlin_us": 28.0, "humming_us": 30.0}
    by_name = {t.name: t for t in bench.TARGETS}
    one = by_name["35B-A3B, 1 tokens: x the better peer"]
    assert [one.said([base | {"us": us}])[-1] for us in (7.0, 10.0, 11.0)] == ["goal met", "met", "missed"]
    assert one.said([base | {"us": 1.0, "tokens": 4}]) is None
    portable = by_name["all: x the portable kernel"]
    rows = [base | {"us": 2.0, "triton_us": 8.0}, base | {"us": 2.0, "triton_us": 1.9, "tokens": 64}]
    assert portable.said(rows)[-1] == "a shape misses" and "M=64" in portable.said(rows)[2]


def test_a_launch_meets_cold_weights() -> None:
    assert bench.launches(14e6) * 14e6 > common.COLD / 2 and bench.launches(4e9) == 6


class StandIn:
    WAYS = ((1, 1, 1),)

    def calls(self, sets: Sequence[Sequence[Tensor]]) -> list[Callable[[], None]]:
        assert all(part.is_contiguous() and part.numel() for one in sets for part in one)
        return [lambda: None for _ in sets]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Kernels run emulated, Triton's as its reference; the floor takes 1 us, ours 2, others 4."""
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(nvrtc, "kernel", emulator.kernels(request.config.cache.mkdir("emulator")))
    monkeypatch.setattr(cuda_experts, "gpu_here", lambda device: Gpu(3, 227 << 10, True))
    monkeypatch.setattr(cuda_linear, "linear", lambda x, w: linear.reference(x, cuda_linear.restore(w)))
    monkeypatch.setattr(triton_experts, "experts", reference.reference)
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "COLD", 4096)
    monkeypatch.setattr(common, "head", lambda commit: {"gpu": "none", "commit": commit})
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "Floor", StandIn)
    monkeypatch.setattr(bench, "warm", lambda *_: None)
    monkeypatch.setattr(bench, "launches", lambda met: 2)
    monkeypatch.setattr(bench, "limits", lambda floor: {"read_tb_s": 4.0})
    monkeypatch.setattr(bench, "capture", lambda calls, count: ([call() for call in calls], count))
    times = {"floor": (1.0, 0.0), "cuda": (2.0, 0.01)}
    monkeypatch.setattr(bench, "abba", lambda graphs, rounds: {n: times.get(n, (4.0, 0.0)) for n in graphs})
    monkeypatch.setattr(bench, "MOE", (cases.Moe(4, 2, 32, 64, "a"), cases.Moe(6, 2, 32, 64, "b", gated=False)))


def test_a_run_writes_a_line_a_kernel_shape_batch_and_routing(
    cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, chart = tmp_path / "a" / "out.jsonl", tmp_path / "chart.svg"
    asked = ["--kernels", "all", "--tokens", "1,3", "--routing", "uniform,one", "--commit", "abc"]
    assert bench.main([*asked, "--shapes", "^4", "--out", str(out), "--plot", str(chart)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for routing, kernels in (("uniform", {*bench.KERNELS}), ("one", {"cuda", "triton", "bf16"})):
        for tokens in (1, 3):
            found = [r for r in rows if (r["routing"], r["tokens"]) == (routing, tokens)]
            assert {r["kernel"] for r in found} == kernels and len(found) == len(kernels)
    ours = [r for r in rows if r["kernel"] == "cuda"]
    assert all(r["of_floor"] == 0.5 and r["error"] < 4e-3 and r["route_us"] == r["triton_us"] == 4.0 for r in ours)
    assert {r["experts"] for r in ours if r["routing"] == "one"} == {2.0} and all(r["prepare_gb_s"] > 0 for r in ours)
    shown = capsys.readouterr().out
    for words in ("cuda, uniform routing", "cuda, one routing", "block 4.0, parts 4.0", "x the portable kernel", "met"):
        assert words in shown
    assert chart.read_text().count("<path") > 5


def test_what_is_wrong_or_fails_is_not_timed(
    cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = cuda_experts.run
    monkeypatch.setattr(cuda_experts, "run", lambda *args, **more: real(*args, **more) * 1.01)
    monkeypatch.setitem(bench.KERNELS, "triton", bench.Kernel(lambda *_: 1 / 0))
    out = tmp_path / "out.jsonl"
    asked = ["--tokens", "3", "--routing", "zipf", "--shapes", "^6", "--out", str(out)]
    assert bench.main(asked) == 1
    shown = capsys.readouterr().out
    assert "cuda is wrong at 6x2x32x64, 3 tokens, zipf: error 1." in shown
    assert "triton does not run 6x2x32x64, 3 tokens, zipf: ZeroDivisionError" in shown
    assert {json.loads(line)["kernel"] for line in out.read_text().splitlines()} == {"bf16"}
    assert bench.main([*asked, "--seconds", "0"]) == 0 and "no time left for 6x2x32x64" in capsys.readouterr().out


def test_tables_of_large_and_small_rows() -> None:
    about: dict[str, Any] = {"format": "nvfp4", "shape": "s", "kernel": "cuda", "routing": "uniform", "experts": 8.0}
    about |= {"spread": 0.01, "error": 1e-3, "of_floor": 0.5, "marlin_us": 8.0, "humming_us": 9.0, "peers_met": 8.1}
    rows = [about | {"tokens": m, "us": 2.0 * f, "floor_us": 1.0 * f} for m, f in ((1, 1), (64, 40))]
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    bench.show(console, rows, None)
    text = console.export_text()
    for words in ("1.0-40", "2.0 2.00 4.00", "8.0 experts (8.1 there); us: marlin 8.0, humming 9.0"):
        assert words in text


def test_committed_results_are_shown_again(capsys: pytest.CaptureFixture[str]) -> None:
    results = bench.ROOT / "bench" / "results"
    assert bench.main(["--read", str(results / "experts_h200.jsonl")]) == 0
    assert "x the portable kernel" in capsys.readouterr().out
    assert bench.main(["--read", str(results / "kernel_h200.jsonl")]) == 2
    assert "experts in nvfp4" in capsys.readouterr().err
