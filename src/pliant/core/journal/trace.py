"""What each worker computed, at which point of the weights, in an order in which one process can do it again.

Question  Given a journal, which micro-batches are to be computed between which updates?
Holds     Every contribution that was summed is in it, and every one that a survivor handed in and lost, for the next
          one's look-ahead was built from it. A micro-batch comes after the updates its worker had applied when it drew
          it, and before the next one; a contribution comes before the one that looked ahead from it.
Source    docs/design/0012-replay.md.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from pliant.core.group_state import GroupState
from pliant.core.journal import mapping
from pliant.core.journal.decisions import Replay
from pliant.core.journal.records import (
    CheckpointRecord,
    EndRecord,
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
    next_number,
    numbered,
)
from pliant.core.ledger import MicroBatch
from pliant.core.rounds import Settled
from pliant.core.tickets import NOWHERE, Flag, Kind, Point
from pliant.errors import JournalError
from pliant.types import WorkerId


@dataclass(eq=False, slots=True)
class TracedContribution:
    """One contribution of one worker."""

    worker: WorkerId
    round: int
    """that it went into; 0: it was dropped"""
    micro_batches: tuple[MicroBatch, ...]
    line: TicketLine | None
    """its ticket; None: it was dropped"""
    point: Point = NOWHERE
    before: TracedContribution | None = None
    """what the same worker handed in before it"""


class Segment(msgspec.Struct, frozen=True):
    """Micro-batches of one contribution at one point."""

    part: TracedContribution
    micro_batches: tuple[MicroBatch, ...]
    ahead: bool


@dataclass(slots=True)
class Bodies:
    """Runs of the user's loop body, before the next update."""

    stretches: list[Segment] = field(default_factory=list[Segment])


class Agreed(msgspec.Struct, frozen=True):
    record: PolicyRecord


class Opened(msgspec.Struct, frozen=True):
    record: PhaseRecord
    group: GroupState


class TracedRound(msgspec.Struct, frozen=True):
    """A round of training."""

    record: RoundRecord
    before: GroupState
    group: GroupState
    outcome: Settled
    parts: tuple[TracedContribution, ...]
    """in the order of the roster"""


class TracedExchange(msgspec.Struct, frozen=True):
    """A part of an ``evaluate``."""

    record: ExchangeRecord
    group: GroupState
    parts: tuple[TracedContribution, ...]


class PhaseEnded(msgspec.Struct, frozen=True):
    record: PhaseEndRecord
    group: GroupState


class Changed(msgspec.Struct, frozen=True):
    """A roster takes effect."""

    record: EraRecord
    group: GroupState


class Rewound(msgspec.Struct, frozen=True):
    """Everybody was lost: one worker has read the state as it is here from a checkpoint."""

    record: RewindRecord
    group: GroupState


Item = Agreed | Opened | Bodies | TracedRound | TracedExchange | PhaseEnded | Changed | Rewound


class TraceStart(msgspec.Struct, frozen=True):
    """A checkpoint that the rest of the score can be played from."""

    checkpoint: CheckpointRecord
    item: int
    """the first one that comes after it"""


class Trace(msgspec.Struct, frozen=True):
    """What to do, from the first call of the script to the last record."""

    run: RunRecord
    items: list[Item]
    end: EndRecord | None
    starts: list[TraceStart]
    """where else it can begin: nothing that comes later was computed, in part, before"""
    checkpoints: int
    """all that the journal names"""


def score(records: Iterable[Record]) -> Trace:
    """Of the history that counts. Raises ``JournalError`` where the journal does not say enough."""
    writing = _Writing()
    for number, record in numbered(records):
        writing.take(record)
        writing.reached(next_number(number, record))
    return writing.written()


