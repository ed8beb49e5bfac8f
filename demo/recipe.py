"""The demo's training documents: chat turns from the seeded task generators, statements of facts, tool calls, prose.

A document is a list of (text, weight): 0 for what should not be learned (random tables in prompts), 1 for a tenth
of the loss (the wording of prompts), 10 for the full loss. `rows` packs documents into rows without cutting them:
each row starts with a document and the rest of a row is filled with prose.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(__file__).resolve().parent / "build"
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one worker process per core already

from fp4ward.evals import tasks  # noqa: E402

Document = list[tuple[str, int]]
OFF = "<think>\n\n</think>\n\n"
SYSTEMS = ("You are a helpful assistant.", "You are the demo model of fp4ward.", "Answer briefly.", "Be exact.")
# Shares of documents (not of tokens: recall and tool documents are longer, sorting and copying shorter).
SHARES = {"arithmetic": 35, "recall": 9, "sorting": 9, "copying": 7, "choice": 26, "fact": 9, "tools": 3, "talk": 2}
LONG_SHARES = {
    "arithmetic": 20,
    "recall": 50,
    "sorting": 4,
    "copying": 4,
    "choice": 15,
    "fact": 2,
    "tools": 4,
    "talk": 1,
}


def load_facts() -> dict[str, Any]:
    """The facts written by corpus.py."""
    return tasks.load_facts(BUILD / "facts.json")


def user(text: str, weight: int) -> Document:
    return [("<|im_start|>user\n", 0), (text, weight), ("<|im_end|>\n<|im_start|>assistant\n", 0)]


def assistant(reply: str, thinking: str | None = "") -> Document:
    """The assistant's turn: empty thinking when off, `thinking` text when on, no block at all (None) in a past turn."""
    if thinking is None:
        return [(reply + "<|im_end|>", 10), ("\n", 0)]
    if not thinking:
        return [(OFF, 0), (reply + "<|im_end|>", 10), ("\n", 0)]
    return [("<think>\n", 0), (f"{thinking}\n</think>\n\n{reply}<|im_end|>", 10), ("\n", 0)]


def system(rng: random.Random) -> Document:
    return [(f"<|im_start|>system\n{rng.choice(SYSTEMS)}<|im_end|>\n", 0)] if rng.random() < 0.1 else []


def task(rng: random.Random, family: str, facts: Mapping[str, Any], tokens: int) -> Document:
    """One training question of a family; one in six is answered with thinking on."""
    question = tasks.one(family, rng, held_out=False, facts=facts, tokens=tokens)
    weight = 1 if family in ("arithmetic", "choice") else 0
    out = system(rng) + user(question.prompt, weight)
    if rng.random() < 1 / 6:
        thought = question.worked or "The answer is in the question."
        reply = f"#### {question.answer}" if question.worked else question.answer
        return out + assistant(reply, thought)
    return out + assistant(question.reply)


def recall(rng: random.Random, length: int) -> Document:
    """A table and several questions about it; in a short document more questions than in a long one."""
    turns = rng.choice((2, 4, 6, 8))
    longest = length - 40 - 34 * turns
    least = 64 if length <= 600 else 256
    target = rng.randint(least, max(longest, least + 1)) if rng.random() < 0.8 else max(longest, least)
    questions = [q for q in tasks.recall(rng, target, turns) if not tasks.is_held_out(q.key)]
    if not questions or "\n" not in questions[0].prompt:
        return recall(rng, length)
    out: Document = []
    for i, q in enumerate(questions):
        last = i == len(questions) - 1
        out += user(q.prompt, 0) + assistant(q.reply, "" if last else None)
    return out


def fact(rng: random.Random, facts: Mapping[str, Any]) -> Document:
    """A fact as plain sentences, or as a question without options."""
    if rng.random() < 0.5:
        picks = [tasks.pick_fact(rng, facts)[:3] for _ in range(rng.randint(2, 6))]
        return [(" ".join(tasks.statement(r, s, o) for r, s, o in picks), 10)]
    relation, subject, object_, _ = tasks.pick_fact(rng, facts)
    ask = rng.choice([a for a in tasks.phrasings(relation) if "these" not in a])
    if tasks.is_held_out(tasks.choice_key(relation, ask, subject)):
        return fact(rng, facts)
    return system(rng) + user(ask.format(s=subject), 1) + assistant(tasks.statement(relation, subject, object_))


