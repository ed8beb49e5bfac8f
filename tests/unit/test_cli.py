"""The command `fp4ward`: flags, output, exit codes. Most run on a model that answers from a script."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fp4ward import cli, flags
from fp4ward.config import EngineConfig
from fp4ward.errors import UserError
from fp4ward.formats.scheme import Notice
from fp4ward.runtime.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

REPO = Path(__file__).resolve().parents[2]


class ScriptedLLM:
    """Answers with `pieces`, one token each, numbered from 10."""

    pieces: tuple[str, ...] = ("Hel", "lo", " world")
    tokenizer: object | None = object()
    notices: tuple[Notice, ...] = ()
    plan = types.SimpleNamespace(unpacked=False)
    defaults: Mapping[str, Any] = {"temperature": 0.5}
    fault: BaseException | None = None
    error: str | None = None

    def __init__(self, model: str, *, show_progress: bool | None = None, needs: str = "", **settings: Any) -> None:
        self.needs = needs
        self.model, self.show_progress, self.settings = model, show_progress, settings
        self.asked: list[tuple[Any, SamplingParams, dict[str, Any]]] = []
        self.closed = 0

    def default_sampling_params(self, **otherwise: Any) -> SamplingParams:
        return SamplingParams(**{**otherwise, **self.defaults})

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params, {}))
        return self._run(prompt, params)

    def stream_chat(self, messages: Any, params: SamplingParams, **kwargs: Any) -> Iterator[RequestOutput]:
        self.asked.append((list(messages), params, kwargs))
        return self._run(messages, params)

    def _run(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        ids = prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else [1, 2, 3]
        last = len(self.pieces)
        try:
            for i in range(1, last + 1):
                if self.fault is not None and i == last:
                    raise self.fault
                done = i == last
                choice = CompletionOutput(
                    index=0,
                    text="".join(self.pieces[:i]) if self.tokenizer else "",
                    token_ids=list(range(10, 10 + i)),
                    finish_reason=("error" if self.error else "stop") if done else None,
                    error=self.error if done else None,
                )
                if params.logprobs is not None:
                    each = [{t: Logprob(-0.5, 1, "x"), 7: Logprob(-math.inf, 2, "y")} for t in choice.token_ids]
                    choice = dataclasses.replace(choice, logprobs=each, cumulative_logprob=-0.5 * i)
                outputs = [dataclasses.replace(choice, index=k) for k in range(params.n)]
                asked_prompt = [None, {2: Logprob(-1.0, 1)}] if params.prompt_logprobs is not None else None
                yield RequestOutput("0", prompt if isinstance(prompt, str) else None, ids, asked_prompt, outputs, done)
        finally:
            self.closed += 1


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLLM]:
    """A class to configure; `made` holds what the command made of it."""

    class Made(ScriptedLLM):
        made: list[ScriptedLLM] = []  # noqa: RUF012

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.made.append(self)

    module = types.ModuleType("fp4ward.llm")
    module.LLM = Made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fp4ward.llm", module)
    return Made


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def words(text: str) -> list[str]:
    return text.split()


Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *argv: str) -> str:
    """The sentence that a command ends with, after checking that it is one, on stderr, with exit code 2."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fp4ward: error: ") and err.count("\n") == 1, err
    return err


