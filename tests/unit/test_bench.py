"""Benchmarks without a GPU. bench/kernel.py: what it refuses, and the whole run on a CPU with clocks and graphs stood
in for; bench/estimates.py and step.py as they run on a CPU."""

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

from bench import common, estimates, fit, kernel, launches, step, trace, verdict
from fp4ward import hardware
from fp4ward.errors import UserError
from fp4ward.formats.weight import Weight
from fp4ward.kernels import cuda_linear, linear
from fp4ward.kernels.specs import SPECS, Cut, KernelSpec
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
    assert [c.name for c in kernel.select("^(2048x512|4096x1024)$", odd=False)] == ["2048x512", "4096x1024"]


def test_a_result_file_is_shown_again_or_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = common.ROOT / "bench" / "results"
    assert kernel.main(["--read", str(results / "kernel_h200.jsonl")]) == 0
    assert "goal met" in capsys.readouterr().out
    for name in ("none", "experts_h200.jsonl", "peers_h200.json"):
        with pytest.raises(UserError, match="--read"):
            kernel.stored_rows(results / name, "linear", "nvfp4")


def test_every_way_that_fits_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[frozenset[tuple[str, int]]] = []
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_linear, "gpu_here", lambda device: cuda_linear.H200)
    monkeypatch.setattr(launches.nvrtc, "kernel", lambda source, device: None)
    monkeypatch.setattr(cuda_linear, "linear", lambda x, w, **tuning: ran.append(frozenset(tuning.items())))
    monkeypatch.setattr(common, "capture", lambda calls, count: (None, count))
    monkeypatch.setattr(common, "abba", lambda graphs, rounds: dict.fromkeys(graphs, (1.0, 0.0)))
    args = launches._parser().parse_args(["--shapes", "^2048x512$", "--tokens", "1,16,128"])  # 128: more than it takes
    rows = launches.measure(args)
    assert [(row["n"], row["k"], row["tokens"]) for row in rows] == [(2048, 512, 1), (2048, 512, 16)]
    ways = [cuda_linear.launches("nvfp4", m, 2048, 512, cuda_linear.H200, {}) for m in (1, 16)]
    assert [len(row["us"]) for row in rows] == [len(own) for own in ways]
    assert ran == [frozenset(made.defines.items()) - {("NT", made.defines["NT"])} for own in ways for _, made in own]
    cells = launches.cells(rows, cuda_linear.H200)
    assert [made for made, _ in cells[2048, 512, 16]] == [made for _, made in ways[1]]


