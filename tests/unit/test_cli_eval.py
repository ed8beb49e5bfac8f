"""`fp4ward eval` from flags to table, JSON, chart and comparison, on a model that is right as often as told."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fp4ward import cli, flags
from fp4ward.checkpoint import hub
from fp4ward.config import EngineConfig
from fp4ward.errors import UserError
from fp4ward.evals import report, run, tasks
from fp4ward.evals.run import Answer, Run
from fp4ward.formats.scheme import Notice
from fp4ward.runtime.request import CompletionOutput, RequestOutput, SamplingParams
from tests.conftest import FIXTURES

Capture = pytest.CaptureFixture[str]


@functools.cache
def questions() -> list[tasks.Question]:
    """What 20 questions a family are."""
    return run.plan([], 20, False, 0)


class Pupil:
    """Knows every question that `plan` gives, and answers the first `right` of ten correctly."""

    right = 7
    reply = "#### nothing"
    error: str | None = None
    tokenizer = object()
    notices: tuple[Notice, ...] = ()
    plan = types.SimpleNamespace(unpacked=False)
    made: list[Pupil] = []  # noqa: RUF012

    def __init__(self, model: str, *, needs: str, show_progress: bool | None = None, **settings: Any) -> None:
        assert needs == "chat"
        self.config = EngineConfig(model=model, **settings)
        self.asked: list[tuple[str, SamplingParams, dict[str, Any]]] = []
        type(self).made.append(self)

    def chat(
        self, messages: Sequence[Any], sampling_params: SamplingParams, *, chat_template_kwargs: Any, progress: Any
    ) -> list[RequestOutput]:
        known = {q.prompt: q for q in questions()}
        out = []
        for i, ((message,)) in enumerate(messages):
            assert message["role"] == "user"
            self.asked.append((message["content"], sampling_params, chat_template_kwargs))
            question = known.get(message["content"].partition("\n\n")[0])
            text = question.reply if question is not None and i % 10 < self.right else self.reply
            said = CompletionOutput(0, text, [1, 2, 3], None, None, "error" if self.error else "stop", None, self.error)
            out.append(RequestOutput(str(i), None, [1], None, [said], True))
            progress(i + 1)
        return out


@pytest.fixture(autouse=True)
def pupil(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Pupil] | None:
    if request.node.name.startswith("test_real"):
        return None

    class Made(Pupil):
        made: list[Pupil] = []  # noqa: RUF012

    module = types.ModuleType("fp4ward.llm")
    module.LLM = Made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fp4ward.llm", module)
    return Made


def evaluate(capsys: Capture, *argv: str, code: int = 0) -> dict[str, Any]:
    """The JSON of one run of 20 questions a family."""
    assert cli.main(["eval", "m", "--count", "20", "--json", *argv]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys: Capture, *argv: str) -> str:
    assert cli.main(["eval", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fp4ward: error: ") and err.count("\n") == 1, err
    return err


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_questions_are_asked_greedily_without_thinking_and_with_a_limit(pupil: type[Pupil], capsys: Capture) -> None:
    evaluate(capsys)
    asked = pupil.made[0].asked
    assert [a[0] for a in asked] == [q.prompt for q in questions()]
    assert all(a[1].temperature == 0 and a[2] == {"enable_thinking": False} for a in asked)
    assert list(dict.fromkeys(a[1].max_tokens for a in asked)) == list(run.TOKENS.values())


def test_another_model_is_told_the_form_and_gets_more_room(pupil: type[Pupil], capsys: Capture) -> None:
    data = evaluate(capsys, "--instructions", "--tasks", "choice,sorting")
    assert data["instructions"] is True and list(data["accuracies"]) == ["choice", "sorting", "total"]
    assert all(a[1].max_tokens == run.INSTRUCTED_TOKENS for a in pupil.made[0].asked)
    assert pupil.made[0].asked[0][0].endswith("\n\n" + run.INSTRUCTIONS["choice"])
    evaluate(capsys, "--max-tokens", "5")
    assert {a[1].max_tokens for a in pupil.made[1].asked} == {5}


def test_quick_is_one_family_and_seeds_differ(pupil: type[Pupil], capsys: Capture) -> None:
    assert cli.main(["eval", "m", "--quick"]) == 0
    assert len(pupil.made[0].asked) == run.QUICK_COUNT and "arithmetic" in capsys.readouterr().out
    assert cli.main(["eval", "m", "--quick", "--tasks", "all", "--count", "2"]) == 0
    assert len(pupil.made[1].asked) == 2 * len(tasks.FAMILIES)  # all means all
    assert len(run.plan(["recall"], None, True, 0)) == run.QUICK_COUNT
    assert {q.id for q in run.plan([], 20, False, 1)}.isdisjoint(q.id for q in questions())


def test_many_sequences_at_once_unless_told_otherwise(pupil: type[Pupil], capsys: Capture) -> None:
    evaluate(capsys, "--tasks", "sorting")
    evaluate(capsys, "--tasks", "sorting", "--max-num-batched-tokens", "32")
    evaluate(capsys, "--tasks", "sorting", "--max-num-seqs", "3", "--device", "cpu", "--dtype", "float64")
    assert [made.config.max_num_seqs for made in pupil.made] == [cli.EVAL_SEQS, 32, 3]
    assert (pupil.made[2].config.device, pupil.made[2].config.dtype) == ("cpu", "float64")


def test_the_flags_name_the_families_that_there_are() -> None:
    assert flags.TASKS == tasks.FAMILIES == tuple(run.COUNTS) == tuple(run.TOKENS) == tuple(run.INSTRUCTIONS)


def test_no_reply_of_the_right_form_is_cut_by_the_limit() -> None:
    """A reply has fewer tokens than characters; measured with the demo's tokenizer: 72, 5, 24, 48 and 40 (run.py)."""
    for family, limit in run.TOKENS.items():
        longest = max(len(q.reply.split()) for q in run.plan([family], 40, False, 0))
        assert longest < limit


