"""The coordinator's loop, driven with a virtual clock and connections in memory, and once over real sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from websockets.asyncio.client import ClientConnection, connect

from pliant import auth
from pliant.control import messages as m
from pliant.coordinator import service
from pliant.coordinator.coordinator import Coordinator
from pliant.coordinator.journal import JournalFile, NumberedRecords
from pliant.coordinator.journal_summary import account_of
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.service import serve
from pliant.coordinator.store_relay import AT_ONCE
from pliant.core.journal import records as journal
from pliant.core.membership import events

CHARTER = RunSpec("job", "train.py", "0.1.0", workers=3)
SIGNATURE = m.Signature("0.1.0", [("w", [2], "float32")], {"batch": "8"})
Kind = TypeVar("Kind")


@dataclass
class Wire:
    """A connection in memory."""

    number: int
    sent: list[Any] = field(default_factory=list)
    is_closed: bool = False

    def send(self, message: Any) -> None:
        # Through bytes: what cannot be encoded must not pass.
        m.encode(message)
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self.sent if isinstance(message, kind)]

    def last(self, kind: type[Kind]) -> Kind:
        return self.of(kind)[-1]


class Records(list[journal.Record]):
    """A journal in memory."""

    def append(self, records: list[journal.Record]) -> None:  # type: ignore[override]
        self.extend(records)

    @property
    def place(self) -> journal.JournalPosition:
        return journal.JournalPosition(lines=len(self))

    def since(self, place: journal.JournalPosition) -> Iterator[journal.Record]:
        yield from self[place.lines :]

    def sync(self, done: Callable[[bool], None], *, wait: bool = False) -> None:
        done(True)

    def keep(self, content: bytes) -> None: ...

    def mend(self) -> bool:
        return False

    def close(self) -> None: ...


class Scene:
    """A coordinator, a launcher and its workers."""

    def __init__(self, coordinator: Coordinator | None = None, records: Records | None = None, **charter: Any) -> None:
        self.now_s = 100.0
        self.journal = records if records is not None else Records()
        self.numbers: Iterator[int] = iter(range(1, 10_000))
        rules = RunSpec(**{"job": "job", "script": "train.py", "version": "0.1.0", **charter})
        self.coordinator = coordinator or Coordinator(rules, self.journal, lambda: self.now_s, 1e9)
        self.agent = Wire(0)
        self.wires: dict[str, Wire] = {}

    def enlist(self, wanted: int, *, owner: bool = True, name: str = "", slots: tuple[str, ...] = ()) -> Wire:
        wire = Wire(next(self.numbers))
        self.coordinator.agent_connected(wire)
        self.coordinator.agent_received(wire, m.Enlist(name, "0.1.0", list(slots), wanted, owner))
        if owner:
            self.agent = wire
        return wire

    def hello(self, slot: str, worker: str = "", **where: Any) -> Wire:
        wire = Wire(next(self.numbers))
        self.coordinator.connected(wire)
        self.coordinator.received(wire, m.Hello(slot, 7, "0.1.0", worker, **where))
        if wire.of(m.Welcome):
            self.wires[wire.last(m.Welcome).worker] = wire
        return wire

    def say(self, worker: str, message: Any) -> None:
        self.coordinator.received(self.wires[worker], message)

    def ready(self, worker: str, call: m.Call | None = None, signature: m.Signature = SIGNATURE) -> None:
        self.say(worker, m.Ready(signature, f"host:{worker}", call))

    def drop(self, worker: str) -> None:
        self.coordinator.closed(self.wires[worker])

    def exit(self, slot: str, status: int, pid: int = 7, error: str = "") -> None:
        self.coordinator.agent_received(self.agent, m.Exited(slot, pid, status, error))

    def wait(self, seconds: float, beating: tuple[str, ...] = ()) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.05)
            for worker in beating:
                self.say(worker, m.Beat(1, 1, int(self.now_s * 100)))
            self.coordinator.handle(events.Tick(), self.now_s)

    def started(self, n: int, enter: bool = True) -> Scene:
        self.enlist(n)
        for i in range(n):
            self.hello(f"w{i}")
            self.ready(f"w{i}")
        if enter:
            self.enter(1, *(f"w{i}" for i in range(n)))
        return self

    def enter(self, era: int, *workers: str, exchange: int = 0) -> None:
        for worker in workers:
            self.say(worker, m.Entered(era, exchange))

    def stop(self, era: int, *workers: str, exchange: int = 5) -> None:
        for worker in workers:
            self.say(worker, m.Stopped(era, exchange, True))


def test_the_first_era_starts_when_all_slots_are_ready() -> None:
    scene = Scene()
    assert scene.enlist(3).last(m.Enlisted).slots == ["w0", "w1", "w2"]
    for slot in ("w2", "w0"):
        scene.hello(slot)
        scene.ready(slot)
    assert not scene.wires["w0"].of(m.EraStart)
    scene.hello("w1")
    scene.ready("w1")
    start = scene.wires["w0"].last(m.EraStart)
    assert (start.era, start.roster, start.donor, start.exchange) == (1, ["w0", "w1", "w2"], "w0", 0)
    assert start.attempt == 1_000_001 and start.addresses == {f"w{i}": f"host:w{i}" for i in range(3)}


def test_keys_reach_the_members_of_the_attempt_and_whoever_comes_back() -> None:
    scene = Scene().started(2, enter=False)
    attempt = scene.wires["w0"].last(m.EraStart).attempt
    scene.say("w0", m.Put(attempt, "a", b"1"))
    scene.say("w0", m.Put(attempt - 1, "b", b"2"))
    assert scene.wires["w1"].of(m.Push) == [m.Push(attempt, {"a": b"1"})] and not scene.wires["w0"].of(m.Push)
    scene.drop("w1")
    back = scene.hello("w1", worker="w1")
    assert [type(message) for message in back.sent[:3]] == [m.Welcome, m.EraStart, m.Push]
    assert back.last(m.Welcome).worker == "w1"


def test_keys_of_a_large_group_travel_together() -> None:
    n = AT_ONCE + 1
    scene = Scene().started(n, enter=False)
    attempt = scene.wires["w0"].last(m.EraStart).attempt
    keys = {f"key {i}": b"%d" % i for i in range(n)}
    for i in range(n - 1):
        scene.say(f"w{i}", m.Put(attempt, f"key {i}", b"%d" % i))
    assert not scene.wires["w0"].of(m.Push)
    scene.wait(0.05)
    scene.say(f"w{n - 1}", m.Put(attempt, f"key {n - 1}", b"%d" % (n - 1)))
    scene.wait(0.05)
    for i in range(n):
        pushed = scene.wires[f"w{i}"].of(m.Push)
        assert len(pushed) == 2 and {**pushed[0].keys, **pushed[1].keys} == keys
    # A chain of keys does not wait for a tick once all have said theirs.
    for i in range(n):
        scene.say(f"w{i}", m.Put(attempt, f"second {i}", b""))
    assert len(scene.wires["w0"].last(m.Push).keys) == n


def _instructions(act: Callable[[], None]) -> int:
    """How many bytecode instructions it takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def test_a_sign_of_life_costs_the_same_however_many_workers_there_are() -> None:
    beats: dict[int, float] = {}
    ticks: dict[int, float] = {}
    for n in (10, 160):
        scene = Scene().started(n)
        scene.wait(0.05)

        def beat(scene: Scene = scene, n: int = n) -> None:
            for i in range(n):
                scene.say(f"w{i}", m.Beat(1, 1, 2, usual_s=0.1, active=True))

        beats[n] = _instructions(beat) / n
        scene.now_s += 0.05
        ticks[n] = _instructions(lambda scene=scene: scene.coordinator.handle(events.Tick(), scene.now_s)) / n
    assert beats[160] <= 1.1 * beats[10]
    # A tick looks at every worker a few times, not at every pair.
    assert ticks[160] <= 1.5 * ticks[10]


