"""A script finds its place among the group's phases by counting its calls."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pliant.core import ledger
from pliant.core.finished_calls import calls_of
from pliant.core.group_state import FinishedPhase, GroupState, OpenPhase, Policy, founded
from pliant.core.tickets import Kind
from pliant.types import WorkerId
from pliant.worker.script.calls import Counted, ScriptCall, ScriptPosition

TRAIN = ScriptCall(Kind.TRAIN, 0, Counted(8, 0), 2, 0)
EVALUATE = ScriptCall(Kind.EVALUATE, 0, Counted(8, 1), 2, 0)
TRAINED, TESTED = FinishedPhase(Kind.TRAIN, 0), FinishedPhase(Kind.EVALUATE, 0, 0.5)
INNER = replace(TESTED, result=0.25, inner=True)


def open_phase(number: int, kind: Kind, *, inner: bool = False, nested: tuple[FinishedPhase, ...] = ()) -> OpenPhase:
    here = (True,)
    held = ledger.opened(8, 1)
    return OpenPhase(number, kind, 0, 8, (2,), (0,), held, here, here, inner=inner, nested=nested)


def group(*open_: OpenPhase, past: tuple[FinishedPhase, ...] = ()) -> GroupState:
    start = founded(Policy(8), 1, (WorkerId("w0"),))
    return replace(
        start, open=open_, past=calls_of(past), phases=max((phase.number for phase in open_), default=len(past))
    )


def test_calls_that_the_group_is_past_are_answered_one_after_another() -> None:
    script, now = ScriptPosition(), group(past=(TRAINED, TESTED))
    for expected in (TRAINED, TESTED):
        script.enters(TRAIN, now)
        assert script.past(now) == expected
        script.leaves()
    script.enters(TRAIN, now)
    assert script.past(now) is None
    assert script.phase(now) is None
    assert not script.is_at(now)
    opened = replace(now, open=(open_phase(3, Kind.TRAIN),))
    assert script.phase(opened) == 3
    assert script.is_at(opened)


def test_a_call_inside_a_loop_is_found_behind_those_that_others_made_before() -> None:
    script = ScriptPosition()
    loop = open_phase(1, Kind.TRAIN)
    script.enters(TRAIN, group(loop))
    assert script.is_at(group(loop))
    # Two evaluations came and went while this worker computed nothing.
    later = group(replace(loop, nested=(TESTED, TESTED)))
    script.enters(EVALUATE, later)
    assert script.past(later) is None
    inside = group(later.open[0], open_phase(4, Kind.EVALUATE))
    assert script.phase(inside) == 4
    assert script.is_at(inside)
    ended = group(replace(loop, nested=(TESTED, TESTED, replace(TESTED, result=0.75))))
    assert script.past(ended) == replace(TESTED, result=0.75)
    script.leaves()
    assert script.is_at(ended)


def test_a_call_in_the_body_of_a_loop_that_the_group_has_left_has_no_result() -> None:
    script = ScriptPosition()
    script.enters(TRAIN, group(open_phase(1, Kind.TRAIN)))
    gone = group(past=(TRAINED,))
    script.enters(EVALUATE, gone)
    assert script.past(gone) == FinishedPhase(Kind.EVALUATE, 0)


def test_a_loop_that_ends_in_its_body_may_still_evaluate_there() -> None:
    script = ScriptPosition()
    script.enters(TRAIN, group(open_phase(1, Kind.TRAIN)))
    script.ended_in_body()
    over = group(past=(TRAINED,))
    script.enters(EVALUATE, over)
    assert script.is_in_ended_loop
    assert script.past(over) is None
    inner = group(open_phase(2, Kind.EVALUATE, inner=True), past=(TRAINED,))
    assert script.phase(inner) == 2
    done = group(past=(TRAINED, INNER))
    assert script.past(done) == INNER
    script.leaves()
    script.leaves()
    # Nobody else makes that call: it does not count among the others.
    script.enters(EVALUATE, done)
    assert script.past(done) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_given_up_leaves_no_trace(depth: int) -> None:
    script, now = ScriptPosition(), group(open_phase(1, Kind.TRAIN))
    for call in (TRAIN, EVALUATE)[:depth]:
        script.enters(call, now)
    script.gives_up()
    assert script.depth == depth - 1
    assert script.calls == 0


def test_a_script_that_was_away_counts_its_calls_in_one_body_itself() -> None:
    """The group has made three calls in that body and gone on: each is answered, none is opened again."""
    script = ScriptPosition()
    loop = open_phase(1, Kind.TRAIN)
    script.enters(TRAIN, group(loop))
    script.draws()
    script.enters(EVALUATE, group(loop))
    results = tuple(replace(TESTED, result=float(number)) for number in range(3))
    later = group(replace(loop, nested=results))
    for expected in results:
        assert script.past(later) == expected
        script.leaves()
        script.enters(EVALUATE, later)
    assert script.past(later) is None
    script.leaves()
    # In the next body it is where the group is.
    script.draws()
    more = group(replace(loop, nested=results * 3))
    script.enters(EVALUATE, more)
    assert script.past(more) is None
