"""A linear layer on a weight in any stored format."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4ward.errors import UserError
from fp4ward.formats.weight import Weight
from fp4ward.kernels import linear
from fp4ward.layers.op import Op
from fp4ward.parallel.placement import Placement, linear_types

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Linear:
    """y = x W^T, x [T, K] -> [T, N]."""

    def __init__(self, name: str, weight: Weight, placement: Placement) -> None:
        self.name = name
        self.label = weight.format.label
        self.types = linear_types(placement)
        self.op = Op(linear.reference, weight)

    def __call__(self, x_TK: Tensor) -> Tensor:
        if x_TK.dtype not in HIGH_PRECISION:
            raise UserError(f"layer {self.name} ({self.label}) needs a high-precision input, not {x_TK.dtype}")
        return self.op(x_TK)
