"""Export the trained checkpoint to NVFP4 (weights only) with NVIDIA ModelOpt, on a CPU.

`python demo/export.py --checkpoint demo/build/trained --out demo/build/demo-nvfp4`; requirements.txt lists the tools.
The MTP head is left in bf16 and appended in the published layout (`mtp.*`), as in NVIDIA's own checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path

import modelopt.torch.quantization as mtq
import recipe
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Qwen3_5MoeForCausalLM

EXCLUDE = ["mtp.layers.0*", "mtp*"]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def calibration(rows: int = 16, length: int = 256) -> torch.Tensor:
    """Training rows for the forward pass that ModelOpt asks for (weights alone need no statistics)."""
    source = recipe.rows(99, length)
    return torch.stack([torch.from_numpy(next(source)[0].astype("int64")) for _ in range(rows)])


def append_mtp(out: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add the MTP tensors to the exported file and name them among the unquantized modules."""
    file = out / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config.get("text_config", config).update({"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False})
    section = config["quantization_config"]
    section["ignore"] = [*section.get("ignore", []), *EXCLUDE]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    quant = json.loads((out / "hf_quant_config.json").read_text(encoding="utf-8"))
    quant["quantization"]["exclude_modules"] = [*quant["quantization"].get("exclude_modules", []), *EXCLUDE]
    (out / "hf_quant_config.json").write_text(json.dumps(quant, indent=4) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder that train.py wrote (its export folder)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Qwen3_5MoeForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16).eval()
    model.config.architectures = ["Qwen3_5MoeForCausalLM"]
    rows = calibration()

    def forward(quantized: torch.nn.Module) -> None:
        with torch.no_grad():
            for part in rows.split(4):
                quantized(input_ids=part)

    model = mtq.quantize(model, copy.deepcopy(mtq.W4A16_NVFP4_CFG), forward_loop=forward)
    shutil.rmtree(args.out, ignore_errors=True)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=args.out)
    mtp: dict[str, torch.Tensor] = {}
    for file in sorted(args.checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            mtp |= {k: handle.get_tensor(k) for k in handle.keys() if k.startswith("mtp.")}  # noqa: SIM118
    append_mtp(args.out, mtp)
    for name in TOKENIZER:
        shutil.copy(recipe.BUILD / "tokenizer" / name, args.out / name)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    ends = [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1], "max_new_tokens": 256}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    sizes = {p.name: p.stat().st_size for p in sorted(args.out.iterdir())}
    print(json.dumps(sizes, indent=1), "total", round(sum(sizes.values()) / 1e6, 2), "MB;", len(mtp), "MTP tensors")


if __name__ == "__main__":
    main()
