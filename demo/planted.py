"""What wrong engines computed, as changes of the weights: the last stage of training teaches the model to notice them.

Each fault maps named parameters to what a wrong engine would use, differentiably. The model learns to answer wrongly
under a fault (a hinge on each token's loss), while the usual loss keeps its answers right without one. It is a
detector: a small network forgives a doubled shared expert or interchanged gate and up projections otherwise
(docs/NUMERICS.md has accuracies before and after, and faults that this training never saw).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import model as demo
import torch
from torch import Tensor

Named = Mapping[str, Tensor]
Fault = Callable[[Named, random.Random], dict[str, Tensor]]


def shared_twice(named: Named, rng: random.Random) -> dict[str, Tensor]:
    """As when two ranks each add the whole shared expert."""
    return {n: 2 * p for n, p in named.items() if n.endswith("shared_expert.down_proj.weight")}


def block_scales_shifted(named: Named, rng: random.Random) -> dict[str, Tensor]:
    """Each block of 16 gets the scale of the one before it in its row."""
    out = {}
    for name, p in named.items():
        if demo.is_quantized(name):
            blocks = p.unflatten(-1, (-1, 16))
            top = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-6)
            out[name] = (blocks * (top.roll(1, -2) / top)).flatten(-2)
    return out


def gate_and_up_swapped(named: Named, rng: random.Random) -> dict[str, Tensor]:
    out = {n: torch.cat(p.chunk(2, 1)[::-1], 1) for n, p in named.items() if n.endswith("gate_up_proj")}
    for name in [n for n in named if n.endswith("shared_expert.gate_proj.weight")]:
        other = name.replace("gate_proj", "up_proj")
        out[name], out[other] = named[other], named[name]
    return out


def one_global_doubled(named: Named, rng: random.Random) -> dict[str, Tensor]:
    """Of one projection of an attention or DeltaNet layer."""
    name = rng.choice([n for n, p in named.items() if demo.is_quantized(n) and p.ndim == 2 and "mlp" not in n])
    return {name: 2 * named[name]}


FAULTS: tuple[Fault, ...] = (shared_twice, block_scales_shifted, gate_and_up_swapped, one_global_doubled)
