"""Free, dealt, done: core.ledger keeps every position in exactly one place, whatever the history."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from pliant.core import ledger
from pliant.core.ledger import Ledger, joined, samples_of
from pliant.types import Span


def positions(spans: Sequence[Span]) -> list[int]:
    return [p for start, stop in spans for p in range(start, stop)]


class Dealing(RuleBasedStateMachine):
    """Any sequence of deals, grants, promises, take-backs and settlements."""

    members = Bundle("members")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger.opened(0, 1)
        self.spent: list[int] = []

    @initialize(limit=st.integers(0, 200), members=st.integers(1, 4))
    def open(self, limit: int, members: int) -> None:
        self.ledger = ledger.opened(limit, members)

    def sizes(self, data: st.DataObject) -> list[int]:
        wanted = data.draw(st.lists(st.integers(1, 9), max_size=4))
        while sum(wanted) > self.ledger.free:
            wanted.pop()
        return wanted

    def member(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.ledger.hands) - 1))

    @rule(data=st.data())
    def deal(self, data: st.DataObject) -> None:
        member, sizes = self.member(data), self.sizes(data)
        before = len(self.ledger.hands[member].queue)
        self.ledger = ledger.deal(self.ledger, member, sizes)
        assert [samples_of(mb) for mb in self.ledger.hands[member].queue[before:]] == sizes

    @rule(data=st.data())
    def promise(self, data: st.DataObject) -> None:
        if all(hand.granted == len(hand.queue) == sum(hand.quotas) for hand in self.ledger.hands):
            member, sizes = self.member(data), self.sizes(data)
            shares = [sizes if other == member else () for other in range(len(self.ledger.hands))]
            self.ledger = ledger.promise(self.ledger, shares)
            for hand, share in zip(self.ledger.hands, shares, strict=True):
                assert hand.quotas[-1] == len(share)
                assert sum(hand.quotas) == hand.granted

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        member = self.member(data)
        hand = self.ledger.hands[member]
        granted = data.draw(st.integers(hand.granted, len(hand.queue)))
        self.ledger = ledger.grant(self.ledger, member, granted)
        assert self.ledger.hands[member].queue == hand.queue

    @rule()
    def take_back(self) -> None:
        granted = [hand.queue[: hand.granted] for hand in self.ledger.hands]
        self.ledger = ledger.take_back(self.ledger)
        assert [hand.queue for hand in self.ledger.hands] == granted

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        drawn = [data.draw(st.integers(0, hand.granted)) for hand in self.ledger.hands]
        fronts = [hand.queue[:count] for hand, count in zip(self.ledger.hands, drawn, strict=True)]
        self.ledger, spans = ledger.settle(self.ledger, drawn)
        for front, spent in zip(fronts, spans, strict=True):
            assert positions(spent) == sorted(positions([span for mb in front for span in mb]))
            self.spent += positions(spent)

    @precondition(lambda self: any(hand.granted < len(hand.queue) for hand in self.ledger.hands))
    @rule()
    def what_is_not_granted_cannot_be_drawn(self) -> None:
        with pytest.raises(ValueError, match="were granted"):
            ledger.settle(self.ledger, [hand.granted + 1 for hand in self.ledger.hands])

    @invariant()
    def every_position_is_in_one_place(self) -> None:
        now = self.ledger
        dealt = [span for hand in now.hands for mb in hand.queue for span in mb]
        free = [*now.returned, (now.cursor, now.limit)]
        assert sorted(self.spent + positions(dealt) + positions(free)) == list(range(now.limit))
        assert now.free == len(positions(free))
        assert now.remaining == now.limit - len(self.spent)
        assert now.is_spent == (now.remaining == 0)
        assert sorted(self.spent + positions(ledger.unspent(now))) == list(range(now.limit))


Dealing.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestDealing = Dealing.TestCase


def two_hands() -> Ledger:
    return ledger.deal(ledger.deal(ledger.opened(20, 2), 0, [4, 4]), 1, [4])


def test_more_than_is_free_cannot_be_dealt() -> None:
    with pytest.raises(ValueError, match="1 positions asked for, 0 are free"):
        ledger.deal(two_hands(), 0, [8, 1])


def test_a_grant_only_grows() -> None:
    granted = ledger.grant(two_hands(), 0, 1)
    with pytest.raises(ValueError, match="only grows"):
        ledger.grant(granted, 0, 0)
    with pytest.raises(ValueError, match="only grows"):
        ledger.grant(granted, 0, 3)


def test_what_is_taken_back_is_dealt_first() -> None:
    back = ledger.take_back(ledger.grant(two_hands(), 0, 1))
    assert back.returned == ((4, 12),)
    assert ledger.deal(back, 1, [10]).hands[1].queue == (((4, 14),),)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=6))
def test_joined_spans_are_ascending_and_hold_the_same_positions(pieces: list[tuple[int, int]]) -> None:
    spans, at = [], 0
    for gap, length in pieces:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    merged = joined(spans[::-1])
    assert positions(merged) == positions(spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))
