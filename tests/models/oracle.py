"""An independent forward of Qwen3.5, token by token, for tests: slow, float64, sharing no code with the package.

It dequantizes a fixture with formulas of its own and keeps state in plain Python structures. `kv` maps a key or value
vector to what the cache would return for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
SCALES = (
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
)


def dense_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight of the text model in float64 by its name without the model prefix."""
    raw = load_file(folder / "model.safetensors")
    out = {}
    for name, t in raw.items():
        stem, leaf = name.rsplit(".", 1)
        if leaf in SCALES or "visual" in name or name.startswith("mtp."):
            continue
        if t.dtype == torch.uint8:
            nibbles = torch.stack([t & 15, t >> 4], -1).flatten(-2).long()
            w = torch.tensor(E2M1, dtype=torch.float64)[nibbles]
            block = raw[f"{stem}.weight_scale"].double().repeat_interleave(16, -1)
            if f"{stem}.weight_scale_2" in raw:
                g = raw[f"{stem}.weight_scale_2"].double()
            else:
                g = 1 / raw[f"{stem}.weight_global_scale"].double()
            t, leaf = w * block * g, "weight"
        elif t.dtype == torch.float8_e4m3fn:
            t = t.double() * raw[f"{stem}.weight_scale"].double()
        name = f"{stem}.{leaf}"
        for prefix in ("model.language_model.", "model."):
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        out[name] = t.double()
    return out


class Oracle:
    """feed(token) -> logits [V]; state of one sequence."""

    def __init__(self, folder: Path, kv: Callable[[int, str, torch.Tensor], torch.Tensor] = lambda i, kind, x: x):
        config = json.loads((folder / "config.json").read_text())
        self.c = config.get("text_config", config)
        self.w = dense_weights(folder)
        self.kv = kv
        self.past: list[dict] = [{} for _ in self.c["layer_types"]]
        self.t = 0

    def lin(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.w[f"{name}.weight"] @ x

    def rms(self, x: torch.Tensor, name: str, plus: float = 1.0) -> torch.Tensor:
        return (
            x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * (plus + self.w[f"{name}.weight"])
        )

    def feed(self, token: int) -> torch.Tensor:
        x = self.w["embed_tokens.weight"][token]
        for i, kind in enumerate(self.c["layer_types"]):
            p = f"layers.{i}."
            h = self.rms(x, f"{p}input_layernorm")
            x = x + (self.delta(i, h) if kind == "linear_attention" else self.attention(i, h))
            h = self.rms(x, f"{p}post_attention_layernorm")
            x = x + (self.moe(f"{p}mlp", h) if f"{p}mlp.gate.weight" in self.w else self.mlp(f"{p}mlp", h))
        self.t += 1
        return self.lin("lm_head", self.rms(x, "norm"))

    def mlp(self, p: str, x: torch.Tensor) -> torch.Tensor:
        g = self.lin(f"{p}.gate_proj", x)
        return self.lin(f"{p}.down_proj", g / (1 + torch.exp(-g)) * self.lin(f"{p}.up_proj", x))

    def moe(self, p: str, x: torch.Tensor) -> torch.Tensor:
        prob = torch.softmax(self.lin(f"{p}.gate", x), 0)
        best = sorted(range(len(prob)), key=lambda e: -prob[e].item())[: self.c["num_experts_per_tok"]]
        total = sum(prob[e] for e in best)
        y = torch.zeros_like(x)
        for e in best:
            y = y + prob[e] / total * self.mlp(f"{p}.experts.{e}", x)
        return y + torch.sigmoid(self.lin(f"{p}.shared_expert_gate", x)) * self.mlp(f"{p}.shared_expert", x)

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        rp, d = self.c["rope_parameters"], self.c["head_dim"]
        r = int(d * rp["partial_rotary_factor"])
        out = x.clone()
        for j in range(r // 2):
            a = self.t * rp["rope_theta"] ** (-2 * j / r)
            u, v = x[:, j], x[:, j + r // 2]
            out[:, j] = u * math.cos(a) - v * math.sin(a)
            out[:, j + r // 2] = v * math.cos(a) + u * math.sin(a)
        return out

    def attention(self, i: int, x: torch.Tensor) -> torch.Tensor:
        p, d = f"layers.{i}.self_attn", self.c["head_dim"]
        qg = self.lin(f"{p}.q_proj", x).view(-1, 2, d)
        q = self.rope(self.rms(qg[:, 0], f"{p}.q_norm"))
        k = self.rope(self.rms(self.lin(f"{p}.k_proj", x).view(-1, d), f"{p}.k_norm"))
        v = self.lin(f"{p}.v_proj", x).view(-1, d)
        past = self.past[i]
        past.setdefault("k", []).append(self.kv(i, "k", k))
        past.setdefault("v", []).append(self.kv(i, "v", v))
        out = []
        for h in range(q.shape[0]):
            kv = h * k.shape[0] // q.shape[0]
            score = torch.stack([kk[kv] @ q[h] for kk in past["k"]]) / math.sqrt(d)
            out.append(sum(a * vv[kv] for a, vv in zip(torch.softmax(score, 0), past["v"], strict=True)))
        return self.lin(f"{p}.o_proj", (torch.stack(out) * torch.sigmoid(qg[:, 1])).flatten())

    def delta(self, i: int, x: torch.Tensor) -> torch.Tensor:
        c, p = self.c, f"layers.{i}.linear_attn"
        nk, nv, dk, dv = (
            c[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        past = self.past[i]
        taps = self.w[f"{p}.conv1d.weight"][:, 0]
        window = past.setdefault("u", [torch.zeros(taps.shape[0], dtype=torch.float64)] * (taps.shape[1] - 1))
        window.append(self.lin(f"{p}.in_proj_qkv", x))
        u = sum(taps[:, -1 - j] * window[-1 - j] for j in range(taps.shape[1]))
        u = u / (1 + torch.exp(-u))
        q, k, v = u[: nk * dk].view(nk, dk), u[nk * dk : 2 * nk * dk].view(nk, dk), u[2 * nk * dk :].view(nv, dv)
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / math.sqrt(dk)
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        beta = torch.sigmoid(self.lin(f"{p}.in_proj_b", x))
        dt = self.lin(f"{p}.in_proj_a", x) + self.w[f"{p}.dt_bias"]
        decay = torch.exp(-torch.exp(self.w[f"{p}.A_log"]) * torch.log1p(torch.exp(dt)))
        state = past.setdefault("S", torch.zeros(nv, dk, dv, dtype=torch.float64))
        out = torch.empty(nv, dv, dtype=torch.float64)
        for h in range(nv):
            key = k[h * nk // nv]
            s = decay[h] * state[h]
            s = s + torch.outer(key, beta[h] * (v[h] - s.T @ key))
            state[h] = s
            out[h] = s.T @ q[h * nk // nv]
        z = self.lin(f"{p}.in_proj_z", x).view(nv, dv)
        y = self.rms(out, f"{p}.norm", plus=0.0) * z / (1 + torch.exp(-z))
        return self.lin(f"{p}.out_proj", y.flatten())
