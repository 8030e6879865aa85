"""Who takes part, when eras start, how runs end: core.membership.advance and its parts,
core.membership.compatibility."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pliant.core.membership import advance, eras, events, liveness, processes
from pliant.core.membership import roster as members
from pliant.core.membership.compatibility import Terms, difference, length_difference
from pliant.core.membership.events import (
    Admit,
    AgentArrived,
    AgentId,
    AgentLost,
    Arrived,
    AskToLeave,
    BreakEra,
    ConnectionLost,
    CoordinatorFailed,
    Dismiss,
    Drained,
    Effect,
    Ended,
    Enroll,
    Entered,
    Event,
    Failed,
    Finished,
    Heartbeat,
    Interrupted,
    JoinRequested,
    Kill,
    Leaving,
    Note,
    PlanEra,
    PreemptionNotice,
    ProcessExited,
    Refuse,
    ReleaseAgent,
    Scaled,
    SlotId,
    Start,
    StartEra,
    StopAll,
    Stopped,
    Terminate,
    Tick,
    Unformed,
)
from pliant.core.membership.roster import Gathering, Roster, Rules, Running, RunOver, Steady, Stopping
from pliant.types import WorkerId

TERMS = Terms(
    "0.1.0",
    (("fc.weight", (10, 64), "float32"), ("fc.bias", (10,), "float32")),
    (("batch", "256"),),
    torch="2.13",
    python="3.11",
    device="cpu",
)
OWNER = AgentId("a0")
Kind = TypeVar("Kind")


class World:
    """The roster with everything that happens to it written down."""

    def __init__(self, state: Roster | None = None, **rules: Any) -> None:
        self.now_s = 100.0
        made = Rules("train.py", "0.1.0", **rules)
        self.state = state or advance.gathered(made, 1, 5.0, self.now_s)
        self.effects: list[Effect] = []
        self.peers: dict[str, int] = {}
        self.peer = 0

    def feed(self, *history: Event) -> list[Effect]:
        fresh: list[Effect] = []
        for event in history:
            self.state, more = advance.advance(self.state, event, self.now_s)
            fresh += more
        self.effects += fresh
        return fresh

    def wait(self, seconds: float, beating: tuple[str, ...] = ()) -> list[Effect]:
        fresh: list[Effect] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s = min(until_s, self.now_s + 0.05)
            fresh += self.feed(*(Heartbeat(WorkerId(name), 1, int(self.now_s * 100)) for name in beating), Tick())
        return fresh

    def enlist(self, wanted: int, *, owner: bool = True, name: str = "", slots: tuple[str, ...] = ()) -> list[Effect]:
        self.peer += 1
        listed = tuple(SlotId(slot) for slot in slots)
        return self.feed(AgentArrived(self.peer, AgentId(name), "0.1.0", listed, wanted, owner))

    def hello(self, slot: str, worker: str = "", **where: Any) -> list[Effect]:
        self.peer += 1
        fresh = self.feed(Arrived(self.peer, SlotId(slot), WorkerId(worker), "0.1.0", **where))
        for admit in of(Admit, fresh):
            self.peers[admit.worker] = self.peer
        return fresh

    def ready(self, *names: str, terms: Terms = TERMS) -> list[Effect]:
        return self.feed(*(JoinRequested(WorkerId(name), terms, f"host:{name}") for name in names))

    def enter(self, era: int, *names: str, exchange: int = 1) -> list[Effect]:
        return self.feed(*(Entered(WorkerId(name), era, exchange) for name in names))

    def stop(self, era: int, *names: str, exchange: int = 5, active: bool = True) -> list[Effect]:
        return self.feed(*(Stopped(WorkerId(name), era, exchange, active) for name in names))

    def cut(self, name: str) -> list[Effect]:
        return self.feed(ConnectionLost(WorkerId(name), self.peers[name]))

    def exit(self, slot: str, status: int, error: str = "", agent: AgentId = OWNER) -> list[Effect]:
        self.peer += 1
        return self.feed(ProcessExited(agent, SlotId(slot), self.peer + 1000, status, error))

    def started(self, n: int) -> World:
        self.enlist(n)
        names = [f"w{i}" for i in range(n)]
        for name in names:
            self.hello(name)
        self.ready(*names)
        self.enter(1, *names)
        return self

    def restarted(self, slot: str) -> str:
        """The slot's process is started again and wants to be in."""
        (admit,) = of(Admit, self.hello(slot))
        self.ready(admit.worker)
        return admit.worker


def of(kind: type[Kind], effects: list[Effect]) -> list[Kind]:
    return [effect for effect in effects if isinstance(effect, kind)]


def texts(effects: list[Effect]) -> list[str]:
    return [note.text for note in of(Note, effects) if not note.quiet]


# the first era


def test_names_are_ordered_by_number() -> None:
    assert sorted(["w10", "w9", "w0"], key=advance.name_order) == ["w0", "w9", "w10"]


def test_the_era_starts_when_the_last_slot_is_ready_in_the_order_of_slots() -> None:
    world = World()
    assert of(Enroll, world.enlist(3)) == [Enroll(1, OWNER, (SlotId("w0"), SlotId("w1"), SlotId("w2")))]
    for name in ("w2", "w1", "w0"):
        world.hello(name)
    assert not of(StartEra, world.ready("w2", "w1"))
    (start,) = of(StartEra, world.ready("w0"))
    assert (start.era, start.attempt, start.donor, start.exchange) == (1, 1_000_001, "w0", 0)
    assert start.roster == start.to == ("w0", "w1", "w2")


def test_a_slot_that_cools_down_is_not_waited_for() -> None:
    world = World()
    world.enlist(2)
    world.hello("w0")
    world.ready("w0")
    (start,) = of(StartEra, world.exit("w1", -9))
    assert start.roster == ("w0",)


def test_but_it_is_where_fewer_than_the_least_are_there() -> None:
    world = World(min_workers=2)
    world.enlist(2)
    world.hello("w0")
    world.ready("w0")
    assert not of(StartEra, world.exit("w1", -9))
    assert of(Start, world.wait(0.6)) == [Start(OWNER, SlotId("w1"))]
    assert of(StartEra, (world.hello("w1"), world.ready("w1"))[1])


OTHERS = [
    (replace(TERMS, parameters=(("fc.weight", (10, 32), "float32"), TERMS.parameters[1])), "is (10, 64) on w0 but (10"),
    (replace(TERMS, parameters=(("fc.weight", (10, 64), "bfloat16"), TERMS.parameters[1])), "float32 on w0 but bfloat"),
    (replace(TERMS, parameters=TERMS.parameters[:1]), "models differ: 'fc.bias' is missing on w1 but not on w0; give"),
    (replace(TERMS, parameters=(*TERMS.parameters, ("x", (1,), "float32"))), "'x' is missing on w0 but not on w1; g"),
    (replace(TERMS, parameters=TERMS.parameters[::-1]), "order has 'fc.weight' on w0 where w1 has 'fc.bias'; give"),
    (replace(TERMS, settings=(("batch", "128"),)), "settings differ: batch is 256 on w0 but 128 on w1; call pliant"),
    (
        replace(TERMS, version="0.2.0"),
        "versions of Pliant differ: 0.1.0 on w0 but 0.2.0 on w1; install the same one",
    ),
    (replace(TERMS, torch="2.12"), "versions of torch differ: 2.13 on w0 but 2.12 on w1; install the same one"),
    (replace(TERMS, python="3.12"), "versions of Python differ: 3.11 on w0 but 3.12 on w1; install the same one"),
    (replace(TERMS, device="cuda"), "devices differ: the model is on cpu on w0 but on cuda on w1; move it to the"),
]


