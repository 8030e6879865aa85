"""Whether a journal proves that every sample was used once and every decision was right.

Question  Is each position of every phase in its rounds exactly once (or cut), and does the decision code, run again
          on the journaled tickets, reach the decisions that were written down?
Holds     Pure, one pass, memory bounded by the holes in the coverage. What a break cuts is counted as cut, not as
          used. Coverage and sums are checked without the code that made the decisions; the replay then runs
          that code. A problem is one line that says what is wrong and where.
Source    Invariants 1, 3 and 5 of DESIGN; docs/design/0003-journal.md.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pliant.core import rounds
from pliant.core.journal import (
    EndRecord,
    EraRecord,
    ExchangeRecord,
    PhaseEndRecord,
    PhaseRecord,
    PolicyRecord,
    Record,
    RoundRecord,
    RunRecord,
    TicketLine,
)
from pliant.core.rounds import Group, Mismatch, Policy, Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import Span, WorkerId

# A damaged journal repeats the same complaint in every later round: the first ones tell where it began.
_MOST_PROBLEMS = 100
# Longer lists of spans are shortened in a message.
_MOST_SPANS = 5


@dataclass(frozen=True, slots=True)
class Report:
    """What an audit found. No problems: every position is proven used once or cut."""

    problems: list[str]
    summary: dict[str, Any]
    """JSON-able"""


def audit(records: Iterable[Record], *, replay: bool = True) -> Report:
    """Check a journal from its first record to its last; ``replay`` also runs the decision code again."""
    auditor = _Auditor(_Replay() if replay else None)
    for record in records:
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

    def __init__(self, replayed: _Replay | None) -> None:
        self._replay = replayed
        self._problems: list[str] = []
        self._unnamed = 0
        self._era = 0
        self._roster: list[str] = []
        self._open: list[_Phase] = []
        self._phases = 0
        self._round = 0
        self._end: EndRecord | None = None
        self._samples = self._skipped = self._cut = self._evaluations = self._eras = self._records = 0
        self._epochs: set[int] = set()
        self._by_worker: dict[str, int] = {}

    def take(self, record: Record) -> None:
        self._records += 1
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
                self._end = record
            case RunRecord():
                if self._records != 1:
                    self._problem(f"record {self._records} starts a second run")
            case PolicyRecord():
                pass
        if self._replay is not None:
            for problem in self._replay.take(record):
                self._problem(problem)

    def report(self) -> Report:
        completed = self._end is not None and self._end.completed
        if completed:
            for phase in self._open:
                left = _named(phase.coverage.missing(phase.record.limit))
                self._problem(f"phase {phase.record.phase} never ended in a run that completed; not used: {left}")
        if self._records == 0:
            self._problem("the journal is empty")
        problems = list(self._problems)
        if self._unnamed:
            problems.append(f"... and {self._unnamed} more problems")
        summary: dict[str, Any] = {
            "rounds": self._round,
            "samples": self._samples,
            "phases": self._phases,
            "epochs": len(self._epochs),
            "eras": self._eras,
            "workers": dict(self._by_worker),
            "skipped_rounds": self._skipped,
            "cut_positions": self._cut,
            "evaluations": self._evaluations,
            "completed": completed,
            "reason": self._end.reason if self._end else "the journal has no end record",
            "replayed_rounds": self._replay.rounds if self._replay else 0,
        }
        return Report(problems, summary)

    def _problem(self, text: str) -> None:
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(text)
        else:
            self._unnamed += 1

    def _start_era(self, record: EraRecord) -> None:
        if record.era <= self._era:
            self._problem(f"era {record.era} follows era {self._era}: era numbers only grow")
        self._era, self._roster = record.era, record.roster
        self._eras += 1
        for worker in record.roster:
            self._by_worker.setdefault(worker, 0)

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
        if record.cut and not phase.broken and opened.limit > 0:
            self._problem(f"{where}: cut {_named(record.cut)} but no worker left its loop")
        for start, stop in record.cut:
            # A phase that samples=N leaves no room for is journaled as cut in full.
            inside = 0 <= start < stop <= (opened.limit or opened.length)
            if not inside:
                self._problem(f"{where}: cut {start}..{stop} is not within 0..{opened.limit}")
            repeated = phase.coverage.add(start, stop) if start < stop else []
            if repeated:
                self._problem(f"{where}: cut positions were used: {_named(repeated)}")
            self._cut += max(0, stop - start)
        missing = phase.coverage.missing(opened.limit)
        if missing:
            self._problem(f"{where}: positions never used nor cut: {_named(missing)}")

    def _take_round(self, record: RoundRecord) -> None:
        where = f"phase {record.phase}, round {record.round}"
        if record.round != self._round + 1:
            self._problem(f"{where}: follows round {self._round}; rounds are numbered one by one")
        self._round = record.round
        batch = self._take_contributions(where, "train", record)
        self._samples += batch
        if record.samples_total != self._samples:
            self._problem(f"{where}: samples_total is {record.samples_total}, the rounds add up to {self._samples}")
            # Named once; later rounds are compared with what this one says.
            self._samples = record.samples_total
        weight = math.fsum([ticket.weight for ticket in record.tickets])
        if record.weight != weight:
            self._problem(f"{where}: weight is {record.weight!r}, the tickets add up to {weight!r}")
        if record.skipped:
            self._skipped += 1
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
            if phase is not None and ticket.flags & Flag.BREAK.value:
                phase.broken = True
            if task == "train" and ticket.samples:
                self._by_worker[worker] = self._by_worker.get(worker, 0) + ticket.samples
        if record.batch != batch:
            self._problem(f"{where}: batch is {record.batch}, the tickets add up to {batch}")
        return batch

    def _cover(self, where: str, worker: str, phase: _Phase, start: int, stop: int) -> None:
        if not 0 <= start < stop:
            self._problem(f"{where}: {start}..{stop} of {worker} is not a span")
            return
        limit = phase.record.limit
        if stop > limit:
            self._problem(f"{where}: {worker} used positions beyond the limit {limit}: {max(start, limit)}..{stop}")
        repeated = phase.coverage.add(start, stop)
        if repeated:
            self._problem(f"{where}: {worker} repeats positions {_named(repeated)}")

    def _innermost(self) -> str:
        return f"phase {self._open[-1].record.phase} is open" if self._open else "no phase is open"


class _Replay:
    """The decision code, run again on the journaled tickets."""

    def __init__(self) -> None:
        self.rounds = 0
        """rounds and exchanges that were decided again"""
        self._era: EraRecord | None = None
        self._group: Group | None = None
        self._ended: Settled | None = None
        """the outcome whose phase end is the next record"""
        self._lost = False

    def take(self, record: Record) -> list[str]:
        """What differs between the record and the decision code's answer; nothing after the first difference."""
        if self._lost:
            return []
        match record:
            case RoundRecord() | ExchangeRecord():
                problems = self._settle(record)
            case PhaseRecord():
                problems = self._open(record)
            case PhaseEndRecord():
                problems = self._end(record)
            case PolicyRecord():
                problems = self._agree(record)
            case EraRecord():
                # A change of roster within a run is decided by the coordinator, not by tickets.
                self._lost = self._group is not None and self._group.phases > 0
                self._era, self._group = record, None
                problems = []
            case RunRecord() | EndRecord():
                problems = []
        self._lost = self._lost or bool(problems)
        return problems

    def _agree(self, record: PolicyRecord) -> list[str]:
        if self._era is None:
            return ["the policy is written before the first era"]
        policy = Policy(
            batch=record.batch,
            floating=record.floating,
            at_most=record.at_most,
            delay=record.delay,
            rule=record.rule,
            momentum=record.momentum,
        )
        if self._group is None:
            self._group = rounds.founded(policy, self._era.era, [WorkerId(worker) for worker in self._era.roster])
        self._group = replace(self._group, policy=policy, samples_limit=record.samples_limit)
        return []

    def _open(self, record: PhaseRecord) -> list[str]:
        group, where = self._group, f"phase {record.phase}"
        if group is None:
            return [f"{where}: opens before the policy is written"]
        if self._ended is not None:
            return [f"{where}: opens where the end of phase {self._ended.phase} is due"]
        if not len(record.sizes) == len(record.ahead) == len(group.roster):
            return [f"{where}: its sizes are not those of {len(group.roster)} workers"]
        kind = Kind[record.task.upper()] if record.task in ("train", "evaluate") else None
        if kind is None or min(record.sizes, default=0) < 1:
            return [f"{where}: {record.task!r} with sizes {record.sizes} is no phase"]
        entered = (kind, Flag.OPENING, record.epoch, record.length, record.order)
        openings = [
            Ticket(group.era, group.round, group.phases, *entered, size, ahead)
            for size, ahead in zip(record.sizes, record.ahead, strict=True)
        ]
        after = rounds.opened(group, openings)
        if isinstance(after, Mismatch):
            return [f"{where}: {after.reason}"]
        self._group = after
        limit = after.phase.ledger.limit if after.open and after.phase.number == after.phases else 0
        return [] if record.limit == limit else [f"{where}: limit is {record.limit}, the decision code says {limit}"]

    def _settle(self, record: RoundRecord | ExchangeRecord) -> list[str]:
        group = self._group
        where = f"phase {record.phase}, " + (f"round {record.round}" if isinstance(record, RoundRecord) else "exchange")
        if group is None or not group.open:
            return [f"{where}: the decision code has no open phase"]
        if self._ended is not None:
            return [f"{where}: follows the last round of phase {self._ended.phase}"]
        phase = group.phase
        if phase.number != record.phase or len(record.tickets) != len(group.roster):
            return [f"{where}: the decision code expects phase {phase.number} and {len(group.roster)} tickets"]
        tickets = [_ticket(group, phase.kind, line) for line in record.tickets]
        for worker, hand, ticket in zip(group.roster, phase.ledger.hands, tickets, strict=True):
            if not 0 <= ticket.micro_batches <= hand.granted:
                return [f"{where}: {worker} drew {ticket.micro_batches} micro-batches, {hand.granted} were granted"]
            if hand.quotas and ticket.micro_batches != hand.quotas[0] and not ticket.flags & Flag.BREAK:
                return [f"{where}: {worker} handed in {ticket.micro_batches} micro-batches of {hand.quotas[0]}"]
        decision = rounds.settled(group, tickets)
        if isinstance(decision, Mismatch):
            return [f"{where}: {decision.reason}"]
        self._group, outcome = decision
        self.rounds += 1
        if outcome.ended:
            self._ended = outcome
        return [f"{where}: {text}" for text in _differences(record, outcome, group.policy)]

    def _end(self, record: PhaseEndRecord) -> list[str]:
        outcome, self._ended = self._ended, None
        where = f"phase {record.phase}"
        if outcome is None:
            # A phase without a position to use ends as soon as it opens.
            group = self._group
            if group and group.phases == record.phase and all(phase.number != record.phase for phase in group.open):
                return []
            return [f"{where}: ended, but the decision code goes on"]
        problems: list[str] = []
        if tuple(record.cut) != outcome.cut:
            problems.append(f"{where}: cut {_named(record.cut)}, the decision code says {_named(outcome.cut)}")
        # A result that is not finite is journaled as none.
        if record.result is not None and record.result != outcome.result:
            problems.append(f"{where}: result is {record.result!r}, the decision code says {outcome.result!r}")
        return problems


