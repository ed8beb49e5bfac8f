"""Exact-answer task families from a seeded generator: the demo model's training data and its held-out questions.

Each question has a `key` that names what is asked (the numbers of an arithmetic problem, the list to sort, a fact
with one phrasing). A hash of the key puts the question on the training or the held-out side, so that the two sides
share templates and facts but never a question. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT_OF_256 = 32
FAMILIES = ("arithmetic", "recall", "sorting", "copying", "choice")
CHANCE = {"arithmetic": 0.0, "recall": 0.0, "sorting": 0.0, "copying": 0.0, "choice": 0.25}
RECALL_TOKENS = (256, 512, 1024, 2048)
TOKENS_PER_PAIR = 8.0  # measured with the demo's tokenizer: about 2 for the key, 4 digits, separators

NAMES = (  # noqa: SIM905
    "Ann Ben Cara Dan Eva Finn Gus Hana Ivan Jane Kim Leo Mia Noah Omar Pia Quinn Rosa Sam Tess Uma Vic Will Zoe"
).split()
ITEMS = (  # noqa: SIM905
    "apples pears books coins stamps marbles cards shells pens stickers eggs cookies beads buttons candles flowers "
    "lemons nuts oranges plums ribbons rings roses stones tickets toys balls cups hats keys"
).split()
BOXES = (  # noqa: SIM905
    "boxes bags baskets shelves jars crates trays drawers"
).split()
WORDS = (  # noqa: SIM905
    "acorn actor album alley amber angel ankle apron arrow atlas attic autumn bacon badge bagel baker banjo barn "
    "basil basin beach beard bench berry birch blade bloom board bonus boot bottle bowl branch bread brick bridge "
    "broom brush bucket bunny butter cabin cable camel camera canal candy canoe canvas cape carbon carpet carrot "
    "castle cedar cello chain chair chalk cheese cherry chess chief choir circle clay cliff clock cloth cloud clover "
    "coach coal coast coral corn cotton couch cousin cradle crane cream creek crow crown crystal curtain daisy dance "
    "dawn deer desert diamond doctor dolphin donkey door dragon dress drum eagle earth ember engine fabric falcon "
    "farm feather fence fern field finger flame flute fog forest forge fork fountain fox frost garden garlic gate "
    "ghost giant ginger glass glove goat gold grape grass gravel guitar hammer harbor hawk hazel helmet hill honey "
    "hook horn horse hotel ice island ivory jacket jade jewel judge jungle kettle kitchen kite knight ladder lake "
    "lamp lantern laser leaf leather lemon letter library lily linen lion lizard lock lotus magnet maple marble "
    "market mask meadow melon metal mill mirror moon moss motor mountain mouse museum music nest night north novel "
    "oak ocean olive onion opera orchard otter oven owl oyster paint palace panda paper parade parrot peach pearl "
    "pepper piano pilot pine planet plate poem pond poppy prince pumpkin puzzle quartz queen rabbit radio rain raven "
    "ribbon rice river robin rocket roof root rope ruby saddle sail salt sand satin scarf school sea shadow sheep "
    "shield ship silk silver sky smoke snow soap song spice spider spoon spring stable star statue steam stone storm "
    "straw sugar summer sun swan table temple thorn thunder tiger timber tower trail train tree trumpet tulip tunnel "
    "turtle valley velvet village violin wagon walnut water wave whale wheat wheel willow window wine winter wizard "
    "wolf wood wool yard zebra"
).split()


@dataclass(frozen=True)
class Question:
    """One question: `prompt` is the user's turn; `worked` the steps before the answer; `answer` what is compared."""

    family: str
    key: str
    prompt: str
    answer: str
    worked: str = ""

    @property
    def reply(self) -> str:
        """The full assistant turn: the worked steps, if any, and the answer on a line of its own."""
        return f"{self.worked}\n#### {self.answer}" if self.worked else self.answer

    @property
    def id(self) -> str:
        """A name that two runs share exactly when they ask the same and expect the same."""
        digest = hashlib.blake2b(f"{self.prompt}\0{self.answer}".encode(), digest_size=8)
        return f"{self.family}-{digest.hexdigest()}"


def is_held_out(key: str) -> bool:
    """Whether the question named by `key` belongs to the held-out side (one key in eight)."""
    return hashlib.blake2b(key.encode(), digest_size=1).digest()[0] < HELD_OUT_OF_256


def load_facts(path: Path) -> dict[str, Any]:
    """Countries and nouns, as written by demo/corpus.py."""
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


# --- arithmetic: two to four steps over one running amount, and two-person problems ---


