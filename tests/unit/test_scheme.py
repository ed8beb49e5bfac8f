"""Quantization JSON against tensors: dialects, matching of names, activations, disagreements, malformed input."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward.checkpoint.index import parse_json
from fp4ward.errors import UserError
from fp4ward.facts.qwen3_5 import canonical
from fp4ward.formats.formats import Format, Header, Stored, recognise
from fp4ward.formats.scheme import Notice, Scheme, kv_notices, read_scheme, settle

QUIET = settings(deadline=None, derandomize=True, max_examples=150)
L0 = "model.language_model.layers.0."


# --- building blocks --------------------------------------------------------------------------------------------------


def modelopt(algorithm: str | None = "NVFP4", exclude: Iterable[Any] = (), **more: Any) -> dict[str, Any]:
    body = {"quant_algo": algorithm, "group_size": 16, "exclude_modules": list(exclude), **more}
    return {"producer": {"name": "modelopt", "version": "0.44.0"}, "quantization": body}


def mixed(layers: Mapping[str, str], **more: Any) -> dict[str, Any]:
    return modelopt("MIXED_PRECISION", quantized_layers={n: {"quant_algo": a} for n, a in layers.items()}, **more)


FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
FP4_LOCAL = FP4 | {"dynamic": "local"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def group(weights: Any, inputs: Any = None, targets: Iterable[str] = ("Linear",), **more: Any) -> dict[str, Any]:
    return {"weights": weights, "input_activations": inputs, "targets": list(targets), **more}


def ct(*groups: Any, ignore: Iterable[Any] = (), **more: Any) -> dict[str, Any]:
    named = {f"group_{i}": g for i, g in enumerate(groups)}
    body = {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore), **more}
    return {"quantization_config": body}


def scheme_of(hf: Any = None, config: Any = None) -> Scheme:
    return read_scheme(config or {}, hf, canonical)


def excluding(*patterns: str) -> Scheme:
    return scheme_of(modelopt(exclude=patterns))


def excluded(scheme: Scheme, *modules: str) -> list[bool]:
    return [scheme.claim(m).format == "none" for m in modules]


def nvfp4(module: str, *extras: str, dialect: str = "modelopt") -> Stored:
    scale = Header(f"{module}.weight_scale", "F8_E4M3", (32, 2))
    if dialect == "modelopt":
        leaves = {
            "weight": Header(f"{module}.weight", "U8", (32, 16)),
            "weight_scale": scale,
            "weight_scale_2": Header(f"{module}.weight_scale_2", "F32", ()),
        }
    else:
        leaves = {
            "weight_packed": Header(f"{module}.weight_packed", "U8", (32, 16)),
            "weight_scale": scale,
            "weight_global_scale": Header(f"{module}.weight_global_scale", "F32", (1,)),
        }
    return _recognised(module, leaves, extras)


def fp8(module: str, *extras: str, scale: tuple[int, ...] = ()) -> Stored:
    leaves = {
        "weight": Header(f"{module}.weight", "F8_E4M3", (32, 32)),
        "weight_scale": Header(f"{module}.weight_scale", "F32", scale),
    }
    return _recognised(module, leaves, extras)


def dense(module: str, *extras: str, shape: tuple[int, ...] = (32, 32)) -> Stored:
    return _recognised(module, {"weight": Header(f"{module}.weight", "BF16", shape)}, extras)


def _recognised(module: str, leaves: dict[str, Header], extras: Iterable[str]) -> Stored:
    found = recognise(module, leaves | {x: Header(f"{module}.{x}", "F32", ()) for x in extras})
    assert found is not None
    return found


def settled(scheme: Scheme, *stored: Stored) -> tuple[dict[str, Format], set[tuple[str, str]]]:
    formats, notices = settle(scheme, {s.module: s for s in stored})
    for n in notices:
        assert "\n" not in n.text and n.text
    return formats, {(n.code, n.where) for n in notices}


def label(scheme: Scheme, stored: Stored) -> tuple[str, set[str]]:
    formats, notices = settled(scheme, stored)
    return formats[stored.module].label, {code for code, _ in notices}


# --- how names match --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["model.layers.1", "model.layers.1*", "model.layers.1.*", L0.replace("0.", "1")])
def test_layer_1_is_not_layers_10_to_19(pattern: str) -> None:  # F1
    s = excluding(pattern)
    assert excluded(s, "layers.1.mlp.gate_proj", "layers.1") == [True, True]
    assert not any(excluded(s, *(f"layers.{i}.mlp.gate_proj" for i in (0, 10, 11, 19, 100))))


@pytest.mark.parametrize(
    ("pattern", "covers", "leaves"),
    [
        (f"{L0}linear_attn*", ["layers.0.linear_attn.in_proj_qkv", "layers.0.linear_attn"], ["layers.1.linear_attn.x"]),
        ("lm_head*", ["lm_head"], ["lm_header", "layers.0.lm_head"]),
        ("model.visual*", ["visual.blocks.0.attn.qkv"], ["layers.0.visual"]),
        ("mtp.layers.0*", ["mtp.layers.0.mlp.gate"], ["mtp.fc", "layers.0.mlp.gate"]),
        ("mtp*", ["mtp.fc", "mtp.layers.0.mlp.gate"], ["lm_head"]),
        ("*.mlp.shared_expert.*", ["layers.3.mlp.shared_expert.up_proj"], ["layers.3.mlp.shared_expert_gate"]),
        (f"{L0}mlp.shared_expert*", ["layers.0.mlp.shared_expert.up_proj"], ["layers.0.mlp.shared_expert_gate"]),
        ("*lm_head*", ["lm_head"], ["layers.0.mlp.up_proj"]),
        ("*self_attn*", ["layers.3.self_attn.q_proj", "mtp.layers.0.self_attn.k_proj"], ["layers.3.linear_attn.x"]),
        ("*.gate", ["layers.3.mlp.gate"], ["layers.3.mlp.gate_proj", "layers.3.mlp.shared_expert_gate"]),
        ("*gate", ["layers.3.mlp.gate", "layers.3.mlp.shared_expert_gate"], ["layers.3.mlp.gate_proj"]),
        ("*1.mlp", ["layers.1.mlp.up_proj"], ["layers.11.mlp.up_proj"]),
        ("model.layers.*.mlp.gate", ["layers.3.mlp.gate", "layers.10.mlp.gate"], ["layers.3.mlp.gate_proj"]),
        ("model.layers.1*.mlp", ["layers.1.mlp.up_proj"], ["layers.10.mlp.up_proj"]),
        ("model.layers.*.self_attn.*_proj", ["layers.3.self_attn.q_proj"], ["layers.3.self_attn.q"]),
        ("model.layers.0.linear_attn.in_proj_*", ["layers.0.linear_attn.in_proj_qkv"], ["layers.0.linear_attn.out"]),
        ("model.layers.?.mlp", ["layers.3.mlp.up_proj"], ["layers.10.mlp.up_proj"]),
        ("model.*", ["layers.0.mlp.up_proj", "visual.blocks.0.attn.qkv"], ["lm_head", "mtp.fc"]),
        ("*", ["layers.0.mlp.up_proj", "lm_head", "mtp.fc"], []),
        ("model.layers.0.self_attn.qkv_proj", ["layers.0.self_attn.k_proj"], ["layers.0.self_attn.o_proj"]),
        ("re:.*lm_head", ["lm_head"], ["layers.0.mlp.up_proj"]),
        ("re:.*mlp.gate$", ["layers.0.mlp.gate"], ["layers.0.mlp.gate_proj"]),
        ("re:model.visual.*", ["visual.merger.linear_fc1"], ["layers.0.mlp.up_proj"]),
        (r"re:^model\.language_model\.layers\.1\.", ["layers.1.mlp.up_proj"], ["layers.11.mlp.up_proj", "mtp.fc"]),
        (r"re:.*layers\.[0-9]+\.mlp\.(gate|up)_proj", ["layers.17.mlp.up_proj"], ["layers.17.mlp.down_proj"]),
        (r"re:.*layers\.(0|12)\.mlp", ["layers.12.mlp.up_proj", "layers.0.mlp.x"], ["layers.2.mlp.x", "layers.10.mlp"]),
        ("re:lm", ["lm_head"], ["layers.0.lm"]),  # re.match: from the start
        ("re:model", ["layers.0.mlp.up_proj"], ["lm_head"]),
    ],
)  # fmt: skip
def test_patterns_of_exclusion(pattern: str, covers: list[str], leaves: list[str]) -> None:  # F1 F10 B23
    s = excluding(pattern)
    assert all(excluded(s, *covers))
    assert not any(excluded(s, *leaves))


@pytest.mark.parametrize("written", ["model.language_model.", "model.", "language_model.model."])
def test_one_name_for_a_module_whoever_wrote_it(written: str) -> None:  # F10 B23
    s = scheme_of(mixed({f"{written}layers.0.mlp.experts": "W4A16_NVFP4"}, exclude=[f"{written}layers.1*"]))
    assert s.claim("layers.0.mlp.experts.3.up_proj").format == "nvfp4"
    s = scheme_of(modelopt(exclude=[f"{written}layers.1*"]))
    assert excluded(s, "layers.1.mlp.gate_proj", "layers.10.mlp.gate_proj") == [True, False]


def test_fused_and_split_names_cover_each_other() -> None:  # F5
    one_by_one = excluding(*(f"{L0}linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a")))
    fused = excluding(f"{L0}linear_attn.in_proj_qkvz", f"{L0}linear_attn.in_proj_ba")
    for x in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"):
        assert excluded(one_by_one, f"layers.0.linear_attn.{x}") == [True]
        assert excluded(fused, f"layers.0.linear_attn.{x}") == [True]
    assert excluded(fused, "layers.0.linear_attn.out_proj") == [False]


def test_experts_by_parent_by_number_and_stacked() -> None:  # F14
    parent = scheme_of(mixed({f"{L0}mlp.experts": "NVFP4"}))
    each = scheme_of(mixed({f"{L0}mlp.experts.{e}.{p}_proj": "NVFP4" for e in (0, 1) for p in ("gate", "up", "down")}))
    for s in (parent, each):
        for module in ("experts.1.gate_proj", "experts.0.down_proj", "experts.gate_up_proj", "experts.down_proj"):
            assert s.claim(f"layers.0.mlp.{module}").format == "nvfp4", module
        assert s.claim("layers.0.mlp.gate").format == "none"
    assert each.claim("layers.0.mlp.experts.2.gate_proj").format == "none"


def test_nearest_entry_counts() -> None:
    s = scheme_of(mixed({"model.layers.0.mlp": "NVFP4", "model.layers.0.mlp.down_proj": "FP8"}))
    assert [s.claim(f"layers.0.mlp.{p}_proj").format for p in ("up", "down")] == ["nvfp4", "fp8"]


def test_marker_of_a_known_exporter_bug() -> None:  # F15
    s = excluding("lm_head.\0backbone.pt_name_sentinel", "model.layers.1.\0backbone.pt_name_sentinel*")
    assert [(n.code, n.where) for n in s.notices] == [("name-sentinel", "hf_quant_config.json")]
    assert excluded(s, "lm_head", "layers.1.mlp.up_proj", "layers.10.mlp.up_proj") == [True, True, False]


# --- dialects ---------------------------------------------------------------------------------------------------------


def test_same_result_in_every_dialect() -> None:  # B18
    names = ["model.layers.0.mlp.gate", "lm_head"]
    flat = {"quantization_config": modelopt(exclude=[])["quantization"] | {"quant_method": "modelopt", "ignore": names}}
    both = {"quantization_config": flat["quantization_config"] | {"producer": {"version": "0.44.0"}}}
    schemes = [
        scheme_of(modelopt(exclude=names)),
        scheme_of(None, flat),
        scheme_of(modelopt(exclude=names), both),
        scheme_of(None, {"text_config": flat}),
        scheme_of(None, ct(group(FP4, FP4_LOCAL), ignore=names)),
        scheme_of(None, ct(group(FP4, FP4_LOCAL), ignore=[r"re:.*mlp\.gate$", "re:lm_head"])),
        scheme_of(None, ct(group(FP4, FP4_LOCAL, ["re:.*mlp.(gate|up)_proj$", "model.layers.0.mlp.down_proj"]))),
        scheme_of(None, {"quantization_config": {"quant_method": "compressed-tensors", "ignore": names,
                                                 "config_groups": {"NVFP4": ["Linear"]}}}),
    ]  # fmt: skip
    for s in schemes:
        assert s.notices == ()
        for m in ("gate_proj", "up_proj", "down_proj", "gate", "gate_up_proj"):
            claim = s.claim(f"layers.0.mlp.{m}")
            assert (claim.format, claim.activation) == (("none", "none") if m == "gate" else ("nvfp4", "nvfp4")), m
        assert s.claim("lm_head").format == "none"
        assert s.claim("embed_tokens").format == s.claim("layers.0.input_layernorm").format == "none"


def test_groups_of_compressed_tensors_have_their_own_formats() -> None:  # F12
    config = ct(
        group(FP8, FP8_TOKEN, [r"re:.*self_attn.*"], format="float-quantized"),
        group(FP4, None, ["Linear"], format="nvfp4-pack-quantized"),
        group(FP8, None, ["model.layers.3.self_attn.o_proj"], format="float-quantized"),
        format="mixed-precision",
        ignore=["lm_head"],
    )
    s = scheme_of(None, config)
    claims = {m: s.claim(f"layers.3.{m}") for m in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")}
    assert {m: (c.format, c.activation) for m, c in claims.items()} == {
        "self_attn.q_proj": ("fp8", "fp8"),
        "self_attn.o_proj": ("fp8", "none"),  # an exact name wins over a pattern
        "mlp.up_proj": ("nvfp4", "none"),
    }
    assert claims["self_attn.q_proj"].dynamic and not claims["self_attn.o_proj"].dynamic


@pytest.mark.parametrize(
    ("weights", "form", "expected"),
    [
        (FP8 | {"strategy": "tensor"}, None, "fp8"),
        (FP8 | {"strategy": "block", "block_structure": [128, 128]}, None, "fp8"),
        (FP4 | {"group_size": None}, "nvfp4-pack-quantized", "nvfp4"),
        (FP4 | {"strategy": "group", "group_size": 32}, "mxfp4-pack-quantized", "other:mxfp4"),
        (FP8 | {"strategy": "group", "group_size": 32}, None, "other:mxfp8"),
        ({"num_bits": 4, "type": "int", "group_size": 128}, None, "other:int4"),
        (None, None, "none"),
    ],
)  # fmt: skip
def test_arguments_of_a_group(weights: Any, form: str | None, expected: str) -> None:
    s = scheme_of(None, ct(group(weights), **({"format": form} if form else {})))
    assert s.claim("layers.0.mlp.up_proj").format.removesuffix(" weights, unquantized inputs") == expected


@pytest.mark.parametrize(
    ("algorithm", "format_", "activation"),
    [
        ("NVFP4", "nvfp4", "nvfp4"),
        ("NVFP4_AWQ", "nvfp4", "nvfp4"),
        ("NVFP4_SVD", "nvfp4", "nvfp4"),
        ("W4A16_NVFP4", "nvfp4", "none"),
        ("FP8", "fp8", "fp8"),
        ("fp8_pb_wo", "fp8", "none"),  # leaks in lower case
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8", "fp8"),
        ("MXFP8", "other:MXFP8", "none"),
        ("W4A8_NVFP4_FP8", "other:W4A8_NVFP4_FP8", "none"),
        ("W4A16_AWQ", "other:W4A16_AWQ", "none"),
        ("SOMETHING_NEW", "other:SOMETHING_NEW", "none"),
    ],
)
def test_algorithms(algorithm: str, format_: str, activation: str) -> None:
    claim = scheme_of(modelopt(algorithm)).claim("layers.0.mlp.up_proj")
    assert (claim.format, claim.activation, claim.label) == (format_, activation, algorithm)


def test_hugging_face_fp8() -> None:  # B18
    q = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "visual", "shared_expert_gate"]}  # fmt: skip
    s = scheme_of(None, {"quantization_config": q})
    assert excluded(s, "lm_head", "layers.0.mlp.gate", "visual.x", "layers.9.mlp.shared_expert_gate") == [True] * 4
    assert excluded(s, "layers.1.mlp.gate", "layers.0.mlp.gate_proj") == [False, False]
    stored = fp8("layers.0.mlp.up_proj", scale=(1, 1))
    assert label(s, stored) == ("fp8_block W8A8", set())


def test_weights_that_a_method_does_not_describe() -> None:
    s = scheme_of(None, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert s.claim("layers.0.mlp.up_proj").format == "other:gptq"
    assert label(s, nvfp4("layers.0.mlp.up_proj")) == ("nvfp4 W4A16", {"format-differs"})


@pytest.mark.parametrize(
    "config",
    [
        ct(group(FP4), transform_config={"config_groups": {"R1": {"type": "hadamard", "apply": []}}}),
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_HADAMARD"}},
        ct(group(FP4 | {"rotate": True})),
        {"quantization_config": {"quant_algo": "NVFP4", "rotation_config": {"mode": "quarot"}}},
    ],
)
def test_rotations_leave_no_trace_in_tensors_and_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="rotates"):
        scheme_of(None, config)


def test_empty_transform_config_is_no_rotation() -> None:
    assert scheme_of(None, ct(group(FP4), transform_config={}, sparsity_config={})).stated
    assert scheme_of(None, ct(group(FP4), transform_config={"config_groups": {}})).stated


def test_cache_format() -> None:
    for hf, config, expected in (
        (modelopt(kv_cache_quant_algo="FP8"), {}, "fp8"),
        (modelopt(kv_cache_quant_algo=None), {}, None),
        (None, ct(group(FP4), kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}), "fp8"),
        (modelopt(None, kv_cache_quant_algo="FP8"), {}, "fp8"),  # only the cache is quantized
    ):
        s = scheme_of(hf, config)
        assert s.kv_cache == expected
        assert {n.code for n in s.notices} <= {"formats-unstated"}
    s = scheme_of(modelopt(kv_cache_quant_algo="NVFP4"))
    assert s.kv_cache is None and [n.code for n in s.notices] == ["kv-cache-other"]


# --- two files --------------------------------------------------------------------------------------------------------


def config_with(**body: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", "producer": {"version": "0.44.0"}, **body}}


@pytest.mark.parametrize(
    ("hf", "config", "codes"),
    [
        (modelopt(), config_with(quant_algo="NVFP4", producer={"version": "0.37.0"}), ["producer-differs"]),
        (modelopt(), config_with(quant_algo="W4A16_NVFP4"), ["algo-differs"]),
        (modelopt(kv_cache_quant_algo="FP8"), config_with(quant_algo="NVFP4"), ["kv-cache-differs"]),
        (modelopt(exclude=["lm_head"]), config_with(quant_algo="NVFP4", ignore=["mtp*"]), ["excludes-differ"]),
        (modelopt(exclude=["model.layers.1*"]),
         config_with(quant_algo="NVFP4", ignore=["model.language_model.layers.1.*"]), []),
        (mixed({"lm_head": "NVFP4"}),
         config_with(quant_algo="MIXED_PRECISION", quantized_layers={"lm_head": {"quant_algo": "FP8"}}),
         ["layers-differ"]),
        (modelopt("W4A16_NVFP4"),
         config_with(quant_algo="W4A16_NVFP4", config_groups={"group_0": group(FP4, FP4)}), ["activations-differ"]),
        (modelopt(), config_with(quant_algo="NVFP4", config_groups={"group_0": group(FP4)}), ["activations-differ"]),
        (modelopt(), config_with(quant_algo="NVFP4", config_groups={"group_0": group(FP8)}), ["groups-differ"]),
        (modelopt(), config_with(quant_algo="NVFP4", config_groups={"group_0": group(FP4, FP4)}), []),
        (modelopt(group_size=32), {}, ["group-size"]),
        (modelopt("MIXED_PRECISION"), {}, ["formats-unstated"]),
        (mixed({"lm_head": "NVFP4"}, exclude=["lm_head*"]), {}, ["listed-and-excluded"]),
    ],
)  # fmt: skip
def test_files_that_disagree(hf: Any, config: Any, codes: list[str]) -> None:
    s = scheme_of(hf, config)
    assert [n.code for n in s.notices] == codes
    assert all(n.text and "\n" not in n.text for n in s.notices)


# --- activations ------------------------------------------------------------------------------------------------------

M = "layers.0.mlp.up_proj"
NO_INPUTS = config_with(quant_algo="NVFP4", config_groups={"group_0": group(FP4), "group_1": group(FP4)})


@pytest.mark.parametrize(
    ("scheme", "stored", "expected", "codes"),
    [
        (scheme_of(modelopt()), nvfp4(M, "input_scale"), "nvfp4 W4A4", set()),
        (scheme_of(modelopt()), nvfp4(M), "nvfp4 W4A16", {"input-scale-missing"}),  # B15
        (scheme_of(None, NO_INPUTS), nvfp4(M), "nvfp4 W4A16", set()),  # B15 F13
        (scheme_of(None, NO_INPUTS), nvfp4(M, "input_scale"), "nvfp4 W4A16", {"input-scale-ignored"}),  # F13
        (scheme_of(modelopt("W4A16_NVFP4")), nvfp4(M), "nvfp4 W4A16", set()),
        (scheme_of(modelopt("W4A16_NVFP4")), nvfp4(M, "input_scale"), "nvfp4 W4A16", {"input-scale-ignored"}),  # B16
        (scheme_of(None, ct(group(FP4, FP4_LOCAL))), nvfp4(M, "input_global_scale", dialect="ct"), "nvfp4 W4A4", set()),
        (scheme_of(None, ct(group(FP4, FP4_LOCAL))), nvfp4(M, dialect="ct"), "nvfp4 W4A16", {"input-scale-missing"}),
        (scheme_of(None, ct(group(FP4))), nvfp4(M, dialect="ct"), "nvfp4 W4A16", set()),
        (scheme_of(None, ct(group(FP4, FP8_TOKEN))), nvfp4(M), "nvfp4 W4A16", {"activation-dropped"}),
        (scheme_of(), nvfp4(M, "input_scale"), "nvfp4 W4A4", set()),  # no JSON
        (scheme_of(), nvfp4(M), "nvfp4 W4A16", set()),
        (scheme_of(), fp8(M, "input_scale"), "fp8_tensor W8A8", set()),
        (scheme_of(), fp8(M), "fp8_tensor W8A16", set()),
        (scheme_of(), dense(M), "bf16", set()),
        (scheme_of(modelopt("FP8")), fp8(M, "input_scale"), "fp8_tensor W8A8", set()),
        (scheme_of(modelopt("FP8")), fp8(M), "fp8_tensor W8A16", {"input-scale-missing"}),
        (scheme_of(None, ct(group(FP8, FP8_TOKEN))), fp8(M, scale=(32, 1)), "fp8_channel W8A8", set()),
        (scheme_of(None, ct(group(FP8))), fp8(M, scale=(32, 1)), "fp8_channel W8A16", set()),
        (scheme_of(modelopt("fp8_pb_wo")), fp8(M, scale=(1, 1, 1, 1)), "fp8_block W8A16", set()),
        (scheme_of(modelopt("MXFP8")), nvfp4(M), "nvfp4 W4A16", {"format-differs"}),
        (scheme_of(modelopt("FP8")), nvfp4(M), "nvfp4 W4A16", {"format-differs"}),
        (scheme_of(modelopt()), fp8(M, "input_scale"), "fp8_tensor W8A8", {"format-differs"}),
    ],
)  # fmt: skip
def test_activation_is_a_fact_of_its_own(scheme: Scheme, stored: Stored, expected: str, codes: set[str]) -> None:
    assert label(scheme, stored) == (expected, codes)


# --- the tensors are the truth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exclude", ["lm_head", "lm_head*", "re:.*lm_head"])
def test_head_is_quantized_though_excluded(exclude: str) -> None:  # B21 F9
    formats, notices = settled(excluding(exclude), nvfp4("lm_head", "input_scale"), nvfp4(M, "input_scale"))
    assert formats["lm_head"].label == "nvfp4 W4A16"
    assert notices == {("stored-quantized", "lm_head"), ("input-scale-ignored", "lm_head")}
    _, said = settle(excluding(exclude), {"lm_head": nvfp4("lm_head")})
    assert exclude.rstrip("*") in said[0].text and "hf_quant_config.json" in said[0].text


def test_routers_are_bf16_though_not_excluded() -> None:  # B22 F7
    s = excluding("lm_head", "mtp.layers.0*", "model.visual*")
    modules = [f"layers.{i}.mlp.{g}" for i in range(40) for g in ("gate", "shared_expert_gate")]
    stored = [
        *map(dense, modules),
        *(dense(m) for m in ("mtp.fc", "mtp.layers.0.mlp.gate", "lm_head", "visual.merger.linear_fc1", "embed_tokens")),
        dense("layers.0.input_layernorm", shape=(32,)),
        dense("layers.0.linear_attn.conv1d", shape=(32, 1, 4)),
        nvfp4(M, "input_scale"),
    ]
    formats, notices = settled(s, *stored)
    assert all(not f.quantized for m, f in formats.items() if m != M)
    assert notices == {
        ("stored-dense", "layers.*.mlp.gate (40)"),
        ("stored-dense", "layers.*.mlp.shared_expert_gate (40)"),
        ("stored-dense", "mtp.fc"),
    }


def test_experts_that_no_entry_names_stay_bf16() -> None:  # F2
    s = scheme_of(mixed({"model.layers.0.mlp.shared_expert.up_proj": "FP8"}))
    stored = [dense(f"layers.0.mlp.experts.{e}.up_proj") for e in range(4)]
    formats, notices = settled(s, *stored, fp8("layers.0.mlp.shared_expert.up_proj", "input_scale"))
    assert notices == set()
    assert {f.name for m, f in formats.items() if ".experts." in m} == {"bf16"}


def test_experts_of_one_layer_in_two_formats_are_refused_by_name() -> None:  # F3
    s = scheme_of(modelopt())
    one, two = nvfp4("layers.7.mlp.experts.0.up_proj"), fp8("layers.7.mlp.experts.1.up_proj")
    with pytest.raises(UserError, match=r"layers\.7\.mlp\.experts\.0\.up_proj.*nvfp4.*layers\.7\.mlp\.experts\.1"):
        settled(s, one, two)
    # gate, up and down are read one by one: they may differ, and so may layers.
    settled(s, one, fp8("layers.7.mlp.experts.0.down_proj"), fp8("layers.8.mlp.experts.0.up_proj"))


def test_experts_share_one_activation() -> None:
    stored = [nvfp4(f"layers.7.mlp.experts.{e}.up_proj", *["input_scale"] * (e != 2)) for e in range(4)]
    formats, notices = settled(scheme_of(modelopt()), *stored)
    assert {f.label for f in formats.values()} == {"nvfp4 W4A16"}
    assert notices == {
        ("input-scale-missing", "layers.7.mlp.experts.2.up_proj"),
        ("experts-activation", "layers.7.mlp.experts.*.up_proj"),
    }


def test_projections_of_one_layer_may_differ() -> None:  # F4
    a = "layers.3.self_attn."
    s = scheme_of(mixed({f"model.{a}q_proj": "NVFP4", f"model.{a}k_proj": "FP8"}))
    stored = [nvfp4(f"{a}q_proj", "input_scale"), fp8(f"{a}k_proj", "input_scale"), dense(f"{a}v_proj")]
    formats, notices = settled(s, *stored)
    assert [f.label for f in formats.values()] == ["nvfp4 W4A4", "fp8_tensor W8A8", "bf16"] and notices == set()


def test_bf16_linear_attention_in_a_compressed_tensors_file() -> None:  # F6
    s = scheme_of(None, ct(group(FP4), ignore=["re:.*linear_attn.*", "re:.*mlp.gate$"]))
    stored = [dense(f"layers.0.linear_attn.{x}") for x in ("in_proj_qkv", "out_proj")]
    formats, notices = settled(s, *stored, nvfp4(M, dialect="ct"))
    assert len(formats) == 3 and notices == set()


def test_every_piece_of_mtp_in_the_ignore_list_is_found() -> None:  # F8
    names = [f"mtp.layers.0.{x}" for x in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")]
    s = scheme_of(None, ct(group(FP4), ignore=[*names, "mtp.fc"]))
    fused = ["mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.gate_up_proj"]
    assert settled(s, *map(dense, [*names, *fused, "mtp.fc"]))[1] == set()


def test_two_dialects_of_one_tensor() -> None:  # F11
    a, b = nvfp4(M), nvfp4(M, dialect="ct")
    assert label(scheme_of(modelopt("W4A16_NVFP4")), a) == label(scheme_of(None, ct(group(FP4))), b)
    assert not a.components["global_scale"].reciprocal and b.components["global_scale"].reciprocal


def test_entries_without_tensors_are_reported_once() -> None:
    layers = {f"model.layers.{i}.mlp.experts": "NVFP4" for i in range(4)}
    s = scheme_of(mixed(layers | {"lm_head": "NVFP4", "model.layers.0.mlp": "NVFP4"}))
    stored = [nvfp4(f"layers.0.mlp.experts.{e}.up_proj", "input_scale") for e in range(2)]
    formats, notices = settled(s, *stored)
    assert notices == {("entry-unmatched", "layers.*.mlp.experts (3)"), ("entry-unmatched", "lm_head")}
    assert {f.label for f in formats.values()} == {"nvfp4 W4A4"}


def test_cache_scales_both_one_none() -> None:  # B27 F23
    fp8_cache, silent = scheme_of(modelopt(kv_cache_quant_algo="FP8")), scheme_of(modelopt())
    both, one = {"k_scale", "v_scale"}, {"k_scale"}

    def codes(s: Scheme, scales: Mapping[int, set[str]]) -> list[tuple[str, str]]:
        notices: list[Notice] = kv_notices(s, [3, 7, 11], scales)
        return [(n.code, n.where) for n in notices]

    assert codes(fp8_cache, {3: both, 7: both, 11: both}) == []
    assert codes(fp8_cache, {}) == [("kv-scale-unit", "layers.*.self_attn (3)")]
    assert codes(fp8_cache, {3: both, 7: one}) == [
        ("kv-scale-one", "layers.7.self_attn"),
        ("kv-scale-unit", "layers.11.self_attn"),
    ]
    assert codes(silent, {}) == []
    assert codes(silent, {3: both}) == [("kv-scale-unasked", "layers.3.self_attn")]


# --- malformed input --------------------------------------------------------------------------------------------------


def sentence(e: pytest.ExceptionInfo[UserError]) -> str:
    text = str(e.value)
    assert "\n" not in text and len(text) < 400, text
    return text


@pytest.mark.parametrize(
    "hf",
    [
        [1],
        "x",
        {"quantization": []},
        {"quantization": {"quant_algo": 4}},
        modelopt(exclude=[3]),
        modelopt(exclude=[""]),
        modelopt(exclude=["x" * 300]),
        {"quantization": {"exclude_modules": "lm_head", "quant_algo": "NVFP4"}},
        modelopt("MIXED_PRECISION", quantized_layers=["lm_head"]),
        modelopt("MIXED_PRECISION", quantized_layers={"lm_head": "NVFP4"}),
        modelopt("MIXED_PRECISION", quantized_layers={"lm_head": {"quant_algo": ["NVFP4"]}}),
        modelopt(group_size="16"),
        modelopt(group_size=True),
        modelopt(kv_cache_quant_algo=8),
        {"producer": "modelopt", "quantization": {"quant_algo": "NVFP4"}},
    ],
)
def test_wrong_types_are_one_sentence(hf: Any) -> None:
    with pytest.raises(UserError) as e:
        scheme_of(hf)
    assert "hf_quant_config.json" in sentence(e)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": [1]},
        {"quantization_config": {"quant_method": 1}},
        ct(group([1])),
        ct(group(FP4, "all")),
        ct(group({"num_bits": "4", "type": "float"})),
        ct({"weights": FP4, "targets": "Linear"}),
        ct("NVFP4"),
        ct(group(FP4), ignore=[None]),
        ct(group(FP4), kv_cache_scheme=[8]),
        {"text_config": 3},
    ],
)
def test_wrong_types_in_config_json(config: Any) -> None:
    with pytest.raises(UserError) as e:
        scheme_of(None, config)
    assert "config.json" in sentence(e)


@pytest.mark.parametrize(
    "pattern",
    ["re:(", "re:[a", "re:*", "re:(a+)+$", "re:(a|a)*$", "re:(.*)*x", "re:" + "a?" * 40 + "a" * 40, "re:a{99999999999}",
     "re:.*a.*a.*a.*a.*a.*b", "re:(?:a{1,99}){1,99}b", "re:(?x)(a*) *b", "re:" + "(a|a)" * 40, "re:" + "(" * 120,
     "*a*a*a*a*a*a*a*b", "re:(?P<x>a)(?P<x>b)"],
)  # fmt: skip
def test_hostile_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UserError) as e:
        excluding(pattern)
    assert "pattern" in sentence(e)


@pytest.mark.parametrize(
    "pattern",
    [
        "re:.*a.*a.*a.*b",
        "*a*a*b",
        "re:.*?a.*?a.*?b",
        r"re:.*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
        "re:.*layers.*mlp.*experts.*(gate|up|down)_proj.*",
        "re:^(?!.*mlp).*",
        "re:(?i).*LM_head",
        "re:.*lm_head|.*visual.*",
        r"re:.*layers\.(" + "|".join(map(str, range(40))) + r")\.mlp.*",
    ],
)
def test_harmless_patterns_are_taken_and_quick(pattern: str) -> None:
    s = excluding(pattern)
    begin = time.perf_counter()
    s.claim("a" * 250)
    assert time.perf_counter() - begin < 20  # the worst that the limit lets through, on a slow machine


def test_parse_json_reads_what_repositories_hold() -> None:  # F16
    value = parse_json(
        '\ufeff{"a": [0.0, Infinity, -Infinity, NaN], "b": {"__float__": "Infinity"}}'.encode(), "config.json"
    )
    assert value["a"][1] == value["b"] == math.inf and value["a"][2] == -math.inf and math.isnan(value["a"][3])
    assert parse_json('{"time_step_limit": [0.0, {"__float__": "Infinity"}]}', "x") == {
        "time_step_limit": [0.0, math.inf]
    }
    assert parse_json('{"a": 1, "a": 1}', "x") == {"a": 1}
    assert math.isnan(parse_json('{"a": NaN}', "x")["a"])  # given once, though not equal to itself


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 10_000 + b"}",
     b'{"__float__": "seven"}', "{'a': 1}", "version https://git-lfs.github.com/spec/v1"],
)  # fmt: skip
def test_parse_json_refuses_in_one_sentence(text: str | bytes) -> None:
    with pytest.raises(UserError) as e:
        parse_json(text, "config.json")
    assert sentence(e).startswith("config.json: ")


KEY_WORDS = """quantization quant_algo quant_method config_groups group_0 weights input_activations targets ignore
    exclude_modules quantized_layers kv_cache_scheme kv_cache_quant_algo num_bits type format strategy group_size
    dynamic producer version quantization_config modules_to_not_convert transform_config activation_scheme text_config
    lm_head"""
VALUE_WORDS = """NVFP4 FP8 MIXED_PRECISION modelopt compressed-tensors fp8 Linear lm_head model.* * re: re:.* re:( float
    tensor_group . *. .. \0 model. model.layers.0* [ ? _* **.a"""
KEYS = st.sampled_from(KEY_WORDS.split())
WORDS = st.sampled_from(["", *VALUE_WORDS.split()])
LEAF = (
    st.none() | st.booleans() | st.integers() | st.sampled_from([4, 8, 16]) | st.floats() | WORDS | st.text(max_size=8)
)
JSON = st.recursive(
    LEAF, lambda c: st.lists(c, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), c, max_size=5), max_leaves=25
)
SECTION = st.fixed_dictionaries(
    {},
    optional={
        "quant_method": WORDS | JSON,
        "quant_algo": WORDS | JSON,
        "config_groups": st.dictionaries(KEYS, st.fixed_dictionaries({}, optional={
            "weights": st.sampled_from([FP4, FP8]) | JSON, "input_activations": st.sampled_from([FP4, FP8]) | JSON,
            "targets": st.lists(WORDS) | JSON}) | JSON, max_size=3),
        "quantized_layers": st.dictionaries(WORDS, st.fixed_dictionaries({"quant_algo": WORDS}), max_size=4) | JSON,
        "exclude_modules": st.lists(WORDS | st.text(max_size=9)) | JSON,
        "ignore": st.lists(WORDS) | JSON,
        "kv_cache_scheme": JSON,
        "producer": JSON,
    },
)  # fmt: skip


@QUIET
@given(st.fixed_dictionaries({"quantization_config": SECTION | JSON}) | JSON, SECTION | JSON)
def test_any_json_gives_a_scheme_or_a_sentence(config: Any, hf: Any) -> None:
    json.dumps([config, hf])
    try:
        s = read_scheme(config, hf, canonical)
        settle(s, {m: nvfp4(m) for m in ("lm_head", M, "layers.0.mlp.experts.0.up_proj", "x")})
    except UserError as e:
        assert "\n" not in str(e)
    else:
        assert isinstance(s.claim("layers.0.self_attn.q_proj").format, str)


@QUIET
@given(st.text(alphabet="ab1._*?", min_size=1, max_size=12), st.text(alphabet="ab1._", min_size=1, max_size=12))
def test_any_glob_and_name(pattern: str, name: str) -> None:
    try:
        s = excluding(pattern)
    except UserError:
        assert pattern.count("*") > 2
        return
    s.claim(name)
    literal = pattern.rstrip("*").rstrip(".")
    if literal and not set("*?_") & set(literal):
        assert excluded(s, canonical(literal), f"{canonical(literal)}.q_proj") == [True, True]


# --- size -------------------------------------------------------------------------------------------------------------


def test_claims_of_a_large_checkpoint_are_quick() -> None:
    """A tenth of the layers of 60 with 1024 experts; all of them take about two seconds on one core."""
    names = [f"layers.{i}.mlp.experts.{e}.{p}_proj" for i in range(6) for e in range(1024) for p in ("gate", "up")]
    listed = {f"model.layers.{i}.mlp.experts.{e}.up_proj": "NVFP4" for i in range(6) for e in range(1024)}
    ignore = [
        "re:.*lm_head",
        "re:.*mlp.gate$",
        "re:.*shared_expert_gate$",
        r"re:.*layers\.\d+\.linear_attn.*",
        "re:mtp.*",
    ]
    for s in (
        scheme_of(mixed(listed, exclude=["*.mlp.shared_expert.*", "mtp*"])),
        scheme_of(None, ct(group(FP4), ignore=ignore)),
        scheme_of(modelopt(exclude=[f"model.layers.{i}.self_attn*" for i in range(60)])),
    ):
        begin = time.perf_counter()
        for name in names:
            s.claim(name)
        assert time.perf_counter() - begin < 2
