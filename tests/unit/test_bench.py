"""bench/kernel.py without a GPU: what it refuses, and the whole run on a CPU with clocks and graphs stood in for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from bench import common, kernel, verdict
from fp4ward.errors import UserError
from fp4ward.formats.weight import Weight
from fp4ward.kernels import linear
from tests import cases

PEERS = json.loads(kernel.STORED.read_text())


def row(**changes: Any) -> verdict.Row:
    base = {
        "format": "nvfp4",
        "shape": "64x32",
        "tokens": 1,
        "kernel": "cuda",
        "us": 2.0,
        "spread": 0.01,
        "error": 1e-3,
    }
    base |= {
        "floor_us": 1.0,
        "of_floor": 0.5,
        "cublas_us": 6.0,
        "humming_us": 4.0,
        "marlin_us": 5.0,
        "gpu": "NVIDIA H200",
    }
    return base | changes


# --- the table of shapes ----------------------------------------------------------------------------------------------


def test_the_bar_set_is_24_dense_and_8_moe_shapes_that_kernels_can_take() -> None:
    assert len({c.name for c in cases.DENSE}) == 24 and len({c.name for c in cases.MOE}) == 8
    assert all(c.k % 16 == 0 for c in (*cases.DENSE, *cases.ODD)) and all(c.i % 16 == 0 == c.h % 16 for c in cases.MOE)
    assert not {c.name for c in cases.DENSE} & {c.name for c in cases.ODD}
    assert sum("lm_head" in c.module for c in cases.DENSE) == 3
    stored = {f"{n}x{k}" for n, k, *_ in PEERS["dense"]}
    assert len(stored & {c.name for c in cases.DENSE}) >= 5, "shapes whose peers were measured"


def test_the_sizes_are_the_models(published: Path) -> None:
    def config(name: str) -> dict[str, Any]:
        found = json.loads((published / f"nvidia--{name}_config.json").read_text())
        return found.get("text_config", found)

    names = {c.name for c in cases.DENSE} | {c.name for c in cases.MOE} | {c.name for c in cases.ODD}
    small, dense, large = (config(f"Qwen3.{v}-NVFP4") for v in ("6-35B-A3B", "6-27B", "5-397B-A17B"))
    nano = config("NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4")
    for c in (small, dense, large):
        h, key, value = c["hidden_size"], 2 * c["linear_num_key_heads"] * 128, c["linear_num_value_heads"] * 128
        assert names >= {f"{h}x{value}"} and names & {f"{key + value}x{h}", f"{key + 2 * value}x{h}"}
    for c in (small, dense):
        assert f"{c['vocab_size']}x{c['hidden_size']}" in names
    assert f"{large['vocab_size'] // 8}x{large['hidden_size']}" in names
    assert {f"{2 * dense['intermediate_size'] // tp}x5120" for tp in (1, 8)} <= names
    assert {f"5120x{dense['intermediate_size'] // tp}" for tp in (1, 8)} <= names
    for c in (small, large):
        moe = (c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"], c["hidden_size"])
        assert (
            "x".join(map(str, moe)) in names and f"{c['hidden_size']}x{c['shared_expert_intermediate_size']}" in names
        )
    inner, i = nano["mamba_num_heads"] * nano["mamba_head_dim"], nano["moe_intermediate_size"]
    assert f"{2 * inner + 2 * nano['n_groups'] * nano['ssm_state_size'] + nano['mamba_num_heads']}x2688" in names
    assert {f"2688x{inner}", f"2688x{nano['moe_shared_expert_intermediate_size']}", f"{i}x2688"} <= names


# --- what was asked for -----------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(repo: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, "bench/kernel.py"], cwd=repo, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: bench/kernel.py needs a CUDA GPU, and torch finds none\n"


def test_the_flags_choose_kernels_shapes_tokens_and_variants() -> None:
    found = kernel.chosen("cuda,humming@2048", "nvfp4", kernel.combinations("A=1,2 B=3"))
    assert list(found) == ["cuda A=1 B=3", "cuda A=2 B=3", "humming"]
    assert found["humming"][1].search("2048x512") and not found["humming"][1].search("64x32")
    assert kernel.numbers(None) == cases.DECODE_TOKENS and kernel.numbers("all")[-1] == 8192
    assert kernel.numbers("16,1") == (1, 16)
    assert {c.name for c in kernel.select("lm_head", odd=False)} == {"248320x2048", "248320x5120", "31040x4096"}
    assert [c.name for c in kernel.select("^160x", odd=True)] == ["160x288"]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: kernel.chosen("cuda,speed", "nvfp4"), "none of cuda, triton"),
        (lambda: kernel.chosen("humming", "fp8_block"), "does not read fp8_block"),
        (lambda: kernel.chosen("cuda@(", "nvfp4"), "no regular expression"),
        (lambda: kernel.combinations("A=x"), "NAME=NUMBER"),
        (lambda: kernel.numbers("0"), "a list such as"),
        (lambda: kernel.select("nothing", odd=False), "no shape"),
    ],
)
def test_a_bad_flag_is_one_sentence(ask: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ask()


# --- a whole run ------------------------------------------------------------------------------------------------------


class StandIn:
    WAYS = ((1, 1, 1),)

    def calls(self, sets: Sequence[Sequence[Tensor]]) -> list[Callable[[], None]]:
        return [lambda: None for _ in sets]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU; a launch of the floor takes 1 us, of ours 2, of others 4."""
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "COLD", 4096)
    monkeypatch.setattr(common, "microseconds", lambda call: call() and 1.0)
    monkeypatch.setattr(common, "head", lambda commit: {"gpu": "none", "commit": commit})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernel, "Floor", StandIn)
    monkeypatch.setattr(kernel, "limits", lambda floor: {"read_tb_s": 4.0, "matmul_tflop_s": 700.0})
    monkeypatch.setattr(kernel, "capture", lambda calls, launches: ([call() for call in calls], launches))
    times = {"floor": (1.0, 0.0), "cuda": (2.0, 0.01)}
    monkeypatch.setattr(kernel, "abba", lambda graphs, rounds: {n: times.get(n, (4.0, 0.0)) for n in graphs})
    monkeypatch.setattr(kernel, "DENSE", (cases.Dense(48, 64, "a"), cases.Dense(64, 128, "b")))

    def right(weights: Sequence[Weight]) -> list[kernel.Run]:
        return [lambda x, w=w: linear.reference(x, w) for w in weights]

    def unscaled(weights: Sequence[Weight]) -> list[kernel.Run]:  # as humming: the first row's scale for all
        def run(x: Tensor, w: Weight) -> Tensor:
            scale = w.row_scale()
            y = x.double() @ w.mantissa(torch.float64).T
            return (y if scale is None else y * scale[0]).to(x.dtype)

        return [lambda x, w=w: run(x, w) for w in weights]

    def unwritten(weights: Sequence[Weight]) -> list[kernel.Run]:
        def run(x: Tensor, w: Weight) -> Tensor:
            y = linear.reference(x, w)
            y[-1, -1] = float("nan")
            return y

        return [lambda x, w=w: run(x, w) for w in weights]

    def broken(weights: Sequence[Weight]) -> list[kernel.Run]:
        raise RuntimeError("no such layout\nand more")

    made = {"cuda": right, "cublas": kernel._cublas, "humming": unscaled, "triton": unwritten, "other": broken}
    monkeypatch.setattr(
        kernel, "KERNELS", {name: kernel.Kernel(p, row_scales=name != "humming") for name, p in made.items()}
    )
    monkeypatch.setattr(kernel, "find_spec", lambda name: name)
    monkeypatch.setattr(kernel, "warm_humming", lambda cases, most: None)
    monkeypatch.setattr(kernel, "warm_cuda", lambda *_: None)


