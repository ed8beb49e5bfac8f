"""Qwen3.5 and 3.6, MoE and dense (text part): config, names, weights, placement, state. Pure.

Source: config.json and tensor names of the published checkpoints; transformers' models.qwen3_5(_moe).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp4ward.errors import UserError, shown
from fp4ward.facts import STATELESS, PagedKv, Recurrent, StateSpec, kv_heads, model_class, token_ids
from fp4ward.facts.read import dtype, multiples, only, positive, switch, whole
from fp4ward.parallel.placement import Experts, Replicate, Shard, Slot, cut

PREFIXES = re.compile(r"(?:model\.language_model\.|language_model\.model\.|model\.)+(?=.)")
# Parts of the checkpoint that the text model leaves out on purpose, with the reason that is shown.
LEFT_OUT = {"visual": "vision tower: text only", "mtp": "multi-token prediction head: not used yet"}
RECURRENT = "gated_delta"  # the operation on a recurrent layer's state
# What of a block of experts may be one operation with them, by its names there: the gates, and the shared expert
MOE_BLOCK = ("gate", "shared_expert_gate", *(f"shared_expert.{p}_proj" for p in ("gate", "up", "down")))
# What multi-token prediction has beside layers `mtp.layers.N`.
DRAFT = ("mtp.fc", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
# Keys whose default we do not know to be harmless: any other value is another model.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "mlp_only_layers": ([],),
    "mamba_ssm_dtype": ("float32", None),
    "output_gate_type": ("swish", "silu", None),
    # Of relatives, should a converter write them here:
    "norm_topk_prob": (True, None),
    "decoder_sparse_step": (1, None),
    "use_sliding_window": (False, None),
    "routed_scaling_factor": (1, None),
    "mlp_bias": (False, None),
}

SIZES = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True)
class Config:
    """Names as in config.json's text config. experts == 0 means a dense MLP of width `intermediate_size`."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim


