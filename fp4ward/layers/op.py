"""What a layer calls for its weights' products: its reference, until the runner binds the kernels of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fp4ward.formats.weight import Weight

Kernel = Callable[..., Tensor]
ANY = 1 << 62  # more tokens than a step has


class Way(NamedTuple):
    """A kernel for up to so many tokens, and the weights in the layout that it wants. function: its name in its module,
    where that says what it takes beside them ("routed", "block": see layers.experts)."""

    most: int
    kernel: Kernel
    weights: tuple[Any, ...]
    function: str = ""


class Op:
    """Kernels by the number of tokens.

    weights: in the checkpoint's layout; () once no kernel reads them so. inside: other operations that a kernel may
    take in with this one, which then nobody calls.
    """

    def __init__(self, kernel: Kernel, *weights: Weight, inside: tuple[Op, ...] = ()) -> None:
        self.weights = weights
        self.inside = inside
        self.ways: tuple[Way, ...] = (Way(ANY, kernel, weights),)

    def at(self, tokens: int) -> Way:
        return next(way for way in self.ways if tokens <= way.most)

    def __call__(self, x_TH: Tensor, *rest: Tensor) -> Tensor:
        way = self.at(x_TH.shape[0])
        return way.kernel(x_TH, *way.weights, *rest)
