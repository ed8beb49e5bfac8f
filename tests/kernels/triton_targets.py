"""Compile the Triton kernels for GPUs that are not here; needs neither a GPU nor a driver.

    python tests/kernels/triton_targets.py [--sm 80 90 120] [--block first|last|all]

A JSON line for each kernel, block and target: registers, bytes spilled (stack), shared memory, tensor-core
instructions. Exit code 1 when one spills, does not use tensor cores, or needs more shared memory than the target has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # it would replace the kernels by what cannot be compiled
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp4ward.kernels import triton_experts, triton_linear

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may have; CUDA programming guide
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Types of the arguments, and how many trailing ones are compile-time constants, as the ops pass them for bf16.
POINTERS = {
    "x": "*bf16", "h": "*bf16", "y": "*bf16", "glob": "*fp32", "gate_glob": "*fp32", "up_glob": "*fp32",
    "down_glob": "*fp32", "part": "*fp32", "expert_B": "*i32", "first_B": "*i32", "end_B": "*i32", "order_P": "*i32",
    "weight_Tk": "*fp32", "ids_Tk": "*i64", "ids_P": "*i64",
    **dict.fromkeys(("packed", "scale", "gate", "gate_scale", "up", "up_scale", "down", "down_scale"), "*u8"),
}  # fmt: skip
UNALIGNED = ("tokens", "top_k", "pairs", "cells")


def compile_for(kernel, constants: dict[str, object], options: dict[str, int], sm: int):
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, "i32")
        if name not in constants and name not in UNALIGNED:
            aligned[(i,)] = [["tt.divisibility", 16]]
    split = constants.get("SPLIT", 1) > 1
    words = {"_linear": "x", "_gate_up": "x", "_down": "h"}.get(kernel.__name__.rpartition(".")[2])
    if split and words:
        signature[words] = "*i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def report(compiled, sm: int) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
        code = subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return {
        "sm": sm,
        "registers": int(found["REG"]),
        "spilled": int(found["STACK"]) + int(found["LOCAL"]) + len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "shared": compiled.metadata.shared,
        "mma": len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code)),
    }


def cases(which: str):
    """Kernel, its constants and launch options, for the first, the last or all of its blocks; then those without."""
    pick = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}[which]
    tables = [
        (triton_linear._linear, triton_linear.BLOCKS),
        (triton_experts._gate_up, triton_experts.GATED_BLOCKS),
        (triton_experts._down, triton_experts.BLOCKS),
    ]
    for kernel, blocks in tables:
        for block in blocks[pick]:
            constants = {"dtype": tl.bfloat16, **block.options()}
            options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
            if "SORTED" in kernel.arg_names:
                constants["SORTED"] = True
            yield kernel, constants, options
    yield triton_experts._sort, {"TOKENS": 8, "CHUNK": triton_experts.SORT_CHUNK}, {}
    yield triton_experts._sum, {"COLUMNS": triton_experts.SUM_COLUMNS}, {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, nargs="+", default=[80, 90, 120], choices=sorted(SHARED))
    parser.add_argument("--block", choices=("first", "last", "all"), default="all")
    args = parser.parse_args()
    bad = False
    for sm in args.sm:
        for kernel, constants, options in cases(args.block):
            row = report(compile_for(kernel, constants, options, sm), sm)
            idle = "SPLIT" in constants and not row["mma"]
            bad |= bool(row["spilled"]) or idle or row["shared"] > SHARED[sm] * 1024
            sizes = {name: value for name, value in constants.items() if isinstance(value, int)}
            print(json.dumps({"kernel": kernel.__name__, **sizes, **options, **row}), flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
