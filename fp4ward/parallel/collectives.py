"""Collectives over the tensor axis; the identity where there is one rank (group None). Which one a value needs follows
from its declared type (`replicated`), so no option can leave one out or add one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp4ward.parallel.placement import P, Type

Group = dist.ProcessGroup | None


def replicated(x: Tensor, kind: Type, group: Group) -> Tensor:
    """A value of the declared type, whole on every rank: a partial one is summed, one that is cut along its last
    dimension gathered, a replicated one stays."""
    if kind == P:
        return all_reduce(x, group)
    return all_gather(x, group) if kind.kind == "S" else x


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
