"""Train the demo's tokenizer: byte-level BPE of 4,096 tokens in which every digit is a token of its own.

Writes demo/build/tokenizer/{tokenizer.json, tokenizer_config.json, chat_template.jinja} and the prose as tokens
(demo/build/prose.npy, uint16). Needs demo/build/prose.txt, glosses.txt and facts.json (corpus.py).
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import recipe
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BUILD = Path(__file__).parent / "build"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY = 4096
# As in GPT-2's pattern, but one digit at a time, and with newlines apart from the words around them.
SPLIT = r"\p{N}| ?\p{L}+|'(?:s|t|re|ve|m|ll|d)\b| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+"


def tokenizer_for(texts: Iterator[str]) -> Tokenizer:
    """A tokenizer trained on `texts`; special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=t in SPECIAL) for t in (*SPECIAL, *MARKS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample(documents: int) -> Iterator[str]:
    """The text the vocabulary is learned from: generated documents, part of the prose and part of the glosses."""
    rng = random.Random(0)
    facts = recipe.load_facts()
    for _ in range(documents):
        yield "".join(text for text, _ in recipe.document(rng, facts, 512))
    prose = (BUILD / "prose.txt").read_text(encoding="utf-8")
    yield from (prose[i : i + 4000] for i in range(0, len(prose), 12000))
    yield from (BUILD / "glosses.txt").read_text(encoding="utf-8").split("\n")[::8]
    for noun in facts["nouns"]:
        yield from (f"{noun['word']}\n {noun['word']}\n {noun['kind']}",) * 3
    yield from ("\n".join(f"{w} {w}: {w}," for w in recipe.tasks.WORDS),) * 20


def main() -> None:
    folder = BUILD / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(sample(20000))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copy(Path(__file__).parent / "chat_template.jinja", folder / "chat_template.jinja")

    prose = (BUILD / "prose.txt").read_text(encoding="utf-8").split("\n\n\n")
    glosses = (BUILD / "glosses.txt").read_text(encoding="utf-8").split("\n")
    random.Random(1).shuffle(glosses)
    pages = ["\n".join(glosses[i : i + 8]) for i in range(0, len(glosses) // 4, 8)]
    end = tokenizer.token_to_id("<|endoftext|>")
    ids: list[int] = []
    for text in [*prose, *pages]:
        ids += [*tokenizer.encode(text).ids, end]
    np.save(BUILD / "prose.npy", np.asarray(ids, dtype=np.uint16))
    size = sum(map(len, prose)) + sum(map(len, pages))
    print(tokenizer.get_vocab_size(), "tokens;", len(ids), "prose tokens of", round(size / len(ids), 2), "characters")
    line = [len(tokenizer.encode(f"{w}: 1234\n").ids) for w in recipe.tasks.WORDS]
    print("tokens per recall pair:", sum(line) / len(line))


if __name__ == "__main__":
    main()
