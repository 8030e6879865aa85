"""Which device each worker has, and when.

Question  How long does a micro-batch of 16 samples take on this worker's device right now?
Holds     Every process gives the same answer for the same moment, and every system meets the
          same schedule: draws depend only on the plan's seed, the time since the phase began and
          the worker.
Source    ours: the four clusters of the benchmark's issue.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

MICRO_BATCH = 16
REDRAW_S = 5.0
CHOICES_MS = (40.0, 80.0, 160.0)
CLUSTERS: dict[str, tuple[float, ...]] = {
    "a": (40.0, 40.0, 40.0, 40.0),
    "b": (40.0, 40.0, 80.0, 160.0),
    "c": (40.0, 40.0, 40.0, 160.0),
}
DRAWN = "d"
REAL = "real"  # no emulation: the device is the core itself


@dataclass(frozen=True, slots=True)
class Phase:
    """One cluster's stretch of a run, in seconds since the run's start; only the window is counted."""

    cluster: str
    begins_s: float
    window_s: float
    ends_s: float
    seed: int

    @property
    def length_s(self) -> float:
        return self.ends_s - self.window_s


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a worker process is told."""

    model: str
    workers: int
    batch: int
    phases: tuple[Phase, ...]

    @property
    def ends_s(self) -> float:
        return self.phases[-1].ends_s


def phases(stretches: list[tuple[str, float, float]], seed: int) -> tuple[Phase, ...]:
    """Phases one after another from (cluster, warm-up seconds, window seconds)."""
    laid: list[Phase] = []
    begins = 0.0
    for cluster, warm_up_s, window_s in stretches:
        ends = begins + warm_up_s + window_s
        laid.append(Phase(cluster, begins, begins + warm_up_s, ends, seed))
        begins = ends
    return tuple(laid)


@lru_cache(maxsize=4096)
def _draw(seed: int, segment: int, worker: int) -> float:
    return random.Random(f"{seed}:{segment}:{worker}").choice(CHOICES_MS)


def device_ms(phase: Phase, worker: int, now_s: float) -> float:
    """Milliseconds per 16 samples on ``worker`` at ``now_s`` (seconds since the run's start)."""
    if phase.cluster == REAL:
        return 0.0
    if phase.cluster == DRAWN:
        return _draw(phase.seed, int(max(now_s - phase.begins_s, 0.0) // REDRAW_S), worker)
    if phase.cluster in CLUSTERS:
        return CLUSTERS[phase.cluster][worker]
    return float(phase.cluster)  # "40", "80", "160": the solo runs


def phase_at(plan: Plan, now_s: float) -> Phase:
    """The phase of that moment; the first one before the start, the last one after the end."""
    for phase in plan.phases:
        if now_s < phase.ends_s:
            return phase
    return plan.phases[-1]


def solo_sum(phase: Phase, workers: int, speeds: dict[float, float]) -> float:
    """Σ of the workers' solo samples/s over the phase's window, from the speed of each kind of device."""
    steps = 1000 if phase.cluster == DRAWN else 1
    moments = [phase.window_s + phase.length_s * (step + 0.5) / steps for step in range(steps)]
    total = sum(speeds[device_ms(phase, worker, now)] for worker in range(workers) for now in moments)
    return total / steps
