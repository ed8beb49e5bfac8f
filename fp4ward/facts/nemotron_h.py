"""Nemotron-H (Nemotron-3 Nano and Super, 3.5 Lightning): config, names, weights, placement, state. Pure.

Each layer is one mixer: Mamba-2, attention without positions, a mixture of experts, or an MLP, all behind one norm.
Experts and MLPs are down(relu(up x)^2), without a gate; a latent size puts the routed experts between two projections.
Source: config.json of the published checkpoints, tensors as ModelOpt exports them; transformers' models.nemotron_h.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp4ward.errors import UserError, shown
from fp4ward.facts import STATELESS, PagedKv, Recurrent, StateSpec, kv_heads, token_ids
from fp4ward.facts.read import dtype, multiples, only, positive, switch, whole
from fp4ward.parallel.placement import Experts, Replicate, Shard, Slot, cut

PREFIXES = re.compile(r"(?:language_model\.|backbone\.|model\.)+(?=.)")
LEFT_OUT = {"mtp": "multi-token prediction head: not used yet"}
RECURRENT = "mamba2"  # the operation on a recurrent layer's state
# What multi-token prediction has beside layers like those of the model.
DRAFT = tuple(f"mtp.layers.0.{name}" for name in ("eh_proj", "enorm.weight", "hnorm.weight"))
DRAFT += ("mtp.layers.1.final_layernorm.weight",)
KINDS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}  # characters of hybrid_override_pattern
NAMES = {"linear_attention": "mamba", "full_attention": "attention"}  # newer names in layers_block_type
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "use_conv_bias": (True,),
    "use_bias": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "mamba_proj_bias": (False,),
    "n_shared_experts": (1,),
    "residual_in_fp32": (False,),
    "sliding_window": (None,),
    "mamba_ssm_cache_dtype": ("float32", None),
    "time_step_limit": ([0.0, math.inf], None),
}
SIZES = "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim mamba_num_heads mamba_head_dim"
SIZES += " n_groups ssm_state_size"
MOE_SIZES = "n_routed_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size"


@dataclass(frozen=True)
class Config:
    """Names as in config.json. layer_types: of "mamba", "attention", "moe", "mlp". Sizes of absent kinds are 0, and so
    is moe_latent_size where experts map the full width."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int
    intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    moe_latent_size: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]


def parse(config: Mapping[str, Any]) -> Config:
    """Config from config.json. UserError naming the key that is not understood."""
    only(config, REQUIRED_VALUES)
    kinds = _layer_types(config)

    def sizes(names: str, used: bool = True) -> dict[str, Any]:
        return {key: whole(config, key) if used else 0 for key in names.split()}

    cfg = Config(
        **sizes(SIZES),
        **sizes(MOE_SIZES, "moe" in kinds),
        **sizes("intermediate_size", "mlp" in kinds),
        layer_types=kinds,
        conv_kernel=whole(config, "conv_kernel", 4),
        moe_latent_size=whole(config, "moe_latent_size") if config.get("moe_latent_size") is not None else 0,
        n_group=whole(config, "n_group", 1),
        topk_group=whole(config, "topk_group", 1),
        norm_topk_prob=switch("norm_topk_prob", config.get("norm_topk_prob", True)),
        routed_scaling_factor=positive("routed_scaling_factor", config.get("routed_scaling_factor", 1.0)),
        rms_norm_eps=positive("layer_norm_epsilon", config.get("layer_norm_epsilon", config.get("norm_eps", 1e-5))),
        max_position_embeddings=whole(config, "max_position_embeddings", 4096),
        tie_word_embeddings=switch("tie_word_embeddings", config.get("tie_word_embeddings")),
        dtype=dtype(config),
        eos_token_ids=token_ids(config.get("eos_token_id"), "config.json: 'eos_token_id'"),
    )
    groups = [("num_key_value_heads", "num_attention_heads"), ("n_groups", "mamba_num_heads")]
    multiples(cfg, *groups, *([("n_group", "n_routed_experts")] if cfg.n_routed_experts else []))
    if cfg.num_experts_per_tok > cfg.n_routed_experts * cfg.topk_group // cfg.n_group or cfg.topk_group > cfg.n_group:
        raise UserError(
            f"config.json: num_experts_per_tok={cfg.num_experts_per_tok} of n_routed_experts={cfg.n_routed_experts} in "
            f"topk_group={cfg.topk_group} of n_group={cfg.n_group} groups"
        )
    if cfg.conv_kernel < 2:
        raise UserError("config.json: conv_kernel=1 is not supported (2 and more)")
    return cfg


