"""The coordinator under hostile workers and launchers that know the job's token.

Question  Can anything that a worker or a launcher says bring the coordinator down, fill its memory, or stop the others?
Holds     A real ``Coordinator`` with a real journal in memory, fed frame by frame as ``control.app`` does. No frame and
          no later tick raises; every answer can be encoded and every journal line read back; what the coordinator holds
          stays small. Where the hostile ones were kept from speaking for the whole run (which a member may: see
          ``speaks_for_all``), the honest two go on without them when they are gone.
Source    ours; docs/reliability.md.
"""

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from benchmarks.fuzz.mutation import DEEP, bent, deformed
from benchmarks.fuzz.surface import Volley
from pliant.control import messages as m
from pliant.coordinator.coordinator import Coordinator
from pliant.coordinator.journal_summary import account_of
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.status import Status
from pliant.core.journal import records as journal
from pliant.core.membership import events, roster

VERSION = "0.1.0"
FRAMES = 120
"""Of one session: enough to get into every state, few enough to find the one that did it."""

MOST_BYTES = 8 << 20
"""What a coordinator may hold after a session; an honest one of this size holds some 100 KB."""

GOES_ON_S = 45.0
"""The owner's launcher waits 30 s at most between two starts of a process; the rest is far quicker."""

HONEST = ("w0", "w1")
HOSTILE = ("w2", "w3", "w4", "w5")
"""Slots of the same launcher, so that there is nearly always one whose process lives."""
SIGNATURE = m.Signature(VERSION, [("w", [2, 3], "float32")], {"batch": "8", "dead_after": "5.0"})
_TICKETS = [journal.TicketLine([(8 * i, 8 * i + 8)], 1, 8, 8.0, 0.1, 0.0, 0.0, 0.0, 0.8, 1.0, 1.0, 0) for i in range(3)]
RECORDS: list[journal.Record] = [
    journal.EraRecord(1, ["w0", "w1", "w2"]),
    journal.EraRecord(2, ["w0", "w1"], [journal.EntryLine(True, [1], [0])] * 2, 3),
    journal.PolicyRecord(24, False, None, 1, "linear", 0.9),
    journal.PhaseRecord(1, "train", 0, 96, 96, [8, 8, 8], [0, 0, 0], 7),
    journal.PhaseRecord(2, "evaluate", 0, 24, 24, [8, 8, 8], [0, 0, 0], 7, [2], [1], True),
    journal.RoundRecord(1, 1, 1, 24, 24.0, 1.0, 0.1, 0.1, True, 24, _TICKETS),
    journal.RoundRecord(1, 2, 1, 24, 24.0, 1.0, 0.1, None, False, 48, _TICKETS, [(2, 8, 0)], 1, (0.5, None), 0.8),
    journal.ExchangeRecord(1, 2, 24, _TICKETS),
    journal.PhaseEndRecord(2, [], 0.5),
    journal.PhaseEndRecord(1, [(72, 96)]),
    journal.CheckpointRecord("r1", 2, 1),
    journal.RewindRecord("r1", 2, "w0", 2),
    journal.FinishingRecord("w0"),
    journal.RunRecord("job", VERSION, 1e9),
    journal.EndRecord("x", True),
]
_LINES = [journal.encode(record) for record in RECORDS]


class _Journal:
    """In memory, encoded and read back as on disk."""

    def __init__(self) -> None:
        self._chain = 0
        self._records: list[journal.Record] = []

    def append(self, records: list[journal.Record]) -> None:
        for record in records:
            payload = journal.encode(record)
            _, self._chain = journal.line(payload, self._chain)
            if journal.encode(journal.decode(payload)) != payload:
                raise AssertionError(f"{payload!r} does not read back")
            self._records.append(record)

    @property
    def lines(self) -> int:
        return len(self._records)

    @property
    def place(self) -> journal.JournalPosition:
        return journal.JournalPosition(lines=self.lines)

    def since(self, place: journal.JournalPosition) -> Iterator[journal.Record]:
        yield from self._records[place.lines :]

    def sync(self, done: Callable[[bool], None], *, wait: bool = False) -> None:
        done(True)

    def keep(self, content: bytes) -> None: ...

    def mend(self) -> bool:
        return False

    def close(self) -> None: ...


