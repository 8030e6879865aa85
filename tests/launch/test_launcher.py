"""What a launcher does about each thing that happens, without processes and on a clock of the test's."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pliant.control.agent_link import Unreachable
from pliant.control.messages import (
    Enlisted,
    Exited,
    FromAgent,
    Interrupted,
    Kill,
    Noticed,
    Over,
    Start,
    Terminate,
)
from pliant.errors import Refused
from pliant.launch import coordinator_supervisor
from pliant.launch.coordinator_supervisor import CoordinatorSupervisor
from pliant.launch.job import JobSpec, Silent
from pliant.launch.launcher import ALONE_S, IDLE_RECONNECT_S, PATIENCE, RECONNECT_S, Launcher
from pliant.launch.worker_processes import ProcessEnded, SlotProcess, SlotProcesses

GRACE_S = 20.0


class FakeProcess:
    """A process of a slot that does as the test says."""

    error = ""

    def __init__(self, machine: Machine, slot: str, pid: int, ended: ProcessEnded) -> None:
        self.slot, self.pid, self.is_alive = slot, pid, True
        self.signals: list[int] = []
        self._machine, self._ended = machine, ended

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        if self.is_alive:
            self.signals.append(signal.SIGKILL)
            self.end(-signal.SIGKILL)

    def end(self, status: int) -> None:
        self.is_alive = False
        self._ended(self, status)

    def pause(self) -> None: ...

    def dispose(self) -> None: ...


class FakeCoordinator:
    """A process of the coordinator."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self.is_alive = True
        self._ended = ended

    def end(self, status: int) -> None:
        self.is_alive = False
        self._ended(status)

    def dispose(self) -> None: ...


class Machine:
    """A launcher, and everything that it has to do with."""

    log = "coordinator.log"
    has_journal = True

    def __init__(self, *, owns: bool = True) -> None:
        self.now_s = 100.0
        self.sent: list[FromAgent] = []
        self.begun: list[str] = []
        self.processes: dict[str, FakeProcess] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        coordination = CoordinatorSupervisor(self, clock=lambda: self.now_s) if owns else None
        if coordination is not None:
            coordination.start()
        slots = SlotProcesses(self.started, GRACE_S, self.later, lambda: self.now_s)
        spec = JobSpec("train.py", workers=2, grace_s=GRACE_S)
        self.launcher = Launcher(spec, Silent(), Path("run"), "", slots, coordination, lambda: self.now_s)

    # what the launcher is given

    def send(self, message: FromAgent) -> None:
        self.sent.append(message)

    def started(self, slot: str, place: int, ended: ProcessEnded) -> SlotProcess:
        self.processes[slot] = FakeProcess(self, slot, 1000 + len(self.processes), ended)
        return self.processes[slot]

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((self.now_s + seconds, action))

    def begin(self, how: str, term: int, ended: Callable[[int], None]) -> FakeCoordinator:
        self.begun.append(f"{how} after {term}")
        self.coordinator = FakeCoordinator(ended)
        return self.coordinator

    def make_again(self) -> bool:
        return False

    def last_words(self) -> str:
        return "the port is taken"

    # what happens

    def enlisted(self, term: int = 1) -> None:
        slots = [] if self.launcher.name else ["w0", "w1"]
        self.launcher.connected(self, Enlisted("job", "a1", term, slots))

    def lost(self) -> None:
        self.launcher.disconnected()
        self.launcher.closed()
        self.launcher.seek()

    def passed(self, seconds: float) -> None:
        self.now_s += seconds
        due = [action for at_s, action in self._timers if at_s <= self.now_s]
        self._timers = [timer for timer in self._timers if timer[0] > self.now_s]
        for action in due:
            action()
        self.launcher.tick()


def test_a_new_launcher_starts_what_it_is_told_to_and_asks_for_no_more_later() -> None:
    machine = Machine()
    first = machine.launcher.enlist("1")
    assert (first.agent, first.wanted, first.owner, first.slots) == ("", 2, True, [])
    machine.enlisted()
    assert list(machine.processes) == ["w0", "w1"]
    again = machine.launcher.enlist("1")
    assert (again.agent, again.wanted, again.slots) == ("a1", 0, ["w0", "w1"])


def test_a_new_coordinator_is_told_what_the_old_one_may_not_have_heard() -> None:
    machine = Machine()
    machine.enlisted()
    machine.processes["w0"].end(1)
    machine.launcher.interrupted(signal.SIGINT)
    machine.launcher.noticed()
    told = [Exited("w0", 1000, 1), Interrupted(signal.SIGINT), Noticed()]
    assert machine.sent == told
    machine.lost()
    machine.processes["w1"].end(-9)
    assert machine.sent == told, "there is no connection"
    machine.enlisted(2)
    assert machine.sent[3:] == [told[0], Exited("w1", 1001, -9), *told[1:]]
    machine.launcher.received(Start("w0"))
    machine.lost()
    machine.sent.clear()
    machine.enlisted(3)
    assert [message.slot for message in machine.sent if isinstance(message, Exited)] == ["w1"], "w0 runs again"


