"""While a coordinator still reads the journal: nothing that is said is lost, and nobody who waits gives up."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.control import connect as opening
from pliant.control import link as client
from pliant.control import messages as m
from pliant.control.agent_link import AgentLink, Unreachable
from pliant.control.app import WebSocketPeer
from pliant.control.link import Link, Position
from pliant.coordinator import service
from pliant.coordinator.journal import JournalFile
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.waiting_room import READING, WaitingRoom
from pliant.core.journal import records as journal
from pliant.errors import Refused
from pliant.launch import launcher, launcher_loop, requests
from pliant.launch.job import JobSpec, Silent
from pliant.launch.launcher_loop import LauncherLoop
from pliant.launch.run_directory import Access

LIMIT_S = 60.0
TOKEN = "secret"
Answer = TypeVar("Answer")


class Wire(WebSocketPeer):
    """A connection in memory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


class Desk:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def connected(self, peer: WebSocketPeer) -> None:
        self.heard.append(("connected", peer.number))

    def received(self, peer: WebSocketPeer, message: m.FromWorker) -> None:
        self.heard.append(("received", peer.number, message))

    def closed(self, peer: WebSocketPeer) -> None:
        self.heard.append(("closed", peer.number))

    def agent_connected(self, peer: WebSocketPeer) -> None:
        self.heard.append(("agent_connected", peer.number))

    def agent_received(self, peer: WebSocketPeer, message: m.FromAgent) -> None:
        self.heard.append(("agent_received", peer.number, message))

    def agent_closed(self, peer: WebSocketPeer) -> None:
        self.heard.append(("agent_closed", peer.number))

    def status(self) -> bytes:
        return b"status"

    def happenings(self) -> bytes:
        return b"happenings"

    def figures(self) -> dict[str, float]:
        return {"round": 7.0}

    def scale(self, workers: int) -> tuple[int, str]:
        return 200, f"scale {workers}"

    def drain(self, worker: str) -> tuple[int, str]:
        return 200, f"drain {worker}"


SAID = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["opened", "message", "closed"])), max_size=40)


@given(before=SAID, after=SAID)
def test_all_is_heard_in_the_order_in_which_it_was_said(before: list[Any], after: list[Any]) -> None:
    """Peers with even numbers are workers, the others launchers."""
    hall, desk = WaitingRoom(), Desk()
    wires = [Wire(number) for number in range(5)]
    said: list[tuple[object, ...]] = []

    def say(steps: list[tuple[int, str]]) -> None:
        for number, step in steps:
            role = "agent_" if number % 2 else ""
            wire, place = wires[number], len(said)
            match step:
                case "opened":
                    said.append((f"{role}connected", number))
                    (hall.agent_connected if role else hall.connected)(wire)
                case "closed":
                    said.append((f"{role}closed", number))
                    (hall.agent_closed if role else hall.closed)(wire)
                case _ if role:
                    said.append((f"{role}received", number, m.Exited("w0", place, 0)))
                    hall.agent_received(wire, m.Exited("w0", place, 0))
                case _:
                    said.append((f"{role}received", number, m.Beat(1, 1, place)))
                    hall.received(wire, m.Beat(1, 1, place))

    say(before)
    assert not desk.heard
    hall.lead_on(desk)
    assert desk.heard == said
    say(after)
    assert desk.heard == said


def test_only_who_waits_is_told_so() -> None:
    hall = WaitingRoom()
    worker, gone, launcher = Wire(1), Wire(2), Wire(3)
    hall.hold()
    hall.connected(worker)
    hall.connected(gone)
    hall.agent_connected(launcher)
    hall.hold()
    hall.closed(gone)
    hall.hold()
    hall.agent_closed(launcher)
    hall.hold()
    assert [len(wire.sent) for wire in (worker, gone, launcher)] == [3, 1, 2]
    assert worker.sent == [m.Hold()] * 3
    hall.lead_on(Desk())
    hall.connected(late := Wire(4))
    hall.hold()
    assert len(worker.sent) == 3 and not late.sent


