"""The task families: what is asked, who may see it, and what counts as right."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from fp4ward.evals import run, tasks

FACTS = tasks.load_facts(Path(tasks.__file__).with_name("facts.json"))
COUNT = 60


def sides(family: str, count: int, seed: int = 1) -> tuple[list[tasks.Question], list[tasks.Question]]:
    """Training and held-out questions, as drawn from one stream each."""
    rng = random.Random(seed)
    train = [tasks.one(family, rng, held_out=False, facts=FACTS, tokens=64) for _ in range(count)]
    return train, tasks.held_out(family, count, seed, FACTS)


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_equal_arguments_give_equal_questions_and_fewer_are_the_first_of_more(family: str) -> None:
    many = tasks.held_out(family, COUNT, 3, FACTS)
    assert many == tasks.held_out(family, COUNT, 3, FACTS)
    assert many[:10] == tasks.held_out(family, 10, 3, FACTS)
    assert many != tasks.held_out(family, COUNT, 4, FACTS)


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_no_question_stands_on_both_sides(family: str) -> None:
    train, held = sides(family, 400 if family != "recall" else COUNT)
    assert {q.key for q in train}.isdisjoint(q.key for q in held)
    assert {q.prompt for q in train}.isdisjoint(q.prompt for q in held)
    assert not any(tasks.is_held_out(q.key) for q in train) and all(tasks.is_held_out(q.key) for q in held)
    assert len({q.key for q in held}) == len(held)


def test_one_key_in_eight_is_held_out() -> None:
    share = sum(tasks.is_held_out(f"key {i}") for i in range(8000)) / 8000
    assert abs(share - 1 / 8) < 0.02


def test_another_wording_of_the_same_sum_stays_on_its_side() -> None:
    """The key of a sum is its numbers, of a list to sort its items: neither names nor wording nor order."""
    rng = random.Random(0)
    seen: dict[str, set[str]] = {}
    for _ in range(30_000):
        q = tasks.arithmetic(rng)
        seen.setdefault(q.key, set()).add(q.prompt)
    assert any(len(prompts) > 1 for prompts in seen.values())
    for _ in range(50):
        q = tasks.sorting(rng)
        given = q.prompt.rpartition(": ")[2].split()
        assert sorted(given) == q.key.split()[1:] == sorted(q.answer.split())


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_ids_are_unique_and_name_prompt_and_answer(family: str) -> None:
    held = tasks.held_out(family, COUNT, 0, FACTS)
    assert len({q.id for q in held}) == COUNT
    q = held[0]
    assert q.id.startswith(f"{family}-")
    assert q.id != tasks.Question(family, q.key, q.prompt + " ", q.answer).id
    assert q.id != tasks.Question(family, q.key, q.prompt, q.answer + "1").id
    assert q.id == tasks.Question(family, "other", q.prompt, q.answer, "worked otherwise").id


def test_the_questions_of_the_default_run_do_not_change() -> None:
    """Saved runs are compared by id: a change here makes every earlier record useless."""
    questions = run.plan([], None, False, 0)
    assert {f: sum(q.family == f for q in questions) for f in tasks.FAMILIES} == run.COUNTS
    assert len(questions) >= 1000
    first = {q.family: q.id for q in reversed(questions)}
    assert first == FIRST_IDS


FIRST_IDS = {
    "arithmetic": "arithmetic-3d6a84209a9db9c1",
    "recall": "recall-d18c8b5d3aebdfa1",
    "sorting": "sorting-21181407c7a4ef84",
    "copying": "copying-e322162f23cdac3b",
    "choice": "choice-5aa231970caf8e94",
}


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_the_right_reply_is_right_and_another_questions_is_not(family: str) -> None:
    held = tasks.held_out(family, COUNT, 0, FACTS)
    for q in held:
        assert tasks.is_correct(q, q.reply)
        assert tasks.is_correct(q, f"<think>\n{q.worked}\n</think>\n\n{q.reply}")
        assert not tasks.is_correct(q, "")
    for q, other in itertools.pairwise(held):
        assert tasks.is_correct(q, other.reply) == (q.answer == other.answer)


def question(family: str, answer: str) -> tasks.Question:
    return tasks.Question(family, "k", "p", answer)


@pytest.mark.parametrize(
    ("family", "answer", "reply", "right"),
    [
        ("arithmetic", "42", "40 + 2 = 42\n#### 42", True),
        ("arithmetic", "42", "#### 42.", True),
        ("arithmetic", "42", "#### 41\nno:\n#### 42", True),  # the last word counts
        ("arithmetic", "42", "#### 42\n#### 41", False),
        ("arithmetic", "42", "40 + 2 = 42", False),  # cut before it answered
        ("arithmetic", "42", "#### 142", False),
        ("arithmetic", "42", "#### 4", False),
        ("choice", "New Delhi", "The capital of India is New Delhi.\n#### New Delhi", True),
        ("choice", "New Delhi", "#### B. New Delhi", True),
        ("choice", "New Delhi", "The capital of India is New Delhi.", False),
        ("choice", "New Delhi", "#### Delhi", False),
        ("choice", "New Delhi", "#### New Delhi\n#### Lima", False),
        ("recall", "1234", "1234", True),
        ("recall", "1234", "The code is 1234.", True),
        ("recall", "1234", "12345", False),
        ("recall", "1234", "1235 or 1234", False),
        ("sorting", "1 2 3", "1 2 3", True),
        ("sorting", "1 2 3", "1 2 3\n", True),
        ("sorting", "1 2 3", "1 3 2", False),
        ("sorting", "1 2 3", "1 2", False),
        ("copying", "a b 7", "a b 7", True),
        ("copying", "a b 7", "a  b 7", False),
    ],
)
def test_only_the_exact_answer_counts(family: str, answer: str, reply: str, right: bool) -> None:
    assert tasks.is_correct(question(family, answer), reply) == right


def arithmetic_value(worked: str) -> int:
    """The last result of the worked steps, each checked; divisions come out even."""
    value = 0
    for line in worked.split("\n"):
        left, _, result = line.partition(" = ")
        a, sign, b = left.split()
        x, y = int(a), int(b)
        assert sign != "/" or x % y == 0
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[sign]
        assert value == int(result)
    return value


def test_worked_sums_are_true_and_end_in_the_answer() -> None:
    for q in tasks.held_out("arithmetic", 300, 5, FACTS):
        assert arithmetic_value(q.worked) == int(q.answer) >= 0


def test_tables_hold_their_answer_once_and_have_the_length_asked_for() -> None:
    for q in tasks.held_out("recall", 8, 0, FACTS):
        assert q.prompt.count(f'"{q.key.rpartition(" ")[2]}"') == 1
        assert q.answer in q.prompt
    rng = random.Random(0)
    short, long = (len(tasks.recall(rng, n)[0].prompt) for n in (256, 2048))
    assert 6 < long / short < 11
    later = tasks.recall(rng, 256, turns=3)
    assert "\n" in later[0].prompt and not any("\n" in q.prompt for q in later[1:])


def test_the_four_options_differ_and_only_one_is_right() -> None:
    letters = []
    for q in tasks.held_out("choice", 400, 0, FACTS):
        *_, a, b, c, d = q.prompt.split("\n")
        options = {line[0]: line[3:] for line in (a, b, c, d)}
        assert list(options) == list("ABCD") and len(set(options.values())) == 4
        (letter,) = [x for x, option in options.items() if option == q.answer]
        assert q.answer in q.worked
        _, relation, _, subject = q.key.split(" ", 3)
        rivals: set[str] = set()
        if relation == "country":
            rivals = {p["name"] for p in FACTS["countries"] if p["capital"] == subject}
        elif relation == "kind":
            rivals = {name for n in FACTS["nouns"] if n["word"] == subject for name in (n["kind"], *n["above"])}
        assert not rivals & {option for x, option in options.items() if x != letter}, q
        letters.append(letter)
    # The place tells nothing: always the same one is right one time in four.
    assert all(abs(letters.count(x) / len(letters) - tasks.CHANCE["choice"]) < 0.07 for x in "ABCD")


def test_guessing_gets_the_chance_level() -> None:
    rng = random.Random(0)
    guesses: dict[str, Any] = {
        "arithmetic": lambda q: f"#### {rng.randint(0, 500)}",
        "recall": lambda q: str(rng.randint(1000, 9999)),
        "sorting": lambda q: " ".join(rng.sample(q.answer.split(), len(q.answer.split()))),
        "copying": lambda q: " ".join(rng.sample(q.answer.split(), len(q.answer.split()))),
        "choice": lambda q: f"#### {rng.choice(q.prompt.split(chr(10))[-4:])}",
    }
    for family, guess in guesses.items():
        questions = tasks.held_out(family, 300 if family != "recall" else 40, 2, FACTS)
        got = sum(tasks.is_correct(q, guess(q)) for q in questions) / len(questions)
        assert abs(got - tasks.CHANCE[family]) < 0.08, family


def test_the_facts_carry_their_notices() -> None:
    assert "Princeton University" in FACTS["notice"]["wordnet"] and "NO REPRESENTATIONS" in FACTS["notice"]["wordnet"]
    assert "public domain" in FACTS["notice"]["factbook"]
    assert len(FACTS["countries"]) > 200 and len(FACTS["nouns"]) == 1500
