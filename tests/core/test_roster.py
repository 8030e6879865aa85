"""Who takes part, when eras start, how runs end: core.roster and core.terms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.core import events, members, roster
from pliant.core.events import (
    Arrived,
    Beaten,
    ConnectionLost,
    Dismiss,
    Effect,
    Ended,
    Event,
    Failed,
    Finished,
    Interrupted,
    Kill,
    Offered,
    ProcessExited,
    Refuse,
    StartEra,
    StopAll,
    Terminate,
    Tick,
)
from pliant.core.members import Member, Roster
from pliant.core.terms import Terms, difference
from pliant.types import WorkerId

W = [WorkerId(f"w{i}") for i in range(4)]
TERMS = Terms("0.1.0", (("fc.weight", (10, 64), "float32"), ("fc.bias", (10,), "float32")), (("batch", "256"),))
DEAD_AFTER_S = 5.0

Timed = tuple[Event, float]


def fresh(n: int) -> Roster:
    return roster.gathered(W[:n], "train.py", "0.1.0", DEAD_AFTER_S)


def fed(state: Roster, history: Iterable[Timed]) -> tuple[Roster, list[Effect]]:
    effects: list[Effect] = []
    for event, now_s in history:
        state, more = roster.advance(state, event, now_s)
        effects += more
    return state, effects


def arrivals(n: int) -> list[Timed]:
    return [(Arrived(i + 1, W[i], "0.1.0"), 0.0) for i in range(n)]


def offers(n: int, terms: Terms = TERMS) -> list[Timed]:
    return [(Offered(W[i], terms), 0.0) for i in range(n)]


def training(n: int) -> Roster:
    return fed(fresh(n), arrivals(n) + offers(n))[0]


def exits(n: int, status: int = 0, now_s: float = 1.0) -> list[Timed]:
    return [(ProcessExited(W[i], status), now_s) for i in range(n)]


def only(kind: type, effects: Iterable[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_the_era_starts_when_the_last_worker_is_ready() -> None:
    state, effects = fed(fresh(3), arrivals(3) + offers(2))
    assert not only(StartEra, effects)
    state, effects = fed(state, [(Offered(W[2], TERMS), 0.0)])
    assert only(StartEra, effects) == [StartEra(events.Era(1), 1, (W[0], W[1], W[2]))]


def test_names_are_ordered_by_number() -> None:
    names = [WorkerId(name) for name in ("w10", "w9", "w0", "w2")]
    state = roster.gathered(names, "train.py", "0.1.0", 5.0)
    assert [member.worker for member in state.members] == ["w0", "w2", "w9", "w10"]


def test_a_run_that_finishes_ends_well() -> None:
    history: list[Timed] = [(Finished(W[i]), 1.0) for i in range(2)]
    history += [(ConnectionLost(W[i]), 1.0) for i in range(2)]
    _state, effects = fed(training(2), history + exits(2))
    assert effects[-1] == Ended("finished", completed=True, exit_status=0)
    assert not only(StopAll, effects)


def test_a_script_that_fails_after_training_gives_its_status() -> None:
    history: list[Timed] = [(Finished(W[0]), 1.0), (Finished(W[1]), 1.0)]
    _, effects = fed(training(2), [*history, (ProcessExited(W[0], 0), 1.0), (ProcessExited(W[1], 3), 1.0)])
    end = effects[-1]
    assert isinstance(end, Ended) and (end.completed, end.exit_status) == (True, 3)
    assert "w1" in end.reason


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            replace(TERMS, parameters=(("fc.weight", (10, 32), "float32"), TERMS.parameters[1])),
            "models differ: 'fc.weight' is (10, 64) on w0 but (10, 32) on w1; give every worker the same model",
        ),
        (
            replace(TERMS, parameters=(("fc.weight", (10, 64), "bfloat16"), TERMS.parameters[1])),
            "models differ: 'fc.weight' is float32 on w0 but bfloat16 on w1; give every worker the same model",
        ),
        (
            replace(TERMS, parameters=TERMS.parameters[:1]),
            "models differ: 'fc.bias' is missing on w1 but not on w0; give every worker the same model",
        ),
        (
            replace(TERMS, parameters=(*TERMS.parameters, ("x", (1,), "float32"))),
            "models differ: 'x' is missing on w0 but not on w1; give every worker the same model",
        ),
        (
            replace(TERMS, parameters=TERMS.parameters[::-1]),
            "models differ: the optimizer's order has 'fc.weight' on w0 where w1 has 'fc.bias'; "
            "give every worker the same model",
        ),
        (
            replace(TERMS, settings=(("batch", "128"),)),
            "settings differ: batch is 256 on w0 but 128 on w1; "
            "call pliant.join with the same arguments on every worker",
        ),
        (
            replace(TERMS, version="0.2.0"),
            "versions differ: 0.1.0 on w0 but 0.2.0 on w1; install the same versions for all workers",
        ),
    ],
)
def test_what_differs_is_said_and_ends_the_run(other: Terms, said: str) -> None:
    _, effects = fed(fresh(2), [*arrivals(2), (Offered(W[0], TERMS), 0.0), (Offered(W[1], other), 0.0)])
    assert only(StopAll, effects) == [StopAll(said)]
    _, effects = fed(
        fresh(2),
        [
            *arrivals(2),
            (Offered(W[0], TERMS), 0.0),
            (Offered(W[1], other), 0.0),
            *exits(2, roster.QUIET_EXIT),
            (ConnectionLost(W[0]), 1.0),
            (ConnectionLost(W[1]), 1.0),
        ],
    )
    assert effects[-1] == Ended(said, completed=False, exit_status=1)


def test_a_second_worker_of_the_same_name_is_refused() -> None:
    state, effects = fed(training(2), [(Arrived(9, W[1], "0.1.0"), 1.0)])
    (refusal,) = only(Refuse, effects)
    assert isinstance(refusal, Refuse) and refusal.peer == 9 and "w1" in refusal.reason
    assert isinstance(state.stage, members.Running)


def test_a_stranger_is_refused() -> None:
    state, effects = fed(training(2), [(Arrived(9, WorkerId("w7"), "0.1.0"), 1.0)])
    assert len(only(Refuse, effects)) == 1
    assert isinstance(state.stage, members.Running)


def test_another_version_is_refused_and_ends_the_run() -> None:
    state, effects = fed(fresh(2), [(Arrived(1, W[0], "9.9"), 0.0)])
    assert len(only(Refuse, effects)) == 1
    assert isinstance(state.stage, members.Stopping) and "9.9" in state.stage.reason


@pytest.mark.parametrize("exit_first", [True, False])
def test_a_killed_worker_ends_the_run(exit_first: bool) -> None:
    history: list[Timed] = [(ProcessExited(W[1], -9), 1.0), (ConnectionLost(W[1]), 1.01)]
    state, effects = fed(training(3), history if exit_first else history[::-1])
    (stop,) = only(StopAll, effects)
    assert isinstance(stop, StopAll) and stop.reason.startswith("w1 was lost (killed by signal 9): ")
    others: list[Timed] = [(ProcessExited(W[i], roster.QUIET_EXIT), 2.0) for i in (0, 2)]
    _, effects = fed(state, [*others, (ConnectionLost(W[0]), 2.0), (ConnectionLost(W[2]), 2.0)])
    assert only(Ended, effects) == [Ended(stop.reason, completed=False, exit_status=137)]


def test_a_silent_worker_is_killed_and_ends_the_run() -> None:
    beats: list[Timed] = [(Beaten(W[0], 1, 1), 4.0), (Tick(), 5.0)]
    state, effects = fed(training(2), beats)
    assert not only(StopAll, effects)
    _, effects = fed(state, [(Tick(), 5.1)])
    (stop,) = only(StopAll, effects)
    assert isinstance(stop, StopAll) and stop.reason.startswith("w1 was lost (no sign of life for 5 s): ")
    assert only(Kill, effects) == [Kill(W[1])]


def test_the_scripts_own_dead_after_counts() -> None:
    state, _ = fed(fresh(1), [*arrivals(1), (Offered(W[0], TERMS, dead_after_s=1.0), 0.0)])
    _, effects = fed(state, [(Tick(), 1.5)])
    assert only(StopAll, effects)


def test_waiting_for_others_has_no_limit() -> None:
    _, effects = fed(fresh(2), [*arrivals(2), *offers(1), (Tick(), 1e6)])
    assert not only(StopAll, effects)


def test_a_script_that_never_joins_is_named() -> None:
    _, effects = fed(fresh(2), exits(2))
    (end,) = only(Ended, effects)
    assert isinstance(end, Ended)
    assert end.reason.startswith("train.py never called pliant.join: ") and end.exit_status == 1


def test_a_script_that_fails_before_joining_gives_its_status() -> None:
    _, effects = fed(fresh(2), [(ProcessExited(W[1], 3), 0.0), (ProcessExited(W[0], -15), 0.1)])
    assert only(Terminate, effects) == [Terminate(W[0])]
    (end,) = only(Ended, effects)
    assert isinstance(end, Ended) and end.exit_status == 3 and "w1" in end.reason


def test_a_failure_takes_the_culprits_status() -> None:
    history: list[Timed] = [(Failed(W[1], "ValueError: no"), 1.0), (ConnectionLost(W[1]), 1.0)]
    history += [(ProcessExited(W[0], roster.QUIET_EXIT), 1.0), (ConnectionLost(W[0]), 1.0)]
    _, effects = fed(training(2), [*history, (ProcessExited(W[1], 7), 1.5)])
    assert only(Ended, effects) == [Ended("w1 failed: ValueError: no", completed=False, exit_status=7)]


@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143)])
def test_an_interrupt_terminates_then_kills(number: int, status: int) -> None:
    state, effects = fed(training(2), [(Interrupted(number), 1.0)])
    assert only(Terminate, effects) == [Terminate(W[0]), Terminate(W[1])]
    state, effects = fed(state, [(Tick(), 1.0 + roster.GRACE_S)])
    assert only(Kill, effects) == [Kill(W[0]), Kill(W[1])]
    _, effects = fed(state, [*exits(2, -9, 7.0), (ConnectionLost(W[0]), 7.0), (ConnectionLost(W[1]), 7.0)])
    (end,) = only(Ended, effects)
    assert isinstance(end, Ended) and end.exit_status == status


def test_a_second_interrupt_kills_at_once() -> None:
    _, effects = fed(training(2), [(Interrupted(2), 1.0), (Interrupted(2), 1.1)])
    assert only(Kill, effects) == [Kill(W[0]), Kill(W[1])]


def test_a_latecomer_is_told_why_the_run_ended() -> None:
    _, effects = fed(fresh(2), [(Arrived(1, W[0], "0.1.0"), 0.0), (Failed(W[0], "no"), 0.0), *arrivals(2)[1:]])
    assert only(Dismiss, effects) == [Dismiss(2, "w0 failed: no")]


names = st.sampled_from([*W, WorkerId("w9")])
other_terms = st.sampled_from([TERMS, TERMS, TERMS, replace(TERMS, settings=(("batch", "1"),))])
event_kinds = st.one_of(
    st.builds(Arrived, st.integers(1, 9), names, st.sampled_from(["0.1.0", "0.1.0", "0.2.0"])),
    st.builds(Offered, names, other_terms),
    st.builds(Beaten, names, st.integers(0, 9), st.integers(0, 9)),
    st.builds(Failed, names, st.just("no")),
    st.builds(Finished, names),
    st.builds(ConnectionLost, names),
    st.builds(ProcessExited, names, st.sampled_from([0, 1, -9, -15, roster.QUIET_EXIT])),
    st.just(Tick()),
    st.just(events.Hindered("the disk is full")),
    st.builds(Interrupted, st.sampled_from([2, 15])),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Timed]:
    now_s, history = 0.0, []
    beginnings: list[list[Timed]] = [[], arrivals(4), arrivals(4) + offers(4)]
    history += draw(st.sampled_from(beginnings))
    for event in draw(st.lists(event_kinds, max_size=30)):
        now_s += draw(st.sampled_from([0.0, 0.01, 0.5, 2.0, 6.0]))
        history.append((event, now_s))
    return history


def closing(history: list[Timed]) -> list[Timed]:
    """What follows when every process ends and every connection closes."""
    last_s = history[-1][1] if history else 0.0
    ends: list[Timed] = [(ProcessExited(worker, 0), last_s) for worker in W]
    ends += [(ConnectionLost(worker), last_s) for worker in W]
    return [*ends, (Tick(), last_s + 2.0)]


@given(histories())
def test_every_run_ends_exactly_once_and_nothing_follows(history: list[Timed]) -> None:
    state, effects = fed(fresh(4), history + closing(history))
    assert isinstance(state.stage, members.Over)
    ends = [index for index, effect in enumerate(effects) if isinstance(effect, Ended)]
    assert len(ends) == 1
    assert all(isinstance(effect, Dismiss) for effect in effects[ends[0] + 1 :])


@given(histories())
def test_a_run_looks_well_only_if_everybody_finished(history: list[Timed]) -> None:
    state, effects = fed(fresh(4), history + closing(history))
    (end,) = only(Ended, effects)
    assert isinstance(end, Ended)
    finished = all(isinstance(member.link, members.Done) for member in state.members)
    assert end.exit_status != 0 or (finished and end.completed)
    assert end.completed <= finished
    assert 0 <= end.exit_status < 256


@given(histories())
def test_numbers_are_never_used_twice_and_rosters_are_in_order(history: list[Timed]) -> None:
    _, effects = fed(fresh(4), history)
    starts = [effect for effect in effects if isinstance(effect, StartEra)]
    assert [start.era for start in starts] == sorted({start.era for start in starts})
    assert [start.attempt for start in starts] == sorted({start.attempt for start in starts})
    assert all(list(start.roster) == W for start in starts)


@given(histories())
def test_after_a_stop_every_process_is_killed_within_two_graces(history: list[Timed]) -> None:
    state, _ = fed(fresh(4), history)
    if not isinstance(state.stage, members.Stopping):
        return
    last_s = history[-1][1]
    ticks: list[Timed] = [(Tick(), last_s + grace * roster.GRACE_S) for grace in (1.01, 2.02)]
    after, effects = fed(state, ticks)
    if isinstance(after.stage, members.Over):
        return
    alive = {m.worker for m in after.members if isinstance(m.process, members.Alive)}
    killed = {effect.worker for effect in effects if isinstance(effect, Kill)}
    assert alive <= killed or state.stage.urge is members.Urge.KILLED


@given(histories())
def test_every_arrival_is_answered(history: list[Timed]) -> None:
    state = fresh(4)
    for event, now_s in history:
        state, effects = roster.advance(state, event, now_s)
        if isinstance(event, Arrived):
            answers = [e for e in effects if isinstance(e, events.Admit | Refuse | Dismiss)]
            assert [answer.peer for answer in answers] == [event.peer]


@given(st.lists(st.sampled_from(W), min_size=1, max_size=4, unique=True))
def test_equal_terms_never_differ(workers: list[WorkerId]) -> None:
    assert difference([(worker, TERMS) for worker in workers]) is None


def test_members_are_values() -> None:
    assert Member(W[0]) == Member(W[0])