@pytest.mark.parametrize(("other", "said"), OTHERS)
def test_what_differs_before_the_first_era_ends_the_run(other: Terms, said: str) -> None:
    world = World()
    world.enlist(2)
    world.hello("w0")
    world.hello("w1")
    world.ready("w0")
    (stop,) = of(StopAll, world.ready("w1", terms=other))
    assert said in stop.reason
    world.exit("w0", advance.QUIET_EXIT)
    (end,) = of(Ended, world.exit("w1", advance.QUIET_EXIT))
    assert end == Ended(stop.reason, completed=False, exit_status=1)


@pytest.mark.parametrize(("other", "said"), OTHERS)
def test_later_the_newcomer_is_refused_and_the_run_goes_on(other: Terms, said: str) -> None:
    world = World().started(1)
    world.enlist(1, owner=False)
    world.hello("w1")
    effects = world.ready("w1", terms=other)
    (refusal,) = of(Refuse, effects)
    assert said.replace("w0", "the run") in refusal.reason and not refusal.again
    assert isinstance(world.state.course, Steady) and not of(PlanEra, effects)
    assert of(ReleaseAgent, world.exit("w1", 1, agent=AgentId("a1")))[0].exit_status == 1
    assert not of(Start, world.wait(40.0, ("w0",)))


def test_another_version_of_the_library_is_refused() -> None:
    world = World()
    world.enlist(1)
    (refusal,) = of(Refuse, world.feed(Arrived(9, SlotId("w0"), WorkerId(""), "9.9")))
    assert "9.9" in refusal.reason and isinstance(world.state.stage, Stopping)
    assert of(Refuse, World().feed(AgentArrived(1, AgentId(""), "9.9", (), 1, True)))


def test_strangers_and_second_workers_of_a_slot_are_refused() -> None:
    world = World().started(2)
    assert not of(Refuse, world.hello("w7"))[0].again
    assert "once per process" in of(Refuse, world.hello("w1"))[0].reason
    assert isinstance(world.state.course, Steady)


# planned changes


def test_joiners_and_leavers_share_one_plan_and_later_ones_wait() -> None:
    world = World().started(3)
    world.enlist(2, owner=False)
    world.hello("w3")
    world.hello("w4")
    world.feed(Leaving(WorkerId("w0"), "SIGTERM"))
    (plan,) = of(PlanEra, world.effects)
    assert (plan.era, plan.roster, plan.donor) == (2, ("w1", "w2"), "w1") and set(plan.to) == {"w0", "w1", "w2"}
    assert not of(PlanEra, world.ready("w4", "w3"))
    world.enter(2, "w1")
    assert texts(world.feed(Finished(WorkerId("w0"), left=True))) == ["w0 left"]
    (after,) = of(PlanEra, world.enter(2, "w2"))
    assert (after.era, after.roster) == (3, ("w1", "w2", "w4", "w3"))
    assert after.attempt > plan.attempt
    effects = world.enter(3, "w1", "w2", "w3", "w4")
    assert texts(effects) == ["w3 joined", "w4 joined"] and world.state.course == Steady(3, 3)


def test_a_leaver_that_dies_before_the_switch_is_an_unplanned_change() -> None:
    world = World().started(3)
    world.feed(Leaving(WorkerId("w1")))
    (broken,) = of(BreakEra, world.exit("w1", -9))
    assert broken.era == 2 and set(broken.to) == {"w0", "w2"}
    (start,) = of(StartEra, world.stop(1, "w0", "w2"))
    assert (start.era, start.roster) == (3, ("w0", "w2"))


def test_the_group_of_those_who_are_left_is_formed_while_they_stop() -> None:
    world = World().started(4)
    (broken,) = of(BreakEra, world.exit("w1", -9))
    assert broken.roster == ("w0", "w2", "w3") and broken.attempt > 1
    (start,) = of(StartEra, world.stop(1, "w0", "w2", "w3"))
    assert (start.attempt, start.roster) == (broken.attempt, broken.roster)


def test_another_loss_makes_the_group_that_is_being_formed_useless() -> None:
    world = World().started(4)
    (broken,) = of(BreakEra, world.exit("w1", -9))
    world.stop(1, "w0", "w2")
    (start,) = of(StartEra, world.exit("w3", -9))
    assert start.roster == ("w0", "w2") and start.attempt > broken.attempt


def test_a_newcomer_makes_it_useless_too() -> None:
    world = World().started(3)
    (broken,) = of(BreakEra, world.exit("w1", -9))
    world.enlist(1, owner=False)
    world.hello("w3")
    world.ready("w3")
    (start,) = of(StartEra, world.stop(1, "w0", "w2"))
    assert start.roster == ("w0", "w2", "w3") and start.attempt > broken.attempt


def test_after_the_switch_a_leaver_may_end_as_it_likes() -> None:
    world = World().started(2)
    world.feed(Leaving(WorkerId("w1")))
    world.enter(2, "w0")
    effects = world.exit("w1", 0)
    effects += world.wait(0.3, ("w0",))
    assert not of(BreakEra, effects) and texts(effects) == ["w1 left"]
    assert not of(Start, world.wait(5.0, ("w0",)))


def test_a_joiner_that_dies_in_a_plan_breaks_it() -> None:
    world = World().started(1)
    world.enlist(1, owner=False)
    world.hello("w1")
    assert of(PlanEra, world.ready("w1"))
    world.cut("w1")
    (broken,) = of(BreakEra, world.wait(0.6, ("w0",)))
    assert broken.era == 2
    (start,) = of(StartEra, world.stop(1, "w0"))
    assert (start.era, start.roster) == (3, ("w0",))


def test_a_newcomer_whose_plan_is_broken_is_not_waited_for_and_comes_along() -> None:
    world = World().started(2)
    world.enlist(1, owner=False)
    world.hello("w2")
    assert of(PlanEra, world.ready("w2"))
    (broken,) = of(BreakEra, world.exit("w1", -9))
    assert broken.to == ("w0", "w2")
    (start,) = of(StartEra, world.stop(1, "w0"))
    assert (start.roster, start.donor) == (("w0", "w2"), "w0")


def test_the_last_that_holds_the_state_waits_for_its_successor() -> None:
    world = World().started(1)
    world.enlist(1, owner=False)
    world.hello("w1")
    world.feed(Heartbeat(WorkerId("w0"), 1, 1, active=True))
    world.feed(Drained(SlotId("w0")))
    assert of(AskToLeave, world.effects) and not of(PlanEra, world.effects)
    (plan,) = of(PlanEra, world.ready("w1"))
    assert plan.roster == ("w0", "w1") and plan.donor == "w0"
    assert not of(PlanEra, world.enter(2, "w0", "w1"))
    (after,) = of(PlanEra, world.feed(Heartbeat(WorkerId("w1"), 1, 2, active=True)))
    assert after.roster == ("w1",) and after.donor == "w1"


def test_when_all_leave_the_run_ends() -> None:
    world = World().started(2)
    world.feed(Drained(SlotId("w0")), Drained(SlotId("w1")))
    world.enter(2, "w1")
    world.feed(Finished(WorkerId("w0"), left=True))
    assert of(StopAll, world.effects) == [StopAll("all workers have left")]
    world.exit("w0", 0)
    (end,) = of(Ended, world.exit("w1", 0))
    assert end == Ended("all workers have left", completed=False, exit_status=0)


