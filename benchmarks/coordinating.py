"""What the coordinator costs: CPU seconds per heartbeat, and how it grows with the workers.

Question  How much of a core does the coordinator need for the signs of life of so many workers?
Holds     The coordinator is the real one, with a journal in memory and connections that only encode. Time is passed in:
          two heartbeats per second and worker, a tick every 50 ms, as in a run; seconds are CPU seconds of this thread.
          A journal of a million rounds is written by the real coordinator, and another one takes its place: in a
          process of its own, which like a coordinator's does not load torch, so that its memory is a coordinator's.
Source    docs/design/0020-coordinator-at-scale.md.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.resident import status_mb
from benchmarks.results import Trial
from pliant.control import messages
from pliant.coordinator.coordinator import Coordinator
from pliant.coordinator.journal import JournalFile
from pliant.coordinator.recorder import JournalSink
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.service import TICK_S
from pliant.coordinator.state_file import STATE
from pliant.core.journal import records as journal
from pliant.core.membership import events

SIZES = (10, 100, 1000)
BEATS_PER_S = 2
SIGNATURE = messages.Signature("0", [("weight", [2], "float32")], {"batch": "8"})
QUICK_S, FULL_S = 5.0, 30.0
WORKERS, PER_TICK = 8, 100
QUICK_ROUNDS, FULL_ROUNDS = 20_000, 1_000_000

Say = Callable[[str], None]


@dataclass
class _Wire:
    """A connection that encodes what it is told."""

    number: int
    sent: int = 0

    def send(self, message: messages.FromCoordinator | messages.ToAgent) -> None:
        self.sent += len(messages.encode(message))

    def close(self) -> None: ...


class _Journal:
    """Forgets what it is given."""

    place = journal.JournalPosition()

    def append(self, records: list[journal.Record]) -> None: ...

    def since(self, place: journal.JournalPosition) -> Iterator[journal.Record]:
        return iter(())

    def sync(self, done: Callable[[bool], None], *, wait: bool = False) -> None:
        done(True)

    def keep(self, content: bytes) -> None: ...

    def mend(self) -> bool:
        return False

    def close(self) -> None: ...


class Crowd:
    """A coordinator and so many workers in an era."""

    def __init__(self, workers: int, journal_file: JournalSink | None = None) -> None:
        self.now_s, self._beats = 100.0, 0
        charter = RunSpec("job", "train.py", "0", workers=workers)
        self.coordinator = Coordinator(charter, journal_file or _Journal(), lambda: self.now_s, 1e9)
        agent = _Wire(0)
        self.coordinator.agent_connected(agent)
        self.coordinator.agent_received(agent, messages.Enlist("", "0", [], workers, owner=True))
        self.wires = [_Wire(number) for number in range(1, workers + 1)]
        for slot, wire in enumerate(self.wires):
            self.coordinator.connected(wire)
            self.coordinator.received(wire, messages.Hello(f"w{slot}", 7, "0"))
        for slot, wire in enumerate(self.wires):
            self.coordinator.received(wire, messages.Ready(SIGNATURE, f"host:{slot}"))
        for wire in self.wires:
            self.coordinator.received(wire, messages.Entered(1, 0))

    def beat(self, wire: _Wire) -> None:
        """One worker's sign of life."""
        self._beats += 1
        self.coordinator.received(wire, messages.Beat(1, 1, self._beats, usual_s=0.1, active=True))

    def live(self, seconds: float) -> None:
        """Let time pass, with beats spread evenly."""
        until_s, place = self.now_s + seconds, 0.0
        per_tick = len(self.wires) * BEATS_PER_S * TICK_S
        while self.now_s < until_s:
            self.now_s += TICK_S
            upto = place + per_tick
            for number in range(int(place), int(upto)):
                self.beat(self.wires[number % len(self.wires)])
            place = upto
            self.coordinator.handle(events.Tick(), self.now_s)


