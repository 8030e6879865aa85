"""A coordinator that takes a lost one's place: what it reads, what it knows, what it keeps."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pliant.control import messages as m
from pliant.coordinator.coordinator import Coordinator
from pliant.coordinator.journal import JournalFile
from pliant.coordinator.journal_summary import JournalSummary
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.state_file import STATE
from pliant.coordinator.status import Status
from pliant.core.journal import records as journal
from pliant.core.membership import events

CHARTER = RunSpec("job", "train.py", "0", workers=8)
WORKERS = 8


class Wire:
    """A connection that forgets what it is told, but for the last of each kind."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.last: dict[type, object] = {}

    def send(self, message: m.FromCoordinator | m.ToAgent) -> None:
        self.last[type(message)] = message

    def close(self) -> None: ...


def rounds(first: int, count: int) -> list[bytes]:
    """Records of rounds of eight workers."""
    found: list[bytes] = []
    for number in range(first, first + count):
        tickets = [
            journal.TicketLine([(8 * i, 8 * i + 8)], 1, 8, 8.0, 0.1, 0.0, 0.01, 0.0, 4.0, 1.5, 1.0, 0)
            for i in range(WORKERS)
        ]
        record = journal.RoundRecord(1, number, 1, 64, 64.0, 1.0, 0.1, 0.5, True, 64 * number, tickets)
        found.append(journal.encode(record))
    return found


class Run:
    """A coordinator with its journal on disk, and one worker that tells of all rounds."""

    def __init__(self, directory: Path) -> None:
        self.now_s, self.path = 100.0, directory / "journal.jsonl"
        self.file = JournalFile(self.path)
        self.coordinator = Coordinator(CHARTER, self.file, lambda: self.now_s, 1e9)
        self.wire, agent = Wire(1), Wire(0)
        self.coordinator.agent_connected(agent)
        self.coordinator.agent_received(agent, m.Enlist("", "0", [], 1, owner=True))
        self.coordinator.connected(self.wire)
        self.coordinator.received(self.wire, m.Hello("w0", 7, "0"))
        signature = m.Signature("0", [("weight", [2], "float32")], {"batch": "8"})
        self.coordinator.received(self.wire, m.Ready(signature, "host:0"))
        self.coordinator.received(self.wire, m.Entered(1, 0))
        self.written = 0
        names = [f"w{i}" for i in range(WORKERS)]
        opened = journal.PhaseRecord(1, "train", 0, 1 << 40, 1 << 40, [8] * 8, [1] * 8, 0)
        self.tell([journal.encode(journal.EraRecord(1, names)), journal.encode(opened)])
        self.rounds = 0

    def tell(self, lines: list[bytes]) -> None:
        """The worker's records, and a tick."""
        self.coordinator.received(self.wire, m.Lines(self.written, lines))
        self.written += len(lines)
        self.pass_time(0.05)

    def train(self, count: int) -> None:
        """So many rounds, a hundred per tick."""
        for first in range(self.rounds + 1, self.rounds + count + 1, 100):
            self.tell(rounds(first, min(100, self.rounds + count + 1 - first)))
        self.rounds += count

    def pass_time(self, seconds: float) -> None:
        """A sign of life and a tick."""
        self.now_s += seconds
        self.coordinator.received(self.wire, m.Beat(1, 1, int(self.now_s * 100)))
        self.coordinator.handle(events.Tick(), self.now_s)

    def successor(self) -> tuple[Coordinator, JournalFile]:
        """Who takes its place."""
        file, account = JournalFile.reopened(self.path)
        return Coordinator.resumed(CHARTER, file, account, 2, lambda: self.now_s, 1e9), file


def known(coordinator: Coordinator) -> object:
    """All figures but speeds, which are of the last seconds."""
    status = msgspec.convert(msgspec.to_builtins(coordinator.current), Status)
    for row in status.workers:
        row.pace = 0.0
    return status


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.file.close()


def test_it_reads_only_what_came_after_the_state_file(run: Run) -> None:
    run.train(3000)
    run.pass_time(6.0)
    run.train(10)
    size = run.path.stat().st_size
    coordinator, file = run.successor()
    assert coordinator.current.rounds == 3010 and coordinator.written == run.written
    assert 0 < file.was_read < size / 100
    file.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.unlink(),
        lambda state: state.write_bytes(state.read_bytes()[:-20]),
        lambda state: state.write_bytes(state.read_bytes().replace(b'"rounds":300', b'"rounds":301')),
        lambda state: state.write_bytes(journal.line(b'{"version":99}', 0)[0]),
    ],
    ids=["missing", "cut", "changed", "another version"],
)
def test_without_a_good_state_file_it_reads_all_and_knows_the_same(run: Run, damage: Callable[[Path], None]) -> None:
    run.train(300)
    run.pass_time(6.0)
    told, file = run.successor()
    before = known(told)
    file.close()
    damage(run.path.with_name(STATE))
    again, file = run.successor()
    assert known(again) == before and again.written == run.written
    assert file.was_read == run.path.stat().st_size
    file.close()


