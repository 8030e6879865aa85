"""The decision code, run again on the tickets that a journal holds.

Question  Do the journaled tickets lead to the journaled decisions?
Holds     Exactly the functions that the workers ran: ``rounds.opened`` and ``rounds.settled``. After the first
          difference nothing more is compared, for every later state would differ.
Source    Invariant 5 of DESIGN; docs/design/0003-journal.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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

# Longer lists of spans are shortened in a message.
_MOST_SPANS = 5


class Replay:
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
            problems.append(f"{where}: cut {named(record.cut)}, the decision code says {named(outcome.cut)}")
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
            problems.append(f"member {member} has {named(line.spans)}, the decision code says {named(spans)}")
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


def named(spans: Sequence[Span]) -> str:
    """Spans as text: ``0..4, 9..12``, the stop excluded."""
    named = ", ".join(f"{start}..{stop}" for start, stop in spans[:_MOST_SPANS])
    return f"{named}, … ({len(spans)} spans)" if len(spans) > _MOST_SPANS else named or "none"
