"""Whether a journal proves that every sample was used once and every decision was right.

Question  Is each position of every phase in its rounds exactly once (or cut), and does the decision code, run again
          on the journaled tickets, reach the decisions that were written down?
Holds     Pure, one pass, memory bounded by the holes in the coverage. What a break cuts is counted as cut, not as
          used. Coverage and sums are checked without the code that made the decisions; the replay then runs
          that code. A problem is one line that says what is wrong and where. A journal that was not closed, or in
          which records are missing, proves nothing about what would follow: that is said, and is no problem.
Source    Invariants 1, 3 and 5 of DESIGN; docs/design/0003-journal.md.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pliant.core.journal.decisions import Replay, named
from pliant.core.journal.records import (
    CheckpointRecord,
    EndRecord,
    EntryLine,
    EraRecord,
    ExchangeRecord,
    FinishingRecord,
    GapRecord,
    PhaseEndRecord,
    PhaseRecord,
    PolicyRecord,
    Record,
    RewindRecord,
    RoundRecord,
    RunRecord,
    TicketLine,
    effective,
)
from pliant.core.tickets import Flag
from pliant.types import Span

# A damaged journal repeats the same complaint in every later round: the first ones tell where it began.
_MOST_PROBLEMS = 100


class AuditReport(msgspec.Struct, frozen=True):
    """What an audit found. No problems: every position is proven used once or cut, as far as ``proved`` says."""

    problems: list[str]
    summary: dict[str, Any]
    """JSON-able"""

    @property
    def end_proved(self) -> bool:
        """Whether nothing can be missing at the end: the journal was closed, and is whole."""
        return bool(self.summary["end_proved"])


def audit(records: Iterable[Record], *, replay: bool = True) -> AuditReport:
    """Check a journal from its first record to its last; ``replay`` also runs the decision code again.

    Of a list, what a rewind has gone back behind is left out; an iterator must come without it (``effective``).
    """
    auditor = _Auditor(Replay() if replay else None)
    for record in effective(records) if isinstance(records, list) else records:
        auditor.take(record)
    return auditor.report()


class _Coverage:
    """The union of the spans seen so far, as ascending disjoint spans."""

    __slots__ = ("starts", "stops")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []

    def add(self, start: int, stop: int) -> list[Span]:
        """Add positions; returns those that were there already."""
        starts, stops = self.starts, self.stops
        first = bisect.bisect_left(stops, start)
        if first == len(starts):
            starts.append(start)
            stops.append(stop)
            return []
        last = bisect.bisect_right(starts, stop, lo=first)
        touched = zip(starts[first:last], stops[first:last], strict=True)
        repeated = [(max(a, start), min(b, stop)) for a, b in touched if max(a, start) < min(b, stop)]
        if first < last:
            start, stop = min(start, starts[first]), max(stop, stops[last - 1])
        starts[first:last] = [start]
        stops[first:last] = [stop]
        return repeated

    def missing(self, limit: int) -> list[Span]:
        """The positions below ``limit`` that were never added."""
        edges = [0, *(edge for pair in zip(self.starts, self.stops, strict=True) for edge in pair), limit]
        return [(a, min(b, limit)) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < min(b, limit)]


@dataclass(slots=True)
class _Phase:
    record: PhaseRecord
    coverage: _Coverage = field(default_factory=_Coverage)
    broken: bool = False


class _Auditor:
    """The checks that need no decision code: order, sums, coverage."""

    def __init__(self, replayed: Replay | None) -> None:
        self._replay = replayed
        self._problems: list[str] = []
        self._unnamed = 0
        self._era = 0
        self._roster: list[str] = []
        self._open: list[_Phase] = []
        self._phases = 0
        self._round = 0
        """the last number used, void ones included"""
        self._rounds = self._void = self._rewinds = 0
        self._regrouped = False
        """right after an unplanned era"""
        self._leaving: set[str] = set()
        """who has said so"""
        self._end: EndRecord | None = None
        self._gap: GapRecord | None = None
        """what follows it proves nothing"""
        self._updates = 0
        self._updates_limit: int | None = None
        self._samples = self._skipped = self._cut = self._evaluations = self._eras = self._records = 0
        self._drifts = 0
        self._epochs: set[int] = set()
        self._by_worker: dict[str, int] = {}

    def take(self, record: Record) -> None:
        self._records += 1
        if self._gap is not None:
            self._end = record if isinstance(record, EndRecord) else self._end
            return
        if self._end is not None:
            self._problem(f"record {self._records} follows the end of the run")
        match record:
            case RoundRecord():
                self._take_round(record)
            case ExchangeRecord():
                self._take_exchange(record)
            case PhaseRecord():
                self._open_phase(record)
            case PhaseEndRecord():
                self._end_phase(record)
            case EraRecord():
                self._start_era(record)
            case EndRecord():
                self._close(record)
            case GapRecord():
                self._gap = record
            case RunRecord():
                if self._records != 1:
                    self._problem(f"record {self._records} starts a second run")
            case RewindRecord(worker=worker, round=number):
                self._roster, self._round = [worker], max(self._round, number)
                self._rewinds += 1
            case PolicyRecord():
                self._updates_limit = record.updates_limit
            case CheckpointRecord() | FinishingRecord():
                pass
        unplanned = isinstance(record, EraRecord) and record.entries is not None
        self._regrouped = unplanned or (self._regrouped and isinstance(record, PhaseEndRecord))
        if self._replay is not None:
            for problem in self._replay.take(record):
                self._problem(problem)

    def report(self) -> AuditReport:
        completed = self._end is not None and self._end.completed
        if completed and self._gap is None:
            for phase in self._open:
                left = named(phase.coverage.missing(phase.record.limit))
                self._problem(f"phase {phase.record.phase} never ended in a run that completed; not used: {left}")
        if self._records == 0:
            self._problem("the journal is empty")
        problems = list(self._problems)
        if self._unnamed:
            problems.append(f"... and {self._unnamed} more problems")
        summary: dict[str, Any] = {
            "rounds": self._rounds,
            "samples": self._samples,
            "phases": self._phases,
            "epochs": len(self._epochs),
            "eras": self._eras,
            "workers": dict(self._by_worker),
            "skipped_rounds": self._skipped,
            "void_rounds": self._void,
            "rewinds": self._rewinds,
            "drifts": self._drifts,
            "cut_positions": self._cut,
            "evaluations": self._evaluations,
            "completed": completed,
            "reason": self._end.reason if self._end else "the journal has no end record",
            "end_proved": self._end is not None and self._end.lines is not None and self._gap is None,
            "proved": self._proved(),
            "replayed_rounds": self._replay.rounds if self._replay else 0,
        }
        return AuditReport(problems, summary)

    def _close(self, record: EndRecord) -> None:
        """The closing record says what was written: a reader must have found the same."""
        self._end = record
        if record.lines is None:
            return
        if (record.rounds, record.samples) != (self._rounds, self._samples):
            self._problem(
                f"the journal was closed with {record.rounds} rounds and {record.samples} samples, "
                f"but has {self._rounds} and {self._samples}"
            )

    def _proved(self) -> str:
        """How far, in words."""
        upto = f"up to round {self._round}"
        if self._gap is not None and self._gap.next <= self._gap.first:
            return f"{upto}: what followed is missing ({self._gap.reason})"
        if self._gap is not None:
            return f"{upto}: records {self._gap.first} to {self._gap.next - 1} of the workers are missing after it"
        if self._end is None:
            return f"{upto}: the journal was not closed, so that more may have followed"
        if self._end.lines is None:
            return f"{upto}: the journal was closed by an older Pliant, which did not say how much there was"
        if not self._end.completed:
            return (
                f"to the end of the journal, {upto}; the run was cut short, and an update after that may have been made"
            )
        return "to the end"

    def _problem(self, text: str) -> None:
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(text)
        else:
            self._unnamed += 1

    def _start_era(self, record: EraRecord) -> None:
        if record.era <= self._era:
            self._problem(f"era {record.era} follows era {self._era}: era numbers only grow")
        where = f"era {record.era}"
        if not record.roster:
            self._problem(f"{where}: its roster is empty")
        for worker in sorted({worker for worker in record.roster if record.roster.count(worker) > 1}):
            self._problem(f"{where}: {worker} is on its roster more than once")
        if record.entries is None:
            self._plan_era(where, record)
        else:
            self._regroup(where, record, record.entries)
        self._era, self._roster = record.era, record.roster
        self._eras += 1
        for worker in record.roster:
            self._by_worker.setdefault(worker, 0)

    def _plan_era(self, where: str, record: EraRecord) -> None:
        if record.void:
            self._problem(f"{where}: round {record.void} is void although nobody was lost")
        if len(self._open) > 1:
            self._problem(f"{where}: is planned but begins inside phase {self._open[-1].record.phase}")
        if self._phases and not set(record.roster) & set(self._roster):
            self._problem(f"{where}: is planned but nobody of era {self._era} is in it")

    def _regroup(self, where: str, record: EraRecord, entries: Sequence[EntryLine]) -> None:
        """An unplanned era passes over one number: a lost worker may have applied that round."""
        if len(entries) != len(record.roster):
            self._problem(f"{where}: has {len(entries)} entries, its roster {len(record.roster)} workers")
        holding = {worker for worker, entry in zip(record.roster, entries, strict=False) if entry.active}
        if not holding:
            self._problem(f"{where}: nobody in it holds the state")
        for worker in sorted(holding - set(self._roster)):
            self._problem(f"{where}: {worker} holds the state but was not in era {self._era}")
        if record.void != self._round + 1:
            self._problem(f"{where}: round {record.void} is void, round {self._round + 1} is the next one")
        self._round = max(self._round, record.void)
        self._void += 1

    def _open_phase(self, record: PhaseRecord) -> None:
        if record.phase != self._phases + 1:
            self._problem(f"phase {record.phase} follows phase {self._phases}: phases are numbered one by one")
        if not 0 <= record.limit <= record.length:
            self._problem(f"phase {record.phase}: its limit {record.limit} is not within its length {record.length}")
        if self._open and record.task == "train":
            self._problem(f"phase {record.phase}: a loop over batches opens inside phase {self._open[-1].record.phase}")
        self._phases = record.phase
        self._open.append(_Phase(record))
        if record.task == "train":
            self._epochs.add(record.epoch)
        else:
            self._evaluations += 1

    def _end_phase(self, record: PhaseEndRecord) -> None:
        if not self._open or self._open[-1].record.phase != record.phase:
            self._problem(f"phase {record.phase} ends but {self._innermost()}")
            return
        phase = self._open.pop()
        where, opened = f"phase {record.phase}", phase.record
        # An ``evaluate`` in a loop body ends where nobody is left in it, or only those who go.
        given_up = opened.task == "evaluate" and (self._regrouped or not self._leaving.isdisjoint(self._roster))
        enough = self._updates_limit is not None and self._updates >= self._updates_limit
        if record.cut and not (phase.broken or given_up or enough) and opened.limit > 0:
            self._problem(f"{where}: cut {named(record.cut)} but no worker left its loop")
        for start, stop in record.cut:
            # A phase that samples=N leaves no room for is journaled as cut in full.
            inside = 0 <= start < stop <= (opened.limit or opened.length)
            if not inside:
                self._problem(f"{where}: cut {start}..{stop} is not within 0..{opened.limit}")
            repeated = phase.coverage.add(start, stop) if start < stop else []
            if repeated:
                self._problem(f"{where}: cut positions were used: {named(repeated)}")
            self._cut += max(0, stop - start)
        missing = phase.coverage.missing(opened.limit)
        if missing:
            self._problem(f"{where}: positions never used nor cut: {named(missing)}")

    def _take_round(self, record: RoundRecord) -> None:
        where = f"phase {record.phase}, round {record.round}"
        if record.round != self._round + 1:
            self._problem(f"{where}: follows round {self._round}; rounds are numbered one by one")
        self._round = record.round
        self._rounds += 1
        batch = self._take_contributions(where, "train", record)
        self._samples += batch
        if record.samples_total != self._samples:
            self._problem(f"{where}: samples_total is {record.samples_total}, the rounds add up to {self._samples}")
            # Named once; later rounds are compared with what this one says.
            self._samples = record.samples_total
        weight = math.fsum([ticket.weight for ticket in record.tickets])
        if record.weight != weight:
            self._problem(f"{where}: weight is {record.weight!r}, the tickets add up to {weight!r}")
        self._updates += record.applied
        if record.skipped:
            self._skipped += 1
        if record.drift is not None:
            self._drifts += len(record.drift.healed) + len(record.drift.expelled)
        total = math.fsum([ticket.loss_sum for ticket in record.tickets])
        nonfinite = any(ticket.flags & Flag.NONFINITE.value for ticket in record.tickets)
        loss = total / weight if weight > 0 else None
        # An infinite loss is journaled as 0 in its ticket, so only its round's flag tells.
        if not nonfinite and record.loss != loss:
            self._problem(f"{where}: loss is {record.loss!r}, the tickets give {loss!r}")

    def _take_exchange(self, record: ExchangeRecord) -> None:
        self._take_contributions(f"phase {record.phase}, an exchange after round {self._round}", "evaluate", record)

    def _take_contributions(self, where: str, task: str, record: RoundRecord | ExchangeRecord) -> int:
        """Era, phase, batch and positions; returns the samples of the tickets."""
        if record.era != self._era:
            self._problem(f"{where}: is of era {record.era} while era {self._era} is current")
        if len(record.tickets) != len(self._roster):
            self._problem(f"{where}: has {len(record.tickets)} tickets, the roster {len(self._roster)} workers")
        phase = self._open[-1] if self._open and self._open[-1].record.phase == record.phase else None
        if phase is None:
            self._problem(f"{where}: not in its phase, {self._innermost()}")
        elif phase.record.task != task:
            self._problem(f"{where}: a record of {task} in a phase of {phase.record.task}")
        batch = 0
        ready: list[int] = []
        for member, ticket in enumerate(record.tickets):
            batch += ticket.samples
            worker = self._roster[member] if member < len(self._roster) else f"member {member}"
            dealt = 0
            for start, stop in ticket.spans:
                dealt += stop - start
                if phase is not None:
                    self._cover(where, worker, phase, start, stop)
            if dealt != ticket.samples:
                self._problem(f"{where}: {worker} says {ticket.samples} samples, its spans have {dealt}")
            if ticket.flags:
                if ticket.flags & Flag.READY.value:
                    ready.append(member)
                self._take_flags(where, worker, phase, ticket)
            if task == "train" and ticket.samples:
                self._by_worker[worker] = self._by_worker.get(worker, 0) + ticket.samples
        if record.entered or ready:
            entered = [member for member, _, _ in record.entered]
            if entered != ready:
                self._problem(f"{where}: members {ready} say that they are ready, {entered} entered")
        if record.batch != batch:
            self._problem(f"{where}: batch is {record.batch}, the tickets add up to {batch}")
        return batch

    def _take_flags(self, where: str, worker: str, phase: _Phase | None, ticket: TicketLine) -> None:
        if phase is not None and ticket.flags & Flag.BREAK.value:
            phase.broken = True
        if ticket.flags & Flag.LEAVING.value:
            self._leaving.add(worker)
        if ticket.flags & Flag.FOLLOWING.value and ticket.samples:
            self._problem(f"{where}: {worker} hands in {ticket.samples} samples although it only goes along")

    def _cover(self, where: str, worker: str, phase: _Phase, start: int, stop: int) -> None:
        if not 0 <= start < stop:
            self._problem(f"{where}: {start}..{stop} of {worker} is not a span")
            return
        limit = phase.record.limit
        if stop > limit:
            self._problem(f"{where}: {worker} used positions beyond the limit {limit}: {max(start, limit)}..{stop}")
        repeated = phase.coverage.add(start, stop)
        if repeated:
            self._problem(f"{where}: {worker} repeats positions {named(repeated)}")

    def _innermost(self) -> str:
        return f"phase {self._open[-1].record.phase} is open" if self._open else "no phase is open"
