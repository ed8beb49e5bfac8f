"""Tokenizer files, bytes to text, stop strings."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from fp4ward.errors import UserError
from fp4ward.runtime.request import SamplingParams
from fp4ward.serve.text import Detokenizer, StopChecker, TextStream, Tokenizer

quick = settings(deadline=None, derandomize=True, max_examples=150)

WORDS = ["hello world, ä ö ü", "stop here and there", "日本語のテキスト", "naïve café 😀😃", "a b,c d"]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(WORDS * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<tool é>", special=False)])
    return backend


BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND)
ids = st.lists(st.integers(0, BACKEND.get_vocab_size() + 2), max_size=40)


def save(folder, backend=None, config=None, **files):
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


# ---- tokenizer files ----


def test_a_folder_without_tokenizer_has_none(tmp_path):
    assert Tokenizer.load(tmp_path) is None


def test_text_survives_the_round_trip():
    for text in [*WORDS, "", " two  spaces\n\n\ttab ", "\x00\x7f", "👩‍👩‍👧‍👦🏳️‍🌈"]:
        found = TOKENIZER.encode(text)
        assert TOKENIZER.decode(found) == text == BACKEND.decode(found)


@quick
@given(st.text(max_size=30))
def test_detokenized_text_is_the_tokenizers_own_decode(text):
    try:
        found = TOKENIZER.encode(text)
    except UserError:
        assert not text.isprintable()
        return
    assert (
        TOKENIZER.decode(found, skip_special_tokens=False) == text == BACKEND.decode(found, skip_special_tokens=False)
    )


def test_token_bytes_are_exact():
    for byte, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        assert len(TOKENIZER.token_bytes(BACKEND.token_to_id(character))) == 1, byte
    alphabet = [TOKENIZER.token_bytes(BACKEND.token_to_id(c)) for c in pre_tokenizers.ByteLevel.alphabet()]
    assert {*alphabet} == {bytes([b]) for b in range(256)}
    assert TOKENIZER.token_bytes(BACKEND.token_to_id("<think>")) == b"<think>"
    # an added token is text, although all its characters are in the byte alphabet
    assert TOKENIZER.token_bytes(BACKEND.token_to_id("<tool é>")) == "<tool é>".encode()
    assert (
        TOKENIZER.token_bytes(TOKENIZER.vocab_size) == TOKENIZER.token_bytes(-1) == TOKENIZER.token_bytes(2**40) == b""
    )
    assert TOKENIZER.token_text(BACKEND.token_to_id("Ā")) == "\x00"


def test_special_tokens_are_skipped_or_kept():
    im_end, think = (BACKEND.token_to_id(t) for t in ("<|im_end|>", "<think>"))
    tokens = [*TOKENIZER.encode("a"), think, im_end]
    assert TOKENIZER.is_special(im_end) and not TOKENIZER.is_special(think)
    assert TOKENIZER.decode(tokens) == "a<think>"
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == "a<think><|im_end|>"


def test_names_of_special_tokens_come_from_both_files(tmp_path):
    config = {"eos_token": {"content": "<|im_end|>", "special": True}, "bos_token": None}
    other = json.dumps({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    tokenizer = Tokenizer.load(save(tmp_path, config=config, special_tokens_map__json=other))
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert tokenizer.chat_template is None


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a long text, longer than four tokens")).startswith("a long text, longer")
    assert len(tokenizer.encode("a")) == 1


def test_special_tokens_are_added_only_where_asked(tmp_path):
    backend = byte_level()
    start = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[start])
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    assert tokenizer.encode("a") == [start[1], *tokenizer.encode("a", add_special_tokens=False)]


def test_tokens_of_tokenizer_config_alone_are_added(tmp_path):
    size, think = BACKEND.get_vocab_size(), BACKEND.token_to_id("<think>")
    config = {"added_tokens_decoder": {str(size): {"content": "<new>", "special": True}}}
    config["added_tokens_decoder"][str(think)] = {"content": "<think>", "special": True}
    tokenizer = Tokenizer.load(save(tmp_path, config=config))
    assert tokenizer.encode("<new>") == [size]
    assert tokenizer.is_special(size) and tokenizer.is_special(think)
    config["added_tokens_decoder"] = {str(size + 7): {"content": "<new>"}}
    with pytest.raises(UserError, match="'<new>' has id"):
        Tokenizer.load(save(tmp_path, config=config))


def sentence_piece() -> Backend:
    pieces = ["<unk>", "<s>", "▁Hello", "▁wor", "ld", "▁", *(f"<0x{b:02X}>" for b in range(256))]
    backend = Backend(models.Unigram([(p, -1.0 - i) for i, p in enumerate(pieces)], unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def test_sentence_piece_spaces_and_byte_fallback():
    backend = sentence_piece()
    tokenizer = Tokenizer(backend)
    found = tokenizer.encode("Hello world ä")
    assert tokenizer.decode(found) == " Hello world ä"  # output goes on from a prompt: its first space is real
    assert backend.decode(found) == "Hello world ä"
    assert tokenizer.token_bytes(backend.token_to_id("<0xC3>")) == b"\xc3"
    backend.decoder = decoders.Metaspace()
    assert Tokenizer(backend).token_bytes(backend.token_to_id("▁wor")) == b" wor"


def test_a_file_over_which_the_library_panics_is_one_sentence(tmp_path):
    document = json.loads(BACKEND.to_str()) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read by the tokenizers library"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_or_folder_instead_of_a_file_is_not_waited_for(tmp_path, name):
    for make in (os.mkfifo, os.mkdir):
        folder = tmp_path / make.__name__
        folder.mkdir()
        save(folder)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(UserError, match="this is not a file"):
            Tokenizer.load(folder)


def test_unknown_decoders_are_refused_by_name():
    backend = sentence_piece()
    for decoder, name in [(decoders.WordPiece(), "WordPiece"), (None, "none")]:
        backend.decoder = decoder
        with pytest.raises(UserError, match=name):
            Tokenizer(backend)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", "[]", "tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "tokenizer.json"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", "[" * 100000, "not valid JSON"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "y"}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [3]}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": 5}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "malformed"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "x"}]}', "default"),
        ("special_tokens_map.json", "nope", "not valid JSON"),
    ],
)
def test_malformed_files_give_one_sentence(tmp_path, name, text, match):
    save(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=match) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_utf8_give_one_sentence(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match="UTF-8"):
        Tokenizer.load(tmp_path)


def test_half_a_surrogate_pair_in_a_prompt_is_refused():
    with pytest.raises(UserError, match="surrogate"):
        TOKENIZER.encode("a\ud800")


def test_template_file_wins_over_tokenizer_config(tmp_path):
    save(tmp_path, config={"chat_template": "config", "eos_token": "<|im_end|>"})
    assert Tokenizer.load(tmp_path).chat_template.render([{"role": "user"}]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert Tokenizer.load(tmp_path).chat_template.render([{"role": "user"}]) == "file <|im_end|>"


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = Tokenizer.load(save(tmp_path, config={"chat_template": named})).chat_template
    assert (template.render([{"role": "user"}]), template.render([{"role": "user"}], tools=[{"type": "function"}])) == (
        "plain",
        "tools",
    )
    assert template.render([{"role": "user"}], tools=[]) == "plain"


# ---- output: bytes to text ----


def split(items, sizes):
    """Pieces of the given sizes, then the rest."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(items[at : at + size])
        at += size
    return [*pieces, items[at:]]