def test_a_killed_worker_is_replaced_and_the_others_go_on() -> None:
    scene = Scene().started(3)
    scene.wait(1.0, ("w0", "w1", "w2"))
    scene.exit("w2", -9)
    assert scene.wires["w0"].last(m.Broken).era == 1
    assert scene.agent.last(m.Note).text == "w2 was lost (killed by signal 9): w0, w1 go on"
    scene.stop(1, "w0", exchange=5)
    assert scene.wires["w0"].last(m.EraStart).era == 1
    scene.stop(1, "w1", exchange=6)
    start = scene.wires["w0"].last(m.EraStart)
    assert (start.era, start.roster, start.donor, start.exchange) == (2, ["w0", "w1"], "w1", 6)
    scene.enter(2, "w0", "w1", exchange=6)
    scene.wait(0.6, ("w0", "w1"))
    assert scene.agent.last(m.Start).slot == "w2"
    wire = scene.hello("w2")
    assert wire.last(m.Welcome).worker == "w2.2" and wire.last(m.Welcome).running
    scene.ready("w2.2")
    plan = scene.wires["w0"].last(m.EraPlan)
    assert (plan.era, plan.roster, plan.donor) == (3, ["w0", "w1", "w2.2"], "w1")
    scene.enter(3, "w0", "w1", "w2.2", exchange=9)
    assert scene.agent.last(m.Note).text == "w2.2 joined"
    assert scene.coordinator.current.restarts == 1


