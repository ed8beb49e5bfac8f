"""The largest model, planned from as many headers as it has: seconds of one core, and no library is loaded for it.

CPU seconds of the command's own process are counted. Where neighbours share caches and memory these grow too, by more
than half on two busy cores; so the time that Python's own JSON reader takes for a fixed text, before and after, says
how slow the machine is now. The bar is 8 seconds at the speed that it was measured at.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp4ward.facts import qwen3_5

# Qwen3.5-397B-A17B: sizes of its config.json, exported with NVFP4 experts (W4A4) and everything else in bf16.
CONFIG = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "max_position_embeddings": 262144,
    },
}  # fmt: skip
QUANT = {
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": [
            "lm_head", "*.mlp.shared_expert.*", "*.mlp.gate", "*.shared_expert_gate",
            *(f"model.language_model.layers.{i}.{mixer}*" for i in range(60) for mixer in ("linear_attn", "self_attn")),
        ],
    },
}  # fmt: skip
SHARDS = 26
IDLE = 0.115  # CPU seconds of `slowness` on an idle core of the machine that the times below were measured on
PLAN = """
import sys, time
from fp4ward.cli import main
code = main(["plan", sys.argv[1], "--gpu", "H20", "--tp", "8", "--ep", "8"])
found = sorted({"torch", "triton", "numpy", "safetensors"} & set(sys.modules))
print(code, found, time.process_time(), file=sys.stderr)
"""


def entries() -> list[tuple[str, str, list[int], int]]:
    """Name, dtype, shape and bytes of every tensor."""
    out: list[tuple[str, str, list[int], int]] = []
    for slot in qwen3_5.weights(qwen3_5.parse(CONFIG)):
        head, _, last = slot.name.rpartition(".")
        if slot.kind == "experts":
            experts, n, k = slot.shape
            for e in range(experts):
                name = f"model.language_model.{head}.{e}.{last}."
                out += [
                    (name + "weight", "U8", [n, k // 2], n * k // 2),
                    (name + "weight_scale", "F8_E4M3", [n, k // 16], n * k // 16),
                    (name + "weight_scale_2", "F32", [], 4),
                    (name + "input_scale", "F32", [], 4),
                ]
        else:
            name = slot.name if slot.kind == "tensor" else f"{slot.name}.weight"
            name = name if name.startswith("lm_head") else f"model.language_model.{name}"
            out.append((name, "BF16", list(slot.shape), 2 * math.prod(slot.shape)))
    return out


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("397B")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "hf_quant_config.json").write_text(json.dumps(QUANT))
    yield folder
    shutil.rmtree(folder)  # 60 MB of headers


def slowness() -> float:
    """How many times slower than an idle core this one is now; at least 1."""
    text = json.dumps({f"layer.{i}": {"dtype": "U8", "shape": [i, 16], "data_offsets": [i, i]} for i in range(20000)})
    gc.disable()
    start = time.process_time()
    for _ in range(4):
        json.loads(text)
    spent = time.process_time() - start
    gc.enable()
    return max(1.0, spent / IDLE)


def seconds(folder: Path) -> tuple[float, str]:
    """CPU seconds at an idle core's speed, and what is printed."""
    before = slowness()
    done = subprocess.run([sys.executable, "-c", PLAN, str(folder)], capture_output=True, text=True)
    code, libraries, spent = done.stderr.strip().splitlines()[-1].split(" ")
    assert (code, libraries) == ("0", "[]"), done.stderr
    return float(spent) / ((before + slowness()) / 2), done.stdout


def test_from_json_it_takes_less_than_two_seconds(documents: Path) -> None:
    spent, text = seconds(documents)
    assert spent < 2  # 0.3 measured
    assert "tensors were not seen" in text


def test_from_its_headers_it_takes_less_than_eight_seconds(documents: Path) -> None:
    from_json = seconds(documents)[1]
    every = entries()
    assert sum(".experts." in name for name, *_ in every) == 368_640
    per = -(-len(every) // SHARDS)
    for i in range(SHARDS):
        at, header = 0, {}
        for name, dtype, shape, size in every[i * per : (i + 1) * per]:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        raw = json.dumps(header).encode()
        with open(documents / f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors", "wb") as f:
            f.write(len(raw).to_bytes(8, "little") + raw)
            f.truncate(8 + len(raw) + at)  # 220 GiB that take no room: the rest of the file is a hole
    spent, text = seconds(documents)
    assert spent < 8  # 4.2 measured
    assert "tensors were not seen" not in text

    def table(printed: str) -> str:
        return printed.partition("\noperation")[2].partition("\n\n")[0]

    assert table(text) == table(from_json)  # this JSON says what is stored