def _layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of all layers, from the list or the older string of characters; where both are there they must agree."""
    said: dict[str, tuple[str, ...]] = {}
    for key, kind, names in (("layers_block_type", list, NAMES), ("hybrid_override_pattern", str, KINDS)):
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, kind) or not 0 < len(given) <= 4096:
            raise UserError(f"config.json: '{key}' is {shown(given)}, a kind for each of 1 to 4096 layers is expected")
        found = [names.get(x, x) if isinstance(x, str) else x for x in given]
        for i, x in enumerate(found):
            if x not in KINDS.values():
                known = ", ".join(KINDS.values())
                raise UserError(f"config.json: {key}[{i}] is {shown(given[i])}; kinds of layers are {known}")
        said[key] = tuple(found)
    if len(set(said.values())) != 1:
        what = "layers_block_type and hybrid_override_pattern differ" if said else "'layers_block_type' is missing"
        raise UserError(f"config.json: {what}, so the kinds of the layers are unknown")
    kinds = next(iter(said.values()))
    if whole(config, "num_hidden_layers", len(kinds)) != len(kinds):
        raise UserError(f"config.json: num_hidden_layers={config['num_hidden_layers']}, but {len(kinds)} are named")
    return kinds


def canonical(name: str) -> str:
    """One name for a tensor or module, whoever wrote it: no model prefix; `mtp.` at the root. Idempotent."""
    prefix = PREFIXES.match(name)
    return name[prefix.end() :] if prefix else name


def weights(cfg: Config) -> list[Slot]:
    """Every weight, with its logical shape and placement."""
    h, rep = cfg.hidden_size, Replicate()
    slots = [Slot("embeddings", "linear", (cfg.vocab_size, h), rep)]
    mixers = {"mamba": _mamba, "attention": _attention, "moe": _moe, "mlp": _mlp}
    for i, kind in enumerate(cfg.layer_types):
        slots += [Slot(f"layers.{i}.norm.weight", "tensor", (h,), rep), *mixers[kind](cfg, f"layers.{i}.mixer.")]
    head = Slot("lm_head", "linear", (cfg.vocab_size, h), Shard(0), optional=cfg.tie_word_embeddings)
    return [*slots, Slot("norm_f.weight", "tensor", (h,), rep), head]


def _mamba(cfg: Config, p: str) -> list[Slot]:
    """A group of heads shares B and C and is normed as one, so a group is what ranks share. in_proj's rows are z, the
    convolution's channels (heads, B, C), and a time step a head."""
    h, heads, groups, state = cfg.hidden_size, cfg.mamba_num_heads, cfg.n_groups, cfg.ssm_state_size
    inner, each = heads * cfg.mamba_head_dim, heads // groups
    width = each * cfg.mamba_head_dim
    conv = ((inner, width), (groups * state, state), (groups * state, state))
    joined, rows, head = ((inner, width), *conv, (heads, each)), Shard(0, parts=conv), Shard(0, each)
    channels = inner + 2 * groups * state
    return [
        Slot(f"{p}in_proj", "linear", (inner + channels + heads, h), Shard(0, parts=joined)),
        Slot(f"{p}conv1d.weight", "tensor", (channels, 1, cfg.conv_kernel), rows),
        Slot(f"{p}conv1d.bias", "tensor", (channels,), rows),
        *(Slot(f"{p}{name}", "tensor", (heads,), head) for name in ("A_log", "D", "dt_bias")),
        Slot(f"{p}norm.weight", "tensor", (inner,), Shard(0, width)),
        Slot(f"{p}out_proj", "linear", (h, inner), Shard(1, width)),
    ]  # fmt: skip