def test_records_are_written_once_in_order_and_acknowledged() -> None:
    scene = Scene().started(2)
    lines = [journal.encode(journal.EraRecord(1, ["w0", "w1"])), journal.encode(journal.PhaseEndRecord(1, []))]
    scene.say("w1", m.Lines(1, lines[1:]))
    assert len(scene.journal) == 1
    scene.say("w0", m.Lines(0, lines))
    scene.say("w1", m.Lines(0, lines))
    assert [type(record) for record in scene.journal] == [
        journal.RunRecord,
        journal.EraRecord,
        journal.PhaseEndRecord,
    ]
    scene.wait(0.3, ("w0", "w1"))
    assert scene.wires["w1"].last(m.Written).count == 2


def test_foreign_records_are_a_failure_of_their_sender() -> None:
    scene = Scene().started(2)
    scene.say("w1", m.Lines(0, [journal.encode(journal.EndRecord("x", True))]))
    assert scene.wires["w1"].is_closed and scene.wires["w0"].of(m.Broken)


def test_a_run_that_finishes_ends_well() -> None:
    scene = Scene().started(2)
    for worker in ("w0", "w1"):
        scene.say(worker, m.Finished())
        scene.drop(worker)
    scene.exit("w0", 0)
    scene.exit("w1", 0)
    assert scene.agent.last(m.Over) == m.Over("finished", completed=True, exit_status=0)
    assert isinstance(scene.journal[-1], journal.EndRecord)
    late = scene.enlist(1, owner=False)
    assert late.last(m.Over).completed


def phase(number: int, task: str, length: int) -> journal.Record:
    return journal.PhaseRecord(number, task, 0, length, length, [8], [1], 0)


