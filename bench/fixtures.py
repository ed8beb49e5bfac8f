"""How far from the reference logits are we, and how far is transformers? On the fixtures, on any device.

    python bench/fixtures.py [--device cuda] [--out bench/results/fixtures_h200.jsonl]

For each Qwen3.5 fixture: the largest absolute error of our float32 logits against reference.safetensors (float32
logits of the dequantized model, made with transformers), and the relative error (norm-wise, over all prompts) of our
bf16 logits and of transformers in bf16, both against transformers in float32 on the same device. One prompt says
little: on these random models rounding is amplified, and the ratio of single prompts ranges from 0.4 to 1.5.
Bars: 1e-3 in float32; in bf16 no further than 1.2 times transformers. Exit code 1 when a bar is missed. Needs
transformers (the [test] extra).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fp4ward import LLM  # noqa: E402
from tests.models.oracle import dense_weights  # noqa: E402


def hf_model(folder: Path, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """transformers' model with our test oracle's dequantized weights, in `dtype`."""
    config = transformers.AutoConfig.from_pretrained(folder)
    text = getattr(config, "text_config", config)
    if hasattr(text, "quantization_config"):
        del text.quantization_config
    moe = "moe" in text.model_type
    model = (transformers.Qwen3_5MoeForCausalLM if moe else transformers.Qwen3_5ForCausalLM)(text)
    state: dict[str, Tensor] = {}
    experts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, w in dense_weights(folder).items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        m = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if m:
            experts.setdefault((m[1], m[3]), {})[int(m[2])] = w
        else:
            state[name] = w
    stacks = {key: torch.stack([d[e] for e in range(len(d))]) for key, d in experts.items()}
    for prefix in {p for p, _ in stacks}:
        state[f"{prefix}.gate_up_proj"] = torch.cat([stacks[prefix, "gate"], stacks[prefix, "up"]], 1)
        state[f"{prefix}.down_proj"] = stacks[prefix, "down"]
    model.load_state_dict(state)
    return model.to(device, dtype).eval()


@torch.inference_mode()
def hf_logits(model: torch.nn.Module, prompts: list[list[int]]) -> list[Tensor]:
    device = next(model.parameters()).device
    return [model(input_ids=torch.tensor([ids], device=device)).logits[0].double().cpu() for ids in prompts]


def relative(found: list[Tensor], ref: list[Tensor]) -> float:
    """|found - ref| / |ref| over all prompts together."""
    a, b = torch.cat(found).double(), torch.cat(ref)
    return ((a - b).norm() / b.norm()).item()


def git_commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of 40 tokens: the fixture's and random ones")
    parser.add_argument("--commit", help="recorded where the tree came without its git folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    head = {
        "date": date.today().isoformat(),
        "gpu": gpu,
        "commit": args.commit or git_commit(),
        "command": f"python bench/fixtures.py --device {args.device} --prompts {args.prompts}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    lines, ok = [], True
    print(f"{'fixture':42} {'f32 max abs':>12} {'bf16 ours':>10} {'bf16 transformers':>18} {'ratio':>6}")
    for folder in sorted((ROOT / "tests/fixtures").glob("q35*")):
        stored = load_file(folder / "reference.safetensors")
        stored_ids = stored["input_ids"][0].tolist()
        draw = torch.Generator().manual_seed(0)
        prompts = [stored_ids] + [
            torch.randint(3, 490, (40,), generator=draw).tolist() for _ in range(args.prompts - 1)
        ]
        ref = hf_logits(hf_model(folder, torch.float32, args.device), prompts)
        theirs = relative(hf_logits(hf_model(folder, torch.bfloat16, args.device), prompts), ref)
        f32 = LLM(str(folder), dtype="float32", device=args.device, kv_cache_dtype="f32", show_progress=False)
        bf16 = LLM(str(folder), dtype="bfloat16", device=args.device, kv_cache_dtype="bf16", show_progress=False)
        worst = (f32.logits(stored_ids).cpu() - stored["logits"]).abs().max().item()
        ours = relative([bf16.logits(ids).cpu() for ids in prompts], ref)
        ok &= worst <= 1e-3 and ours <= 1.2 * theirs
        print(f"{folder.name:42} {worst:12.2e} {ours:10.4f} {theirs:18.4f} {ours / theirs:6.2f}")
        row = {"fixture": folder.name, "prompts": len(prompts), "f32_max_abs": worst}
        lines.append(json.dumps(head | row | {"bf16_rel": ours, "bf16_rel_transformers": theirs}))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
