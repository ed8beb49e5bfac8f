"""The offline interface: LLM(model).generate(prompts), .stream(prompt), .chat(messages), .logits(token_ids)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fp4ward import facts, hardware, models, pieces
from fp4ward.checkpoint import dummy
from fp4ward.checkpoint.hub import resolve_model
from fp4ward.checkpoint.load import load, progress_bar
from fp4ward.config import EngineConfig
from fp4ward.errors import UserError, shown
from fp4ward.formats.weight import Weight
from fp4ward.plan import Options
from fp4ward.plan import make as make_plan
from fp4ward.runtime.engine import Engine
from fp4ward.runtime.request import CompletionOutput, Logprob, Request, RequestOutput, SamplingParams
from fp4ward.serve.template import ChatTemplate
from fp4ward.serve.text import TextStream, Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model. Keyword arguments are those of fp4ward.config.EngineConfig, where they are explained.

    notices: what the checkpoint's files disagree about, and what was left aside. formats: slot -> Format as stored.
    plan: which kernels run it, and why (fp4ward.plan_text renders it). config: the settings with nothing left on
    "auto". tokenizer: None when the folder has none (token ids still work).
    show_progress: a bar while loading; by default only on a terminal. needs: "text" or "chat" if the model is of no use
    without a tokenizer, or without a chat template. UserError, before weights are read where that is possible, when the
    checkpoint or a setting cannot be used.
    """

    def __init__(self, model: str, *, show_progress: bool | None = None, needs: str = "", **settings: Any) -> None:
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        for name in settings.keys() - known:
            raise UserError(f"LLM has no setting {name!r}; it has {', '.join(sorted(known))}")
        wanted = EngineConfig(model=str(model), **settings)
        drawn = wanted.load_format == "dummy"
        folder = resolve_model(wanted.model, wanted.revision, weights=not drawn)
        subject = pieces.read(folder, wanted.model, weights=not drawn, dummy=drawn)
        index, cfg = subject.index, subject.cfg
        assert index is not None
        forward = models.load(facts.architecture(index.config))
        self.plan = make_plan(subject, _machine(wanted.device), Options(wanted))
        if self.plan.failures:
            raise UserError("; ".join(self.plan.failures))
        self.config = self.plan.config
        device = torch.device(self.config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Triton launches on the current one
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        self._generation_config = index.generation_config
        self.default_sampling_params()  # refuses what is wrong in the file
        self.tokenizer = Tokenizer.load(folder)
        if needs:
            self._need_template() if needs == "chat" else self._need_tokenizer()
        with contextlib.nullcontext() if show_progress is False else progress_bar() as progress:
            where: dict[str, Any] = {"device": device, "progress": progress}
            if drawn:
                kept = (subject.slots, subject.formats, subject.aliases)
                loaded = dummy.load(*kept, neutral=subject.facts.neutral, seed=self.config.seed, **where)
            else:
                loaded = load(index, subject.slots, facts=subject.facts, assigned=subject.assigned, **where)
        self.plan = dataclasses.replace(self.plan, subject=dataclasses.replace(subject, index=None, assigned=None))
        if self.plan.unpacked:
            _unpack(loaded.tensors, subject.aliases)
        self.notices = list(self.plan.notices)
        self.formats = loaded.formats
        built = forward.Model(cfg, loaded.tensors, dtype)
        loaded.tensors.clear()  # the layers hold them, until their kernels want another layout
        self.engine = Engine(
            built,
            subject.facts.state_spec(cfg),
            self.plan,
            vocab_size=cfg.vocab_size,
            kv_scales=loaded.kv_scales,
            eos_token_ids=_end_tokens(index.generation_config, cfg.eos_token_ids),
        )
        self._choices: dict[Request, _Choice] = {}  # of every request that has not finished

    def default_sampling_params(self, **otherwise: Any) -> SamplingParams:
        """What generation_config.json says; `otherwise` (fields of SamplingParams) holds where it says nothing."""
        return SamplingParams.from_generation_config(self._generation_config, **otherwise)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or lists of token ids), batched; one RequestOutput a prompt, in their order.

        sampling_params: one for all or one each; by default the checkpoint's. progress: called with the number of
        prompts that are done, whenever one is. UserError before anything runs when a prompt is empty, too long or
        holds unknown ids.
        """
        many = _prompts(prompts)
        jobs = self._jobs(many, self._params(sampling_params, len(many)))
        done = 0
        for job in self._run(jobs):
            if job.finished:
                done += 1
                if progress is not None:
                    progress(done)
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt; what is known so far after every token, the last with finished=True."""
        prompts = _prompts(prompt)
        if len(prompts) != 1:
            raise UserError(f"{len(prompts)} prompts for one stream; use generate, or one stream each")
        run = self._run(self._jobs(prompts, self._params(sampling_params, 1)))
        next(run)  # from here on, a stream that nobody reads gives back what it holds when it is dropped
        return (job.output() for job in run)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]), or each of a list of conversations, by the
        checkpoint's chat template. The rest is as in `generate`."""
        several = bool(messages) and all(isinstance(one, list | tuple) for one in messages)
        many: Any = messages if several else [messages]
        prompts = [self._render(one, tools, chat_template_kwargs) for one in many]
        return self.generate(prompts, sampling_params, progress=progress)

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
        (ids,) = _prompts([token_ids])
        if isinstance(ids, str):
            raise UserError("logits() takes token ids; tokenizer.encode makes them from a text")
        return self.engine.logits(list(ids)).float()

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> list[int]:
        # A variable may be called like an argument of render, which then takes it.
        text = self._need_template().render(messages, **{"tools": tools, **(kwargs or {})})
        return self._need_tokenizer().encode(text, add_special_tokens=False)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(
                f"{self.config.model}: there is no tokenizer.json, so text cannot be read or written; give token ids "
                f"instead (--prompt-token-ids)"
            )
        return self.tokenizer

    def _need_template(self) -> ChatTemplate:
        template = self._need_tokenizer().chat_template
        if template is None:
            raise UserError(
                f"{self.config.model}: there is no chat template (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json), so messages cannot be made a prompt; use generate instead"
            )
        return template

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_sampling_params()] * count
        if not isinstance(given, list | tuple) or not all(isinstance(one, SamplingParams) for one in given):
            raise UserError(f"sampling_params is {shown(given)}; SamplingParams, or a list of them, is expected")
        if len(given) != count:
            raise UserError(f"{len(given)} sampling_params for {count} prompts; give one for all, or one each")
        return given

    def _jobs(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[_Job]:
        if any(isinstance(p, str) for p in prompts) or any(p.stop for p in params):
            self._need_tokenizer()
        jobs: list[_Job] = []
        news: deque[_Job] = deque()
        try:
            for prompt, one in zip(prompts, params, strict=True):
                text = prompt if isinstance(prompt, str) else None
                ids = self._need_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
                jobs.append(_Job(text, self.tokenizer, news))
                for i in range(one.n):
                    # The prompt's own log-probabilities are the same for all n.
                    own = one if i == 0 else dataclasses.replace(one, prompt_logprobs=None)
                    choice = _Choice(jobs[-1], self.engine.add(ids, own, i), i)
                    jobs[-1].choices.append(choice)
                    self._choices[choice.request] = choice
        except UserError:
            self._close(jobs)
            raise
        return jobs

    def _run(self, jobs: Sequence[_Job]) -> Iterator[_Job]:
        """Step until every job is done; yields each whenever one of its sequences moved, and one before the first step.
        Closing it frees all."""
        left, news = len(jobs), jobs[0].news
        try:
            yield jobs[0]
            while left:
                while not news:
                    self._step()
                job = news.popleft()
                job.queued = False
                left -= job.finished
                yield job
        finally:
            self._close(jobs)

    def _step(self) -> None:
        """One step of the engine. It moves all sequences there are, those of other runs too."""
        for request in self.engine.step():
            choice = self._choices[request]
            choice.advance(self.engine)
            if not choice.job.queued:
                choice.job.queued = True
                choice.job.news.append(choice.job)
            if request.finished:
                del self._choices[request]

    def _close(self, jobs: Sequence[_Job]) -> None:
        """Free what unfinished sequences hold."""
        for job in jobs:
            for choice in job.choices:
                if self._choices.pop(choice.request, None) is not None:
                    self.engine.abort(choice.request)


class _Job:
    """A prompt and its n sequences. news: the jobs of one call that moved and were not looked at since (queued)."""

    def __init__(self, text: str | None, tokenizer: Tokenizer | None, news: deque[_Job]) -> None:
        self.text = text
        self.tokenizer = tokenizer
        self.news = news
        self.queued = False
        self.choices: list[_Choice] = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] = []

    @property
    def finished(self) -> bool:
        return all(choice.request.finished for choice in self.choices)

    def output(self) -> RequestOutput:
        first = self.choices[0].request
        for entry in (first.prompt_logprobs or ())[len(self.prompt_logprobs) :]:
            self.prompt_logprobs.append(None if entry is None else self.named(entry))
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.text,
            prompt_token_ids=list(first.prompt_token_ids),
            prompt_logprobs=None if first.prompt_logprobs is None else self.prompt_logprobs,
            outputs=[choice.output() for choice in self.choices],
            finished=self.finished,
        )

    def named(self, entry: Mapping[int, Logprob]) -> dict[int, Logprob]:
        """With the text of each token, where there is a tokenizer."""
        if self.tokenizer is None:
            return dict(entry)
        return {t: dataclasses.replace(lp, decoded_token=self.tokenizer.token_text(t)) for t, lp in entry.items()}


