"""Whose weights differ, and what becomes of it: core.drift, and rounds that act on it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pliant.core import allowance, consistency, drift, ledger, regrouping, rounds
from pliant.core.drift import Drift
from pliant.core.group_state import GroupState, Policy, Standing, founded
from pliant.core.journal.audit import audit
from pliant.core.journal.records import DriftLine, Record, RoundRecord, decode
from pliant.core.rounds import Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import WorkerId
from pliant.worker.journal import JournalReporter

ROSTER = tuple(WorkerId(f"w{index}") for index in range(5))


def told(digests: Sequence[int], *, at: int = 32, flags: Flag = Flag.NONE, arithmetic: int = 9) -> list[Ticket]:
    ticket = Ticket(1, 40, 1, Kind.TRAIN, flags, weights_round=at, arithmetic=arithmetic)
    return [replace(ticket, weights=digest) for digest in digests]


def judged(tickets: Sequence[Ticket], offences: dict[WorkerId, int] | None = None) -> Drift | None:
    return drift.judged(ROSTER[: len(tickets)], range(len(tickets)), tickets, offences or {})


@given(st.lists(st.integers(0, 2), min_size=2, max_size=5))
def test_whoever_is_not_with_the_majority_is_named_and_somebody_is_believed(digests: list[int]) -> None:
    verdict = judged(told(digests))
    most = max(digests.count(digest) for digest in digests)
    believed = next(digest for digest in digests if digests.count(digest) == most)
    wrong = tuple(member for member, digest in enumerate(digests) if digest != believed)
    assert (verdict.named if verdict else ()) == wrong
    assert verdict is None or verdict.donor == digests.index(believed)


def test_of_two_the_first_is_believed() -> None:
    verdict = judged(told([5, 6]))
    assert verdict is not None and (verdict.donor, verdict.healed) == (0, (1,))


def test_unlike_workers_are_compared_by_sketches() -> None:
    """Their digests differ anyway; rounding hardly moves the sketch."""
    here, there = told([5, 5]), told([7, 8], arithmetic=8)
    near = [replace(t, sketch=s) for t, s in zip([*here, *there[:1]], (0.5, 0.5, 0.5001), strict=True)]
    assert drift.are_unlike(near) and judged(near) is None
    apart = [*near[:2], replace(near[2], sketch=0.9)]
    verdict = judged(apart)
    assert verdict is not None and (verdict.donor, verdict.healed) == (0, (2,))
    assert verdict.sketches == (0.5, 0.5, 0.9)
    # Without a sketch nobody is judged by what another processor has computed.
    assert judged([*here, *there[:1]]) is None and not drift.are_unlike(here)


def test_the_second_time_is_once_too_often() -> None:
    verdict = judged(told([5, 5, 6, 7]), {ROSTER[2]: 1})
    assert verdict is not None and (verdict.healed, verdict.expelled) == ((3,), (2,))


@pytest.mark.parametrize(
    "other",
    [
        told([6], at=64)[0],
        told([6], at=0)[0],
        told([6], arithmetic=8)[0],
        told([6], flags=Flag.FOLLOWING)[0],
        told([6], flags=Flag.LEAVING)[0],
    ],
    ids=["another round", "none", "another processor", "goes along", "leaves"],
)
def test_only_what_must_be_equal_is_compared(other: Ticket) -> None:
    assert judged([*told([5, 5]), other]) is None


def test_who_does_not_hold_the_state_is_not_asked() -> None:
    assert drift.judged(ROSTER[:3], (0, 2), told([5, 6, 5]), {}) is None


def test_every_part_has_its_turn() -> None:
    due = [number for number in range(7, 1000) if drift.is_due(number, 7)]
    assert [drift.turn(number, 7) for number in due] == list(range(1, len(due) + 1))


def test_the_first_digests_come_soon_and_are_of_everything() -> None:
    due = [number for number in range(1, 200) if drift.is_due(number, drift.EVERY)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192]
    assert [drift.turn(number, drift.EVERY) for number in due] == [None] * 5 + [1, 2, 3, 4, 5, 6]
    assert [number for number in range(6) if drift.is_due(number, 1)] == [*range(6)]
    assert not any(drift.is_due(number, 0) for number in range(100))


class Line:
    """Where a witness's lines go."""

    sends_lines = True

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def keep(self, lines: Sequence[bytes], first: int) -> None:
        self.lines += lines

    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None: ...

    def unwritten(self) -> list[bytes]:
        return []

    def send_lines_again(self) -> None: ...


class Course:
    """A group of three whose rounds are settled one by one, and journaled."""

    def __init__(self, policy: Policy) -> None:
        self.line = Line()
        self.witness = JournalReporter(self.line)
        self.group = founded(policy, 1, ROSTER[:3])
        self.witness.era(self.group, None, sends=True)
        opening = Ticket(1, 0, 0, Kind.TRAIN, Flag.OPENING, length=400, size=4, digest=consistency.digest(self.group))
        opened = rounds.opened(self.group, [opening] * 3)
        assert isinstance(opened, GroupState)
        self.group = opened
        self.witness.opened(opened, [opening] * 3)

    def settle(self, digests: Sequence[int] = (0, 0, 0), at: int = 0, ready: int | None = None) -> Settled:
        tickets = [self.ticket(member, digests[member], at, ready=member == ready) for member in range(3)]
        decision = rounds.settled(self.group, tickets)
        assert isinstance(decision, tuple)
        self.group, outcome = decision
        self.witness.settled(self.group, outcome, tickets, 0.1)
        return outcome

    def ticket(self, member: int, digest: int, at: int, *, ready: bool) -> Ticket:
        group, hand = self.group, self.group.phase.ledger.hands[member]
        drawn = hand.quotas[0] if hand.quotas else min(1, hand.granted)
        samples = sum(ledger.samples_of(each) for each in hand.queue[:drawn])
        follows = group.standings[member] is Standing.FOLLOWING
        return Ticket(
            1,
            group.round,
            group.phases,
            Kind.TRAIN,
            (Flag.FOLLOWING if follows else Flag.NONE) | (Flag.READY if ready else Flag.NONE),
            size=4,
            micro_batches=drawn,
            samples=samples,
            weight=float(samples),
            busy_s=0.01,
            digest=consistency.digest(group),
            weights_round=at,
            weights=digest,
        )

    def records(self) -> list[Record]:
        self.witness.confirmed()
        return [decode(line) for line in self.line.lines]


