"""The demo's model: Qwen3.5-MoE text model, its MTP head, and faster training forms of two of its parts.

`dense_experts` computes every expert for every token with routing weight zero where it is not chosen: the same
values and gradients as routing, and faster than sorting tokens at this size. `chunk_rule` is transformers'
torch_chunk_gated_delta_rule with one triangular solve, TF32 products, and no slice assignment in the scan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

SHARD_BYTES = 14 << 20
CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}


def build() -> Qwen3_5MoeForCausalLM:
    """A freshly initialised model (float32, CPU)."""
    config = Qwen3_5MoeTextConfig(**CONFIG)
    config.architectures = ["Qwen3_5MoeForCausalLM"]
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    return Qwen3_5MoeForCausalLM(config)


class Mtp(nn.Module):
    """One multi-token-prediction step: hidden state t (after the final norm) and token t+1 predict token t+2."""

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = modeling.Qwen3_5MoeRMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = modeling.Qwen3_5MoeRMSNorm(size, eps=eps)
        self.norm = modeling.Qwen3_5MoeRMSNorm(size, eps=eps)
        full = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([modeling.Qwen3_5MoeDecoderLayer(config, full)])
        for name, p in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(p, std=config.initializer_range)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: nn.Module) -> Tensor:
        """embedded [B,T,H] of tokens 1..T, hidden [B,T,H] at positions 0..T-1; returns normed hidden states [B,T,H]."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1))
        at = torch.arange(x.shape[1], device=x.device).view(1, 1, -1).expand(3, x.shape[0], -1)
        return self.norm(self.layers[0](x, position_embeddings=rotary(x, at), attention_mask=None))


def dense_experts(self: nn.Module, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Every expert for every token; hidden [T,H], index and weight [T,k]."""
    experts, both, size = self.gate_up_proj.shape
    gate, up = F.linear(hidden, self.gate_up_proj.view(experts * both, size)).view(-1, experts, 2, both // 2).unbind(2)
    routed = torch.zeros(hidden.shape[0], experts, dtype=weight.dtype, device=weight.device).scatter(1, index, weight)
    inner = F.silu(gate) * up * routed.unsqueeze(-1)
    down = self.down_proj.transpose(0, 1).reshape(size, -1)
    return F.linear(inner.reshape(hidden.shape[0], -1), down).to(hidden.dtype)


_original_rule = modeling.torch_chunk_gated_delta_rule


def chunk_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **rest: Any,
) -> tuple[Tensor, Any]:
    """The chunked gated delta rule from a zero state; q, k [B,T,h,dk], v [B,T,h,dv], g, beta [B,T,h]."""
    length = query.shape[1]
    if initial_state is not None or output_final_state or length % chunk_size:
        return _original_rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            chunk_size=chunk_size,
            initial_state=initial_state,
            output_final_state=output_final_state,
            **rest,
        )
    dtype, (batch, _, heads, dk), dv = query.dtype, query.shape, value.shape[-1]
    with torch.autocast(query.device.type, enabled=False):
        shape = (batch * heads, length // chunk_size, chunk_size)
        q, k, v = (t.transpose(1, 2).float().reshape(*shape, t.shape[-1]) for t in (query, key, value))
        decay, b = (t.transpose(1, 2).float().reshape(shape) for t in (g, beta))
        q = modeling.l2norm(q) * dk**-0.5
        k = modeling.l2norm(k)
        total = decay.cumsum(-1)
        above = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
        pair = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
        k_beta, grown = k * b.unsqueeze(-1), total.exp().unsqueeze(-1)
        system = (k_beta @ k.transpose(-1, -2)) * pair
        right = torch.cat([v * b.unsqueeze(-1), k_beta * grown], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        new_values, read = (t.unbind(1) for t in solved.split((dv, dk), dim=-1))
        write = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2).unbind(1)
        keep = total[..., -1].exp()[..., None, None].unbind(1)
        state = torch.zeros(batch * heads, dk, dv, device=q.device)
        states, values = [], []
        for i in range(shape[1]):
            fresh = torch.baddbmm(new_values[i], read[i], state, alpha=-1)
            states.append(state)
            values.append(fresh)
            state = torch.baddbmm(state * keep[i], write[i], fresh)
        out = (q * grown) @ torch.stack(states, 1) + ((q @ k.transpose(-1, -2)) * pair) @ torch.stack(values, 1)
    return out.reshape(batch, heads, length, dv).transpose(1, 2).to(dtype), None


def use(experts: str, rule: str) -> None:
    """Choose the forms to run: experts `dense` or `grouped_mm`, rule `own` or `transformers`."""
    modeling.Qwen3_5MoeExperts.forward = dense_experts if experts == "dense" else _original_experts
    modeling.torch_chunk_gated_delta_rule = chunk_rule if rule == "own" else _original_rule


_original_experts = modeling.Qwen3_5MoeExperts.forward


def is_quantized(name: str) -> bool:
    """Whether ModelOpt's W4A16_NVFP4_CFG stores this parameter in NVFP4 (the projections of the decoder layers)."""
    leaf = name.split(".")[-2 if name.endswith(".weight") else -1]
    return "layers." in name and (leaf.endswith("_proj") or leaf in ("in_proj_qkv", "in_proj_z"))


FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "in_proj_qkv": "in",
    "in_proj_z": "in",
    "gate_proj": "up",
    "up_proj": "up",
}


