"""Which delay is in force, decided from tickets."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.core.tickets import Kind, Ticket
from pliant.core.tuning import delay as overlap
from pliant.core.tuning.delay import DelayState, DelayVerdict

TRIAL = overlap.TRIAL


def tickets(delay: int, sum_s: float, cost_s: float = 0.0) -> list[Ticket]:
    """A round of two workers, 1 s of computing; the sum is waited for unless it is overlapped."""
    idle_s = sum_s if delay == 0 else max(0.0, sum_s - 1.0)
    return [
        Ticket(1, 1, 1, Kind.TRAIN, samples=samples, busy_s=1.0 + cost_s, idle_s=idle_s, cost_s=cost_s)
        for samples in (32, 16)
    ]


def played(sum_s: Callable[[int], float], rounds: int, cost_s: float = 0.0) -> tuple[list[int], list[DelayVerdict]]:
    """The delay of each round, and what the user was told."""
    choice, delays, verdicts = DelayState(), [], []
    for number in range(rounds):
        delays.append(choice.delay)
        own = cost_s if choice.delay == 1 else 0.0
        choice, verdict = overlap.after(choice, tickets(choice.delay, sum_s(number), own), trial=TRIAL, full=True)
        verdicts += [verdict] if verdict is not None else []
    return delays, verdicts


def test_quick_sums_need_no_delay() -> None:
    delays, verdicts = played(lambda number: 0.02, 500)
    assert set(delays) == {0}
    assert [verdict.delay for verdict in verdicts] == [0]


def test_slow_sums_are_overlapped_and_the_user_hears_of_it_once() -> None:
    delays, verdicts = played(lambda number: 0.5, 2000)
    assert delays[: 3 * TRIAL] == [0] * 3 * TRIAL and sum(delays) > 0.97 * len(delays)
    assert [verdict.delay for verdict in verdicts] == [1]
    assert verdicts[0].harvests[0] == pytest.approx(1 / 1.5)
    assert verdicts[0].harvests[1] == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(6))
def test_where_both_are_about_as_good_the_user_is_not_told_again_and_again(seed: int) -> None:
    chance = random.Random(seed)
    sums = [max(0.0, chance.gauss(0.036, 0.08)) for _ in range(6000)]
    delays, verdicts = played(lambda number: sums[number], len(sums))
    assert set(delays) == {0, 1} and len(verdicts) <= 3
    # Clearly another one is told, as before.
    delays, verdicts = played(lambda number: sums[number] + (0.3 if number > 3000 else 0.0), len(sums))
    assert verdicts[-1].delay == 1 and len(verdicts) <= 4


@settings(max_examples=30)
@given(st.floats(0.05, 3.0))
def test_trying_costs_little(sum_s: float) -> None:
    delays, _ = played(lambda number: sum_s, 4000)
    late = delays[4 * TRIAL + 4 :]
    best = min(1.0 + sum_s, max(1.0, sum_s))
    spent = sum(max(1.0, sum_s) if delay == 1 else 1.0 + sum_s for delay in late)
    assert spent <= 1.035 * best * len(late)


def test_an_overlap_that_costs_more_than_it_brings_is_not_kept() -> None:
    delays, verdicts = played(lambda number: 0.1, 1000, cost_s=0.2)
    assert sum(delays) < 0.1 * len(delays)
    assert [verdict.delay for verdict in verdicts] == [0]


def test_another_network_is_noticed() -> None:
    delays, verdicts = played(lambda number: 0.5 if number < 600 else 0.01, 6000)
    assert sum(delays[300:600]) > 0.9 * 300
    assert set(delays[-100:]) == {0}
    assert [verdict.delay for verdict in verdicts] == [1, 0]


def test_an_overlap_ends_with_a_round_beside_which_nobody_draws() -> None:
    choice = DelayState(delay=1, harvests=(0.99, None))
    while not choice.turning:
        assert choice.delay == 1
        choice, _ = overlap.after(choice, tickets(1, 0.1), trial=TRIAL, full=True)
    after, verdict = overlap.after(choice, tickets(1, 0.1), trial=TRIAL, full=False)
    assert (after.delay, after.turning, after.rounds, verdict) == (0, False, 0, None)


def test_short_rounds_do_not_count() -> None:
    choice = DelayState()
    for _ in range(100):
        choice, verdict = overlap.after(choice, tickets(0, 5.0), trial=TRIAL, full=False)
        assert choice == DelayState() and verdict is None


def test_a_change_of_the_roster_keeps_what_is_known() -> None:
    choice = overlap.moved(
        DelayState(delay=1, rounds=300, counted=4, made=9.0, possible=9.0, harvests=(0.5, 0.9), told=1)
    )
    assert choice == DelayState(delay=1, harvests=(0.5, 0.9), told=1)