def measure(seconds: float, say: Say) -> tuple[Trial, ...]:
    """Let crowds of several sizes live for so long."""
    trials: list[Trial] = []
    for size in SIZES:
        say(f"{size} workers for {seconds:g} s")
        began_s = time.thread_time()
        crowd = Crowd(size)
        formed_s = time.thread_time() - began_s
        crowd.live(1.0)
        began_s = time.thread_time()
        crowd.live(seconds)
        cpu_s = time.thread_time() - began_s
        beats = size * BEATS_PER_S * seconds
        figures = {"cpu_share": cpu_s / seconds, "beat_us": cpu_s / beats * 1e6, "formed_s": formed_s}
        trials.append(Trial("pliant", f"{size} workers", "heartbeats", 0, figures))
    return tuple(trials)


def _round(number: int) -> bytes:
    """The record of a round of eight workers."""
    tickets = [
        journal.TicketLine([(8 * i, 8 * i + 8)], 1, 8, 8.0, 0.123456, 0.001234, 0.012345, 0.001, 4.321, 1.54321, 1.0, 0)
        for i in range(WORKERS)
    ]
    return journal.encode(journal.RoundRecord(1, number, 1, 64, 64.0, 1.0, 0.1, 0.5, True, 64 * number, tickets))


def succeed(count: int, say: Say) -> Trial:
    """Feed so many rounds to a coordinator; then another one takes its place."""
    say(f"{count} rounds of {WORKERS} workers")
    line = [sys.executable, "-m", "benchmarks.coordinating", str(count)]
    child = subprocess.run(line, cwd=Path(__file__).parents[1], capture_output=True, check=False)
    model, act = f"{WORKERS} workers", "succession"
    if child.returncode:
        error = child.stderr.decode(errors="replace").strip().splitlines()
        return Trial("pliant", model, act, 0, failure=error[-1] if error else f"status {child.returncode}")
    return Trial("pliant", model, act, 0, msgspec.json.decode(child.stdout, type=dict[str, float]))


def succession(count: int) -> dict[str, float]:
    """The same in this process, with the journal on disk."""
    with TemporaryDirectory(prefix="pliant-coordinator-") as directory:
        path = Path(directory) / "journal.jsonl"
        file = JournalFile(path)
        crowd = Crowd(WORKERS, file)
        opened = journal.PhaseRecord(1, "train", 0, 1 << 40, 1 << 40, [8] * WORKERS, [1] * WORKERS, 0)
        era = journal.EraRecord(1, [f"w{i}" for i in range(WORKERS)])
        first = [journal.encode(era), journal.encode(opened)]
        crowd.coordinator.received(crowd.wires[0], messages.Lines(0, first))
        began_mb, written = 0.0, len(first)
        for start in range(1, count + 1, PER_TICK):
            lines = [_round(number) for number in range(start, min(start + PER_TICK, count + 1))]
            crowd.coordinator.received(crowd.wires[0], messages.Lines(written, lines))
            written += len(lines)
            for wire in crowd.wires:
                crowd.beat(wire)
            crowd.now_s += TICK_S
            crowd.coordinator.handle(events.Tick(), crowd.now_s)
            if start * 10 <= count:
                began_mb = status_mb("VmHWM")
        grown_mb = status_mb("VmHWM") - began_mb
        began_s = time.perf_counter()
        again, account = JournalFile.reopened(path)
        charter = RunSpec("job", "train.py", "0", workers=WORKERS)
        coordinator = Coordinator.resumed(charter, again, account, 2, lambda: crowd.now_s, 1e9)
        seconds = time.perf_counter() - began_s
        found = {
            "rounds": float(coordinator.current.rounds),
            "journal_mb": path.stat().st_size / 1e6,
            "read_mb": again.was_read / 1e6,
            "serves_s": seconds,
            "grown_mb": grown_mb,
        }
        again.close()
        path.with_name(STATE).unlink()
        began_s = time.perf_counter()
        whole, _ = JournalFile.reopened(path)
        found |= {"whole_s": time.perf_counter() - began_s, "resident_mb": status_mb("VmHWM")}
        whole.close()
        file.close()
        return found


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(succession(int(sys.argv[1]))))