# --- what is told -----------------------------------------------------------------------------------------------------


def test_json_holds_accuracies_settings_and_every_answer(pupil: type[Pupil], capsys: Capture) -> None:
    data = evaluate(capsys)
    assert (data["model"], data["seed"], data["version"], data["fp4ward"]) == ("m", 0, 1, "0.1.0")
    assert data["engine"]["max_num_seqs"] == cli.EVAL_SEQS and data["load_s"] >= 0
    assert list(data["accuracies"]) == [*tasks.FAMILIES, "total"]
    for family in tasks.FAMILIES:
        got = data["accuracies"][family]
        assert (got["right"], got["asked"], got["accuracy"]) == (14, 20, 0.7)
        assert got["interval_95"] == pytest.approx((0.4810, 0.8545), abs=1e-4) and got["seconds"] >= 0
        assert got["chance"] == tasks.CHANCE[family]
    assert data["accuracies"]["total"] | {"seconds": 0} == {
        "right": 70, "asked": 100, "chance": 0.05, "seconds": 0, "accuracy": 0.7,
        "interval_95": pytest.approx((0.6042, 0.7811), abs=1e-4),
    }  # fmt: skip
    first = questions()[0]
    assert [q["id"] for q in data["questions"]] == [q.id for q in questions()]
    assert [q["right"] for q in data["questions"]] == [i % 10 < 7 for i in range(20)] * 5
    assert data["questions"][0] == {
        "id": first.id, "family": "arithmetic", "right": True, "expected": first.answer,
        "answer": first.answer, "reply": first.reply, "tokens": 3, "finish_reason": "stop", "error": None,
    }  # fmt: skip
    assert data["questions"][9]["answer"] == "nothing"