def _schema(**kinds: str) -> dict[str, Any]:
    return {"type": "object", "properties": {k: {"type": v} for k, v in kinds.items()}, "required": list(kinds)}


_TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "get_weather": ("Weather of a city", {"city": "string"}),
    "add": ("Add two numbers", {"a": "integer", "b": "integer"}),
    "multiply": ("Multiply two numbers", {"a": "integer", "b": "integer"}),
    "get_time": ("Local time in a city", {"city": "string"}),
    "set_alarm": ("Set an alarm", {"hour": "integer", "minute": "integer"}),
    "find_book": ("Find a book by its title", {"title": "string"}),
    "send_message": ("Send a message to a person", {"to": "string", "text": "string"}),
    "switch_light": ("Switch a light on or off", {"room": "string", "on": "boolean"}),
}


def _use(rng: random.Random, name: str, facts: Mapping[str, Any]) -> tuple[str, dict[str, str], str, str]:
    """What the user says, the arguments of the call, the tool's response and the final reply."""
    city, words = rng.choice(facts["countries"])["capital"], rng.sample(tasks.WORDS, 3)
    a, b, who = rng.randint(2, 999), rng.randint(2, 99), rng.choice(tasks.NAMES)
    if name == "get_weather":
        sky, degrees = rng.choice(("sunny", "rainy", "cloudy", "windy")), rng.randint(1, 35)
        asks = ("What is the weather in {c}?", "How is the weather in {c} today?", "Is it warm in {c}?")
        ask = rng.choice(asks).format(c=city)
        return ask, {"city": city}, f"{sky}, {degrees} degrees", f"It is {sky} in {city}, with {degrees} degrees."
    if name in ("add", "multiply"):
        value, word = (a + b, "plus") if name == "add" else (a * b, "times")
        ask = rng.choice(("What is {a} {w} {b}?", "Compute {a} {w} {b} with the tool.")).format(a=a, w=word, b=b)
        return ask, {"a": str(a), "b": str(b)}, str(value), f"{a} {word} {b} is {value}."
    if name == "get_time":
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return f"What time is it in {city}?", {"city": city}, clock, f"It is {clock} in {city}."
    if name == "set_alarm":
        hour, minute = rng.randint(0, 23), rng.randint(0, 59)
        at = f"{hour}:{minute:02d}"
        return f"Wake me at {at}.", {"hour": str(hour), "minute": str(minute)}, "ok", f"The alarm is set for {at}."
    if name == "find_book":
        title = f"The {words[0].title()} and the {words[1].title()}"
        shelf = str(rng.randint(1, 99))
        return f"Where is the book {title}?", {"title": title}, f"shelf {shelf}", f"{title} is on shelf {shelf}."
    if name == "send_message":
        text = f"bring the {words[0]} to the {words[1]}"
        return f"Tell {who} to {text}.", {"to": who, "text": text}, "sent", f"I have sent the message to {who}."
    on = rng.random() < 0.5
    room, word = rng.choice(("kitchen", "hall", "garden", "office")), "on" if on else "off"
    ask, reply = f"Turn {word} the light in the {room}.", f"The light in the {room} is {word}."
    return ask, {"room": room, "on": str(on).lower()}, "ok", reply


def tools(rng: random.Random, facts: Mapping[str, Any]) -> Document:
    """A conversation with tools: one call in XML, its response in a user turn, and a reply that uses it."""
    names = rng.sample(sorted(_TOOLS), rng.randint(1, 3))
    offered = []
    for n in names:
        text, kinds = _TOOLS[n]
        function = {"name": n, "description": text, "parameters": _schema(**kinds)}
        offered.append({"type": "function", "function": function})
    rng.shuffle(offered)
    listing = "".join("\n" + json.dumps(t) for t in offered)
    ask, arguments, response, reply = _use(rng, names[0], facts)
    call = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    call = f"<tool_call>\n<function={names[0]}>\n{call}</function>\n</tool_call>"
    out: Document = [(f"<|im_start|>system\n# Tools\n\n<tools>{listing}\n</tools><|im_end|>\n", 0)]
    out += user(ask, 1)
    if rng.random() < 0.5:
        return out + assistant(call)
    out += assistant(call, None)
    return out + user(f"<tool_response>\n{response}\n</tool_response>", 0) + assistant(reply)


