"""Requests in, tokens out: one `step` at a time. The scheduler decides, the runner computes, the sampler chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fp4ward.config import EngineConfig
from fp4ward.errors import UserError
from fp4ward.facts import StateSpec
from fp4ward.kernels.linear import wide
from fp4ward.memory import page_bytes, pages
from fp4ward.plan import Plan
from fp4ward.runtime.pool import Pool
from fp4ward.runtime.request import Request, SamplingParams, generator
from fp4ward.runtime.runner import Forward, Runner, bind
from fp4ward.runtime.sampler import prompt_logprobs, sample
from fp4ward.runtime.scheduler import Limits, Scheduler, Work
from fp4ward.runtime.state import State


class Engine:
    """One model, its state and its requests, by a plan that can run."""

    def __init__(
        self,
        model: Forward,
        spec: Sequence[StateSpec],
        plan: Plan,
        *,
        vocab_size: int,
        kv_scales: Mapping[int, tuple[float, float]],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        config = plan.config
        assert config.max_model_len is not None
        bind(model.ops, plan)
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.seed = config.seed
        on_cpu = model.device.type == "cpu"
        kept = plan.memory.scratch + plan.memory.graphs
        count = plan.memory.pages if on_cpu else _pages(spec, config, model.device, kept)
        slots = config.max_num_seqs
        length = min(config.max_model_len, count * config.block_size)
        self.limits = Limits(slots, config.max_num_batched_tokens, length, config.block_size)
        state = State.allocate(
            spec,
            pages=count,
            page_size=config.block_size,
            slots=slots,
            dtype=model.dtype,
            kv_dtype=config.kv_cache_dtype,
            device=model.device,
            kv_scales=kv_scales,
            length=length,
        )
        self.runner = Runner(model, state, plan.graphs)
        self.scheduler = Scheduler(self.limits, Pool(count), Pool(slots))
        self._count = 0

    def add(self, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> Request:
        """Queue one sequence. UserError for an empty prompt, an unknown token id, or a prompt that cannot fit."""
        for i, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise UserError(
                    f"prompt token {i} is {token!r}; token ids of this model are whole numbers from 0 to "
                    f"{self.vocab_size - 1}"
                )
        request = Request(
            request_id=str(self._count),
            prompt_token_ids=list(prompt),
            params=params,
            eos_token_ids=self.eos_token_ids,
            generator=generator(params, self.seed, self._count, index),
        )
        self.scheduler.add(request)
        self._count += 1
        return request

    def abort(self, request: Request) -> None:
        """Forget a request, waiting or running; its pages and slot are free at once."""
        self.scheduler.finish(request)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Request]:
        """Run one step; the requests that took a token or failed in it, finished ones already out of the scheduler."""
        work = self.scheduler.schedule()
        if not work:
            return []
        try:
            return self._run(work)
        except BaseException:  # an interrupt, too: states are half written, and whoever goes on starts anew
            for request in [w.request for w in reversed(work) if not w.request.finished]:
                self.scheduler.preempt(request)
            raise

    def _run(self, work: Sequence[Work]) -> list[Request]:
        every = [_wants_prompt_logits(w.request) for w in work]
        logits = self.runner.run(work, every)
        ready, rows, row = [], [], 0
        for w, full in zip(work, every, strict=True):
            request, first = w.request, w.request.computed
            request.computed += w.count
            complete = request.computed == request.num_tokens
            if full:
                _score_prompt(request, first, logits[row : row + w.count])
                row += w.count
            elif complete:
                row += 1
            if complete:
                ready.append(request)
                rows.append(row - 1)
        if not ready:
            return []
        for request, sampled in zip(ready, sample(logits[rows].to(wide(logits.dtype)), ready), strict=True):
            if sampled.error is not None:
                request.fail(sampled.error)
            else:
                request.append(sampled.token_id, sampled.logprobs)
                request.finish_if_done(self.limits.max_model_len)
            if request.finished:
                self.scheduler.finish(request)
        return ready

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """[T, V] in the model's type: the logits after each token. chunks: how many tokens each step takes."""
        if self.busy:
            raise UserError("logits() needs an idle engine; let the running requests finish first")
        request = self.add(token_ids, SamplingParams(max_tokens=1))
        out: list[Tensor] = []
        try:
            self.scheduler.admit(request, len(token_ids))
            whole = self.limits.max_num_batched_tokens
            for count in chunks or [min(whole, len(token_ids) - a) for a in range(0, len(token_ids), whole)]:
                out.append(self.runner.run([Work(request, count)], [True]))
                request.computed += count
        finally:
            self.abort(request)
        return torch.cat(out)


def _wants_prompt_logits(request: Request) -> bool:
    """Whether prompt tokens still need a log-probability."""
    got = request.prompt_logprobs
    return got is not None and len(got) < len(request.prompt_token_ids)


def _score_prompt(request: Request, first: int, logits: Tensor) -> None:
    """Rows are the logits after tokens first, first + 1, ...: each scores the prompt token that follows it."""
    got, k = request.prompt_logprobs, request.params.prompt_logprobs
    assert got is not None and k is not None
    known = len(got) - 1 - first  # rows already scored, before a preemption
    targets = request.prompt_token_ids[first + 1 : first + 1 + len(logits)]
    if known < len(targets):
        got += prompt_logprobs(logits[known : len(targets)], targets[known:], k)


def _pages(spec: Sequence[StateSpec], config: EngineConfig, device: torch.device, scratch: int) -> int:
    """How many pages of K and V a GPU is to hold. UserError when not even one sequence of a page fits."""
    found, budget = pages(spec, config, torch.cuda.mem_get_info(device)[0], scratch)
    if found < 1:
        size = page_bytes(spec, config.block_size, config.kv_cache_dtype)
        raise UserError(
            f"the KV cache gets {max(budget, 0) / 2**20:.0f} MiB, but one page of {config.block_size} tokens takes "
            f"{size / 2**20:.2f} MiB; raise --kv-cache-memory-bytes or lower --max-num-seqs"
        )
    return found
