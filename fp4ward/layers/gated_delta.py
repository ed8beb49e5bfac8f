"""The recurrent core of Qwen3.5's linear attention: convolution and gated delta rule on a sequence's state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fp4ward.kernels import gated_delta
from fp4ward.kernels.linear import wide
from fp4ward.layers.basic import GatedHeadNorm
from fp4ward.layers.op import Op
from fp4ward.layers.step import RecurrentState, Step
from fp4ward.parallel.placement import OpTypes, S


class GatedDelta:
    """qkv [T, 2*Nk*Dk + Nv*Dv] before the convolution, a, b [T, Nv] -> o [T, Nv, Dv] in f32; heads are sharded.

    Single tokens run as one batched step, longer runs in chunks; both move the same state.
    """

    types = OpTypes((S(1), S(1), S(1)), S(1))

    def __init__(
        self, conv: Tensor, a_log: Tensor, dt_bias: Tensor, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        """conv [C, W], a_log, dt_bias [Nv]; key_dim Dk, value_dim Dv. This rank's channels and heads."""
        acc = wide(dtype)
        self.conv = conv.to(acc)
        self.minus_a = -a_log.to(acc).exp()
        self.dt_bias = dt_bias.to(acc)
        self.dk = key_dim
        self.dv = value_dim
        self.value_heads = a_log.shape[0]
        self.key_heads = (conv.shape[0] - self.value_heads * value_dim) // (2 * key_dim)

    def __call__(self, qkv_TC: Tensor, a_TN: Tensor, b_TN: Tensor, step: Step, state: RecurrentState) -> Tensor:
        acc = wide(qkv_TC.dtype)
        beta = b_TN.to(acc).sigmoid()
        g = self.minus_a * functional.softplus(a_TN.to(acc) + self.dt_bias)
        out = torch.zeros(qkv_TC.shape[0], self.value_heads, self.dv, dtype=acc, device=qkv_TC.device)
        at, slot = step.single_at, step.single_slots
        if at.numel():
            u, state.conv[slot] = gated_delta.causal_conv_step(qkv_TC[at], self.conv, state.conv[slot])
            q, k, v = self._heads(u.to(acc))
            out[at], state.ssm[slot] = gated_delta.step(q, k, v, g[at], beta[at], state.ssm[slot])
        for s in step.sequences:
            if s.stop - s.start > 1:
                rows = slice(s.start, s.stop)
                u, state.conv[s.slot] = gated_delta.causal_conv(qkv_TC[rows], self.conv, state.conv[s.slot])
                q, k, v = self._heads(u.to(acc))
                out[rows], state.ssm[s.slot] = gated_delta.chunked(q, k, v, g[rows], beta[rows], state.ssm[s.slot])
        return out

    def _heads(self, u_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit queries (scaled) and keys, one per value head (head h uses key head h // (Nv/Nk)), and values."""
        t, key = u_TC.shape[0], self.key_heads * self.dk
        q, k, v = u_TC.split([key, key, self.value_heads * self.dv], dim=-1)
        repeat = self.value_heads // self.key_heads
        q = gated_delta.unit(q.reshape(t, self.key_heads, self.dk)) * self.dk**-0.5
        k = gated_delta.unit(k.reshape(t, self.key_heads, self.dk))
        return (
            q.repeat_interleave(repeat, 1),
            k.repeat_interleave(repeat, 1),
            v.reshape(t, self.value_heads, self.dv),
        )


class FusedDelta:
    """qkv [T, C], z [T, Nv*Dv], a, b [T, Nv] as projected -> what out_proj takes [T, Nv*Dv]: the core, the norm of each
    head and silu(z) in one operation where the plan has that; the model calls them one by one where `binds` says no."""

    def __init__(self, delta: GatedDelta, norm: GatedHeadNorm) -> None:
        numbers = (x.float() for x in (delta.conv, delta.minus_a, delta.dt_bias, norm.weight))
        self.constants = (*numbers, norm.eps, delta.dk)
        self.op = Op(delta)

    def binds(self, tokens: int) -> bool:
        return self.op.at(tokens).function == "mix"

    def __call__(
        self, qkv_TC: Tensor, z_TV: Tensor, a_TN: Tensor, b_TN: Tensor, step: Step, state: RecurrentState
    ) -> Tensor:
        t = step.tables
        assert t is not None
        moved = (t.starts, t.slots, state.conv, state.ssm)
        return self.op.at(len(qkv_TC)).kernel(qkv_TC, z_TV, a_TN, b_TN, *self.constants, *moved)