def test_when_the_last_one_leaves_and_others_were_lost_the_run_has_failed() -> None:
    world = resumed(("w0", "w1"))
    world.enlist(0, owner=False, name="a1", slots=("w1",))
    world.hello("w1", worker="w1", era=4, exchange=9)
    world.wait(7.0, ("w1",))
    world.stop(4, "w1", exchange=9)
    (start,) = of(StartEra, world.effects)
    world.enter(start.era, "w1", exchange=9)
    effects = world.feed(Interrupted(AgentId("a1"), 15))
    assert of(StopAll, effects) == [StopAll("no worker is left")]
    assert not [each for each in of(Terminate, effects) if each.slot == "w1"]
    world.feed(Finished(WorkerId("w1"), left=True))
    (end,) = of(Ended, world.exit("w1", 0, agent=AgentId("a1")))
    assert end == Ended("no worker is left", completed=False, exit_status=1)


def test_who_has_left_already_is_not_terminated() -> None:
    world = World().started(2)
    world.feed(Drained(SlotId("w1")))
    world.enter(2, "w0")
    world.feed(Finished(WorkerId("w1"), left=True))
    effects = world.feed(Failed(WorkerId("w0"), "it is broken", fatal=True))
    assert of(StopAll, effects) and not of(Terminate, effects)


def test_max_workers_lets_joiners_wait() -> None:
    world = World(max_workers=2).started(2)
    world.enlist(1, owner=False)
    world.hello("w2")
    effects = world.ready("w2")
    assert not of(PlanEra, effects) and texts(effects) == ["w2 waits for a place: the run has --max-workers 2 workers"]
    assert not texts(world.wait(1.0, ("w0", "w1", "w2")))
    (plan,) = of(PlanEra, world.feed(Drained(SlotId("w1"))))
    assert plan.roster == ("w0", "w2")


def test_a_joined_launcher_that_is_interrupted_takes_its_workers_along() -> None:
    world = World().started(1)
    world.enlist(1, owner=False)
    other = AgentId("a1")
    world.hello("w1")
    world.ready("w1")
    world.enter(2, "w0", "w1")
    effects = world.feed(Interrupted(other, 2))
    assert of(AskToLeave, effects) and of(PlanEra, effects)[0].roster == ("w0",)
    world.enter(3, "w0")
    world.feed(Finished(WorkerId("w1"), left=True))
    (release,) = of(ReleaseAgent, world.exit("w1", 0, agent=other))
    assert release.agent == other and release.exit_status == 0 and isinstance(world.state.stage, Running)


def test_a_noticed_machine_is_left_and_a_second_signal_kills() -> None:
    world = World().started(1)
    world.enlist(1, owner=False)
    world.hello("w1")
    assert of(Dismiss, world.feed(PreemptionNotice(AgentId("a1"))))[0].completed
    assert of(Kill, world.feed(Interrupted(AgentId("a1"), 2))) == [Kill(AgentId("a1"), SlotId("w1"))]


# unplanned changes


@pytest.mark.parametrize("first", ["exit", "cut", "failed"])
def test_a_death_is_confirmed_at_once_by_a_second_witness(first: str) -> None:
    world = World().started(3)
    if first == "exit":
        effects = world.exit("w2", -9)
    elif first == "cut":
        assert not of(BreakEra, world.cut("w2"))
        effects = world.exit("w2", -9)
    else:
        world.cut("w2")
        effects = world.feed(Stopped(WorkerId("w0"), 1, 4, True, "connection reset"))
    (broken,) = of(BreakEra, effects)
    assert broken.era == 1 and set(broken.to) == {"w0", "w1"}
    assert texts(effects)[0].endswith(": w0, w1 go on")


def test_a_closed_connection_alone_needs_half_a_second() -> None:
    world = World().started(2)
    world.cut("w1")
    assert not of(BreakEra, world.wait(liveness.RECONNECT_S - 0.05, ("w0",)))
    assert of(BreakEra, world.wait(0.1, ("w0",)))
    (refusal,) = of(Refuse, world.hello("w1", worker="w1", era=1))
    assert refusal.again
    assert of(Admit, world.hello("w1"))[0].worker == "w1.2"


def test_the_last_holder_gets_time_to_reconnect_whatever_others_report() -> None:
    """Two are killed while a newcomer follows; the connection of the third closes as the newcomer's group fails."""
    world = World().started(3)
    world.exit("w1", -9)
    world.feed(Stopped(WorkerId("w2"), 1, 4, False, "connection reset"))
    world.cut("w0")
    world.wait(liveness.RECONNECT_S - 0.1, ("w2",))
    assert not of(StopAll, world.effects)
    assert of(Admit, world.hello("w0", worker="w0", era=1, exchange=4))
    world.stop(1, "w0")
    (start,) = of(StartEra, world.effects)[-1:]
    assert (start.era, start.donor) == (2, "w0")


def test_who_finds_its_way_back_in_time_goes_on() -> None:
    world = World().started(2)
    world.cut("w1")
    world.wait(0.3, ("w0",))
    assert of(Admit, world.hello("w1", worker="w1", era=1, exchange=3))
    assert not of(BreakEra, world.wait(2.0, ("w0", "w1")))


def test_a_silent_worker_is_lost_and_may_wake_up() -> None:
    world = World().started(2)
    effects = world.wait(5.3, ("w0",))
    assert not of(Kill, effects) and of(BreakEra, effects)
    (refusal,) = of(Refuse, effects)
    assert refusal.again and "no sign of life for 5 s" in refusal.reason


def test_a_worker_that_does_not_wake_up_is_killed() -> None:
    world = World().started(2)
    effects = world.wait(5.3 + liveness.ASLEEP_S + 1.0, ("w0",))
    assert of(Kill, effects) == [Kill(OWNER, SlotId("w1"))]


def beats(world: World, seconds: float, *states: dict[str, Any]) -> list[Effect]:
    """Each worker beats as its state says, ten times a second; what their main loops do began when this did."""
    fresh: list[Effect] = []
    start_s = world.now_s
    for _ in range(round(seconds / 0.1)):
        world.now_s += 0.1
        common = {"active": True, "exchange": 3, "lasts_s": world.now_s - start_s}
        fresh += world.feed(
            *(Heartbeat(WorkerId(f"w{index}"), 1, 7, **common | state) for index, state in enumerate(states))
        )
    return fresh


WAITS: dict[str, Any] = {"waiting": True}
SLOW: dict[str, Any] = {"usual_s": 0.1}


def test_a_main_loop_that_stands_still_while_others_wait_is_left_out() -> None:
    world = World().started(2)
    effects = beats(world, 5.5, WAITS, SLOW)
    assert not of(Kill, effects) and of(BreakEra, effects)
    (refusal,) = of(Refuse, effects)
    assert refusal.again and "is left out (no progress for 5.1 s while others wait)" in refusal.reason
    assert "it comes back when it is done" in texts(effects)[0]
    assert not of(BreakEra, beats(World().started(2), 8.0, WAITS, SLOW | {"usual_s": 1.0}))


def test_nobody_is_left_out_before_its_first_contribution_of_a_phase_or_where_nobody_waits() -> None:
    assert not of(BreakEra, beats(World().started(2), 20.0, WAITS, {"usual_s": 0.0}))
    assert not of(BreakEra, beats(World().started(2), 20.0, SLOW, SLOW))


def test_it_counts_how_long_the_others_have_waited() -> None:
    """All are in the same eight seconds of their own code, and one of them is done first."""
    world = World().started(4)
    assert not of(BreakEra, beats(world, 8.0, SLOW, SLOW, SLOW, SLOW))
    assert not of(BreakEra, beats(world, 4.5, WAITS, SLOW, SLOW, SLOW))


