"""Reporting to the journal what happened.

Question  What is recorded of each era, phase and round, and when is it certain enough to be sent?
Holds     Every record is a function of the tickets, so that all workers make the same records with the same numbers.
          The lines of an exchange are sent only when a later exchange has completed on all members: what only a lost
          worker has applied is never reported. One worker sends. The others keep their lines until these are on disk,
          and hand them on with the state: a worker that holds the state holds every line that may still be missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pliant.core import ledger
from pliant.core.group_state import GroupState
from pliant.core.journal import mapping
from pliant.core.journal import records as journal
from pliant.core.regrouping import Entry
from pliant.core.rounds import Settled
from pliant.core.tickets import Kind, Ticket


class Journal(Protocol):
    """What is told what happened: the journal of a job, or nothing."""

    def opened(self, group: GroupState, openings: list[Ticket]) -> None: ...

    def settled(self, group: GroupState, outcome: Settled, handed_in: list[Ticket], rate: float) -> None: ...

    def era(self, group: GroupState, entries: Sequence[Entry] | None, *, sends: bool) -> None: ...

    def joined(self, records: int) -> None: ...

    def moved(self, link: LineSink) -> None: ...

    def confirmed(self) -> None: ...

    def rewound(self, name: str, records: int, worker: str, round_: int) -> None: ...

    @property
    def records(self) -> int: ...

    @property
    def certain(self) -> int: ...


class NullJournal:
    """Without a job nothing is recorded."""

    records = certain = 0

    def opened(self, group: GroupState, openings: list[Ticket]) -> None: ...

    def settled(self, group: GroupState, outcome: Settled, handed_in: list[Ticket], rate: float) -> None: ...

    def era(self, group: GroupState, entries: Sequence[Entry] | None, *, sends: bool) -> None: ...

    def joined(self, records: int) -> None: ...

    def moved(self, link: LineSink) -> None: ...

    def confirmed(self) -> None: ...

    def rewound(self, name: str, records: int, worker: str, round_: int) -> None: ...


class LineSink(Protocol):
    """Where lines go (``control.link.Link``)."""

    sends_lines: bool

    def keep(self, lines: Iterable[bytes], first: int) -> None: ...
    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None: ...
    def unwritten(self) -> list[bytes]: ...
    def send_lines_again(self) -> None: ...


class JournalReporter:
    """Makes the records of a worker in a job, and sends or keeps them."""

    def __init__(self, link: LineSink, settings: Mapping[str, str] | None = None, parameters: str = "") -> None:
        """``settings``, ``parameters``: what all scripts agree on, see ``journal.PolicyRecord``."""
        self._link = link
        self._settings, self._parameters = dict(settings or {}), parameters
        self._held: list[bytes] = []
        self.records = 0
        """records made so far, by whichever worker"""
        self._joined = 0
        """those of them made before this worker came"""
        self._announced: journal.PolicyRecord | None = None
        self._trained = b""
        """the set of parameters agreed on before the next record"""

    def moved(self, link: LineSink) -> None:
        """This worker has come back under a new name, over another link."""
        self._link = link

    def joined(self, records: int) -> None:
        """Number from here on: the other members have the earlier records."""
        self._held = []
        self.records = self._joined = records

    def state_dict(self) -> dict[str, Any]:
        """The lines that a newcomer must keep as well."""
        lines = [*self._link.unwritten(), *self._held]
        return {"first": self.records - len(lines), "lines": [line.decode() for line in lines]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the lines that were made before this newcomer came and are not on disk."""
        first: int = state["first"]
        self._link.keep_earlier([line.encode() for line in state["lines"][: max(0, self._joined - first)]], first)

    def confirmed(self) -> None:
        """All members have settled the last exchange, or entered the era after it."""
        if self._held:
            self._link.keep(self._held, self.records - len(self._held))
            self._held = []

    @property
    def certain(self) -> int:
        """How many records are of exchanges that all members have settled."""
        return self.records - len(self._held)

    def rewound(self, name: str, records: int, worker: str, round_: int) -> None:
        """``worker`` has read a checkpoint as of so many records: the run goes on from there."""
        self._write(journal.RewindRecord(name, records, worker, round_))

    def era(self, group: GroupState, entries: Sequence[Entry] | None, *, sends: bool) -> None:
        """A roster takes effect; ``sends``: this worker sends the lines from now on."""
        # Only the next exchange shows that all have entered it; until then a member may go back to the era before.
        self._write(
            journal.EraRecord(
                era=group.era,
                roster=list(group.roster),
                entries=None if entries is None else [mapping.entry_line(entry) for entry in entries],
                void=0 if entries is None else group.round,
            )
        )
        if entries is not None:
            for phase in group.given_up:
                self._write(journal.PhaseEndRecord(phase.number, list(ledger.unspent(phase.ledger))))
        # A newcomer may not have seen it.
        self._announced = None
        self._trained = group.trained
        self._link.sends_lines = sends
        if sends:
            self._link.send_lines_again()

    def opened(self, group: GroupState, openings: list[Ticket]) -> None:
        """All workers entered a phase; before the first one, and after a change, the policy is written."""
        self.confirmed()
        policy = mapping.policy_record(group, self._settings, self._parameters)
        if policy != self._announced:
            self._write(policy)
            self._announced = policy
        inside = group.open[-1] if group.open and group.phase.number == group.phases else None
        limit = inside.ledger.limit if inside else 0
        phase = mapping.phase_record(group.phases, limit, openings, self._trained)
        self._write(phase)
        self._trained = group.trained
        if inside is None:
            self._write(journal.PhaseEndRecord(group.phases, [(0, phase.length)] if phase.length else []))

    def settled(self, group: GroupState, outcome: Settled, handed_in: list[Ticket], rate: float) -> None:
        """An exchange of a phase was settled."""
        if all(ticket.phase == group.phases for ticket in handed_in):
            # Else it was in flight while an ``evaluate`` in the loop body came to its end.
            self.confirmed()
        lines = [mapping.ticket_line(ticket, spans) for ticket, spans in zip(handed_in, outcome.spans, strict=True)]
        entered = mapping.entered(handed_in)
        if outcome.kind is Kind.EVALUATE:
            sums = mapping.sums_of(handed_in)
            self._write(journal.ExchangeRecord(group.era, outcome.phase, outcome.batch, lines, entered, sums))
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
                    entered=entered,
                    delay=outcome.verdict.delay if outcome.verdict else None,
                    harvests=outcome.verdict.harvests if outcome.verdict else None,
                    momentum=outcome.momentum if outcome.momentum != group.policy.momentum else None,
                    measured=outcome.measured,
                    noise_scale=_noise_scale(group) if outcome.measured else None,
                    scheduled_total=group.scheduled if group.scheduled != group.samples else None,
                    drift=mapping.drift_line(outcome.drift) if outcome.drift else None,
                    clip_norm=outcome.clip_norm,
                    trained=mapping.trained_sets(handed_in, self._trained, wanted=False),
                    wanted=mapping.trained_sets(handed_in, self._trained, wanted=True),
                )
            )
            self._trained = group.trained
        if outcome.ended:
            self._write(journal.PhaseEndRecord(outcome.phase, list(outcome.cut), outcome.result, outcome.results or {}))

    def _write(self, record: journal.Record) -> None:
        self._held.append(journal.encode(record))
        self.records += 1


def _noise_scale(group: GroupState) -> float | None:
    scale = group.noise.scale
    return scale if scale is not None and math.isfinite(scale) else None
