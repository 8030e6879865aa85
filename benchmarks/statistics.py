"""The cost of statistics: what measuring the gradient's noise adds to a round.

Question  How many CPU seconds do the norms and estimates add, as a share of a round without them?
Holds     Two workers as threads of one process, so that one clock (getrusage) has seen everything. What statistics
          consist of, the norm of the mean gradient and the estimates, is timed where it is done, in CPU seconds of the
          thread that does it, and related to what the process used over the same rounds. Rounds with and without
          statistics were compared first: on this machine neighbours differ by several times the part in question.
"""

import itertools
import resource
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.results import Trial
from benchmarks.workload import Device, make_dataset, make_model, make_optimizer
from pliant.core.tuning import noise
from pliant.tensors.gradients import FlatGradients
from pliant.testing import Together, together
from pliant.worker.training import Training

WORKERS, BATCH, SIZE = 2, 64, 16
WARM_UP = 2 * noise.DENSE
ROUNDS = 600
"""after the warm-up"""
ESTIMATES = ("told", "contributed", "measured")


@dataclass(slots=True)
class Meter:
    """CPU seconds that the threads of this process spend in what is timed."""

    spent_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same, with its time."""

        def counted(*arguments: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            try:
                return work(*arguments, **named)
            finally:
                with self._lock:
                    self.spent_s += time.thread_time() - began_s

        return counted


def watched(meter: Meter) -> ExitStack:
    """Time the estimates, and the norms that are taken for their sake: of the group's sum, not of a contribution."""
    stack, mine = ExitStack(), threading.local()
    norm, average = FlatGradients.squared_norm, Training._average
    timed_norm = meter.timed(norm)

    def averaged(training: Training, *arguments: Any, measures: bool) -> float | None:
        mine.measures = measures
        try:
            return average(training, *arguments, measures=measures)
        finally:
            mine.measures = False

    def squared_norm(buffer: FlatGradients) -> float:
        return timed_norm(buffer) if getattr(mine, "measures", False) else norm(buffer)

    stack.enter_context(patch.object(Training, "_average", averaged))
    stack.enter_context(patch.object(FlatGradients, "squared_norm", squared_norm))
    for name in ESTIMATES:
        stack.enter_context(patch.object(noise, name, meter.timed(getattr(noise, name))))
    return stack


def cpu_s() -> float:
    """Of the process, since its start."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def clocked(
    model: str, rounds: int, workers: int = WORKERS, clock: Callable[[], tuple[float, ...]] = lambda: (cpu_s(),)
) -> dict[int, tuple[float, ...]]:
    """What ``clock`` shows at the end of each round that ``step`` tells of; by default the process's CPU seconds."""
    seen: dict[int, tuple[float, ...]] = {}
    dataset, over = make_dataset(model), threading.Event()

    def script(handle: Together) -> None:
        device = Device(lambda: 0.0)
        mine = make_model(model, device)
        with handle.join(mine, make_optimizer(mine), batch=BATCH) as run:
            for _ in run.epochs(1):
                for x, y in run.batches(dataset, size=SIZE):
                    device.begin(len(x))
                    run.backward(F.cross_entropy(mine(x), y))
                    if run.step() and handle.place == 0:
                        seen[run.round] = clock()
                    if run.round >= rounds or over.is_set():
                        over.set()
                        break

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        together(workers, script, timeout_s=1200.0)
    finally:
        torch.set_num_threads(threads)
    return seen


def added(seen: dict[int, tuple[float, ...]]) -> tuple[float, int]:
    """The share of a round that statistics add, and of how many rounds; by round: CPU seconds, those of statistics."""
    first = min(number for number in seen if number >= WARM_UP)
    last = max(seen)
    whole_s, part_s = (after - before for before, after in zip(seen[first], seen[last], strict=True))
    return part_s / (whole_s - part_s), last - first


def measure(repeats: int, models: tuple[str, ...], say: Callable[[str], None]) -> tuple[Trial, ...]:
    """Every repeat of every model."""
    trials: list[Trial] = []
    for repeat, model in itertools.product(range(repeats), models):
        meter = Meter()
        with watched(meter):
            seen = clocked(model, WARM_UP + ROUNDS, clock=lambda meter=meter: (cpu_s(), meter.spent_s))
        share, count = added(seen)
        trials.append(Trial("pliant", model, "statistics", repeat, {"added": share, "rounds": count}))
        say(f"repeat {repeat}  {model:5}  statistics  {100 * share:+.3f} % of {count} rounds")
    return tuple(trials)
