"""config.json, whatever stands in it: one sentence, or the model that the tensors are. No torch."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward import cli, facts
from fp4ward.checkpoint.assign import assign
from fp4ward.checkpoint.index import Index, open_index
from fp4ward.errors import UserError
from fp4ward.facts import nemotron_h
from fp4ward.facts.qwen3_5 import REQUIRED_VALUES
from fp4ward.parallel.placement import Experts, Replicate, Shard, ranges
from tests.build import FIXTURES

MOE, DENSE = "q35moe-w4a16-modelopt", "q35dense-vl-mixed-w4a16-fp8-modelopt"
NEMOTRON, LATENT = "nemotronh-nvfp4-modelopt", "nemotronh-latent-mixed-modelopt"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@cache
def index(fixture: str) -> Index:
    return open_index(FIXTURES / fixture)


def changed(fixture: str, changes: dict[str, Any], root: bool = False) -> Index:
    config = dict(index(fixture).config)
    if root or "text_config" not in config:
        config |= changes
    else:
        config["text_config"] = config["text_config"] | changes
    return replace(index(fixture), config=config)


def resolved(i: Index) -> Any:
    """What an engine takes from the JSON and the headers before it reads a tensor."""
    known = facts.load(i.config)
    cfg = known.parse(i.config)
    known.state_spec(cfg)
    assign(i, known.weights(cfg), facts=known)
    return cfg


def refusal(i: Index) -> str:
    with pytest.raises(UserError) as e:
        resolved(i)
    text = str(e.value)
    assert 0 < len(text) < 600 and text.isprintable(), text[:200]
    return text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # Another model than the one that would run: never computed as if nothing were said.
        ({"rope_scaling": YARN}, "'yarn' in 'rope_scaling'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' in 'rope_scaling'"),
        ({"rope_parameters": YARN}, "'yarn' in 'rope_parameters'"),
        ({"rope_parameters": {"type": "dynamic"}}, "'dynamic' in 'rope_parameters'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one rotation for all layers"),
        ({"partial_rotary_factor": 2, "rope_parameters": {}}, "gives 64 dimensions"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5"),  # F28
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),  # F28
        ({"tie_word_embeddings": "false"}, "true or false"),
        # Against the tensors.
        ({"num_hidden_layers": 10**9}, "beyond any known model"),
        ({"num_experts": 2**31 - 1}, "[2147483647, 128]"),
        ({"num_hidden_layers": 4096, "layer_types": None}, "layers.4."),
        ({"vocab_size": 513}, "[513, 128]"),
        ({"layer_types": ["full_attention"] * 4}, "layers.0."),
        ({"eos_token_id": "1"}, "token ids are expected"),
        # However long, it is quoted in brief.
        ({"head_dim": "x" * 10**6}, "'head_dim' is 'xxx"),
        ({"layer_types": ["\n" * 10**6] * 4}, "layer_types[0]"),
        ({"architectures": ["A" * 10**6]}, "not supported"),
        ({"eos_token_id": [{"a": "b" * 10**6}]}, "eos_token_id"),
        ({"hidden_act": [[0]] * 10**5}, "hidden_act="),
    ],
)
def test_a_config_of_another_model_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(changed(MOE, changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}},
        {"norm_topk_prob": True},
        {"output_gate_type": "swish"},
        {"tie_word_embeddings": None},
        {"routed_scaling_factor": 1.0},
    ],
)
def test_the_same_model_in_other_words_is_the_same_model(changes: dict[str, Any]) -> None:
    assert resolved(changed(MOE, changes)) == resolved(index(MOE))


# --- Nemotron-H: facts without a forward ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),  # F28
        ({"use_conv_bias": False}, "use_conv_bias=False"),
        ({"mamba_ssm_cache_dtype": "float16"}, "only 'float32'"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit=[0.001, 0.1]"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type[1] is 'conv'; kinds of layers are mamba, moe"),
        ({"layers_block_type": None}, "'layers_block_type' is missing"),
        ({"layers_block_type": []}, "a kind for each of 1 to 4096 layers"),
        ({"hybrid_override_pattern": "MEM*EE"}, "layers_block_type and hybrid_override_pattern differ"),
        ({"num_hidden_layers": 7}, "num_hidden_layers=7, but 6 are named"),
        ({"n_group": 3}, "n_routed_experts=8 is no multiple of n_group=3"),
        ({"n_groups": 3}, "mamba_num_heads=8 is no multiple of n_groups=3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 of n_routed_experts=8"),
        ({"conv_kernel": 1}, "2 and more"),
        ({"moe_latent_size": 32}, "missing tensor layers.1.mixer.fc1_latent_proj"),
        ({"moe_intermediate_size": 96}, "[96, 128]"),
        ({"layers_block_type": ["mamba", "moe", "mamba", "attention", "mamba", "mlp"]}, "layers.4.mixer"),
    ],
)
def test_another_nemotron_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(changed(NEMOTRON, changes))


def test_kinds_of_layers_are_read_in_every_spelling() -> None:
    """Lists with older and newer names, and the string of characters."""
    base = resolved(index(NEMOTRON))
    assert base.layer_types == ("mamba", "moe", "mamba", "attention", "moe", "mlp")
    older = ["mamba", "moe", "mamba", "attention", "moe", "mlp"]
    pattern = {"layers_block_type": None, "hybrid_override_pattern": "MEM*E-", "num_hidden_layers": 6}
    for changes in ({"layers_block_type": older}, pattern, {"time_step_limit": [0.0, math.inf]}):  # F16
        assert resolved(changed(NEMOTRON, changes)) == base


@pytest.mark.parametrize("fixture", [NEMOTRON, LATENT])
def test_nemotron_names_are_canonical_once(fixture: str) -> None:  # B23, F27
    cfg = resolved(index(fixture))
    up = next(s for s in nemotron_h.weights(cfg) if s.name == "layers.1.mixer.experts.up_proj")
    assert up.shape == (8, 64, cfg.moe_latent_size or 128)  # one input projection, of the latent width where there is
    names = {nemotron_h.canonical(name) for name in index(fixture).tensors}
    assert "layers.0.mixer.in_proj.weight" in names and "lm_head.weight" in names
    for prefix in ("backbone.", "model.", "language_model.backbone.", "language_model.model.", ""):
        assert nemotron_h.canonical(f"{prefix}layers.0.norm.weight") == "layers.0.norm.weight"
    assert nemotron_h.canonical("model.") == "model."


def test_1856_rows_are_cut_into_29_units() -> None:  # F25
    sizes = {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
    slots = {s.name: s for s in nemotron_h.weights(nemotron_h.parse({**index(NEMOTRON).config, **sizes}))}
    placement = slots["layers.1.mixer.experts.down_proj"].placement
    assert isinstance(placement, Experts) and isinstance(placement.inner, Shard)
    spans = [ranges(placement.inner, 1856, r, 8)[0] for r in range(8)]
    assert [b - a for a, b in spans] == [256] * 5 + [192] * 3 and spans[-1][1] == 1856
    in_proj = slots["layers.0.mixer.in_proj"].placement
    assert isinstance(in_proj, Shard)
    assert ranges(in_proj, 648, 1, 2) == [(128, 256), (384, 512), (544, 576), (608, 640), (644, 648)]  # z, x, B, C, dt


def test_the_head_is_cut_by_rows_and_the_embedding_is_whole() -> None:
    """A head that every rank held whole would fit small plans and starve big ones."""
    for fixture, table in ((NEMOTRON, "embeddings"), (MOE, "embed_tokens"), (DENSE, "embed_tokens")):
        i = index(fixture)
        known = facts.load(i.config)
        slots = {s.name: s for s in known.weights(known.parse(i.config))}
        assert slots["lm_head"].placement == Shard(0) and slots[table].placement == Replicate(), fixture


def test_a_model_without_a_forward_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(FIXTURES / NEMOTRON), "--prompt-token-ids", "1"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "can be planned and linted, but not run yet" in err


def test_the_dtype_stands_in_either_place_under_either_name() -> None:
    config = {k: v for k, v in index(DENSE).config.items() if k != "dtype"}
    config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "dtype"}
    assert facts.load(config).parse(config | {"torch_dtype": "float16"}).dtype == "float16"
    assert facts.load(config).parse(config).dtype == "bfloat16"


def keys(fixture: str) -> list[str]:
    config = index(fixture).config
    text = config.get("text_config", config)
    more: tuple[str, ...] = ("rope_scaling", "text_config", "full_attention_interval", "torch_dtype", "rope_theta")
    more += ("hybrid_override_pattern", "num_hidden_layers", "norm_eps") if fixture in (NEMOTRON, LATENT) else ()
    return sorted({*config, *text, *REQUIRED_VALUES, *more})


numbers = st.sampled_from([0, -1, 1, 2, 3, 16, 31, 512, 10**9, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, 1e300, math.nan])
leaves = st.none() | st.booleans() | numbers | st.floats() | st.integers() | st.text(max_size=6)
words = st.sampled_from(
    ["default", "ME*E-", "mamba", "yarn", "full_attention", "linear_attention", "nvfp4", "Linear", "re:.*"]
)
values = st.recursive(
    leaves | words,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=4) | words | st.sampled_from(["rope_type", "rope_theta", "quant_algo"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=st.data(), fixture=st.sampled_from([MOE, DENSE, NEMOTRON, LATENT]), root=st.booleans())
def test_any_values_give_a_model_or_a_sentence(data: st.DataObject, fixture: str, root: bool) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(keys(fixture)), values, min_size=1, max_size=3))
    i = changed(fixture, changes, root)
    tracemalloc.start()
    try:
        resolved(i)
    except UserError as e:
        assert 0 < len(str(e)) < 600 and str(e).isprintable(), str(e)[:300]
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 256 << 20, changes
