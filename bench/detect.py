"""Does accuracy notice a wrong number? Plants faults into a model and evaluates each, on a CPU.

    python bench/detect.py [MODEL] [--count 24] [--tasks arithmetic,recall] [--globals] [--out FILE]

The faults are those of tests/models/faults.py: what engines got wrong in public. One row a fault: the accuracy of each
family, with the 95 % interval of the total. With --globals the faults are instead the doubled global scale of every
projection outside the routed experts, one at a time. MODEL is one that learned the task families (demo/).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.common import head, write_lines  # noqa: E402
from fp4ward import LLM  # noqa: E402
from fp4ward.evals import run  # noqa: E402
from tests.models.faults import FAULTS, faulty  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--count", type=int, default=24, help="questions a family")
    parser.add_argument("--tasks", default="arithmetic,recall,sorting,copying,choice")
    parser.add_argument("--globals", action="store_true", help="double each projection's global scale in turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    questions = run.plan(args.tasks.split(","), args.count, False, 0)
    about = head(device="cpu")
    lines = []
    names = list(FAULTS)
    if args.globals:
        formats = LLM(args.model, device="cpu", show_progress=False).formats
        names = ["none", *(n for n, f in formats.items() if f.name == "nvfp4" and ".experts." not in n)]
    for name in names:
        with faulty(name, args.model, max_num_seqs=32) as llm:
            tallies = run.ask(llm, name, questions).tallies()
        low, high = tallies["total"].interval
        shown = "  ".join(f"{family} {100 * t.accuracy:5.1f}" for family, t in tallies.items())
        print(f"{name:40} {shown}  ({100 * low:.1f} to {100 * high:.1f})", flush=True)
        lines.append(about | {"fault": name} | {f: round(t.accuracy, 4) for f, t in tallies.items()})
    write_lines(args.out, lines)


if __name__ == "__main__":
    main()
