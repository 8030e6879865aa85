"""What workers exchange, as parts of journal records, and back.

Question  How are tickets, entries into an era and the policy written into records, and how are they read back?
Holds     One definition for both directions: the workers that write and the readers that decide again use the same
          functions. Reading gives what was written, but for what decisions do not depend on or JSON cannot hold:
          numbers that are not finite are written as 0 (the flags of such a ticket say so).
Source    ours; docs/design/0003-journal.md.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from pliant.core import consistency
from pliant.core.drift import Drift
from pliant.core.group_state import GroupState, Policy
from pliant.core.journal.records import DriftLine, EntryLine, PhaseRecord, PolicyRecord, RoundRecord, TicketLine
from pliant.core.regrouping import Entry
from pliant.core.tickets import NOWHERE, Flag, Kind, Point, Ticket, point
from pliant.core.tuning import rates
from pliant.types import Span

# -- a ticket of a round or an exchange

NUMBERS = (
    "micro_batches",
    "samples",
    "weight",
    "busy_s",
    "idle_s",
    "sum_s",
    "cost_s",
    "loss_sum",
    "squared_norm",
    "scale",
)
"""Fields that a ticket and its line share, in the order of both."""

# Given by position: a journal has millions of tickets, and with names each would take several times as long.
_numbers = operator.attrgetter(*NUMBERS)
_UNSAID = tuple(Ticket.__struct_defaults__[1:6])
"""What a line does not say, between the flags of a ticket and these fields."""
# Making a flag of a number takes longer than the rest of a ticket.
_FLAGS = {value: Flag(value) for value in range(64)}


def ticket_line(ticket: Ticket, spans: Sequence[Span]) -> TicketLine:
    """The line of a ticket that was handed in for these positions."""
    where = ticket.point.packed if ticket.point.handed_in else None
    line = TicketLine(list(spans), *_numbers(ticket), flags=int(ticket.flags), point=where)
    if math.isfinite(line.loss_sum) and math.isfinite(line.squared_norm):
        return line
    return replace(line, loss_sum=_finite(line.loss_sum), squared_norm=_finite(line.squared_norm))


def ticket_of(line: TicketLine, group: GroupState, kind: Kind) -> Ticket:
    """The ticket of a line, handed in to the exchange that follows this state; ``ValueError`` if it makes no sense."""
    flags = _FLAGS[line.flags] if line.flags in _FLAGS else Flag(line.flags)
    where = point_of(line) or NOWHERE
    return Ticket(group.era, group.round, group.phases, kind, flags, *_UNSAID, *_numbers(line), point=where)


def point_of(line: TicketLine) -> Point | None:
    """The weights that a contribution was computed at; None if there was none, or the journal does not say."""
    return None if line.point is None else point(*line.point)


def entered(tickets: Sequence[Ticket]) -> list[tuple[int, int, int]]:
    """Who becomes ready with an exchange: member, micro-batch size, look-ahead of its loader."""
    return [(member, ticket.size, ticket.ahead) for member, ticket in enumerate(tickets) if ticket.flags & Flag.READY]


def with_entered(tickets: Sequence[Ticket], written: Sequence[tuple[int, int, int]]) -> list[Ticket]:
    """The inverse of ``entered``, for members that are ready."""
    changed = list(tickets)
    for member, size, ahead in written:
        changed[member] = replace(changed[member], size=size, ahead=ahead)
    return changed


def sums_of(tickets: Sequence[Ticket]) -> list[list[tuple[str, float, float]]]:
    """The sums of an exchange in which several means are measured, in the order of the roster; else none."""
    if not any(ticket.sums for ticket in tickets):
        return []
    return [[(name, _finite(total), count) for name, total, count in ticket.sums] for ticket in tickets]


def with_sums(tickets: Sequence[Ticket], written: Sequence[Sequence[tuple[str, float, float]]]) -> list[Ticket]:
    """The inverse of ``sums_of``, where there are any."""
    return [replace(ticket, sums=tuple(sums)) for ticket, sums in zip(tickets, written, strict=True)]


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0


# -- what a round's record says of its tickets beside their lines


def trained_sets(tickets: Sequence[Ticket], agreed: bytes, *, wanted: bool) -> list[str]:
    """The sets of parameters that tickets carry; none where all who have a say carry the agreed one."""
    sets = [ticket.wanted if wanted else ticket.trained for ticket in tickets]
    if all(of == agreed or ticket.flags & Flag.FOLLOWING for of, ticket in zip(sets, tickets, strict=True)):
        return []
    return [of.hex() for of in sets]


def trained_set(written: Sequence[str], member: int, agreed: bytes) -> bytes:
    """The set that a member's ticket carried: what is written, or else what was agreed on."""
    return bytes.fromhex(written[member]) if written else agreed


def with_sets(record: RoundRecord, tickets: Sequence[Ticket], agreed: bytes) -> list[Ticket]:
    """The tickets with the sets of parameters that a round's record names."""
    if not (record.trained or record.wanted or agreed):
        return list(tickets)
    return [
        replace(
            ticket,
            trained=trained_set(record.trained, member, agreed),
            wanted=trained_set(record.wanted, member, agreed),
        )
        for member, ticket in enumerate(tickets)
    ]


