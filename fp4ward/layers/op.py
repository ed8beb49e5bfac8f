"""What a layer calls for its weights' products: its reference, until the runner binds the kernels of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fp4ward.formats.weight import Weight

Kernel = Callable[..., Tensor]
ANY = 1 << 62  # more tokens than a step has


class Op:
    """Kernels by the number of tokens, each on the weights in the layout that it wants.

    weights: in the checkpoint's layout; () once no kernel reads them so. ways: (most tokens, kernel, its weights).
    """

    def __init__(self, kernel: Kernel, *weights: Weight) -> None:
        self.weights = weights
        self.ways: tuple[tuple[int, Kernel, tuple[Any, ...]], ...] = ((ANY, kernel, weights),)

    def __call__(self, x_TH: Tensor, *rest: Tensor) -> Tensor:
        kernel, weights = next((kernel, weights) for most, kernel, weights in self.ways if x_TH.shape[0] <= most)
        return kernel(x_TH, *weights, *rest)
