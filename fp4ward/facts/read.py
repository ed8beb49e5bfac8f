"""Values of config.json, checked while they are read: each wrong one is a UserError with its key. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4ward.errors import UserError, shown


def whole(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size. UserError where it is missing without a default, or no whole number from 1 to 2^31-1."""
    value = text.get(key, default)
    if value is None:
        raise UserError(f"config.json: '{key}' is missing from the text config")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise UserError(f"config.json: '{key}' is {shown(value)}, a whole number from 1 to 2^31-1 is expected")
    return value


def positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise UserError(f"config.json: '{key}' is {shown(value)}, a positive number is expected")
    return float(value)


def only(text: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]]) -> None:
    """UserError for a key whose value is not among those that the forward computes."""
    for key, allowed in values.items():
        if key in text and text[key] not in allowed:
            raise UserError(
                f"config.json: {key}={shown(text[key])} is not supported for this architecture, only {allowed[0]!r}"
            )


def switch(key: str, value: Any) -> bool:
    """True or false; absent is false."""
    if value is not None and not isinstance(value, bool):
        raise UserError(f"config.json: '{key}' is {shown(value)}, true or false is expected")
    return bool(value)


def dtype(*configs: Mapping[str, Any]) -> str:
    """The model's own type, under its newer or its older name."""
    return str(next(filter(None, (c.get(k) for c in configs for k in ("dtype", "torch_dtype"))), "bfloat16"))


def multiples(cfg: Any, *pairs: tuple[str, str]) -> None:
    """UserError unless each second field of `cfg` is a multiple of the first."""
    for part, of in pairs:
        if getattr(cfg, of) % getattr(cfg, part):
            raise UserError(f"config.json: {of}={getattr(cfg, of)} is no multiple of {part}={getattr(cfg, part)}")