def test_a_newcomer_is_told_what_is_past_and_another_dataset_is_refused() -> None:
    scene = Scene().started(1)
    records = [
        journal.EraRecord(1, ["w0"]),
        phase(1, "train", 40),
        phase(2, "evaluate", 10),
        journal.PhaseEndRecord(2, [], 0.1),
        journal.PhaseEndRecord(1, []),
        phase(3, "evaluate", 10),
        journal.PhaseEndRecord(3, [], 0.5),
        phase(4, "train", 40),
    ]
    scene.say("w0", m.Lines(0, [journal.encode(record) for record in records]))
    # What a worker may forget survives a power cut.
    scene.wait(1.0, ("w0",))
    joined = scene.enlist(2, owner=False)
    assert joined.last(m.Enlisted).slots == ["w1", "w2"]
    welcome = scene.hello("w1").last(m.Welcome)
    assert welcome.past == [m.Past("train", 0), m.Past("evaluate", 0, 0.5)] and welcome.written == 8
    scene.hello("w2")
    scene.ready("w1", m.Call(2, "train", 39))
    assert "dataset lengths differ: 40 samples on the run but 39 on w1" in scene.wires["w1"].last(m.Refuse).reason
    scene.ready("w2", m.Call(2, "train", 40))
    assert scene.wires["w0"].last(m.EraPlan).roster == ["w0", "w2"]


def test_scale_and_drain() -> None:
    scene = Scene(max_workers=4).started(2)
    assert scene.coordinator.scale(0)[0] == 422 and scene.coordinator.scale(5)[0] == 422
    assert scene.coordinator.scale(3) == (200, "3 workers are wanted")
    assert scene.agent.last(m.Start).slot == "w2"
    status, text = scene.coordinator.drain("w9")
    assert status == 404 and "w0, w1" in text
    assert scene.coordinator.drain("w1")[0] == 200
    assert scene.wires["w1"].of(m.Leave)
    assert scene.wires["w0"].last(m.EraPlan).roster == ["w0"]
    scene.enter(2, "w0", exchange=3)
    scene.say("w1", m.Finished(left=True))
    assert scene.agent.last(m.Note).text == "w1 left"
    scene.exit("w1", 0)
    scene.wait(2.0, ("w0",))
    assert [start.slot for start in scene.agent.of(m.Start)] == ["w2"]
    kinds = [event["kind"] for event in json.loads(scene.coordinator.happenings())]
    assert kinds.count("left") == 1 and "scaled" in kinds


def test_scaling_down_takes_the_last_and_never_the_leader() -> None:
    scene = Scene().started(3)
    scene.coordinator.scale(1)
    assert scene.wires["w0"].last(m.EraPlan).roster == ["w0"]
    assert not scene.wires["w0"].of(m.Leave) and scene.wires["w2"].of(m.Leave)


def resumed(records: Records, **charter: Any) -> Scene:
    scene = Scene(records=Records())
    rules = RunSpec(**{"job": "job", "script": "train.py", "version": "0.1.0", **charter})
    scene.coordinator = Coordinator.resumed(rules, scene.journal, account_of(records), 2, lambda: scene.now_s, 1e9)
    return scene


def test_a_new_coordinator_goes_on_with_the_members_it_meets() -> None:
    scene = resumed(Records([journal.RunRecord("job", "0.1.0", 0.0), journal.EraRecord(4, ["w0", "w1"])]))
    scene.enlist(0, name="a0", slots=("w0", "w1"))
    assert scene.agent.last(m.Enlisted).term == 2
    for worker in ("w0", "w1"):
        wire = scene.hello(worker, worker=worker, era=4, exchange=9, active=True, signature=SIGNATURE)
        assert wire.last(m.Welcome).written == 1 and wire.last(m.Welcome).term == 2
    scene.wait(7.0, ("w0", "w1"))
    assert not scene.wires["w0"].of(m.Broken)
    scene.exit("w1", -9)
    assert scene.wires["w0"].last(m.Broken) == m.Broken(2, 4, "w1 was lost (killed by signal 9)")
    scene.stop(4, "w0", exchange=9)
    start = scene.wires["w0"].last(m.EraStart)
    # Era numbers of another term begin beyond any that the lost coordinator may have given out.
    assert (start.era, start.attempt, start.exchange) == (105, 2_000_001, 9)