def _start(rng: random.Random, name: str, item: str) -> tuple[str, int, list[str], list[int]]:
    kind = rng.randrange(3)
    if kind == 0:
        n = rng.randint(5, 300)
        return f"{name} has {n} {item}.", n, [], [n]
    if kind == 1:
        a, b = rng.randint(2, 9), rng.randint(3, 30)
        text = f"{name} has {a} {rng.choice(BOXES)} with {b} {item} in each."
        return text, a * b, [f"{a} * {b} = {a * b}"], [a, b]
    a, b = rng.randint(5, 200), rng.randint(5, 200)
    text = f"{name} finds {a} {item} in the morning and {b} in the evening."
    return text, a + b, [f"{a} + {b} = {a + b}"], [a, b]


def _event(rng: random.Random, total: int, last: str) -> tuple[str, int, str, list[int], str]:
    other = rng.choice(NAMES)
    options = ["add", "add", "sub", "sub", "times", "share", "packs"]
    kind = rng.choice([o for o in options if o != last])
    divisors = [d for d in range(2, 10) if total % d == 0 and d < total <= 300]
    if kind == "sub" and total > 3:
        n = rng.randint(1, min(total - 1, 300))
        texts = ("{o} takes {n} of them.", "Then {n} are lost.", "{n} of them are given to {o}.", "{n} are sold.")
        text = rng.choice(texts)
        return text.format(o=other, n=n), total - n, f"{total} - {n} = {total - n}", [n], kind
    if kind == "times" and total <= 100:
        n = rng.randint(2, 5)
        text = rng.choice(("Later there are {n} times as many.", "The number then grows to {n} times as many."))
        return text.format(n=n), total * n, f"{total} * {n} = {total * n}", [n], kind
    if kind == "share" and divisors:
        n = rng.choice(divisors)
        shared = "They are shared equally by {n} friends, and {o} keeps one share."
        text = rng.choice((shared, "Only one of {n} equal parts is kept."))
        return text.format(o=other, n=n), total // n, f"{total} / {n} = {total // n}", [n], kind
    if kind == "packs" and total < 700:
        a, b = rng.randint(2, 9), rng.randint(2, 20)
        text = rng.choice(("{o} brings {a} packs of {b} more.", "Then {a} packs of {b} are added."))
        work = f"{a} * {b} = {a * b}\n{total} + {a * b} = {total + a * b}"
        return text.format(o=other, a=a, b=b), total + a * b, work, [a, b], kind
    n = rng.randint(2, 300)
    text = rng.choice(("{o} adds {n} more.", "Then {n} more are bought.", "{n} more arrive.", "{o} brings {n} others."))
    return text.format(o=other, n=n), total + n, f"{total} + {n} = {total + n}", [n], "add"