def with_measures(record: RoundRecord, tickets: Sequence[Ticket]) -> list[Ticket]:
    """The tickets with what a round's record says once for all of them: the first one that has a say carries it."""
    changed = list(tickets)
    # The flag of most tickets is none, and that is soon seen.
    speaking = (m for m, t in enumerate(tickets) if t.flags is Flag.NONE or not t.flags & Flag.FOLLOWING)
    says = next(speaking, 0)
    if record.momentum is not None:
        changed[says] = replace(changed[says], momentum=record.momentum)
    if record.clip_norm is not None:
        changed[says] = replace(changed[says], clip_norm=record.clip_norm)
    if record.measured is not None:
        number, square = record.measured
        changed[says] = replace(changed[says], measured_round=number, measured_norm=square)
    if record.drift is not None:
        sketches = record.drift.sketches or [0.0] * len(record.drift.digests)
        for (member, arithmetic, digest), sketch in zip(record.drift.digests, sketches, strict=True):
            if 0 <= member < len(changed):
                weighed = {"weights": digest, "arithmetic": arithmetic, "sketch": sketch}
                weighed["weights_round"] = record.drift.round
                changed[member] = replace(changed[member], **weighed)
    return changed


def drift_line(drift: Drift) -> DriftLine:
    """Drift, as a round's record holds it."""
    return DriftLine(
        drift.round, list(drift.digests), list(drift.healed), list(drift.expelled), drift.donor, list(drift.sketches)
    )


def drift_of(line: DriftLine) -> Drift:
    """The inverse of ``drift_line``."""
    healed, expelled, sketches = tuple(line.healed), tuple(line.expelled), tuple(line.sketches)
    return Drift(line.round, tuple(line.digests), healed, expelled, line.donor, sketches)


# -- the tickets that open a phase


def phase_record(phase: int, limit: int, openings: Sequence[Ticket], agreed: bytes) -> PhaseRecord:
    """The record of a phase that is opened by these tickets; ``agreed``: the set of parameters trained so far."""
    present = consistency.opening(openings)
    first = openings[present.index(True)]
    return PhaseRecord(
        phase=phase,
        task=first.kind.name.lower(),
        epoch=first.epoch,
        length=first.length,
        limit=limit,
        sizes=[ticket.size for ticket in openings],
        ahead=[ticket.ahead for ticket in openings],
        order=first.order,
        absent=[member for member, here in enumerate(present) if not here],
        inner=bool(first.flags & Flag.INNER),
        ready=[member for member, ticket in enumerate(openings) if ticket.flags & Flag.READY],
        trained=trained_sets(openings, agreed, wanted=True) if first.kind is Kind.TRAIN else [],
    )


def kind_of(record: PhaseRecord) -> Kind | None:
    """The kind of a phase; None if there is no such kind."""
    return Kind[record.task.upper()] if record.task in ("train", "evaluate") else None


def openings_of(record: PhaseRecord, group: GroupState, kind: Kind) -> list[Ticket]:
    """The tickets that open a phase after this state."""
    return [
        Ticket(
            group.era,
            group.round,
            group.phases,
            kind,
            (Flag.FOLLOWING if member in record.absent else Flag.OPENING)
            | (Flag.READY if member in record.ready else Flag.NONE)
            | (Flag.INNER if record.inner and member not in record.absent else Flag.NONE),
            record.epoch,
            record.length,
            record.order,
            record.sizes[member],
            record.ahead[member],
            wanted=trained_set(record.trained, member, group.trained),
        )
        for member in range(len(group.roster))
    ]


# -- what a member brings into an unplanned era


def entry_line(entry: Entry) -> EntryLine:
    """An entry, as an era's record holds it."""
    return EntryLine(entry.active, list(entry.dropped), list(entry.kept), [each.packed for each in entry.points])


def entry_of(line: EntryLine) -> Entry:
    """The inverse of ``entry_line``; ``ValueError`` if a point makes no sense."""
    points = tuple(point(*packed) for packed in line.points)
    return Entry(line.active, tuple(line.dropped), tuple(line.kept), points)


# -- the settings that decisions depend on

_POLICY = ("batch", "floating", "at_most", "delay", "momentum", "trial", "order")
_policy = operator.attrgetter(*_POLICY)


def policy_record(group: GroupState, settings: dict[str, str], parameters: str) -> PolicyRecord:
    """The policy in force, with what all scripts must agree on."""
    shared: dict[str, Any] = dict(zip(_POLICY, _policy(group.policy), strict=True))
    return PolicyRecord(
        rule=str(group.policy.rule),
        samples_limit=group.samples_limit,
        updates_limit=group.updates_limit,
        settings=settings,
        parameters=parameters,
        **shared,
    )


def policy_of(record: PolicyRecord) -> Policy | None:
    """The policy of a record; None if this Pliant does not know its rule."""
    rule = rates.RULES.get(record.rule)
    shared: dict[str, Any] = dict(zip(_POLICY, _policy(record), strict=True))
    return None if rule is None else Policy(rule=rule, **shared)
