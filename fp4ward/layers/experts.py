"""The routed experts of a mixture-of-experts block, and such a block as one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4ward.formats.weight import Weight
from fp4ward.kernels import experts
from fp4ward.kernels.experts import Router
from fp4ward.layers.basic import RMSNorm
from fp4ward.layers.op import Op
from fp4ward.parallel.placement import Placement, experts_types


def router(top_k: int, count: int, held: tuple[int, int], device: torch.device) -> Router:
    """Of a rank that holds experts first .. last - 1 of `count`."""
    if held == (0, count):
        return Router(top_k)
    at = torch.arange(count, dtype=torch.int32, device=device)
    return Router(top_k, copies_EC=torch.where((at >= held[0]) & (at < held[1]), at - held[0], -1)[:, None])


class RoutedExperts:
    """x [T, H], router logits [T, E] -> [T, H]: a partial sum where experts or their widths are spread over ranks, each
    of which skips the experts of others."""

    def __init__(
        self, name: str, gate: Weight, up: Weight, down: Weight, placements: tuple[Placement, ...], router: Router,
        inside: tuple[Op, ...] = (),
    ) -> None:  # fmt: skip
        """placements: of gate, up and down. inside: the router's gate, the shared expert's, and its gate, up and down,
        as experts.block has them."""
        self.name = name
        self.types = experts_types(name, placements)
        self.router = router
        self.op = Op(experts.reference, gate, up, down, inside=inside)

    def __call__(self, x_TH: Tensor, logits_TE: Tensor) -> Tensor:
        way = self.op.at(len(x_TH))
        rest = (logits_TE, self.router) if way.function == "routed" else self.router(logits_TE)
        return way.kernel(x_TH, *way.weights, *rest)


class ExpertsBlock:
    """x [T, H] -> x + all of the block behind its norm, where the plan made these operations one; the model calls them
    one by one where `binds` says no. Whole on one rank."""

    def __init__(self, norm: RMSNorm, routed: RoutedExperts) -> None:
        self.norm = norm
        self.routed = routed

    def binds(self, tokens: int) -> bool:
        return self.routed.op.at(tokens).function == "block"

    def __call__(self, x_TH: Tensor) -> Tensor:
        way = self.routed.op.at(len(x_TH))
        return way.kernel(x_TH, *way.weights, self.norm.weight, self.norm.eps, self.routed.router)
