"""What `fp4ward env` prints: versions and hardware, for bug reports. Nothing here fails: what is unknown is None."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from fp4ward import __version__

PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface-hub", "jinja2", "rich", "transformers",
    "compressed-tensors",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Versions, GPUs and CPU as plain data (JSON). Sizes in bytes. Imports torch."""
    cuda, gpus = _cuda()
    return {
        "fp4ward": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": cuda,
        "gpus": gpus,
        "cpu": {
            "model": _search("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        "memory": {
            "total": _kib("MemTotal"),
            "available": _kib("MemAvailable"),
            "container_limit": _int(_search("/sys/fs/cgroup/memory.max", r"(\d+)")),
        },
    }


def render(info: dict[str, Any]) -> str:
    """`collect()`'s data as lines for people."""
    cuda, cpu, memory = info["cuda"], info["cpu"], info["memory"]
    rows = [("fp4ward", info["fp4ward"]), ("python", info["python"]), ("platform", info["platform"])]
    rows += [(name, version or "not installed") for name, version in info["packages"].items()]
    rows.append(("CUDA of torch", cuda["torch_cuda"] or cuda["problem"] or "none (a CPU build)"))
    rows.append(("NVIDIA driver", cuda["driver"] or "none found"))
    for i, gpu in enumerate(info["gpus"]):
        size = _gib(gpu["memory"])
        rows.append((f"GPU {i}", f"{gpu['name']}, SM {gpu['sm']}, {gpu['multiprocessors']} multiprocessors, {size}"))
    if not info["gpus"]:
        rows.append(("GPU", "none usable"))
    rows.append(("CPU", f"{cpu['model']}, {cpu['cores']} cores, {cpu['usable_cores']} usable here"))
    limit = memory["container_limit"]
    limited = f", limited to {_gib(limit)} by the container" if limit else ""
    rows.append(("memory", f"{_gib(memory['total'])}, {_gib(memory['available'])} available{limited}"))
    return "\n".join(f"{name + ':':<20}{value}" for name, value in rows)


def _cuda() -> tuple[dict[str, str | None], list[dict[str, Any]]]:
    driver = _search("/proc/driver/nvidia/version", r"Kernel Module\D*([\d.]+)")
    facts: dict[str, str | None] = {"torch_cuda": None, "driver": driver, "problem": None}
    gpus: list[dict[str, Any]] = []
    try:
        import torch

        facts["torch_cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            for i in range(torch.cuda.device_count()):
                p = torch.cuda.get_device_properties(i)
                gpus.append(
                    {
                        "name": p.name,
                        "sm": f"{p.major}.{p.minor}",
                        "memory": p.total_memory,
                        "multiprocessors": p.multi_processor_count,
                    }
                )
    except Exception as e:  # a broken torch is what a bug report should show
        facts["problem"] = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    return facts, gpus


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _search(file: str, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(file).read_text(errors="replace"))
    except OSError:
        return None
    return match[1].strip() if match else None


def _kib(key: str) -> int | None:
    value = _int(_search("/proc/meminfo", rf"{key}:\s*(\d+) kB"))
    return None if value is None else value * 1024


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def set_threads(count: int) -> None:
    """How many CPU threads torch uses in this process."""
    import torch

    torch.set_num_threads(count)