def test_the_costs_of_launches_are_those_that_the_sweep_gives(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = common.ROOT / "bench" / "results" / "launches_h200.jsonl"
    found = launches.cells([json.loads(line) for line in sweep.read_text().splitlines()], cuda_linear.H200)
    fitted = launches.fitted(found)
    assert {entry: pytest.approx(own, rel=0.02, abs=1e-4) for entry, own in fitted.items()} == cuda_linear.COSTS
    assert launches.main(["--refit-from", str(sweep)]) == 0 and "geometric mean" in capsys.readouterr().out
    for file in ("none", "kernel_h200.jsonl"):
        assert launches.main(["--refit-from", str(sweep.with_name(file))]) == 2
        assert f"{file}: " in capsys.readouterr().err


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


# --- estimates --------------------------------------------------------------------------------------------------------

ROWS = {spec.name: spec for spec in SPECS}
H200 = hardware.parse("H200")


def points(spec: KernelSpec, truth: KernelSpec, tokens: Sequence[int]) -> list[fit.Point]:
    """What a kernel with the numbers of `truth` would be measured to take."""
    found = [fit.Point(layer, m, held, 1.0) for layer, held in fit.layers(spec, H200) for m in tokens]
    return [replace(point, us=point.estimate(truth, H200)) for point in found]


def test_a_fit_finds_the_numbers_behind_measurements() -> None:
    for name, cuts in (
        ("triton_w4a16_linear", (Cut(0.1, 3000, 0, 8, 16), Cut(0.4, 9000, 0, 64))),
        ("triton_w4a16_experts", (Cut(0.2, 0, 900, 8, 8), Cut(0.3, 0, 700, 64))),
        ("cuda_w8a16_linear", (Cut(0.3, 1000, 4000),)),
    ):
        spec = replace(ROWS[name], memory=0.9)
        truth = replace(spec, memory=0.8, cuts=cuts, launches=(0.5, 0))
        got = fit.fit(spec, H200, points(spec, truth, (1, 16, 64, 256, 4096)))
        assert all(p.estimate(got, H200) == pytest.approx(p.us, rel=0.03) for p in points(got, truth, (1, 32, 1024)))
        assert got.cuts[-1].compute == pytest.approx(cuts[-1].compute, rel=0.1)


def test_a_fit_keeps_what_is_not_shown_and_no_share_is_above_the_limit() -> None:
    spec = replace(ROWS["torch_linear"], memory=0.9, cuts=(Cut(0.5, 100),))
    truth = replace(spec, memory=0.7, launches=(0.2, 0))
    got = fit.fit(spec, H200, points(spec, truth, (1,)))
    assert (got.memory, got.launches) == (pytest.approx(0.7, rel=0.05), (pytest.approx(0.2, rel=0.05), 0))
    assert (got.cuts[0].compute, got.cuts[0].rows) == pytest.approx((0.5, 100), rel=0.05), "no point is bound by them"
    assert got.cuts[0].columns == 0, "no cost of this kernel, says its row"
    hidden = replace(spec, memory=1)
    assert fit.fit(hidden, H200, points(hidden, truth, (1,))).memory == 1, "nor is this"
    got = fit.fit(spec, H200, points(spec, replace(spec, memory=4.0, cuts=(Cut(3.0),)), (1, 4096)))
    assert got.memory <= 1 and got.cuts[0].compute <= 1


def test_estimates_meet_what_was_measured_on_shapes_held_out_from_their_fit() -> None:
    hw, rows = fit.read([common.ROOT / "bench" / "results" / "estimates_h200.jsonl"])
    assert hw == H200 and {"torch_linear", "triton_w4a16_linear", "triton_w4a16_experts"} <= {s.name for s, _ in rows}
    for spec, measured in rows:
        near = [abs(p.estimate(spec, hw) / p.us - 1) <= fit.NEAR for p in measured if p.held]
        assert sum(near) >= 0.9 * len(near) > 0, f"{spec.name}: {sum(near)} of {len(near)} within 30 %"


def test_every_third_shape_is_held_out_whatever_runs() -> None:
    for name, count in (("torch_linear", 24), ("triton_w4a16_linear", 24), ("triton_w4a16_experts", 6)):
        found = list(fit.layers(ROWS[name], H200))
        assert len(found) == count and [held for _, held in found] == [i % 3 == 2 for i in range(count)]
    assert all(layer.formats[0].name == "bf16" for layer, _ in fit.layers(ROWS["torch_linear"], H200))
    asked = [layer.formats[0] for layer, _ in fit.layers(ROWS["torch_w8a8_linear"], H200)]
    assert {(f.name, f.activation) for f in asked} == {("fp8_tensor", "fp8")}
    small = [layer.path for layer, _ in fit.layers(ROWS["reference_experts"], hardware.cpu())]
    assert small == ["256x8x256x2048", "256x8x64x2048"], "one to fit, one held out"
    assert not list(fit.layers(ROWS["torch_w4a4_linear"], H200)), "needs another GPU"


def test_estimates_are_held_against_measurements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "detect", hardware.cpu)
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(fit, "DENSE", [cases.Dense(16 * i, 64, "") for i in (1, 2, 3, 4)])
    monkeypatch.setattr(fit, "MOE", [cases.Moe(4, 2, 16 * i, 32, "") for i in (1, 2, 3)])
    out = tmp_path / "out.jsonl"
    asked = ["--tokens", "5", "1", "--out", str(out), "--commit", "abc"]
    assert estimates.main(asked) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["row"] for r in rows} == {"torch_linear", "reference_linear", "reference_experts"}
    assert len(rows) == 2 * (4 + 4 + 3) and all(r["us"] > 0 for r in rows)
    shown = capsys.readouterr().out
    assert "held out: within 30%: " in shown and " of 2 fitted" in shown and "reference_experts: memory=" in shown
    out.write_text(out.read_text() + json.dumps(rows[0] | {"us": 12345.6}) + "\n")  # measured again
    assert estimates.main(["--refit-from", str(out), "--rows", rows[0]["row"]]) == 0
    again = capsys.readouterr().out
    assert "12345.6" in again and "of 2 fitted" in again and "reference_experts" not in again
    monkeypatch.setattr(linear, "reference", lambda x, w: x @ w.dense(x.dtype).T * (1 if x.dtype is F64 else 2))
    assert estimates.main([*asked, "--rows", "reference_linear"]) == 1
    assert "reference_linear is wrong at 16x64, 1 tokens: error 1.0e+00" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        estimates.main(["--rows", "nothing"])


