"""Which sequences run in the next step, and how many tokens of each. Pure: no torch, the same on every rank.

Continuous batching: running sequences first (oldest first), then waiting ones in order of arrival while pages, slots
and the token budget last. A prompt longer than what is left of the budget is prefilled in chunks. When pages run out,
the youngest running sequence gives all of its own back and is computed anew later (preemption by recompute).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fp4ward.errors import UserError
from fp4ward.runtime.pool import Pool
from fp4ward.runtime.request import Request


@dataclass(frozen=True)
class Limits:
    """max_model_len: prompt and output of one sequence. page_size: tokens a page."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int


@dataclass(frozen=True)
class Work:
    """`count` tokens of `request`, from its first uncomputed one."""

    request: Request
    count: int


@dataclass
class Scheduler:
    """Owns the pages and slots of its requests. The pages hold at least one sequence of max_model_len tokens."""

    limits: Limits
    pages: Pool
    slots: Pool
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self._pages_for(self.limits.max_model_len) <= self.pages.size, "a sequence alone could not finish"

    def add(self, request: Request) -> None:
        """Queue a request. UserError when its prompt is empty or too long."""
        length, limit = len(request.prompt_token_ids), self.limits.max_model_len
        if length == 0:
            raise UserError("the prompt is empty; give at least one token")
        if length >= limit:
            raise UserError(
                f"the prompt has {length} tokens, which leaves no room for output in a context of {limit} tokens; "
                f"shorten it, or raise --max-model-len or --kv-cache-memory-bytes"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """The next step's work; empty when nothing waits or runs."""
        budget = self.limits.max_num_batched_tokens
        work: list[Work] = []
        i, running = 0, len(self.running)
        while i < len(self.running) and budget:
            request = self.running[i]
            count = min(request.num_tokens - request.computed, budget)
            if self._grow(request, request.computed + count):
                work.append(Work(request, count))
                budget -= count
                i += 1
            else:
                self.preempt(self.running[-1])  # the youngest; it may be `request` itself
        if len(self.running) < running:  # pages are short: what was just given back is not for newcomers
            return work
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            count = min(request.num_tokens, budget)
            if not self.admit(request, count):
                break
            work.append(Work(request, count))
            budget -= count
        return work

    def admit(self, request: Request, tokens: int) -> bool:
        """Move a waiting request among the running ones with a slot and pages for `tokens`; False if they lack."""
        slot = self.slots.take(1)
        if slot is None:
            return False
        if not self._grow(request, tokens):
            self.slots.give(slot)
            return False
        (request.slot,) = slot
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def finish(self, request: Request) -> None:
        """Take a request out wherever it is and give back what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size)

    def _grow(self, request: Request, tokens: int) -> bool:
        more = self._pages_for(tokens) - len(request.pages)
        if more > 0:
            new = self.pages.take(more)
            if new is None:
                return False
            request.pages += new
        return True

    def preempt(self, request: Request) -> None:
        """Take back all that a running request holds; it waits at the front and is computed anew."""
        self.running.remove(request)
        self._release(request)
        request.computed = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pages.give(request.pages)
        request.pages = []
        if request.slot is not None:
            self.slots.give([request.slot])
            request.slot = None
