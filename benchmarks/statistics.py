"""The cost of statistics: what measuring the gradient's noise adds to a round.

Question  How many CPU seconds do the norms and estimates add, as a share of a round without them?
Holds     Two workers as threads of one process, so that one clock (getrusage) has seen everything. Stretches of
          rounds with and without statistics take turns in one run: drift of the machine meets both alike.
"""

import itertools
import math
import resource
import threading
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.results import Trial
from benchmarks.workload import Device, make_dataset, make_model, make_optimizer
from pliant.core import noise
from pliant.testing import Together, together

WORKERS, BATCH, SIZE = 2, 64, 16
STRETCH = noise.STRIDE
WARM_UP = 2 * noise.DENSE
LEAST_ROUNDS = 500
"""with statistics; as many without"""


def stretch_of(number: int) -> int:
    """Stretches begin half a stride before a measured round: what its norm leads to later is in the same one."""
    return (number - 1 - noise.STRIDE // 2) // STRETCH


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def clocked(model: str, rounds: int, workers: int = WORKERS) -> dict[int, float]:
    """CPU seconds of the process at the end of each round."""
    seen: dict[int, float] = {}
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
                        seen[run.round] = _cpu_s()
                    if run.round >= rounds or over.is_set():
                        over.set()
                        break

    due: Callable[[Any, int], bool] = noise.is_due

    def by_turns(known: Any, number: int) -> bool:
        return due(known, number) and (number <= WARM_UP or stretch_of(number) % 2 == 0)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with patch.object(noise, "is_due", by_turns):
            together(workers, script, timeout_s=1200.0)
    finally:
        torch.set_num_threads(threads)
    return seen


def added(seen: dict[int, float]) -> tuple[float, float, int]:
    """The share of a round that statistics add, half of its 95 % interval, and rounds with them."""
    ends = {stretch_of(number): at_s for number, at_s in seen.items() if stretch_of(number) < stretch_of(number + 1)}
    first = stretch_of(WARM_UP) + 1
    costs = {number: ends[number] - ends[number - 1] for number in ends if number >= first and number - 1 in ends}
    pairs = [(cost, costs[number + 1]) for number, cost in costs.items() if number % 2 == 0 and number + 1 in costs]
    usual = median(without for _, without in pairs)
    shares = [(with_ - without) / usual for with_, without in pairs]
    low, middle, high = quantiles(shares, n=4)
    # Medians: whatever else the machine does now and then costs one stretch, not the mean. The interval is a notch's.
    return middle, 1.57 * (high - low) / math.sqrt(len(shares)), STRETCH * len(shares)


def measure(repeats: int, models: tuple[str, ...], say: Callable[[str], None]) -> tuple[Trial, ...]:
    """Every repeat of every model."""
    trials: list[Trial] = []
    rounds = WARM_UP + 2 * STRETCH * (2 + -(-LEAST_ROUNDS // STRETCH))
    for repeat, model in itertools.product(range(repeats), models):
        share, half, count = added(clocked(model, rounds))
        trials.append(Trial("pliant", model, "statistics", repeat, {"added": share, "half": half, "rounds": count}))
        say(f"repeat {repeat}  {model:5}  statistics  {100 * share:+.2f} ± {100 * half:.2f} % of {count} rounds")
    return tuple(trials)
