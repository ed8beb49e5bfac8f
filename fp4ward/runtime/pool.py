"""Accounting of pages and slots: what is taken must come back, once. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Pool:
    """Numbers 0 .. size-1, taken and given back. Lowest first, so that runs are repeatable."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` numbers, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        out = [self._free.pop() for _ in range(count)]
        self._taken.update(out)
        return out

    def give(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            if n not in self._taken:
                raise RuntimeError(f"{n} was given back twice or never taken")
            self._taken.discard(n)
            self._free.append(n)