@pytest.mark.parametrize("ended", [("finished", True, 0), ("w1 failed", False, 3)])
def test_a_coordinator_that_died_while_it_said_goodbye_says_it_again(ended: tuple[str, bool, int]) -> None:
    scene = resumed(
        Records([journal.RunRecord("job", "0.1.0", 0.0), journal.EraRecord(4, ["w0"]), journal.EndRecord(*ended)])
    )
    written = list(scene.journal)
    assert scene.coordinator.end is not None and scene.coordinator.current.ended == ended[0]
    agent = scene.enlist(0, name="a0", slots=("w0",))
    assert agent.last(m.Over) == m.Over(*ended)
    late = scene.hello("w0", worker="w0", era=4, exchange=9, active=True)
    assert late.last(m.Stop) == m.Stop(ended[0], completed=ended[1])
    scene.wait(10.0)
    assert scene.journal == written


def test_a_new_coordinator_evicts_nobody_at_once_and_a_missing_one_in_the_end() -> None:
    scene = resumed(Records([journal.RunRecord("job", "0.1.0", 0.0), journal.EraRecord(4, ["w0", "w1"])]))
    scene.hello("w0", worker="w0", era=5, exchange=9, active=True)
    scene.wait(4.9, ("w0",))
    assert not scene.wires["w0"].of(m.Broken)
    scene.wait(1.0, ("w0",))
    assert scene.wires["w0"].last(m.Broken).era == 5
    scene.stop(5, "w0", exchange=9)
    assert scene.wires["w0"].last(m.EraStart).roster == ["w0"]
    late = scene.hello("w1", worker="w1", era=4, exchange=8, active=True)
    assert late.last(m.Refuse).again


def test_members_that_waited_for_a_coordinator_get_an_era() -> None:
    scene = resumed(Records([journal.RunRecord("job", "0.1.0", 0.0), journal.EraRecord(4, ["w0", "w1"])]))
    for worker, exchange in (("w0", 8), ("w1", 9)):
        scene.hello(worker, worker=worker, era=4, exchange=exchange, active=True)
        scene.say(worker, m.Stopped(4, exchange, True, failed="connection reset"))
    scene.wait(0.3)
    start = scene.wires["w0"].last(m.EraStart)
    assert (start.roster, start.donor, start.exchange) == (["w0", "w1"], "w1", 9)


def test_numbered_records_are_put_in_order() -> None:
    numbered = NumberedRecords(3)
    records = [journal.PhaseEndRecord(number, []) for number in range(10)]
    assert numbered.taken(1, records[1:3]) == []
    assert numbered.taken(5, records[5:7]) == []
    assert numbered.taken(2, records[2:5]) == records[3:7]
    assert numbered.written == 7


def test_a_journal_is_reopened_without_its_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(path)
    file.append([journal.RunRecord("job", "0.1.0", 0.0), journal.PhaseEndRecord(1, [], 0.1)])
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"phase_end","pha')
    file, account = JournalFile.reopened(path)
    assert file.place.lines == 2 and account.written == 1 and path.read_bytes() == whole
    file.append([journal.EndRecord("finished", True)])
    file.close()
    with path.open("rb") as lines:
        assert len(list(journal.read(lines))) == 3


