"""What a user may set: refused early in one sentence, and resolved without side effects."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward.config import EngineConfig, parse_size, resolve
from fp4ward.errors import UserError

FACTS = {"cuda": False, "checkpoint_dtype": "bfloat16", "checkpoint_kv": None, "max_position_embeddings": 4096}


def resolved(cuda: bool = False, **kwargs: object) -> EngineConfig:
    facts = {k: kwargs.pop(k) for k in tuple(kwargs) if k in FACTS}
    return resolve(EngineConfig("m", **kwargs), **{**FACTS, "cuda": cuda, **facts})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("model", "", "a folder or a Hugging Face id"),
        ("dtype", "int8", "one of auto, bfloat16"),
        ("kv_cache_dtype", "fp8_e5m2", "one of auto, bf16"),
        ("device", "cuda:x", "auto, cpu, cuda or cuda:N"),
        ("device", "mps", "auto, cpu, cuda or cuda:N"),
        ("max_model_len", 0, "a whole number above 0"),
        ("max_num_seqs", True, "a whole number above 0"),
        ("block_size", 1.5, "a whole number above 0"),
        ("kv_cache_memory_bytes", -1, "a whole number above 0"),
        ("seed", -1, "from 0 to 2"),
        ("revision", "", "a branch, tag or commit"),
        ("max_num_batched_tokens", 8, "less than max_num_seqs=16"),
    ],
)
def test_a_bad_setting_is_one_sentence_that_names_it(name: str, value: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as e:
        EngineConfig(**{"model": "m", name: value})
    assert name in str(e.value)
    assert "\n" not in str(e.value)


def test_auto_is_float32_on_a_cpu_and_the_checkpoints_dtype_on_a_gpu() -> None:
    cpu, gpu = resolved(), resolved(cuda=True)
    assert (cpu.device, cpu.dtype, cpu.kv_cache_dtype) == ("cpu", "float32", "f32")
    assert (gpu.device, gpu.dtype, gpu.kv_cache_dtype) == ("cuda:0", "bfloat16", "bf16")
    assert resolved(cuda=True, checkpoint_dtype="torch.float16").kv_cache_dtype == "f16"
    assert resolved(cuda=True, device="cpu").dtype == "float32"


def test_the_cache_is_fp8_where_the_checkpoint_says_so_and_the_user_does_not() -> None:  # B27
    assert resolved(checkpoint_kv="fp8").kv_cache_dtype == "fp8"
    assert resolved(checkpoint_kv="fp8", kv_cache_dtype="f32").kv_cache_dtype == "f32"


@pytest.mark.parametrize(
    ("alias", "name"),
    [("bfloat16", "bf16"), ("fp8_e4m3", "fp8"), ("float32", "f32"), ("float64", "f64"), ("float16", "f16")],
)
def test_vllms_names_of_cache_types_mean_the_same(alias: str, name: str) -> None:
    assert resolved(kv_cache_dtype=alias).kv_cache_dtype == resolved(kv_cache_dtype=name).kv_cache_dtype == name


def test_the_context_is_the_models_unless_shortened() -> None:
    assert resolved().max_model_len == 4096
    assert resolved(max_model_len=100).max_model_len == 100
    with pytest.raises(UserError, match=r"max_model_len=5000 .*4096"):
        resolved(max_model_len=5000)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="no usable NVIDIA GPU"):
        resolved(device="cuda:1")
    assert resolved(cuda=True, device="cuda").device == "cuda:0"


def test_a_dtype_that_cannot_be_computed_in_is_refused() -> None:
    with pytest.raises(UserError, match="'float8_e4m3fn'"):
        resolved(cuda=True, checkpoint_dtype="float8_e4m3fn")


def test_resolving_returns_a_new_config_and_resolves_once() -> None:
    before = EngineConfig("m")
    after = resolve(before, **FACTS)
    assert before == EngineConfig("m")
    assert "auto" not in dataclasses.asdict(after).values()
    assert resolve(after, **FACTS) == after


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024), ("4GiB", 4 << 30), ("4G", 4 << 30), ("4g", 4 * 10**9), ("500MB", 500 * 10**6), ("1.5k", 1500),
        (" 2 TiB ", 2 << 40), ("0.5MiB", 1 << 19), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "4q", "1e9", "4 G i B", "0.1B", "9" * 30, "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_size(text)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.text(max_size=30))
def test_any_text_is_a_size_or_one_sentence(text: str) -> None:
    try:
        assert parse_size(text) > 0
    except UserError as e:
        assert "\n" not in str(e)
