"""One measured process: its device, its data, its counts.

Question  How many samples, updates and busy seconds did this worker have in each counted window?
Holds     All workers of a set count over the same windows of the system-wide monotonic clock. What
          straddles a window's edge counts by the part inside it. The loop is never stopped for
          counting: it runs from before the start until after the last window.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.clusters import MICRO_BATCH, REAL, Phase, Plan, device_ms, phase_at
from benchmarks.workload import SAMPLES, Device, make_dataset, make_model, make_optimizer


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of this worker's time: from the end of the last micro-batch to the end of this one."""

    begins_s: float
    ends_s: float
    samples: int
    busy_s: float
    updates: int


@dataclass(frozen=True, slots=True)
class Count:
    """A worker's totals in one window."""

    cluster: str
    window_s: float
    samples: float
    updates: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker hands to the runner: totals per window, and the largest of each noted figure."""

    counts: list[Count]
    notes: dict[str, float]


def count(spans: list[Span], phase: Phase) -> Count:
    """Totals over the phase's window; a span at its edge counts in proportion."""
    samples = updates = busy = 0.0
    for span in spans:
        inside = min(span.ends_s, phase.ends_s) - max(span.begins_s, phase.window_s)
        if inside <= 0:
            continue
        part = inside / (span.ends_s - span.begins_s)
        samples += span.samples * part
        updates += span.updates * part
        busy += span.busy_s * part
    return Count(phase.cluster, phase.length_s, samples, updates, busy)


class Worker:
    """What a system's ``train`` gets: model, optimizer, data and the meter."""

    def __init__(self, directory: Path, index: int) -> None:
        self.directory = directory
        self.index = index
        (directory / f"process-{os.getpid()}").touch()
        self.plan = msgspec.json.decode((directory / "plan.json").read_bytes(), type=Plan)
        self.device = Device(lambda: self.device_ms(self.index))
        self.model = make_model(self.plan.model, self.device)
        self.optimizer = make_optimizer(self.model)
        self.dataset = make_dataset(self.plan.model)
        self._started: float | None = None
        self._last = time.monotonic()
        self._spans: list[Span] = []
        self._notes: dict[str, float] = {}
        self._ready = self._done = False

    @property
    def now_s(self) -> float:
        """Seconds since the set's start; just below zero before it is known."""
        if self._started is None:
            start = self.directory / "start"
            if not start.exists():
                return -1e-9
            self._started = float(start.read_text())
        return time.monotonic() - self._started

    @property
    def stopped(self) -> bool:
        """True when every worker's counts are written: the group may end."""
        return self._done and (self.directory / "stop").exists()

    def device_ms(self, index: int) -> float:
        """The present time per 16 samples of any worker (only the oracle asks for another's)."""
        now = self.now_s
        return device_ms(phase_at(self.plan, now), index, now)

    def batches(self, share: Callable[[], int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless micro-batches from torch's loader; ``share`` is asked for the size of each."""

        def positions() -> Iterator[list[int]]:
            generator = torch.Generator().manual_seed(self.index)
            while True:
                yield torch.randint(SAMPLES, (share(),), generator=generator).tolist()

        yield from DataLoader(self.dataset, batch_sampler=positions())  # type: ignore[arg-type]

    def loss(self, model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Forward pass on the emulated device; the backward pass takes the rest of its time."""
        self.device.begin(len(x))
        return F.cross_entropy(model(x), y)

    def finished(self, samples: int, *, updated: bool) -> None:
        """A micro-batch, and what the system did after it, is complete."""
        now = time.monotonic()
        if not self._ready:
            (self.directory / f"ready-{self.index}").touch()
            self._ready = True
        if self.now_s >= 0 and self._started is not None and not self._done:
            begins, ends = self._last - self._started, now - self._started
            self._spans.append(Span(begins, ends, samples, self.device.busy_s, int(updated)))
            if ends > self.plan.ends_s:
                self._write()
        self._last = now

    def note(self, name: str, value: float) -> None:
        """Keep the largest value seen under this name."""
        self._notes[name] = max(value, self._notes.get(name, value))

    def _write(self) -> None:
        report = Report([count(self._spans, phase) for phase in self.plan.phases], self._notes)
        partial = self.directory / f"partial-{self.index}"
        partial.write_bytes(msgspec.json.encode(report))
        partial.rename(self.directory / f"counts-{self.index}.json")
        self._done = True


def equal_share(plan: Plan) -> int:
    """What a group without regard to speed gives each worker per update."""
    return max(plan.batch // plan.workers, 1)


def micro_batch(plan: Plan) -> int:
    """What a worker computes at once: 16 samples in the emulated clusters, its whole share on real cores."""
    return equal_share(plan) if plan.phases[0].cluster == REAL else MICRO_BATCH