class Wire:
    """A connection in memory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inbox: deque[Any] = deque()
        self.open = True

    def send(self, message: Any) -> None:
        m.encode(message)
        self.inbox.append(message)

    def close(self) -> None:
        self.open = False


class Honest:
    """A worker that does what it is told."""

    def __init__(self, session: "Session", slot: str) -> None:
        self._session = session
        self.slot = self.name = slot
        self.wire = Wire(0)
        self.era = 0
        self.exchange = 0

    def connect(self) -> None:
        self.wire = self._session.connected(m.Hello(self.slot, 7, VERSION))
        self._session.say(self.wire, m.Ready(SIGNATURE, "127.0.0.1:1"))

    def read(self) -> None:
        while self.wire.inbox:
            match self.wire.inbox.popleft():
                case m.Welcome(worker=name):
                    self.name = name
                case m.EraStart(era=era, exchange=exchange) if era > self.era:
                    self.era, self.exchange = era, exchange
                    self._session.say(self.wire, m.Entered(era, exchange))
                case m.EraPlan(era=era) if era > self.era:
                    self.era = era
                    self._session.say(self.wire, m.Entered(era, self.exchange))
                case m.Broken():
                    self._session.say(self.wire, m.Stopped(self.era, self.exchange, True))
                case _:
                    pass

    def beat(self, progress: int) -> None:
        self._session.say(self.wire, m.Beat(self.era, 0, progress, True, 0.1, True))


class Session:
    """One coordinator, its launcher, two honest workers, and whoever else comes."""

    def __init__(self, chance: Random, *, term: int = 1) -> None:
        self.chance = chance
        self.now_s = 1000.0
        self.journal = _Journal()
        charter = RunSpec("job", "train.py", VERSION, 6)
        resumed = None if term == 1 else [journal.RunRecord("job", VERSION, 1e9), *RECORDS[:1], *RECORDS[2:4]]
        account = None if resumed is None else account_of(resumed)
        self.coordinator = Coordinator(charter, self.journal, lambda: self.now_s, 1e9, term=term, account=account)
        self._numbers = 0
        self.owner = self._wire()
        self.coordinator.agent_connected(self.owner)
        self.coordinator.agent_received(self.owner, m.Enlist("", VERSION, [], 6, True))
        self.honest = [Honest(self, slot) for slot in HONEST]
        self.hostile: list[tuple[Wire, bool]] = []
        """connections of theirs; True: a launcher's"""

    def _wire(self) -> Wire:
        self._numbers += 1
        return Wire(self._numbers)

    def connected(self, hello: m.Hello | None = None) -> Wire:
        """A worker's connection."""
        wire = self._wire()
        self.coordinator.connected(wire)
        if hello is not None:
            self.say(wire, hello)
        return wire

    def say(self, wire: Wire, message: Any) -> None:
        if wire.open:
            self.coordinator.received(wire, m.decode_from_worker(m.encode(message)))
        for worker in self.honest:
            if worker.wire is not wire:
                worker.read()

    def train(self) -> None:
        """All are in the first era."""
        for worker in self.honest:
            worker.connect()
        wires = [self.connected(m.Hello(slot, 7, VERSION)) for slot in HOSTILE]
        for wire in wires:
            self.say(wire, m.Ready(SIGNATURE, "127.0.0.1:1"))
        for wire in wires:
            self.say(wire, m.Entered(1, 0))
        self.hostile += [(wire, False) for wire in wires]
        self.settle()

    def settle(self) -> None:
        for worker in self.honest:
            worker.read()

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        for worker in self.honest:
            worker.beat(int(self.now_s * 10))
        self.coordinator.handle(events.Tick(), self.now_s)
        self.settle()
        self.owner.inbox.clear()

    def receive(self, wire: Wire, is_agent: bool, frame: bytes, allowed: Callable[[Any], bool]) -> bool:
        """What ``control.app`` does with a frame; whether it was a message."""
        try:
            message = m.decode_from_agent(frame) if is_agent else m.decode_from_worker(frame)
        except msgspec.DecodeError:
            self.drop(wire, is_agent)
            return False
        if allowed(message):
            if is_agent:
                self.coordinator.agent_received(wire, message)  # type: ignore[arg-type]
            else:
                self.coordinator.received(wire, message)  # type: ignore[arg-type]
            self.settle()
        wire.inbox.clear()
        return True

    def drop(self, wire: Wire, is_agent: bool) -> None:
        wire.open = False
        self.hostile = [entry for entry in self.hostile if entry[0] is not wire]
        (self.coordinator.agent_closed if is_agent else self.coordinator.closed)(wire)
        self.settle()

    def kill(self, slot: str) -> None:
        """A process of the hostile ends."""
        self.coordinator.agent_received(self.owner, m.Exited(slot, self.chance.randrange(1, 10**6), -9))
        self.settle()


