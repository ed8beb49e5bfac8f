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

from fp4ward import facts
from fp4ward.checkpoint.assign import assign
from fp4ward.checkpoint.index import Index, open_index
from fp4ward.errors import UserError
from fp4ward.facts.qwen3_5 import REQUIRED_VALUES
from tests.build import FIXTURES

MOE, DENSE = "q35moe-w4a16-modelopt", "q35dense-vl-mixed-w4a16-fp8-modelopt"
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


def test_the_dtype_stands_in_either_place_under_either_name() -> None:
    config = {k: v for k, v in index(DENSE).config.items() if k != "dtype"}
    config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "dtype"}
    assert facts.load(config).parse(config | {"torch_dtype": "float16"}).dtype == "float16"
    assert facts.load(config).parse(config).dtype == "bfloat16"


def keys(fixture: str) -> list[str]:
    config = index(fixture).config
    text = config.get("text_config", config)
    more = ("rope_scaling", "text_config", "full_attention_interval", "torch_dtype", "rope_theta")
    return sorted({*config, *text, *REQUIRED_VALUES, *more})


numbers = st.sampled_from([0, -1, 1, 2, 3, 16, 31, 512, 10**9, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, 1e300, math.nan])
leaves = st.none() | st.booleans() | numbers | st.floats() | st.integers() | st.text(max_size=6)
words = st.sampled_from(["default", "yarn", "full_attention", "linear_attention", "nvfp4", "Linear", "re:.*"])
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
@given(data=st.data(), fixture=st.sampled_from([MOE, DENSE]), root=st.booleans())
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
