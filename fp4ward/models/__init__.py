"""The forward passes, one file an architecture, read like a paper. facts.ARCHITECTURES names the file."""

from __future__ import annotations

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """The module with `Model` of this architecture (facts.architecture gives its name)."""
    return importlib.import_module(f"fp4ward.models.{name}")