def test_the_table_shows_families_and_total(pupil: type[Pupil], capsys: Capture) -> None:
    assert cli.main(["eval", "m", "--count", "20"]) == 0
    lines = [[c.strip() for c in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = {cells[0]: cells[1:-1] for cells in lines if cells}
    assert list(rows) == [*tasks.FAMILIES, "total"]
    assert rows["choice"] == ["14/20", "70.0", "48.1 to 85.5", "25.0"]
    assert rows["total"] == ["70/100", "70.0", "60.4 to 78.1", "5.0"]


def test_a_model_that_misses_the_form_is_pointed_to_instructions(pupil: type[Pupil], capsys: Capture) -> None:
    pupil.right, pupil.reply = 0, "I do not know"
    assert cli.main(["eval", "m", "--count", "20", "--tasks", "arithmetic"]) == 0
    assert "20 of 20 replies hold no answer in the form" in capsys.readouterr().err
    assert cli.main(["eval", "m", "--count", "20", "--tasks", "arithmetic", "--instructions"]) == 0
    assert capsys.readouterr().err == ""


def test_answers_that_the_model_failed_are_wrong_and_end_with_1(pupil: type[Pupil], capsys: Capture) -> None:
    pupil.error = "logits are not numbers"
    assert cli.main(["eval", "m", "--count", "20", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["accuracies"]["total"]["right"] == 0
    assert "100 answers failed, the first so: logits are not numbers" in err


def test_progress_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked = questions()
    with report.progress_bars(asked, quiet=False) as progress:
        progress("choice", 1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with report.progress_bars(asked, quiet=True) as progress:
        progress("choice", 1)
    assert capsys.readouterr().err == ""
    with report.progress_bars(asked, quiet=False) as progress:
        progress("choice", 1)
    assert "choice" in capsys.readouterr().err


# --- comparison -------------------------------------------------------------------------------------------------------


def test_a_saved_run_is_compared_question_by_question(pupil: type[Pupil], capsys: Capture, tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    printed = evaluate(capsys, "--save", str(saved))
    assert json.loads(saved.read_text()) == printed
    pupil.right = 4
    data = evaluate(capsys, "--compare", str(saved))
    assert data["compared"]["model"] == "m" and data["compared"]["file"] == str(saved)
    got = data["compared"]["differences"]["total"]
    assert (got["gained"], got["lost"], got["asked"], got["difference"]) == (0, 30, 100, -0.3)
    assert got["interval_95"][1] < 0 and got["p_value"] == 2 / 2**30
    assert cli.main(["eval", "m", "--count", "20", "--compare", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "│ choice     │  -30.0 │" in out and "< 0.001" in out and "The difference is m now minus m as saved." in out


def test_gains_and_losses_are_told_apart() -> None:
    before = Run("b", False, [Answer("a", "choice", True), Answer("b", "choice", False), Answer("c", "recall", True)])
    after = Run("a", False, [Answer("c", "recall", True), Answer("b", "choice", True), Answer("a", "choice", False)])
    paired = run.compare(after, before)
    assert {n: (d.gained, d.lost, d.asked) for n, d in paired.items()} == {
        "recall": (0, 0, 1), "choice": (1, 1, 2), "total": (1, 1, 3),
    }  # fmt: skip


def test_other_questions_are_refused_before_the_model_is_loaded(
    pupil: type[Pupil], capsys: Capture, tmp_path: Path
) -> None:
    saved = str(tmp_path / "a.json")
    evaluate(capsys, "--save", saved)
    pupil.made.clear()
    argv = ("m", "--compare", saved, "--count")
    assert "answers 100 questions, here are 50, and 50 are the same" in refused(capsys, *argv, "10")
    assert "here are 100, and 0 are the same" in refused(capsys, *argv, "20", "--seed", "1")
    assert "was asked without --instructions" in refused(capsys, *argv, "20", "--instructions")
    assert pupil.made == []


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", "null", "{}", '{"version": 1}', "[" * 100_000,
        '{"version": 1, "model": "m", "instructions": false, "questions": []}',
        '{"version": 1, "model": "m", "instructions": false, "questions": [7]}',
        '{"version": 1, "model": "m", "instructions": false, "questions": [{"id": "a", "family": "x", "right": true}]}',
        '{"version": 1, "model": "m", "instructions": false, "questions": [{"id": [], "family": {}, "right": 1}]}',
        '{"version": 1, "model": 3, "instructions": false, "questions": [{"id": "a", "family": "recall", "right": 1}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_record_is_refused(capsys: Capture, tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert "holds no answers to compare with" in refused(capsys, "m", "--compare", str(file))


def test_a_record_of_another_version_is_refused(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"version": 9}')
    assert "a record of version 9" in refused(capsys, "m", "--compare", str(file))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "required: MODEL"),
        (["m", "--tasks", "sums"], "no task family 'sums'; there are arithmetic, recall"),
        (["m", "--tasks", "recall,"], "no task family ''"),
        (["m", "--count", "0"], "0 questions a family: a count from 1 to 2000"),
        (["m", "--count", "2001"], "from 1 to 2000"),
        (["m", "--max-tokens", "0"], "--max-tokens 0"),
        (["m", "--compare", "nowhere.json"], "nowhere.json: No such file"),
        (["m", "--save", "nowhere/x.json"], "nowhere/x.json: its folder does not exist"),
        (["m", "--plot", "nowhere/x.png"], "nowhere/x.png: its folder does not exist"),
        (["m", "--dtype", "int8"], "--dtype: 'int8'"),
    ],
)
def test_a_bad_flag_is_one_sentence(pupil: type[Pupil], capsys: Capture, argv: list[str], sentence: str) -> None:
    assert sentence in refused(capsys, *argv)
    assert pupil.made == []


def test_a_file_that_cannot_be_written_is_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    assert f"{tmp_path}: Is a directory" in refused(capsys, "m", "--count", "20", "--save", str(tmp_path))


# --- chart ------------------------------------------------------------------------------------------------------------


def test_the_chart_is_drawn_with_and_without_comparison(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    saved, chart = str(tmp_path / "a.json"), tmp_path / "a.png"
    evaluate(capsys, "--save", saved, "--plot", str(chart))
    assert chart.read_bytes().startswith(b"\x89PNG")
    drawn = tmp_path / "b.svg"
    evaluate(capsys, "--compare", saved, "--plot", str(drawn))
    text = drawn.read_text()
    assert "<svg" in text and all(f"<!-- {f} -->" in text for f in (*tasks.FAMILIES, "total", "m (compared)", "chance"))


def test_a_chart_of_no_known_kind_is_refused(pupil: type[Pupil], capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    assert "a name that ends in one of" in refused(capsys, "m", "--plot", "x.docx")
    assert pupil.made == []


def test_a_missing_matplotlib_is_one_sentence(
    pupil: type[Pupil], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib, which is not installed; pip install 'fp4ward[plot]'" in refused(capsys, "m", "--plot", "x.png")
    assert pupil.made == []


# --- with a real engine, and the bundled model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fixture with a tokenizer of bytes and a chat template."""
    folder = tmp_path_factory.mktemp("eval") / "m"
    shutil.copytree(FIXTURES / "q35moe-w4a16-modelopt", folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}:")
    return folder


def test_real_answers_of_an_untrained_model_are_wrong_and_repeat(texted: Path, capsys: Capture) -> None:
    argv = ["eval", str(texted), "--tasks", "sorting,choice", "--count", "3", "--max-tokens", "3", "--device", "cpu"]
    runs = []
    for more in ((), ("--max-num-seqs", "1")):
        assert cli.main([*argv, "--json", *more]) == 0
        runs.append(json.loads(capsys.readouterr().out))
    assert runs[0]["accuracies"]["total"]["right"] == 0 and runs[0]["engine"]["dtype"] == "float32"
    assert [q["tokens"] for q in runs[0]["questions"]] == [3] * 6
    assert runs[0]["questions"] == runs[1]["questions"]  # a batch changes nothing


def test_real_model_without_tokenizer_or_template_is_one_sentence(
    texted: Path, capsys: Capture, tmp_path: Path
) -> None:
    assert "there is no tokenizer.json" in refused(capsys, str(FIXTURES / "q35moe-w4a16-modelopt"))
    for file in texted.iterdir():
        if file.name != "chat_template.jinja":
            shutil.copy(file, tmp_path)
    assert "there is no chat template" in refused(capsys, str(tmp_path))


def test_real_demo_is_the_bundled_model_unless_a_checkpoint_of_that_name_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = tmp_path / "package" / "demo_model"
    monkeypatch.setattr(hub, "DEMO", bundled)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(UserError, match="came without the demo model"):
        hub.resolve_model("demo")
    bundled.mkdir(parents=True)
    (bundled / "config.json").write_text("{}")
    assert hub.resolve_model("demo") == bundled
    (here / "demo").mkdir()  # such as the folder of the training recipe
    assert hub.resolve_model("demo") == bundled
    assert hub.resolve_model("./demo") == Path("demo")
    with pytest.raises(UserError, match="the revision 'v1' has no meaning"):
        hub.resolve_model("demo", "v1")
    (here / "demo" / "config.json").write_text("{}")
    assert hub.resolve_model("demo") == Path("demo")


def test_real_demo_comes_from_the_package() -> None:
    assert Path(sys.modules["fp4ward"].__file__ or "").parent / "demo_model" == hub.DEMO
