"""What planning needs to know about a GPU, as rows. Standard library only.

Sources: NVIDIA's datasheets and architecture whitepapers, dense rates (half of those "with sparsity") with f32
accumulation, which GeForce cards and the L40 do at half their 16-bit rate; what was measured by us is marked and
replaces the datasheet. Memory is what a program can see of it (of cards that can switch ECC as delivered: off on RTX),
less than the name on the box and up to a GiB less than nvidia-smi shows: on an H200 139.7 GiB of "141 GB".
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from dataclasses import dataclass, replace

from fp4ward.errors import UserError, shown

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One device. sm: compute capability as two digits (90 is Hopper), 0 for a CPU. memory: bytes. bandwidth: bytes/s.
    bf16, fp8, f32, fp4: FLOP/s of products, 0 where there are no such units.
    source: where bandwidth and rates come from."""

    name: str
    sm: int
    memory: int
    bandwidth: float
    bf16: float
    fp8: float
    f32: float
    fp4: float = 0.0
    source: str = "datasheet"

    @property
    def cpu(self) -> bool:
        return self.sm == 0

    @property
    def summary(self) -> str:
        kind = f"SM {self.sm // 10}.{self.sm % 10}, {'' if self.fp4 else 'no '}FP4 cores"
        rate = f"{(self.bf16 or self.f32) / 1e12:,.4g} TFLOP/s {'bf16' if self.bf16 else 'f32'}"
        size = f"{self.memory / GIB:.1f} GiB, {self.bandwidth / 1e9:,.0f} GB/s"
        return f"{self.name} ({'CPU' if self.cpu else kind}, {size}, {rate}; {self.source})"


def _row(
    name: str, sm: int, gib: float, gbs: float, bf16: float, fp8: float, f32: float, fp4: float = 0.0,
    source: str = "datasheet",
) -> Hardware:  # fmt: skip
    return Hardware(name, sm, int(gib * GIB), gbs * 1e9, bf16 * 1e12, fp8 * 1e12, f32 * 1e12, fp4 * 1e12, source)


