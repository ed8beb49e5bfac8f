"""Accounting of pages and slots: what is taken must come back, once. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Pool:
    """Numbers 0 .. size-1, taken and given back. Lowest first, so that runs are repeatable.

    Takes memory for what was ever in use only: a long context without attention layers has billions of pages.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._returned: list[int] = []
        self._fresh = 0  # the first number that was never taken
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._returned) + self.size - self._fresh

    def take(self, count: int) -> list[int] | None:
        """`count` numbers, or None (and nothing taken) when fewer are free."""
        if count > self.free:
            return None
        out = [self._returned.pop() for _ in range(min(count, len(self._returned)))]
        new = count - len(out)
        out += range(self._fresh, self._fresh + new)
        self._fresh += new
        self._taken.update(out)
        return out

    def give(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            if n not in self._taken:
                raise RuntimeError(f"{n} was given back twice or never taken")
            self._taken.discard(n)
            self._returned.append(n)
