"""What the simulator asks of a comparison of weights, and of whom it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pliant.core.group_state import GroupState, Policy, founded
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.testing.clock import World
from pliant.testing.invariants import Checker, Violation
from pliant.types import WorkerId

ROSTER = tuple(WorkerId(f"w{member}") for member in range(3))
LONG = 40
"""rounds: more than a difference may last"""


class Rounds:
    """A group of three whose weights are what the test says."""

    def __init__(self) -> None:
        self.checker = Checker(World(0), reference=1)
        self.group: GroupState = founded(Policy(2, watched=1), 1, ROSTER)

    def pass_by(self, rounds: int, weights: tuple[int, ...], silent: frozenset[int] = frozenset()) -> None:
        """So many rounds, each followed by all; nobody is named."""
        for _ in range(rounds):
            self.group = replace(self.group, round=self.group.round + 1, exchange=self.group.exchange + 1)
            flags = [Flag.FOLLOWING if member in silent else Flag.NONE for member in range(3)]
            tickets = [Ticket(1, self.group.round, 1, Kind.TRAIN, each) for each in flags]
            outcome: Any = SimpleNamespace(
                kind=Kind.TRAIN, drift=None, ended=False, plan=None, batch=2, round=self.group.round
            )
            for worker, value in zip(ROSTER, weights, strict=True):
                link: Any = SimpleNamespace(worker=worker, stopped_era=0)
                number = SimpleNamespace(value=value)
                training: Any = SimpleNamespace(
                    held=None, parameters=[number], plain_values=lambda value=value: (value,)
                )
                self.checker.settled(self.group, outcome, tickets)
                self.checker.passed(link, self.group, training, "settled")


@pytest.fixture
def run() -> Rounds:
    rounds = Rounds()
    rounds.pass_by(1, (5, 5, 5))
    return rounds


def test_whose_weights_differ_is_to_be_named_in_time(run: Rounds) -> None:
    run.checker.struck("w2", run.group)
    run.pass_by(10, (5, 5, 6))
    with pytest.raises(Violation, match="nobody was named"):
        run.pass_by(LONG, (5, 5, 6))


def test_a_spare_is_to_be_named_once_it_computes(run: Rounds) -> None:
    run.checker.struck("w2", run.group)
    run.pass_by(LONG, (5, 5, 6), silent=frozenset({2}))
    run.pass_by(10, (5, 5, 6))
    with pytest.raises(Violation, match="nobody was named"):
        run.pass_by(LONG, (5, 5, 6))


def test_a_spare_is_no_excuse_for_others(run: Rounds) -> None:
    run.checker.struck("w1", run.group)
    run.checker.struck("w2", run.group)
    with pytest.raises(Violation, match="nobody was named"):
        run.pass_by(LONG, (5, 6, 7), silent=frozenset({2}))


def test_weights_that_nobody_has_changed_do_not_differ(run: Rounds) -> None:
    with pytest.raises(Violation, match="have different weights"):
        run.pass_by(1, (5, 5, 6), silent=frozenset({2}))
