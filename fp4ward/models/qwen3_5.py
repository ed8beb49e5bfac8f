"""Qwen3.5 and 3.6, MoE and dense, text part.

Shapes: T tokens of the step, H hidden, N heads, D head dimension, V vocabulary, L rows to score.

    x <- x + mixer(norm(x));  x <- x + mlp(norm(x));  logits = lm_head(norm(x))

Three of four layers mix by a gated delta net (a recurrent state), the fourth by softmax attention (a paged cache).
What differs from its siblings: norms multiply by 1 + w (except the gated norm of the delta net); query projections
carry a gate, interleaved head by head; only a quarter of each head rotates; routing weights are renormalised; the
shared expert has a sigmoid gate of its own. Source: transformers' models.qwen3_5 and qwen3_5_moe.

Each weight's local shape decides the local number of heads: the same forward runs on one rank and on several. A block's
`output` is its type on the ranks, which its weights' placement decides; `replicated` is all the communication there is:
two all-reduces a layer, of partial sums. Where groups of ranks have tokens of their own, experts see those of all
groups: `all_tokens` gathers them and `own_tokens` sums and scatters what the experts give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fp4ward.facts.qwen3_5 import MOE_BLOCK, RECURRENT, Config, weights
from fp4ward.formats.weight import Weight
from fp4ward.layers.attention import FusedAttention, PagedAttention
from fp4ward.layers.basic import Embedding, GatedHeadNorm, HeadNorm, MergeHeads, RMSNorm, Rope, Rows, SplitHeads
from fp4ward.layers.experts import ExpertsBlock, RoutedExperts, router
from fp4ward.layers.gated_delta import FusedDelta, GatedDelta
from fp4ward.layers.linear import Linear
from fp4ward.layers.op import Op
from fp4ward.layers.step import KvCache, RecurrentState, Step
from fp4ward.parallel.collectives import ALONE, Mesh, all_tokens, own_tokens, replicated
from fp4ward.parallel.placement import Experts, R, Type


class Parts:
    """The loaded tensors by canonical name, made into layers. ops: what the runner binds kernels to, by layer."""

    def __init__(self, cfg: Config, tensors: Mapping[str, Weight | Tensor], dtype: torch.dtype) -> None:
        self.cfg = cfg
        self.dtype = dtype
        self.tensors = tensors
        self.placement = {slot.name: slot.placement for slot in weights(cfg)}
        self.ops: dict[str, Op] = {}

    def weight(self, name: str) -> Weight:
        found = self.tensors[name]
        assert isinstance(found, Weight), name
        return found

    def tensor(self, name: str) -> Tensor:
        found = self.tensors[name]
        assert isinstance(found, Tensor), name
        return found

    def linear(self, name: str) -> Linear:
        made = Linear(name, self.weight(name), self.placement[name])
        self.ops[name] = made.op
        return made

    def one_plus(self, name: str) -> Tensor:
        """Norm weights are stored zero-centred: the factor is 1 + w."""
        w = self.tensor(f"{name}.weight")
        return 1 + (w.double() if self.dtype == torch.float64 else w)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.one_plus(name), self.cfg.rms_norm_eps)

    def head_norm(self, name: str) -> HeadNorm:
        return HeadNorm(self.one_plus(name), self.cfg.rms_norm_eps)


class GatedAttention:
    """o_proj(attention(rope(norm(q)), rope(norm(k)), v) * sigmoid(gate))."""

    def __init__(self, parts: Parts, prefix: str, device: torch.device) -> None:
        cfg = parts.cfg
        self.head_dim = cfg.head_dim
        self.q_proj, self.k_proj = parts.linear(f"{prefix}q_proj"), parts.linear(f"{prefix}k_proj")
        self.v_proj, self.o_proj = parts.linear(f"{prefix}v_proj"), parts.linear(f"{prefix}o_proj")
        self.output = self.o_proj.types.output
        self.q_norm, self.k_norm = parts.head_norm(f"{prefix}q_norm"), parts.head_norm(f"{prefix}k_norm")
        self.rope = Rope(cfg.rotary_dim, cfg.rope_theta, parts.dtype, device)
        self.attention = PagedAttention(cfg.head_dim)
        self.pairs, self.heads, self.merge = SplitHeads(2 * cfg.head_dim), SplitHeads(cfg.head_dim), MergeHeads()
        self.fused = FusedAttention(self.q_norm, self.k_norm, self.rope)

    def __call__(self, x_TH: Tensor, step: Step, cache: KvCache) -> Tensor:
        pairs, k, v = self.q_proj(x_TH), self.k_proj(x_TH), self.v_proj(x_TH)
        if self.fused.binds(len(x_TH)):
            return self.o_proj(self.fused(pairs, k, v, step, cache))
        q, gate = self.pairs(pairs).split(self.head_dim, dim=-1)
        k, v = self.k_norm(self.heads(k)), self.heads(v)
        q = self.rope(self.q_norm(q), step.positions)
        k = self.rope(k, step.positions)
        out = self.attention(q, k, v, step, cache)
        return self.o_proj(self.merge(out * gate.sigmoid()))


class GatedDeltaNet:
    """out_proj(norm(delta(conv(qkv), a, b)) * silu(z)); the norm runs over each head."""

    def __init__(self, parts: Parts, prefix: str) -> None:
        cfg = parts.cfg
        self.in_proj_qkv, self.in_proj_z = parts.linear(f"{prefix}in_proj_qkv"), parts.linear(f"{prefix}in_proj_z")
        self.in_proj_a, self.in_proj_b = parts.linear(f"{prefix}in_proj_a"), parts.linear(f"{prefix}in_proj_b")
        self.out_proj = parts.linear(f"{prefix}out_proj")
        self.output = self.out_proj.types.output
        self.norm = GatedHeadNorm(parts.tensor(f"{prefix}norm.weight"), cfg.rms_norm_eps)
        self.heads, self.merge = SplitHeads(cfg.linear_value_head_dim), MergeHeads()
        self.delta = GatedDelta(
            parts.tensor(f"{prefix}conv1d.weight")[:, 0],
            parts.tensor(f"{prefix}A_log"),
            parts.tensor(f"{prefix}dt_bias"),
            cfg.linear_key_head_dim,
            cfg.linear_value_head_dim,
            parts.dtype,
        )
        self.fused = FusedDelta(self.delta, self.norm)

    def __call__(self, x_TH: Tensor, step: Step, state: RecurrentState) -> Tensor:
        qkv, z, a, b = self.in_proj_qkv(x_TH), self.in_proj_z(x_TH), self.in_proj_a(x_TH), self.in_proj_b(x_TH)
        if self.fused.binds(len(x_TH)):
            return self.out_proj(self.fused(qkv, z, a, b, step, state))
        o = self.delta(qkv, a, b, step, state)
        return self.out_proj(self.merge(self.norm(o, self.heads(z))))


class Mlp:
    """down(silu(gate x) * up x)."""

    def __init__(self, parts: Parts, prefix: str) -> None:
        self.gate_proj, self.up_proj = parts.linear(f"{prefix}gate_proj"), parts.linear(f"{prefix}up_proj")
        self.down_proj = parts.linear(f"{prefix}down_proj")
        self.output = self.down_proj.types.output

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x_TH)) * self.up_proj(x_TH))


class MoE:
    """Routed experts plus the shared expert under its own sigmoid gate. Both are partial sums: one all-reduce after. Of
    two that differ, because one is whole on every rank, the partial one is summed before. Experts that are spread over
    all ranks serve the tokens of all groups."""

    def __init__(self, parts: Parts, prefix: str, mesh: Mesh) -> None:
        self.gate = parts.linear(f"{prefix}gate")
        self.shared_expert_gate = parts.linear(f"{prefix}shared_expert_gate")
        self.shared_expert = Mlp(parts, f"{prefix}shared_expert.")
        names = [f"{prefix}experts.{p}_proj" for p in ("gate", "up", "down")]
        gate, up, down = (parts.weight(name) for name in names)
        placements = tuple(parts.placement[name] for name in names)
        cfg, spread = parts.cfg, isinstance(placements[0], Experts)
        held = mesh.layout.experts(cfg.num_experts, mesh.rank) if spread else (0, cfg.num_experts)
        inside = tuple(parts.ops[prefix + name] for name in MOE_BLOCK)
        choose = router(cfg.num_experts_per_tok, cfg.num_experts, held, gate.device)
        self.experts = RoutedExperts(f"{prefix}experts", gate, up, down, placements, choose, inside)
        parts.ops[self.experts.name] = self.experts.op
        self.tensor, self.groups = mesh.tensor, mesh.groups if spread else None
        self.kinds = self.experts.types.output, self.shared_expert.output
        self.output = self.kinds[0] if self.kinds[0] == self.kinds[1] else R

    def __call__(self, x_TH: Tensor) -> Tensor:
        all_TH = all_tokens(x_TH, self.groups)
        routed = own_tokens(self.experts(all_TH, self.gate(all_TH)), self.groups)
        shared = self.shared_expert_gate(x_TH).sigmoid() * self.shared_expert(x_TH)
        if self.kinds[0] != self.kinds[1]:
            routed = replicated(routed, self.kinds[0], self.tensor)
            shared = replicated(shared, self.kinds[1], self.tensor)
        return routed + shared


class Block(Protocol):
    """output: type of what it returns."""

    output: Type

    def __call__(self, *args: Any, **more: Any) -> Tensor: ...


@dataclass
class Layer:
    """A mixer and an MLP, each behind a norm and beside a residual. block: post_norm, MLP and residual as one operation
    where the plan makes them one."""

    norm: RMSNorm
    mixer: Block
    post_norm: RMSNorm
    mlp: Block
    block: ExpertsBlock | None


class Model:
    """forward(step, state) -> logits [L, V], of this group's step. state: one KvCache or RecurrentState a layer."""

    def __init__(self, cfg: Config, tensors: Mapping[str, Weight | Tensor], dtype: torch.dtype, mesh: Mesh = ALONE):
        parts = Parts(cfg, tensors, dtype)
        table = parts.weight("embed_tokens")
        self.cfg = cfg
        self.dtype = dtype
        self.device = table.device
        self.mesh = mesh
        self.embed_tokens = Embedding(table, parts.placement["embed_tokens"], dtype)
        self.layers = [self._layer(parts, i, kind) for i, kind in enumerate(cfg.layer_types)]
        self.rows, self.norm = Rows(), parts.norm("norm")
        self.lm_head = parts.linear("lm_head")  # the embedding's memory where they are tied
        self.output = self.lm_head.types.output
        self.ops = parts.ops

    def _layer(self, parts: Parts, i: int, kind: str) -> Layer:
        p = f"layers.{i}."
        mixer: GatedAttention | GatedDeltaNet
        if kind == "full_attention":
            mixer = GatedAttention(parts, f"{p}self_attn.", self.device)
            parts.ops[f"{p}attention"] = mixer.fused.op
        else:
            mixer = GatedDeltaNet(parts, f"{p}linear_attn.")
            parts.ops[f"{p}{RECURRENT}"] = mixer.fused.op
        norm, post_norm = parts.norm(f"{p}input_layernorm"), parts.norm(f"{p}post_attention_layernorm")
        if not parts.cfg.num_experts:
            return Layer(norm, mixer, post_norm, Mlp(parts, f"{p}mlp."), None)
        moe = MoE(parts, f"{p}mlp.", self.mesh)
        return Layer(norm, mixer, post_norm, moe, ExpertsBlock(post_norm, moe.experts))

    def forward(self, step: Step, state: Sequence[KvCache | RecurrentState]) -> Tensor:
        x = self.embed_tokens(step.token_ids)
        for layer, own in zip(self.layers, state, strict=True):
            x = x + replicated(layer.mixer(layer.norm(x), step, own), layer.mixer.output, self.mesh.tensor)
            if layer.block and layer.block.binds(len(x)):
                x = layer.block(x)
            else:
                x = x + replicated(layer.mlp(layer.post_norm(x)), layer.mlp.output, self.mesh.tensor)
        x = self.norm(self.rows(x, step.logits_at))
        return replicated(self.lm_head(x), self.output, self.mesh.tensor)