# --- flags ------------------------------------------------------------------------------------------------------------


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == "fp4ward 0.1.0\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["generate"], "required: MODEL"),
        (["generate", "m", "p", "--temperatur", "1"], "--temperatur"),
        (["generate", "m", "p", "--temp", "1"], "--temp"),  # no completion from the first letters
        (["generate", "m", "p", "--temperature", "hot"], "invalid float value: 'hot'"),
        (["generate", "m", "p", "--trust-remote-code"], "--trust-remote-code"),
        (["generate", "m", "--prompt-token-ids", "1,x"], "'1,x' is no list of token ids"),
        (["generate", "m", "--prompt-token-ids=-1"], "'-1' is no list of token ids"),
        (["generate", "m", "--prompt-token-ids", ""], "at least one token"),
        (["generate", "m", "p", "--prompt-token-ids", "1"], "give one"),
        (["generate", "m", ""], "the prompt from the command line is empty"),
        (["generate", "m", "\udcff"], "not valid UTF-8"),
        (["generate", "m", "p", "--logprobs", "1"], "add --json"),
        (["generate", "m", "p", "--kv-cache-memory-bytes", "4q"], "'4q' is no size"),
        (["generate", "m", "p", "--log-level", "loud"], "invalid choice: 'loud'"),
        (["chat", "m", "--chat-template-kwargs", "[1]"], "no JSON object"),
        (["chat", "m", "--chat-template-kwargs", "{"], "no JSON object"),
        (["chat", "m", "-n", "2"], "-n"),
    ],
)
def test_bad_usage_is_one_sentence(
    scripted: type[ScriptedLLM], capsys: Capture, argv: list[str], sentence: str
) -> None:
    assert sentence in refused(capsys, *argv)
    assert scripted.made == []


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--temperature", "-1", "temperature is -1.0"),
        ("--temperature", "nan", "temperature is nan"),
        ("--top-p", "0", "top_p is 0.0"),
        ("--top-k", "-2", "top_k is -2"),
        ("--min-p", "2", "min_p is 2.0"),
        ("--repetition-penalty", "0", "repetition_penalty is 0.0"),
        ("--max-tokens", "0", "max_tokens is 0"),
        ("--min-tokens", "-1", "min_tokens is -1"),
        ("-n", "0", "n is 0"),
        ("--stop", "", "empty string"),
        ("--dtype", "int4", "--dtype: 'int4': one of auto, bfloat16"),
        ("--device", "tpu", "device='tpu'"),
        ("--kv-cache-dtype", "int8", "kv_cache_dtype='int8'"),
        ("--block-size", "0", "block_size=0"),
    ],
)
def test_bad_values_are_refused_before_a_model_is_loaded(
    scripted: type[ScriptedLLM], capsys: Capture, flag: str, value: str, sentence: str
) -> None:
    assert sentence in refused(capsys, "generate", "m", "p", f"{flag}={value}")
    assert scripted.made == []