def _attention(cfg: Config, p: str) -> list[Slot]:
    h, d = cfg.hidden_size, cfg.head_dim
    q, kv = cfg.num_attention_heads * d, cfg.num_key_value_heads * d
    return [
        Slot(f"{p}q_proj", "linear", (q, h), Shard(0, d)),
        Slot(f"{p}k_proj", "linear", (kv, h), Shard(0, d, on_short="replicate")),
        Slot(f"{p}v_proj", "linear", (kv, h), Shard(0, d, on_short="replicate")),
        Slot(f"{p}o_proj", "linear", (h, q), Shard(1, d)),
    ]


def _unit(width: int) -> int:
    """Rows that a cut keeps together: 64 as kernels like it (1856 are 29 of them), 16 where that leaves too few."""
    return 64 if width >= 1024 else 16


def _pair(p: str, outer: int, width: int) -> list[Slot]:
    unit = _unit(width)
    up, down = Slot(f"{p}up_proj", "linear", (width, outer), Shard(0, unit)), Shard(1, unit)
    return [up, Slot(f"{p}down_proj", "linear", (outer, width), down)]


def _mlp(cfg: Config, p: str) -> list[Slot]:
    return _pair(p, cfg.hidden_size, cfg.intermediate_size)


def _moe(cfg: Config, p: str) -> list[Slot]:
    h, e, m, rep = cfg.hidden_size, cfg.n_routed_experts, cfg.moe_intermediate_size, Replicate()
    latent, x, unit = cfg.moe_latent_size, f"{p}experts.", _unit(cfg.moe_intermediate_size)
    into, out = ((f"{p}fc{i}_latent_proj", "linear", shape, rep) for i, shape in ((1, (latent, h)), (2, (h, latent))))
    return [
        Slot(f"{p}gate", "linear", (e, h), rep),
        Slot(f"{p}gate.e_score_correction_bias", "tensor", (e,), rep),
        *([Slot(*into)] if latent else []),
        Slot(f"{x}up_proj", "experts", (e, m, latent or h), Experts(Shard(0, unit)), (f"{x}up_proj", 0)),
        Slot(f"{x}down_proj", "experts", (e, latent or h, m), Experts(Shard(1, unit)), (f"{x}down_proj", 0)),
        *([Slot(*out)] if latent else []),
        *_pair(f"{p}shared_experts.", h, cfg.moe_shared_expert_intermediate_size),
    ]  # fmt: skip


def state_spec(cfg: Config, rank: int = 0, ranks: int = 1) -> list[StateSpec]:
    """One entry a layer: what `rank` of `ranks` keeps of the past. UserError where the heads cannot be cut so."""
    paged: StateSpec = STATELESS
    recurrent = STATELESS
    if "attention" in cfg.layer_types:
        paged = PagedKv(kv_heads(cfg.num_attention_heads, cfg.num_key_value_heads, rank, ranks), cfg.head_dim)
    if "mamba" in cfg.layer_types:
        first, last = cut(cfg.n_groups, 1, rank, ranks)
        heads, groups = (last - first) * (cfg.mamba_num_heads // cfg.n_groups), last - first
        conv = heads * cfg.mamba_head_dim + 2 * groups * cfg.ssm_state_size
        recurrent = Recurrent((conv, cfg.conv_kernel - 1), (heads, cfg.mamba_head_dim, cfg.ssm_state_size))
    return [{"mamba": recurrent, "attention": paged}.get(kind, STATELESS) for kind in cfg.layer_types]


def kv_scale_layer(module: str) -> int | None:
    """Layer whose cache scale `module` carries, under k_proj and v_proj or under the mixer; None for any other."""
    m = re.fullmatch(r"layers\.(\d+)\.mixer(?:\.[kv]_proj)?", module)
    return int(m[1]) if m else None


def neutral(norm: str) -> float:
    """The weight with which a norm changes no scale."""
    return 1.0


def draft_like(cfg: Config, layer: int) -> int | None:
    """Layer of the model whose tensors layer `mtp.layers.{layer}` has, None where there is none: attention, then
    experts, in turn."""
    kind = ("attention", "moe")[layer % 2]
    return cfg.layer_types.index(kind) if kind in cfg.layer_types else None