def test_people_are_told_to_try_again() -> None:
    hall = WaitingRoom()
    assert hall.scale(3) == hall.drain("w0") == READING
    assert hall.figures() == {} and json.loads(hall.happenings()) == [] and "job" in json.loads(hall.status())
    hall.lead_on(Desk())
    assert hall.scale(3) == (200, "scale 3") and hall.drain("w0") == (200, "drain w0")
    assert (hall.status(), hall.happenings(), hall.figures()) == (b"status", b"happenings", {"round": 7.0})


# over real sockets


class Reading:
    """How long the coordinator that comes next reads the journal, and what becomes of it then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on, self.fails = threading.Event(), False
        reopened = JournalFile.reopened

        def slowly(*given: Any, **named: Any) -> Any:
            assert self.goes_on.wait(LIMIT_S)
            if self.fails:
                raise RuntimeError("lost while it read")
            return reopened(*given, **named)

        monkeypatch.setattr(JournalFile, "reopened", slowly)


class Coordinators:
    """Serves a run with one coordinator after another, in a thread; clients see real sockets."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._task: asyncio.Task[Any] | None = None

    def run(self, awaited: Coroutine[Any, Any, Answer]) -> Answer:
        """In the coordinators' thread."""
        return asyncio.run_coroutine_threadsafe(awaited, self._loop).result(LIMIT_S)

    def start(self, *, resume: bool) -> None:
        """The next one."""

        async def started() -> None:
            charter = RunSpec("job", "train.py", "0", workers=1)
            # The listener outlives them all, as the launcher's does.
            self._task = asyncio.create_task(service.serve(charter, self.directory, self.listener.dup(), TOKEN, resume))

        self.run(started())

    def ended(self, *, cancel: bool = False) -> Any:
        """How the last one went, waited for."""

        async def over() -> Any:
            assert self._task is not None
            if cancel:
                self._task.cancel()
            (answer,) = await asyncio.gather(self._task, return_exceptions=True)
            return answer

        return self.run(over())

    def close(self) -> None:
        """Leave neither thread nor socket."""
        self.ended(cancel=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.listener.close()


PATIENCE_S = 3.0
HOLDS = 60
"""0.1 s apart: twice as long as anybody is patient"""


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    """Who waits has little patience."""
    monkeypatch.setattr(service, "HOLD_EVERY_S", 0.1)
    for module, name in ((client, "GIVE_UP_S"), (opening, "CONNECT_S")):
        monkeypatch.setattr(module, name, PATIENCE_S)
    return Reading(monkeypatch)


@pytest.fixture
def coordinators(tmp_path: Path, reading: Reading) -> Iterator[Coordinators]:
    made = Coordinators(tmp_path)
    yield made
    reading.goes_on.set()
    made.close()


class Holds:
    """Counts how often a launcher was told to wait."""

    def __init__(self) -> None:
        self._enough, self._count = threading.Event(), 0

    def __call__(self) -> None:
        self._count += 1
        if self._count == HOLDS:
            self._enough.set()

    def wait(self) -> None:
        assert self._enough.wait(LIMIT_S), f"told {self._count} times to wait"


def enlisted(coordinators: Coordinators, name: str, held: Callable[[], None] = lambda: None) -> AgentLink:
    """A launcher's connection, in the coordinators' thread."""
    slots = ["w0"] if name else []
    enlist = m.Enlist(name, "0", slots, 0 if name else 1, owner=True)
    connecting = AgentLink.connect(coordinators.address, TOKEN, enlist, PATIENCE_S, held=held)
    link, answer = coordinators.run(connecting)
    assert isinstance(answer, m.Enlisted)
    return link


def waited(link: Link, ask: Callable[[], Answer | None]) -> Answer:
    """What ``ask`` answers in the end, asked again after every message."""
    mailbox = link.mailbox
    with mailbox.changed:
        assert mailbox.changed.wait_for(lambda: ask() is not None or mailbox.trouble, LIMIT_S)
    link.check()
    answer = ask()
    assert answer is not None
    return answer


def trained(coordinators: Coordinators) -> Link:
    """A worker in its first era, whose coordinator is lost then."""
    coordinators.start(resume=False)
    agent = enlisted(coordinators, "")
    link = Link.connect(coordinators.address, TOKEN, "w0", "0")
    link.ready(m.Signature("0", [("weight", [2], "float32")], {"batch": "8"}), "127.0.0.1:1", None)
    start = waited(link, lambda: link.mailbox.start)
    link.position = Position(era=start.era, active=True, waiting=True)
    link.entered(start.era, 0)
    link.keep([journal.encode(journal.EraRecord(start.era, start.roster))], 0)
    link.send_lines_again()
    assert waited(link, lambda: link.mailbox.written or None) == 1
    coordinators.run(agent.close())
    coordinators.ended(cancel=True)
    return link


def test_who_finishes_meanwhile_waits_until_that_is_heard(coordinators: Coordinators, reading: Reading) -> None:
    """Else the next coordinator would begin the run again."""
    link = trained(coordinators)
    coordinators.start(resume=True)
    finishing = threading.Thread(target=lambda: link.finish(left=False))
    finishing.start()
    holds = Holds()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(enlisted, coordinators, "a0", holds)
        holds.wait()
        assert finishing.is_alive()
        with pytest.raises(Refused, match="still reads the journal"):
            requests.post(Access(coordinators.address, TOKEN), "/scale", {"workers": 2})
        reading.goes_on.set()
        agent = connecting.result(LIMIT_S)
    finishing.join(LIMIT_S)
    agent.send(m.Exited("w0", os.getpid(), 0))
    end = coordinators.ended()
    assert end.completed and end.exit_status == 0
    coordinators.run(agent.close())
    lines = (coordinators.directory / "journal.jsonl").read_bytes().splitlines(keepends=True)
    kinds = [type(record) for record in journal.read(lines)]
    assert kinds == [journal.RunRecord, journal.EraRecord, journal.FinishingRecord, journal.EndRecord]


def test_a_coordinator_lost_while_it_reads_is_waited_for_anew(coordinators: Coordinators, reading: Reading) -> None:
    """Workers and launchers count from when they heard it last."""
    link = trained(coordinators)
    reading.fails = True
    coordinators.start(resume=True)
    holds = Holds()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(enlisted, coordinators, "a0", holds)
        holds.wait()
        reading.goes_on.set()
        with pytest.raises(Unreachable):
            connecting.result(LIMIT_S)
    assert isinstance(coordinators.ended(), RuntimeError)
    link.check()
    reading.fails = False
    coordinators.start(resume=True)
    agent = enlisted(coordinators, "a0")
    assert waited(link, lambda: link.mailbox.term if link.mailbox.term > 1 else None)
    link.close()
    coordinators.run(agent.close())


def test_a_guest_launcher_does_not_give_up_for_a_long_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is lost after it has read for long: nobody is away for longer than since then."""
    clock_s, tried = [1000.0], [0]

    async def connect(*given: Any, held: Callable[[], None]) -> Any:
        tried[0] += 1
        if tried[0] > 1:
            return "link", m.Enlisted("job", "a1", 3, [])
        clock_s[0] += 2 * launcher.RECONNECT_S
        held()
        raise Unreachable("lost while it read")

    monkeypatch.setattr(launcher_loop, "RETRY_S", 0.0)
    monkeypatch.setattr(AgentLink, "connect", connect)

    async def connected() -> bool:
        guest = LauncherLoop(JobSpec("train.py"), Silent(), tmp_path, Access("127.0.0.1:1", TOKEN))
        guest._launcher.name, guest._launcher._clock = "a1", lambda: clock_s[0]
        await guest._connected()
        return guest._launcher.end is not None

    assert not asyncio.run(connected()) and tried == [2]
