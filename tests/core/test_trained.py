"""From which round on a change of the trained set counts, and for whom: core.trained_set."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pliant.bitmaps import bitmap, common, members
from pliant.core import ledger, trained_set
from pliant.core.consistency import Mismatch
from pliant.core.group_state import GroupState, OpenPhase, Policy, founded
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import WorkerId

ROSTER = tuple(WorkerId(name) for name in ("w0", "w1", "w2"))
OLD, NEW, OTHER = bitmap([0, 1, 2], 9), bitmap([1, 2], 9), bitmap([0, 1, 2, 8], 9)
SETS = st.sampled_from([OLD, NEW, OTHER])


def group(delay: int, *, unlike: int = 0, took_part: tuple[bool, ...] = (True, True, True)) -> GroupState:
    phase = OpenPhase(
        number=1,
        kind=Kind.TRAIN,
        epoch=0,
        length=96,
        sizes=(4, 4, 4),
        ahead=(0, 0, 0),
        ledger=ledger.opened(96, 3),
        took_part=took_part,
        present=(True, True, True),
    )
    begun = founded(Policy(24, delay=delay), 1, ROSTER)
    return replace(begun, open=(phase,), trained=OLD, unlike=unlike)


def ticket(of: bytes, *, micro_batches: int = 2, flags: Flag = Flag.NONE) -> Ticket:
    return Ticket(1, 0, 1, Kind.TRAIN, flags, micro_batches=micro_batches, trained=of, wanted=of)


def decided(before: GroupState, tickets: list[Ticket]) -> tuple[GroupState, trained_set.Decision]:
    decision = trained_set.decide(before, tickets)
    assert not isinstance(decision, Mismatch), decision
    return decision


def test_what_all_carry_counts_at_once_where_nothing_overlaps() -> None:
    after, sets = decided(group(0), [ticket(NEW)] * 3)
    assert sets == trained_set.Decision(NEW, NEW) and after.trained == NEW and after.unlike == 0


def test_with_an_overlap_the_agreed_layout_stays_for_one_more_round() -> None:
    after, sets = decided(group(1), [ticket(OTHER)] * 3)
    assert sets == trained_set.Decision(OLD, OLD) and after.trained == OTHER
    after, sets = decided(after, [ticket(OTHER)] * 3)
    assert sets == trained_set.Decision(OTHER, OTHER)


@given(st.lists(SETS, min_size=3, max_size=3), st.sampled_from([0, 1]))
def test_an_update_touches_what_all_were_computed_for(sets: list[bytes], delay: int) -> None:
    after, decision = decided(group(delay), [ticket(of) for of in sets])
    expected = set(members(decision.layout))
    for of in sets:
        expected &= set(members(of))
    assert set(members(decision.touched)) == expected
    if OLD in sets:
        # Whoever trains what was agreed on has handed in before it knew of the others.
        assert decision.layout == OLD
    agreed = len(set(sets)) == 1
    assert after.trained == (sets[0] if agreed else OLD) and after.unlike == (0 if agreed else 1)


def test_a_contribution_that_was_begun_before_the_change_takes_away_what_it_lacks() -> None:
    begun = replace(ticket(OTHER), trained=OLD)
    after, sets = decided(group(0), [ticket(OTHER), begun, ticket(OTHER)])
    assert sets == trained_set.Decision(OTHER, OLD) and after.trained == OTHER and after.unlike == 0


def test_who_contributes_nothing_takes_nothing_away() -> None:
    _, sets = decided(group(0), [ticket(OLD), ticket(OLD), ticket(NEW, micro_batches=0)])
    assert sets.touched == OLD


def test_patience_ends_with_both_names_and_the_parameters() -> None:
    before = group(0)
    for _ in range(trained_set.PATIENCE):
        before, _ = decided(before, [ticket(OLD), ticket(NEW), ticket(OLD)])
    answer: Any = trained_set.decide(before, [ticket(OLD), ticket(NEW), ticket(OLD)])
    assert isinstance(answer, Mismatch) and answer.parameters == (0,)
    assert answer.reason.format(parameters="fc.weight").startswith("w0 trains fc.weight and w1 does not: ")
    answer = trained_set.decide(before, [ticket(NEW), ticket(OTHER), ticket(NEW)])
    assert answer.parameters == (0, 8) and answer.reason.startswith("w1 trains {parameters} and w0 does not")
    after, _ = decided(before, [ticket(NEW)] * 3)
    assert after.unlike == 0


def test_followers_have_no_say() -> None:
    follower = ticket(OTHER, micro_batches=0, flags=Flag.FOLLOWING)
    after, sets = decided(group(0), [ticket(NEW), follower, ticket(NEW)])
    assert sets == trained_set.Decision(NEW, NEW) and after.trained == NEW
    after, sets = decided(group(0), [follower] * 3)
    assert sets == trained_set.Decision(OLD, OLD) and after.trained == OLD


def test_who_has_just_begun_follows_those_who_ran_the_code() -> None:
    """A spare was not in the loop when the others froze a layer; its first contribution is of the old set."""
    before = group(0, took_part=(True, True, False))
    after, sets = decided(before, [ticket(NEW), ticket(NEW), ticket(OLD)])
    assert sets == trained_set.Decision(OLD, NEW), "it has handed in at once"
    assert after.trained == NEW and after.unlike == 0


def test_a_loop_begins_with_what_all_carry() -> None:
    blank = founded(Policy(24), 1, ROSTER)
    opening = [ticket(OLD, micro_batches=0, flags=Flag.OPENING)] * 3
    after: Any = trained_set.opened(blank, opening)
    assert after.trained == OLD
    unlike: Any = trained_set.opened(blank, [opening[0], replace(opening[0], wanted=NEW), opening[0]])
    assert isinstance(unlike, Mismatch) and unlike.parameters == (0,)
    later: Any = trained_set.opened(after, [replace(opening[0], wanted=NEW)] * 3)
    assert later.trained == NEW


@given(st.sets(st.integers(0, 70)), st.sets(st.integers(0, 70)))
def test_bitmaps_are_sets(one: set[int], other: set[int]) -> None:
    first, second = bitmap(one, 71), bitmap(other, 71)
    assert members(first) == sorted(one) and len(first) == len(second) == 9
    assert members(common(first, second)) == sorted(one & other)
    assert (first == second) is (one == other)