def _corpus() -> tuple[list[bytes], list[bytes]]:
    workers: list[Any] = [
        m.Hello("w2", 7, VERSION),
        m.Hello("w2", 7, VERSION, "w2", 1, 1, True, SIGNATURE, "127.0.0.1:1"),
        m.Hello("w2", 7, VERSION, "w2.2", 2, 1, True, None, ""),
        m.Hello("w7", 7, VERSION),
        m.Ready(SIGNATURE, "127.0.0.1:1", m.Call(0, "train", 96)),
        m.Ready(SIGNATURE, ""),
        *(m.Put(1_000_000 + attempt, "key", b"value") for attempt in (1, 2, 3)),
        m.Beat(1, 1, 5, False, 0.1, True),
        m.Beat(0, 0, 0),
        m.Leaving("asked"),
        m.Stopped(1, 1, True, "a collective failed"),
        m.Stopped(2, 2, False),
        m.Entered(1, 0),
        m.Entered(2, 1),
        m.Failed("ValueError: x\nmore"),
        m.Failed("bad", True, True),
        m.Finished(True),
        m.Finished(False),
        m.Saved("r000000001", 0, 1),
        m.Saved("r000000002", 50, 2),
        m.Plan(3, None),
        m.Plan(None, 1000),
        *(m.Lines(first, _LINES[at : at + 3]) for at in range(0, 14, 3) for first in (0, 2, 9)),
    ]
    agents: list[Any] = [
        m.Enlist("", VERSION, [], 2, False),
        m.Enlist("a1", VERSION, ["w3", "w4"], 0, False),
        m.Enlist("", VERSION, [], 2, True),
        m.Exited("w3", 9, 1, "ValueError: x"),
        m.Exited("w4", 9, -9),
        m.Interrupted(2),
        m.Interrupted(15),
        m.Noticed(),
    ]
    return [m.encode(each) for each in workers], [m.encode(each) for each in agents]


WORKER_FRAMES, AGENT_FRAMES = _corpus()
_VALUES = {frame: msgspec.msgpack.decode(frame) for frame in (*WORKER_FRAMES, *AGENT_FRAMES)}
_RECORDS = [msgspec.json.decode(line) for line in _LINES]


def hostile_frame(chance: Random, is_agent: bool) -> bytes:
    """Valid, deformed, bent or overlong."""
    corpus = AGENT_FRAMES if is_agent else WORKER_FRAMES
    frame = chance.choice(corpus)
    match chance.randrange(20):
        case 0 | 1 | 2 | 3:
            return frame
        case 4 | 5:
            return bent(chance, frame, corpus)
        case 8 | 9 | 10 if not is_agent:
            first = chance.choice((0, 0, 1, 2, 3, 4, 5, 6, 7, 50, 10**6, 2**62))
            return m.encode(m.Lines(first, [hostile_record(chance) for _ in range(chance.choice((1, 1, 2, 5)))]))
        case 11 if chance.random() < 0.1:
            value = _VALUES[frame]
            name = chance.choice(list(value)) if isinstance(value, dict) else "x"
            head = msgspec.msgpack.encode({"type": value["type"], name: 0})[:-1] if name != "type" else b""
            return head + b"\x91" * DEEP + b"\xc0"
        case 12 if chance.random() < 0.1:
            return bent(chance, frame * chance.choice((2, 1000)), corpus)
        case _:
            return _encoded(deformed(chance, _VALUES[frame]))


def hostile_record(chance: Random) -> bytes:
    """A line for the journal that a worker might send."""
    if chance.random() < 0.2:
        return bent(chance, chance.choice(_LINES), _LINES)
    value = deformed(chance, chance.choice(_RECORDS))
    text = _json(value)
    if chance.random() < 0.1:
        # Numbers that JSON can carry and no machine word can.
        return text.replace(b"24", chance.choice((b"9" * 40, b"9" * 400, b"9" * 5000, b"1e400", b"-1e999")))
    return text


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError):
        return b"{}"


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError):
        return b"\xc1"


def speaks_for_all(message: Any) -> bool:
    """What a member, or whoever takes an honest one's name, may say that ends the run for all or stands in for others.

    The token makes a member: who bears it is believed in what it says of itself.
    """
    match message:
        case m.Failed(fatal=True) | m.Finished(left=False):
            return True
        case m.Hello(slot=slot, worker=worker):
            return slot in HONEST or worker in HONEST
        case m.Enlist(agent=agent, owner=owner, slots=slots):
            return agent == "a0" or owner or any(slot in HONEST + HOSTILE for slot in slots)
        case _:
            return False


