"""Shares by pace: core.shares."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.core.shares import apportion, cut, entitlements, shares

PACES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=12)
TOTALS = st.integers(0, 100_000)


@given(TOTALS, PACES)
def test_apportioned_numbers_add_up_and_lie_within_one_of_their_quota(total: int, paces: list[float]) -> None:
    parts = apportion(total, paces)
    assert sum(parts) == total
    weight = sum(map(Fraction, paces))
    for part, pace in zip(parts, paces, strict=True):
        assert part >= 0
        assert abs(part - total * Fraction(pace) / weight) < 1 + 1e-6


@given(TOTALS, PACES)
def test_a_faster_worker_never_gets_less(total: int, paces: list[float]) -> None:
    parts = apportion(total, sorted(paces))
    assert list(parts) == sorted(parts) or max(abs(a - b) for a, b in zip(parts, sorted(parts), strict=True)) <= 1


def test_without_any_quota_all_get_the_same() -> None:
    assert apportion(7, [0.0, 0.0, 0.0]) == (3, 2, 2)


@given(st.integers(1, 5000), PACES, st.integers(1, 2))
def test_shares_add_up_and_take_everybody_in_as_far_as_they_suffice(batch: int, paces: list[float], least: int) -> None:
    parts = shares(batch, paces, least)
    assert sum(parts) == batch
    working = max(1, min(len(paces), batch // least))
    assert all(part >= min(least, batch) for part in parts[:working])
    assert parts[working:] == (0,) * (len(paces) - working)


@given(st.integers(1, 5000), PACES, st.integers(1, 2))
def test_a_share_is_within_one_of_its_quota_or_gives_to_the_floor(batch: int, paces: list[float], least: int) -> None:
    working = max(1, min(len(paces), batch // least))
    parts, weight = shares(batch, paces, least), math.fsum(paces[:working])
    quotas = [batch * pace / weight for pace in paces[:working]]
    lent = sum(max(0, least - math.floor(quota)) for quota in quotas)
    for part, quota in zip(parts, quotas, strict=False):
        assert part == least or quota - 1 - lent - 1e-6 < part < quota + 1 + 1e-6


@given(st.integers(0, 5000), st.data())
def test_entitlements_share_out_the_pool_and_end_as_even_as_possible(pool: int, data: st.DataObject) -> None:
    paces = data.draw(st.lists(st.floats(0.5, 500.0), min_size=1, max_size=6))
    held = data.draw(st.lists(st.integers(0, 500), min_size=len(paces), max_size=len(paces)))
    parts = entitlements(pool, held, paces)
    assert sum(parts) == pool
    assert min(parts) >= 0
    given_to = [m for m, part in enumerate(parts) if part > 0]
    # Nobody is given a sample that another worker would have finished clearly earlier.
    for m in given_to:
        ends_s = (held[m] + parts[m]) / paces[m]
        for other, pace in enumerate(paces):
            assert ends_s <= (held[other] + parts[other]) / pace + 1 / paces[m] + 1 / pace + 1e-6


@pytest.mark.parametrize(
    ("pool", "held", "paces", "expected"),
    [
        (0, [3, 0], [1.0, 1.0], (0, 0)),
        (10, [0, 0], [4.0, 1.0], (8, 2)),
        (10, [100, 0], [1.0, 1.0], (0, 10)),
        (4, [4, 0], [1.0, 1.0], (0, 4)),
    ],
)
def test_entitlements_by_hand(pool: int, held: list[int], paces: list[float], expected: tuple[int, ...]) -> None:
    assert entitlements(pool, held, paces) == expected


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_a_cut_is_near_equal_and_makes_no_crumb_where_it_can_be_helped(samples: int, size: int) -> None:
    pieces = cut(samples, size)
    assert sum(pieces) == samples
    assert max(pieces) <= size
    assert max(pieces) - min(pieces) <= 1
    assert list(pieces) == sorted(pieces, reverse=True)
    assert min(pieces) > 1 or samples == 1 or size <= 2
