"""Runs steps: model and state behind one call. The one place where a kernel's name becomes code."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fp4ward.kernels.specs import EXPERTS, REFERENCE, KernelSpec
from fp4ward.layers.op import ANY, Kernel, Op, Way
from fp4ward.layers.step import KvCache, RecurrentState, Step
from fp4ward.plan import Plan
from fp4ward.runtime.batch import flatten
from fp4ward.runtime.graphs import Graphs
from fp4ward.runtime.scheduler import Work
from fp4ward.runtime.state import State


class Forward(Protocol):
    """What a models module's Model offers. ops: by the plan's paths."""

    device: torch.device
    dtype: torch.dtype
    ops: Mapping[str, Op]

    def forward(self, step: Step, state: Sequence[KvCache | RecurrentState]) -> Tensor: ...


def code(spec: KernelSpec, name: str) -> Kernel:
    """The function `name` of the module that a row names, imported on first use."""
    found: Kernel = getattr(importlib.import_module(f"fp4ward.kernels.{spec.module}"), name)
    return found


def bind(ops: Mapping[str, Op], plan: Plan) -> None:
    """Give each op the kernels that the plan chose for its layer, one a regime of tokens, and the weights in the layout
    that each wants: one layer at a time, and what no kernel reads any more is let go.

    An operation inside another has no kernel of its own there: `inside` of that one's Op gives its weights to `block`.
    The references of attention and recurrences are what their layers do without a kernel.
    """
    for planned in sorted(plan.layers, key=lambda p: p.layer.op not in EXPERTS):  # what is inside has its weights yet
        if planned.layer.path not in ops:
            continue
        op = ops[planned.layer.path]
        made: dict[str, tuple[Any, ...]] = {}
        ways: list[Way] = []
        for regime, pick in zip(plan.regimes, planned.choice.picks, strict=True):
            spec, weights, function, prepare = pick.kernel, op.weights, pick.kernel.function, pick.kernel.prepare
            if pick.inside and planned.layer.op not in EXPERTS:
                continue
            if pick.inside:
                weights = (*weights, *(w for one in op.inside for w in one.weights))
                function, prepare = "block", "prepare_block"
            elif spec.routes:
                function = "routed"
            layout = prepare and spec.name
            if layout not in made:
                made[layout] = (code(spec, prepare)(*weights),) if prepare else weights
            bare = spec.status == REFERENCE and not planned.layer.formats
            kernel, function = (op.ways[-1].kernel, "") if bare else (code(spec, function), function)
            if ways and ways[-1].kernel is kernel:
                ways.pop()
            most = ANY if regime is plan.regimes[-1] else pick.rows
            ways.append(Way(most, kernel, made[layout], function))
        op.ways = tuple(ways)
        op.weights = made.get("", ())


class Runner:
    """Executes scheduled work on a model and its state. graphs: sequences up to which decoding is captured."""

    def __init__(self, model: Forward, state: State, graphs: int = 0) -> None:
        self.model = model
        self.state = state
        self.graphs = Graphs(model.forward, state, graphs, model.device) if graphs else None

    @torch.inference_mode()
    def run(self, work: Sequence[Work], all_logits: Sequence[bool]) -> Tensor:
        """Logits [L, V] in the model's type: rows in the order of `work`, as runtime.batch.flatten says which."""
        for w in work:
            if w.request.computed == 0 and w.request.slot is not None:
                self.state.clear_slot(w.request.slot)
        on_gpu = self.model.device.type == "cuda"
        if on_gpu:
            self.state.place(work)

        def plainly() -> Tensor:
            table = self.state.pages if on_gpu else None
            step = flatten(work, self.state.page_size, self.model.device, all_logits, table)
            return self.model.forward(step, self.state.layers)

        if self.graphs is not None and not any(all_logits) and self.graphs.takes(work):
            return self.graphs.run(work, plainly)
        return plainly()
