"""How a run is getting on, as told by its journal.

Question  Which figures does a person or a monitor want to see, and how do they follow from the records?
Holds     Everything comes from journal records, the roster and the plan; nothing is estimated from wishes.
          Speeds are over the last seconds, so that they show a change at once.
Source    ours.
"""

from __future__ import annotations

from collections import deque

import msgspec

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

WINDOW_S = 5.0
"""Speeds are means over this time: long enough to be readable, short enough to follow a change."""

SPARE_AFTER_ROUNDS = 3
"""A worker without a sample in so many rounds of a phase is a spare; one round may pass by a slow worker."""


class WorkerStatus(msgspec.Struct):
    """One worker. ``pace`` is samples per second of its own busy time."""

    name: str
    state: str = "starting"
    samples: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    pace: float = 0.0


class Status(msgspec.Struct):
    """The whole run. ``epoch`` counts from 0; None where nothing is known yet."""

    job: str
    era: int = 0
    workers: list[WorkerStatus] = []
    task: str = ""
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
    samples_total: int = 0
    samples_per_s: float = 0.0
    skipped: int = 0
    result: float | None = None
    """of the last ``evaluate``"""
    results: int = 0
    spares: int = 0
    eta_s: float | None = None
    ended: str | None = None
    completed: bool = False

    @property
    def is_evaluating(self) -> bool:
        """Whether the phase under way trains nothing."""
        return self.task == "evaluate"


class Tally:
    """Keeps a ``Status`` up to date."""

    def __init__(self, job: str, workers: list[str]) -> None:
        self.status = Status(job=job, workers=[WorkerStatus(name=name) for name in workers])
        self._roster: list[str] = []
        self._recent: deque[tuple[float, int, list[int], list[float]]] = deque()
        self._phase_rounds = 0
        self._phase_samples: list[int] = []
        self._began_s: float | None = None

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Note how far the script means to go."""
        self.status.epochs = epochs
        self.status.samples_planned = samples

    def state(self, worker: str, state: str) -> None:
        """Note what a worker is doing."""
        for entry in self.status.workers:
            if entry.name == worker:
                entry.state = state

    def add(self, record: Record, now_s: float) -> None:
        """Take in one journal record."""
        status = self.status
        match record:
            case RunRecord() | PolicyRecord():
                pass
            case EraRecord(era=era, roster=roster):
                status.era, self._roster = era, roster
                self._recent.clear()
            case PhaseRecord():
                self._open(record, now_s)
            case RoundRecord():
                self._round(record, now_s)
            case ExchangeRecord(tickets=tickets):
                self._spend(tickets)
            case PhaseEndRecord(result=result):
                if result is not None:
                    status.result = result
                    status.results += 1
            case EndRecord(reason=reason, completed=completed):
                status.ended, status.completed, status.eta_s = reason, completed, None

    def tick(self, now_s: float) -> None:
        """Let speeds fade and the estimate of the time left run on."""
        while self._recent and now_s - self._recent[0][0] > WINDOW_S:
            self._recent.popleft()
        began_s = self._began_s if self._began_s is not None else now_s
        span_s = min(WINDOW_S, now_s - began_s)
        samples = sum(entry[1] for entry in self._recent)
        self.status.samples_per_s = samples / span_s if span_s > 0 else 0.0
        self.status.eta_s = self._time_left(now_s)

    def _open(self, record: PhaseRecord, now_s: float) -> None:
        self.status.task = record.task
        if record.task != "train":
            return
        self.status.epoch = record.epoch
        if self._began_s is None:
            self._began_s = now_s
        self.status.epoch_done, self.status.epoch_length = 0, record.limit
        self._phase_rounds, self._phase_samples = 0, [0] * len(self._roster)

    def _round(self, record: RoundRecord, now_s: float) -> None:
        status = self.status
        workers = self._spend(record.tickets)
        samples = [ticket.samples for ticket in record.tickets]
        for name, count in zip(self._roster, samples, strict=False):
            workers[name].samples += count
        status.round, status.rounds = record.round, status.rounds + 1
        status.batch, status.rate = record.batch, record.rate
        status.loss = record.loss if record.loss is not None else status.loss
        status.samples_total = record.samples_total
        status.epoch_done += record.batch
        status.skipped += record.skipped
        self._recent.append((now_s, record.batch, samples, [ticket.busy_s for ticket in record.tickets]))
        self._measure(workers, samples)

    def _spend(self, tickets: list[TicketLine]) -> dict[str, WorkerStatus]:
        """Add up the workers' time, in training and in ``evaluate`` alike."""
        workers = {entry.name: entry for entry in self.status.workers}
        for name, ticket in zip(self._roster, tickets, strict=False):
            workers[name].busy_s += ticket.busy_s
            workers[name].idle_s += ticket.idle_s
        return workers

    def _measure(self, workers: dict[str, WorkerStatus], samples: list[int]) -> None:
        for index, name in enumerate(self._roster):
            done = sum(entry[2][index] for entry in self._recent if index < len(entry[2]))
            busy_s = sum(entry[3][index] for entry in self._recent if index < len(entry[3]))
            workers[name].pace = done / busy_s if busy_s > 0 else workers[name].pace
        self._phase_rounds += 1
        self._phase_samples = [a + b for a, b in zip(self._phase_samples, samples, strict=False)]
        if self._phase_rounds >= SPARE_AFTER_ROUNDS:
            self.status.spares = sum(count == 0 for count in self._phase_samples)

    def _time_left(self, now_s: float) -> float | None:
        """Elapsed time times what is left over what is done: pauses for ``evaluate`` are in it."""
        status = self.status
        if self._began_s is None or status.ended is not None or status.epoch_length == 0:
            return None
        if status.samples_planned is not None:
            done, whole = float(status.samples_total), float(status.samples_planned)
        elif status.epochs is not None:
            done, whole = status.epoch + status.epoch_done / status.epoch_length, float(status.epochs)
        else:
            return None
        return (now_s - self._began_s) * max(0.0, whole - done) / done if done > 0 else None
