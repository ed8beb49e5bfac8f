"""`fp4ward lint`: every planted fault is found, named and weighed; good checkpoints are left in peace."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4ward import cli, facts
from fp4ward.checkpoint import lint
from fp4ward.checkpoint.index import open_index
from fp4ward.checkpoint.lint import Finding, Report
from fp4ward.checkpoint.load import load
from fp4ward.errors import UserError
from tests.build import FIXTURES, SIZES, Checkpoint, Raw, write, write_index
from tests.conftest import REPO

W4A16, CT = "q35moe-w4a16-modelopt", "q35moe-nvfp4a16-ct"
MIXED, DENSE = "q35moe-vl-mixed-w4a16-fp8-modelopt", "q35dense-vl-mixed-w4a16-fp8-modelopt"
L = "model.language_model.layers"
Q = f"{L}.3.self_attn.q_proj"
EXPERT = f"{L}.2.mlp.experts.5"


def examine(folder: Path, **options: Any) -> Report:
    return lint.examine(folder, facts.load, scales=True, **options)


@cache
def stored(fixture: str) -> Checkpoint:
    return Checkpoint.of(fixture)


def changed(change: Callable[[Checkpoint], object], folder: Path, fixture: str = W4A16) -> Report:
    c = stored(fixture).copy()
    change(c)
    return examine(c.save(folder))


def of(report: Report, *severities: str) -> list[Finding]:
    return [f for f in report.findings if f.severity in (severities or ("error", "warning"))]


def brief(report: Report, *severities: str) -> list[tuple[str, str, str]]:
    return [(f.severity, f.code, f.where) for f in of(report, *severities)]


def dense(c: Checkpoint, *modules: str) -> None:
    """Stores NVFP4 or FP8 modules as bf16."""
    for module in modules:
        w = c.tensors[f"{module}.weight"]
        shape = (w.shape[0], w.shape[1] * (2 if w.dtype == "U8" else 1))
        for name in [n for n in c.tensors if n.startswith(f"{module}.")]:
            del c.tensors[name]
        c.tensors[f"{module}.weight"] = Raw.fill("BF16", shape, 0x3C)


def fp8(c: Checkpoint, module: str) -> None:
    dense(c, module)
    c.tensors[f"{module}.weight"] = Raw.fill("F8_E4M3", c.tensors[f"{module}.weight"].shape, 0x38)
    c.tensors[f"{module}.weight_scale"] = Raw.f32(0.01)


def exclude(c: Checkpoint, *names: str) -> None:
    c.documents["hf_quant_config.json"]["quantization"]["exclude_modules"] += names
    c.config["quantization_config"]["ignore"] += names


def put(c: Checkpoint, name: str, at: int, *values: int) -> None:
    for i, value in enumerate(values):
        c.tensors[name] = c.tensors[name].put(at + i, value)


# --- good ones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", sorted(p.name for p in FIXTURES.iterdir()))
def test_good_checkpoints_are_left_in_peace(fixture: str) -> None:  # F11 F12 F23
    report = examine(FIXTURES / fixture)
    assert brief(report) == []
    assert report.kinds and report.seen and all(0 <= k.zeros / k.codes < 0.1 for k in report.kinds.values())


def listed_one_by_one(c: Checkpoint) -> None:
    names = [f"{L}.{i}.linear_attn.in_proj_{p}" for i in range(3) for p in ("qkv", "z")]
    dense(c, *names)
    exclude(c, *names)


def only_a_shared_projection_is_listed(c: Checkpoint) -> None:
    modules = [n.removesuffix(".weight_scale_2") for n in c.tensors if n.endswith(".weight_scale_2")]
    dense(c, *modules)
    one = f"{L}.0.mlp.shared_expert.up_proj"
    fp8(c, one)
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {one: {"quant_algo": "FP8"}}}
    c.documents["hf_quant_config.json"]["quantization"] = quantization
    c.tensors[f"{one}.input_scale"] = Raw.f32(0.5)
    del c.config["quantization_config"]


def infinities(c: Checkpoint) -> None:
    c.config["time_step_limit"] = [0.0, float("inf")]
    c.text_config["other_limit"] = {"__float__": "Infinity"}


def extremes(c: Checkpoint) -> None:
    put(c, f"{Q}.weight_scale", 5, 0x7E, 0x01, 0x38, 0x40, 0x3C, 0x48)
    c.tensors[f"{Q}.weight_scale_2"] = Raw.f32(1e4)


@pytest.mark.parametrize(
    ("fixture", "change"),
    [
        (W4A16, lambda c: c.rename(("model.language_model.", "model."))),  # F10
        (CT, lambda c: c.rename(("model.layers.", "model.language_model.layers."))),  # F10
        (W4A16, listed_one_by_one),  # F5 F6
        (W4A16, only_a_shared_projection_is_listed),  # F2
        (W4A16, infinities),  # F16
        (W4A16, extremes),  # F18 F19 F20 F24
        (CT, lambda c: c.config["quantization_config"].update(format="mixed-precision")),  # F12
    ],
)
def test_what_is_unusual_but_right_is_no_finding(tmp_path: Path, fixture: str, change: Any) -> None:
    assert brief(changed(change, tmp_path, fixture)) == []


def test_ranges_are_those_of_the_file(tmp_path: Path) -> None:  # F18 F19 F20
    kind = changed(extremes, tmp_path).kinds["layers.*.self_attn.q_proj"]
    assert kind.block_scales == [2.0**-9, 448.0] and kind.scales == [1e4, 1e4]
    assert (kind.weights, kind.codes, kind.stored_as) == (1, 256 * 128, "nvfp4")


def test_zero_codes_are_counted_with_either_sign(tmp_path: Path) -> None:
    def change(c: Checkpoint) -> None:
        c.tensors[f"{Q}.weight"] = Raw.fill("U8", (256, 64), 0x11)
        put(c, f"{Q}.weight", 0, 0x00, 0x88, 0x01, 0x20)

    kind = changed(change, tmp_path).kinds["layers.*.self_attn.q_proj"]
    assert kind.zeros == 6 and kind.most_zeros == 6 / (256 * 128)


# --- planted faults ---------------------------------------------------------------------------------------------------


def two_names(c: Checkpoint) -> None:
    c.tensors[f"model.{Q.partition('.')[2].partition('.')[2]}.weight"] = c.tensors[f"{Q}.weight"]


def stacked_too(c: Checkpoint) -> None:
    c.tensors[f"{L}.1.mlp.experts.down_proj"] = Raw.fill("BF16", (8, 128, 64), 0)


def quantized_head(c: Checkpoint) -> None:
    n = c.tensors["lm_head.weight"].shape[0]
    c.tensors["lm_head.weight"] = Raw.fill("U8", (n, 64), 0x21)
    c.tensors["lm_head.weight_scale"] = Raw.fill("F8_E4M3", (n, 8), 0x38)
    c.tensors["lm_head.weight_scale_2"] = Raw.f32(0.1)


def unlisted_draft(c: Checkpoint) -> None:
    exclude(c, "mtp.layers.0*")
    c.tensors |= {n: t for n, t in stored(MIXED).tensors.items() if n.startswith("mtp.")}


def sentinel(c: Checkpoint) -> None:
    exclude(c, "lm_head.\0backbone.pt_name_sentinel")


def activation_scales(c: Checkpoint) -> None:
    c.tensors[f"{Q}.input_scale"] = Raw.f32(0.1)


def zero_expert(c: Checkpoint) -> None:
    c.tensors[f"{EXPERT}.up_proj.weight_scale"] = Raw.fill("F8_E4M3", (64, 8), 0)
    c.tensors[f"{EXPERT}.up_proj.weight_scale_2"] = Raw.f32(0.0)


def unequal(c: Checkpoint) -> None:
    c.tensors[f"{EXPERT}.gate_proj.weight_scale_2"] = Raw.f32(2.0)
    c.tensors[f"{EXPERT}.up_proj.weight_scale_2"] = Raw.f32(0.5)


def half_scaled(c: Checkpoint) -> None:
    rows = [0.0] + [0.01] * 255
    c.tensors[f"{Q}.weight_scale"] = Raw.f32(rows, (256, 1))
    put(c, f"{Q}.weight", 3, 0x38)


FAULTS: list[tuple[str, Callable[[Checkpoint], object], str, str, str]] = [
    (W4A16, lambda c: fp8(c, f"{EXPERT}.up_proj"), "error", "experts-differ", "layers.2.mlp.experts.*.up_proj"),  # F3
    (W4A16, lambda c: dense(c, f"{L}.3.self_attn.v_proj"), "info", "fused-formats", "layers.3.self_attn.qkv"),  # F4
    (W4A16, lambda c: fp8(c, f"{L}.3.self_attn.k_proj"), "info", "fused-formats", "layers.3.self_attn.qkv"),  # F4
    (W4A16, lambda c: dense(c, f"{L}.3.self_attn.v_proj"), "warning", "stored-dense", "layers.3.self_attn.v_proj"),
    (W4A16, unlisted_draft, "warning", "stored-dense", "mtp.fc"),  # F7
    (MIXED, lambda c: c.tensors.pop("mtp.fc.weight"), "error", "missing", "mtp.fc"),  # F8
    (MIXED, lambda c: c.tensors.pop("mtp.layers.0.self_attn.k_norm.weight"), "error", "missing", "mtp.layers.0.self_"),
    (MIXED, lambda c: c.tensors.pop("mtp.layers.0.mlp.experts.down_proj"), "error", "missing", "mtp.layers.0.mlp.exp"),
    (DENSE, lambda c: c.tensors.pop("mtp.layers.0.mlp.up_proj.weight"), "error", "missing", "mtp.layers.0.mlp.up_"),
    (W4A16, quantized_head, "warning", "stored-quantized", "lm_head"),  # F9
    (W4A16, two_names, "error", "duplicate", "layers.3.self_attn.q_proj.weight"),  # F10
    (W4A16, activation_scales, "info", "input-scale-ignored", "layers.3.self_attn.q_proj"),  # F13
    (W4A16, stacked_too, "error", "duplicate", "layers.1.mlp.experts.down_proj"),  # F14
    (W4A16, lambda c: [c.tensors.pop(n) for n in list(c.tensors) if EXPERT in n], "error", "missing", "experts.5"),
    (W4A16, sentinel, "warning", "name-sentinel", "hf_quant_config.json"),  # F15
    (W4A16, unequal, "info", "fused-scales", "layers.*.mlp.experts.*.gate_up_proj"),  # F17
    (W4A16, lambda c: put(c, f"{Q}.weight_scale", 19, 0x7F), "error", "block-scale", Q),  # F21
    (CT, lambda c: put(c, "model.layers.3.self_attn.q_proj.weight_scale", 19, 0xFF), "error", "block-scale", "q_proj"),
    (W4A16, lambda c: put(c, f"{Q}.weight_scale", 19, 0xB8), "error", "block-scale", Q),
    (MIXED, lambda c: put(c, f"{Q}.weight", 130, 0xFF), "error", "fp8-code", Q),  # F21
    (W4A16, zero_expert, "info", "zero-expert", "layers.2.mlp.experts.5.up_proj"),  # F22
    (MIXED, lambda c: None, "info", "kv-scale-unit", "layers.3.self_attn"),  # F23
    (W4A16, lambda c: c.tensors.update({f"{Q}.weight_scale_2": Raw.f32(0.0)}), "error", "global-scale", Q),
    (W4A16, lambda c: c.tensors.update({f"{Q}.weight_scale_2": Raw.f32(-1.0)}), "error", "global-scale", Q),
    (W4A16, lambda c: c.tensors.update({f"{Q}.weight_scale_2": Raw.f32(float("nan"))}), "error", "global-scale", Q),
    (W4A16, lambda c: c.tensors.update({f"{Q}.weight_scale_2": Raw.f32(float("inf"))}), "error", "global-scale", Q),
    (CT, lambda c: c.tensors.update({"model.layers.3.self_attn.q_proj.weight_global_scale": Raw.f32([0.0])}),
     "error", "global-scale", "q_proj"),
    (MIXED, lambda c: c.tensors.update({f"{Q}.weight_scale": Raw.f32(float("nan"))}), "error", "fp8-scale", Q),
    (MIXED, half_scaled, "error", "fp8-scale", "q_proj"),
    (MIXED, lambda c: c.tensors.update({f"{L}.3.self_attn.k_proj.k_scale": Raw.f32(0.0)}), "error", "kv-scale", "k_sc"),
    (W4A16, lambda c: c.tensors.update({f"{Q}.weight": Raw.fill("U8", (256, 64), 0)}), "warning", "zero-weight", "q_"),
    (W4A16, lambda c: c.tensors.update({"model.stray": Raw.f32(1.0)}), "error", "unexpected", "model.stray"),
    (W4A16, lambda c: c.tensors.update({f"{Q}.pre_quant_scale": Raw.f32(1.0)}), "error", "unsupported", "q_proj"),
    (W4A16, lambda c: c.tensors.update({f"{Q}.zero_point": Raw.f32(1.0)}), "error", "unreadable", "q_proj"),
    (W4A16, lambda c: c.tensors.pop(f"{Q}.weight_scale"), "error", "unreadable", "q_proj"),
    (W4A16, lambda c: c.tensors.update({f"{L}.0.mlp.gate.weight": Raw.fill("BF16", (7, 9))}), "error", "shape", "gate"),
    (W4A16, lambda c: c.tensors.pop(f"{L}.0.input_layernorm.weight"), "error", "missing", "layers.0.input_layernorm"),
    (W4A16, lambda c: c.text_config.pop("num_hidden_layers"), "error", "config", "model"),
    (W4A16, lambda c: c.documents["hf_quant_config.json"].update(quantization=[]), "error", "unreadable", "quantizat"),
]  # fmt: skip


@pytest.mark.parametrize(("fixture", "change", "severity", "code", "where"), FAULTS)
def test_a_planted_fault_is_found(
    tmp_path: Path, fixture: str, change: Any, severity: str, code: str, where: str
) -> None:
    report = changed(change, tmp_path, fixture)
    hits = [f for f in of(report, severity) if f.code == code]
    assert hits and all(where in f.where for f in hits), report.findings
    assert all("\n" not in f.text and f.text for f in report.findings)
    others = [f for f in of(report, "error") if f.code != code]
    assert others == [], "one fault, one kind of error"


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_is_named_with_its_index_and_count(tmp_path: Path, byte: int) -> None:  # F21
    def change(c: Checkpoint) -> None:
        put(c, f"{Q}.weight_scale", 8 * 17 + 3, byte)
        put(c, f"{Q}.weight_scale", 8 * 200, 0x7F)

    (finding,) = of(changed(change, tmp_path))
    assert finding.where == f"{Q}.weight_scale"
    assert "2 values are NaN, the first at [17, 3]" in finding.text


def test_scales_of_a_fused_group_are_compared(tmp_path: Path) -> None:  # F17
    fused = changed(unequal, tmp_path).fused["layers.*.mlp.experts.*.gate_up_proj"]
    assert (fused.groups, fused.differ, fused.ratio, fused.where) == (32, 1, 4.0, "layers.2.mlp.experts.5.gate_up_proj")


def test_exclusion_of_layer_1_says_nothing_of_others(tmp_path: Path) -> None:  # F1
    found = of(changed(lambda c: exclude(c, "model.language_model.layers.1*"), tmp_path))
    assert {f.code for f in found} == {"stored-quantized"}
    experts = {f"layers.*.mlp.experts.*.{p}_proj (8)" for p in ("gate", "up", "down")}  # those of one layer
    assert {f.where for f in found if not f.where.startswith("layers.1.")} == experts


def test_it_goes_on_after_the_first_fault(tmp_path: Path) -> None:
    def change(c: Checkpoint) -> None:
        for i in (0, 2):
            del c.tensors[f"{L}.{i}.mlp.gate.weight"]
        del c.tensors[f"{EXPERT}.up_proj.weight"]
        c.tensors["model.a"] = c.tensors["model.b"] = Raw.f32(1.0)
        c.tensors[f"{L}.1.mlp.gate.weight"] = Raw.fill("BF16", (9, 128))
        put(c, f"{Q}.weight_scale", 0, 0x7F)
        stacked_too(c)

    codes = [f.code for f in of(changed(change, tmp_path), "error")]
    assert sorted(codes) == sorted(
        ["missing", "missing", "unreadable", "unexpected", "unexpected", "shape", "block-scale", "duplicate"]
    )


# --- files ------------------------------------------------------------------------------------------------------------


def test_faults_of_files_do_not_hide_each_other(tmp_path: Path) -> None:
    stored(W4A16).save(tmp_path, shards=4)
    (tmp_path / "model-00002-of-00004.safetensors").write_bytes(b"damaged")
    (tmp_path / "model-00003-of-00004.safetensors").unlink()
    report = examine(tmp_path)
    codes = [f.code for f in of(report, "error")]
    assert codes[:2] == ["missing-file", "unreadable-file"] and {"missing", "unreadable"} <= set(codes[2:])
    assert report.files == 2 and report.kinds


def test_a_stale_index(tmp_path: Path) -> None:
    c = stored(W4A16).copy()
    c.save(tmp_path, shards=2)
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    names = list(c.tensors)
    mapping = {n: (one, two)[i % 2] for i, n in enumerate(names)} | {names[0]: two, "model.norm2.weight": one}
    write_index(tmp_path, mapping)
    write(tmp_path / "model_extra.safetensors", {names[1]: c.tensors[names[1]], "mtp.norm": Raw.f32(1.0)})
    found = {(f.code, f.where) for f in of(examine(tmp_path), "error") if "mtp" not in f.where}
    assert found == {("index-stale", names[0]), ("missing", "model.norm2.weight"), ("duplicate", names[1])}


def test_what_the_index_promises_is_missed_once(tmp_path: Path) -> None:
    c = stored(W4A16).copy()
    names = list(c.tensors)
    del c.tensors[f"{L}.0.mlp.gate.weight"]
    c.save(tmp_path)
    write_index(tmp_path, dict.fromkeys(names, "model.safetensors"))
    assert brief(examine(tmp_path)) == [("error", "missing", f"{L}.0.mlp.gate.weight")]


def test_a_folder_of_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copy(FIXTURES / W4A16 / name, tmp_path)
    report = examine(tmp_path)
    assert not report.seen and brief(report) == [("warning", "tensors-not-seen", "*.safetensors")]
    assert cli.main(["lint", str(tmp_path), "--scales"]) == 0
    assert "only JSON, tensors were not seen" in capsys.readouterr().out


def test_unreadable_json_is_a_finding(tmp_path: Path) -> None:
    stored(W4A16).save(tmp_path)
    (tmp_path / "config.json").write_text("{")
    (finding,) = of(examine(tmp_path))
    assert finding.code == "unreadable" and "config.json" in finding.text


def test_an_unknown_architecture_is_still_read(tmp_path: Path) -> None:
    def change(c: Checkpoint) -> None:
        c.config["architectures"] = ["SomethingElse"]
        put(c, f"{Q}.weight_scale", 0, 0xFF)

    report = changed(change, tmp_path)
    assert {f.code for f in of(report)} == {"architecture", "block-scale"} and len(report.kinds) == 13


def test_what_multi_token_prediction_lacks_is_told_by_architecture(tmp_path: Path) -> None:  # F8
    c = Checkpoint.of("nemotronh-latent-mixed-modelopt")  # a layer of attention, then one of experts
    gone = ("mtp.layers.0.mixer.k_proj", "mtp.layers.1.mixer.experts.3.up_proj", "mtp.layers.0.eh_proj")
    for module in gone:
        del c.tensors[f"{module}.weight"]
    assert {f.where for f in of(examine(c.save(tmp_path)))} == set(gone)


# --- against the loader -----------------------------------------------------------------------------------------------

DAMAGE = ["dtype", "shape", "byte", "zeros", "ones", "transposed", "renamed", "twice", "deleted"]


def damage(c: Checkpoint, name: str, how: str, number: int) -> None:
    t = c.tensors[name]
    if how == "dtype":
        same = [d for d, size in SIZES.items() if size == SIZES[t.dtype] and d != t.dtype]
        c.tensors[name] = t._replace(dtype=same[number % len(same)])
    elif how == "shape":
        c.tensors[name] = Raw.fill(t.dtype, [*t.shape[:-1], t.shape[-1] + 1] if t.shape else [2], 0x38)
    elif how == "byte":
        c.tensors[name] = t.put(number % len(t.data), number % 256)
    elif how in ("zeros", "ones"):
        c.tensors[name] = t._replace(data=(b"\0" if how == "zeros" else b"\xff") * len(t.data))
    elif how == "transposed":
        c.tensors[name] = t._replace(shape=t.shape[::-1])
    elif how == "renamed":
        c.tensors[f"{name}_x"] = c.tensors.pop(name)
    elif how == "twice":
        c.tensors[f"model.{name}"] = t
    else:
        del c.tensors[name]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fixture=st.sampled_from([W4A16, CT]), how=st.sampled_from(DAMAGE), data=st.data(), number=st.integers(0, 2**31))
def test_errors_are_what_loading_refuses(tmp_path: Path, fixture: str, how: str, data: Any, number: int) -> None:
    c = stored(fixture).copy()
    damage(c, data.draw(st.sampled_from(sorted(c.tensors))), how, number)
    folder = c.save(tmp_path)
    errors = of(examine(folder), "error")
    index = open_index(folder)
    known = facts.load(index.config)
    try:
        load(index, known.weights(known.parse(index.config)), facts=known)
    except UserError as e:
        assert errors, e
        assert str(e) in [f.text for f in errors] or errors[0].code == "block-scale"
    else:
        assert errors == []


# --- memory, output, command ------------------------------------------------------------------------------------------

PEAK = """
import json, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from fp4ward import facts
from fp4ward.checkpoint import lint, scan
def memory(name):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(name))
before = memory("VmRSS")
report = lint.examine(Path(sys.argv[1]), facts.load, scales=True)
print(json.dumps([memory("VmHWM") - before, report.bytes, [f.code for f in report.findings]]))
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    shapes = {"packed": ("U8", [64, 2048, 2048]), "scale": ("F8_E4M3", [64, 2048, 256]), "global_scale": ("F32", [64])}
    header, at = {}, 0
    for leaf, (dtype, shape) in shapes.items():
        size = SIZES[dtype]
        for d in shape:
            size *= d
        header[f"x.experts.up_proj.weight_{leaf}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as f:  # no disk: all zeros, but for one NaN
        f.write(struct.pack("<Q", len(raw)) + raw)
        f.truncate(8 + len(raw) + at)
        f.seek(8 + len(raw) + at - 300)
        f.write(b"\x7f")
    (tmp_path / "config.json").write_text('{"architectures": ["Sparse"]}')
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, cwd=REPO)
    (tmp_path / "model.safetensors").unlink()
    assert done.returncode == 0, done.stderr
    grown, size, codes = json.loads(done.stdout)
    assert size > 280 << 20 and "block-scale" in codes and codes.count("zero-expert") == 64
    assert grown < 24 << 20


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    examine(FIXTURES / MIXED, progress=lambda done, total, name: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0 and [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_without_scales_nothing_of_them_is_read_and_torch_is_not_needed() -> None:
    lint_it = f"cli.main(['lint', {str(FIXTURES / W4A16)!r}])"
    code = f"import sys; from fp4ward import cli; {lint_it}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.endswith("False\n") and "block scales" not in done.stdout, done.stdout + done.stderr


def test_the_exit_code_is_2_for_errors_and_0_for_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = stored(W4A16).copy()
    sentinel(c)
    assert cli.main(["lint", str(c.save(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "0 errors, 1 warning, 0 info" in out and "\nwarning\n  name-sentinel: " in out
    for i in range(3):
        del c.tensors[f"{L}.{i}.mlp.gate.weight"]
    assert cli.main(["lint", str(c.save(tmp_path))]) == 2
    out, err = capsys.readouterr()
    assert "  missing: layers.*.mlp.gate (3), the first: missing tensor layers.0.mlp.gate.weight" in out
    assert err == f"fp4ward: error: {tmp_path}: 3 errors found\n"


def test_json_is_strict_and_holds_each_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = stored(W4A16).copy()
    for i in range(3):
        del c.tensors[f"{L}.{i}.mlp.gate.weight"]
    assert cli.main(["lint", str(c.save(tmp_path)), "--scales", "--json"]) == 2
    record = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert record["counts"] == {"error": 3, "warning": 0, "info": 0} and record["model"] == str(tmp_path)
    assert [f["where"] for f in record["findings"]] == [f"layers.{i}.mlp.gate" for i in range(3)]
    assert record["kinds"]["layers.*.self_attn.q_proj"]["stored_as"] == "nvfp4"


def test_a_folder_that_is_not_there_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", str(tmp_path / "nothing")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
