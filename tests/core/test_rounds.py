"""What a group of real workers in virtual time does with the decisions of core.rounds."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scenes import scenes

from pliant.core import consistency, ledger, rounds
from pliant.core.consistency import Mismatch
from pliant.core.group_state import GroupState, Policy, Standing, founded
from pliant.core.journal.records import ExchangeRecord, PhaseEndRecord, PhaseRecord, RoundRecord
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.core.tuning import delay
from pliant.testing.steady import EarlyExit, SteadyCall, SteadyHistory, SteadyScene, played
from pliant.types import WorkerId


def phases(play: SteadyHistory) -> dict[int, PhaseRecord]:
    return {record.phase: record for record in play.records if isinstance(record, PhaseRecord)}


def settlements(play: SteadyHistory) -> list[RoundRecord | ExchangeRecord]:
    return [record for record in play.records if isinstance(record, RoundRecord | ExchangeRecord)]


def positions(play: SteadyHistory, phase: int) -> tuple[list[int], list[int]]:
    """Positions used and cut in a phase, with repetitions."""
    used: list[int] = []
    cut: list[int] = []
    for record in play.records:
        if isinstance(record, RoundRecord | ExchangeRecord) and record.phase == phase:
            used += [p for ticket in record.tickets for start, stop in ticket.spans for p in range(start, stop)]
        if isinstance(record, PhaseEndRecord) and record.phase == phase:
            cut += [p for start, stop in record.cut for p in range(start, stop)]
    return used, cut


@settings(max_examples=50)
@given(scenes())
def test_every_position_once_or_cut_whatever_happens(scene: SteadyScene) -> None:
    play = played(scene)
    ended = {record.phase for record in play.records if isinstance(record, PhaseEndRecord)}
    assert ended == set(phases(play))
    for number, phase in phases(play).items():
        used, cut = positions(play, number)
        wanted = phase.limit or len(cut)
        assert sorted(used + cut) == list(range(wanted))
        assert not cut or phase.limit == 0 or any(call.exits for call in scene.script)


@settings(max_examples=40)
@given(scenes())
def test_all_workers_reach_the_same_states(scene: SteadyScene) -> None:
    leader, *others = played(scene).members
    for member in others:
        assert member.states == leader.states
        assert member.group == leader.group


@settings(max_examples=50)
@given(scenes())
def test_a_round_that_is_seen_finds_everyone_who_takes_part_in_its_step(scene: SteadyScene) -> None:
    play = played(scene)
    for settlements in zip(*(member.settlements for member in play.members), strict=True):
        outcome, took_part = settlements[0].outcome, settlements[0].took_part
        if outcome.seen:
            left = {b.member for call in scene.script for b in call.exits}
            for member, where in enumerate(each.where for each in settlements):
                # A worker on its way out settles the round before its break after its step: nobody can know yet.
                assert where == "step" or not took_part[member] or (where == "abandon" and member in left)


@settings(max_examples=40)
@given(scenes())
def test_a_round_that_carries_a_break_ends_the_phase_and_is_not_seen(scene: SteadyScene) -> None:
    play = played(scene)
    for record, seen in zip(settlements(play), play.members[0].settlements, strict=True):
        outcome = seen.outcome
        if any(ticket.flags & Flag.BREAK for ticket in record.tickets):
            assert outcome.ended
            assert not outcome.seen


@settings(max_examples=40)
@given(scenes())
def test_rounds_count_what_they_were_handed(scene: SteadyScene) -> None:
    total = 0
    limit = scene.samples_limit
    for record in played(scene).records:
        if isinstance(record, RoundRecord):
            total += record.batch
            assert record.samples_total == total
            assert limit is None or total <= limit
            spoiled = any(ticket.flags & Flag.NONFINITE for ticket in record.tickets)
            assert record.applied == (not spoiled and record.weight > 0)


def end_idle_s(play: SteadyHistory, phase: int) -> float:
    """The longest time between a worker's last finished micro-batch and the end of the last one of all."""
    work = play.computed(phase)
    start_s = min(mine[0].start_s for mine in work if mine)
    end_s = max(mine[-1].stop_s for mine in work if mine)
    return max(end_s - (mine[-1].stop_s if mine else start_s) for mine in work)


def mid_idle(play: SteadyHistory, phase: int) -> float:
    """The part of all workers' time spent waiting while there were positions left to deal."""
    work = [one for mine in play.computed(phase) for one in mine]
    busy_s = sum(one.stop_s - one.start_s for one in work)
    waits = [wait for member in play.members for wait in member.waits if wait.phase == phase and not wait.last]
    return sum(wait.stop_s - wait.start_s for wait in waits) / busy_s


PACED = st.sampled_from([5.0, 10.0, 20.0, 40.0, 80.0, 160.0])


