"""Where more samples per round stop paying: core.tuning.goodput."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.core import dealing
from pliant.core.tuning import goodput
from pliant.core.tuning.pace import Pace, Pacing

REFERENCE = 64


@st.composite
def groups(draw: st.DrawFn) -> tuple[Pacing, list[int]]:
    members = draw(st.integers(2, 5))
    each = {"min_size": members, "max_size": members}
    paces = draw(st.lists(st.floats(10.0, 2000.0), **each))
    sizes = draw(st.lists(st.integers(1, 64), **each))
    times = st.floats(1e-4, 0.5)
    return Pacing(tuple(Pace(pace, 1.0) for pace in paces), 0.1, sum_s=draw(times), cost_s=draw(times)), sizes


@given(groups(), st.floats(0.0, 1e6), st.floats(1.0, 1e6))
def test_no_batch_has_a_higher_goodput_than_the_best(
    group: tuple[Pacing, list[int]], noise_scale: float, other: float
) -> None:
    pacing, sizes = group
    best = goodput.best_batch(pacing, sizes, noise_scale)
    if best <= 0.0:
        # No noise, and a round costs more than all that it waits for: the smaller the better.
        return

    def of(batch: float) -> float:
        return goodput.goodput(batch, pacing, sizes, REFERENCE, noise_scale)

    assert of(best) >= of(other) * (1.0 - 1e-9)
    # One maximum: the goodput falls to both sides of it.
    assert of(best / 2) <= of(best / 1.4) * (1.0 + 1e-9) and of(best * 2) <= of(best * 1.4) * (1.0 + 1e-9)


@given(groups(), st.floats(0.0, 1e6), st.one_of(st.none(), st.integers(1, 10**6)))
def test_the_answer_is_bounded_below_and_moves_by_more_than_a_tenth(
    group: tuple[Pacing, list[int]], noise_scale: float, before: int | None
) -> None:
    pacing, sizes = group
    answer = goodput.paying(before, pacing, sizes, REFERENCE, noise_scale)
    assert answer is not None
    fresh = goodput.paying(None, pacing, sizes, REFERENCE, noise_scale)
    assert fresh is not None and fresh >= max(REFERENCE, max(sizes) * len(sizes))
    assert answer == goodput.paying(answer, pacing, sizes, REFERENCE, noise_scale)
    if before is not None and answer != before:
        assert answer == fresh and not before / 1.1 <= fresh <= before * 1.1
    # Micro-batches stay whole, and nobody's contribution is cut off before the shortest round is over.
    assert dealing.micro_batch_sizes(pacing, 2 * fresh, sizes) == dealing.micro_batch_sizes(pacing, None, sizes)
    shortest_s = goodput.shortest_s(pacing, sizes) - pacing.cost_s
    limits = dealing.contribution_limits(pacing, 2 * fresh, len(sizes))
    assert all(limit >= pace * shortest_s - 1 for limit, pace in zip(limits, pacing.paces(), strict=True))


def test_nothing_is_bounded_before_anything_is_known_nor_where_all_is_noise() -> None:
    pacing = Pacing((Pace(100.0, 1.0), Pace(50.0, 1.0)), 0.1, 0.01, 0.01)
    assert goodput.paying(None, pacing, [4, 4], REFERENCE, None) is None
    assert goodput.paying(700, pacing, [4, 4], REFERENCE, None) == 700
    assert goodput.paying(700, pacing, [4, 4], REFERENCE, math.inf) is None
    assert goodput.paying(None, Pacing((Pace(), Pace())), [4, 4], REFERENCE, 100.0) is None


def test_more_noise_and_dearer_rounds_want_larger_batches() -> None:
    def best(noise_scale: float, cost_s: float) -> int | None:
        pacing = Pacing((Pace(1000.0, 1.0), Pace(1000.0, 1.0)), 0.1, 0.001, cost_s)
        return goodput.paying(None, pacing, [4, 4], 8, noise_scale)

    assert best(1000.0, 0.01) == math.ceil(math.sqrt(0.01 * 2000.0 * 1000.0))
    assert best(4000.0, 0.01) == pytest.approx(2 * (best(1000.0, 0.01) or 0), abs=1)
    assert best(1000.0, 0.04) == pytest.approx(2 * (best(1000.0, 0.01) or 0), abs=1)


def test_patience_ends_where_more_samples_do_not_pay() -> None:
    pacing = Pacing((Pace(1000.0, 1.0), Pace(1000.0, 1.0)), 0.1, 0.001, 0.01)
    assert dealing.patience_s(pacing, [128, 128]) == pytest.approx(0.5)
    assert dealing.patience_s(pacing, [128, 128], 400) == pytest.approx(0.2)
    assert dealing.patience_s(pacing, [128, 128], 40_000) == pytest.approx(0.5)


@given(st.floats(1.0, 1e5), st.floats(1.0, 1e6))
def test_efficiency_is_one_at_the_reference_and_falls_with_the_batch(batch: float, noise_scale: float) -> None:
    assert goodput.efficiency(REFERENCE, REFERENCE, noise_scale) == 1.0
    assert goodput.efficiency(batch, REFERENCE, math.inf) == 1.0
    assert goodput.efficiency(2 * batch, REFERENCE, noise_scale) < goodput.efficiency(batch, REFERENCE, noise_scale)
    # Twice the samples are never worth less together, and never more than twice.
    once, twice = (size * goodput.efficiency(size, REFERENCE, noise_scale) for size in (batch, 2 * batch))
    assert once <= twice <= 2 * once
