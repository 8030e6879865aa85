"""Who is left out when no group can be formed: core.membership.reachability, core.membership.failed_formations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_roster import World, of, texts

from pliant.coordinator import convert
from pliant.core.membership import failed_formations, processes, reachability, roster
from pliant.core.membership.events import (
    Admit,
    BreakEra,
    Dismiss,
    Drained,
    Effect,
    Note,
    PlanEra,
    Refuse,
    SlotId,
    StartEra,
    Unformed,
    VoidPlan,
)
from pliant.core.membership.reachability import Candidate, FormationFailure, Reachability
from pliant.core.membership.roster import EraMember, Steady, Waiting
from pliant.types import WorkerId


def named(*names: str) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(name) for name in names)


def known(*pairs: tuple[str, str]) -> Reachability:
    state = Reachability()
    everybody = tuple(sorted({WorkerId(name) for pair in pairs for name in pair}))
    for who, whom in pairs:
        state = reachability.reported(state, 1, everybody, FormationFailure(WorkerId(who), named(whom)), 0.0)
    return state


def members_named(*names: str, holding: str = "") -> list[Candidate]:
    return [Candidate(WorkerId(name), holds=not holding or name in holding.split()) for name in names]


# who is left out


def test_the_busiest_end_goes_and_in_a_tie_the_latest_comer() -> None:
    abc = members_named("a", "b", "c")
    assert reachability.outsiders(known(("a", "b"), ("c", "b")), abc, members_too=True) == ["b"]
    assert reachability.outsiders(known(("a", "b")), abc, members_too=True) == ["b"]
    two_sides = known(("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"))
    assert reachability.outsiders(two_sides, members_named("a", "b", "c", "d"), members_too=True) == ["d", "c"]


def test_newcomers_go_before_members() -> None:
    candidates = [*members_named("a", "b"), Candidate(WorkerId("n"), newcomer=True)]
    pairs = known(("a", "b"), ("a", "n"), ("n", "b"))
    assert reachability.outsiders(pairs, candidates, members_too=False) == ["n"]
    assert reachability.outsiders(known(("a", "b")), candidates, members_too=False) == []


def test_the_last_one_that_holds_the_state_stays() -> None:
    candidates = members_named("a", "b", "c", holding="a")
    assert reachability.outsiders(known(("b", "a"), ("c", "a")), candidates, members_too=True) == ["c", "b"]


def test_where_nobody_is_named_newcomers_go_and_then_the_latest_comer() -> None:
    state = reachability.reported(Reachability(), 1, named("a", "b", "n"), FormationFailure(WorkerId("a")), 0.0)
    candidates = [*members_named("a", "b"), Candidate(WorkerId("n"), newcomer=True)]
    assert reachability.outsiders(state, candidates, members_too=True) == ["n"]
    assert reachability.outsiders(state, members_named("a", "b"), members_too=True) == ["b"]
    away = reachability.reported(
        Reachability(), 1, named("a", "b"), FormationFailure(WorkerId("a"), connecting=False), 0.0
    )
    assert reachability.outsiders(away, members_named("a", "b"), members_too=True) == []


everybody = st.integers(2, 6).map(lambda n: [f"m{i}" for i in range(n)])


@given(st.data(), everybody)
def test_what_is_left_can_be_connected_and_somebody_holds_the_state(data: st.DataObject, names: list[str]) -> None:
    pairs = data.draw(st.sets(st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda p: p[0] != p[1])))
    holding = data.draw(st.sets(st.sampled_from(names), min_size=1))
    state = known(*pairs)
    candidates = [Candidate(WorkerId(name), holds=name in holding) for name in names]
    out = reachability.outsiders(state, candidates, members_too=True)
    left = set(names) - set(out)
    assert left & holding
    assert not [pair for pair in pairs if set(pair) <= left]


def test_intervals_grow_and_are_bounded() -> None:
    state, waited = Reachability(), []
    for _ in range(8):
        state, again_s = reachability.left_out(state, "w4", 5.0, 100.0)
        waited.append(again_s)
    assert waited == [10, 20, 40, 80, 160, 300, 300, 300]
    assert not reachability.eligible(state, "w4", 399.0) and reachability.eligible(state, "w4", 400.0)
    assert reachability.interval_s(1, 60.0) == 10.0 and reachability.interval_s(1, 1.0) == 2.0


def test_suspects_are_tried_by_themselves() -> None:
    state = Reachability()
    for slot in ("w1", "w2"):
        state, _ = reachability.left_out(state, slot, 5.0, 0.0)
    assert reachability.taken(state, ["w1", "w2", "w3"], 20.0, suspects=True) == ["w3"]
    assert reachability.taken(state, ["w1", "w2"], 20.0, suspects=True) == ["w1"]
    assert reachability.taken(state, ["w1", "w2"], 20.0, suspects=False) == []
    assert reachability.taken(state, ["w1", "w2"], 5.0, suspects=True) == []


# what the coordinator does


def unformed(world: World, era: int, **unreached: str) -> list[Effect]:
    return list(world.feed(*(Unformed(WorkerId(w), era, named(*them.split())) for w, them in unreached.items())))


def shown(world: World, name: str) -> str:
    """The word for it in ``pliant status``."""
    worker = roster.worker_of(world.state, WorkerId(name))
    slot = roster.slot_of(world.state, SlotId(name))
    assert slot is not None
    unreachable = worker is not None and failed_formations.is_unreachable(world.state, worker)
    return convert.word(slot, worker, unreachable=unreachable)


def with_newcomer() -> World:
    world = World().started(2)
    world.enlist(1, owner=False)
    world.hello("w2")
    assert of(PlanEra, world.ready("w2"))
    return world


def test_a_plan_that_cannot_be_formed_is_dropped_and_the_era_goes_on() -> None:
    world = with_newcomer()
    effects = [*unformed(world, 2, w0="w2"), *world.wait(4.1, ("w0", "w1", "w2"))]
    assert not of(BreakEra, effects)
    assert of(VoidPlan, effects) == [VoidPlan(2, ("w0", "w1", "w2"))]
    assert isinstance(world.state.course, Steady) and world.state.course.era == 1
    (said,) = texts(effects)
    assert said == (
        "w2 on host cannot be reached on its data port by w0: it is left out and tried again in 10 s; "
        "open all TCP ports between the hosts, or let it go with `pliant drain w2`"
    )


def test_it_is_dropped_as_soon_as_all_have_said_so() -> None:
    world = with_newcomer()
    assert of(VoidPlan, unformed(world, 2, w0="w2", w1="w2", w2="w0 w1"))
    assert any("by w0, w1: it is left out" in note.text for note in of(Note, world.effects))


def test_it_waits_is_shown_as_unreachable_and_is_tried_again_at_growing_intervals() -> None:
    world = with_newcomer()
    unformed(world, 2, w0="w2", w1="w2", w2="")
    worker = roster.worker_of(world.state, WorkerId("w2"))
    assert worker is not None and isinstance(worker.standing, Waiting)
    assert shown(world, "w2") == "unreachable"
    names = ("w0", "w1", "w2")
    assert not of(PlanEra, world.wait(9.9, names))
    (plan,) = of(PlanEra, world.wait(0.2, names))
    assert plan.roster == ("w0", "w1", "w2")
    assert shown(world, "w2") == "unreachable", "while it is tried, too"
    effects = unformed(world, plan.era, w0="w2", w1="w2", w2="")
    assert texts(effects) == [], "it was told once"
    assert not of(PlanEra, world.wait(19.9, names))
    (plan,) = of(PlanEra, world.wait(0.2, names))
    world.enter(plan.era, "w0", "w1", "w2")
    assert isinstance(world.state.course, Steady) and world.state.reach.left_out == ()
    assert shown(world, "w2") == "training"


def test_it_can_be_drained_while_it_waits_and_while_it_is_tried() -> None:
    world = with_newcomer()
    unformed(world, 2, w0="w2", w1="w2", w2="")
    assert of(Dismiss, world.feed(Drained(SlotId("w2"))))
    world = with_newcomer()
    world.feed(Drained(SlotId("w2")))
    assert of(Dismiss, unformed(world, 2, w0="w2", w1="w2", w2=""))
    assert processes.kept(world.state) != [] and isinstance(world.state.course, Steady)


def test_others_come_in_meanwhile() -> None:
    world = with_newcomer()
    unformed(world, 2, w0="w2", w1="w2", w2="")
    world.enlist(1, owner=False)
    world.hello("w3")
    (plan,) = of(PlanEra, world.ready("w3"))
    assert plan.roster == ("w0", "w1", "w3")


def test_a_plan_between_members_that_cannot_reach_each_other_is_tried_again_later() -> None:
    world = with_newcomer()
    effects = [*unformed(world, 2, w0="w1", w1="", w2="")]
    assert of(VoidPlan, effects) and not of(BreakEra, effects)
    assert texts(effects) == [
        "the group of era 2 could not be formed (w0 cannot reach the data port of w1): it is tried again in 10 s"
    ]
    assert not of(PlanEra, world.wait(9.9, ("w0", "w1", "w2")))
    assert of(PlanEra, world.wait(0.2, ("w0", "w1", "w2")))


def test_a_coordinator_that_was_away_is_nobodys_fault() -> None:
    world = with_newcomer()
    world.feed(*(Unformed(WorkerId(name), 2, (), connecting=False) for name in ("w0", "w1", "w2")))
    assert isinstance(world.state.course, Steady) and world.state.reach.left_out == ()
    assert of(PlanEra, world.wait(10.1, ("w0", "w1", "w2")))


def test_a_plan_is_not_dropped_while_members_may_still_begin_it() -> None:
    """Only a newcomer has failed, and cannot say why: the members may have formed the group."""
    world = with_newcomer()
    effects = [*unformed(world, 2, w2=""), *world.wait(5.0, ("w0", "w1", "w2"))]
    assert not of(VoidPlan, effects)
    world.enter(2, "w0", "w1")
    assert not of(VoidPlan, world.wait(20.0, ("w0", "w1", "w2")))


def parted(world: World, era: int, names: str, **unreached: str) -> list[Effect]:
    """The members of an era cannot form their group, and stop."""
    effects = [*unformed(world, era, **unreached), *world.stop(era, *names.split())]
    return [*effects, *world.wait(0.2, tuple(names.split()))]


def test_a_member_that_cannot_be_reached_is_left_out_after_the_second_formation() -> None:
    world = World().started(3)
    world.stop(1, "w0", "w1", "w2")
    (start,) = of(StartEra, world.wait(0.2))
    (again,) = of(StartEra, parted(world, start.era, "w0 w1 w2", w0="w2", w1="w2"))
    assert again.roster == ("w0", "w1", "w2"), "once may be chance"
    effects = parted(world, again.era, "w0 w1 w2", w0="w2", w1="w2")
    (third,) = of(StartEra, effects)
    assert third.roster == ("w0", "w1")
    (refused,) = of(Refuse, effects)
    assert refused.again and refused.peer == world.peers["w2"]
    assert any(note.kind == "unreachable" and not note.quiet for note in of(Note, effects))
    world.enter(third.era, "w0", "w1", exchange=6)
    (admit,) = of(Admit, world.hello("w2"))
    assert admit.worker == "w2.2"
    assert not of(PlanEra, world.ready("w2.2"))
    (plan,) = of(PlanEra, world.wait(10.1, ("w0", "w1", "w2.2")))
    assert plan.roster == ("w0", "w1", "w2.2")


def test_a_newcomer_in_an_unplanned_era_is_left_out_at_once() -> None:
    world = World().started(2)
    world.stop(1, "w0")
    world.enlist(1, owner=False)
    world.hello("w2")
    world.ready("w2")
    world.wait(0.2, ("w1", "w2"))
    (start,) = of(StartEra, world.stop(1, "w1"))
    assert start.roster == ("w0", "w1", "w2")
    (again,) = of(StartEra, parted(world, start.era, "w0 w1 w2", w0="w2"))
    assert again.roster == ("w0", "w1")
    worker = roster.worker_of(world.state, WorkerId("w2"))
    assert worker is not None and isinstance(worker.standing, Waiting)


def test_where_somebody_was_lost_nobody_is_blamed() -> None:
    world = World().started(3)
    world.stop(1, "w0", "w1", "w2")
    (start,) = of(StartEra, world.wait(0.2))
    (again,) = of(StartEra, parted(world, start.era, "w0 w1 w2", w0="w2"))
    world.feed(Unformed(WorkerId("w0"), again.era, named("w2")))
    world.exit("w2", -9)
    (third,) = of(StartEra, world.stop(again.era, "w0", "w1"))
    assert third.roster == ("w0", "w1") and world.state.reach.left_out == ()


def test_what_a_worker_said_when_it_stopped_outlives_its_connection() -> None:
    """Its link tells of the user's own state, too, and that is still on its way."""
    world = World().started(2)
    world.stop(1, "w0")
    world.wait(0.2, ("w1",))
    world.cut("w0")
    world.hello("w0", "w0", era=1, exchange=5, active=False)
    worker = roster.worker_of(world.state, WorkerId("w0"))
    assert worker is not None and isinstance(worker.standing, EraMember) and worker.standing.active
