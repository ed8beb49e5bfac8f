"""The shapes that kernels are judged and tested on: one table for tests and benchmarks.

From the published configurations of Qwen3.6-35B-A3B (hidden 2048), Qwen3.6-27B (5120), Qwen3.5-397B-A17B (4096) and
Nemotron-3-Nano-30B-A3B (2688), as they run: projections that read the same input fused (q, k and v; qkv and z of linear
attention; gate and up), whole on one GPU or sharded over TP 2 and TP 8 where that gives another class of shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dense:
    """y [M, N] = x [M, K] W^T. module: what it is in the model, and at which TP."""

    n: int
    k: int
    module: str

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k}"


@dataclass(frozen=True)
class Moe:
    """Experts on one rank: e of them, top_k a token, intermediate size i (this rank's share), hidden size h. gated:
    with gate and up; Nemotron-H has up alone and a squared ReLU."""

    e: int
    top_k: int
    i: int
    h: int
    module: str
    gated: bool = True

    @property
    def name(self) -> str:
        return f"{self.e}x{self.top_k}x{self.i}x{self.h}"


DENSE = (
    # 35B-A3B: 16 heads of 256 with an output gate, 2 KV heads; linear attention 16 x 128 keys and 32 x 128 values
    Dense(8192, 2048, "35B-A3B self_attn.q_proj with its gate; linear_attn.in_proj_qkv"),
    Dense(12288, 2048, "35B-A3B linear_attn.in_proj_qkv and in_proj_z"),
    Dense(2048, 4096, "35B-A3B self_attn.o_proj, linear_attn.out_proj"),
    Dense(2048, 2048, "35B-A3B self_attn.o_proj, linear_attn.out_proj at TP 2"),
    Dense(1024, 2048, "35B-A3B shared_expert.gate_proj and up_proj"),
    Dense(2048, 512, "35B-A3B shared_expert.down_proj; o_proj at TP 8"),
    Dense(248320, 2048, "35B-A3B lm_head"),
    # 27B: 24 heads with an output gate, 4 KV heads; linear attention 16 x 128 keys and 48 x 128 values; MLP of 17408
    Dense(14336, 5120, "27B self_attn.q_proj with its gate, k_proj and v_proj"),
    Dense(16384, 5120, "27B linear_attn.in_proj_qkv and in_proj_z"),
    Dense(5120, 6144, "27B self_attn.o_proj, linear_attn.out_proj"),
    Dense(34816, 5120, "27B mlp.gate_proj and up_proj"),
    Dense(5120, 17408, "27B mlp.down_proj"),
    Dense(4352, 5120, "27B mlp.gate_proj and up_proj at TP 8"),
    Dense(5120, 2176, "27B mlp.down_proj at TP 8"),
    Dense(248320, 5120, "27B lm_head"),
    # 397B-A17B: 32 heads with an output gate, 2 KV heads; linear attention 16 x 128 keys and 64 x 128 values
    Dense(16384, 4096, "397B-A17B self_attn.q_proj with its gate"),
    Dense(12288, 4096, "397B-A17B linear_attn.in_proj_qkv"),
    Dense(4096, 8192, "397B-A17B self_attn.o_proj, linear_attn.out_proj"),
    Dense(4096, 4096, "397B-A17B self_attn.o_proj, linear_attn.out_proj at TP 2"),
    Dense(4096, 1024, "397B-A17B shared_expert.down_proj; o_proj, out_proj at TP 8"),
    Dense(31040, 4096, "397B-A17B lm_head at TP 8"),
    # Nemotron-3-Nano: Mamba of 64 x 64 with 8 groups of 128 states; a shared expert of 3712
    Dense(10304, 2688, "Nemotron-3-Nano mixer.in_proj of Mamba"),
    Dense(2688, 4096, "Nemotron-3-Nano mixer.out_proj of Mamba; self_attn.o_proj"),
    Dense(2688, 3712, "Nemotron-3-Nano mixer.shared_experts.down_proj"),
)

# Sharded experts keep whole groups of 16 (1856 over 8 ranks: the largest share is 4 of 29 units of 64).
MOE = (
    Moe(256, 8, 512, 2048, "35B-A3B mlp.experts"),
    Moe(256, 8, 256, 2048, "35B-A3B mlp.experts at TP 2"),
    Moe(256, 8, 64, 2048, "35B-A3B mlp.experts at TP 8"),
    Moe(512, 10, 1024, 4096, "397B-A17B mlp.experts"),
    Moe(512, 10, 512, 4096, "397B-A17B mlp.experts at TP 2"),
    Moe(512, 10, 128, 4096, "397B-A17B mlp.experts at TP 8"),
    Moe(128, 6, 1856, 2688, "Nemotron-3-Nano mixer.experts", gated=False),
    Moe(128, 6, 256, 2688, "Nemotron-3-Nano mixer.experts at TP 8", gated=False),
)

# Correctness only: neither N nor K a power of two or a multiple of a tile. 160 = 10 tiles of 16, 288 = 18 groups of 16.
ODD = (
    Dense(160, 288, "no multiple of 64 either way"),
    Dense(1856, 2688, "Nemotron-3-Nano mixer.experts.0.up_proj"),
    Dense(2688, 1856, "Nemotron-3-Nano mixer.experts.0.down_proj"),
    Dense(704, 640, "1/8 of sizes between the models'"),
    Dense(640, 704, "the same, turned"),
    Dense(16, 16, "one group"),
    Dense(1, 48, "one row"),
    Dense(33, 80, "rows that fill no tile"),
)

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
ALL_TOKENS = (*DECODE_TOKENS, 128, 256, 512, 1024, 2048, 4096, 8192)

# The accuracy of a W4A16 or W8A16 kernel with bf16 in and out: norm-wise against float64, and per element in units
# of 2^-8 of sum |w| |x| (one bf16 rounding is half of such a unit of the result itself).
NORM_ERROR = 4e-3
ULPS = 2.0

# Worth measuring against what cuda_experts.choose takes: defines of gate_up, of down
VARIANTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "chosen": ({}, {}),
    "up one tile": ({"R": 1, "DEPTH": 2}, {}),
    "up two tiles": ({"R": 2, "DEPTH": 2}, {}),
    "up 12 warps x2": ({"WARPS": 12, "CTAS": 2, "R": 1, "DEPTH": 2}, {}),
    "down one tile": ({}, {"R": 1, "DEPTH": 2}),
    "down two tiles": ({}, {"R": 2, "DEPTH": 2}),
    "down 8 warps x2": ({}, {"WARPS": 8, "CTAS": 2}),
    "down 12 warps": ({}, {"WARPS": 12, "CTAS": 1}),
    "down 16 warps": ({}, {"WARPS": 16, "CTAS": 1}),
    "down owns rows": ({}, {"OWN": 1}),
    "down combined": ({}, {"OWN": 0}),
    "blocks of 4": ({"PAIRS": 4}, {}),
    "blocks of 8": ({"PAIRS": 8}, {}),
    "blocks of 16": ({"PAIRS": 16}, {}),
    "deep": ({"DEPTH": 4}, {"DEPTH": 4}),
    "shallow": ({"DEPTH": 1}, {"DEPTH": 1}),
    "two buffers": ({"BUFFERS": 2, "WINDOW": 1}, {"BUFFERS": 2, "WINDOW": 1}),
    "no pdl": ({"PDL": 0}, {"PDL": 0}),
}