def arithmetic(rng: random.Random) -> Question:
    """A word problem of two to four steps, each written out ("12 + 7 = 19"); the answer follows "####"."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    if rng.random() < 0.25:
        other = rng.choice([n for n in NAMES if n != name])
        a, b = rng.randint(5, 200), rng.randint(2, 60)
        if rng.random() < 0.5:
            theirs, sign, word = a + b, "+", "more"
        else:
            a = max(a, b + 2)
            theirs, sign, word = a - b, "-", "fewer"
        total = a + theirs
        text = f"{name} has {a} {item}. {other} has {b} {word} than {name}."
        work, numbers = [f"{a} {sign} {b} = {theirs}", f"{a} + {theirs} = {total}"], [a, b]
        ask = "do they have together"
        if rng.random() < 0.4:
            price = rng.randint(2, 5)
            text += f" They sell all of them for {price} dollars each."
            work.append(f"{total} * {price} = {total * price}")
            total, ask = total * price, ""
            numbers.append(price)
        question = f"How many {item} {ask}?" if ask else "How many dollars do they get?"
    else:
        text, total, work, numbers = _start(rng, name, item)
        last, steps = "", rng.randint(2, 4)
        while len(work) < steps:
            sentence, total, line, more, last = _event(rng, total, last)
            text += " " + sentence
            work.extend(line.split("\n"))
            numbers.extend(more)
        question = rng.choice((f"How many {item} are there now?", f"How many {item} are left in the end?"))
    key = "arithmetic " + " ".join(map(str, numbers))
    return Question("arithmetic", key, f"{text} {question}", str(total), "\n".join(work))


# --- lists ---

_RECALL = (
    ("Remember these codes.", "{k}: {v}", 'What is the code of "{k}"?'),
    ("Here is a table of keys and values.", "{k} = {v}", 'What is the value of "{k}"?'),
    ("The rooms have these numbers:", "- {k}: {v}", 'Which number belongs to "{k}"?'),
)


def recall(rng: random.Random, tokens: int = 256, turns: int = 1) -> list[Question]:
    """A table of about `tokens` tokens, then `turns` questions about it (the first prompt holds the table)."""
    pairs = max(4, min(len(WORDS), round((tokens - 50) / TOKENS_PER_PAIR)))
    keys = rng.sample(WORDS, pairs)
    table = {k: str(rng.randint(1000, 9999)) for k in keys}
    head, line, ask = rng.choice(_RECALL)
    body = "\n".join(line.format(k=k, v=v) for k, v in table.items())
    out = []
    for turn, key in enumerate(rng.sample(keys, min(turns, pairs))):
        question = ask.format(k=key)
        prompt = question if turn else f"{head}\n{body}\n{question}"
        out.append(Question("recall", f"recall {body} {key}", prompt, table[key]))
    return out


def sorting(rng: random.Random) -> Question:
    """Four to eight numbers below 100, or words, to be put in order."""
    count = rng.randint(4, 8)
    if rng.random() < 0.7:
        values: list[int] = rng.sample(range(1, 100), count)
        down = rng.random() < 0.3
        order = " ".join(map(str, sorted(values, reverse=down)))
        ask = rng.choice(
            ("Sort from largest to smallest:", "Sort these numbers in descending order:")
            if down
            else ("Sort from smallest to largest:", "Sort these numbers in ascending order:")
        )
        given = " ".join(map(str, values))
    else:
        words = rng.sample(WORDS, count)
        order, given = " ".join(sorted(words)), " ".join(words)
        ask = rng.choice(("Sort these words alphabetically:", "Put these words in alphabetical order:"))
    key = "sorting " + " ".join(sorted(given.split()))
    return Question("sorting", key, f"{ask} {given}", order)


def copying(rng: random.Random) -> Question:
    """Five to sixteen words and numbers, to be repeated exactly or in reverse order."""
    count = rng.randint(5, 16)
    parts = [rng.choice(WORDS) if rng.random() < 0.6 else str(rng.randint(0, 999)) for _ in range(count)]
    if count <= 8 and rng.random() < 0.25:
        ask, answer = "Repeat these in reverse order:", " ".join(reversed(parts))
    else:
        ask, answer = rng.choice(("Repeat exactly:", "Copy this text:", "Say this again:")), " ".join(parts)
    return Question("copying", "copying " + " ".join(parts), f"{ask} {' '.join(parts)}", answer)


# --- four-option questions ---

_ASK: Mapping[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {s}?",
        "Which city is the capital of {s}?",
        "{s} has which capital?",
        "Name the capital of {s}.",
        "Which of these is the capital city of {s}?",
        "From which city is {s} governed?",
    ),
    "country": (
        "{s} is the capital of which country?",
        "Which country has the capital {s}?",
        "Of what country is {s} the capital?",
        "Name the country whose capital is {s}.",
        "In which country is the capital city {s}?",
        "Whose capital is {s}?",
    ),
    "region": (
        "In which region is {s}?",
        "Where in the world is {s}?",
        "{s} belongs to which region?",
        "To which part of the world does {s} belong?",
        "Which region contains {s}?",
        "Name the region of {s}.",
    ),
    "currency": (
        "What is the currency of {s}?",
        "Which money is used in {s}?",
        "How do people pay in {s}?",
        "Name the currency of {s}.",
        "Prices in {s} are in which currency?",
        "Which currency does {s} use?",
    ),
    "word": (
        "Which word means: {s}?",
        'Which word is defined as "{s}"?',
        "What is the word for this: {s}?",
        "Find the word with this meaning: {s}.",
        'Name the word for "{s}".',
        "This is the meaning of which word: {s}?",
    ),
    "kind": (
        'What kind of thing is "{s}"?',
        '"{s}" is a kind of what?',
        'Which is a more general word for "{s}"?',
        'To which class does "{s}" belong?',
        'Name the kind of thing that "{s}" is.',
        'Under which heading does "{s}" fall?',
    ),
}
_SAY: Mapping[str, str] = {
    "capital": "The capital of {s} is {o}.",
    "country": "{s} is the capital of {o}.",
    "region": "{s} is in {o}.",
    "currency": "The currency of {s} is {o}.",
    "word": "The word is {o}.",
    "kind": "The word {s} is a kind of {o}.",
}
RELATIONS = tuple(_ASK)


def phrasings(relation: str) -> tuple[str, ...]:
    """The ways in which a relation is asked for; `{s}` stands for the subject."""
    return _ASK[relation]


def statement(relation: str, subject: str, object_: str) -> str:
    """The fact as one sentence."""
    return _SAY[relation].format(s=subject, o=object_)


def choice_key(relation: str, phrasing: str, subject: str) -> str:
    """The key of the question for a fact in one phrasing (whatever the options)."""
    return f"choice {relation} {_ASK[relation].index(phrasing)} {subject}"


def pick_fact(rng: random.Random, facts: Mapping[str, Any]) -> tuple[str, str, str, list[str]]:
    """A random fact: relation, subject, object, and three wrong objects."""
    # Nouns outnumber countries: ask for them more often, so that each fact is met about equally often.
    relation = rng.choices(RELATIONS, weights=(1, 1, 1, 1, 3, 3))[0]
    if relation in ("word", "kind"):
        noun = rng.choice(facts["nouns"])
        subject, object_ = (noun["gloss"], noun["word"]) if relation == "word" else (noun["word"], noun["kind"])
        wrong: list[str] = []
        while len(wrong) < 3:
            other = rng.choice(facts["nouns"])
            name = other["word"] if relation == "word" else other["kind"]
            fine = other["gloss"] != subject if relation == "word" else name not in (*noun["above"], noun["word"])
            if fine and name != object_ and name not in wrong:
                wrong.append(name)
        return relation, subject, object_, wrong
    places = facts["countries"]
    field = {"country": "name"}.get(relation, relation)
    place = rng.choice([p for p in places if p[field]])
    local = rng.random() < 0.5 and relation != "region"
    near = [p for p in places if not local or p["region"] == place["region"]]
    # A capital or a currency can be shared by name: never offer a second right answer.
    same = {p[field] for p in places if p["capital"] == place["capital"]} if relation == "country" else {place[field]}
    pool = sorted({p[field] for p in near if p[field]} - same)
    if len(pool) < 3:
        pool = sorted({p[field] for p in places if p[field]} - same)
    subject = place["capital"] if relation == "country" else place["name"]
    return relation, subject, place[field], rng.sample(pool, 3)


def choice(rng: random.Random, facts: Mapping[str, Any]) -> Question:
    """A question about a fact with four options; the reply states the fact and then the right option.

    The key is the fact with the phrasing: a held-out question asks for a fact in a phrasing in which the training
    side never asks for it (the fact itself occurs there in other phrasings and as a statement).
    """
    relation, subject, object_, wrong = pick_fact(rng, facts)
    ask = rng.choice(_ASK[relation])
    options = [object_, *wrong]
    rng.shuffle(options)
    lines = "\n".join(f"{mark}. {option}" for mark, option in zip("ABCD", options, strict=True))
    key = choice_key(relation, ask, subject)
    prompt = f"{ask.format(s=subject)}\n{lines}"
    return Question("choice", key, prompt, object_, statement(relation, subject, object_))


# --- held-out sets and answers ---


def one(
    family: str, rng: random.Random, *, held_out: bool, facts: Mapping[str, Any] | None = None, tokens: int = 256
) -> Question:
    """One question of `family` from the wanted side; `tokens` is the length of a recall prompt."""
    make: dict[str, Callable[[], Question]] = {
        "arithmetic": lambda: arithmetic(rng),
        "sorting": lambda: sorting(rng),
        "copying": lambda: copying(rng),
        "recall": lambda: recall(rng, tokens)[0],
        "choice": lambda: choice(rng, facts or {}),
    }
    while True:
        question = make[family]()
        if is_held_out(question.key) == held_out:
            return question


def held_out(family: str, count: int, seed: int = 0, facts: Mapping[str, Any] | None = None) -> list[Question]:
    """`count` distinct held-out questions (recall cycles through RECALL_TOKENS); equal arguments, equal questions."""
    rng = random.Random(f"{family} {seed}")
    out: dict[str, Question] = {}
    while len(out) < count:
        tokens = RECALL_TOKENS[len(out) % len(RECALL_TOKENS)]
        question = one(family, rng, held_out=True, facts=facts, tokens=tokens)
        out.setdefault(question.key, question)
    return list(out.values())


def extract(family: str, text: str) -> str:
    """The answer in a model's reply: after the last "####" (arithmetic, choice), else the first line or number."""
    text = text.rpartition("</think>")[2].strip()
    if family == "arithmetic":
        found = re.findall(r"####\s*([^\s]+)", text)
        return found[-1].rstrip(".") if found else ""
    if family == "choice":
        found = re.findall(r"####[ \t]*([^\n]+)", text)
        return re.sub(r"^[A-D]\.\s+", "", found[-1].strip()) if found else ""
    if family == "recall":
        number = re.search(r"\d+", text)
        return number.group() if number else ""
    return text.split("\n")[0].strip()


def is_correct(question: Question, text: str) -> bool:
    """Whether the reply `text` gives exactly the answer."""
    return extract(question.family, text) == question.answer
