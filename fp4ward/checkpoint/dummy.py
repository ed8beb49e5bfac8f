"""Weights without a checkpoint: each slot drawn from a seed where it stays, in its own format, as if just initialised.

For measuring. Codes are any, scales those that a quantizer gives normal weights of deviation K^-1/2, so that values
stay near 1 from layer to layer; rows of the embedding are larger, so that tokens keep apart and a router spreads them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fp4ward.checkpoint.load import Loaded, Progress, make_room
from fp4ward.formats.formats import FP8_BLOCK, NVFP4_GROUP, Format
from fp4ward.formats.fp8 import E4M3_MAX, to_e4m3
from fp4ward.formats.nvfp4 import E2M1
from fp4ward.formats.weight import Weight
from fp4ward.parallel.placement import Slot

CHUNK = 1 << 24  # numbers drawn at once where they cannot be drawn in place
LARGEST = 5.5  # of very many normal numbers, in deviations: what the largest code of a tensor stands for
SPREAD = (0.8, 1.25)  # of scales: no two matrices share one


def load(
    slots: Sequence[Slot],
    formats: Mapping[str, Format],
    aliases: Mapping[str, str],
    *,
    neutral: Callable[[str], float],
    seed: int,
    device: torch.device,
    progress: Progress | None = None,
) -> Loaded:
    """What checkpoint.load.load gives, drawn. aliases: slots that share another's weight. neutral: of facts, the weight
    with which a norm changes nothing. The same on every run with one seed on one kind of device; a slot's numbers do
    not depend on the others. Takes no more memory than the weights and a few chunks. UserError for a full device."""
    own = [slot for slot in slots if slot.name not in aliases]
    total = sum(int(math.prod(s.shape) * formats[s.name].bits) // 8 for s in own if s.kind != "tensor")
    tensors: dict[str, Weight | Tensor] = {}
    done = 0
    for slot in own:
        random = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {slot.name}".encode()))
        if slot.kind == "tensor":
            tensors[slot.name] = _plain(slot.name, torch.empty(slot.shape, device=device), random, neutral)
            continue
        weight = make_room(slot.name, formats[slot.name], slot.shape, device, done, total)
        table = slot.name.startswith("embed") and slot.name not in aliases.values()
        _draw(weight, 1.0 if table else slot.shape[-1] ** -0.5, random)
        tensors[slot.name], done = weight, done + weight.nbytes
        if progress is not None:
            progress(done, max(done, total), slot.name)
    tensors |= {name: tensors[target] for name, target in aliases.items()}
    return Loaded(tensors, {}, dict(formats), [], {})


def _plain(name: str, out: Tensor, random: torch.Generator, neutral: Callable[[str], float]) -> Tensor:
    """As transformers initialises them: decay A from 0.01 to 16, so that every state forgets; norms nearly neutral."""
    leaf = name.rpartition(".")[2]
    if leaf == "A_log":
        return out.uniform_(0.01, 16, generator=random).log_()
    if leaf in ("dt_bias", "D"):
        return out.fill_(1)
    if out.dim() > 1:  # a convolution over time
        bound = out.shape[-1] ** -0.5
        return out.uniform_(-bound, bound, generator=random)
    if leaf.endswith("bias"):
        return out.zero_()
    return out.normal_(neutral(name), 0.02, generator=random)


def _draw(w: Weight, std: float, random: torch.Generator) -> None:
    parts, n = w.parts, w.shape[-2]
    if not w.format.quantized:
        parts["data"].normal_(0, std, generator=random)
    elif w.format.name == "nvfp4":
        table = _block_scales()
        unit = math.sqrt(sum(x * x for x in E2M1) / len(E2M1)) * float(table.float().square().mean().sqrt())
        codes = table.view(torch.uint8).to(w.device)
        parts["packed"].random_(0, 256, generator=random)
        for chunk in parts["block_scale"].view(torch.uint8).view(-1).split(CHUNK):
            chunk.copy_(codes[chunk.random_(0, 256, generator=random).int()])
        _scales(parts["global_scale"].unsqueeze(-1), n, std / unit, random)
    else:
        unit = E4M3_MAX / LARGEST
        for chunk in parts["data"].view(-1).split(CHUNK):
            chunk.copy_(to_e4m3(torch.empty(chunk.shape, device=w.device).normal_(0, unit, generator=random)))
        shared = {"fp8_tensor": n, "fp8_channel": 1}.get(w.format.name, FP8_BLOCK)
        _scales(parts["scale"], shared, std / unit, random)


def _block_scales() -> Tensor:
    """256 of them, all equally likely: quantiles of the largest of 16 normal numbers."""
    share = ((torch.arange(256, dtype=torch.float64) + 0.5) / 256) ** (1 / NVFP4_GROUP)
    return (torch.special.ndtri((1 + share) / 2) * (E4M3_MAX / LARGEST)).float().to(torch.float8_e4m3fn)


def _scales(out: Tensor, shared: int, mean: float, random: torch.Generator) -> None:
    """Into out [..., N, C]: one for `shared` rows."""
    *lead, n, columns = out.shape
    drawn = torch.empty(*lead, -(-n // shared), columns, device=out.device).uniform_(*SPREAD, generator=random)
    out.copy_(drawn.mul_(mean).repeat_interleave(shared, -2).narrow(-2, 0, n))