def _ticket(group: Group, kind: Kind, line: TicketLine) -> Ticket:
    return Ticket(
        group.era,
        group.round,
        group.phases,
        kind,
        _FLAGS[line.flags] if line.flags in _FLAGS else Flag(line.flags),
        micro_batches=line.micro_batches,
        samples=line.samples,
        weight=line.weight,
        busy_s=line.busy_s,
        idle_s=line.idle_s,
        sum_s=line.sum_s,
        cost_s=line.cost_s,
        loss_sum=line.loss_sum,
        squared_norm=line.squared_norm,
        scale=line.scale,
    )


# Making a flag of a number takes longer than the rest of a ticket.
_FLAGS = {value: Flag(value) for value in range(8)}


def _differences(record: RoundRecord | ExchangeRecord, outcome: Settled, policy: Policy) -> list[str]:
    """Where the journal and the decision code disagree about a round."""
    problems: list[str] = []
    for member, (line, spans) in enumerate(zip(record.tickets, outcome.spans, strict=True)):
        if tuple(line.spans) != spans:
            problems.append(f"member {member} has {_named(line.spans)}, the decision code says {_named(spans)}")
    if record.batch != outcome.batch:
        problems.append(f"batch is {record.batch}, the decision code says {outcome.batch}")
    if isinstance(record, RoundRecord):
        if record.round != outcome.round:
            problems.append(f"the decision code says round {outcome.round}")
        if record.factor != outcome.factor:
            problems.append(f"factor is {record.factor!r}, the decision code says {outcome.factor!r}")
        if record.applied != outcome.applied:
            problems.append(f"applied is {record.applied}, the decision code says {outcome.applied}")
        if not policy.floating and not outcome.ended and record.batch != policy.batch:
            problems.append(f"batch is {record.batch} of the fixed {policy.batch} in mid-epoch")
    return problems


def _named(spans: Sequence[Span]) -> str:
    """Spans as text: ``0..4, 9..12``, the stop excluded."""
    named = ", ".join(f"{start}..{stop}" for start, stop in spans[:_MOST_SPANS])
    return f"{named}, … ({len(spans)} spans)" if len(spans) > _MOST_SPANS else named or "none"
