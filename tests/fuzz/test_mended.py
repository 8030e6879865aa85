"""What hostile input once did, each on its own."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
import pytest
from benchmarks.fuzz.control import RECORDS, SIGNATURE, VERSION, Session, Wire
from benchmarks.fuzz.journals import chained
from benchmarks.fuzz.surface import chance_of

from pliant import auth
from pliant.control import app, messages
from pliant.control import messages as m
from pliant.control.limits import ConnectionLimits
from pliant.coordinator import recorder, store_relay
from pliant.coordinator.status import Status
from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit
from pliant.core.membership import roster
from pliant.errors import JournalError
from pliant.tensors import framing, handoff

DEEP = b"\x91" * 100_000 + b"\xc0"


def training() -> Session:
    session = Session(chance_of("control", 0, 0))
    session.train()
    return session


def hostile(session: Session) -> Wire:
    return session.hostile[0][0]


def is_lost(session: Session, slot: str = "w2") -> bool:
    return all(worker.slot != slot for worker in session.coordinator.state.workers)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x82\xa4type\xa7leaving\xa6reason\xa2\xff\xfe",
        b"\x82\xa4type\xa7leaving\xa1x" + DEEP,
        b"\x82\xa4type\xa7leaving\xa6reason\xdd\xff\xff\xff\xff",
        m.encode(m.Entered(2**60, 0)),
        m.encode(m.Hello("w" + "9" * 5000, 7, VERSION)),
    ],
    ids=["no utf-8", "nested without end", "longer than it is", "beyond any count", "a name without end"],
)
def test_what_is_no_message_is_refused_as_such(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode_from_worker(frame)


def test_a_record_that_no_file_can_hold_is_a_failure_of_its_sender() -> None:
    for text in (b'{"kind":"phase_end","phase":' + b"9" * 40 + b',"cut":[]}', b'{"kind":"era","x":' + b"[" * 100_000):
        session = training()
        session.say(hostile(session), m.Lines(0, [journal.encode(RECORDS[0]), text]))
        assert is_lost(session) and session.coordinator.written == 0 and session.journal.lines == 1


def test_a_launcher_cannot_ask_for_more_than_there_can_be() -> None:
    session = training()
    wire = Wire(99)
    session.coordinator.agent_connected(wire)
    session.coordinator.agent_received(wire, m.Enlist("", VERSION, [], 2**40, False))
    session.coordinator.agent_received(wire, m.Enlist("a7", VERSION, [f"w{i}" for i in range(9, 5000)], 0, False))
    assert [type(message) for message in wire.inbox] == [m.Refuse, m.Refuse]
    assert len(session.coordinator.state.slots) == 6
    assert session.coordinator.scale(10**9)[0] == 422
    assert session.coordinator.scale(roster.MOST_SLOTS)[0] == 200


def test_exits_of_unknown_slots_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.core.membership.processes.MOST_SLOTS", 20)
    session = training()
    for number in range(100):
        session.coordinator.agent_received(session.owner, m.Exited(f"x{number}", number, 1))
    assert len(session.coordinator.state.slots) <= 80


def test_an_era_that_nobody_began_is_a_failure_of_its_teller() -> None:
    for lie in (m.Entered(7, 0), m.Stopped(2**53, 0, True)):
        session = training()
        session.say(hostile(session), lie)
        assert is_lost(session)
        assert session.coordinator.state.last_era <= 2
    session = training()
    wire = session.connected(m.Hello("w2", 7, VERSION, "w2", 2**53, 0, True))
    assert any(isinstance(message, m.Refuse) for message in wire.inbox)
    assert session.coordinator.state.last_era == 1


@pytest.mark.parametrize("text", ["1e-9", "nan", "-1", "0", "inf and more"])
def test_no_worker_alone_says_when_the_others_are_dead(text: str) -> None:
    session = training()
    session.kill("w2")
    session.tick(0.6)
    session.tick(0.6)
    signature = m.Signature(VERSION, SIGNATURE.parameters, {**SIGNATURE.settings, "dead_after": text})
    session.say(session.connected(m.Hello("w2", 7, VERSION)), m.Ready(signature, ""))
    assert session.coordinator.state.dead_after_s == 5.0
    first = Session(chance_of("control", 0, 0))
    first.say(first.connected(m.Hello("w2", 7, VERSION)), m.Ready(signature, ""))
    assert first.coordinator.state.dead_after_s == 5.0


def test_records_out_of_order_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "EARLY_BYTES", 10_000)
    session = training()
    wire = hostile(session)
    for number in range(1000):
        session.say(wire, m.Lines(10**9 + number, [journal.encode(RECORDS[0])]))
    # It may be an honest one that a lost coordinator has told too much: it is asked to begin again.
    assert not is_lost(session)
    assert session.coordinator._recorder._lines.early_bytes <= 10_000
    session.say(session.honest[0].wire, m.Lines(0, [journal.encode(RECORDS[0])]))
    assert session.coordinator.written == 1


def test_keys_are_bounded_and_only_members_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_relay, "KEYS_BYTES", 10_000)
    session = training()
    attempt = session.coordinator._formation.attempt
    wire = hostile(session)
    for number in range(100):
        session.say(wire, m.Put(attempt, f"key{number}", bytes(1000)))
    assert is_lost(session)
    assert sum(map(len, session.coordinator._formation.keys.values())) <= 10_000
    session = training()
    session.kill("w2")
    session.tick(0.6)
    session.tick(0.6)
    attempt = session.coordinator._formation.attempt
    session.say(session.connected(m.Hello("w2", 7, VERSION)), m.Put(attempt, "stranger", b""))
    assert "stranger" not in session.coordinator._formation.keys


def test_names_that_are_gone_are_not_kept() -> None:
    session = training()
    session.kill("w2")
    session.tick(0.6)
    session.tick(0.6)
    for _ in range(50):
        wire = session.connected(m.Hello("w2", 7, VERSION))
        assert any(isinstance(message, m.Welcome) for message in wire.inbox)
        session.coordinator.closed(wire)
    assert session.coordinator.state.ghosts == frozenset()


def test_what_a_worker_says_of_itself_is_shown_and_not_obeyed() -> None:
    session = training()
    session.owner.inbox.clear()
    session.say(hostile(session), m.Failed("\x1b[2Jall is well" + "!" * 100_000))
    notes = [message.text for message in session.owner.inbox if isinstance(message, m.Note)]
    assert notes and all(note.isprintable() and len(note) <= 2001 for note in notes)


def test_a_status_can_be_read_whatever_times_are_told() -> None:
    session = training()
    ticket = journal.TicketLine([(0, 8)], 1, 2**53, 8.0, 5e-324, 1e12, 0.0, 0.0, 0.8, 1.0, 1.0, 0)
    records = [RECORDS[0], RECORDS[3], journal.RoundRecord(1, 1, 1, 24, 24.0, 1.0, 0.1, 0.1, True, 24, [ticket] * 3)]
    session.say(session.honest[0].wire, m.Lines(0, [journal.encode(record) for record in records]))
    assert session.coordinator.written == 3
    session.tick(0.3)
    assert msgspec.json.decode(session.coordinator.status(), type=Status).rounds == 1


def test_many_rounds_in_a_second_cost_no_more_each() -> None:
    """The pace is of the last five seconds: it once was summed up anew with every round."""
    session = training()
    session.say(session.honest[0].wire, m.Lines(0, [journal.encode(record) for record in (RECORDS[0], RECORDS[3])]))
    tally = session.coordinator._bulletin.tally
    for number in range(20):
        tally.add(
            journal.RoundRecord(1, number, 1, 24, 24.0, 1.0, 0.1, 0.1, True, 24, RECORDS[5].tickets), 0.1 * number
        )  # type: ignore[union-attr]
    assert tally._recent_samples == [160, 160, 160]
    assert {row.name: row.pace for row in tally.status.workers}["w0"] == pytest.approx(80.0)
    tally.tick(6.05)
    assert tally._recent_samples == [8 * len(tally._recent)] * 3 and 0 < len(tally._recent) < 20
    tally.tick(100.0)
    assert tally._recent_samples == [0, 0, 0] and tally._recent_busy_s == [0.0, 0.0, 0.0]


def forged(**policy: Any) -> list[journal.Record]:
    """A journal that says of itself that it is right, with numbers that no run has."""
    given = {"batch": 24, "floating": True, "at_most": None, "delay": 1, "rule": "linear", "momentum": 0.9, **policy}
    records = [journal.RunRecord("job", "0", 0.0), RECORDS[0], journal.PolicyRecord(**given), RECORDS[3], *RECORDS[5:7]]
    return list(journal.read(chained([journal.encode(record) for record in records]).splitlines(keepends=True)))


@pytest.mark.parametrize("policy", [{"momentum": 1.0}, {"batch": 0}, {"batch": 2**53, "floating": False}])
def test_numbers_that_no_run_has_are_a_problem_of_the_journal(policy: dict[str, Any]) -> None:
    assert audit(forged(**policy)).problems


def test_a_forged_journal_does_not_fill_the_memory() -> None:
    phase = journal.PhaseRecord(1, "train", 0, 2**53, 2**53, [1, 1, 1], [0, 0, 0], 7)
    policy = journal.PolicyRecord(2**50, False, None, 1, "linear", 0.9)
    records = [journal.RunRecord("job", "0", 0.0), RECORDS[0], policy, phase]
    problems = audit(records).problems
    assert any("more than 1000000 at once" in problem for problem in problems)
    with pytest.raises(JournalError):
        journal.decode(journal.encode(journal.PhaseRecord(1, "train", 0, 9, 9, [1], [2**40], 7)))


def test_a_state_with_a_key_twice_is_broken() -> None:
    """The second value took the place of a tensor that had been sent."""
    sent = io.BytesIO()
    skeleton = b'{"d":[["p0",{"t":["float32",[2]]}],["p0",-2]]}'
    framing.write_frame(sent, msgspec.msgpack.encode(handoff._State(1, len(skeleton), 8)))
    for part in (skeleton, bytes(8)):
        framing.write_chunks(sent, memoryview(part))
    framing.write_frame(sent, b"whole")
    sent.seek(0)
    with pytest.raises(framing.StreamBroken, match="the same key twice"):
        handoff._read_answer(sent, framing.read_frame(sent))


class Deaf:
    """A WebSocket whose peer neither speaks nor reads."""

    client = None

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"extensions": {app.ADMITTED: lambda frame_bytes: None}}
        self._sent: list[bytes] = []
        self._spoke = False

    async def accept(self) -> None: ...
    async def close(self) -> None: ...

    async def receive_bytes(self) -> bytes:
        """Its proof, and then nothing."""
        if not self._spoke:
            self._spoke = True
            nonce = auth.challenged(self._sent[0])
            assert nonce is not None
            return auth.answer("t", b"agent", nonce, bytes(32))
        await asyncio.Event().wait()
        raise AssertionError("nobody speaks")

    async def send_bytes(self, frame: bytes) -> None:
        self._sent.append(frame)
        if len(self._sent) > 2:
            await asyncio.Event().wait()


def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "OUTBOX_BYTES", 10_000)
    peers: list[app.WebSocketPeer] = []
    closed: list[app.WebSocketPeer] = []

    async def served() -> None:
        ignored: Any = lambda *_: None  # noqa: E731
        peers.append(app.WebSocketPeer(1))
        socket: Any = Deaf()
        role = app._Role(b"agent", 1 << 20, m.decode_from_agent, ignored, ignored, closed.append)
        await app._serve(socket, "t", ConnectionLimits(ignored), peers[0], role)

    async def scene() -> None:
        serving = asyncio.create_task(served())
        while not peers:
            await asyncio.sleep(0)
        for _ in range(9):
            peers[0].send(m.Note("x" * 1000))
        await asyncio.sleep(0)
        assert not closed
        for _ in range(50):
            peers[0].send(m.Note("x" * 1000))
        await serving

    asyncio.run(scene())
    assert closed == peers and peers[0]._queued_bytes <= 10_000