ROWS = (
    #    name               SM   GiB    GB/s  bf16  fp8   f32 TFLOP/s
    _row("A100", 80, 79.1, 2039, 312, 0, 19.5),  # SXM, 80 GB
    _row("A100-40", 80, 39.4, 1555, 312, 0, 19.5),  # SXM and PCIe
    _row("A30", 80, 23.5, 933, 165, 0, 10.3),
    _row("A10", 86, 22.0, 600, 125, 0, 31.2),  # nvidia-smi: 23028 MiB
    _row("A10G", 86, 22.0, 600, 70, 0, 35),  # as AWS prints it
    _row("A40", 86, 44.4, 696, 149.7, 0, 37.4),  # nvidia-smi: 46068 MiB
    _row("RTX-A5000", 86, 23.5, 768, 111.1, 0, 27.8),  # nvidia-smi: 24564 MiB
    _row("RTX-A6000", 86, 47.4, 768, 154.8, 0, 38.7),  # nvidia-smi: 49140 MiB
    _row("RTX-3090", 86, 23.5, 936, 71, 0, 35.6),  # GA102 whitepaper; nvidia-smi: 24576 MiB
    _row("RTX-3090-Ti", 86, 23.5, 1008, 80, 0, 40),
    _row("L4", 89, 22.0, 300, 121, 242, 30.3),  # nvidia-smi: 23034 MiB
    _row("L40", 89, 44.4, 864, 181, 362, 90.5),
    _row("L40S", 89, 44.4, 864, 362, 733, 91.6),  # nvidia-smi: 46068 MiB
    _row("RTX-6000-Ada", 89, 47.4, 960, 364, 728, 91.1),  # nvidia-smi: 49140 MiB
    _row("RTX-4080", 89, 15.5, 717, 97.5, 195, 48.7),  # Ada whitepaper, as the next; nvidia-smi: 16376 MiB
    _row("RTX-4090", 89, 23.5, 1008, 165, 330, 82.6),
    _row("H20", 90, 95.0, 4000, 148, 296, 44),  # no public datasheet: as resellers and profilers of it print them
    _row("H20-141", 90, 139.7, 4800, 148, 296, 44),  # HBM3e, else as H20
    _row("H100", 90, 79.1, 3350, 989, 1979, 66.9),  # SXM
    _row("H100-PCIe", 90, 79.1, 2000, 756, 1513, 51.2),
    _row("H100-NVL", 90, 93.0, 3930, 835, 1671, 60),
    # Datasheet 4,800 GB/s and 989 TFLOP/s. Measured 2026-11-30 with torch 2.11: a reduction over 2 GiB reads 4.47 TB/s,
    # a bf16 product of random numbers (cuBLAS) runs at 690 to 800 TFLOP/s.
    _row("H200", 90, 139.7, 4470, 800, 1979, 66.9, source="measured; fp8 and f32 from the datasheet"),
    _row("GH200", 90, 95.0, 4000, 989, 1979, 66.9),  # nvidia-smi: 97280 MiB
    _row("GH200-144", 90, 142.0, 4900, 989, 1979, 66.9),
    # Datasheets say up to 8 TB/s; the driver's bus width (7680 bits) and clock (3996 MHz) make 7.67.
    _row("B200", 100, 178.0, 7670, 2250, 4500, 80, fp4=9000),
    _row("B300", 103, 268.0, 7670, 2250, 4500, 75, fp4=14000),  # Blackwell Ultra; nvidia-smi: 275040 MiB
    _row("RTX-5090", 120, 31.3, 1792, 209, 419, 104.8, fp4=1676),  # nvidia-smi: 32607 MiB
    _row("RTX-PRO-6000", 120, 94.9, 1792, 504, 1008, 126, fp4=2015),  # Blackwell, 600 W; nvidia-smi: 97887 MiB
    _row("GB10", 121, 119.6, 273, 125, 250, 31, fp4=500),  # 1 PFLOP/s sparse FP4; memory shared with the CPU
    # A small machine, for orders of magnitude: 16 GiB, two channels of DDR4, a few AVX2 cores.
    _row("cpu", 0, 16.0, 20, 0, 0, 0.2, source="a small machine, assumed"),
)
UNITS = {"sm": 1.0, "mem": GIB, "bw": 1e9, "bf16": 1e12, "fp8": 1e12, "f32": 1e12, "fp4": 1e12}


def parse(text: str) -> Hardware:
    """A row by its name in any spelling ("h200", "NVIDIA H100 PCIe", "rtx5090"), numbers ("sm=90,mem=141,bw=4800,
    bf16=989": GiB, GB/s, TFLOP/s; fp8, f32 and fp4 may follow), or a name with some numbers of its own
    ("H20,mem=141,bw=4800"). UserError with what is known."""
    name = ""
    numbers: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            if name or numbers or not key:
                raise UserError(f"--gpu {shown(text)}: {shown(key)} is no key=number such as mem=141")
            name = key
            continue
        if key not in UNITS or key in numbers or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", value):
            raise UserError(f"--gpu {shown(text)}: {shown(part)} is not one plain number for one of {', '.join(UNITS)}")
        if key == "sm":
            value = value.replace(".", "") if re.fullmatch("[0-9]{1,2}[.]?[0-9]", value) else "0"
            if not 50 <= int(value) <= 130:
                raise UserError(f"--gpu {shown(text)}: sm is a compute capability, such as 90 or 9.0, from 50 to 130")
        numbers[key] = float(value) * UNITS[key]
    if name:
        row = _named(name, numbers.get("mem", 0))
    else:
        missing = [key for key in ("sm", "mem", "bw", "bf16") if not numbers.get(key)]
        if missing:
            raise UserError(f"--gpu {shown(text)}: {missing[0]} is missing; sm, mem, bw and bf16 above 0 are needed")
        row = Hardware("custom", 0, 0, 0.0, 0.0, 0.0, numbers["bf16"] / 15)  # of f32 units a GPU has about this share
    for key, number in numbers.items():
        attribute = {"mem": "memory", "bw": "bandwidth"}.get(key, key)
        row = replace(row, **{attribute: type(getattr(row, attribute))(number)})
    if min(row.memory, row.bandwidth, row.f32) <= 0 or row.cpu != (row.bf16 == 0):
        raise UserError(f"--gpu {shown(text)}: memory, bandwidth and rates must be above 0, for a GPU sm and bf16 too")
    return replace(row, source=f"{row.source}, changed by --gpu" if name else "--gpu") if numbers else row