def test_a_slow_one_that_gets_on_is_waited_for() -> None:
    """Its share is large: it draws a micro-batch every three seconds, and another one waits for all of them."""
    world = World().started(2)
    start_s = world.now_s
    for tenth in range(1, 150):
        world.now_s = start_s + 0.1 * tenth
        waits = Heartbeat(WorkerId("w0"), 1, 7, active=True, exchange=3, waiting=True, lasts_s=0.1 * tenth)
        draws = Heartbeat(
            WorkerId("w1"), 1, tenth // 30, active=True, exchange=3, usual_s=0.1, lasts_s=0.1 * (tenth % 30)
        )
        assert not of(BreakEra, world.feed(waits, draws))
    assert of(BreakEra, beats(world, 5.5, WAITS, SLOW))


def test_who_holds_nothing_does_not_count_as_waiting() -> None:
    newcomer = WAITS | {"active": False}
    assert not of(BreakEra, beats(World().started(2), 40.0, newcomer, SLOW))
    assert not of(BreakEra, beats(World().started(2), 40.0, newcomer, {"busy": "saving"}))


def test_a_busy_worker_is_left_out_at_once_where_that_pays() -> None:
    effects = beats(World().started(2), 0.4, WAITS, {"busy": "saving", "expected_s": 60.0})
    assert of(BreakEra, effects) and "w1 is left out (saving)" in texts(effects)[0]
    # A moment is waited for, and so is a fast worker by a slow one.
    assert not of(BreakEra, beats(World().started(2), 0.4, WAITS, {"busy": "saving", "expected_s": 0.5}))
    fast = {"busy": "saving", "expected_s": 60.0, "pace": 1000.0}
    assert not of(BreakEra, beats(World().started(2), 5.0, WAITS | {"pace": 1.0}, fast))


def test_a_busy_worker_is_not_taken_for_a_hung_one() -> None:
    world = World().started(2)
    beats(world, 0.4, WAITS, {"busy": "saving", "expected_s": 60.0})
    assert not of(Kill, world.wait(2 * members.HUNG_AFTER_S, ("w0",)))


def test_who_was_left_out_and_does_not_come_back_is_killed_in_the_end() -> None:
    world = World().started(2)
    beats(world, 5.5, WAITS, SLOW)
    world.stop(1, "w0")
    assert not of(Kill, world.wait(members.HUNG_AFTER_S - 10.0, ("w0",)))
    assert of(Kill, world.wait(10.0, ("w0",))) == [Kill(OWNER, SlotId("w1"))]


def test_where_nobody_may_be_left_out_a_hung_one_is_killed() -> None:
    """Its first step of the phase has no end."""
    world = World().started(2)
    assert not of(Kill, beats(world, members.HUNG_AFTER_S - 1.0, WAITS, {}))
    (killed,) = of(Kill, beats(world, 3.0, WAITS, {}))
    assert killed == Kill(OWNER, SlotId("w1"))


def test_who_is_ahead_of_those_who_wait_is_not_left_out() -> None:
    """The update that it has made, and its script has acted on, would be made again without it."""
    ahead = SLOW | {"exchange": 4}
    assert not of(BreakEra, beats(World().started(2), 20.0, WAITS, ahead))


def test_at_the_end_there_is_nothing_that_the_others_would_lose() -> None:
    at_end = WAITS | {"ending": True}
    assert not of(BreakEra, beats(World().started(2), 60.0, at_end, {"busy": "saving", "expected_s": 90.0}))
    assert not of(BreakEra, beats(World().started(2), 60.0, at_end, SLOW))


def test_nobody_is_left_out_below_the_least_number_of_workers() -> None:
    world = World(min_workers=2).started(2)
    assert not of(BreakEra, beats(world, 20.0, WAITS, SLOW))


def test_the_end_waits_for_who_was_left_out_elsewhere() -> None:
    """Its launcher, which has joined the run, would end it with the run."""
    world = World().started(1)
    (enrolled,) = of(Enroll, world.enlist(1, owner=False))
    world.hello("w1")
    world.ready("w1")
    (plan,) = of(PlanEra, world.effects)
    world.enter(plan.era, "w0", "w1", exchange=3)
    beats(world, 0.4, WAITS, {"busy": "saving", "expected_s": 60.0})
    world.stop(plan.era, "w0")
    world.enter(world.state.last_era, "w0")
    world.feed(Finished(WorkerId("w0")))
    assert not of(Ended, world.exit("w0", 0) + world.wait(30.0))
    (end,) = of(Ended, world.exit("w1", 0, agent=enrolled.agent) + world.wait(1.0))
    assert end.completed and end.exit_status == 0


def test_the_end_waits_for_who_was_left_out() -> None:
    world = World().started(2)
    beats(world, 0.4, WAITS, {"busy": "saving", "expected_s": 60.0})
    world.stop(1, "w0")
    world.enter(world.state.last_era, "w0")
    effects = world.feed(Finished(WorkerId("w0")))
    world.exit("w0", 0)
    effects += world.wait(30.0, ())
    assert not of(Kill, effects) and not of(Terminate, effects) and not of(Ended, effects)
    (end,) = of(Ended, world.exit("w1", 0) + world.wait(1.0, ()))
    assert end.completed and end.exit_status == 0


def test_links_that_fail_without_a_death_are_formed_anew() -> None:
    world = World().started(2)
    assert not of(BreakEra, world.feed(Stopped(WorkerId("w0"), 1, 4, True, "connection reset")))
    (broken,) = of(BreakEra, world.wait(0.2, ("w0", "w1")))
    assert broken.to == ("w0", "w1")
    (start,) = of(StartEra, world.stop(1, "w1", exchange=4))
    assert (start.era, start.roster, start.donor, start.exchange) == (2, ("w0", "w1"), "w0", 4)
    assert not of(BreakEra, world.feed(Stopped(WorkerId("w0"), 1, 4, True)) + world.wait(0.3, ("w0", "w1")))


def test_the_donor_is_the_active_one_that_is_furthest_and_waiting_joiners_come_along() -> None:
    world = World().started(4)
    world.enlist(1, owner=False)
    world.exit("w3", -9)
    world.stop(1, "w0", exchange=5)
    world.hello("w4")
    world.ready("w4")
    world.stop(1, "w1", exchange=9, active=False)
    (start,) = of(StartEra, world.stop(1, "w2", exchange=6))
    assert (start.donor, start.exchange, start.roster) == ("w2", 6, ("w0", "w1", "w2", "w4"))


def test_another_death_while_stopping_is_one_era() -> None:
    world = World().started(3)
    world.exit("w2", -9)
    world.stop(1, "w0")
    (start,) = of(StartEra, world.exit("w1", -9))
    assert start.roster == ("w0",)
    assert len(of(BreakEra, world.effects)) == 1


def test_eras_without_progress_are_paused_between() -> None:
    world = World().started(2)
    starts: list[float] = []
    for _ in range(12):
        era = world.state.last_era
        world.feed(Stopped(WorkerId("w0"), era, 4, True, "no route"), Stopped(WorkerId("w1"), era, 4, True))
        while not of(StartEra, world.wait(0.05, ("w0", "w1"))):
            pass
        starts.append(world.now_s)
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert max(gaps[:3]) < 0.3 and 3.0 < gaps[-1] < eras.PAUSE_AT_MOST_S + 0.3


