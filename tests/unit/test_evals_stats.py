"""Intervals and the paired test, against closed forms, tables, and counting every case."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from fp4ward.evals.stats import Z95, Paired, wilson


def test_the_quantile() -> None:
    assert pytest.approx(1.959963984540054, abs=1e-12) == Z95


@pytest.mark.parametrize("asked", [1, 7, 48, 300])
def test_wilson_ends_where_the_score_test_does(asked: int) -> None:
    """The interval holds exactly the p with |right/n - p| <= z sqrt(p (1 - p) / n)."""
    for right in range(asked + 1):
        low, high = wilson(right, asked)
        assert 0 <= low <= right / asked <= high <= 1
        for p in (low, high):
            if 0 < p < 1:
                assert abs(right / asked - p) == pytest.approx(Z95 * math.sqrt(p * (1 - p) / asked), rel=1e-9)


def test_wilson_known_values() -> None:
    # Closed forms at the ends: z^2/(n+z^2); and 81 of 263 from Newcombe (1998), table I.
    assert wilson(0, 48) == (0.0, pytest.approx(Z95**2 / (48 + Z95**2)))
    assert wilson(48, 48) == (pytest.approx(48 / (48 + Z95**2)), 1.0)
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)


@pytest.mark.parametrize(("right", "asked"), [(0, 0), (3, 2), (-1, 4)])
def test_wilson_refuses_what_is_no_proportion(right: int, asked: int) -> None:
    with pytest.raises(ValueError, match="right of"):
        wilson(right, asked)


def test_wilson_covers_95_of_100() -> None:
    """Coverage counted exactly over all outcomes; an approximate interval may miss 95 % by a little."""
    for n, p in itertools.product((48, 300), (0.25, 0.5, 0.8, 0.95)):
        inside = sum(
            math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1) if wilson(k, n)[0] <= p <= wilson(k, n)[1]
        )
        assert 0.925 < inside < 0.975, (n, p, inside)


@pytest.mark.parametrize("changed", range(9))
def test_the_exact_test_counts_all_ways_to_change(changed: int) -> None:
    for gained in range(changed + 1):
        lost = changed - gained
        ways = list(itertools.product((0, 1), repeat=changed))
        extreme = sum(abs(2 * sum(w) - changed) >= abs(gained - lost) for w in ways)
        assert Paired(gained, lost, 50).p_value == pytest.approx(min(1.0, extreme / len(ways)))


def test_paired_known_values() -> None:
    # Exact McNemar: 2 * P(X <= 6) for X ~ Bin(18, 1/2) = 0.23788; 1 of 10: 22/1024.
    assert Paired(6, 12, 100).p_value == pytest.approx(0.237884521484375)
    assert Paired(1, 9, 100).p_value == pytest.approx(22 / 1024)
    assert Paired(5, 5, 100).p_value == 1.0
    assert Paired(0, 0, 100).p_value == 1.0
    assert Paired(0, 1500, 2000).p_value < 1e-300  # no overflow
    assert Paired(30, 10, 200).difference == pytest.approx(0.1)


def test_the_interval_of_the_difference() -> None:
    """Bonett and Price's formula, its symmetry, and its limits."""
    low, high = Paired(30, 10, 200).interval
    p, q, n = 31 / 202, 11 / 202, 202
    half = Z95 * math.sqrt((p + q - (p - q) ** 2) / n)
    assert (low, high) == pytest.approx((p - q - half, p - q + half))
    assert Paired(10, 30, 200).interval == pytest.approx((-high, -low))
    low, high = Paired(7, 7, 200).interval
    assert low == pytest.approx(-high) and low < 0
    assert Paired(0, 0, 1000).interval[1] < 0.004  # equal runs: a narrow interval, not an empty one
    assert Paired(1, 0, 1).interval[1] == 1.0


def test_the_interval_of_the_difference_covers_95_of_100() -> None:
    rng = random.Random(0)
    for up, down, n in ((0.02, 0.03, 300), (0.1, 0.05, 120), (0.3, 0.2, 48)):
        inside = 0
        for _ in range(2000):
            draws = rng.choices((1, -1, 0), weights=(up, down, 1 - up - down), k=n)
            low, high = Paired(draws.count(1), draws.count(-1), n).interval
            inside += low <= up - down <= high
        assert 0.93 < inside / 2000 < 0.99, (up, down, n)


def test_the_record_of_a_comparison() -> None:
    record = Paired(3, 1, 40).record()
    assert {k: record[k] for k in ("gained", "lost", "asked")} == {"gained": 3, "lost": 1, "asked": 40}
    assert record["difference"] == pytest.approx(0.05) and record["p_value"] == pytest.approx(0.625)
    assert record["interval_95"][0] < 0.05 < record["interval_95"][1]
