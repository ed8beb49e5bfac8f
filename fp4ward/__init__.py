"""fp4ward runs NVFP4 checkpoints of hybrid mixture-of-experts language models on GPUs without FP4 tensor cores.

    from fp4ward import LLM, SamplingParams

Importing the package loads neither torch nor Triton nor CUDA: a name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp4ward.llm import LLM
    from fp4ward.runtime.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_LAZY = {"LLM": "fp4ward.llm", "SamplingParams": "fp4ward.runtime.request"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fp4ward' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