F64 = torch.float64


# --- a step of a whole model ------------------------------------------------------------------------------------------


def test_steps_of_a_model_are_timed_and_profiled_without_its_weights(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint("q35moe-w4a16-modelopt") / "config.json").read_bytes())
    out = tmp_path / "out.jsonl"
    asked = [str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--context", "8", "--batch", "1,3"]
    assert step.main([*asked, "--steps", "2", "--profile", "--commit", "abc", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    times = [r for r in rows if "step_ms" in r]
    assert [(r["batch"], r["commit"], r["load_format"]) for r in times] == [(1, "abc", "dummy"), (3, "abc", "dummy")]
    for r in times:
        assert r["tokens_per_s"] == pytest.approx(r["batch"] / r["step_ms"] * 1e3)
        assert 0 < r["floor_ms"] < r["expected_ms"] and 0 < r["of_floor"] < 1 and 0 < r["prefill_of_floor"] < 1
    blocks = {r["name"]: r for r in rows if r.get("profile") == "block" and r["batch"] == 3}
    assert {"GatedDeltaNet", "GatedAttention", "MoE", "MoE.experts", "MoE.gate", "lm_head", "embed_tokens"} <= set(
        blocks
    )
    assert sum(r["share"] for r in blocks.values()) == pytest.approx(1)
    assert any(r["name"] == "aten::mm" for r in rows if r.get("profile") == "kernel")
    assert "a decode step of 3: " in capsys.readouterr().out


def test_a_kernel_belongs_to_the_block_that_launched_it() -> None:
    def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}

    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "block rest", 0, 100),
        *(event("user_annotation", "block MoE", at, 20) for at in (10, 40)),
        event("user_annotation", "block MoE.experts", 15, 5),
        event("user_annotation", "another's", 16, 1),
        event("gpu_user_annotation", "block MoE", 200, 90),
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, 1),
        event("cuda_driver", "cuLaunchKernelEx", 17, 1, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 50, 1, 3),
        event("cuda_runtime", "cudaLaunchKernel", 80, 1, 4),
        event("cpu_op", "aten::mm", 11, 5),
        event("kernel", "gemm", 200, 7, 1),
        event("kernel", "experts", 210, 30, 2),
        event("gpu_memcpy", "Memcpy DtoD", 241, 1, 3),
        event("kernel", "sample", 260, 2, 4),
    ]
    found = [(s.name, s.block, s.us, s.calls) for s in trace.slices(events)]
    assert found == [
        ("gemm", "MoE", 7, 2), ("experts", "MoE.experts", 30, 1), ("Memcpy DtoD", "MoE", 1, 2),
        ("sample", "rest", 2, 1),
    ]  # fmt: skip
    lines = trace.show(trace.slices(events), 1, 0.08)
    assert {(r["name"], r["launches"], r.get("launches_a_call")) for r in lines} >= {("MoE", 2, 1), ("gemm", 1, None)}
    assert lines[0]["name"] == "MoE.experts" and lines[0]["share"] == 0.75 and lines[0]["idle"] == pytest.approx(0.5)


def test_without_a_gpu_an_operation_counts_without_those_it_calls() -> None:
    ops = [("linear", 0, 10), ("t", 1, 2), ("mm", 4, 5), ("resolve", 5, 1), ("add", 12, 3)]
    events = [{"ph": "X", "cat": "cpu_op", "name": n, "ts": ts, "dur": dur} for n, ts, dur in ops]
    assert [(s.name, s.us) for s in trace.slices(events)] == [
        ("linear", 3), ("t", 2), ("mm", 4), ("resolve", 1), ("add", 3),
    ]  # fmt: skip
