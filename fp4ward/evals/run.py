"""One evaluation: the questions, the model's answers to them, and the record of both that can be saved and compared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4ward.errors import UserError
from fp4ward.evals import tasks
from fp4ward.evals.stats import Paired, wilson
from fp4ward.runtime.request import SamplingParams

if TYPE_CHECKING:
    from fp4ward.llm import LLM

# Some 3 minutes for the demo on one CPU core, half of them for recall, whose prompts have up to 2,300 tokens.
COUNTS = {"arithmetic": 400, "recall": 120, "sorting": 200, "copying": 200, "choice": 400}
QUICK, QUICK_COUNT = ("arithmetic",), 48
MOST = 2000  # of a family: there are some 2,900 held-out choice questions in all
# Longest answer. The demo's replies take at most 72, 5, 24, 48 and 40 tokens; what runs on is cut soon after.
TOKENS = {"arithmetic": 96, "recall": 12, "sorting": 40, "copying": 72, "choice": 56}
INSTRUCTED_TOKENS = 512
# The demo learned the form of an answer; another model has to be told.
INSTRUCTIONS = {
    "arithmetic": 'Work it out in a few short steps, then write "#### " and the number on a last line.',
    "recall": "Answer with the number only.",
    "sorting": "Answer with the sorted items only, on one line, separated by single spaces.",
    "copying": "Answer with the text only, on one line.",
    "choice": 'Write "#### " and the right option, word for word, on a last line.',
}
VERSION = 1  # of the record


@dataclass(frozen=True)
class Answer:
    """One question, by id, and what was said. answer: what the check found in the reply, "" for nothing."""

    id: str
    family: str
    right: bool
    expected: str = ""
    answer: str = ""
    reply: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Tally:
    """A family's answers, or all. chance: the accuracy of guessing."""

    right: int
    asked: int
    chance: float
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.asked)


@dataclass(frozen=True)
class Run:
    """Answers of one model. instructions: whether questions told the form of the answer. seconds: by family."""

    model: str
    instructions: bool
    answers: Sequence[Answer]
    seconds: Mapping[str, float] = field(default_factory=dict)

    def tallies(self) -> dict[str, Tally]:
        """By family, in the order asked, and "total"."""
        out: dict[str, Tally] = {}
        for name in dict.fromkeys(a.family for a in self.answers):
            right = [a.right for a in self.answers if a.family == name]
            out[name] = Tally(sum(right), len(right), tasks.CHANCE[name], self.seconds.get(name, 0.0))
        asked = len(self.answers)
        chance = sum(t.chance * t.asked for t in out.values()) / asked
        total = Tally(sum(a.right for a in self.answers), asked, chance, sum(self.seconds.values()))
        return {**out, "total": total}

    def record(self) -> dict[str, Any]:
        """All of it as JSON values: what --json prints and --save writes."""
        tallies = {
            k: asdict(t) | {"accuracy": t.accuracy, "interval_95": t.interval} for k, t in self.tallies().items()
        }
        top = {"version": VERSION, "model": self.model, "instructions": self.instructions}
        return {**top, "accuracies": tallies, "questions": [asdict(a) for a in self.answers]}


def plan(families: Sequence[str], count: int | None, quick: bool, seed: int) -> list[tasks.Question]:
    """Questions of these families (none: all, or the quick one), `count` of each. UserError for what there is not."""
    chosen = list(dict.fromkeys(families)) or list(QUICK if quick else COUNTS)
    for name in chosen:
        if name not in tasks.FAMILIES:
            raise UserError(f"there is no task family {name!r}; there are {', '.join(tasks.FAMILIES)}")
    if count is not None and not 1 <= count <= MOST:
        raise UserError(f"{count} questions a family: a count from 1 to {MOST} is expected")
    facts = tasks.load_facts(Path(__file__).with_name("facts.json")) if "choice" in chosen else None
    counts = {name: count or (QUICK_COUNT if quick else COUNTS[name]) for name in chosen}
    return [q for name, n in counts.items() for q in tasks.held_out(name, n, seed, facts)]


def ask(
    llm: LLM,
    name: str,
    questions: Sequence[tasks.Question],
    *,
    instructions: bool = False,
    max_tokens: int | None = None,
    progress: Callable[[str, int], None] = lambda family, done: None,
) -> Run:
    """Put the questions to the model called `name`: greedy, thinking off, a family at a time, all of it as one batch.

    max_tokens: longest answer instead of the family's own. progress: gets family and number of its questions done.
    """
    answers: list[Answer] = []
    seconds: dict[str, float] = {}
    for family in dict.fromkeys(q.family for q in questions):
        part = [q for q in questions if q.family == family]
        tail = f"\n\n{INSTRUCTIONS[family]}" if instructions else ""
        limit = max_tokens or (INSTRUCTED_TOKENS if instructions else TOKENS[family])
        start = time.perf_counter()
        outputs = llm.chat(
            [[{"role": "user", "content": q.prompt + tail}] for q in part],
            SamplingParams(temperature=0, max_tokens=limit),
            chat_template_kwargs={"enable_thinking": False},
            progress=partial(progress, family),
        )
        seconds[family] = time.perf_counter() - start
        for q, output in zip(part, outputs, strict=True):
            said = output.outputs[0]
            right, answer = said.error is None and tasks.is_correct(q, said.text), tasks.extract(family, said.text)
            detail = (q.answer, answer, said.text, len(said.token_ids), said.finish_reason, said.error)
            answers.append(Answer(q.id, family, right, *detail))
    return Run(name, instructions, answers, seconds)


def read(path: str, questions: Sequence[tasks.Question], instructions: bool) -> Run:
    """A record that `Run.record` made, as far as a comparison needs it.

    UserError when it is none, or unless that run was asked exactly these questions in this way.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise UserError(f"{path} is a record of version {data['version']}; this version reads {VERSION}")
        answers = [Answer(a["id"], a["family"], a["right"]) for a in data["questions"]]
        fine = all(isinstance(a.id, str) and a.family in tasks.CHANCE and isinstance(a.right, bool) for a in answers)
        if not (answers and fine and isinstance(data["model"], str) and isinstance(data["instructions"], bool)):
            raise ValueError
        other = Run(data["model"], data["instructions"], answers)
    except OSError as e:
        raise UserError(f"{path}: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} holds no answers to compare with; `fp4ward eval --save FILE` writes them") from None
    ids, theirs = [q.id for q in questions], [a.id for a in other.answers]
    if sorted(ids) != sorted(theirs):
        raise UserError(
            f"{path} answers {len(theirs)} questions, here are {len(ids)}, and {len(set(ids) & set(theirs))} are the "
            f"same; a paired difference needs the same --tasks, --count, --quick and --seed"
        )
    if instructions != other.instructions:
        used = "with" if other.instructions else "without"
        raise UserError(f"{path} was asked {used} --instructions, which makes other prompts; compare like with like")
    return other


def compare(run: Run, other: Run) -> dict[str, Paired]:
    """By family and "total": the run against another over the same questions."""
    before = {a.id: a.right for a in other.answers}
    changes: dict[str, list[int]] = {a.family: [] for a in run.answers}
    for a in run.answers:
        changes[a.family].append(a.right - before[a.id])
    changes["total"] = [c for family in changes.values() for c in family]
    return {name: Paired(got.count(1), got.count(-1), len(got)) for name, got in changes.items()}