@pytest.mark.parametrize("format", kernel.FORMATS)
def test_a_run_writes_a_line_a_kernel_shape_and_batch(
    cpu: None, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, chart = tmp_path / "a" / "out.jsonl", tmp_path / "chart.svg"
    asked = ["--kernels", "cuda,cublas,humming@48x", "--tokens", "1,3", "--format", format, "--commit", "abc"]
    assert kernel.main([*asked, "--out", str(out), "--plot", str(chart)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 + 2 and {r["commit"] for r in rows} == {"abc"}
    assert {r["shape"] for r in rows if r["kernel"] == "humming"} == {"48x64"}
    ours = [r for r in rows if r["kernel"] == "cuda"]
    assert all(r["of_floor"] == 0.5 and r["cublas_us"] == 4.0 and r["error"] < 4e-3 for r in ours)
    assert all(r["prepare_gb_s"] > 0 for r in ours) and "humming_us" in ours[0] and "humming_us" not in ours[-1]
    assert chart.read_text().count("<path") > 5
    shown = capsys.readouterr().out
    assert "reads 4.00 TB/s" in shown and "10 measurements" in shown and "time / floor" in shown


def test_a_wrong_kernel_is_not_timed(cpu: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert kernel.main(["--kernels", "triton,cublas", "--tokens", "2", "--out", str(out)]) == 1
    assert "triton is wrong at 48x64, M = 2: error nan" in capsys.readouterr().out
    assert {json.loads(line)["kernel"] for line in out.read_text().splitlines()} == {"cublas"}


def test_large_batches_are_checked_at_both_ends_and_ours_sits_out_those_it_cannot_take(
    cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(kernel.KERNELS, "cuda", replace(kernel.KERNELS["cuda"], tokens=64))
    out = tmp_path / "out.jsonl"
    asked = ["--kernels", "cuda,cublas", "--tokens", "16,256", "--shapes", "48x", "--out", str(out)]
    assert kernel.main(asked) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["kernel"], r["tokens"]) for r in rows] == [("cuda", 16), ("cublas", 16), ("cublas", 256)]
    x, w = torch.randn(256, 32).bfloat16(), common.random_weight("nvfp4", 16, 32)
    truth = kernel.Truth.of(x, w, (16, 256))
    assert truth.rows.tolist() == [*range(64), *range(240, 256)]

    def late(x: Tensor) -> Tensor:
        y = linear.reference(x, w)
        y[-1] += 1
        return y

    assert truth.errors(late, x, True)[0] > 4e-3 and truth.errors(lambda x: linear.reference(x, w), x, True)[1] < 2


def test_a_peer_that_cannot_run_is_a_note(cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel.main(["--kernels", "cuda,other", "--tokens", "2", "--shapes", "48x"]) == 0
    assert "other does not run 48x64: RuntimeError: no such layout and more\n" in capsys.readouterr().out


def test_time_that_has_run_out_is_said(cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel.main(["--seconds", "0"]) == 0
    shown = capsys.readouterr().out
    assert "no time left for 48x64 from M = 1 on" in shown and "0 measurements" in shown


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_peers_that_are_not_run_come_from_their_stored_ratio_to_cublas() -> None:
    n, k, m, cublas, marlin, humming = PEERS["dense"][0]
    weight = Weight.__new__(Weight)
    object.__setattr__(weight, "format", common.FORMATS["nvfp4"])
    times = {"floor": (1.0, 0.0), "cublas": (2 * cublas, 0.0)}
    got = kernel.against(times, cases.Dense(n, k, ""), weight, m)
    assert got["marlin_us"] == pytest.approx(2 * marlin) and got["humming_us"] == pytest.approx(2 * humming)
    assert got["marlin_from"] == got["humming_from"] == "stored ratio to cuBLAS"
    measured = kernel.against(times | {"humming": (3.0, 0.0)}, cases.Dense(n, k, ""), weight, m)
    assert measured["humming_us"] == 3.0 and "humming_from" not in measured
    assert kernel.against(times, cases.Dense(n, k + 16, ""), weight, m) == {"cublas_us": 2 * cublas}
    assert "marlin_us" not in kernel.against({"floor": (1.0, 0.0)}, cases.Dense(n, k, ""), weight, m)


def test_targets_are_geometric_means_with_a_floor_for_each_shape() -> None:
    by_name = {t.name: t for t in verdict.TARGETS}
    faster = by_name["W4A16, M <= 16: x the better peer"]
    rows = [row(tokens=1), row(tokens=16, us=1.0)]  # 4 / 2 and 4 / 1: the better peer takes 4
    _, mean, worst, shapes, bars, said = faster.said(rows)
    assert (mean, worst, shapes, bars, said) == ("2.83", "2.83 64x32", "1", ">= 1.5, >= 1.9", "goal met")
    assert faster.said([row(us=2.5)])[-1] == "met" and faster.said([row(us=3.0)])[-1] == "missed"
    slow = [row(us=1.0), row(shape="48x64", us=3.2)]  # 1.25 is under 0.9 of 1.5
    assert faster.said(slow)[-1] == "a shape misses"
    assert faster.said([row(tokens=32)]) is None and faster.said([row(humming_us=8.0)])[1] == "2.50"
    near = by_name["W4A16, M <= 16: time / floor"]
    assert [near.said([row(of_floor=share)])[-1] for share in (0.9, 0.7, 0.5)] == ["goal met", "met", "missed"]
    middle = by_name["W4A16, M = 32, 64: x the best of peers and cuBLAS"]
    assert middle.said([row(tokens=32, cublas_us=3.0)])[1] == "1.50"
    never = by_name["W4A16, M = 32, 64: x cuBLAS bf16"]
    assert never.said([row(tokens=32), row(tokens=64, cublas_us=1.9)])[1:3] == ("1.69", "0.95 64x32 M=64")
    assert never.said([row(tokens=32), row(tokens=64, cublas_us=1.9)])[-1] == "a shape misses"


def test_tables_hold_every_shape_kernel_and_target() -> None:
    rows = [row(tokens=m, kernel=k) for m in (1, 64) for k in ("cuda", "cublas")] + [row(shape="8x16", cublas_us=1.0)]
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in (verdict.shapes_table(rows, "cuda"), verdict.kernels_table(rows), verdict.targets_table(rows, "cuda")):
        console.print(table)
    text = console.export_text()
    assert "2.0 2.00 2.00" in text and "8x16" in text and "2.0 2.00 0.50" in text  # us, of floor, of the best other
    assert "cublas" in text and "better peer" in text
