"""The forward passes, one file an architecture, read like a paper. facts.ARCHITECTURES names the file."""

from __future__ import annotations

import importlib
from types import ModuleType

from fp4ward.facts import ARCHITECTURES

MODELS = {name: f"fp4ward.models.{name}" for name in sorted(set(ARCHITECTURES.values()))}


def load(name: str) -> ModuleType:
    """The module with `build` and `Model` of this architecture."""
    return importlib.import_module(MODELS[name])