class ControlSurface:
    """Frames against a coordinator in this process."""

    name = "control"

    def fire(self, chance: Random) -> Volley:
        """One session: a coordinator from its first connection on."""
        bounded = chance.random() < 0.6
        session = Session(chance, term=1 if bounded else chance.choice((1, 2)))
        if bounded or chance.random() < 0.5:
            session.train()
        volley = Volley()
        allowed = (lambda message: not speaks_for_all(message)) if bounded else (lambda message: True)
        for _ in range(FRAMES):
            if chance.random() < 0.15:
                session.tick(chance.choice((0.05, 0.05, 0.3, 0.6, 1.2, 2.4)))
            if len(session.hostile) < 2 or chance.random() < 0.05:
                self._come(session, chance, allowed)
            wire, is_agent = self._speaker(session, chance)
            volley.count(session.receive(wire, is_agent, hostile_frame(chance, is_agent), allowed))
            if chance.random() < 0.03:
                session.drop(wire, is_agent)
            if chance.random() < 0.02:
                session.kill(chance.choice(HOSTILE))
        held = size_of(session.coordinator)
        if held > MOST_BYTES:
            raise AssertionError(f"the coordinator holds {held} bytes")
        if bounded:
            self._go_on(session)
        else:
            for _ in range(8):
                session.tick(0.6)
        msgspec.json.decode(session.coordinator.status(), type=Status)
        msgspec.json.decode(session.coordinator.happenings())
        session.coordinator.figures()
        return volley

    def close(self) -> None: ...

    def _speaker(self, session: Session, chance: Random) -> tuple[Wire, bool]:
        """Mostly one that was let in."""
        known = (session.coordinator._workers, session.coordinator._agents)
        admitted = [
            entry for entry in session.hostile if any(side.name_at(entry[0].number) is not None for side in known)
        ]
        return chance.choice(admitted if admitted and chance.random() < 0.8 else session.hostile)

    def _come(self, session: Session, chance: Random, allowed: Callable[[Any], bool]) -> None:
        """A new hostile connection, introduced or not."""
        if chance.random() < 0.3:
            wire = session._wire()
            session.coordinator.agent_connected(wire)
            session.hostile.append((wire, True))
            if chance.random() < 0.7:
                session.receive(wire, True, AGENT_FRAMES[chance.choice((0, 1))], allowed)
            return
        slot = chance.choice(HOSTILE)
        wire = session.connected(m.Hello(slot, 7, VERSION) if chance.random() < 0.8 else None)
        session.hostile.append((wire, False))
        welcome = next((each for each in wire.inbox if isinstance(each, m.Welcome)), None)
        if welcome is not None and chance.random() < 0.8:
            session.say(wire, m.Ready(SIGNATURE, "127.0.0.1:1"))
            plan = next((each for each in wire.inbox if isinstance(each, (m.EraPlan, m.EraStart))), None)
            if plan is not None and chance.random() < 0.8:
                session.say(wire, m.Entered(plan.era, 0))

    def _go_on(self, session: Session) -> None:
        """The hostile ones go, and the honest two train on by themselves."""
        for wire, is_agent in list(session.hostile):
            session.drop(wire, is_agent)
        for slot in HOSTILE:
            session.kill(slot)
        until_s = session.now_s + GOES_ON_S
        while session.now_s < until_s and not _is_well(session):
            session.tick(0.4)
        if not _is_well(session):
            state = session.coordinator.state
            raise AssertionError(f"the honest ones do not go on: {state.stage} {state.course} {state.workers}")
        written = session.coordinator.written
        session.say(session.honest[0].wire, m.Lines(written, _LINES[5:6]))
        if session.coordinator.written <= written:
            raise AssertionError("the journal takes no more records")


def _is_well(session: Session) -> bool:
    state = session.coordinator.state
    names = [worker.name for worker, _ in roster.members_of(state)]
    steady = isinstance(state.course, roster.Steady) and isinstance(state.stage, roster.Running)
    return steady and session.coordinator.end is None and names == [worker.name for worker in session.honest]


def size_of(thing: Any) -> int:
    """Bytes of everything that is reachable from it, code aside."""
    seen: set[int] = set()
    stack: list[Any] = [thing]
    total = 0
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType, Session, Wire)):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        stack.extend(gc.get_referents(each))
    return total


def frames(chance: Random, is_agent: bool, count: int) -> Sequence[bytes]:
    """So many hostile frames."""
    return [hostile_frame(chance, is_agent) for _ in range(count)]