def test_a_process_that_was_asked_to_go_is_killed_after_the_grace_and_the_next_one_is_not() -> None:
    machine = Machine()
    machine.enlisted()
    machine.launcher.received(Terminate("w0"))
    machine.launcher.received(Terminate("w1"))
    machine.processes["w1"].end(0)
    machine.launcher.received(Start("w1"))
    machine.passed(GRACE_S - 1.0)
    assert machine.processes["w0"].signals == [signal.SIGTERM]
    machine.passed(1.0)
    assert machine.processes["w0"].signals == [signal.SIGTERM, signal.SIGKILL]
    assert machine.processes["w1"].is_alive and not machine.processes["w1"].signals
    machine.launcher.received(Kill("w1"))
    machine.launcher.received(Kill("w7"))
    assert not machine.processes["w1"].is_alive


def test_a_coordinator_that_died_is_started_again_when_nothing_more_can_come_from_it() -> None:
    machine = Machine()
    machine.enlisted(term=4)
    machine.coordinator.end(-9)
    assert machine.begun == ["start after 0"], "its last word may be on the way"
    machine.lost()
    assert machine.begun == ["start after 0", "resume after 4"]
    machine.coordinator.end(-9)
    assert machine.begun[2:] == ["resume after 4"], "there is no connection"


def test_a_coordinator_that_said_the_run_is_over_is_not_started_again() -> None:
    machine = Machine()
    machine.enlisted()
    over = Over("finished", True, 0)
    machine.launcher.received(over)
    assert machine.launcher.has_heard_the_end and machine.launcher.end is None
    machine.launcher.disconnected()
    machine.coordinator.end(0)
    machine.launcher.closed()
    assert machine.launcher.end == over and machine.launcher.patience_s == GRACE_S
    assert machine.begun == ["start after 0"]


def test_a_coordinator_that_dies_again_and_again_ends_the_run() -> None:
    machine = Machine()
    for _ in range(coordinator_supervisor.DEATHS):
        machine.coordinator.end(-9)
        assert machine.launcher.end is None
        machine.passed(1.0)
    machine.coordinator.end(-9)
    assert machine.launcher.end is not None and "died 6 times within 10 s" in machine.launcher.end.reason


def test_a_coordinator_that_cannot_be_started_ends_the_run_with_its_last_words() -> None:
    machine = Machine()
    machine.coordinator.end(coordinator_supervisor.REFUSED_EXIT)
    assert machine.launcher.end == Over("the port is taken", False, 1)


def test_a_signal_that_no_coordinator_takes_care_of_ends_the_workers() -> None:
    machine = Machine()
    machine.enlisted()
    machine.lost()
    machine.launcher.interrupted(signal.SIGTERM)
    machine.passed(ALONE_S)
    assert not machine.processes["w0"].signals
    machine.passed(0.1)
    assert [process.signals for process in machine.processes.values()] == [[signal.SIGTERM]] * 2
    machine.processes["w0"].end(0)
    machine.passed(0.1)
    assert machine.launcher.end is None, "the other one has some time left"
    machine.processes["w1"].end(0)
    machine.passed(0.1)
    assert machine.launcher.end == Over("ended by signal 15", False, 128 + 15)


def test_a_third_signal_ends_it_at_once() -> None:
    machine = Machine()
    machine.enlisted()
    for number in range(1, PATIENCE + 1):
        assert machine.launcher.end is None
        machine.launcher.interrupted(signal.SIGINT)
        assert machine.sent == [Interrupted(signal.SIGINT)] * min(number, PATIENCE - 1)
    assert machine.launcher.end is not None and machine.launcher.end.reason == "interrupted (Ctrl-C)"


def test_a_guest_without_workers_waits_for_a_lost_coordinator_for_a_short_time() -> None:
    machine = Machine(owns=False)
    machine.enlisted()
    for process in machine.processes.values():
        process.end(0)
    machine.lost()
    machine.passed(IDLE_RECONNECT_S)
    machine.launcher.unreachable(Unreachable("gone"))
    assert machine.launcher.end is None
    machine.passed(0.1)
    machine.launcher.unreachable(Unreachable("gone"))
    assert machine.launcher.end == Over("finished", True, 0)


def test_a_guest_with_workers_waits_longer_and_ends_them() -> None:
    machine = Machine(owns=False)
    machine.enlisted()
    machine.lost()
    machine.passed(RECONNECT_S)
    machine.launcher.held()
    machine.passed(RECONNECT_S)
    machine.launcher.unreachable(Unreachable("gone"))
    assert not machine.processes["w0"].signals, "a coordinator was there since"
    machine.passed(0.1)
    machine.launcher.unreachable(Unreachable("gone"))
    assert machine.processes["w0"].signals == [signal.SIGTERM]
    machine.passed(ALONE_S)
    assert machine.launcher.end is not None and machine.launcher.end.reason.startswith("lost the coordinator for 30 s")


def test_a_guest_that_cannot_begin_says_why() -> None:
    for trouble in (Unreachable("nobody listens"), Refused("wrong token")):
        machine = Machine(owns=False)
        with pytest.raises(type(trouble), match=str(trouble)):
            (machine.launcher.unreachable if isinstance(trouble, Unreachable) else machine.launcher.refused)(trouble)
    # The owner's coordinator is still being started.
    Machine().launcher.unreachable(Unreachable("nobody listens"))
