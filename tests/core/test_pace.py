"""How fast each worker is, from its tickets: core.tuning.pace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.core.tickets import Kind, Ticket
from pliant.core.tuning.pace import forgiven, measure, unmeasured


def ticket(samples: int, busy_s: float, idle_s: float = 0.0, sum_s: float = 0.1) -> Ticket:
    return Ticket(1, 1, 1, Kind.TRAIN, samples=samples, busy_s=busy_s, idle_s=idle_s, sum_s=sum_s)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.0, 9.0)), min_size=1, max_size=20), st.floats(0.5, 1e4))
def test_a_constant_speed_is_measured_exactly_however_long_it_waits(
    contributions: list[tuple[int, float]], speed: float
) -> None:
    pacing = unmeasured(1)
    for samples, idle_s in contributions:
        pacing = measure(pacing, [ticket(samples, samples / speed, idle_s)])
    assert pacing.paces()[0] == pytest.approx(speed, rel=1e-9)


@given(st.floats(1.0, 1e3), st.floats(1.0, 1e3))
def test_a_change_of_speed_is_followed_within_a_few_rounds(old: float, new: float) -> None:
    pacing = unmeasured(1)
    for speed in [old] * 10 + [new] * 5:
        pacing = measure(pacing, [ticket(round(100 * speed), 100.0)])
    assert abs(pacing.paces()[0] - new) <= abs(old - new) / 16 + 0.02


def test_before_the_first_contribution_all_count_alike_and_later_as_the_mean_of_the_others() -> None:
    pacing = unmeasured(3)
    assert not pacing.measured
    assert len(set(pacing.paces())) == 1
    pacing = measure(pacing, [ticket(10, 1.0), ticket(30, 1.0), ticket(0, 0.0)])
    assert pacing.measured
    assert pacing.paces() == (10.0, 30.0, 20.0)


def test_an_empty_round_changes_nothing() -> None:
    pacing = measure(unmeasured(2), [ticket(10, 1.0), ticket(30, 2.0, 0.5)])
    assert measure(pacing, [ticket(0, 0.0), ticket(0, 1.0)]) == pacing


def test_a_round_lasts_as_long_as_its_slowest_and_a_summation_as_for_the_last_to_hand_in() -> None:
    pacing = measure(unmeasured(2), [ticket(10, 1.0, 0.25, sum_s=0.75), ticket(30, 2.0, 0.5, sum_s=0.125)])
    assert pacing.round_s == 2.5
    assert pacing.sum_s == 0.125


def test_who_is_dealt_nothing_is_forgiven_in_time_and_no_more_than_the_mean() -> None:
    """One exchange in which a worker had to wait does not leave it without samples for ever."""
    pacing = measure(unmeasured(2), [ticket(8, 0.02), ticket(3, 1.2)])
    slow, idle = pacing.paces()[1], [ticket(8, 0.02), ticket(0, 0.0)]
    for _ in range(40):
        before = pacing.paces()[1]
        pacing = forgiven(measure(pacing, idle), idle)
        assert before <= pacing.paces()[1] <= sum(pacing.paces()) / 2 + 1e-9
    assert pacing.paces()[1] > 50 * slow
    assert forgiven(pacing, [ticket(8, 0.02), ticket(8, 0.02)]) == pacing


def test_means_are_exact_so_that_all_versions_of_python_decide_alike() -> None:
    # 2**53 + 1 + 1 loses both in a sum from left to right, and none in one that compensates.
    pacing = measure(unmeasured(4), [ticket(2**53, 1.0), ticket(1, 1.0), ticket(1, 1.0), ticket(0, 0.0)])
    assert pacing.paces()[3] == (2**53 + 2) / 3 != 2**53 / 3