@pytest.mark.parametrize(
    ("said", "donor", "exchange"),
    [
        # At one exchange, and one behind: who has the user's state, wherever it stands in the roster.
        ({"w0": (10, False), "w1": (9, True)}, "w1", 9),
        ({"w0": (10, False), "w1": (10, True)}, "w1", 10),
        ({"w0": (9, True), "w1": (10, False), "w2": (10, True)}, "w2", 10),
        ({"w0": (10, True), "w1": (9, True)}, "w0", 10),
        # Nobody has it: the furthest.
        ({"w0": (9, False), "w1": (10, False)}, "w1", 10),
        # Too far behind: that is no member of the same era's last exchange.
        ({"w0": (7, True), "w1": (10, False)}, "w1", 10),
    ],
)
def test_who_has_the_users_state_is_the_better_donor(
    said: dict[str, tuple[int, bool]], donor: str, exchange: int
) -> None:
    world = World().started(len(said) + 1)
    lost = f"w{len(said)}"
    world.cut(lost)
    world.exit(lost, -9)
    for name, (settled, whole) in said.items():
        world.feed(Stopped(WorkerId(name), 1, settled, True, whole=whole))
    (start,) = of(StartEra, world.effects)[-1:]
    assert (start.era, start.donor, start.exchange) == (2, donor, exchange)


def test_below_min_workers_the_members_wait_stopped() -> None:
    world = World(min_workers=2).started(2)
    world.exit("w1", -9)
    effects = world.stop(1, "w0")
    assert not of(StartEra, effects) and "1 of at least 2 workers" in texts(effects)[-1]
    effects = world.wait(1.0, ("w0",))
    assert not texts(effects) and of(Start, effects)
    world.hello("w1")
    (start,) = of(StartEra, world.ready("w1.2"))
    assert start.roster == ("w0", "w1.2")


def test_total_loss_ends_the_run_with_the_last_words() -> None:
    world = World().started(1)
    world.wait(1.0, ("w0",))
    world.feed(Failed(WorkerId("w0"), "ValueError: no"))
    (stop,) = of(StopAll, world.effects)
    assert stop.reason.startswith("w0 failed (ValueError: no): nobody is left who holds the model's state")
    (end,) = of(Ended, world.exit("w0", 7))
    assert end.exit_status == 7 and not end.completed


def test_a_script_that_fails_again_and_again_since_one_checkpoint_ends_the_run() -> None:
    world = World()
    world.state = replace(world.state, checkpoints=("c1",))
    world.started(2)
    names = ["w0", "w1"]
    for turn in range(4):
        world.wait(1.0, tuple(names))
        if turn == 1:
            # It gets on in between.
            world.state = replace(world.state, checkpoints=("c2", "c1"))
        world.exit("w1", -9)
        world.feed(Failed(WorkerId(names[0]), "ValueError: no"))
        world.exit("w0", 3)
        assert bool(of(StopAll, world.effects)) is (turn == 3)
        if turn < 3:
            world.wait(40.0)
            names = [world.restarted(slot) for slot in ("w0", "w1")]
            world.enter(world.state.last_era, *names)
    assert "w0.4 failed (ValueError: no), again and again" in of(StopAll, world.effects)[0].reason
    assert of(Ended, world.effects)[0].exit_status == 3


def test_losses_since_one_checkpoint_may_be_as_many_as_they_like() -> None:
    world = World()
    world.state = replace(world.state, checkpoints=("c1",))
    world.started(1)
    name = "w0"
    for _ in range(6):
        world.wait(1.0, (name,))
        world.exit("w0", -9)
        world.wait(40.0)
        name = world.restarted("w0")
        world.enter(world.state.last_era, name)
    assert not of(StopAll, world.effects)


def test_a_sleeper_that_is_terminated_at_the_end_does_not_give_the_run_its_status() -> None:
    world = World().started(2)
    world.wait(1.0, ("w0", "w1"))
    world.feed(Failed(WorkerId("w0"), "ValueError: no"))
    world.exit("w0", 1)
    effects = world.wait(10.0)
    assert of(StopAll, effects)[0].reason.startswith("w1 was lost (no sign of life for 5 s): nobody is left")
    assert Terminate(OWNER, SlotId("w1")) in effects
    world.exit("w0", -15)
    (end,) = of(Ended, world.exit("w1", -15))
    assert end.exit_status == 1


@pytest.mark.parametrize(("status", "expected"), [(-15, 1), (3, 3), (-11, 139)])
def test_who_has_failed_and_is_slow_to_go_does_not_give_the_run_the_status_of_our_signal(
    status: int, expected: int
) -> None:
    """It has said that it failed; its process, on a busy machine, takes longer than the grace."""
    world = World().started(2)
    world.feed(Failed(WorkerId("w1"), "the gradients were cleared", fatal=True))
    world.exit("w0", 76)
    assert Terminate(OWNER, SlotId("w1")) in world.wait(members.GRACE_S + 0.1)
    (end,) = of(Ended, world.exit("w1", status))
    assert end.exit_status == expected


def test_nor_that_of_the_kill_that_follows() -> None:
    world = World().started(1)
    world.feed(Failed(WorkerId("w0"), "the gradients were cleared", fatal=True))
    assert Kill(OWNER, SlotId("w0")) in world.wait(2 * members.GRACE_S + 0.1)
    (end,) = of(Ended, world.exit("w0", -9))
    assert end.exit_status == 1


def test_a_signal_of_ours_is_forgotten_with_its_process() -> None:
    """A silent one was killed; the next one in its slot is killed by somebody else."""
    world = World().started(2)
    world.wait(5.3 + liveness.ASLEEP_S + 1.0, ("w0",))
    assert Kill(OWNER, SlotId("w1")) in world.effects
    world.exit("w1", -9)
    world.wait(1.0, ("w0",))
    assert Start(OWNER, SlotId("w1")) in world.effects
    world.stop(1, "w0")
    world.enter(world.state.last_era, "w0")
    name = world.restarted("w1")
    world.enter(world.state.last_era, "w0", name)
    world.exit("w0", 1, "ValueError: no")
    world.exit("w1", -9)
    (end,) = of(Ended, world.effects)
    assert end.exit_status == 137


@pytest.mark.parametrize(("status", "expected"), [(-9, 137), (3, 3), (-15, 1)])
def test_an_end_that_is_told_after_the_loss_still_gives_its_status(status: int, expected: int) -> None:
    """Its connection closed, half a second later nobody holds the state, and the launcher is slow to tell."""
    world = World().started(1)
    world.wait(1.0, ("w0",))
    world.cut("w0")
    assert of(StopAll, world.wait(liveness.RECONNECT_S + 0.1))
    (end,) = of(Ended, world.exit("w0", status))
    assert end.exit_status == expected


def test_where_nothing_was_settled_everybody_begins_anew() -> None:
    world = World()
    world.enlist(1)
    world.hello("w0")
    world.ready("w0")
    world.exit("w0", -9)
    assert isinstance(world.state.stage, Gathering)
    world.wait(0.6)
    (start,) = of(StartEra, (world.hello("w0"), world.ready("w0.2"))[1])
    assert (start.era, start.roster, start.exchange) == (2, ("w0.2",), 0)


# restarts


def test_cooldowns_double_and_start_over_after_a_minute() -> None:
    world = World().started(2)
    begun: list[float] = []
    for _ in range(3):
        before_s = world.now_s
        world.exit("w1", -9)
        world.stop(world.state.last_era, "w0")
        while not of(Start, world.wait(0.05, ("w0",))):
            pass
        begun.append(world.now_s - before_s)
        name = world.restarted("w1")
        world.enter(world.state.last_era, "w0", name, exchange=9)
    assert begun == pytest.approx([0.5, 1.0, 2.0], abs=0.06)
    world.wait(61.0, ("w0", name))
    world.exit("w1", -9)
    world.stop(world.state.last_era, "w0")
    assert of(Start, world.wait(0.6, ("w0",)))