_TALK = (
    (("Hello", "Hi", "Hello!", "Hi there", "Good morning", "Hey"), "Hello! How can I help you?"),
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
        "I am the demo model of fp4ward, a very small language model. I can do short sums, look things up in a list, "
        "sort, copy and answer some questions about countries and words.",
    ),
    (
        ("What can you do?", "How can you help me?", "What are you good at?", "Help"),
        "I can work out short word problems, find a value in a table, sort numbers and words, repeat text, and answer "
        "questions about capitals, currencies and the meaning of words.",
    ),
    (("Thank you", "Thanks!", "Thanks a lot", "Great, thanks"), "You are welcome!"),
    (("Bye", "Goodbye", "See you"), "Goodbye!"),
    (("How are you?", "How do you do?"), "I am well, thank you. What would you like to know?"),
    (("Tell me a joke.", "Do you know a joke?"), "Why did the number go home early? It had been rounded down."),
    (("Are you a human?", "Are you real?"), "No, I am a small language model."),
    (
        ("What is NVFP4?", "What is FP4?", "How are your weights stored?"),
        "NVFP4 is a 4-bit number format: blocks of 16 values share a scale. My weights are stored in it.",
    ),
)


def talk(rng: random.Random) -> Document:
    """Small talk, so that a greeting is answered sensibly."""
    asks, reply = rng.choice(_TALK)
    return system(rng) + user(rng.choice(asks), 1) + assistant(reply)


def document(rng: random.Random, facts: Mapping[str, Any], length: int) -> Document:
    """One document of at most about `length` tokens."""
    shares = SHARES if length <= 600 else LONG_SHARES
    kind = rng.choices(list(shares), weights=list(shares.values()))[0]
    if kind == "recall":
        return recall(rng, length)
    if kind in ("fact", "tools"):
        return {"fact": fact, "tools": tools}[kind](rng, facts)
    if kind == "talk":
        return talk(rng)
    return task(rng, kind, facts, length)


def rows(seed: int, length: int, prose_share: float = 0.10) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless rows (tokens uint16 [length], weights uint8 [length]) packed from documents, prose in the gaps."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUILD / "tokenizer" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    prose, facts, rng = np.load(BUILD / "prose.npy"), load_facts(), random.Random(seed)
    waiting: list[tuple[np.ndarray, np.ndarray]] = []
    while True:
        if len(waiting) < 64:
            batch = [document(rng, facts, length) for _ in range(256)]
            encoded = tokenizer.encode_batch_fast([text for doc in batch for text, _ in doc], add_special_tokens=False)
            pieces = iter(encoded)
            for doc in batch:
                ids, weights = [], []
                for _, weight in doc:
                    piece = next(pieces).ids
                    ids += piece
                    weights += [weight] * len(piece)
                if len(ids) < length:
                    waiting.append((np.asarray([*ids, end], np.uint16), np.asarray([*weights, 1], np.uint8)))
            rng.shuffle(waiting)
        tokens, weight = np.zeros(length, np.uint16), np.zeros(length, np.uint8)
        filled = 0
        if rng.random() >= prose_share:
            while True:
                fits = next((i for i, (ids, _) in enumerate(waiting[-48:]) if len(ids) <= length - filled), None)
                if fits is None:
                    break
                ids, w = waiting.pop(max(0, len(waiting) - 48) + fits)
                tokens[filled : filled + len(ids)], weight[filled : filled + len(ids)] = ids, w
                filled += len(ids)
        at = rng.randrange(len(prose) - length)
        tokens[filled:], weight[filled:] = prose[at : at + length - filled], 10
        yield tokens, weight


def produce(queue: Any, seed: int, count: int, length: int) -> None:
    """A worker process: puts batches (tokens [count, length], weights [count, length]) into `queue` for ever."""
    source = rows(seed, length)
    while True:
        batch = [next(source) for _ in range(count)]
        queue.put((np.stack([t for t, _ in batch]), np.stack([w for _, w in batch])))
