"""The harvest: how much of four unequal workers' time a system turns into training.

Question  What part of the samples/s that the very same workers reach without communicating does each
          system reach with them as one group?
Holds     The limit is measured in the same repeat as the systems it is compared with. Within a repeat
          all systems meet the same clusters, redraws included; the order is turned round from one
          repeat to the next, so that a drift of the machine favours nobody.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.clusters import CLUSTERS, DRAWN, Plan, phases, solo_sum
from benchmarks.processes import SYSTEMS, Failure, run_set
from benchmarks.results import Figures, Run
from benchmarks.worker import Report

WORKERS = 4
# The batch that every system's learning rate is chosen for; each of them gets it in its own way.
BATCH = 256
MODELS = ("small", "large")
SYSTEM_NAMES = (
    "limit",
    "pliant_floating",
    "oracle",
    "pliant_fixed",
    "ddp",
    "accumulate",
    "local_sgd",
    "torchft",
)
# What the targets of each model compare closely: repeated most, and run side by side.
CLOSE = {
    "small": ("limit", "pliant_floating", "oracle", "pliant_fixed"),
    "large": ("limit", "pliant_floating", "oracle"),
}
SOLO_MS = ("40", "80", "160")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often and how long."""

    repeats: int
    far_repeats: int  # of the systems not compared closely
    far_models: tuple[str, ...]
    warm_up_s: float
    window_s: float
    drawn_s: float  # the redrawn cluster's window: it must hold several draws
    solo_repeats: int


FULL = Schedule(repeats=5, far_repeats=5, far_models=MODELS, warm_up_s=2.0, window_s=6.0, drawn_s=18.0, solo_repeats=5)
# No target of the small model names the rivals left out there: 26 sets of about 30 s on an idle machine are under a
# quarter of an hour. The warm-up holds the few rounds in which measured shares follow from one cluster to the next.
QUICK = Schedule(
    repeats=3, far_repeats=1, far_models=("large",), warm_up_s=1.7, window_s=2.2, drawn_s=6.4, solo_repeats=1
)


@dataclass(frozen=True, slots=True)
class Selection:
    """What is left of systems, models and clusters after ``--only``."""

    systems: tuple[str, ...]
    models: tuple[str, ...]
    clusters: tuple[str, ...]


def selection(only: list[str]) -> Selection:
    """Names of any kind narrow down their own kind; the limit is always measured."""
    every = SYSTEM_NAMES, MODELS, (*CLUSTERS, DRAWN)
    unknown = set(only) - {name for kind in every for name in kind}
    if unknown:
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    kept = [tuple(name for name in kind if name in only) or kind for kind in every]
    systems = kept[0] if "limit" in kept[0] else ("limit", *kept[0])
    return Selection(systems, kept[1], kept[2])


def order(chosen: Selection, model: str, repeat: int, schedule: Schedule) -> list[str]:
    """The systems of a repeat; the close ones turned round in every second."""
    close = [name for name in CLOSE[model] if name in chosen.systems]
    beside = model in schedule.far_models and repeat < schedule.far_repeats
    far = [name for name in chosen.systems if name not in close and beside]
    return close[::-1] + far if repeat % 2 else close + far


def plan_of(model: str, clusters: tuple[str, ...], repeat: int, schedule: Schedule) -> Plan:
    """All clusters in one run of the processes, one after another; the repeat seeds the redraws."""
    stretches = [
        (cluster, schedule.warm_up_s, schedule.drawn_s if cluster == DRAWN else schedule.window_s)
        for cluster in clusters
    ]
    return Plan(model, WORKERS, BATCH, phases(stretches, repeat))


def figures(reports: list[Report]) -> dict[str, Figures]:
    """The group's figures per cluster from its workers' counts."""
    found: dict[str, Figures] = {}
    for counts in zip(*(report.counts for report in reports), strict=True):
        found[counts[0].cluster] = Figures(
            samples_per_s=sum(count.samples / count.window_s for count in counts),
            updates_per_s=counts[0].updates / counts[0].window_s,
            idle=tuple(max(0.0, 1 - count.busy_s / count.window_s) for count in counts),
        )
    return found


def solo(model: str, clusters: tuple[str, ...], schedule: Schedule) -> list[Run]:
    """Σ of the workers' speeds when each has the machine to itself, one kind of device after another."""
    runs: list[Run] = []
    speeds: dict[float, float] = {}
    for repeat in range(schedule.repeats):
        if repeat < schedule.solo_repeats:
            stretches = [(ms, schedule.warm_up_s, schedule.window_s) for ms in SOLO_MS]
            reports = run_set(SYSTEMS["limit"], Plan(model, 1, BATCH, phases(stretches, repeat)))
            if isinstance(reports, Failure):
                runs.append(Run("solo", model, repeat, failure=reports.reason))
                continue
            speeds = {float(count.cluster): count.samples / count.window_s for count in reports[0].counts}
        plan = plan_of(model, clusters, repeat, schedule)
        sums = {phase.cluster: Figures(solo_sum(phase, WORKERS, speeds)) for phase in plan.phases}
        runs.append(Run("solo", model, repeat, sums))
    return runs


def measure(schedule: Schedule, chosen: Selection, say: Say) -> tuple[Run, ...]:
    """Every repeat of every system, failures included."""
    runs: list[Run] = []
    for model in chosen.models:
        runs += solo(model, chosen.clusters, schedule)
    for repeat in range(schedule.repeats):
        for model in chosen.models:
            for system in order(chosen, model, repeat, schedule):
                before = time.monotonic()
                outcome = run_set(SYSTEMS[system], plan_of(model, chosen.clusters, repeat, schedule))
                if isinstance(outcome, Failure):
                    run = Run(system, model, repeat, failure=outcome.reason)
                else:
                    run = Run(system, model, repeat, figures(outcome))
                runs.append(run)
                say(_line(run, time.monotonic() - before))
    return tuple(runs)


def _line(run: Run, seconds: float) -> str:
    speeds = "  ".join(f"{name} {found.samples_per_s:.0f}/s" for name, found in run.clusters.items())
    return f"repeat {run.repeat}  {run.model:5}  {run.system:15}  {run.failure or speeds}  ({seconds:.0f} s)"