def parse(config: Mapping[str, Any]) -> Config:
    """Config from config.json, text config at the root or nested. UserError naming the key that is not understood."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise UserError("config.json: 'text_config' is no object")
    moe = "Moe" in model_class(config)

    def need(key: str, default: int | None = None) -> int:
        return whole(text, key, default)

    only(text, REQUIRED_VALUES)
    layers = need("num_hidden_layers")
    if layers > 4096:
        raise UserError(f"config.json: num_hidden_layers={layers} is beyond any known model (4096)")
    rope = _rope(text)
    head_dim = need("head_dim")
    key = "partial_rotary_factor"
    factor = positive(key, rope.get(key, text.get(key, 0.25)))
    theta = positive("rope_theta", rope.get("rope_theta", text.get("rope_theta", 10_000_000)))
    rotary = int(head_dim * factor)
    if not 0 < rotary <= head_dim or rotary % 2:
        raise UserError(f"config.json: partial_rotary_factor={factor} of head_dim={head_dim} gives {rotary} dimensions")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    sizes: dict[str, Any] = {key: need(key) for key in SIZES}
    sizes |= {key: need(key) if moe else 0 for key in MOE_SIZES}
    cfg = Config(
        **sizes,
        layer_types=_layer_types(text, layers),
        linear_conv_kernel_dim=need("linear_conv_kernel_dim", 4),
        intermediate_size=0 if moe else need("intermediate_size"),
        rms_norm_eps=positive("rms_norm_eps", text.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rotary_dim=rotary,
        max_position_embeddings=need("max_position_embeddings", 32768),
        tie_word_embeddings=switch("tie_word_embeddings", tied),
        dtype=dtype(text, config),
        eos_token_ids=token_ids(text.get("eos_token_id", config.get("eos_token_id")), "config.json: 'eos_token_id'"),
    )
    kv, keys = ("num_key_value_heads", "num_attention_heads"), ("linear_num_key_heads", "linear_num_value_heads")
    multiples(cfg, kv, keys)
    if moe and cfg.num_experts_per_tok > cfg.num_experts:
        raise UserError(f"config.json: num_experts_per_tok={cfg.num_experts_per_tok} of num_experts={cfg.num_experts}")
    if cfg.linear_conv_kernel_dim < 2:
        raise UserError("config.json: linear_conv_kernel_dim=1 is not supported (2 and more)")
    return cfg


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of the rotation, under their newer and their older name; unscaled, and the same in all layers."""
    out: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        found = text.get(key) or {}
        if not isinstance(found, Mapping):
            raise UserError(f"config.json: '{key}' is no object")
        kind = found.get("rope_type", found.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise UserError(f"config.json: rope_type={shown(kind)} in '{key}' is not supported, only 'default'")
        inner = next((k for k, v in found.items() if isinstance(v, Mapping)), None)
        if inner is not None:
            raise UserError(
                f"config.json: '{key}' holds an object {shown(inner)}; one rotation for all layers is expected"
            )
        out |= found
    return out


def _layer_types(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    given = text.get("layer_types")
    if given is None:
        interval = text.get("full_attention_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise UserError(f"config.json: full_attention_interval={shown(interval)}, a positive number is expected")
        return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))
    if not isinstance(given, list) or len(given) != layers:
        raise UserError(f"config.json: layer_types does not name each of the {layers} layers (num_hidden_layers)")
    for i, kind in enumerate(given):
        if kind not in ("full_attention", "linear_attention"):
            raise UserError(
                f"config.json: layer_types[{i}] is {shown(kind)}; full_attention and linear_attention are known"
            )
    return tuple(given)


def canonical(name: str) -> str:
    """One name for a tensor or module, whoever wrote it: no model prefix; `visual.` and `mtp.` at the root.

    Serves safetensors headers and quantization JSON alike. Idempotent.
    """
    prefix = PREFIXES.match(name)
    return name[prefix.end() :] if prefix else name


def weights(cfg: Config) -> list[Slot]:
    """Every weight of the text model, with its logical shape and placement."""
    h, rep = cfg.hidden_size, Replicate()
    slots = [Slot("embed_tokens", "linear", (cfg.vocab_size, h), rep)]
    for i, kind in enumerate(cfg.layer_types):
        p = f"layers.{i}."
        slots += [
            Slot(f"{p}input_layernorm.weight", "tensor", (h,), rep),
            Slot(f"{p}post_attention_layernorm.weight", "tensor", (h,), rep),
        ]
        slots += _linear_attention(cfg, p) if kind == "linear_attention" else _full_attention(cfg, p)
        if cfg.num_experts:
            e, m, s = cfg.num_experts, cfg.moe_intermediate_size, cfg.shared_expert_intermediate_size
            x = f"{p}mlp.experts."
            slots += [
                Slot(f"{p}mlp.gate", "linear", (e, h), rep),
                Slot(f"{x}gate_proj", "experts", (e, m, h), Experts(Shard(0, 16)), (f"{x}gate_up_proj", 0)),
                Slot(f"{x}up_proj", "experts", (e, m, h), Experts(Shard(0, 16)), (f"{x}gate_up_proj", m)),
                Slot(f"{x}down_proj", "experts", (e, h, m), Experts(Shard(1, 16)), (f"{x}down_proj", 0)),
                *_mlp(f"{p}mlp.shared_expert.", h, s),
                Slot(f"{p}mlp.shared_expert_gate", "linear", (1, h), rep),
            ]
        else:
            slots += _mlp(f"{p}mlp.", h, cfg.intermediate_size)
    slots += [
        Slot("norm.weight", "tensor", (h,), rep),
        Slot("lm_head", "linear", (cfg.vocab_size, h), Shard(0), optional=cfg.tie_word_embeddings),
    ]
    return slots


def _mlp(p: str, h: int, width: int) -> list[Slot]:
    return [
        Slot(f"{p}gate_proj", "linear", (width, h), Shard(0, 16)),
        Slot(f"{p}up_proj", "linear", (width, h), Shard(0, 16)),
        Slot(f"{p}down_proj", "linear", (h, width), Shard(1, 16)),
    ]


def _full_attention(cfg: Config, p: str) -> list[Slot]:
    h, d = cfg.hidden_size, cfg.head_dim
    q, kv = cfg.num_attention_heads * d, cfg.num_key_value_heads * d
    a = f"{p}self_attn."
    return [
        Slot(f"{a}q_proj", "linear", (2 * q, h), Shard(0, 2 * d)),  # a head's query rows, then its gate rows
        Slot(f"{a}k_proj", "linear", (kv, h), Shard(0, d, on_short="replicate")),
        Slot(f"{a}v_proj", "linear", (kv, h), Shard(0, d, on_short="replicate")),
        Slot(f"{a}o_proj", "linear", (h, q), Shard(1, d)),
        Slot(f"{a}q_norm.weight", "tensor", (d,), Replicate()),
        Slot(f"{a}k_norm.weight", "tensor", (d,), Replicate()),
    ]


def _linear_attention(cfg: Config, p: str) -> list[Slot]:
    h, nk, nv = cfg.hidden_size, cfg.linear_num_key_heads, cfg.linear_num_value_heads
    dk, dv = cfg.linear_key_head_dim, cfg.linear_value_head_dim
    group = nv // nk  # value heads stay with their key head
    qkv = Shard(0, parts=((cfg.key_dim, dk), (cfg.key_dim, dk), (cfg.value_dim, group * dv)))
    a = f"{p}linear_attn."
    return [
        Slot(f"{a}in_proj_qkv", "linear", (cfg.conv_dim, h), qkv),
        Slot(f"{a}in_proj_z", "linear", (cfg.value_dim, h), Shard(0, group * dv)),
        Slot(f"{a}in_proj_b", "linear", (nv, h), Shard(0, group)),
        Slot(f"{a}in_proj_a", "linear", (nv, h), Shard(0, group)),
        Slot(f"{a}conv1d.weight", "tensor", (cfg.conv_dim, 1, cfg.linear_conv_kernel_dim), qkv),
        Slot(f"{a}A_log", "tensor", (nv,), Shard(0, group)),
        Slot(f"{a}dt_bias", "tensor", (nv,), Shard(0, group)),
        Slot(f"{a}norm.weight", "tensor", (dv,), Replicate()),
        Slot(f"{a}out_proj", "linear", (h, cfg.value_dim), Shard(1, group * dv)),
    ]


def state_spec(cfg: Config, rank: int = 0, ranks: int = 1) -> list[StateSpec]:
    """One entry a layer: what `rank` of `ranks` keeps of the past. UserError where the heads cannot be cut so."""

    kinds, paged, recurrent = set(cfg.layer_types), PagedKv(cfg.num_key_value_heads, cfg.head_dim), STATELESS
    if "full_attention" in kinds and ranks > 1:
        paged = PagedKv(kv_heads(cfg.num_attention_heads, cfg.num_key_value_heads, rank, ranks), cfg.head_dim)
    if "linear_attention" in kinds:
        first, last = cut(cfg.linear_num_key_heads, 1, rank, ranks)
        keys, values = last - first, (last - first) * (cfg.linear_num_value_heads // cfg.linear_num_key_heads)
        dk, dv = cfg.linear_key_head_dim, cfg.linear_value_head_dim
        recurrent = Recurrent((2 * keys * dk + values * dv, cfg.linear_conv_kernel_dim - 1), (values, dk, dv))
    return [recurrent if kind == "linear_attention" else paged for kind in cfg.layer_types]


def kv_scale_layer(module: str) -> int | None:
    """Layer whose cache scale `module` carries: ModelOpt stores k_scale under k_proj and v_scale under v_proj,
    compressed-tensors both under self_attn. None for any other module."""
    m = re.fullmatch(r"layers\.(\d+)\.self_attn(?:\.[kv]_proj)?", module)
    return int(m[1]) if m else None


def neutral(norm: str) -> float:
    """The weight with which a norm changes no scale: they multiply by 1 + w, but those of linear attention by w."""
    return float(".linear_attn." in norm)


def draft_like(cfg: Config, layer: int) -> int | None:
    """Layer of the model whose tensors layer `mtp.layers.{layer}` has, None where there is none: one of attention."""
    return cfg.layer_types.index("full_attention") if "full_attention" in cfg.layer_types else None


def tiny(cfg: Config, ranks: int) -> Config:
    """The same architecture with as little of it as shows how it is cut over `ranks`: one layer of each kind, all its
    heads, and widths of one unit a rank."""
    width = 16 * ranks
    moe = cfg.num_experts > 0
    return replace(
        cfg,
        vocab_size=width,
        hidden_size=32,
        layer_types=tuple(dict.fromkeys(cfg.layer_types)),
        head_dim=8,
        rotary_dim=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        num_experts=max(4, ranks) if moe else 0,
        num_experts_per_tok=2 if moe else 0,
        moe_intermediate_size=width if moe else 0,
        shared_expert_intermediate_size=width if moe else 0,
        intermediate_size=0 if moe else width,
    )
