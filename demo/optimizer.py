"""AdamW for everything, or Muon for the matrices inside the layers and AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalized(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix; update [..., rows, columns]."""
    x = update.bfloat16() if update.is_cuda else update.float()
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if flip else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized per matrix (stacked experts are matrices), scaled to AdamW's usual step size."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                shapes[tuple(p.shape)].append((p, p.grad.lerp(state["momentum"], group["momentum"])))
            for shape, members in shapes.items():
                moved = orthogonalized(torch.stack([u for _, u in members])) * (0.2 * max(shape[-2:]) ** 0.5)
                parameters = [p for p, _ in members]
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(moved.unbind(0)), alpha=-group["lr"])


def make_optimizers(kind: str, modules: list[nn.Module], lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Optimizers over all parameters of `modules`; only matrices decay."""
    matrices, tables, rest = [], [], []
    for module in modules:
        for name, p in module.named_parameters():
            if p.ndim < 2 or "conv1d" in name:
                rest.append(p)
            elif ("layers." in name and min(p.shape[-2:]) > 16) or name == "fc.weight":
                matrices.append(p)
            else:
                tables.append(p)
    fused = matrices[0].is_cuda
    groups = [{"params": tables, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    if kind == "muon":
        return [Muon(matrices, lr, weight_decay), torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)]
    groups[0]["params"] = [*matrices, *tables]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)]
