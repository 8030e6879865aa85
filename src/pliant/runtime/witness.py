"""Telling the coordinator what happened.

Question  What does the leader write down of each phase and round, and how does a worker learn that the run is over?
Holds     Only the leader writes; every record is a function of the tickets, so any worker could. Alone, nobody is
          told anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pliant.control.client import Link
from pliant.core import journal
from pliant.core.rounds import Group, Settled
from pliant.core.tickets import Kind, Ticket
from pliant.types import Span


class Nobody:
    """The witness of a script that runs alone."""

    def check(self) -> None: ...

    def opened(self, group: Group, openings: list[Ticket]) -> None: ...

    def settled(self, group: Group, outcome: Settled, handed_in: list[Ticket], rate: float) -> None: ...

    def beat(self, round: int) -> None: ...


class Reporter:
    """The witness of a worker in a job."""

    def __init__(self, link: Link, *, leader: bool) -> None:
        self._link = link
        self._leader = leader
        self._progress = 0
        self._announced: journal.PolicyRecord | None = None

    def check(self) -> None:
        self._link.check()

    def beat(self, round: int) -> None:
        self._progress += 1
        self._link.beat(round, self._progress)
        self._link.check()

    def opened(self, group: Group, openings: list[Ticket]) -> None:
        """All workers entered a phase; before the first one, and after a change, the policy is written."""
        if not self._leader:
            return
        policy = _policy(group)
        if policy != self._announced:
            self._write(policy)
            self._announced = policy
        inside = group.open[-1] if group.open and group.phase.number == group.phases else None
        first = openings[0]
        self._write(
            journal.PhaseRecord(
                phase=group.phases,
                task=first.kind.name.lower(),
                epoch=first.epoch,
                length=first.length,
                limit=inside.ledger.limit if inside else 0,
                sizes=[ticket.size for ticket in openings],
                ahead=[ticket.ahead for ticket in openings],
                order=first.order,
            )
        )
        if inside is None:
            self._write(journal.PhaseEndRecord(group.phases, [(0, first.length)] if first.length else []))

    def settled(self, group: Group, outcome: Settled, handed_in: list[Ticket], rate: float) -> None:
        if not self._leader:
            return
        lines = [_line(ticket, spans) for ticket, spans in zip(handed_in, outcome.spans, strict=True)]
        if outcome.kind is Kind.EVALUATE:
            self._write(journal.ExchangeRecord(group.era, outcome.phase, outcome.batch, lines))
        else:
            self._write(
                journal.RoundRecord(
                    era=group.era,
                    round=outcome.round,
                    phase=outcome.phase,
                    batch=outcome.batch,
                    weight=outcome.weight,
                    factor=outcome.factor,
                    rate=rate,
                    loss=outcome.loss,
                    applied=outcome.applied,
                    samples_total=group.samples,
                    tickets=lines,
                )
            )
        if outcome.ended:
            self._write(journal.PhaseEndRecord(outcome.phase, list(outcome.cut), outcome.result))

    def _write(self, record: journal.Record) -> None:
        self._link.journal(journal.encode(record))


def _policy(group: Group) -> journal.PolicyRecord:
    policy = group.policy
    return journal.PolicyRecord(
        batch=policy.batch,
        floating=policy.floating,
        at_most=policy.at_most,
        delay=policy.delay,
        rule=policy.rule,
        momentum=policy.momentum,
        samples_limit=group.samples_limit,
    )


def _line(ticket: Ticket, spans: Sequence[Span]) -> journal.TicketLine:
    return journal.TicketLine(
        spans=list(spans),
        micro_batches=ticket.micro_batches,
        samples=ticket.samples,
        weight=ticket.weight,
        busy_s=ticket.busy_s,
        idle_s=ticket.idle_s,
        sum_s=ticket.sum_s,
        cost_s=ticket.cost_s,
        # JSON has no infinity; a round with such a loss is marked by its flags.
        loss_sum=ticket.loss_sum if math.isfinite(ticket.loss_sum) else 0.0,
        squared_norm=ticket.squared_norm if math.isfinite(ticket.squared_norm) else 0.0,
        scale=ticket.scale,
        flags=int(ticket.flags),
    )
