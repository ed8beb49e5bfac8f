"""Intervals for an accuracy and for the difference of two runs over the same questions. Standard library only."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

Z95 = NormalDist().inv_cdf(0.975)


def wilson(right: int, asked: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927): inside 0..1, and sensible where all or none are right."""
    if not 0 <= right <= asked or asked == 0:
        raise ValueError(f"{right} right of {asked}")
    p, z2 = right / asked, Z95 * Z95
    middle = p + z2 / (2 * asked)
    half = Z95 * math.sqrt(p * (1 - p) / asked + z2 / (4 * asked * asked))
    scale = 1 + z2 / asked
    # At the ends the formula gives exactly 0 and 1, floating point not quite.
    return (middle - half) / scale if right else 0.0, (middle + half) / scale if right < asked else 1.0


@dataclass(frozen=True)
class Paired:
    """Two runs over the same `asked` questions: `gained` are right only in the first, `lost` only in the second."""

    gained: int
    lost: int
    asked: int

    @property
    def difference(self) -> float:
        """Accuracy of the first run minus that of the second."""
        return (self.gained - self.lost) / self.asked

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference (Bonett and Price 2012): a question is added to each kind of change."""
        n = self.asked + 2
        up, down = (self.gained + 1) / n, (self.lost + 1) / n
        half = Z95 * math.sqrt((up + down - (up - down) ** 2) / n)
        return max(-1.0, up - down - half), min(1.0, up - down + half)

    def record(self) -> dict[str, Any]:  # JSON values
        return asdict(self) | {"difference": self.difference, "interval_95": self.interval, "p_value": self.p_value}

    @property
    def p_value(self) -> float:
        """Exact McNemar test: how likely so unequal changes are if a change goes either way with equal chance."""
        changed, fewer = self.gained + self.lost, min(self.gained, self.lost)
        tail = sum(math.comb(changed, k) for k in range(fewer + 1))
        return min(1.0, 2 * tail / 2**changed)
