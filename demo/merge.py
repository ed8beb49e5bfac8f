"""Average two checkpoints of the same shape: `python demo/merge.py FROM TO --share 0.6 --out OUT`.

Each weight is (1 - share) of FROM and share of TO, in bf16. FROM is what TO's training started from: the average keeps
most of what the further training taught, and more of FROM's manners on input that neither was trained on.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("start", type=Path, metavar="FROM")
    parser.add_argument("end", type=Path, metavar="TO")
    parser.add_argument("--share", type=float, required=True, help="of TO, from 0 to 1")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    before = {k: v for file in args.start.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in args.end.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, args.out / file.name)
            continue
        mixed = {k: torch.lerp(before[k].float(), v.float(), args.share) for k, v in load_file(file).items()}
        save_file({k: v.bfloat16() for k, v in mixed.items()}, args.out / file.name, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