@quick
@given(ids, st.lists(st.integers(0, 5), max_size=20), st.booleans())
def test_streamed_text_is_the_whole_text(tokens, sizes, skip):
    stream = Detokenizer(TOKENIZER, skip)
    found = "".join(stream.add(piece) for piece in split(tokens, sizes)) + stream.flush()
    kept = [t for t in tokens if not (skip and TOKENIZER.is_special(t))]
    assert found == b"".join(map(TOKENIZER.token_bytes, kept)).decode("utf-8", "replace")


def bytes_ids(data: bytes) -> list[int]:
    of_byte = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    return [of_byte[bytes([b])] for b in data]


def test_half_a_character_waits_and_invalid_bytes_do_not():  # F36
    stream = Detokenizer(TOKENIZER)
    assert [stream.add([i]) for i in bytes_ids("é😀".encode())] == ["", "é", "", "", "", "😀"]
    assert [stream.add([i]) for i in bytes_ids(b"\xffa\xc3b")] == ["�", "a", "", "�b"]
    assert stream.add(bytes_ids(b"\xe2\x82")) == ""
    assert stream.flush() == "�"
    assert Detokenizer(TOKENIZER).flush() == ""


# ---- output: stop strings ----


def first_stop(text: str, stops, include: bool) -> tuple[str, str | None]:
    """By str.find on the whole text: the stop string complete first, the longest of those that end together."""
    found = [(at + len(s), at, s) for s in stops if (at := text.find(s)) >= 0]
    if not found:
        return text, None
    end, at, stop = min(found)
    return text[: end if include else at], stop


