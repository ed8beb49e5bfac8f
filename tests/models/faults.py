"""Faults that an engine could have, planted into a loaded model: what the demo's accuracy must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fp4ward import LLM
from fp4ward.checkpoint import load as loading
from fp4ward.formats.weight import Weight
from fp4ward.layers.gated_delta import GatedDelta

Tensors = dict[str, Any]


def nvfp4(tensors: Tensors) -> Iterator[tuple[str, Weight]]:
    for name, w in tensors.items():
        if isinstance(w, Weight) and w.format.name == "nvfp4":
            yield name, w


def shift_block_scales(tensors: Tensors) -> None:
    for _, w in nvfp4(tensors):
        scale = w.parts["block_scale"].view(torch.uint8)
        scale.copy_(scale.roll(1, -1))


def swap_nibbles(tensors: Tensors) -> None:
    for _, w in nvfp4(tensors):
        packed = w.parts["packed"]
        packed.copy_((packed << 4) | (packed >> 4))


def swap_gate_and_up(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.endswith("gate_proj")]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def double_global(name: str) -> Callable[[Tensors], None]:
    """Of one projection out of 434."""

    def plant(tensors: Tensors) -> None:
        w = tensors[name]
        tensors[name] = dataclasses.replace(w, parts={**w.parts, "global_scale": 2 * w.parts["global_scale"]})

    return plant


def repeat_shared_expert(times: int) -> Callable[[LLM], None]:
    """As when a replicated shared expert is summed over `times` ranks."""

    def plant(llm: LLM) -> None:
        for layer in llm.engine.runner.model.layers:
            once = layer.mlp.shared_expert
            layer.mlp.shared_expert = lambda x, once=once: times * once(x)

    return plant


def tile_key_heads(llm: LLM) -> None:
    """Value head h reads key head h % Nk where h // (Nv / Nk) is right."""
    right = GatedDelta._heads

    def wrong(self: GatedDelta, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = right(self, u)
        order = torch.arange(self.value_heads) % self.key_heads * (self.value_heads // self.key_heads)
        return q[:, order], k[:, order], v

    for layer in llm.engine.runner.model.layers:
        delta = getattr(layer.mixer, "delta", None)
        if delta is not None:
            delta._heads = wrong.__get__(delta)


# name -> (change the tensors as they were loaded, change the built model, whether accuracy must be near chance)
FAULTS: dict[str, tuple[Callable[[Tensors], None] | None, Callable[[LLM], None] | None, bool]] = {
    "none": (None, None, False),
    "shared expert counted 2 times": (None, repeat_shared_expert(2), False),
    "shared expert counted 8 times": (None, repeat_shared_expert(8), True),
    "block scales shifted by one": (shift_block_scales, None, True),
    "nibbles swapped": (swap_nibbles, None, True),
    "gate and up swapped": (swap_gate_and_up, None, True),
    "key heads repeated the wrong way": (None, tile_key_heads, False),
    "one projection's global scale doubled": (double_global("layers.3.self_attn.o_proj"), None, False),
}


@contextmanager
def faulty(name: str, model: str | Path, **settings: Any) -> Iterator[LLM]:
    """An LLM with this fault in it: a name in FAULTS, or the name of a projection whose global scale is doubled."""
    tensors_fault, model_fault, _ = FAULTS[name] if name in FAULTS else (double_global(name), None, False)

    def load(*args: Any, **kw: Any) -> loading.Loaded:
        loaded = loading.load(*args, **kw)
        if tensors_fault is not None:
            tensors_fault(loaded.tensors)
        return loaded

    with mock.patch("fp4ward.llm.load", load):
        llm = LLM(str(model), device="cpu", show_progress=False, **settings)
    if model_fault is not None:
        model_fault(llm)
    yield llm