class _Choice:
    """One of the n outputs of a prompt: its request, its text and log-probabilities so far."""

    def __init__(self, job: _Job, request: Request, index: int) -> None:
        self.job = job
        self.request = request
        self.index = index
        self.stream = None if job.tokenizer is None else TextStream(job.tokenizer, request.params)
        self.logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []
        self.cumulative_logprob = 0.0

    def advance(self, engine: Engine) -> None:
        """Take the request's newest token into the text; a stop string ends the request."""
        request, stream = self.request, self.stream
        failed = request.finish_reason == "error"
        if self.logprobs is not None and not failed:
            newest = request.logprobs[-1]
            self.logprobs.append(self.job.named(newest))
            self.cumulative_logprob += newest[request.output_token_ids[-1]].logprob
        if stream is None:
            return
        # An end token is not text; with include_stop_str_in_output a stop token is.
        ended_by_token = request.finish_reason == "stop" and not request.params.include_stop_str_in_output
        if not failed and not ended_by_token:
            stream.add(request.output_token_ids[-1:])
            if stream.stopped is not None:
                request.stop(stream.stopped)
                engine.abort(request)
        if request.finished and stream.stopped is None:
            stream.finish()

    def output(self) -> CompletionOutput:
        r = self.request
        return CompletionOutput(
            index=self.index,
            text=self.stream.text if self.stream is not None else "",
            token_ids=list(r.output_token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            finish_reason=r.finish_reason,
            stop_reason=r.stop_reason,
            error=r.error,
        )


def _machine(device: str) -> hardware.Hardware:
    """The GPU that a setting means; the CPU where there is none: planning then refuses a setting that asks for one."""
    if device == "cpu" or not torch.cuda.is_available():
        return hardware.cpu()
    at, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if at >= count:
        raise UserError(f"device={device}: this machine has {count} usable GPU{'s' * (count > 1)}, counted from 0")
    found = torch.cuda.get_device_properties(at)
    return hardware.seen(found.name, 10 * found.major + found.minor, found.total_memory)


def _unpack(tensors: dict[str, Weight | torch.Tensor], aliases: Mapping[str, str]) -> None:
    """Weights to plain f32, one by one; tied ones stay one."""
    for name, w in tensors.items():
        if isinstance(w, Weight) and name not in aliases:
            tensors[name] = w.unpacked()
    tensors.update((name, tensors[target]) for name, target in aliases.items())


def _prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A single text or list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise UserError(f"a prompt is {type(prompts).__name__}; a text or a list of token ids is expected")
    many = list(prompts)
    if many and all(isinstance(p, int) for p in many):
        return [many]  # type: ignore[list-item]
    if not many:
        raise UserError("the prompt is empty; give at least one token")
    for p in many:
        if not isinstance(p, str | Sequence) or isinstance(p, bytes | bytearray):
            raise UserError(f"a prompt is {type(p).__name__}; a text or a list of token ids is expected")
    return many  # type: ignore[return-value]


def _end_tokens(generation_config: Mapping[str, Any], from_config: tuple[int, ...]) -> tuple[int, ...]:
    """generation_config.json lists all end tokens; config.json's serve where it names none."""
    given = facts.token_ids(generation_config.get("eos_token_id"), "generation_config.json: 'eos_token_id'")
    return given or from_config
