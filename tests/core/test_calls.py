"""The calls that the group has left: a list, however long, that costs nothing to add to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pliant.core import rounds
from pliant.core.consistency import Mismatch
from pliant.core.finished_calls import NONE, WIDTH, FinishedCalls, FinishedPhase, calls_of
from pliant.core.group_state import GroupState, Policy, founded
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import WorkerId
from pliant.worker import snapshot
from pliant.worker.script.calls import Counted, ScriptCall, ScriptPosition

pasts = st.lists(
    st.builds(
        FinishedPhase,
        st.sampled_from([Kind.TRAIN, Kind.EVALUATE]),
        st.just(0),
        st.none() | st.floats(0, 1),
        st.booleans(),
        st.none() | st.just({"loss": 0.5, "hits": None}),
    ),
    max_size=30,
)


@given(pasts, st.integers(0, 40), st.integers(0, 40))
def test_as_a_list_would_have_it(each: list[FinishedPhase], known: int, donors: int) -> None:
    calls = calls_of(each)
    top = [past for past in each if not past.inner]
    assert [calls[number] for number in range(len(calls))] == top
    inner = [past for call in calls.since(0) for past in call.inner]
    first = next((place for place, past in enumerate(each) if not past.inner), len(each))
    assert inner == [past for past in each[first:] if past.inner]
    assert calls.ended_inside == (bool(top) and each[-1].inner)
    assert calls.up_to(known).joined(calls.since(known)) == calls
    # What a worker knows of the same calls, later ones included, and what it is told make the donor's.
    donor = calls.up_to(donors)
    handed = snapshot.GroupSnapshot(replace(founded(Policy(8), 1, [WorkerId("w0")]), past=donor), 0, 0, False)
    certain = min(snapshot.unpacked_count(snapshot.packed_count(own)) for own in (calls, donor))
    assert snapshot.decoded(snapshot.encoded(handed, certain), calls) == handed


@settings(max_examples=20)
@given(st.integers(0, 3 * WIDTH * WIDTH))
def test_any_number_of_calls(count: int) -> None:
    calls = NONE.joined(calls_of([FinishedPhase(Kind.TRAIN, number)]).call(0) for number in range(count))
    assert len(calls) == count and [calls[number].epoch for number in range(count)] == list(range(count))
    assert calls.epoch == count - 1
    for number in (-1, count - WIDTH, count // 2):
        assert [call.epoch for call in calls.up_to(number).since(0)] == list(range(max(0, number)))
    with pytest.raises(IndexError):
        calls[count]


def copied(value: Any, seen: set[int]) -> int:
    """References in the tuples of ``value`` that were not there before."""
    if not isinstance(value, tuple) or id(value) in seen:
        return 0
    seen.add(id(value))
    return len(value) + sum(copied(each, seen) for each in value)


def left(group: GroupState, script: ScriptPosition, *, number: int) -> GroupState:
    """The group makes one more call, an ``evaluate`` of nothing, by the decision code and the script's counting."""
    call = ScriptCall(Kind.EVALUATE, number, Counted(0, 0), 1, 0)
    script.enters(call, group)
    assert script.past(group) is None and script.phase(group) is None and not script.is_beyond(group)
    ticket = Ticket(
        group.era, group.round, group.phases, Kind.EVALUATE, Flag.OPENING, epoch=number, length=0, size=1, ahead=0
    )
    after = rounds.opened(group, [ticket])
    assert not isinstance(after, Mismatch)
    assert script.past(after) == FinishedPhase(Kind.EVALUATE, number)
    script.leaves()
    assert not script.is_behind(after)
    return after


def test_a_call_costs_the_same_however_many_came_before() -> None:
    group, script = founded(Policy(8), 1, [WorkerId("w0")]), ScriptPosition()
    seen: set[int] = set()
    kept: list[FinishedCalls] = []
    work: list[int] = []
    for number in range(6 * WIDTH * WIDTH):
        group = left(group, script, number=number)
        kept.append(group.past)
        work.append(copied(group.past.last, seen) + copied(group.past.blocks, seen))
    half = len(work) // 2
    assert sum(work[half:]) <= 1.1 * sum(work[:half])
    assert max(work) <= 4 * WIDTH


def test_what_travels_with_an_era_does_not_grow() -> None:
    """Survivors know all but the last one; a newcomer is told the rest once."""
    sizes: dict[int, int] = {}
    for count in (10, 20_000):
        group = founded(Policy(8), 1, [WorkerId("w0")])
        past = NONE.joined(calls_of([FinishedPhase(Kind.EVALUATE, 100, 0.25)]).call(0) for _ in range(count))
        handed = snapshot.GroupSnapshot(replace(group, past=past), 0, 0, False)
        certain = snapshot.unpacked_count(snapshot.packed_count(past))
        sizes[count] = len(snapshot.encoded(handed, certain))
    assert sizes[20_000] <= sizes[10] + 8
    assert len(snapshot.encoded(handed, 0)) < 15 * 20_000, "a result and a few bytes for each"