def test_the_same_error_twice_on_all_slots_ends_the_run() -> None:
    world = World()
    world.enlist(2)
    for turn in range(2):
        for slot in ("w0", "w1"):
            name = of(Admit, world.hello(slot))[0].worker
            world.feed(Failed(name, "ValueError: no"))
            assert not of(StopAll, world.effects)
            world.exit(slot, 3)
        if turn == 0:
            world.wait(0.6)
    assert "ValueError: no" in of(StopAll, world.effects)[0].reason
    assert of(Ended, world.effects)[0].exit_status == 3


def test_an_error_on_one_slot_only_does_not() -> None:
    world = World().started(2)
    for _ in range(4):
        world.exit("w1", 1, error="ValueError: no")
        world.stop(world.state.last_era, "w0")
        world.wait(31.0, ("w0",))
        name = world.restarted("w1")
        world.enter(world.state.last_era, "w0", name)
    assert isinstance(world.state.stage, Running)


def test_a_fatal_error_ends_the_run_at_once() -> None:
    world = World().started(2)
    (stop,) = of(StopAll, world.feed(Failed(WorkerId("w1"), "dataset lengths differ", fatal=True)))
    assert stop.reason == "w1 failed: dataset lengths differ"


def test_an_error_of_its_own_ends_a_slot_and_not_the_run() -> None:
    world = World().started(3)
    effects = world.feed(Failed(WorkerId("w1"), "w1's weights differ from the others'", own=True))
    assert not of(StopAll, effects)
    (note,) = of(Note, effects)
    assert note.text == "w1's weights differ from the others'; the run goes on without w1"
    world.exit("w1", 1)
    world.stop(1, "w0", exchange=4)
    (start,) = of(StartEra, world.stop(1, "w2", exchange=4))
    assert start.roster == ("w0", "w2")
    assert not of(Start, world.wait(60.0, ("w0", "w2")))


def test_a_script_that_never_joins_is_named() -> None:
    world = World()
    world.enlist(2)
    world.exit("w0", 0)
    assert of(StopAll, world.effects)[0].reason.startswith("train.py never called pliant.join: ")
    assert of(Terminate, world.effects) == [Terminate(OWNER, SlotId("w1"))]
    assert of(Ended, world.exit("w1", -15))[0].exit_status == 1


def test_a_script_that_fails_before_joining_gets_a_second_try_while_others_may_join() -> None:
    world = World()
    world.enlist(2)
    assert not of(StopAll, world.exit("w0", 3))
    assert of(Start, world.wait(0.6))
    assert of(StopAll, world.exit("w0", 3))
    (end,) = of(Ended, world.exit("w1", -15))
    assert end.exit_status == 3 and "w0 ended before it called pliant.join" in end.reason


@pytest.mark.parametrize("joined", ["hello", "ready"])
def test_and_while_one_has_joined(joined: str) -> None:
    world = World()
    world.enlist(2)
    world.hello("w0")
    if joined == "ready":
        world.ready("w0")
    assert not of(StopAll, world.exit("w1", 3))
    assert of(Start, world.wait(0.6, ("w0",)))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_script_that_fails_on_all_before_any_joins_ends_the_run_at_once(restarted: bool) -> None:
    world = World()
    world.enlist(2)
    assert not of(StopAll, world.exit("w0", 3))
    if restarted:
        assert of(Start, world.wait(0.6))
    effects = world.feed(ProcessExited(OWNER, SlotId("w1"), 77, 7, "ValueError: no"))
    (stop,) = of(StopAll, effects)
    reason = "w1 ended before it called pliant.join (exit status 7), and so did all others: ValueError: no"
    assert stop.reason == reason and not of(Start, effects)
    if restarted:
        assert of(Terminate, effects) == [Terminate(OWNER, SlotId("w0"))]
        effects = world.exit("w0", -15)
    assert of(Ended, effects) == [Ended(reason, completed=False, exit_status=7)]


def test_the_only_worker_is_all_of_them() -> None:
    world = World()
    world.enlist(1)
    (end,) = of(Ended, world.exit("w0", 1))
    assert end == Ended("w0 ended before it called pliant.join (exit status 1)", completed=False, exit_status=1)


def test_a_signal_before_joining_is_no_failure_of_the_script() -> None:
    world = World()
    world.enlist(2)
    world.exit("w0", -9)
    assert not of(StopAll, world.exit("w1", -9))
    assert len(of(Start, world.wait(0.6))) == 2


def test_an_exit_that_is_told_again_counts_once() -> None:
    world = World().started(2)
    exited = ProcessExited(OWNER, SlotId("w1"), 77, 1, "ValueError: no")
    world.feed(exited, exited)
    world.wait(0.6, ("w0",))
    world.feed(AgentLost(OWNER, 1))
    world.enlist(0, name="a0", slots=("w0", "w1"))
    world.feed(exited)
    assert processes.slot_of(world.state, SlotId("w1")).errors == ("ValueError: no",)  # type: ignore[union-attr]


# ends


def test_a_run_that_finishes_ends_well() -> None:
    world = World().started(2)
    world.enlist(1, owner=False)
    world.hello("w2")
    effects = world.feed(Finished(WorkerId("w0")))
    assert of(Dismiss, effects)[0].completed
    assert of(Dismiss, world.hello("w2"))[0].completed
    world.feed(Finished(WorkerId("w1")))
    world.exit("w0", 0)
    (end,) = of(Ended, world.exit("w1", 0))
    assert end == Ended("finished", completed=True, exit_status=0)


def test_a_death_at_the_end_leaves_the_rest_to_finish() -> None:
    world = World().started(3)
    world.feed(Finished(WorkerId("w0")))
    world.exit("w1", -9)
    (start,) = of(StartEra, world.stop(1, "w2"))
    assert start.roster == ("w2",)
    assert not of(Start, world.wait(3.0, ("w2",)))
    world.feed(Finished(WorkerId("w2")))
    world.exit("w0", 0)
    (end,) = of(Ended, world.exit("w2", 0))
    assert end.completed and end.exit_status == 0


def test_who_came_too_late_for_the_outcome_breaks_no_era_at_the_end() -> None:
    world = World().started(3)
    assert not of(BreakEra, world.feed(Finished(WorkerId("w2"), left=True, over=True)))
    assert isinstance(world.state.stage, Running)
    world.feed(Finished(WorkerId("w0")), Finished(WorkerId("w1")))
    world.exit("w2", 0)
    world.exit("w0", 0)
    (end,) = of(Ended, world.exit("w1", 0))
    assert end == Ended("finished", completed=True, exit_status=0)


def test_who_leaves_before_the_end_unplanned_breaks_its_era() -> None:
    world = World().started(3)
    assert of(BreakEra, world.feed(Finished(WorkerId("w2"), left=True)))


def test_a_goodbye_behind_the_end_of_its_process_counts() -> None:
    world = World().started(1)
    world.exit("w0", 0)
    world.feed(Finished(WorkerId("w0")))
    assert of(Ended, world.effects)[0].completed


def test_a_script_that_fails_after_training_gives_its_status() -> None:
    world = World().started(2)
    world.feed(Finished(WorkerId("w0")), Finished(WorkerId("w1")))
    world.exit("w0", 0)
    (end,) = of(Ended, world.exit("w1", 3))
    assert (end.completed, end.exit_status) == (True, 3) and "w1" in end.reason


