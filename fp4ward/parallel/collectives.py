"""Collectives; the identity where there is one rank (group None). Which one a value needs follows from its declared
type, so no option can leave one out or add one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fp4ward.parallel.placement import ONE_RANK, Layout, P, Type

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """This rank's place: the ranks that it shares every request with (tensor axis), and those with its part of the
    other groups' (axis of groups), by their groups' order; None for itself alone."""

    layout: Layout = ONE_RANK
    rank: int = 0
    tensor: Group = None
    groups: Group = None


ALONE = Mesh()


def replicated(x: Tensor, kind: Type, tensor: Group) -> Tensor:
    """A value of the declared type, whole on every rank: a partial one is summed, one that is cut along its last
    dimension gathered, a replicated one stays."""
    if kind == P:
        return all_reduce(x, tensor)
    return all_gather(x, tensor, -1) if kind.kind == "S" else x


def all_tokens(x: Tensor, groups: Group) -> Tensor:
    """Own tokens -> those of all groups, S(0) -> R. Each group has equally many, padding included."""
    return all_gather(x, groups, 0)


def own_tokens(x: Tensor, groups: Group) -> Tensor:
    """A part of the sum for every group's tokens -> the sum for the own, P -> S(0)."""
    return reduce_scatter(x, groups)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Partial -> replicated: the sum over ranks, in place."""
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sharded along a dimension, equally wide on every rank -> replicated."""
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Partial -> this rank's share of the rows of the sum."""
    if group is None:
        return x
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out