@st.composite
def measured_scenes(draw: st.DrawFn) -> SteadyScene:
    """A first epoch to measure the paces, and a second one of any length; constant speeds."""
    members = draw(st.integers(2, 6))
    each = {"min_size": members, "max_size": members}
    speeds = tuple(draw(st.lists(PACED, **each)))
    size = st.sampled_from([2, 4, 8, 16, 32])
    sizes = tuple(draw(st.one_of(st.lists(size, **each), size.map(lambda one: [one] * members))))
    fastest_s = min(size / speed for size, speed in zip(sizes, speeds, strict=True))
    kind = draw(st.sampled_from([Kind.TRAIN, Kind.TRAIN, Kind.EVALUATE]))
    return SteadyScene(
        policy=Policy(32, floating=True),
        speeds=speeds,
        sizes=sizes,
        script=(SteadyCall(kind, 800), SteadyCall(kind, draw(st.integers(1, 1500)), 1)),
        ahead=tuple(draw(st.one_of(st.just([0] * members), st.lists(st.sampled_from([0, 2, 8]), **each)))),
        sum_s=draw(st.sampled_from([0.01, 0.1, 1.0, 4.0])) * fastest_s,
    )


def remembered(speeds: tuple[float, ...], size: int, length: int, sum_s: float) -> SteadyScene:
    """A scene that once failed."""
    script = (SteadyCall(Kind.TRAIN, 800), SteadyCall(Kind.TRAIN, length, 1))
    return SteadyScene(Policy(32, floating=True), speeds, (size,) * len(speeds), script, sum_s=sum_s)


CRUMBS = remembered((20.0, 80.0, 20.0, 80.0, 160.0), 2, 1060, 0.00125)
FAST_AND_SLOW = remembered((160.0, 80.0, 5.0), 32, 1896, 0.0064)
LONG_SUMS = remembered((5.0, 5.0), 8, 226, 6.4)


def slowest_s(scene: SteadyScene) -> float:
    """One micro-batch of the slowest worker; shares are whole, so a sample more."""
    return max((size + 1) / speed for size, speed in zip(scene.sizes, scene.speeds, strict=True))


@settings(max_examples=30)
@given(measured_scenes())
@example(CRUMBS)
@example(FAST_AND_SLOW)
@example(LONG_SUMS)
def test_at_the_end_nobody_waits_longer_than_a_micro_batch_of_the_slowest(scene: SteadyScene) -> None:
    assert end_idle_s(played(scene), 2) <= slowest_s(scene) + scene.sum_s + 1e-9


@settings(max_examples=25)
@given(measured_scenes())
@example(CRUMBS)
@example(FAST_AND_SLOW)
@example(LONG_SUMS)
def test_with_an_open_batch_nobody_waits_in_mid_epoch(scene: SteadyScene) -> None:
    assert mid_idle(played(scene), 2) <= 0.01


@settings(max_examples=20)
@given(measured_scenes(), st.sampled_from([1, 2, 4]))
def test_a_fixed_batch_ends_together_too_where_shares_are_not_at_the_floor(scene: SteadyScene, times: int) -> None:
    batch = int(2 * times * sum(scene.speeds) / min(scene.speeds))
    calls = tuple(replace(call, kind=Kind.TRAIN) for call in scene.script)
    # The first rounds of a run are shared evenly, for want of paces: only the second epoch counts.
    scene = replace(scene, policy=Policy(batch), script=(replace(calls[0], length=3 * batch), calls[1]))
    assert end_idle_s(played(scene), 2) <= slowest_s(scene) + scene.sum_s + 1e-9


@pytest.mark.parametrize("policy", [Policy(32), Policy(32, delay=0), Policy(32, floating=True)])
def test_evaluate_inside_batches_is_called_by_all_at_the_same_round(policy: Policy) -> None:
    script = (SteadyCall(Kind.TRAIN, 403), SteadyCall(Kind.EVALUATE, 31), SteadyCall(Kind.TRAIN, 403, 1))
    play = played(SteadyScene(policy, (100.0, 40.0, 20.0), (8, 8, 4), script, evaluates_every=3))
    assert sum(phase.task == "evaluate" for phase in phases(play).values()) > 3
    results = [record.result for record in play.records if isinstance(record, PhaseEndRecord)]
    assert all(result == pytest.approx(0.1) for result in results if result is not None)


def test_a_break_cuts_what_was_not_reached() -> None:
    exits = (EarlyExit(1, 3, computed=False),)
    play = played(SteadyScene(Policy(8), (10.0, 10.0), (4, 4), (SteadyCall(Kind.TRAIN, 100, exits=exits),)))
    used, cut = positions(play, 1)
    assert used
    assert cut[-1] == 99
    assert sorted(used + cut) == list(range(100))


def test_samples_end_inside_an_epoch() -> None:
    scene = SteadyScene(
        Policy(8), (10.0, 10.0), (4, 4), (SteadyCall(Kind.TRAIN, 50), SteadyCall(Kind.TRAIN, 50, 1)), samples_limit=70
    )
    assert [phase.limit for phase in phases(played(scene)).values()] == [50, 20]


