"""The forward passes, one file an architecture, read like a paper. facts.ARCHITECTURES names the file."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from fp4ward.errors import UserError


def load(name: str) -> ModuleType:
    """The module with `Model` of this architecture (facts.architecture gives its name). UserError if there is none."""
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise UserError(f"models of {name} can be planned and linted, but not run yet: their forward is not written")
    return importlib.import_module(f"{__name__}.{name}")
