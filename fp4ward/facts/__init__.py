"""Per architecture, what planning and loading need to know, without torch: config, names, weights, placement, state."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fp4ward.errors import UserError, one_line, shown
from fp4ward.parallel.placement import cut

# config.json "architectures" -> module with the facts; fp4ward.models has the forward under the same module name.
ARCHITECTURES = {
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "NemotronHForCausalLM": "nemotron_h",
}


@dataclass(frozen=True)
class PagedKv:
    """State of an attention layer: K and V of every past token, in pages. Widths on this rank."""

    heads: int
    head_dim: int


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer's state, one slot a sequence: last `conv[1]` inputs of `conv[0]` channels, and `ssm` in f32."""

    conv: tuple[int, int]
    ssm: tuple[int, ...]


StateSpec = PagedKv | Recurrent
STATELESS = Recurrent((0, 0), (0, 0, 0))  # a layer that keeps nothing of the past


def model_class(config: Mapping[str, Any]) -> str:
    """config.json's first known architecture, a key of ARCHITECTURES. UserError with the list of known ones."""
    found = config.get("architectures")
    if not isinstance(found, list) or not all(isinstance(a, str) for a in found):
        raise UserError("config.json: 'architectures' is missing or no list of names, so the model cannot be told")
    for name in found:
        if name in ARCHITECTURES:
            return name
    raise UserError(
        f"config.json: architecture {one_line(', '.join(found) or '(none)')} is not supported; "
        f"supported are {', '.join(sorted(ARCHITECTURES))}"
    )


def architecture(config: Mapping[str, Any]) -> str:
    """Name of the module of this model, in facts and in models."""
    return ARCHITECTURES[model_class(config)]


def load(config: Mapping[str, Any]) -> ModuleType:
    """The facts module of this model."""
    return importlib.import_module(f"fp4ward.facts.{architecture(config)}")


def has_forward(config: Mapping[str, Any]) -> bool:
    """Whether fp4ward.models has this model's forward. Looks for the file; nothing is imported."""
    return importlib.util.find_spec(f"fp4ward.models.{architecture(config)}") is not None


def kv_heads(queries: int, heads: int, rank: int, ranks: int) -> int:
    """KV heads on `rank`. UserError where its query heads would need others: query head i of a rank reads its KV head
    i // (its query heads / its KV heads), whatever the cut."""
    (q0, q1), (k0, k1) = cut(queries, 1, rank, ranks), cut(heads, 1, rank, ranks, "replicate")
    each, group = queries // heads, (q1 - q0) // (k1 - k0)
    if (q1 - q0) % (k1 - k0) or any((q0 + i) // each != k0 + i // group for i in range(q1 - q0)):
        raise UserError(
            f"{queries} query heads and {heads} KV heads cannot be cut over {ranks} ranks: queries {q0}..{q1 - 1} of "
            f"rank {rank} need others than its KV heads {k0}..{k1 - 1}"
        )
    return k1 - k0


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """One id, a list of ids or null, as both JSON files spell the end tokens."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"{where} is {shown(value)}, token ids are expected")
    return tuple(ids)
