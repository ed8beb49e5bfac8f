"""The routed experts of a mixture-of-experts block."""

from __future__ import annotations

from torch import Tensor

from fp4ward.formats.weight import Weight
from fp4ward.kernels import experts
from fp4ward.layers.op import Op
from fp4ward.parallel.placement import Placement, experts_types


class RoutedExperts:
    """x [T, H], router logits [T, E] -> [T, H]: a partial sum where experts or their widths are spread over ranks, each
    of which skips the experts of others."""

    def __init__(
        self, name: str, gate: Weight, up: Weight, down: Weight, placements: tuple[Placement, ...], top_k: int,
        first: int = 0,
    ) -> None:  # fmt: skip
        """placements: of gate, up and down. first: the model's number of this rank's expert 0."""
        self.name = name
        self.types = experts_types(name, placements)
        self.top_k = top_k
        self.first = first
        self.op = Op(experts.reference, gate, up, down)

    def __call__(self, x_TH: Tensor, logits_TE: Tensor) -> Tensor:
        weights_Tk, ids_Tk = experts.route_softmax(logits_TE, self.top_k)
        return self.op(x_TH, weights_Tk, ids_Tk - self.first if self.first else ids_Tk)