@pytest.fixture(params=["fixed", "fixed, no delay", "open"])
def course(request: pytest.FixtureRequest) -> Course:
    policies = {
        "fixed": Policy(24, delay=1),
        "fixed, no delay": Policy(24, delay=0),
        "open": Policy(24, floating=True, delay=1),
    }
    return Course(policies[request.param])


def test_it_follows_gives_its_hand_back_and_comes_back_when_it_is_ready(course: Course) -> None:
    course.settle()
    outcome = course.settle([7, 8, 7], at=1)
    group = course.group
    assert outcome.drift is not None and outcome.drift.healed == (1,) and not outcome.seen
    assert group.standings == (Standing.ACTIVE, Standing.FOLLOWING, Standing.ACTIVE)
    assert group.offences == ((ROSTER[1], 1),)
    assert not group.phase.ledger.hands[1].queue and not allowance.speaks(group, 1)
    assert course.settle([7, 0, 7], at=1).drift is None
    course.settle([7, 0, 7], at=1, ready=1)
    assert course.group.standings[1] is Standing.ACTIVE
    assert any(course.settle().spans[1] for _ in range(3))
    again = course.settle([9, 6, 9], at=5)
    assert again.drift is not None and again.drift.expelled == (1,)
    report = audit(course.records())
    assert report.problems == [] and report.summary["drifts"] == 2


def test_a_changed_verdict_is_found_by_the_audit(course: Course) -> None:
    course.settle()
    course.settle([7, 8, 7], at=1)
    for _ in range(5):
        course.settle()
    records = course.records()
    place = next(i for i, each in enumerate(records) if isinstance(each, RoundRecord) and each.drift is not None)
    honest = records[place]
    assert isinstance(honest, RoundRecord) and honest.drift is not None
    altered = [DriftLine(1, honest.drift.digests, [0], [], 1), DriftLine(1, [(0, 0, 7)], [1], [], 0)]
    # With an open batch nobody is bound to hand in anything: who follows cannot be told from who is slow.
    for drifted in [*altered, *([] if course.group.policy.floating else [None])]:
        fields = {name: getattr(honest, name) for name in honest.__struct_fields__}
        records[place] = RoundRecord(**{**fields, "drift": drifted})
        assert audit(records).problems


def test_at_the_end_of_a_phase_nobody_is_named(course: Course) -> None:
    while course.group.open:
        remaining = course.group.phase.ledger.remaining
        outcome = course.settle()
        if outcome.ended:
            return
        assert course.group.phase.ledger.remaining < remaining
        if course.group.phase.ledger.remaining <= 24:
            assert (course.settle([7, 8, 7], at=1).drift is None) == (not course.group.open)


def test_who_is_gone_is_forgotten(course: Course) -> None:
    course.settle()
    course.settle([7, 8, 7], at=1)
    assert regrouping.switched(course.group, 2, (ROSTER[0], ROSTER[1])).offences == ((ROSTER[1], 1),)
    assert regrouping.switched(course.group, 2, (ROSTER[0], ROSTER[2])).offences == ()


def test_nobody_leaves_with_the_state_before_the_healed_one_has_it(course: Course) -> None:
    course.settle()
    course.settle([7, 8, 7], at=1)
    tickets = [replace(course.ticket(member, 0, 0, ready=False), plan_term=1, plan_era=2) for member in range(3)]
    going = [replace(ticket, flags=ticket.flags | Flag.LEAVING) for ticket in tickets]
    assert consistency.agreed_plan(course.group, tickets) == (1, 2)
    assert consistency.agreed_plan(course.group, [tickets[0], tickets[1], going[2]]) == (1, 2)
    assert consistency.agreed_plan(course.group, [going[0], tickets[1], going[2]]) is None
    # It is ready, but goes along with this exchange still: what is the user's own comes only now.
    course.settle(ready=1)
    assert course.group.standings[1] is Standing.ACTIVE
    follows = replace(tickets[1], flags=Flag.FOLLOWING)
    assert consistency.agreed_plan(course.group, [going[0], follows, going[2]]) is None
    # Who leaves need not have it.
    nobody = [replace(ticket, flags=ticket.flags | Flag.FOLLOWING) for ticket in going]
    assert consistency.agreed_plan(course.group, nobody) == (1, 2)
    # Whoever it is that takes the state over.
    unsuspected = replace(course.group, offences=())
    assert consistency.agreed_plan(unsuspected, [going[0], follows, going[2]]) is None
    computes = replace(tickets[1], flags=Flag.NONE)
    assert consistency.agreed_plan(course.group, [going[0], computes, going[2]]) == (1, 2)
    # Who is left out of the plan but has still to compute goes with it, too.
    left_out = [replace(ticket, flags=Flag.GOING) for ticket in tickets]
    assert consistency.agreed_plan(course.group, [left_out[0], follows, going[2]]) is None
    assert consistency.agreed_plan(course.group, [left_out[0], follows, tickets[2]]) == (1, 2)
    assert consistency.agreed_plan(course.group, [left_out[0], computes, going[2]]) == (1, 2)