def entering(**changed: object) -> Ticket:
    return replace(Ticket(1, 0, 0, Kind.TRAIN, Flag.OPENING, length=10, size=2), **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"length": 9}, "dataset lengths differ: 10 samples on w0 but 9 on w1"),
        ({"order": 1}, "the order of the samples differs between w0 and w1"),
        ({"epoch": 1}, "w0 is in epoch 0 but w1 in epoch 1"),
        ({"kind": Kind.EVALUATE}, "w0 is in the start of batches while w1 is in the start of evaluate"),
        ({"flags": Flag.NONE}, "w0 is in the start of batches while w1 is in the middle of batches"),
        ({"kind": Kind.END}, "w1 is in the end of the script"),
        ({"digest": 1}, "w0 and w1 disagree about the run's state"),
    ],
)
def test_workers_that_do_different_things_are_named(changed: dict[str, object], said: str) -> None:
    group = founded(Policy(4), 1, [WorkerId("w0"), WorkerId("w1")])
    answer = rounds.opened(group, [entering(), entering(**changed)])
    assert isinstance(answer, Mismatch)
    assert said in answer.reason


@pytest.mark.parametrize("outside", [{"kind": Kind.EVALUATE, "length": 7}, {"kind": Kind.END}, {"epoch": 1}])
def test_in_a_loop_that_has_ended_those_in_its_body_come_first(outside: dict[str, object]) -> None:
    group = founded(Policy(4), 1, [WorkerId("w0"), WorkerId("w1")])
    inner = entering(kind=Kind.EVALUATE, flags=Flag.OPENING | Flag.INNER)
    for tickets, present in (
        ([inner, entering(**outside)], (True, False)),
        ([entering(**outside), inner], (False, True)),
    ):
        answer = rounds.opened(group, tickets)
        assert not isinstance(answer, Mismatch)
        assert answer.phase.inner and answer.phase.kind is Kind.EVALUATE and answer.phase.length == 10
        assert answer.phase.present == present


def test_the_end_waits_for_active_members_that_went_along() -> None:
    """Such a one is still in its last call: it may ask the others for the user's state."""
    group = founded(Policy(1), 1, [WorkerId("w0"), WorkerId("w1")])
    end, along = entering(kind=Kind.END), entering(flags=Flag.FOLLOWING)
    first = rounds.concluded(group, [end, along])
    assert not first.over and first.exchange == group.exchange + 1
    assert rounds.concluded(first, [end, end]).over
    for standing in (Standing.FOLLOWING, Standing.LEAVING):
        assert rounds.concluded(replace(group, standings=(Standing.ACTIVE, standing)), [end, along]).over


def test_alone_there_is_nothing_to_overlap_with() -> None:
    play = played(SteadyScene(Policy(8, delay=1), (10.0,), (8,), (SteadyCall(Kind.TRAIN, 20),)))
    assert [record.batch for record in settlements(play)] == [8, 8, 4]
    assert {each.where for each in play.members[0].settlements} == {"step"}


def test_an_open_batch_alone_is_the_reference_batch() -> None:
    play = played(SteadyScene(Policy(8, floating=True), (10.0,), (8,), (SteadyCall(Kind.TRAIN, 20),)))
    assert [record.batch for record in settlements(play)] == [8, 8, 4]


def test_where_the_overlap_ends_nothing_is_dealt_to_who_goes_along() -> None:
    """It may have gone along with the very next round already, and would never draw what it is dealt for it."""
    roster = [WorkerId("w0"), WorkerId("w1")]
    group = founded(Policy(24, floating=True, delay=delay.AUTO), 1, roster)
    opening = Ticket(1, 0, 0, Kind.TRAIN, Flag.OPENING, length=200, size=4, digest=consistency.digest(group))
    opened = rounds.opened(group, [opening] * 2)
    assert isinstance(opened, GroupState)
    held = ledger.give_back(ledger.unbounded(opened.phase.ledger), 1)
    alone = replace(opened.phase, present=(True, False), took_part=(True, False), ledger=held)
    group = replace(opened, open=(alone,), choice=replace(opened.choice, delay=1, turning=True))
    samples = ledger.samples_of(held.hands[0].queue[0])
    enters = Ticket(1, 0, 1, Kind.TRAIN, Flag.READY | Flag.FOLLOWING, size=4, digest=consistency.digest(group))
    computes = replace(enters, flags=Flag.NONE, micro_batches=1, samples=samples, weight=float(samples), busy_s=0.01)
    decision = rounds.settled(group, [computes, enters])
    assert isinstance(decision, tuple)
    after, _ = decision
    assert after.delay == 0 and after.phase.present == (True, True)
    assert after.phase.ledger.hands[0].quotas and not after.phase.ledger.hands[1].queue
    assert after.phase.ledger.hands[0].granted_samples == 24