class FakeQuant:
    """NVFP4 rounding of parameters during a step (straight-through): as the exporter rounds them, per block of 16.

    ModelOpt gives projections that read the same input (q, k, v; in_proj_qkv and z; gate and up) one global scale,
    and stacked experts one each.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        self.parameters = [p for _, p in named]
        segments: list[Tensor] = []
        numbers: dict[str, int] = {}
        for name, p in named:
            path = name.removesuffix(".weight").split(".")
            key = ".".join([*path[:-1], FUSED.get(path[-1], path[-1])])
            pieces = p.shape[0] if p.ndim == 3 else 1
            for piece in range(pieces):
                number = numbers.setdefault(f"{key} {piece}", len(numbers))
                segments.append(torch.full((p.numel() // 16 // pieces,), number))
        self.sizes, self.count = [p.numel() // 16 for p in self.parameters], len(numbers)
        self.segments = torch.cat(segments).to(self.parameters[0].device)

    @torch.no_grad()
    def rounded(self) -> list[Tensor]:
        """The parameters' values after a round trip through NVFP4."""
        flat = torch.cat([p.detach().reshape(-1, 16) for p in self.parameters])
        top = flat.abs().amax(-1)
        whole = torch.zeros(self.count, device=flat.device).scatter_reduce_(0, self.segments, top, "amax") / (6 * 448)
        whole = whole.clamp_min(1e-30)[self.segments]
        scale = (top / 6 / whole).clamp(2**-9, 448).to(torch.float8_e4m3fn).float() * whole
        x = (flat / scale.unsqueeze(-1)).clamp(-6, 6)
        size = x.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        out = torch.round(x / step) * step * scale.unsqueeze(-1)
        return [t.reshape(p.shape) for t, p in zip(out.split(self.sizes), self.parameters, strict=True)]

    @torch.no_grad()
    def swap_in(self) -> list[Tensor]:
        """Put the rounded values into the parameters; returns the exact ones for `swap_out`."""
        exact = [p.detach().clone() for p in self.parameters]
        torch._foreach_copy_([p.data for p in self.parameters], self.rounded())
        return exact

    @torch.no_grad()
    def swap_out(self, exact: list[Tensor]) -> None:
        torch._foreach_copy_([p.data for p in self.parameters], exact)


def write_checkpoint(folder: Path, model: Qwen3_5MoeForCausalLM, mtp: Mtp) -> None:
    """bf16 safetensors shards of at most 14 MiB with the MTP tensors under `mtp.`, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    tensors |= {f"mtp.{k}": v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in mtp.state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    table = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    config = json.loads(model.config.to_json_string())
    config |= {"dtype": "bfloat16", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_checkpoint(folder: Path, model: Qwen3_5MoeForCausalLM, mtp: Mtp) -> None:
    """Weights that `write_checkpoint` wrote, into a model and its MTP head."""
    tensors = {k: v for file in sorted(folder.glob("model-*.safetensors")) for k, v in load_file(file).items()}
    model.load_state_dict({k: v for k, v in tensors.items() if not k.startswith("mtp.")})
    mtp.load_state_dict({k.removeprefix("mtp."): v for k, v in tensors.items() if k.startswith("mtp.")})
