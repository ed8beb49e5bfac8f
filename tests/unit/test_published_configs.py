"""Quantization JSON of published checkpoints and of the fixtures: what is claimed, and each statement that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fp4ward.checkpoint.index import parse_json
from fp4ward.facts import nemotron_h, qwen3_5
from fp4ward.formats.formats import EXTRA_LEAVES, SCALE_LEAVES, Header, Stored, recognise
from fp4ward.formats.scheme import Scheme, kv_notices, read_scheme, settle
from tests.build import FIXTURES

LEAVES = {"weight", "weight_packed", *SCALE_LEAVES, *EXTRA_LEAVES}

NVFP4, W4A16, FP8, NOTHING = ("nvfp4", "nvfp4"), ("nvfp4", "none"), ("fp8", "fp8"), ("none", "none")


nemotron = nemotron_h.canonical


def read(folder: Path, prefix: str, canonical: Callable[[str], str]) -> Scheme:
    config, hf = folder / f"{prefix}config.json", folder / f"{prefix}hf_quant_config.json"
    quantization = parse_json(hf.read_bytes(), hf.name) if hf.exists() else None
    return read_scheme(parse_json(config.read_bytes(), config.name), quantization, canonical)


def codes(scheme: Scheme) -> set[tuple[str, str]]:
    return {(n.code, n.where) for n in scheme.notices}


# --- published: from JSON alone ---------------------------------------------------------------------------------------


def check(scheme: Scheme, claims: dict[str, tuple[str, str]]) -> None:
    got = {m: (scheme.claim(m).format, scheme.claim(m).activation) for m in claims}
    assert got == claims


@pytest.mark.parametrize("name", ["Qwen3.5-397B-A17B-NVFP4", "Qwen3.5-122B-A10B-NVFP4"])
def test_qwen_3_5_only_routed_experts_are_nvfp4(published: Path, name: str) -> None:
    scheme = read(published, f"nvidia--{name}_", qwen3_5.canonical)
    assert codes(scheme) == set()
    assert (scheme.kv_cache, scheme.group_size, scheme.stated) == ("fp8", 16, True)
    check(
        scheme,
        {
            "layers.0.mlp.experts.0.gate_proj": NVFP4,
            "layers.11.mlp.experts.255.down_proj": NVFP4,
            "layers.47.mlp.experts.gate_up_proj": NVFP4,
            "layers.0.mlp.shared_expert.up_proj": NOTHING,
            "layers.0.mlp.shared_expert_gate": NOTHING,
            "layers.3.self_attn.q_proj": NOTHING,
            "layers.0.linear_attn.in_proj_qkv": NOTHING,
            "layers.10.linear_attn.out_proj": NOTHING,
            "layers.0.mlp.gate": NVFP4,  # stored bf16 and not excluded: only the tensors show it  # B22
            "mtp.layers.0.mlp.experts.7.up_proj": NOTHING,
            # The exclude list of 397B ends at the layer, the one of 122B also has "mtp*".  # F7
            "mtp.fc": NVFP4 if "397B" in name else NOTHING,
            "lm_head": NOTHING,
            "visual.blocks.0.attn.qkv": NOTHING,
            "embed_tokens": NOTHING,
            "layers.0.input_layernorm": NOTHING,
        },
    )


def test_qwen_3_6_35b_disagrees_with_itself_three_times(published: Path) -> None:
    scheme = read(published, "nvidia--Qwen3.6-35B-A3B-NVFP4_", qwen3_5.canonical)
    assert codes(scheme) == {
        ("producer-differs", "config.json"),
        ("kv-cache-differs", "config.json"),
        ("activations-differ", "config.json: group_1"),
    }
    text = {n.code: n.text for n in scheme.notices}
    assert "0.37.0" in text["producer-differs"] and "0.44.0" in text["producer-differs"]
    assert "none here and fp8 in hf_quant_config.json" in text["kv-cache-differs"]
    assert scheme.kv_cache == "fp8" and scheme.group_size == 16
    check(
        scheme,
        {
            "layers.0.mlp.experts.0.gate_proj": W4A16,  # named once per layer
            "layers.39.mlp.experts.255.down_proj": W4A16,
            "layers.39.mlp.experts.gate_up_proj": W4A16,
            "layers.0.mlp.shared_expert.down_proj": W4A16,
            "layers.0.mlp.gate": NOTHING,
            "layers.0.mlp.shared_expert_gate": NOTHING,
            "layers.3.self_attn.o_proj": FP8,
            "layers.0.linear_attn.in_proj_qkv": FP8,
            "layers.0.linear_attn.in_proj_z": FP8,
            "layers.0.linear_attn.out_proj": FP8,
            "layers.0.linear_attn.in_proj_a": NOTHING,
            "layers.0.linear_attn.in_proj_b": NOTHING,
            "lm_head": W4A16,
            "mtp.fc": NOTHING,
            "mtp.layers.0.self_attn.q_proj": NOTHING,
            "visual.merger.linear_fc1": NOTHING,
        },
    )


def test_qwen_3_6_27b_agrees_with_itself(published: Path) -> None:
    scheme = read(published, "nvidia--Qwen3.6-27B-NVFP4_", qwen3_5.canonical)
    assert codes(scheme) == set()
    assert scheme.kv_cache == "fp8"
    check(
        scheme,
        {
            "layers.63.mlp.gate_proj": W4A16,
            "layers.0.mlp.gate_up_proj": W4A16,
            "layers.0.linear_attn.in_proj_qkvz": FP8,
            "layers.0.linear_attn.in_proj_ba": NOTHING,
            "layers.3.self_attn.qkv_proj": FP8,
            "lm_head": W4A16,
            "mtp.fc": NOTHING,
            "visual.blocks.0.mlp.linear_fc1": NOTHING,
        },
    )


def test_nemotron_nano_has_one_file_and_a_router_that_is_not_excluded(published: Path) -> None:
    scheme = read(published, "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4_", nemotron)
    assert codes(scheme) == set()
    assert scheme.kv_cache == "fp8" and scheme.group_size == 16
    check(
        scheme,
        {
            "layers.1.mixer.experts.0.up_proj": NVFP4,
            "layers.1.mixer.shared_experts.down_proj": NVFP4,
            "layers.1.mixer.gate": NVFP4,  # stored bf16, not listed  # B22
            "layers.0.mixer.in_proj": NVFP4,
            "layers.4.mixer.in_proj": NOTHING,  # the Mamba layer before an attention layer
            "layers.41.mixer.out_proj": NOTHING,
            "layers.40.mixer.out_proj": NVFP4,  # F1: "layers.4" is not layer 40
            "layers.5.mixer.q_proj": NOTHING,
            "layers.0.mixer.conv1d": NOTHING,
            "lm_head": NOTHING,
            "embeddings": NOTHING,
        },
    )


def test_nemotron_lightning_names_each_expert(published: Path) -> None:
    scheme = read(published, "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4_", nemotron)
    assert codes(scheme) == set()
    check(
        scheme,
        {
            "layers.1.mixer.experts.127.up_proj": W4A16,
            "layers.1.mixer.experts.up_proj": W4A16,  # stacked tensors, per-expert JSON  # F14
            "layers.1.mixer.shared_experts.down_proj": W4A16,
            "layers.0.mixer.in_proj": FP8,
            "layers.1.mixer.gate": NOTHING,
            "layers.5.mixer.k_proj": NOTHING,
            "lm_head": W4A16,
            "mtp.layers.0.eh_proj": NOTHING,
        },
    )


def test_qwen_3_names_each_router(published: Path) -> None:
    scheme = read(published, "nvidia--Qwen3-235B-A22B-NVFP4_", qwen3_5.canonical)
    assert codes(scheme) == set()
    gates = {f"layers.{i}.mlp.gate": NOTHING for i in (0, 1, 10, 93)}
    check(scheme, gates | {"layers.0.mlp.experts.127.gate_proj": NVFP4, "layers.0.self_attn.q_proj": NVFP4})


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.5-397B-A17B"])
def test_no_quantization_json_at_all(published: Path, name: str) -> None:
    scheme = read(published, f"Qwen--{name}_", qwen3_5.canonical)
    assert (scheme.stated, scheme.kv_cache, scheme.notices) == (False, None, ())


# --- fixtures: JSON against tensors -----------------------------------------------------------------------------------


def stored(folder: Path, canonical: Callable[[str], str]) -> dict[str, Stored]:
    """Every module of the checkpoint, from its header."""
    with (folder / "model.safetensors").open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    modules: dict[str, dict[str, Header]] = {}
    for name, t in header.items():
        module, _, leaf = name.rpartition(".")
        if name == "__metadata__" or (leaf not in LEAVES and len(t["shape"]) < 3):
            continue  # A_log, D, dt_bias, e_score_correction_bias: parameters of no linear layer
        if leaf not in LEAVES:  # a stack of experts without ".weight"
            module, leaf = name, "weight"
        modules.setdefault(canonical(module), {})[leaf] = Header(name, t["dtype"], tuple(t["shape"]))
    found = {module: recognise(module, leaves) for module, leaves in modules.items()}
    return {module: s for module, s in found.items() if s is not None}


QWEN_EXPERTS = {f"layers.*.mlp.experts.*.{p}_proj" for p in ("gate", "up", "down")}
QWEN_SHARED = {f"layers.*.mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")}
QWEN_LINEAR = {f"layers.*.linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "out_proj")}
QWEN_ATTENTION = {f"layers.*.self_attn.{p}_proj" for p in "qkvo"}
NEMO_SHARED = {f"layers.*.mixer.shared_experts.{p}_proj" for p in ("up", "down")}
NEMO_EXPERTS = {f"layers.*.mixer.experts.*.{p}_proj" for p in ("up", "down")}
EXPECTED: dict[str, tuple[Callable[[str], str], dict[str, set[str]], set[tuple[str, str]]]] = {
    "q35moe-nvfp4-w4a4-modelopt": (
        qwen3_5.canonical,
        {"nvfp4 W4A4": QWEN_EXPERTS | QWEN_SHARED | QWEN_LINEAR | QWEN_ATTENTION},
        set(),
    ),
    "q35moe-w4a16-modelopt": (
        qwen3_5.canonical,
        {"nvfp4 W4A16": QWEN_EXPERTS | QWEN_SHARED | QWEN_LINEAR | QWEN_ATTENTION},
        set(),
    ),
    "q35moe-nvfp4a16-ct": (
        qwen3_5.canonical,
        {"nvfp4 W4A16": QWEN_EXPERTS | QWEN_SHARED | QWEN_LINEAR | QWEN_ATTENTION},
        set(),
    ),
    "q35moe-vl-mixed-w4a16-fp8-modelopt": (
        qwen3_5.canonical,
        {"nvfp4 W4A16": QWEN_EXPERTS | QWEN_SHARED | {"lm_head"}, "fp8_tensor W8A8": QWEN_LINEAR | QWEN_ATTENTION},
        set(),
    ),
    "q35dense-vl-mixed-w4a16-fp8-modelopt": (
        qwen3_5.canonical,
        {
            "nvfp4 W4A16": {f"layers.*.mlp.{p}_proj" for p in ("gate", "up", "down")} | {"lm_head"},
            "fp8_tensor W8A8": QWEN_LINEAR | QWEN_ATTENTION,
        },
        set(),
    ),
    "nemotronh-nvfp4-modelopt": (
        nemotron,
        {"nvfp4 W4A4": NEMO_EXPERTS | NEMO_SHARED | {"layers.*.mixer.up_proj", "layers.*.mixer.down_proj"}},
        set(),
    ),
    "nemotronh-latent-mixed-modelopt": (
        nemotron,
        {
            "nvfp4 W4A4": NEMO_EXPERTS,
            "fp8_tensor W8A8": NEMO_SHARED | {"layers.*.mixer.in_proj", "layers.*.mixer.out_proj"},
        },
        set(),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_fixture_is_settled_as_it_is_stored(name: str) -> None:  # B15 B18
    canonical, quantized, wrong = EXPECTED[name]
    scheme = read(FIXTURES / name, "", canonical)
    assert codes(scheme) == set()
    formats, notices = settle(scheme, stored(FIXTURES / name, canonical))
    assert {(n.code, n.where) for n in notices} == wrong
    got: dict[str, set[str]] = {}
    for module, fmt in formats.items():
        if fmt.quantized:
            got.setdefault(fmt.label, set()).add(re.sub(r"(?<=\.)\d+(?=\.)", "*", module))
        else:
            assert fmt.name == "bf16"
    assert got == quantized


def test_exporter_marker_in_names_is_cut_off_and_reported() -> None:  # F15
    folder = FIXTURES / "nemotronh-nvfp4-modelopt"
    raw = parse_json((folder / "hf_quant_config.raw-bug.json").read_bytes(), "hf_quant_config.json")
    config = parse_json((folder / "config.json").read_bytes(), "config.json")
    scheme = read_scheme(config, raw, nemotron)
    assert codes(scheme) == {("name-sentinel", "hf_quant_config.json")}
    assert "7 names" in scheme.notices[0].text
    fixed = read(folder, "", nemotron)
    tensors = stored(folder, nemotron)
    assert settle(scheme, tensors) == settle(fixed, tensors)


def test_fixture_cache_scales() -> None:  # B27
    name = "q35moe-nvfp4-w4a4-modelopt"
    scheme = read(FIXTURES / name, "", qwen3_5.canonical)
    scales: dict[int, set[str]] = {}
    for module, s in stored(FIXTURES / name, qwen3_5.canonical).items():
        layer = qwen3_5.kv_scale_layer(module)
        if layer is not None:
            scales.setdefault(layer, set()).update({"k_scale", "v_scale"} & set(s.extras))
    assert scales == {3: {"k_scale", "v_scale"}}
    assert kv_notices(scheme, [3], scales) == []
