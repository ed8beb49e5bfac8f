"""Runs steps: model and state behind one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fp4ward.layers.step import KvCache, RecurrentState, Step
from fp4ward.runtime.batch import flatten
from fp4ward.runtime.scheduler import Work
from fp4ward.runtime.state import State


class Forward(Protocol):
    """What a models module's Model offers."""

    device: torch.device
    dtype: torch.dtype

    def forward(self, step: Step, state: Sequence[KvCache | RecurrentState]) -> Tensor: ...


class Runner:
    """Executes scheduled work on a model and its state."""

    def __init__(self, model: Forward, state: State) -> None:
        self.model = model
        self.state = state

    @torch.inference_mode()
    def run(self, work: Sequence[Work], all_logits: Sequence[bool]) -> Tensor:
        """Logits [L, V] in the model's type: rows in the order of `work`, as runtime.batch.flatten says which."""
        for w in work:
            if w.request.computed == 0 and w.request.slot is not None:
                self.state.clear_slot(w.request.slot)
        step = flatten(work, self.state.page_size, self.model.device, all_logits)
        return self.model.forward(step, self.state.layers)
