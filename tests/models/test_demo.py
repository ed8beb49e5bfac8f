"""The demo model: it answers, its accuracy falls when anything is wrong, its text path takes any input.

And demo/merge.py, one of the scripts that made it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from demo.merge import main as merge
from fp4ward import LLM, SamplingParams
from fp4ward.checkpoint import hub
from fp4ward.errors import UserError
from fp4ward.evals import run
from tests.models.faults import FAULTS, faulty

QUESTIONS = run.plan(["arithmetic"], 24, False, 0)  # guessing is never right


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    yield LLM("demo", device="cpu", show_progress=False, max_num_seqs=32)


def test_the_demo_is_small_and_complete() -> None:
    files = {p.name: p.stat().st_size for p in hub.DEMO.iterdir()}
    assert sum(files.values()) <= 20_000_000
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= files.keys()


def test_the_demo_answers_a_question(demo: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40)
    (out,) = demo.chat([{"role": "user", "content": "What is the capital of France?"}], greedy)
    assert out.outputs[0].text == "The capital of France is Paris."
    assert out.outputs[0].finish_reason == "stop"


def test_the_intact_demo_is_right(demo: LLM) -> None:
    assert run.ask(demo, "demo", QUESTIONS).tallies()["total"].accuracy >= 0.9


@pytest.mark.parametrize("name", [n for n in FAULTS if n != "none"])
def test_a_planted_fault_drops_accuracy_out_of_its_interval(name: str) -> None:
    with faulty(name, "demo", max_num_seqs=32) as llm:
        found = run.ask(llm, name, QUESTIONS).tallies()["total"]
    near_chance = FAULTS[name][2]
    # 24 right of 24 have the interval 86 to 100 %; near chance here is at most 2 right.
    assert found.right <= 2 if near_chance else found.interval[1] < 0.8


ANY = st.text(st.characters(codec=None), max_size=40) | st.binary(max_size=40).map(lambda b: b.decode("latin-1"))
SPECIAL = st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "\n", "####", "", " "])
TEXT = st.lists(ANY | SPECIAL, max_size=5).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGE: Any = (
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT})
    | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JSON, max_size=4)
)  # fmt: skip
FUZZ = settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(TEXT, st.lists(TEXT, max_size=4), st.booleans(), st.integers(0, 6))
def test_any_prompt_and_stop_strings_give_text_or_one_sentence(
    demo: LLM, prompt: str, stop: list[str], keep: bool, new: int
) -> None:
    try:
        params = SamplingParams(temperature=0, max_tokens=new, stop=stop, include_stop_str_in_output=keep)
        (out,) = demo.generate([prompt], params)
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error)
        return
    text = out.outputs[0].text
    text.encode("utf-8")  # no half of a pair, no stray byte
    if not keep:
        assert not any(s in text for s in stop)


@FUZZ
@given(st.lists(MESSAGE, max_size=3), JSON, st.dictionaries(TEXT, JSON, max_size=3), TEXT)
def test_any_messages_tools_and_template_arguments_give_text_or_one_sentence(
    demo: LLM, messages: list[Any], tools: Any, arguments: dict[str, Any], stop: str
) -> None:
    try:
        params = SamplingParams(temperature=0, max_tokens=3, stop=[stop] if stop else [])
        (out,) = demo.chat(messages, params, tools=tools, chat_template_kwargs=arguments)
        out.outputs[0].text.encode("utf-8")
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error)


@FUZZ
@given(st.lists(TEXT, min_size=1, max_size=3), st.dictionaries(TEXT, JSON, max_size=3))
def test_any_text_in_a_well_formed_conversation_is_answered(
    demo: LLM, said: list[str], arguments: dict[str, Any]
) -> None:
    said = [s.encode("utf-8", "replace").decode() for s in said]
    turns = [{"role": ("user", "assistant")[i % 2], "content": s} for i, s in enumerate(said)]
    arguments = {k: v for k, v in arguments.items() if k not in ("messages", "tools", "add_generation_prompt")}
    (out,) = demo.chat(turns, SamplingParams(temperature=0, max_tokens=3), chat_template_kwargs=arguments)
    assert len(out.outputs[0].token_ids) >= 1


@settings(FUZZ, max_examples=25)
@given(st.lists(st.integers(0, 4095), min_size=1, max_size=12), st.lists(TEXT.filter(bool), max_size=3))
def test_any_tokens_become_text_piece_by_piece_as_at_once(demo: LLM, ids: list[int], stop: list[str]) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=6, stop=stop, skip_special_tokens=False)
    streamed = list(demo.stream(ids, params))
    (whole,) = demo.generate([ids], params)
    assert streamed[-1].outputs[0].text == whole.outputs[0].text
    for before, after in itertools.pairwise(streamed):
        assert after.outputs[0].text.startswith(before.outputs[0].text)


def test_prompts_of_raw_bytes_reach_the_command_line_without_a_trace() -> None:
    for raw in (b"\xff\xfe\x00\xed\xa0\x80", "a\0\ud7ff\U0010ffff".encode()):
        done = subprocess.run(
            [sys.executable, "-m", "fp4ward", "generate", "demo", "--max-tokens", "2", "--device", "cpu"],
            input=raw,
            capture_output=True,
            timeout=120,
        )
        assert done.returncode in (0, 2), done.stderr
        assert b"Traceback" not in done.stderr
        assert done.returncode == 2 or done.stderr.count(b"notice demo: ") == 1  # where its nonsense is met


def test_merge_averages_two_checkpoints(tmp_path: Path) -> None:
    for name, value in (("from", 1.0), ("to", 3.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2, 2), value)}, tmp_path / name / "model.safetensors")
    (tmp_path / "to" / "config.json").write_text("{}")
    assert merge([str(tmp_path / "from"), str(tmp_path / "to"), "--share", "0.75", "--out", str(tmp_path / "out")]) == 0
    mixed = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert torch.equal(mixed, torch.full((2, 2), 2.5, dtype=torch.bfloat16))
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("start", "share", "words"),
    [
        ("from", "nan", "--share nan: a number from 0 to 1"),
        ("from", "7", "--share 7.0: a number from 0 to 1"),
        ("missing", "0.5", "missing: there is no folder of this name that holds"),
        ("from", "0.5", "w is missing or of another shape"),
        ("broken", "0.5", "eader"),
    ],
)
def test_merge_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: str, share: str, words: str
) -> None:
    for name, shape in (("from", (2, 3)), ("to", (2, 2)), ("broken", (1, 1))):
        (tmp_path / name).mkdir()
        save_file({"w": torch.zeros(shape)}, tmp_path / name / "model.safetensors")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors in here")
    assert merge([str(tmp_path / start), str(tmp_path / "to"), "--share", share, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
