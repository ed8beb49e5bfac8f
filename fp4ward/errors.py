"""The one exception that users see: a sentence that says what, where and what to do."""

from __future__ import annotations


class UserError(Exception):
    """A fault in what the user gave (file, flag, prompt). The command line prints it without a stack trace.

    The message is one sentence: what was found, where (file, tensor, layer), what was expected, what to do. code: for
    programs, stable; only faults of a checkpoint that `fp4ward lint` tells apart have one.
    """

    def __init__(self, message: str = "", code: str = "") -> None:
        super().__init__(message)
        self.code = code


def stop(_where: str, fault: UserError) -> None:
    """What to do with a fault, unless the caller collects them: end at the first."""
    raise fault


def one_line(error: object) -> str:
    """Another library's words for the middle of a sentence: on one line, and not long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def shown(value: object) -> str:
    """Any value, as a user or a file gave it, in one short printable line."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # deep nesting; a whole number beyond Python's limit of digits
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= 80 else text[:77] + "..."
