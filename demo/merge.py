"""Average two checkpoints of the same shape: `python demo/merge.py FROM TO --share 0.6 --out OUT`.

Each weight is (1 - share) of FROM and share of TO, in bf16. FROM is what TO's training started from: the average keeps
most of what the further training taught, and more of FROM's manners on input that neither was trained on.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


class Refused(Exception):
    """One sentence about what was given."""


def run(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("start", type=Path, metavar="FROM")
    parser.add_argument("end", type=Path, metavar="TO")
    parser.add_argument("--share", type=float, required=True, help="of TO, from 0 to 1")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if not 0 <= args.share <= 1:  # so NaN too
        raise Refused(f"--share {args.share}: a number from 0 to 1 is expected")
    start, end = ({f: load_file(f) for f in sorted(p.glob("*.safetensors"))} for p in (args.start, args.end))
    for folder, files in ((args.start, start), (args.end, end)):
        if not files:
            raise Refused(f"{folder}: there is no folder of this name that holds safetensors files")
    before = {k: v for tensors in start.values() for k, v in tensors.items()}
    for name, v in ((k, v) for tensors in end.values() for k, v in tensors.items()):
        if name not in before or before[name].shape != v.shape:
            raise Refused(f"{args.start}: {name} is missing or of another shape than in {args.end}")
    args.out.mkdir(parents=True, exist_ok=True)
    for file in args.end.iterdir():
        if file not in end:
            shutil.copy(file, args.out / file.name)
            continue
        mixed = {k: torch.lerp(before[k].float(), v.float(), args.share) for k, v in end[file].items()}
        save_file({k: v.bfloat16() for k, v in mixed.items()}, args.out / file.name, metadata={"format": "pt"})


def main(argv: list[str] | None = None) -> int:
    try:
        run(argv)
    except (Refused, OSError, SafetensorError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