def test_every_sampling_flag_arrives(scripted: type[ScriptedLLM]) -> None:
    wanted = SamplingParams(
        n=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, seed=4, stop=("a", "b c"), stop_token_ids=(6, 7), ignore_eos=True, max_tokens=9,
        min_tokens=3, logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    argv = words(
        "generate m p --json -n 2 --temperature 0.7 --top-p 0.9 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 "
        "--presence-penalty 0.2 --frequency-penalty 0.3 --seed 4 --stop-token-ids 6,7 --ignore-eos --max-tokens 9 "
        "--min-tokens 3 --logprobs 2 --prompt-logprobs 1 --stop a --stop"
    )
    assert cli.main([*argv, "b c"]) == 0
    assert scripted.made[0].asked[0][1] == wanted
    left = {f.name for f in dataclasses.fields(SamplingParams)} - set(flags.SAMPLING)
    assert left == {"include_stop_str_in_output", "skip_special_tokens"}, "a sampling field without a flag"


def test_flags_override_the_checkpoints_defaults_one_by_one(scripted: type[ScriptedLLM]) -> None:
    scripted.defaults = {"temperature": 0.5, "top_k": 20, "max_tokens": 77}
    assert cli.main(["generate", "m", "p", "--top-k", "3"]) == 0
    assert scripted.made[0].asked[0][1] == SamplingParams(temperature=0.5, top_k=3, max_tokens=77)


def test_an_answer_is_as_long_as_the_context_unless_limited(scripted: type[ScriptedLLM]) -> None:
    assert cli.main(["generate", "m", "p", "--min-tokens", "30"]) == 0
    assert scripted.made[0].asked[0][1].max_tokens is None


def test_engine_flags_arrive_and_the_rest_stay_the_engines_own(scripted: type[ScriptedLLM]) -> None:
    argv = words(
        "generate m p --dtype float64 --device cpu --kv-cache-dtype fp8 --max-model-len 99 --max-num-seqs 2 "
        "--max-num-batched-tokens 64 --block-size 8 --kv-cache-memory-bytes 1MiB --revision v1 "
        "--kernel experts=reference_experts --load-format dummy --enforce-eager"
    )
    assert cli.main(argv) == 0
    assert scripted.made[0].model == "m"
    assert scripted.made[0].settings == {
        "dtype": "float64", "device": "cpu", "kv_cache_dtype": "fp8", "max_model_len": 99, "max_num_seqs": 2,
        "max_num_batched_tokens": 64, "block_size": 8, "kv_cache_memory_bytes": 1 << 20, "revision": "v1",
        "kernel": ["experts=reference_experts"], "load_format": "dummy", "enforce_eager": True,
    }  # fmt: skip
    assert set(scripted.made[0].settings) == set(flags.ENGINE)
    assert set(flags.ENGINE) <= {f.name for f in dataclasses.fields(EngineConfig)}
    assert cli.main(["generate", "m", "p"]) == 0
    assert scripted.made[1].settings == {}


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["generate", "m"], ["generate", "m", "-"]])
def test_the_prompt_comes_from_stdin(
    scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    stdin(monkeypatch, "Grüße\n\nzwei\n".encode())
    assert cli.main(argv) == 0
    assert scripted.made[0].asked[0][0] == "Grüße\n\nzwei"


@pytest.mark.parametrize(
    ("data", "sentence"), [(b"", "stdin is empty"), (b"\n", "empty"), (b"ab\xff", "UTF-8 (byte 2)")]
)
def test_a_bad_stdin_is_refused(
    scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture, data: bytes, sentence: str
) -> None:
    stdin(monkeypatch, data)
    assert sentence in refused(capsys, "generate", "m")


def test_without_stdin_there_is_no_prompt(
    scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "stdin is empty" in refused(capsys, "generate", "m")


def test_text_goes_to_stdout_and_the_rest_to_stderr(scripted: type[ScriptedLLM], capsys: Capture) -> None:
    assert cli.main(["generate", "m", "p"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello world\n"
    assert err.startswith("fp4ward: 3 prompt tokens, 3 new, finished by stop; TTFT ") and "TPOT" in err


def test_text_is_written_token_by_token(scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdout(io.StringIO):
        flushed: list[str] = []  # noqa: RUF012

        def flush(self) -> None:
            self.flushed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Stdout())
    assert cli.main(["generate", "m", "p"]) == 0
    assert Stdout.flushed[:3] == ["Hel", "Hello", "Hello world"]


@pytest.mark.parametrize(("terminal", "written"), [(True, "a\ufffd[2Jb\n\tc\n"), (False, "a\x1b[2Jb\n\tc\n")])
def test_a_terminal_gets_no_control_characters(
    scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, terminal: bool, written: str
) -> None:
    scripted.pieces = ("a\x1b[2J", "b\n\tc")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert cli.main(["generate", "m", "p"]) == 0
    assert sys.stdout.getvalue() == written


def test_without_a_tokenizer_token_ids_are_written(scripted: type[ScriptedLLM], capsys: Capture) -> None:
    scripted.tokenizer = None
    assert cli.main(["generate", "m", "--prompt-token-ids", "[5, 6]"]) == 0
    assert scripted.made[0].asked[0][0] == [5, 6]
    assert capsys.readouterr().out == "10,11,12\n"


def test_several_answers_are_told_apart(scripted: type[ScriptedLLM], capsys: Capture) -> None:
    assert cli.main(["generate", "m", "p", "-n", "2"]) == 0
    assert capsys.readouterr().out == "[0] Hello world\n[1] Hello world\n"


def test_json_is_one_strict_object(scripted: type[ScriptedLLM], capsys: Capture) -> None:
    assert cli.main(["generate", "m", "p", "--json", "--logprobs", "1", "--prompt-logprobs", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    timings = found.pop("timings")
    outputs = found.pop("outputs")
    assert found == {
        "model": "m",
        "prompt": "p",
        "prompt_token_ids": [1, 2, 3],
        "prompt_logprobs": [None, {"2": {"logprob": -1.0, "rank": 1, "decoded_token": None}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
    }
    (one,) = outputs
    assert (one["text"], one["token_ids"], one["finish_reason"]) == ("Hello world", [10, 11, 12], "stop")
    assert one["cumulative_logprob"] == -1.5
    assert one["logprobs"][0]["7"] == {"logprob": None, "rank": 2, "decoded_token": "y"}
    assert set(timings) == {"load_s", "ttft_s", "tpot_s", "total_s"}
    assert 0 <= timings["ttft_s"] <= timings["total_s"]


def test_json_leaves_out_what_nobody_asked_for(scripted: type[ScriptedLLM], capsys: Capture) -> None:
    assert cli.main(["generate", "m", "p", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "prompt_logprobs" not in found
    assert set(found["outputs"][0]) == {"index", "text", "token_ids", "finish_reason", "stop_reason"}


def test_what_was_wrong_with_a_checkpoint_is_shown_once_and_briefly(
    scripted: type[ScriptedLLM], capsys: Capture
) -> None:
    scripted.notices = tuple(Notice("kv-scale", f"layer {i}", "unit scale") for i in range(10))
    assert cli.main(["generate", "m", "p"]) == 0
    err = capsys.readouterr().err
    assert err.count("notice kv-scale: layer") == cli.NOTICES_SHOWN
    assert "fp4ward: notice kv-scale: layer 0: unit scale\n" in err
    assert "2 more notices (--log-level debug shows them)" in err
    assert cli.main(["generate", "m", "p", "--log-level", "debug"]) == 0
    assert capsys.readouterr().err.count("notice kv-scale") == 10


@pytest.mark.parametrize("argv", ["--log-level warning generate m p", "generate m p --log-level error"])
def test_a_quiet_run_writes_nothing_but_the_answer(scripted: type[ScriptedLLM], capsys: Capture, argv: str) -> None:
    scripted.notices = (Notice("kv-scale", "layer 0", "unit scale"),)
    assert cli.main(words(argv)) == 0
    assert capsys.readouterr() == ("Hello world\n", "")
    assert scripted.made[0].show_progress is False


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_users_fault_is_a_sentence_and_a_trace_only_for_debugging(
    scripted: type[ScriptedLLM], capsys: Capture
) -> None:
    scripted.fault = UserError("the prompt has 9 tokens, the context 8; shorten it")
    assert cli.main(["generate", "m", "p"]) == 2
    err = capsys.readouterr().err
    assert err == "fp4ward: error: the prompt has 9 tokens, the context 8; shorten it\n"
    assert cli.main(["generate", "m", "p", "--log-level", "debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_is_one_line_that_says_how_to_report_it(scripted: type[ScriptedLLM], capsys: Capture) -> None:
    scripted.fault = ZeroDivisionError("division\nby zero")
    assert cli.main(["generate", "m", "p"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("fp4ward: internal error: ZeroDivisionError: division by zero (")
    assert "fp4ward env" in err and err.count("\n") == 1


def test_an_interrupt_ends_with_130(scripted: type[ScriptedLLM], capsys: Capture) -> None:
    scripted.fault = KeyboardInterrupt()
    assert cli.main(["generate", "m", "p"]) == 130
    assert capsys.readouterr() == ("Hello\n", "fp4ward: interrupted\n")


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_request_that_the_model_failed_is_no_success(
    scripted: type[ScriptedLLM], capsys: Capture, extra: list[str]
) -> None:  # F34
    scripted.error = "the logits are not numbers"
    assert cli.main(["generate", "m", "p", *extra]) == 1
    out, err = capsys.readouterr()
    assert err.endswith("fp4ward: error: the logits are not numbers\n")
    if extra:
        assert json.loads(out)["outputs"][0]["error"] == "the logits are not numbers"


def test_a_reader_that_went_away_is_no_error() -> None:
    command = [sys.executable, "-c", "import sys\nfrom fp4ward.cli import main\nsys.exit(main(['env']))"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


# --- chat -------------------------------------------------------------------------------------------------------------


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, argv: tuple[str, ...] = ()) -> int:
    stdin(monkeypatch, "".join(line + "\n" for line in lines).encode())
    return cli.main(["chat", "m", *argv])


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_conversation_is_kept_and_reset(
    scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lines = ("one", "", "two", "/reset", "three", "/exit", "never")
    assert talk(monkeypatch, *lines, argv=("--system-prompt", "be brief")) == 0
    system, answer = said("system", "be brief"), said("assistant", "Hello world")
    assert [asked[0] for asked in scripted.made[0].asked] == [
        [system, said("user", "one")],
        [system, said("user", "one"), answer, said("user", "two")],
        [system, said("user", "three")],
    ]
    assert capsys.readouterr().out == "Hello world\n" * 3


def test_template_variables_reach_the_template(scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "x", argv=("--no-thinking", "--chat-template-kwargs", '{"a": 1}')) == 0
    assert scripted.made[0].needs == "chat"
    assert scripted.made[0].asked[0][2] == {"chat_template_kwargs": {"a": 1, "enable_thinking": False}}


def test_an_unknown_command_says_which_there_are(
    scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert talk(monkeypatch, "/dance now") == 0
    err = capsys.readouterr().err
    assert "There is no command /dance. /reset" in err
    assert scripted.made[0].asked == []


def test_a_turn_that_fails_is_forgotten_and_the_conversation_goes_on(
    scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    scripted.fault = UserError("the prompt is too long")
    assert talk(monkeypatch, "one", "two") == 0
    assert [asked[0] for asked in scripted.made[0].asked] == [[said("user", "one")], [said("user", "two")]]
    assert "the prompt is too long (/reset starts over)" in capsys.readouterr().err


def test_an_interrupted_answer_is_kept_and_its_request_freed(
    scripted: type[ScriptedLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.fault = KeyboardInterrupt()
    assert talk(monkeypatch, "one", "two") == 0
    llm = scripted.made[0]
    assert llm.asked[1][0] == [said("user", "one"), said("assistant", "Hello"), said("user", "two")]
    assert llm.closed == 2


# --- env --------------------------------------------------------------------------------------------------------------


def test_env_tells_versions_and_hardware(capsys: Capture) -> None:
    assert cli.main(["env", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["fp4ward"] == "0.1.0"
    assert info["packages"]["torch"]
    assert info["cpu"]["cores"] >= 1
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    for part in ("fp4ward:", "python:", "torch:", "NVIDIA driver:", "CPU:", "memory:"):
        assert part in text


# --- real checkpoints -------------------------------------------------------------------------------------------------


def test_generate_writes_the_tokens_that_the_reference_does(checkpoint: Callable[[str], Path], capsys: Capture) -> None:
    from safetensors import safe_open

    folder = checkpoint("q35moe-w4a16-modelopt")
    with safe_open(folder / "reference.safetensors", "pt") as f:  # type: ignore[no-untyped-call]
        want = f.get_tensor("greedy_from_16")[0].tolist()
    ids = json.loads((folder / "test_input_ids.json").read_text())[0][:16]
    argv = ["generate", str(folder), "--prompt-token-ids", ",".join(map(str, ids)), "--max-tokens", "8"]
    assert cli.main([*argv, "--temperature", "0", "--ignore-eos", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["outputs"][0]["token_ids"] == want[16:24]
    assert found["outputs"][0]["finish_reason"] == "length"
    assert found["prompt_token_ids"] == ids
    assert "error" not in err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["generate", "{}", "hello"], "there is no tokenizer.json"),
        (["generate", "{}", "--prompt-token-ids", "1", "--stop", "x"], "there is no tokenizer.json"),
        (["chat", "{}"], "there is no tokenizer.json"),
        (["generate", "{}/nothing", "hello"], "no such folder"),
        (["generate", "{}/nothing", "--prompt-token-ids", "1"], "no such folder"),
        (["generate", "{}/config.json", "--prompt-token-ids", "1"], "is a file"),
        (["generate", "{}/..", "--prompt-token-ids", "1"], "no model.safetensors"),
        (["generate", "{}", "--prompt-token-ids", "1,512"], "prompt token 1 is 512"),
        (["generate", "{}", "--prompt-token-ids", "1", "--max-model-len", "4097"], "max_model_len=4097"),
        (["generate", "{}", "--prompt-token-ids", "1,2,3", "--max-model-len", "3"], "3"),
        (["generate", "{}", "--prompt-token-ids", "1", "--kv-cache-memory-bytes", "1"], "KV cache"),
    ],
)
def test_what_cannot_work_on_a_checkpoint_is_one_sentence(
    checkpoint: Callable[[str], Path], capsys: Capture, argv: list[str], sentence: str
) -> None:
    folder = checkpoint("q35moe-w4a16-modelopt")
    assert sentence in refused(capsys, *(a.format(folder) for a in argv), "--log-level", "error")


def test_chat_needs_a_chat_template(tmp_path: Path, capsys: Capture, checkpoint: Callable[[str], Path]) -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    folder = shutil.copytree(checkpoint("q35moe-w4a16-modelopt"), tmp_path / "m")
    backend.save(str(folder / "tokenizer.json"))
    assert "there is no chat template" in refused(capsys, "chat", str(folder))


def test_the_command_runs_as_a_module(checkpoint: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "fp4ward", "generate", str(checkpoint("q35moe-w4a16-modelopt")), "hello"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("fp4ward: error: ") and done.stderr.count("\n") == 1