def _named(name: str, memory: float = 0) -> Hardware:
    """The row whose words are all in `name`, of several the one with most ("H100 PCIe" is more than "H100"), of those
    the one closest to `memory` (bytes) or to the GB in the name, which without `memory` must be the row's."""
    apart = re.sub(r"rtx|pro(?=\d)|\d(?=(ti|ada)\b)", r"\g<0> ", name.lower())
    apart = re.sub(r"(?<![a-z\d])(\d+)g(b|ib)?\b", r"\1", apart)  # of "A10G 24GB" the last
    words = {"141" if word == "3e" else word for word in re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", apart)}  # H20-3e
    sizes = {int(w) for w in words if re.fullmatch(r"\d{2,3}", w, re.A)} - {480}  # "GH200 480GB": of its CPU
    goal, found = memory / GIB or max(sizes, default=0), []
    for row in ROWS if not words & {"laptop", "mobile"} else ():
        parts = {w for w in row.name.lower().split("-") if w != "rtx" and not re.fullmatch(r"\d{2,3}", w)}
        if parts <= words:
            found.append((len(parts), -abs(row.memory / GIB - goal) if goal else 0, row))
    if not found and (sm := re.fullmatch(r"sm[_ ]?(\d{2,3})", name.lower())):
        raise UserError(f"--gpu {shown(name)}: give numbers: sm={sm[1]},mem=..,bw=..,bf16=.. (GiB, GB/s, TFLOP/s)")
    if not found:
        names, asked = {row.name.lower(): row.name for row in ROWS}, re.sub("nvidia|geforce", "", name.lower())
        near = difflib.get_close_matches("-".join(re.findall("[a-z0-9]+", asked)), names, 4, 0.5)
        close = f" (close are {', '.join(names[n] for n in near)})" * bool(near)
        raise UserError(
            f"--gpu {shown(name)} is not known{close}; known are {', '.join(names.values())} (--tp says how many), or "
            f"give numbers: sm=90,mem=141,bw=4800,bf16=989 (GiB, GB/s, TFLOP/s)"
        )
    row = max(found, key=lambda each: each[:2])[2]
    if not memory and any(abs(row.memory / GIB / size - 1) > 0.1 for size in sizes):
        raise UserError(
            f"--gpu {shown(name)}: the known {row.name} has {row.memory / GIB:.0f} GiB; give this one's own numbers "
            f"after the name: ,mem=..,bw=.. (GiB, GB/s)"
        )
    return row


def cpu() -> Hardware:
    """This machine's CPU: the row's rates, its own memory."""
    return replace(ROWS[-1], memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def seen(name: str, sm: int, memory: int) -> Hardware:
    """A GPU as torch sees it. One without a row runs what its SM can, and what is chosen by speed is by rates that are
    assumed. Its memory counts as seen, but for the few per cent that nvidia-smi counts and no program gets."""
    try:
        row = _named(name, memory)
    except UserError:
        row = Hardware(name, sm, memory, 5e11, 1e14, 1e14, 1e13, source="assumed: a GPU without a row")
    return replace(row, sm=sm, memory=row.memory if row.memory < memory < 1.05 * row.memory else memory)


def detect() -> Hardware:
    """The first GPU of this machine as the driver's own tool names it (no CUDA is started), else the CPU; its memory
    is what is really there."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        found = re.match(r"(.+), (\d+)\.(\d), (\d+)$", done.stdout, re.M) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError):
        found = None
    if found is None:
        return cpu()
    return seen(found[1], int(found[2] + found[3]), int(found[4]) * 2**20)