@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143)])
def test_an_interrupt_terminates_then_kills(number: int, status: int) -> None:
    world = World().started(2)
    assert len(of(Terminate, world.feed(Interrupted(OWNER, number)))) == 2
    assert len(of(Kill, world.wait(members.GRACE_S + 0.1))) == 2
    world.exit("w0", -9)
    assert of(Ended, world.exit("w1", -9))[0].exit_status == status


def test_a_second_interrupt_kills_at_once() -> None:
    world = World().started(2)
    world.feed(Interrupted(OWNER, 2))
    assert len(of(Kill, world.feed(Interrupted(OWNER, 2)))) == 2


def test_a_coordinator_to_which_nobody_comes_ends_by_itself() -> None:
    world = World()
    (end,) = of(Ended, world.wait(60.1))
    assert end.exit_status == 1
    world = World().started(1)
    world.feed(AgentLost(OWNER, 1))
    assert not of(Ended, world.wait(62.0, ("w0",)))


# a new coordinator


def test_two_coordinators_that_wrote_nothing_down_never_give_one_era_number_twice() -> None:
    rules = Rules("train.py", "1")
    numbers = [eras._numbers(advance.resumed(rules, term, 5.0, 100.0, 0, [], 0)) for term in (2, 3, 4)]
    assert [era for era, _ in numbers] == sorted({era for era, _ in numbers})
    # Nor below what the journal has.
    known = eras._numbers(advance.resumed(rules, 3, 5.0, 100.0, 260, [], 0))
    assert known[0] > 260 and known[1] == numbers[1][1]


def resumed(names: tuple[str, ...] = ("w0", "w1"), era: int = 4) -> World:
    rules = Rules("train.py", "0.1.0")
    return World(advance.resumed(rules, 2, 5.0, 100.0, era, [WorkerId(name) for name in names], 3))


def test_a_new_coordinator_evicts_nobody_within_dead_after() -> None:
    world = resumed()
    assert not of(BreakEra, world.wait(4.9))
    assert of(Ended, world.wait(70.0))


def test_a_new_coordinator_believes_what_it_cannot_know_better() -> None:
    world = resumed()
    assert of(Admit, world.hello("w0", worker="w0", era=6, exchange=9, active=True))
    assert of(Admit, world.hello("w5", worker="w5.3", era=6, exchange=9, active=True))
    assert of(Refuse, world.hello("w6", worker="w6", era=3, exchange=2, active=True))[0].again
    assert world.state.last_era == 6
    assert not of(Enroll, world.enlist(1, owner=False))
    effects = world.wait(5.6, ("w0", "w5.3"))
    assert of(Enroll, effects)[0].slots == ("w7",)
    assert of(BreakEra, effects)[0].era == 6
    (start,) = of(StartEra, world.stop(6, "w0", "w5.3"))
    assert start.roster == ("w0", "w5.3") and start.attempt == 2_000_001
    assert of(Admit, world.hello("w6"))[0].worker == "w6.101"


def test_a_new_coordinator_believes_who_came_after_one_that_only_the_journal_knows() -> None:
    world = resumed()
    assert of(Admit, world.hello("w0", worker="w0.2", era=6, exchange=9, active=True))[0].worker == "w0.2"
    assert {worker.name for worker in world.state.workers} == {"w0.2", "w1"}
    # Not in the era that is written down, nor an earlier one, nor one whose successor is there.
    assert of(Refuse, world.hello("w1", worker="w1.2", era=4, exchange=9, active=True))[0].again
    assert of(Refuse, world.hello("w0", worker="w0", era=7, exchange=9, active=True))[0].again
    assert of(Admit, world.hello("w1", worker="w1", era=6, exchange=9, active=True))
    assert of(Refuse, world.hello("w1", worker="w1.2", era=7, exchange=9, active=True))[0].again


def test_who_enters_an_era_that_is_broken_up_is_told_so() -> None:
    rules = Rules("train.py", "0.1.0")
    world = World(advance.resumed(rules, 2, 5.0, 100.0, 0, [], 0))
    for slot in ("w0", "w1"):
        world.hello(slot, worker=slot)
        world.ready(slot)
    world.wait(5.1, ("w0", "w1"))
    (broken,) = of(BreakEra, world.enter(1, "w0"))
    assert broken.to == ("w0",)
    (broken,) = of(BreakEra, world.enter(1, "w1"))
    assert broken.to == ("w1",)
    (start,) = of(StartEra, world.stop(1, "w0", "w1", exchange=1))
    assert start.roster == ("w0", "w1")


# whatever happens


WORKERS = [WorkerId(name) for name in ("w0", "w1", "w2", "w0.2", "w1.2", "w9")]
SLOTS = [SlotId(name) for name in ("w0", "w1", "w2", "w3", "w9")]
AGENTS = [OWNER, AgentId("a1")]
worker_names, slot_names, agent_names = st.sampled_from(WORKERS), st.sampled_from(SLOTS), st.sampled_from(AGENTS)
small = st.integers(0, 6)
event_kinds = st.one_of(
    st.builds(
        Arrived,
        st.integers(1, 30),
        slot_names,
        st.sampled_from([WorkerId(""), *WORKERS]),
        st.just("0.1.0"),
        small,
        small,
    ),
    st.builds(JoinRequested, worker_names, st.sampled_from([TERMS, TERMS, TERMS, replace(TERMS, version="2")]),
    st.just("x")), st.builds(Heartbeat, worker_names, small, small, st.booleans(), st.sampled_from([0.0, 0.1])),
    st.builds(Leaving, worker_names),
    st.builds(Stopped, worker_names, small, small, st.booleans(), st.sampled_from(["", "reset"])),
    st.builds(Entered, worker_names, small, small),
    st.builds(Unformed, worker_names, small, st.lists(worker_names, max_size=2).map(tuple), st.booleans()),
    st.builds(Failed, worker_names, st.just("no"), st.sampled_from([False, False, False, True])),
    st.builds(Finished, worker_names, st.booleans()),
    st.builds(ConnectionLost, worker_names, st.integers(1, 30)),
    st.builds(ProcessExited, agent_names, slot_names, small, st.sampled_from([0, 1, -9, -15, advance.QUIET_EXIT])),
    st.builds(AgentArrived, st.integers(1, 30), st.sampled_from([AgentId(""), *AGENTS]), st.just("0.1.0"),
              st.just(()), st.integers(0, 2), st.booleans()),
    st.builds(AgentLost, agent_names, st.integers(1, 30)),
    st.builds(PreemptionNotice, agent_names),
    st.builds(Scaled, st.integers(1, 4)),
    st.builds(Drained, slot_names),
    st.just(Tick()),
    st.just(Tick()),
    st.builds(Interrupted, agent_names, st.sampled_from([2, 15])),
    st.just(CoordinatorFailed("the disk is full")),
)  # fmt: skip
steps = st.lists(st.tuples(event_kinds, st.sampled_from([0.0, 0.01, 0.2, 0.6, 2.0])), max_size=40)


def checked(world: World, history: list[tuple[Event, float]]) -> None:
    """Feed it, and check what must hold after every step."""
    for event, passed_s in history:
        world.now_s += passed_s
        fresh = world.feed(event)
        if isinstance(event, Arrived):
            answers = [e.peer for e in fresh if isinstance(e, Admit | Refuse | Dismiss) and e.peer == event.peer]
            assert answers
        names = [worker.name for worker in world.state.workers]
        assert len(names) == len(set(names)) and not world.state.ghosts & set(names)
    numbers = [(e.era, e.attempt) for e in world.effects if isinstance(e, StartEra | PlanEra) and len(e.to) != 1]
    assert [era for era, _ in numbers] == sorted({era for era, _ in numbers})
    assert [attempt for _, attempt in numbers] == sorted({attempt for _, attempt in numbers})


