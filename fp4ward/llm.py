"""The offline interface: LLM(model).generate(prompts), .stream(prompt), .chat(messages), .logits(token_ids)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fp4ward import facts, models
from fp4ward.checkpoint.hub import resolve_model
from fp4ward.checkpoint.index import open_index
from fp4ward.checkpoint.load import load, progress_bar
from fp4ward.config import EngineConfig, resolve
from fp4ward.errors import UserError
from fp4ward.formats.scheme import read_scheme
from fp4ward.runtime.engine import Engine
from fp4ward.runtime.request import CompletionOutput, Logprob, Request, RequestOutput, SamplingParams
from fp4ward.serve.text import TextStream, Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A loaded model. Keyword arguments are those of fp4ward.config.EngineConfig, where they are explained.

    notices: what the checkpoint's files disagree about, and what was left aside. left_out: reason -> (tensors, bytes).
    formats: slot -> Format as it runs. config: the settings with nothing left on "auto". tokenizer: None when the
    folder has none (token ids still work). show_progress: a bar while loading; by default only on a terminal.
    UserError when the checkpoint or a setting cannot be used.
    """

    def __init__(self, model: str, *, show_progress: bool | None = None, **settings: Any) -> None:
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        for name in settings.keys() - known:
            raise UserError(f"LLM has no setting {name!r}; it has {', '.join(sorted(known))}")
        wanted = EngineConfig(model=str(model), **settings)
        folder = resolve_model(wanted.model, wanted.revision)
        index = open_index(folder)
        known_facts = facts.load(index.config)
        cfg = known_facts.parse(index.config)
        scheme = read_scheme(index.config, index.hf_quant_config, known_facts.canonical)
        self.config = resolve(
            wanted,
            cuda=wanted.device != "cpu" and torch.cuda.is_available(),
            checkpoint_dtype=cfg.dtype,
            checkpoint_kv=scheme.kv_cache,
            max_position_embeddings=cfg.max_position_embeddings,
        )
        device = torch.device(self.config.device)
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        self.default_params = SamplingParams.from_generation_config(index.generation_config)
        self.tokenizer = Tokenizer.load(folder)
        with contextlib.nullcontext() if show_progress is False else progress_bar() as progress:
            loaded = load(
                index, known_facts.weights(cfg), facts=known_facts, scheme=scheme, device=device, progress=progress
            )
        self.notices = loaded.notices
        self.left_out = loaded.left_out
        self.formats = loaded.formats
        built = models.load(facts.architecture(index.config)).Model(cfg, loaded.tensors, dtype)
        self.engine = Engine(
            built,
            known_facts.state_spec(cfg),
            self.config,
            vocab_size=cfg.vocab_size,
            kv_scales=loaded.kv_scales,
            eos_token_ids=_end_tokens(index.generation_config, cfg.eos_token_ids),
        )

    def default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own defaults, from generation_config.json."""
        return self.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or lists of token ids), batched; one RequestOutput a prompt, in their order.

        sampling_params: one for all or one each; by default the checkpoint's. UserError before anything runs when a
        prompt is empty, too long or holds unknown ids.
        """
        many = _prompts(prompts)
        jobs = self._jobs(many, self._params(sampling_params, len(many)))
        for _ in self._run(jobs):
            pass
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt; what is known so far after every token, the last with finished=True."""
        (job,) = self._jobs(_prompts(prompt), self._params(sampling_params, 1))
        return (job.output() for job in self._run([job]))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]) by the checkpoint's chat template."""
        return self.generate([self._render(messages, tools, chat_template_kwargs)], sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """`chat`, as `stream` gives it."""
        return self.stream(self._render(messages, tools, chat_template_kwargs), sampling_params)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [T, vocab] on the model's device: the logits after each token of one sequence."""
        return self.engine.logits(list(token_ids)).float()

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> list[int]:
        tokenizer = self._tokenizer("a conversation")
        if tokenizer.chat_template is None:
            raise UserError(
                f"{self.config.model} has no chat template (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json), so messages cannot be turned into a prompt; use generate instead"
            )
        text = tokenizer.chat_template.render(list(messages), tools=tools, **(kwargs or {}))
        return tokenizer.encode(text, add_special_tokens=False)

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(
                f"{self.config.model} has no tokenizer.json, which {what} needs; give token ids instead "
                f"(--prompt-token-ids on the command line)"
            )
        return self.tokenizer

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_params] * count
        if len(given) != count:
            raise UserError(f"{len(given)} sampling_params for {count} prompts; give one for all, or one each")
        return given

    def _jobs(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[_Job]:
        if any(isinstance(p, str) for p in prompts) or any(p.stop for p in params):
            self._tokenizer("text (a prompt or a stop string)")
        jobs: list[_Job] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                jobs.append(_Job(self.engine, self.tokenizer, prompt, one))
        except UserError:
            for job in jobs:
                job.close()
            raise
        return jobs

    def _run(self, jobs: Sequence[_Job]) -> Iterator[_Job]:
        """Step until every job is done; yields a job whenever one of its sequences moved. Closing it frees all."""
        owner = {choice.request: (job, choice) for job in jobs for choice in job.choices}
        try:
            while not all(job.finished for job in jobs):
                moved = []
                for request in self.engine.step():
                    if request in owner:
                        job, choice = owner[request]
                        choice.advance(self.engine)
                        if job not in moved:
                            moved.append(job)
                yield from moved
        finally:
            for job in jobs:
                job.close()


class _Choice:
    """One of the n outputs of a prompt: its request, and its text so far."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.index = index
        self.tokenizer = tokenizer
        self.stream = None if tokenizer is None else TextStream(tokenizer, request.params)

    def advance(self, engine: Engine) -> None:
        """Take the request's newest token into the text; a stop string ends the request."""
        request, stream = self.request, self.stream
        if stream is None:
            return
        # An end token is not text; with include_stop_str_in_output a stop token is.
        ended_by_token = request.finish_reason == "stop" and not request.params.include_stop_str_in_output
        if request.finish_reason != "error" and not ended_by_token:
            stream.add(request.output_token_ids[-1:])
            if stream.stopped is not None:
                request.stop(stream.stopped)
                engine.discard(request)
        if request.finished and stream.stopped is None:
            stream.finish()

    def output(self) -> CompletionOutput:
        r = self.request
        logprobs = None if r.params.logprobs is None else [_named(d, self.tokenizer) for d in r.logprobs]
        total = None
        if logprobs is not None:
            total = sum(d[t].logprob for d, t in zip(logprobs, r.output_token_ids, strict=True))
        return CompletionOutput(
            index=self.index,
            text=self.stream.text if self.stream is not None else "",
            token_ids=list(r.output_token_ids),
            logprobs=logprobs,
            cumulative_logprob=total,
            finish_reason=r.finish_reason,
            stop_reason=r.stop_reason,
            error=r.error,
        )


class _Job:
    """A prompt and its n sequences."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, prompt: Prompt, params: SamplingParams) -> None:
        self.engine = engine
        self.text = prompt if isinstance(prompt, str) else None
        self.choices: list[_Choice] = []
        ids = prompt
        if isinstance(prompt, str):
            assert tokenizer is not None
            ids = tokenizer.encode(prompt)
        try:
            for i in range(params.n):
                # The prompt's own log-probabilities are the same for all n.
                own = params if i == 0 else dataclasses.replace(params, prompt_logprobs=None)
                self.choices.append(_Choice(engine.add(ids, own, i), i, tokenizer))  # type: ignore[arg-type]
        except UserError:
            self.close()
            raise
        self.tokenizer = tokenizer

    @property
    def finished(self) -> bool:
        return all(choice.request.finished for choice in self.choices)

    def output(self) -> RequestOutput:
        first = self.choices[0].request
        prompt_logprobs = self.engine.prompt_logprobs(first)
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.text,
            prompt_token_ids=list(first.prompt_token_ids),
            prompt_logprobs=prompt_logprobs
            and [None if d is None else _named(d, self.tokenizer) for d in prompt_logprobs],
            outputs=[choice.output() for choice in self.choices],
            finished=self.finished,
        )

    def close(self) -> None:
        """Free what unfinished sequences hold."""
        for choice in self.choices:
            if not choice.request.finished:
                self.engine.discard(choice.request)


def _named(entry: Mapping[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return dict(entry)
    return {t: dataclasses.replace(lp, decoded_token=tokenizer.token_text(t)) for t, lp in entry.items()}


def _prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A single text or list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and all(isinstance(p, int) for p in many):
        return [many]  # type: ignore[list-item]
    if not many:
        raise UserError("the prompt is empty; give at least one token")
    for p in many:
        if not isinstance(p, str | Sequence):
            raise UserError(f"a prompt is {type(p).__name__}; a text or a list of token ids is expected")
    return many  # type: ignore[return-value]


def _end_tokens(generation_config: Mapping[str, Any], from_config: tuple[int, ...]) -> tuple[int, ...]:
    """generation_config.json lists all end tokens; config.json's serve where it names none."""
    given = facts.token_ids(generation_config.get("eos_token_id"), "generation_config.json: 'eos_token_id'")
    return given or from_config
