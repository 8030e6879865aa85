"""What the journal costs: bytes, CPU seconds while it is written, and the time of its audit.

Question  How long is a round in the journal, what does writing it take from the training, and how soon is it checked?
Holds     The rounds are decided by the real decision code, written by the real ``JournalReporter``, taken in as a
          coordinator does, and checked by what ``pliant audit`` runs. All times are CPU seconds of one thread, so that
          whatever else the machine does is not in them. The share is of the CPU seconds of the same four workers'
          rounds of 64 samples on a real model.
Source    Issue 5, "journal"; docs/benchmarks.md.
"""

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.results import Trial
from benchmarks.statistics import clocked
from pliant.coordinator.journal import JournalFile, history
from pliant.coordinator.status import StatusTracker
from pliant.core import rounds
from pliant.core.consistency import Mismatch
from pliant.core.group_state import GroupState, Policy, founded
from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit
from pliant.core.ledger import samples_of
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import WorkerId
from pliant.worker.journal import JournalReporter

WORKERS = 4
BATCH, SIZE = 64, 16
EPOCH_ROUNDS = 10_000
ROUND_S = 0.02
"""How often a round comes, by the clock of the coordinator's status."""
QUICK, FULL = 20_000, 1_000_000
PACES = (100.0, 80.0, 60.0, 40.0)
MODEL = "4 workers"
MODELS = ("small", "large")
TRAINED = 100
"""Rounds of a real model, to know what a round takes without its journal."""

Say = Callable[[str], None]


class _Line:
    """A worker's line to the coordinator."""

    def __init__(self) -> None:
        self.sends_lines = True
        self.lines: list[bytes] = []

    def keep(self, lines: Iterable[bytes], first: int) -> None:
        self.lines.extend(lines)

    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None: ...
    def unwritten(self) -> list[bytes]:
        return []

    def send_lines_again(self) -> None: ...


@dataclass(slots=True)
class Cost:
    """CPU seconds."""

    made_s: float = 0.0
    """a worker's for its records; every worker makes them all"""
    written_s: float = 0.0
    """the coordinator's for taking them in and writing them"""


def _tickets(group: GroupState, chance: random.Random) -> list[Ticket]:
    """What four workers of unequal pace hand in."""
    found: list[Ticket] = []
    for hand, pace in zip(group.phase.ledger.hands, PACES, strict=True):
        count = hand.quotas[0] if hand.quotas else 0
        samples = sum(samples_of(micro_batch) for micro_batch in hand.queue[:count])
        busy_s = samples / (pace * chance.uniform(0.95, 1.05))
        loss, norm = samples * chance.uniform(0.4, 0.6), chance.uniform(1.0, 2.0)
        ticket = Ticket(
            group.era, group.round, group.phases, Kind.TRAIN, Flag.NONE, micro_batches=count, samples=samples,
            weight=float(samples), busy_s=busy_s, idle_s=chance.uniform(0.0, 0.01), sum_s=chance.uniform(0.01, 0.02),
            cost_s=0.001, loss_sum=loss, squared_norm=norm,
        )  # fmt: skip
        found.append(ticket)
    return found


def _openings(group: GroupState, epoch: int, length: int) -> list[Ticket]:
    opening = Ticket(
        group.era, group.round, group.phases, Kind.TRAIN, Flag.OPENING, epoch, length, order=epoch, size=SIZE, ahead=2
    )
    return [opening] * WORKERS


def _settled(before: GroupState, tickets: list[Ticket]) -> tuple[GroupState, rounds.Settled]:
    decision = rounds.settled(before, tickets)
    if isinstance(decision, Mismatch):
        raise AssertionError(decision.reason)
    return decision


def played(count: int, cost: Cost) -> Iterator[list[bytes]]:
    """The records of so many rounds, in portions, as one worker tells them."""
    chance, line = random.Random(0), _Line()
    reporter = JournalReporter(line)
    group = founded(Policy(BATCH, momentum=0.9), 1, [WorkerId(f"w{i}") for i in range(WORKERS)])
    reporter.era(group, None, sends=True)
    epoch = 0
    while group.round < count:
        length = BATCH * min(EPOCH_ROUNDS, count - group.round)
        openings = _openings(group, epoch, length)
        after = rounds.opened(group, openings)
        if isinstance(after, Mismatch):
            raise AssertionError(after.reason)
        group, epoch = after, epoch + 1
        reporter.opened(group, openings)
        while group.open:
            tickets = _tickets(group, chance)
            group, outcome = _settled(group, tickets)
            began_s = time.thread_time()
            reporter.settled(group, outcome, tickets, 0.1 * outcome.factor)
            cost.made_s += time.thread_time() - began_s
            if len(line.lines) >= 1000:
                yield line.lines
                line.lines = []
    reporter.confirmed()
    yield line.lines


def write(path: Path, count: int) -> Cost:
    """A journal of so many rounds."""
    cost, tally, now_s = Cost(), StatusTracker("journal"), 0.0
    file = JournalFile(path)
    file.append([journal.RunRecord("journal", "0", 0.0)])
    for lines in played(count, cost):
        began_s = time.thread_time()
        # One round at a time, as they come in.
        for line in lines:
            record = journal.decode(line)
            now_s += ROUND_S
            tally.add(record, now_s)
            file.append([record])
        cost.written_s += time.thread_time() - began_s
        tally.tick(now_s)
    file.append([journal.EndRecord("finished", True)])
    file.close()
    return cost


def audited(path: Path, *, replay: bool) -> dict[str, float]:
    """What ``pliant audit`` does, with its time."""
    gc.collect()
    began_s = time.thread_time()
    report = audit(history(path), replay=replay)
    cpu_s = time.thread_time() - began_s
    count = report.summary["rounds"]
    return {"cpu_s": cpu_s, "rounds": count, "problems": len(report.problems), "million_s": cpu_s / count * 1e6}


def round_s(model: str) -> float:
    """CPU seconds of all workers for a round of a real model; nobody keeps a journal."""
    seen = sorted(clocked(model, TRAINED, WORKERS).items())
    (first, (began_s,)), (last, (ended_s,)) = seen[len(seen) // 4], seen[-1]
    return (ended_s - began_s) / (last - first)


def measure(count: int, say: Say) -> tuple[Trial, ...]:
    """Write a journal of so many rounds, and check it in both ways."""
    with TemporaryDirectory(prefix="pliant-journal-") as directory:
        path = Path(directory) / "journal.jsonl"
        say(f"writing {count} rounds of {WORKERS} workers")
        cost = write(path, count)
        written = {
            "rounds": float(count),
            "bytes": path.stat().st_size / count / WORKERS,
            "made_us": cost.made_s / count * 1e6,
            "written_us": cost.written_s / count * 1e6,
        }
        trials = [Trial("pliant", MODEL, "write", 0, written)]
        for model in MODELS:
            whole_s = round_s(model)
            share = (WORKERS * cost.made_s + cost.written_s) / count / whole_s
            trials.append(Trial("pliant", model, "write", 0, {"round_ms": whole_s * 1e3, "added": share}))
        for act, replay in (("proof", False), ("audit", True)):
            say(f"{act} of {count} rounds")
            trials.append(Trial("pliant", MODEL, act, 0, audited(path, replay=replay)))
    return tuple(trials)