def gaps(written: Trace) -> list[str]:
    """What cannot be played as it stands: a contribution whose micro-batches are not all computed when it is due."""
    drawn: dict[TracedContribution, int] = {}
    problems: list[str] = []
    for item in written.items:
        if isinstance(item, Bodies):
            for stretch in item.stretches:
                part, before = stretch.part, stretch.part.before
                drawn[part] = drawn.get(part, 0) + len(stretch.micro_batches)
                if stretch.ahead and (before is None or drawn.get(before, 0) < len(before.micro_batches)):
                    problems.append(f"round {part.round}: {part.worker} looks ahead from what is not computed yet")
        elif isinstance(item, TracedRound):
            for part in item.parts:
                if drawn.pop(part, 0) < len(part.micro_batches):
                    problems.append(f"round {part.round}: {part.worker} handed in what it had not computed")
    return problems


class _Writing:
    def __init__(self) -> None:
        self._replay = Replay()
        self._run: RunRecord | None = None
        self._end: EndRecord | None = None
        self._items: list[Item] = []
        self._last: dict[WorkerId, TracedContribution] = {}
        """what each worker has handed in last"""
        self._bodies: dict[int, list[tuple[int, Bodies]]] = {}
        """by phase: the last settled round (void ones count), and the place for what was drawn then"""
        self._stretches: list[tuple[int, int, Segment]] = []
        """phase, round, what was drawn"""
        self._reached: list[tuple[int, int]] = []
        """(records of the workers, items made of them)"""
        self._checkpoints: list[CheckpointRecord] = []

    def take(self, record: Record) -> None:
        before = self._replay.group
        if isinstance(record, RunRecord):
            self._run = record
        elif isinstance(record, EndRecord):
            self._end = record
        if isinstance(record, RoundRecord) or (isinstance(record, EraRecord) and record.entries is not None):
            self._make_room(before)
        problems = self._replay.take(record)
        if problems:
            raise JournalError(f"{problems[0]}; `pliant audit` says more")
        group = self._replay.group
        match record:
            case CheckpointRecord():
                self._checkpoints.append(record)
            case RunRecord() | FinishingRecord() | EndRecord():
                pass
            case GapRecord(first=first, next=following):
                raise JournalError(
                    f"records {first} to {following - 1} of the journal are missing: it cannot be played"
                )
            case _ if group is None:
                raise JournalError("the journal begins without an era")
            case PolicyRecord():
                self._items.append(Agreed(record))
            case PhaseRecord():
                self._items.append(Opened(record, group))
            case PhaseEndRecord():
                self._items.append(PhaseEnded(record, group))
            case RewindRecord():
                self._last.clear()
                self._items.append(Rewound(record, group))
            case EraRecord():
                if before is not None and record.entries is not None:
                    self._lose(before, record)
                self._items.append(Changed(record, group))
            case RoundRecord():
                assert before is not None and self._replay.outcome is not None
                parts = self._parts(before, record)
                self._items.append(TracedRound(record, before, group, self._replay.outcome, parts))
            case ExchangeRecord():
                assert before is not None
                self._items.append(TracedExchange(record, group, self._parts(before, record)))

    def _make_room(self, group: GroupState | None) -> None:
        """Here the number of the last settled round changes: what was drawn before it comes before it."""
        if group is not None and group.open and group.phase.kind is Kind.TRAIN:
            bodies = Bodies()
            self._items.append(bodies)
            self._bodies.setdefault(group.phase.number, []).append((group.round, bodies))

    def _parts(self, group: GroupState, record: RoundRecord | ExchangeRecord) -> tuple[TracedContribution, ...]:
        hands = group.phase.ledger.hands
        number = record.round if isinstance(record, RoundRecord) else 0
        parts: list[TracedContribution] = []
        for worker, hand, line in zip(group.roster, hands, record.tickets, strict=True):
            part = TracedContribution(worker, number, hand.queue[: line.micro_batches], line)
            parts.append(part)
            if number and not line.flags & Flag.FOLLOWING:
                where = mapping.point_of(line)
                if where is None:
                    raise JournalError(
                        "the journal does not say where contributions were computed: an older Pliant wrote it"
                    )
                self._handed_in(part, group.phase.number, where)
        return tuple(parts)

    def _lose(self, group: GroupState, record: EraRecord) -> None:
        """What survivors had handed in is lost; where they went on from there, it still counts."""
        for worker, line in zip(record.roster, record.entries or (), strict=True):
            entry = mapping.entry_of(line)
            if not entry.active:
                self._last.pop(WorkerId(worker), None)
                continue
            member = group.roster.index(WorkerId(worker))
            for phase, dropped, where in zip(group.open, entry.dropped, entry.points, strict=False):
                if phase.kind is Kind.TRAIN and where.handed_in:
                    drawn = phase.ledger.hands[member].queue[:dropped]
                    self._handed_in(TracedContribution(WorkerId(worker), 0, drawn, None), phase.number, where)

    def _handed_in(self, part: TracedContribution, phase: int, where: Point) -> None:
        part.point, part.before = where, self._last.get(part.worker)
        self._last[part.worker] = part
        early, late = part.micro_batches[: where.early], part.micro_batches[where.early :]
        if early:
            self._stretches.append((phase, where.early_round, Segment(part, early, where.ahead)))
        if late:
            self._stretches.append((phase, where.late_round, Segment(part, late, ahead=False)))

    def reached(self, records: int) -> None:
        """So many records of the workers are taken."""
        self._reached.append((records, len(self._items)))

    def written(self) -> Trace:
        if self._run is None:
            raise JournalError("the journal is empty")
        for phase, settled, stretch in self._stretches:
            places = self._bodies[phase]
            place = bisect.bisect_left(places, settled, key=operator.itemgetter(0))
            if place == len(places):
                raise JournalError(f"{stretch.part.worker} computed after round {settled}, which phase {phase} has not")
            places[place][1].stretches.append(stretch)
        self._let_see()
        return Trace(self._run, self._items, self._end, self._starts(), len(self._checkpoints))

    def _let_see(self) -> None:
        """Loop bodies saw an update in which they computed what a rewind has made void: one is to see it here, too."""
        last: Segment | None = None
        unseen: Bodies | None = None
        for before, item in itertools.pairwise(self._items):
            if isinstance(before, Bodies) and before.stretches:
                last, unseen = before.stretches[-1], None
            elif isinstance(before, Bodies) and isinstance(item, TracedRound):
                unseen = before if item.outcome.seen else None
            if isinstance(item, Rewound) and unseen is not None and last is not None:
                again = TracedContribution(last.part.worker, 0, last.micro_batches[-1:], None, before=last.part)
                unseen.stretches.append(Segment(again, again.micro_batches, ahead=False))
                unseen = None

    def _starts(self) -> list[TraceStart]:
        """Checkpoints in a loop over batches of which nothing that comes later was computed, in part, before."""
        if not self._checkpoints:
            return []
        bridges = self._bridges()
        starts: list[TraceStart] = []
        for checkpoint in self._checkpoints:
            reached = bisect.bisect_left(self._reached, checkpoint.records, key=operator.itemgetter(0))
            place = self._reached[reached][1] if reached < len(self._reached) else len(self._items)
            if self._inside_loop(place) and not any(first < place <= last for first, last in bridges):
                starts.append(TraceStart(checkpoint, place))
        return starts

    def _bridges(self) -> list[tuple[int, int]]:
        """Pairs of items of which the second needs what was computed with the first."""
        begun: dict[TracedContribution, int] = {}
        bridges: list[tuple[int, int]] = []
        for place, item in enumerate(self._items):
            if isinstance(item, Bodies):
                for stretch in item.stretches:
                    part = stretch.part
                    bridges.append((begun.setdefault(part, place), place))
                    if stretch.ahead and part.before is not None:
                        bridges.append((begun.get(part.before, place), place))
            elif isinstance(item, TracedRound):
                bridges += [(begun[part], place) for part in item.parts if part in begun]
        return [(first, last) for first, last in bridges if first < last]

    def _inside_loop(self, place: int) -> bool:
        """Whether the script is in a loop over batches there, and in nothing else."""
        group = getattr(self._items[place - 1], "group", None) if place else None
        return group is not None and [phase.kind for phase in group.open] == [Kind.TRAIN]
