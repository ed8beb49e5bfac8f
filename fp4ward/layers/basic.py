"""Embedding, norms and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4ward.errors import UserError
from fp4ward.formats.weight import Weight
from fp4ward.kernels import norm, rope
from fp4ward.parallel.placement import LOCAL, OpTypes, Placement, R, Replicate, S


class Embedding:
    """Rows of a table [V, H] in any stored format, as `dtype`. Token ids are replicated, and so is the result.

    UserError for a table that is cut: the rows of other ranks' tokens would be missing.
    """

    types = LOCAL

    def __init__(self, table: Weight, placement: Placement, dtype: torch.dtype) -> None:
        if not isinstance(placement, Replicate):
            raise UserError("the embedding table must be whole on every rank")
        self.table = table
        self.dtype = dtype

    def __call__(self, ids_T: Tensor) -> Tensor:
        rows = Weight(self.table.format, {name: part[ids_T] for name, part in self.table.parts.items()})
        return rows.dense(torch.float64 if self.dtype == torch.float64 else torch.float32).to(self.dtype)


class Rows:
    """Some rows of x [T, H], by number."""

    types = OpTypes((R, R), R)

    def __call__(self, x_TH: Tensor, at_L: Tensor) -> Tensor:
        return x_TH[at_L]


class RMSNorm:
    """x / rms(x) * w over the last dimension, whole on every rank."""

    types = LOCAL

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self.weight = weight_D
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """The same over each head's dimensions [T, N, D]; heads may be sharded."""

    types = OpTypes((S(1),), S(1))


class GatedHeadNorm:
    """norm(x) * silu(gate) over each head's dimensions [T, N, D], the norm before the gate; heads may be sharded."""

    types = OpTypes((S(1), S(1)), S(1))

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self.weight = weight_D
        self.eps = eps

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        return norm.gated_rms_norm(x, gate, self.weight, self.eps)


class SplitHeads:
    """[T, N*D] -> [T, N, D]; heads may be sharded."""

    types = OpTypes((S(1),), S(1))

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def __call__(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)


class MergeHeads:
    """[T, N, D] -> [T, N*D]; heads may be sharded."""

    types = OpTypes((S(1),), S(1))

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Rope:
    """Rotates the first `rotary_dim` dimensions of each head [T, N, D] by its position [T]; heads may be sharded."""

    types = OpTypes((S(1), R), S(1))

    def __init__(self, rotary_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> None:
        self.freq = rope.frequencies(rotary_dim, theta, dtype, device)

    def __call__(self, x_TND: Tensor, positions_T: Tensor) -> Tensor:
        return rope.rotate(x_TND, positions_T, self.freq)