def test_a_state_of_another_journal_does_not_count(run: Run) -> None:
    run.train(300)
    run.pass_time(6.0)
    lines = run.path.read_bytes().splitlines(keepends=True)
    run.path.write_bytes(b"".join(lines[:100]))
    again, file = run.successor()
    assert again.current.rounds == 97 and file.was_read == run.path.stat().st_size
    file.close()


def test_going_back_reads_from_the_last_bookmark(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.train(2000)
    run.pass_time(6.0)
    run.train(10)
    run.coordinator.received(run.wire, m.Saved("c1", run.written, run.rounds))
    run.pass_time(0.05)
    run.train(500)
    read: list[int] = []
    placed = journal.placed

    def counted(*given: object) -> Iterator[tuple[journal.JournalPosition, journal.Record]]:
        for place, record in placed(*given):  # type: ignore[arg-type]
            read.append(place.lines)
            yield place, record

    monkeypatch.setattr(journal, "placed", counted)
    run.tell([journal.encode(journal.RewindRecord("c1", 2012, "w0", run.rounds))])
    assert run.coordinator.current.rounds == 2010 and run.coordinator.current.samples_total == 64 * 2010
    assert len(read) < 20
    monkeypatch.undo()
    # One that comes after it counts the same, with the state file and without.
    for _ in range(2):
        after, file = run.successor()
        assert after.current.rounds == 2010 and after.state.checkpoints == ("c1",) and after.state.rewinds == 1
        file.close()
        run.path.with_name(STATE).unlink(missing_ok=True)


def test_what_is_kept_does_not_grow_with_the_rounds(run: Run) -> None:
    def kept() -> int:
        run.pass_time(6.0)
        return run.path.with_name(STATE).stat().st_size

    run.train(1000)
    first = kept()
    tracemalloc.start()
    try:
        run.train(1000)
        run.pass_time(6.0)
        before, _ = tracemalloc.get_traced_memory()
        run.train(3000)
        run.pass_time(6.0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Three thousand rounds are two megabytes of journal.
    assert after - before < 200_000
    assert kept() < 1.2 * first


def test_bookmarks_are_thinned_out_but_not_those_of_checkpoints() -> None:
    account = JournalSummary("job")
    account.add(journal.EraRecord(1, ["w0"]), None)
    for number in range(1, 1001):
        account.add(journal.decode(rounds(number, 1)[0]), None)
        account.bookmark(journal.JournalPosition(number, number))
        if number == 500:
            account.add(journal.CheckpointRecord("c1", account.written, number), None)
    place = account.base(501)
    assert place is not None and place.lines == 500
    assert len(account._bookmarks) <= 64


def test_what_is_acknowledged_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def sync(self: JournalFile, done: Callable[[bool], None], *, wait: bool = False) -> None:
        order.append(f"sync {self.place.lines}")
        done(True)

    monkeypatch.setattr(JournalFile, "sync", sync)
    run = Run(tmp_path)
    run.pass_time(1.0)
    order.clear()
    run.train(200)
    assert order == ["sync 103"] and run.wire.last[m.Written] == m.Written(102)
    run.pass_time(1.0)
    assert order == ["sync 103", "sync 203"] and run.wire.last[m.Written] == m.Written(202)
    run.coordinator.received(run.wire, m.Saved("c1", 202, 200))
    run.pass_time(0.05)
    # First what leads to it, which is there already; then the record that names it, before anybody hears of it.
    assert order == ["sync 103", "sync 203", "sync 204"] and run.wire.last[m.Named] == m.Named(["c1"])
    run.file.close()


def test_a_gap_is_asked_for_and_then_named(run: Run) -> None:
    """After a power cut the disk may lack what the workers were told to be there."""
    run.train(100)
    run.pass_time(1.0)
    late = rounds(151, 50)
    for _ in range(2):
        run.coordinator.received(run.wire, m.Lines(run.written + 50, late))
        run.pass_time(2.5)
    assert run.wire.last[m.Again] == m.Again(102) and m.Refuse not in run.wire.last
    for _ in range(10):
        run.pass_time(2.0)
    records = list(journal.read(run.path.read_bytes().splitlines(keepends=True)))
    (gap,) = [record for record in records if isinstance(record, journal.GapRecord)]
    assert (gap.first, gap.next) == (102, 152) and run.coordinator.written == 202
    after, file = run.successor()
    assert after.written == 202
    file.close()


def test_too_many_early_records_are_asked_for_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from pliant.coordinator import recorder

    monkeypatch.setattr(recorder, "EARLY_BYTES", 10_000)
    run.coordinator.received(run.wire, m.Lines(run.written + 10, rounds(11, 5)))
    run.coordinator.received(run.wire, m.Lines(run.written + 15, rounds(16, 50)))
    run.coordinator.received(run.wire, m.Lines(run.written, rounds(1, 10)))
    run.pass_time(0.05)
    assert run.wire.last[m.Again] == m.Again(run.written + 15) and m.Refuse not in run.wire.last
    assert run.coordinator.end is None and len(run.coordinator.state.workers) == 1
