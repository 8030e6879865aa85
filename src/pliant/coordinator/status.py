"""The status of a run, computed from its journal.

Question  Which figures does a user or a monitor want to see, and how do they follow from the records?
Holds     All figures come from journal records, the roster and the script's plan. Speeds are means over the last
          seconds, so that they show a change soon.
Source    ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from pliant.control.messages import Past
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
)
from pliant.core.membership.roster import name_order

WINDOW_S = 5.0
"""Speeds are means over this time: long enough to be readable, short enough to follow a change."""

LEAST_BUSY_S = 1e-9

SPARE_AFTER_ROUNDS = 3
"""A worker without a sample in this many rounds of a phase is a spare; a slow worker may miss a single round."""


class WorkerStatus(msgspec.Struct):
    """One slot, under the name of its last worker; sums are over all its workers. ``pace``: samples per busy second."""

    name: str
    slot: str = ""
    restarts: int = 0
    state: str = "starting"
    samples: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    pace: float = 0.0


class Status(msgspec.Struct):
    """The whole run. ``epoch`` counts from 0; None where nothing is known yet."""

    job: str
    term: int = 1
    era: int = 0
    eras: int = 0
    restarts: int = 0
    workers: list[WorkerStatus] = []
    task: str = ""
    """kind of the innermost call in progress; empty between two calls"""
    epoch: int = 0
    epochs: int | None = None
    samples_planned: int | None = None
    epoch_done: int = 0
    epoch_length: int = 0
    round: int = 0
    rounds: int = 0
    batch: int | None = None
    rate: float | None = None
    loss: float | None = None
    noise_scale: float | None = None
    """gradient noise scale in samples: beyond this batch more samples per update bring little"""
    samples_total: int = 0
    samples_per_s: float = 0.0
    skipped: int = 0
    result: float | None = None
    """result of the last ``evaluate``"""
    results: int = 0
    spares: int = 0
    eta_s: float | None = None
    ended: str | None = None
    completed: bool = False

    @property
    def is_evaluating(self) -> bool:
        """Whether the phase in progress is an ``evaluate``."""
        return self.task == "evaluate"


class MadeCall(msgspec.Struct, frozen=True, array_like=True):
    """A top-level call of ``batches`` or ``evaluate``."""

    task: str
    length: int


class TrackerState(msgspec.Struct):
    """The state of a ``StatusTracker``, from which another one can go on."""

    status: Status
    calls: list[MadeCall]
    past: list[Past]
    open_phases: list[PhaseRecord]
    roster: list[str]
    recorded_era: int
    phase_rounds: int
    phase_samples: list[int]
    began: bool


class StatusTracker:
    """Keeps a ``Status`` up to date."""

    def __init__(self, job: str, term: int = 1) -> None:
        self.status = Status(job=job, term=term)
        self.calls: list[MadeCall] = []
        """top-level calls so far, in their order; the last one may be open"""
        self.past: list[Past] = []
        """the calls that are over"""
        self._open_phases: list[PhaseRecord] = []
        self._rows: dict[str, WorkerStatus] = {}
        self.roster: list[str] = []
        """roster of the last era in the journal"""
        self.recorded_era = 0
        """number of that era"""
        self._recent: deque[tuple[float, int, list[int], list[float]]] = deque()
        self._recent_samples: list[int] = []
        self._recent_busy_s: list[float] = []
        """sums over ``_recent`` by index in the roster: a fast run has thousands of rounds in the window"""
        self._phase_rounds = 0
        self._phase_samples: list[int] = []
        self._began_s: float | None = None
        self._began_at = 0.0
        """how much was done when the estimate of the remaining time began"""

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Note the script's plan: its epochs or samples, if known."""
        self.status.epochs = epochs
        self.status.samples_planned = samples

    def describe(self, slot: str, worker: str, state: str, restarts: int) -> None:
        """Note the state of a slot's worker, in a word."""
        row = self._row(slot)
        row.name, row.state, row.restarts = worker, state, restarts

    def figures(self) -> TrackerState:
        """The state from which another tracker can go on."""
        # The lists are not copied: the caller encodes them before anything is added.
        return TrackerState(
            self.status,
            self.calls,
            self.past,
            self._open_phases,
            self.roster,
            self.recorded_era,
            self._phase_rounds,
            self._phase_samples,
            self._began_s is not None,
        )

    @classmethod
    def restored(cls, figures: TrackerState) -> StatusTracker:
        """A tracker that goes on from ``figures``, and owns them from now on."""
        tally = cls(figures.status.job, figures.status.term)
        tally.status = figures.status
        tally._rows = {row.slot: row for row in figures.status.workers}
        tally.calls, tally.past, tally._open_phases = figures.calls, figures.past, figures.open_phases
        tally.roster, tally.recorded_era = figures.roster, figures.recorded_era
        tally._phase_rounds, tally._phase_samples = figures.phase_rounds, figures.phase_samples
        tally._began_s = 0.0 if figures.began else None
        tally._forget_recent()
        return tally

    def resume(self, records: Iterable[Record], now_s: float | None) -> None:
        """Add records of an earlier coordinator. With a time, speeds and the estimate of the time left start now."""
        for record in records:
            self.add(record, None)
        self.status.samples_per_s, self.status.eta_s = 0.0, None
        if now_s is None:
            return
        for row in self.status.workers:
            # Slots that still exist are described again later.
            row.state = "ended"
        self._forget_recent()
        self._began_s = now_s if self._began_s is not None else None
        self._began_at = self._done()[0]

    def add(self, record: Record, now_s: float | None) -> None:
        """Add one journal record; without a time it does not count for speeds."""
        status = self.status
        match record:
            case RunRecord() | PolicyRecord() | CheckpointRecord() | RewindRecord() | FinishingRecord() | GapRecord():
                pass
            case EraRecord(era=era, roster=roster):
                status.era, status.eras, self.roster = max(status.era, era), status.eras + 1, roster
                self.recorded_era = max(self.recorded_era, era)
                # Counts by index in the roster start again.
                self._forget_recent()
                self._phase_rounds, self._phase_samples = 0, [0] * len(roster)
            case PhaseRecord():
                self._open(record, now_s)
            case RoundRecord():
                self._round(record, now_s)
            case ExchangeRecord(tickets=tickets):
                self._spend(tickets)
            case PhaseEndRecord(result=result, results=results):
                self._close(result, results or None)
                if result is not None:
                    status.result = result
                    status.results += 1
            case EndRecord(reason=reason, completed=completed):
                status.ended, status.completed, status.eta_s = reason, completed, None

    def tick(self, now_s: float) -> None:
        """Drop rounds that have left the window, and update the speeds and the estimate of the remaining time."""
        while self._recent and now_s - self._recent[0][0] > WINDOW_S:
            _, _, samples, busy_s = self._recent.popleft()
            self._recent_samples = [a - b for a, b in zip(self._recent_samples, samples, strict=False)]
            self._recent_busy_s = [a - b for a, b in zip(self._recent_busy_s, busy_s, strict=False)]
        if not self._recent:
            self._forget_recent()
        began_s = self._began_s if self._began_s is not None else now_s
        span_s = min(WINDOW_S, now_s - began_s)
        batches = sum(entry[1] for entry in self._recent)
        self.status.samples_per_s = batches / span_s if span_s > 0 else 0.0
        self.status.eta_s = self._time_left(now_s)

    def _forget_recent(self) -> None:
        """Empty the window; resetting the sums also drops their rounding errors."""
        self._recent.clear()
        self._recent_samples, self._recent_busy_s = [0] * len(self.roster), [0.0] * len(self.roster)

    def _row(self, name: str) -> WorkerStatus:
        slot = name.partition(".")[0]
        if slot not in self._rows:
            self._rows[slot] = WorkerStatus(name=name, slot=slot)
            self.status.workers = sorted(self._rows.values(), key=lambda row: name_order(row.slot))
        return self._rows[slot]

    def _close(self, result: float | None, results: dict[str, float | None] | None) -> None:
        """The innermost open call is over; newcomers repeat only top-level calls, so only these are kept."""
        if self._open_phases:
            phase = self._open_phases.pop()
            self.status.task = self._open_phases[-1].task if self._open_phases else ""
            if not self._open_phases and not phase.inner:
                self.past.append(Past(phase.task, phase.epoch, result, results))

    def _open(self, record: PhaseRecord, now_s: float | None) -> None:
        if not self._open_phases and not record.inner:
            self.calls.append(MadeCall(record.task, record.length))
        self._open_phases.append(record)
        self.status.task = record.task
        if record.task != "train":
            return
        self.status.epoch = record.epoch
        if self._began_s is None:
            self._began_s = now_s or 0.0
        self.status.epoch_done, self.status.epoch_length = 0, record.limit
        self._phase_rounds, self._phase_samples = 0, [0] * len(self.roster)

    def _round(self, record: RoundRecord, now_s: float | None) -> None:
        status = self.status
        self._spend(record.tickets)
        samples = [ticket.samples for ticket in record.tickets]
        for name, count in zip(self.roster, samples, strict=False):
            self._row(name).samples += count
        status.round, status.rounds = record.round, status.rounds + 1
        status.batch, status.rate = record.batch, record.rate
        status.loss = record.loss if record.loss is not None else status.loss
        if record.measured is not None:
            status.noise_scale = record.noise_scale
        status.samples_total = record.samples_total
        status.epoch_done += record.batch
        status.skipped += record.skipped
        if now_s is not None:
            busy_s = [ticket.busy_s for ticket in record.tickets]
            self._recent.append((now_s, record.batch, samples, busy_s))
            self._recent_samples = [a + b for a, b in zip(self._recent_samples, samples, strict=False)]
            self._recent_busy_s = [a + b for a, b in zip(self._recent_busy_s, busy_s, strict=False)]
        self._measure(samples)

    def _spend(self, tickets: list[TicketLine]) -> None:
        """Add up the workers' time, in training and in ``evaluate`` alike."""
        for name, ticket in zip(self.roster, tickets, strict=False):
            row = self._row(name)
            row.busy_s += ticket.busy_s
            row.idle_s += ticket.idle_s

    def _measure(self, samples: list[int]) -> None:
        for name, done, busy_s in zip(self.roster, self._recent_samples, self._recent_busy_s, strict=False):
            row = self._row(name)
            # A busy time of 0 would make the pace infinite, which JSON cannot represent.
            row.pace = done / busy_s if busy_s > LEAST_BUSY_S else row.pace
        self._phase_rounds += 1
        self._phase_samples = [a + b for a, b in zip(self._phase_samples, samples, strict=False)]
        if self._phase_rounds >= SPARE_AFTER_ROUNDS:
            self.status.spares = sum(count == 0 for count in self._phase_samples)

    def _time_left(self, now_s: float) -> float | None:
        """Elapsed time × remaining / done: pauses for ``evaluate`` are included."""
        done, whole = self._done()
        if self._began_s is None or self.status.ended is not None or self.status.epoch_length == 0 or whole is None:
            return None
        gained = done - self._began_at
        return (now_s - self._began_s) * max(0.0, whole - done) / gained if gained > 0 else None

    def _done(self) -> tuple[float, float | None]:
        """How much of the plan is done, and the whole plan, in samples or epochs."""
        status = self.status
        if status.samples_planned is not None:
            return float(status.samples_total), float(status.samples_planned)
        epochs = status.epoch + status.epoch_done / status.epoch_length if status.epoch_length else 0.0
        return epochs, float(status.epochs) if status.epochs is not None else None