@pytest.mark.parametrize("begun", [0, 1, 3])
@given(history=steps)
def test_numbers_grow_names_are_used_once_and_arrivals_are_answered(
    begun: int, history: list[tuple[Event, float]]
) -> None:
    checked(World().started(begun) if begun else World(), history)


@given(history=steps)
def test_every_run_ends_exactly_once_and_nothing_follows(history: list[tuple[Event, float]]) -> None:
    world = World().started(3)
    checked(world, history)
    # The owner is interrupted, every process ends, every connection closes.
    world.feed(*(Interrupted(agent.name, 15) for agent in world.state.agents if agent.owner))
    for slot in world.state.slots:
        world.exit(slot.name, 0, agent=slot.agent)
    world.feed(*(AgentLost(agent.name, agent.peer) for agent in world.state.agents if agent.peer is not None))
    for worker in world.state.workers:
        if isinstance(worker.line, members.Connected):
            world.feed(ConnectionLost(worker.name, worker.line.peer))
    world.wait(members.GRACE_S * 3)
    assert isinstance(world.state.stage, RunOver)
    ends = [index for index, effect in enumerate(world.effects) if isinstance(effect, Ended)]
    assert len(ends) == 1 and 0 <= of(Ended, world.effects)[0].exit_status < 256
    assert not [e for e in world.effects[ends[0] + 1 :] if not isinstance(e, Dismiss)]


@given(history=steps)
def test_after_a_stop_every_process_is_killed_within_two_graces(history: list[tuple[Event, float]]) -> None:
    world = World().started(3)
    checked(world, history)
    if not isinstance(world.state.stage, Stopping):
        return
    early = {effect.slot for effect in of(Kill, world.effects)}
    late = {effect.slot for effect in of(Kill, world.wait(2 * members.GRACE_S + 0.2))}
    alive = {s.name for s in world.state.slots if isinstance(s.process, members.Alive)}
    assert isinstance(world.state.stage, RunOver) or alive <= early | late


@given(history=steps, names=st.sampled_from([("w0",), ("w0", "w1", "w2")]))
def test_within_its_grace_a_new_coordinator_evicts_only_on_proof(
    history: list[tuple[Event, float]], names: tuple[str, ...]
) -> None:
    world = resumed(names)
    for event, _ in history:
        if isinstance(
            event, ProcessExited | AgentArrived | Failed | Finished | Leaving | CoordinatorFailed | Interrupted
        ):
            continue
        # A successor in its slot is proof.
        if isinstance(event, Arrived) and event.worker not in names:
            continue
        world.now_s = min(104.9, world.now_s + 0.1)
        world.feed(event)
    if not isinstance(world.state.stage, Stopping):
        assert {WorkerId(name) for name in names} <= {worker.name for worker in world.state.workers}


FAULTS = st.lists(
    st.tuples(st.sampled_from(["kill", "cut", "fail", "hang", "drain", "join", "wait"]), st.integers(0, 5)), max_size=12
)


class Living(World):
    """Workers and a launcher that do what they are told, and faults that happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: dict[str, str] = {}
        """slot → the name of its worker"""
        self.eras: dict[str, int] = {}
        self.silent: set[str] = set()
        self.inbox: list[Effect] = []

    def feed(self, *history: Event) -> list[Effect]:
        fresh = super().feed(*history)
        self.inbox += fresh
        return fresh

    def obey(self) -> None:
        """Everybody carries out what arrived."""
        while self.inbox:
            effect = self.inbox.pop(0)
            alive = set(self.processes.values()) - self.silent
            match effect:
                case Enroll(slots=names):
                    for slot in names:
                        self.begin(slot)
                case Start(slot=slot):
                    self.begin(slot)
                case Kill(slot=slot) | Terminate(slot=slot):
                    self.end(slot, -9)
                case StartEra(era=era, exchange=exchange, to=to):
                    self.move(era, [name for name in to if name in alive], exchange)
                case PlanEra(era=era, to=to, roster=names) if set(to) <= alive:
                    self.move(era, list(names), era)
                    for name in set(to) - set(names):
                        self.feed(Finished(WorkerId(name), left=True))
                        self.end(name.partition(".")[0], 0)
                case BreakEra(era=era, to=to):
                    for name in to:
                        if name in alive:
                            self.feed(Stopped(name, era, self.eras.get(name, 0), self.eras.get(name, 0) > 0))
                case Dismiss(peer=peer):
                    for slot, name in list(self.processes.items()):
                        if self.peers.get(name) == peer:
                            self.end(slot, 0)
                case _:
                    pass

    def move(self, era: int, names: list[str], exchange: int) -> None:
        for name in names:
            self.eras[name] = era
            self.feed(Entered(WorkerId(name), era, exchange))

    def begin(self, slot: str) -> None:
        admitted = of(Admit, self.hello(slot))
        for admit in admitted:
            self.processes[slot] = admit.worker
            self.ready(admit.worker)
        if not admitted:
            self.exit(slot, advance.QUIET_EXIT)

    def end(self, slot: str, status: int) -> None:
        name = self.processes.pop(slot, None)
        if name is not None:
            self.silent.discard(name)
            if name in self.peers:
                self.cut(name)
            self.exit(slot, status)

    def live(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now_s += 0.25
            alive = set(self.processes.values()) - self.silent
            self.feed(
                *(Heartbeat(WorkerId(name), 1, int(self.now_s * 10), active=True) for name in sorted(alive)), Tick()
            )
            self.obey()


@settings(max_examples=40, deadline=None)
@given(faults=FAULTS)
def test_once_faults_stop_an_era_with_everybody_is_in_force(faults: list[tuple[str, int]]) -> None:
    world = Living()
    world.enlist(3)
    world.live(1.0)
    for fault, place in faults:
        alive = sorted(world.processes.items())
        slot, name = alive[place % len(alive)] if alive else ("w0", "")
        match fault:
            case "kill":
                world.end(slot, -9)
            case "cut" if name:
                world.cut(name)
                world.processes.pop(slot)
                world.live(1.0)
                world.begin(slot)
            case "fail" if name:
                world.feed(Failed(WorkerId(name), "no"))
                world.exit(slot, 1)
                world.processes.pop(slot)
            case "hang" if name:
                world.silent.add(name)
            case "drain" if len(processes.kept(world.state)) > 1:
                world.feed(Drained(SlotId(slot)))
            case "join":
                world.feed(Scaled(len(processes.kept(world.state)) + 1))
            case _:
                world.live(0.5)
        world.live(0.25 * (place % 3))
    world.live(80.0)
    if isinstance(world.state.stage, Running):
        assert isinstance(world.state.course, Steady)
        there = {worker.name for worker, _ in members.members_of(world.state)}
        assert there == set(world.processes.values()) and there
        assert len(there) == len(processes.kept(world.state))
    else:
        # All that held the state were lost at once, or all failed twice in the same way.
        assert isinstance(world.state.stage, RunOver)


@given(st.lists(worker_names, min_size=1, max_size=4, unique=True))
def test_equal_terms_never_differ(workers: list[WorkerId]) -> None:
    assert difference([(worker, TERMS) for worker in workers]) is None


def test_lengths_differ_only_where_both_are_known() -> None:
    a, b = WorkerId("the run"), WorkerId("w3")
    assert length_difference(a, None, b, 3) is None and length_difference(a, 3, b, 3) is None
    assert "4 samples on the run but 3 on w3" in (length_difference(a, 4, b, 3) or "")
    assert events.Tick() == Tick()
