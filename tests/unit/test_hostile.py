"""Damage of any kind, from the folder to the exit code: a model or one sentence, and nothing that must be killed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4ward import LLM, SamplingParams
from fp4ward.errors import UserError
from tests.build import FIXTURES, SIZES, Checkpoint, Raw
from tests.conftest import REPO

FIXTURE = "q35moe-w4a16-modelopt"
NAMES = (FIXTURE, "q35moe-nvfp4a16-ct", "q35dense-vl-mixed-w4a16-fp8-modelopt")
GENERATE = [sys.executable, "-m", "fp4ward", "generate", str(FIXTURES / FIXTURE), "--prompt-token-ids", "1,2,3"]


@cache
def stored(fixture: str) -> Checkpoint:
    return Checkpoint.of(fixture)


def damaged(c: Checkpoint, name: str, how: str, number: int) -> None:
    """One change to one tensor; the file around it stays well formed."""
    t = c.tensors[name]
    same = [d for d, size in SIZES.items() if size == SIZES[t.dtype] and d != t.dtype]
    grown = [*t.shape[:-1], t.shape[-1] + number % 3 - 1] if t.shape else [2]
    changes: dict[str, Raw] = {
        "dtype": t._replace(dtype=same[number % len(same)]),
        "shape": Raw.fill(t.dtype, grown, 0x38),
        "byte": t.put(number % len(t.data), number % 256),
        "zeros": t._replace(data=bytes(len(t.data))),
        "ones": t._replace(data=b"\xff" * len(t.data)),
        "scalar": Raw.f32(1.0),
        "transposed": t._replace(shape=t.shape[::-1]),
    }
    if how in changes:
        c.tensors[name] = changes[how]
    elif how == "renamed":
        c.tensors[name.replace("proj", "porj") + ".x"] = c.tensors.pop(name)
    elif how == "twice":
        c.tensors[f"model.{name}"] = t
    else:
        del c.tensors[name]


KINDS = ["dtype", "shape", "byte", "zeros", "ones", "scalar", "transposed", "renamed", "twice", "deleted"]


@settings(
    deadline=None, derandomize=True, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(NAMES), st.sampled_from(KINDS), st.integers(0, 2**16), st.integers(0, 2**16))
def test_any_damage_to_a_tensor_is_a_model_or_a_sentence(
    tmp_path: Path, fixture: str, how: str, which: int, number: int
) -> None:
    c = stored(fixture).copy()
    name = sorted(c.tensors)[which % len(c.tensors)]
    damaged(c, name, how, number)
    folder = c.save(tmp_path / "m")
    try:
        llm = LLM(str(folder), device="cpu", show_progress=False, max_model_len=64)
        (out,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        said = out.outputs[0].error
        assert said is None or "not finite" in said
        assert how not in ("deleted", "renamed") or any(n.code == "left-out" for n in llm.notices), (how, name)
    except UserError as e:
        assert 0 < len(str(e)) < 600 and str(e).isprintable()
    finally:
        shutil.rmtree(folder)


def test_a_context_without_end_and_no_attention_costs_nothing(tmp_path: Path) -> None:
    c = stored(FIXTURE).copy()
    c.config.update(num_hidden_layers=3, layer_types=["linear_attention"] * 3, max_position_embeddings=2**31 - 1)
    c.tensors = {n: t for n, t in c.tensors.items() if ".layers.3." not in n}
    llm = LLM(str(c.save(tmp_path)), device="cpu", show_progress=False, block_size=1)
    assert llm.engine.scheduler.pages.size > 2**34
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])  # Python meets a full disk at the end, or at the first write
def test_output_without_room_is_one_sentence(unbuffered: str) -> None:
    command = [*GENERATE, "--max-tokens", "2", "--log-level", "error"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=REPO, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == ["fp4ward: error: [Errno 28] No space left on device"]


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_an_answer_at_once() -> None:
    command = [*GENERATE, "--max-tokens", "4000", "--ignore-eos", "--log-level", "error"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Where the tests run in a shell's background, SIGINT is ignored, and that is inherited.
    with subprocess.Popen(command, cwd=REPO, preexec_fn=heed_interrupts, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().decode() == "fp4ward: interrupted\n"
        assert process.wait(60) == 130


def nested(depth: int, inner: Any = None) -> Any:
    for _ in range(depth):
        inner = {"a": [inner]}
    return inner


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"a":' * 100_000),
        ("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
        ("config.json", b'{"a": "\xff"}'),
        ("config.json", nested(200)),
        ("generation_config.json", "[" * 100_000),
        ("generation_config.json", {"eos_token_id": [[1]]}),
        ("generation_config.json", {"temperature": math.nan}),
        ("hf_quant_config.json", "[1]"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}),
        ("model.safetensors.index.json", {"weight_map": nested(200)}),
        ("model.safetensors", b"\xff" * 4096),
    ],
)
def test_a_broken_file_is_named_in_a_sentence(tmp_path: Path, file: str, content: Any) -> None:
    c = stored(FIXTURE).copy()
    folder = c.save(tmp_path)
    text = json.dumps(content) if isinstance(content, dict) else content
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as e:
        LLM(str(folder), device="cpu", show_progress=False)
    assert 0 < len(str(e.value)) < 600 and str(e.value).isprintable()
