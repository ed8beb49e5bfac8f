"""What a user asks of one generation, and the state of a sequence while it runs. No torch: the scheduler reads it."""

from __future__ import annotations

import math
import numbers
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from fp4ward.errors import UserError, shown

FinishReason = Literal["stop", "length", "error"]

MAX_LOGPROBS = 20
_INT64 = 2**63
# Below this a temperature means greedy, as in vLLM.
_GREEDY_BELOW = 1e-5

# field -> (lowest, highest, lowest is excluded); None is no bound.
_FLOATS: dict[str, tuple[float, float | None, bool]] = {
    "temperature": (0.0, None, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, None, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
# field -> (lowest, highest, may be None)
_INTS: dict[str, tuple[int, int, bool]] = {
    "n": (1, 2**14, False),
    "top_k": (-1, 2**31 - 1, False),
    "seed": (-_INT64, _INT64 - 1, True),
    "max_tokens": (1, _INT64 - 1, True),
    "min_tokens": (0, _INT64 - 1, False),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
}
# generation_config.json's key -> our field. What else stands there (beams, contrastive search) is not sampling.
_FROM_FILE = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def _float(name: str, value: object) -> float:
    low, high, excluded = _FLOATS[name]
    rule = f"{'above' if excluded else 'at least'} {low:g}" + (f" and at most {high:g}" if high is not None else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UserError(f"{name} is {shown(value)}, but must be a number {rule}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    below = number <= low if excluded else number < low
    if not math.isfinite(number) or below or (high is not None and number > high):
        raise UserError(f"{name} is {shown(value)}, but must be a finite number {rule}")
    return number


def _int(name: str, value: object) -> int | None:
    low, high, optional = _INTS[name]
    if value is None and optional:
        return None
    rule = f"a whole number from {low} to {high}" if high < 2**31 - 1 else f"a whole number, at least {low}"
    number = _whole(value)
    if number is None or not low <= number <= high:
        raise UserError(f"{name} is {shown(value)}, but must be {rule}{' (or None)' if optional else ''}")
    return number


def _whole(value: object) -> int | None:
    """int, and NumPy's integers; None for the rest, bool too."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} is {shown(value)}, but must be true or false")
    return value


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
        raise UserError(f"stop is {shown(value)}, but must be a string or a list of strings")
    if "" in stops:
        raise UserError("stop holds an empty string, which would end every text at once; leave it out")
    return tuple(stops)


def _stop_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = [_whole(i) for i in value] if isinstance(value, (list, tuple)) else [None]
    found = tuple(i for i in ids if i is not None and 0 <= i < _INT64)
    if len(found) < len(ids):
        raise UserError(f"stop_token_ids is {shown(value)}, but must be a list of token ids (whole numbers from 0 up)")
    return found


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Names and meanings are vLLM's.

    n: outputs per prompt. temperature: 0 (or below 1e-5) is greedy. top_k: 0 or -1 keeps all.
    repetition_penalty counts prompt and output; presence_penalty and frequency_penalty count the output only.
    seed: same seed, same tokens, whatever else runs in the batch; None or -1 takes the engine's.
    stop: strings that end the text before them (after them with include_stop_str_in_output). stop_token_ids likewise.
    max_tokens: None is as many as the context holds. min_tokens: so many tokens come before any end token or stop.
    logprobs, prompt_logprobs: that many likeliest tokens (0..20) beside the token itself, from unmodified logits.
    UserError for a value of the wrong type or out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for one in fields(self):
            name, value = one.name, getattr(self, one.name)
            clean: object
            if name in _FLOATS:
                clean = _float(name, value)
            elif name in _INTS:
                clean = _int(name, value)
            elif name == "stop":
                clean = _stops(value)
            elif name == "stop_token_ids":
                clean = _stop_ids(value)
            else:
                clean = _bool(name, value)
            if clean == -1 and name in ("top_k", "seed"):
                clean = 0 if name == "top_k" else None
            object.__setattr__(self, name, clean)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}; lower it")

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **otherwise: Any) -> SamplingParams:
        """A checkpoint's own defaults; `otherwise` (fields of this class) holds where the file says nothing.

        Read as vLLM reads generation_config.json: temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens;
        null is absent, and a file without "do_sample" still gives its temperature. One difference: an explicit
        "do_sample": false is greedy, as the file says. UserError names the file and its key.
        """
        found: dict[str, Any] = {}
        for key, name in _FROM_FILE.items():
            value = config.get(key)
            if value is not None:
                try:
                    found[name] = _float(name, value) if name in _FLOATS else _int(name, value)
                except UserError as error:
                    raise UserError(f"generation_config.json, key {key}: {error}") from None
        do_sample = config.get("do_sample")
        if do_sample is not None and not isinstance(do_sample, bool):
            raise UserError(f"generation_config.json, key do_sample: {shown(do_sample)} is neither true nor false")
        if do_sample is False:
            found["temperature"] = 0.0
        return cls(**{**otherwise, **found})


def generator(params: SamplingParams, engine_seed: int, counter: int, index: int = 0) -> random.Random:
    """The random stream of one output: of (seed, index) when seeded, else of the engine's seed and request counter.

    Python's Mersenne twister: one draw of 53 bits a token, the same on every device and in every batch, 50 ns. Seeded
    by a string, which is hashed with SHA-512, so that neighbouring seeds give unrelated streams.
    """
    unseeded = f"engine {engine_seed} request {counter} output {index}"
    return random.Random(unseeded if params.seed is None else f"seed {params.seed} output {index}")


@dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability under the unmodified logits, and its place (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n outputs. stop_reason: the stop string or stop token id that ended it; None for an end token.

    token_ids hold the end token or the tokens of the stop string; text does not, unless it was asked for.
    error: one sentence when finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its outputs. prompt_logprobs: one entry a prompt token; None for the first: nothing predicts it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool


@dataclass(eq=False)
class Request:
    """One sequence: its tokens, what of it is stored, why it ended. The scheduler and the engine change it in place.

    computed: tokens whose keys, values and recurrent state are stored. pages, slot: where (runtime/state).
    eos_token_ids: every end token of the model. generator: the stream that `generator` made. prompt_logprobs: where
    they were asked for, complete once the first token is out. prompt_seen: the sampler's: the distinct prompt tokens as
    a tensor on its device, made once because a prompt can be long.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    generator: random.Random = field(default_factory=random.Random, repr=False)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list, repr=False)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(init=False, repr=False)
    prompt_seen: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.prompt_logprobs = None if self.params.prompt_logprobs is None else [None]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens start:stop of prompt and output together, at the cost of that many."""
        n = len(self.prompt_token_ids)
        return self.prompt_token_ids[start:stop] + self.output_token_ids[max(0, start - n) : max(0, stop - n)]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @cached_property
    def banned_until_min_tokens(self) -> tuple[int, ...]:
        """Tokens that cannot come before min_tokens: end tokens (also with ignore_eos, as in vLLM) and stop tokens."""
        return tuple(sorted({*self.eos_token_ids, *self.params.stop_token_ids}))

    def append(self, token: int, logprobs: dict[int, Logprob] | None = None) -> None:
        """Takes the next output token."""
        self.output_token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def finish_if_done(self, max_model_len: int) -> None:
        """Ends the request if its newest token ends it. Rules and their order are vLLM's.

        Stop strings are not seen here: they are text (serve/text), and end a request through `stop`.
        """
        token, count, limit = self.output_token_ids[-1], len(self.output_token_ids), self.params.max_tokens
        if count >= self.params.min_tokens:
            if token in self.eos_token_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
                return
            if token in self.params.stop_token_ids:
                self.stop(token)
                return
        if self.num_tokens >= max_model_len or (limit is not None and count >= limit):
            self.finish_reason = "length"

    def stop(self, reason: int | str) -> None:
        """Ends it at a stop token or a stop string."""
        self.finish_reason, self.stop_reason = "stop", reason

    def fail(self, sentence: str) -> None:
        """Ends it with an error; the other requests go on."""
        self.finish_reason, self.error = "error", sentence
