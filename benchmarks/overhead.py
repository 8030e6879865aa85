"""The overhead: what Pliant costs where there is nothing to gain.

Question  How fast is one worker beside a plain PyTorch loop, two equal ones beside DDP on both cores,
          how much memory do the tensors take beyond the plain loop's, and what do statistics add to a round?
Holds     No device is emulated. Systems that are compared run one right after the other, in turn.
"""

import time
from dataclasses import dataclass

from benchmarks import statistics
from benchmarks.clusters import REAL, Plan, phases
from benchmarks.harvest import Say, figures
from benchmarks.processes import SYSTEMS, Failure, run_set
from benchmarks.results import Memory, Run, Trial

ALONE = ("plain", "pliant_alone")
PAIR = ("ddp", "pliant_fixed", "pliant_floating")
MEMORY = ("memory_plain", "memory_none", "memory_lookahead")
PAIR_MODEL = "large"
ALONE_BATCH = 64
PAIR_BATCH = 64


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often and how long."""

    alone_repeats: int
    pair_repeats: int
    statistics_repeats: int
    warm_up_s: float
    window_s: float


FULL = Schedule(alone_repeats=9, pair_repeats=7, statistics_repeats=3, warm_up_s=2.0, window_s=8.0)
QUICK = Schedule(alone_repeats=5, pair_repeats=5, statistics_repeats=1, warm_up_s=1.0, window_s=4.0)


def selection(only: list[str]) -> tuple[str, ...]:
    """Which of the four parts to measure."""
    parts = ("alone", "pair", "memory", "statistics")
    if unknown := set(only) - set(parts):
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    return tuple(part for part in parts if part in only) or parts


def _run(system: str, plan: Plan, repeat: int, say: Say) -> Run:
    before = time.monotonic()
    outcome = run_set(SYSTEMS[system], plan)
    seconds = time.monotonic() - before
    if isinstance(outcome, Failure):
        run = Run(system, plan.model, repeat, failure=outcome.reason)
    else:
        run = Run(system, plan.model, repeat, figures(outcome))
    speeds = "  ".join(f"{found.samples_per_s:.0f}/s" for found in run.clusters.values())
    say(f"repeat {repeat}  {plan.model:5}  {system:15}  {run.failure or speeds}  ({seconds:.0f} s)")
    return run


def measure(schedule: Schedule, parts: tuple[str, ...], say: Say) -> tuple[Run, ...]:
    """Every repeat of the speeds."""
    stretch = phases([(REAL, schedule.warm_up_s, schedule.window_s)], 0)
    runs: list[Run] = []
    for repeat in range(schedule.alone_repeats if "alone" in parts else 0):
        for model in ("small", "large"):
            plan = Plan(model, 1, ALONE_BATCH, stretch)
            runs += [_run(system, plan, repeat, say) for system in ALONE]
    for repeat in range(schedule.pair_repeats if "pair" in parts else 0):
        plan = Plan(PAIR_MODEL, 2, PAIR_BATCH, stretch)
        runs += [_run(system, plan, repeat, say) for system in PAIR]
    return tuple(runs)


def measure_statistics(schedule: Schedule, parts: tuple[str, ...], say: Say) -> tuple[Trial, ...]:
    """What the norms and estimates of the gradient's noise cost."""
    return statistics.measure(schedule.statistics_repeats, ("small", "large"), say) if "statistics" in parts else ()


def measure_memory(schedule: Schedule, parts: tuple[str, ...], say: Say) -> tuple[Memory, ...]:
    """The plain loop alone, then two workers under Pliant; the larger of the two counts."""
    found: list[Memory] = []
    stretch = phases([(REAL, schedule.warm_up_s, schedule.window_s)], 0)
    for system in MEMORY if "memory" in parts else ():
        workers = 1 if system == "memory_plain" else 2
        outcome = run_set(SYSTEMS[system], Plan("large", workers, PAIR_BATCH, stretch))
        if isinstance(outcome, Failure):
            found.append(Memory(system, failure=outcome.reason))
        else:
            notes = {name: max(report.notes[name] for report in outcome) for name in outcome[0].notes}
            found.append(Memory(system, notes["tensor_bytes"], notes["resident_bytes"], notes["copy_bytes"]))
        say(f"memory  {system:16}  {found[-1].failure or f'{found[-1].tensor_bytes / 1e6:.0f} MB of tensors'}")
    return tuple(found)