letters = st.text("ab,é", max_size=24)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    letters, st.lists(st.text("ab,é", min_size=1, max_size=5), max_size=3), st.lists(st.integers(0, 4)), st.booleans()
)
def test_stops_are_those_of_find_for_any_chunks_and_nothing_else_is_held(text, stops, sizes, include):  # F35
    checker, out, given_text = StopChecker(stops, include), "", ""
    for piece in split(text, sizes):
        out += checker.add(piece)
        given_text += piece
        if checker.stopped is None:
            starts = {s[:n] for s in stops for n in range(1, len(s))}
            held = max((len(p) for p in starts if given_text.endswith(p)), default=0)
            assert out == given_text[: len(given_text) - held]
    out += checker.flush()
    assert (out, checker.stopped) == first_stop(text, stops, include)


@quick
@given(ids, st.lists(st.integers(0, 5), max_size=20), st.lists(st.text("ae to�", min_size=1, max_size=3), max_size=2))
def test_streamed_pieces_are_the_final_text_up_to_the_stop(tokens, sizes, stops):  # F35 F36
    stream = TextStream(TOKENIZER, SamplingParams(stop=stops))
    pieces = [stream.add(piece) for piece in split(tokens, sizes)]
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    assert (stream.text, stream.stopped) == first_stop(TOKENIZER.decode(tokens), stops, False)


def test_a_stop_string_inside_and_across_tokens():  # F35
    for include, expected in [(False, "a "), (True, "a b,c")]:
        inside = StopChecker(["b,c"], include)
        assert (inside.add("a b,c d"), inside.stopped) == (expected, "b,c")
        across = StopChecker(["b,c"], include)
        assert "".join([across.add("a b"), across.add(","), across.add("c d"), across.flush()]) == expected
    held = StopChecker(["b,c"])
    assert [held.add("a b"), held.add(","), held.add("x"), held.flush()] == ["a ", "", "b,x", ""]
    assert held.add("b") == "" and held.flush() == "b"
    plain = StopChecker([])
    assert plain.add("anything") == "anything" and plain.flush() == ""


def test_the_stop_string_complete_first_wins():
    checker = StopChecker(["abcd", "bc"])
    assert (checker.add("xabcd"), checker.stopped) == ("xa", "bc")
    checker = StopChecker(["bc", "abc"])
    assert (checker.add("xabc"), checker.stopped) == ("x", "abc")
    assert checker.add("more") == "" and checker.flush() == ""


def test_a_stop_string_within_min_tokens_does_not_count():
    stop = SamplingParams(stop="b", min_tokens=2, max_tokens=9)
    stream = TextStream(TOKENIZER, stop)
    assert stream.add(bytes_ids(b"abcb")) == "abc" and stream.stopped == "b"
    one_by_one = TextStream(TOKENIZER, stop)
    assert "".join(one_by_one.add([i]) for i in bytes_ids(b"abcb")) == "abc"
    across = TextStream(TOKENIZER, SamplingParams(stop="bc", min_tokens=2, max_tokens=9))
    assert across.add(bytes_ids(b"abcb")) == "a" and across.stopped == "bc"


def test_half_a_character_at_the_end_shows_after_what_a_stop_held():
    stream = TextStream(TOKENIZER, SamplingParams(stop="xyz"))
    assert stream.add(bytes_ids(b"axy\xe2\x82")) == "a"
    assert stream.finish() == "xy�" and stream.text == "axy�"