def test_a_line_that_the_disk_takes_in_part_is_written_whole_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(path)
    file.append([journal.RunRecord("job", "0.1.0", 0.0)])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines: list[journal.Record] = [journal.PhaseEndRecord(1, [], 0.1), journal.EndRecord("finished", True)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 70, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                file.append(lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    file.append(lines)
    file.close()
    with path.open("rb") as text:
        assert [type(record) for record in journal.read(text)][1:] == [type(line) for line in lines]


class Full(Records):
    """A journal on a disk that may be full."""

    full = False

    def append(self, records: list[journal.Record]) -> None:  # type: ignore[override]
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(records)


def test_what_a_full_disk_does_not_take_is_kept_and_written_later() -> None:
    disk = Full()
    scene = Scene(records=disk).started(2)
    lines = [journal.encode(journal.EraRecord(1, ["w0", "w1"])), journal.encode(journal.PhaseEndRecord(1, []))]
    disk.full = True
    scene.say("w0", m.Lines(0, lines[:1]))
    scene.wait(1.0, beating=("w0", "w1"))
    scene.say("w0", m.Lines(1, lines[1:]))
    scene.wait(1.0, beating=("w0", "w1"))
    notes = [note.text for note in scene.agent.of(m.Note)]
    assert sum("cannot write the journal: No space left" in text for text in notes) == 1
    assert len(disk) == 1 and all(told.count == 0 for told in scene.wires["w0"].of(m.Written))
    assert not scene.agent.of(m.Over)
    disk.full = False
    scene.wait(1.0, beating=("w0", "w1"))
    assert [type(record) for record in disk[1:]] == [journal.EraRecord, journal.PhaseEndRecord]
    assert scene.wires["w0"].last(m.Written).count == 2
    assert "the journal is written again" in scene.agent.last(m.Note).text


@pytest.mark.parametrize("room", [True, False])
def test_a_run_that_is_over_waits_for_its_journal(room: bool) -> None:
    disk = Full()
    scene = Scene(records=disk).started(1)
    disk.full = True
    scene.say("w0", m.Finished())
    scene.exit("w0", 0)
    scene.wait(5.0)
    assert not scene.agent.of(m.Over)
    disk.full = not room
    scene.wait(60.0)
    over = scene.agent.last(m.Over)
    assert over.completed is room and over.exit_status == (0 if room else 4)
    assert isinstance(disk[-1], journal.EndRecord) is room


def test_a_coordinator_waits_for_room_to_take_a_lost_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = JournalFile(tmp_path / "journal.jsonl")
    before.append([journal.RunRecord("job", "0.1.0", 0.0)])
    before.close()
    raised, full = service._raised_term, [True, True, False]

    def on_a_full_disk(directory: Path, least: int) -> int:
        if full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return raised(directory, least)

    monkeypatch.setattr(service, "_raised_term", on_a_full_disk)
    monkeypatch.setattr(service, "WRITE_AGAIN_S", 0.01)
    coordinator, file = asyncio.run(service._begun(CHARTER, tmp_path, resume=True, repeat=False, rewind=False))
    assert not full and coordinator.end is None
    assert capsys.readouterr().err.count("No space left on device; waiting") == 1
    file.close()


def test_a_run_that_is_finishing_is_not_begun_again_by_the_next_coordinator() -> None:
    scene = Scene().started(2)
    scene.say("w0", lines(0, journal.EraRecord(1, ["w0", "w1"])))
    scene.say("w1", m.Finished())
    assert isinstance(scene.journal[-1], journal.FinishingRecord)
    clock_s = [200.0]
    follower = Coordinator.resumed(CHARTER, scene.journal, account_of(list(scene.journal)), 2, lambda: clock_s[0], 1e9)
    after = Scene(follower, scene.journal)
    after.enlist(0, name="a0", slots=("w0", "w1"))
    after.exit("w1", 0)
    after.exit("w0", -9)
    for _ in range(40):
        clock_s[0] += 0.5
        follower.handle(events.Tick(), clock_s[0])
    assert not after.agent.of(m.Start)
    assert follower.end is not None and follower.end.completed and follower.end.exit_status == 0


def lines(first: int, *records: journal.Record) -> m.Lines:
    return m.Lines(first, [journal.encode(record) for record in records])


def test_what_is_past_is_told_for_certain_after_a_run_has_gone_back() -> None:
    """Two calls are over, the checkpoint is of the first one, and everybody is lost."""
    scene = Scene().started(1)
    first = [phase(1, "train", 8), journal.PhaseEndRecord(1, [])]
    second = [phase(2, "evaluate", 8), journal.PhaseEndRecord(2, [], 0.5)]
    scene.say("w0", lines(0, journal.EraRecord(1, ["w0"]), *first[:1]))
    scene.say("w0", m.Saved("c1", 2, 0))
    scene.wait(0.05, ("w0",))
    scene.say("w0", lines(2, *first[1:], *second))
    assert [past.task for past in scene.coordinator._bulletin.tally.past] == ["train", "evaluate"]
    scene.exit("w0", -9)
    scene.wait(1.0)
    scene.hello("w0")
    scene.ready("w0.2")
    era = scene.wires["w0.2"].last(m.EraStart).era
    scene.enter(era, "w0.2", exchange=1)
    scene.enlist(1, owner=False)
    # Where the run goes on from is not known before its first lines.
    assert scene.hello("w1").last(m.Welcome).past == []
    rewound = [journal.RewindRecord("c1", 2, "w0.2", 0), journal.EraRecord(era, ["w0.2"]), *first[1:]]
    scene.say("w0.2", lines(5, *rewound))
    scene.enlist(1, owner=False)
    assert [past.task for past in scene.hello("w2").last(m.Welcome).past] == ["train"]
    # What came in one frame with the word that it has gone back is counted once.
    assert scene.coordinator.current.eras == 2 and not scene.coordinator._bulletin.tally._open_phases
    scene.say("w0.2", lines(8, *second))
    assert [past.task for past in scene.coordinator._bulletin.tally.past] == ["train", "evaluate"]


async def sent(port: int, method: str, path: str, body: bytes = b"", header: str = "") -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{header}Connection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


async def ask(port: int, method: str, path: str, body: bytes = b"", token: str = "secret") -> tuple[int, str]:
    nonce = bytes.fromhex((await sent(port, "GET", "/nonce"))[1])
    signed = auth.authorization(token, nonce, bytes(32), method, path, body)
    return await sent(port, method, path, body, f"Authorization: {signed}\r\n")


async def prove(connection: ClientConnection, role: bytes) -> None:
    theirs = auth.challenged(await connection.recv(decode=False))
    assert theirs is not None
    mine = bytes(32)
    await connection.send(auth.answer("secret", role, theirs, mine))
    assert auth.is_confirmed(await connection.recv(decode=False), "secret", role, theirs, mine)


async def conversation(directory: Path) -> events.Ended:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ready = asyncio.Event()
    serving = asyncio.create_task(serve(CHARTER, directory, listener, "secret", False, on_ready=ready.set))
    await asyncio.wait_for(ready.wait(), 10)
    async with connect(f"ws://127.0.0.1:{port}/agent", ping_interval=None) as agent:
        await prove(agent, b"agent")
        await agent.send(m.encode(m.Enlist("", "0.1.0", [], 1, True)))
        assert m.decode_to_agent(await agent.recv(decode=False)) == m.Enlisted("job", "a0", 1, ["w0"])
        async with connect(f"ws://127.0.0.1:{port}/worker", ping_interval=None) as worker:
            await prove(worker, b"worker")
            await worker.send(m.encode(m.Hello("w0", 7, "0.1.0")))
            welcome = m.decode_from_coordinator(await worker.recv(decode=False))
            assert isinstance(welcome, m.Welcome) and welcome.worker == "w0"
            await worker.send(m.encode(m.Ready(SIGNATURE, "x:1")))
            assert isinstance(m.decode_from_coordinator(await worker.recv(decode=False)), m.EraStart)
            assert (await ask(port, "GET", "/status"))[0] == 200
            assert (await ask(port, "GET", "/status", token="guess"))[0] == 403
            assert (await ask(port, "POST", "/scale", b'{"workers": 0}'))[0] == 422
            assert (await ask(port, "POST", "/scale", b"three"))[0] == 422
            assert (await ask(port, "POST", "/drain", b'{"worker": "w7"}')) == (
                404,
                "there is no worker w7; the workers are w0\n",
            )
            assert json.loads((await ask(port, "GET", "/events"))[1])[0]["kind"] == "era"
            assert "pliant_restarts_total 0.0" in (await ask(port, "GET", "/metrics"))[1]
            await worker.send(m.encode(m.Entered(1, 0)))
            await worker.send(m.encode(m.Finished()))
        await agent.send(m.encode(m.Exited("w0", 7, 0)))
        while not isinstance(over := m.decode_to_agent(await agent.recv(decode=False)), m.Over):
            pass
        assert over.completed
    return await asyncio.wait_for(serving, 10)


@pytest.mark.timeout(60)
def test_it_serves_over_real_sockets(tmp_path: Path) -> None:
    end = asyncio.run(conversation(tmp_path))
    assert end == events.Ended("finished", completed=True, exit_status=0)
    assert (tmp_path / "term").read_text() == "1\n"
    with (tmp_path / "journal.jsonl").open("rb") as lines:
        kinds = [type(record) for record in journal.read(lines)]
    assert kinds == [journal.RunRecord, journal.FinishingRecord, journal.EndRecord]


def test_a_newcomer_that_may_be_refused_does_not_say_how_long_the_run_is() -> None:
    scene = Scene().started(2)

    def epochs() -> int:
        return json.loads(scene.coordinator.status())["epochs"]

    scene.say("w0", m.Plan(epochs=14, samples=None))
    scene.enlist(1, owner=False)
    scene.hello("w2")
    scene.say("w2", m.Plan(epochs=3, samples=None))
    assert epochs() == 14
    scene.say("w1", m.Plan(epochs=15, samples=None))
    assert epochs() == 15


def test_an_era_in_the_journal_says_when_it_began_and_what_led_to_it() -> None:
    scene = Scene().started(2)
    scene.say("w0", lines(0, journal.EraRecord(1, ["w0", "w1"], unix_s=5.0)))
    scene.wait(3.0, ("w0", "w1"))
    scene.exit("w1", -9)
    lost_s = scene.now_s
    scene.wait(1.0, ("w0",))
    scene.say("w0", lines(1, journal.EraRecord(2, ["w0"])))
    first, second = (record for record in scene.journal if isinstance(record, journal.EraRecord))
    # Its clock began at 100 s, which was 1e9 s on the calendar; what a worker says about time does not count.
    assert first.unix_s == 1e9
    assert second.unix_s == pytest.approx(1e9 + scene.now_s - 100.0, rel=0, abs=0.01)
    change = next(each for each in second.changes if each.kind == "lost")
    assert change.worker == "w1" and "w1" in change.text and "killed by signal 9" in change.text
    assert change.unix_s == pytest.approx(1e9 + lost_s - 100.0, rel=0, abs=0.01)
    assert not {each.unix_s for each in second.changes} & {each.unix_s for each in first.changes}
    older = journal.decode(b'{"kind":"era","era":1,"roster":["w0"]}')
    assert older == journal.EraRecord(1, ["w0"]) and b"unix" not in journal.encode(older)


def test_events_of_a_run_that_is_over_say_when_and_why(tmp_path: Path) -> None:
    from pliant.ui import offline_status

    file = JournalFile(tmp_path / "journal.jsonl")
    lost = journal.ChangeLine(8.0, "lost", "w1", "w1 was killed by SIGKILL")
    eras = [
        journal.EraRecord(1, ["w0", "w1", "w2"], unix_s=7.0),
        journal.EraRecord(2, ["w0"], unix_s=9.0, changes=[lost]),
    ]
    file.append([journal.RunRecord("job", "0", 6.0), *eras])
    file.close()
    told = json.loads(offline_status.told("/events", tmp_path) or b"")
    assert [(each["unix_s"], each["text"]) for each in told] == [
        (6.0, "the run began"),
        (7.0, "era 1: w0, w1, w2"),
        (8.0, "w1 was killed by SIGKILL"),
        (0.0, "w2 left or was lost"),
        (9.0, "era 2: w0"),
    ]
