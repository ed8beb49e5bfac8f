"""Attention over the paged cache: stores the step's K and V, then attends, sequence by sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4ward.kernels import attention
from fp4ward.kernels.linear import wide
from fp4ward.layers.basic import HeadNorm, Rope
from fp4ward.layers.op import Op
from fp4ward.layers.step import KvCache, Step
from fp4ward.parallel.placement import OpTypes, S


class PagedAttention:
    """q [T, Nq, D], k, v [T, Nk, D] -> [T, Nq, D]; heads are sharded."""

    types = OpTypes((S(1), S(1), S(1)), S(1))

    def __init__(self, head_dim: int) -> None:
        self.scale = head_dim**-0.5

    def __call__(self, q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, step: Step, cache: KvCache) -> Tensor:
        attention.store(cache.k, step.cache_at, k_TND, cache.k_scale)
        attention.store(cache.v, step.cache_at, v_TND, cache.v_scale)
        out = torch.zeros_like(q_TND)  # so is what no sequence has, padding
        dtype = wide(q_TND.dtype)
        for seq in step.sequences:
            at = seq.cache_rows
            k = attention.fetch(cache.k, at, cache.k_scale, dtype)
            v = attention.fetch(cache.v, at, cache.v_scale, dtype)
            out[seq.start : seq.stop] = attention.attend(
                q_TND[seq.start : seq.stop], k, v, seq.first_position, self.scale
            )
        return out


class FusedAttention:
    """q with its gate [T, Nq*2*D], k, v [T, Nk*D] as projected -> what o_proj takes [T, Nq*D]: head norms, rotary
    positions, cache, attention and gate in one operation where the plan has that; the model calls them one by one where
    `binds` says no."""

    def __init__(self, q_norm: HeadNorm, k_norm: HeadNorm, rope: Rope) -> None:
        self.constants = (q_norm.weight.float(), k_norm.weight.float(), q_norm.eps, rope.freq.float())
        self.op = Op(attention.attend)

    def binds(self, tokens: int) -> bool:
        return self.op.at(tokens).function == "attend"

    def __call__(self, q_TQ: Tensor, k_TK: Tensor, v_TK: Tensor, step: Step, cache: KvCache) -> Tensor:
        t, where = step.tables, (step.positions, step.cache_at)
        assert t is not None
        tables = (t.owner, t.pages, t.page_size, cache.k, cache.v, cache.k_scale, cache.v_scale)
        return self.op.at(len(q_TQ)).kernel(q_TQ, k_TK, v_TK, *self.constants, *where, *tables)
