"""Collectives over the tensor axis; the identity where there is one rank (group None)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Partial -> replicated: the sum over ranks, in place."""
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Sharded along the last dimension, equally wide on every rank -> replicated."""
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
