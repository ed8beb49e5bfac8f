"""Text in, text out: tokenizer files, and bytes of output tokens -> text up to a stop string.

A token stands for bytes, not for characters: text is made from the bytes of all tokens so far, so that half a UTF-8
character waits for its other half. Streamed pieces put together are the whole text exactly, however tokens arrive.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from fp4ward.errors import UserError, one_line
from fp4ward.runtime.request import SamplingParams
from fp4ward.serve.template import ChatTemplate

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _read(path: Path) -> str | None:
    try:
        if path.exists() and not path.is_file():  # a folder; a pipe, where reading would wait for ever
            raise UserError(f"{path}: this is not a file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {one_line(error)}") from None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read(path)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not valid JSON: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: must hold a JSON object, but holds a {type(found).__name__}")
    return found


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, reversed: printable Latin-1 is itself, the rest count from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + i): byte for i, byte in enumerate(others)}}


_BYTES = _byte_alphabet()
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:  # not written in the byte alphabet: taken as it is, as the tokenizers library does
        return token.encode("utf-8", "replace")


def _steps(component: Any, inner: str) -> list[dict[str, Any]]:
    """A decoder or pre-tokenizer of the tokenizers library as a flat list of its JSON steps."""
    if component is None:
        return []
    found: list[dict[str, Any]] = []
    todo = [json.loads(component.__getstate__())]
    while todo:
        step = todo.pop(0)
        if step["type"] == "Sequence":
            todo = step[inner] + todo
        else:
            found.append(step)
    return found


def _byte_rule(backend: Backend, where: str) -> Callable[[str], bytes]:
    """How this vocabulary writes bytes: in GPT-2's alphabet, or as SentencePiece does (replaced space, <0xAB>)."""
    steps = _steps(backend.decoder, "decoders")
    kinds = [step["type"] for step in steps]
    if not steps:
        kinds = [step["type"] for step in _steps(backend.pre_tokenizer, "pretokenizers") if step["type"] == "ByteLevel"]
    if "ByteLevel" in kinds:
        return _byte_level
    # Strip drops a space at the start of a text; output goes on from a prompt, so its first space is real.
    replaced = [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]
    replaced += [(s["pattern"].get("String"), s["content"]) for s in steps if s["type"] == "Replace"]
    known = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
    if not kinds or not {*kinds} <= known or any(old is None for old, _ in replaced):
        raise UserError(
            f"{where}: decoder {', '.join(kinds) or '(none)'} is not supported; supported are ByteLevel and "
            "SentencePiece's (Metaspace or Replace, ByteFallback)"
        )

    def sentence_piece(token: str) -> bytes:
        if "ByteFallback" in kinds and (byte := _BYTE_FALLBACK.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")

    return sentence_piece


def _add_configured(backend: Backend, config: Mapping[str, Any], where: Path) -> None:
    """tokenizer_config.json may add tokens that tokenizer.json lacks, or mark one as special: its word counts."""
    entries = config.get("added_tokens_decoder") or {}
    try:
        present = backend.get_added_tokens_decoder()
        for id, entry in sorted((int(id), entry) for id, entry in entries.items()):
            content, special = entry["content"], bool(entry.get("special"))
            if id in present and (present[id].content, present[id].special) == (content, special):
                continue
            flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
            backend.add_tokens([AddedToken(content, special=special, **flags)])
            if (got := backend.token_to_id(content)) != id:
                raise UserError(f"{where}: token {content!r} has id {id}, but with tokenizer.json it gets {got}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: added_tokens_decoder is malformed: {one_line(error)}") from None


class Tokenizer:
    """A checkpoint folder's tokenizer. special_tokens: {"eos_token": "<|im_end|>", ...} as named by the folder."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        where: str = "tokenizer.json",
    ) -> None:
        backend.no_truncation()  # a saved training set-up, which would silently cut prompts
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._rule = _byte_rule(backend, where)
        self._added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """None if the folder has no tokenizer.json. UserError for files that are malformed.

        chat_template.jinja wins over tokenizer_config.json's "chat_template".
        """
        path = folder / "tokenizer.json"
        text = _read(path)
        if text is None:
            return None
        try:
            backend = Backend.from_str(text)
        except BaseException as error:  # the library's Rust code panics over some files, and a panic is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(f"{path}: cannot be read by the tokenizers library: {one_line(error)}") from None
        config_path = folder / "tokenizer_config.json"
        config = _read_json(config_path)
        _add_configured(backend, config, config_path)
        special = {}
        for name, value in {**_read_json(folder / "special_tokens_map.json"), **config}.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name in SPECIAL and isinstance(content, str):
                special[name] = content
        return cls(backend, special, _find_template(folder, config, special), str(path))

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and self._added[token_id].special

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """add_special_tokens: as tokenizer.json's post-processor does; False for text that a chat template made."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise UserError("the text holds half of a surrogate pair, which is not valid Unicode; remove it") from None
        except BaseException as error:  # as in `load`
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(f"the text cannot be tokenized with this tokenizer.json: {one_line(error)}") from None

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the output; b"" for ids beyond the vocabulary (models pad theirs)."""
        found = self._bytes.get(token_id)
        if found is None:
            if token_id in self._added:
                found = self._added[token_id].content.encode("utf-8", "replace")
            else:
                token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
                found = b"" if token is None else self._rule(token)
            self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """One token alone, for display; U+FFFD for part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        whole = Detokenizer(self, skip_special_tokens)
        return whole.add(token_ids) + whole.flush()


def _find_template(folder: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    own: object = _read(path)
    if own is None:
        path, own = folder / "tokenizer_config.json", config.get("chat_template")
    if isinstance(own, list):  # several, by name
        try:
            own = {entry["name"]: entry["template"] for entry in own}
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: chat_template is a list with a malformed entry: {one_line(error)}") from None
    if own is None:
        return None
    named: dict[str, Any] = own if isinstance(own, dict) else {"default": own}
    if "default" not in named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise UserError(f"{path}: chat_template must be a text, or a list of named texts with one named 'default'")
    return ChatTemplate(named, special, str(path))


class Detokenizer:
    """Tokens -> text by bytes. Bytes of an unfinished character wait; U+FFFD only for invalid bytes, and at the end."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        kept = (i for i in token_ids if not (self._skip and tokenizer.is_special(i)))
        return self._decoder.decode(b"".join(map(tokenizer.token_bytes, kept)))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class StopChecker:
    """Text in, text that may be shown out: up to the stop string that is complete first (of two that end at the same
    character, the longer). Holds back the longest end of the text that may begin a stop string, and nothing else."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._tail = ""  # the last characters seen, as many as a match may begin before new text
        self._held = 0  # of these, not yet shown
        self.stopped: str | None = None

    def add(self, text: str, armed: bool = True) -> str:
        """armed=False: a stop string that ends within this text does not count (min_tokens)."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        seen = self._tail + text
        shown = len(self._tail) - self._held
        matches = []
        for stop in self._stops if armed else ():
            at = seen.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if at >= 0:
                matches.append((at + len(stop), at, stop))
        if matches:
            end, at, self.stopped = min(matches)
            self._tail, self._held = "", 0
            return seen[shown : end if self._include else at]
        self._held = max(_live(seen, stop) for stop in self._stops)
        longest = max(map(len, self._stops)) - 1
        self._tail = seen[len(seen) - longest :] if len(seen) > longest else seen
        return seen[shown : len(seen) - self._held]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        rest = self._tail[len(self._tail) - self._held :]
        self._tail, self._held = "", 0
        return rest


def _live(text: str, stop: str) -> int:
    """Length of the longest end of text that is a proper start of stop."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


class TextStream:
    """Tokens of one output -> its text, piece by piece. stopped: the stop string that was met, which ends the request.

    The engine does not add an end or stop token that finished the request, unless include_stop_str_in_output.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        assert isinstance(params.stop, tuple)
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._count = 0
        self.text = ""

    @property
    def stopped(self) -> str | None:
        return self._checker.stopped

    def add(self, token_ids: Sequence[int]) -> str:
        """New text. As in vLLM, a stop string that is complete within the first min_tokens tokens does not count."""
        pieces = []
        for token in token_ids:
            if self.stopped is not None:
                break
            self._count += 1
            armed = self._min_tokens == 0 or self._count > self._min_tokens
            pieces.append(self._checker.add(self._detokenizer.add([token]), armed))
        return self._out("".join(pieces))

    def finish(self) -> str:
        """The last text: what waited for the end of a character or of a stop string. Call it once, at the end."""
        armed = self._count > self._min_tokens or self._min_tokens == 0
        return self._out(self._checker.add(self._detokenizer.flush(), armed) + self._checker.flush())

    def _out(self, text: str) -> str:
        self.text += text
        return text
