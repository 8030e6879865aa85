"""Which training runs there are, how often each, and in which order.

Question  What does ``python -m benchmarks convergence`` measure?
Holds     Every system of a seed meets the same cluster, redraws, initial weights and order of samples. Seeds are the
          outer loop and the order of the systems is turned round from one seed to the next, so that a drift of the
          machine favours nobody. Where the slow network cannot be made, one line says so and the rest is measured.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.convergence import workload
from benchmarks.convergence.course import CLUSTERS, SLOW_NETWORK, Course
from benchmarks.convergence.curve import final, seconds_to
from benchmarks.convergence.network import Star, star
from benchmarks.convergence.running import train
from benchmarks.convergence.systems.names import SYSTEMS
from benchmarks.namespaces import NoNetwork
from benchmarks.results import Training

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many seeds, how long a run, and by which accuracy it is judged."""

    seeds: int
    images: int
    epochs: int
    every: int
    # What synchronous runs reach after about half of their samples, and Local SGD, the lowest in the end, before it.
    target_accuracy: float
    # With so many seeds those run that are far behind: where workers are unequal, equal shares are no contest.
    far_seeds: int


EQUAL_SHARES = ("ddp", "local_sgd", "torchft")
FAR = {"static": EQUAL_SHARES, "fluctuating": EQUAL_SHARES, "slow_network": ("torchft",)}
FULL = Schedule(seeds=5, images=10_240, epochs=3, every=1024, target_accuracy=0.825, far_seeds=1)
# 17 runs per seed of 27 to 60 s, and up to 10 s each to start, end and evaluate: 13 minutes on an idle machine.
QUICK = Schedule(seeds=2, images=6144, epochs=2, every=1024, target_accuracy=0.75, far_seeds=0)


@dataclass(frozen=True, slots=True)
class Selection:
    """What is left of systems and clusters after ``--only``."""

    systems: tuple[str, ...]
    clusters: tuple[str, ...]


def selection(only: list[str]) -> Selection:
    """Names of either kind narrow down their own kind."""
    every = tuple(SYSTEMS), CLUSTERS
    if unknown := set(only) - {name for kind in every for name in kind}:
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    systems, clusters = (tuple(name for name in kind if name in only) or kind for kind in every)
    return Selection(systems, clusters)


def order(chosen: Selection, cluster: str, seed: int, schedule: Schedule) -> list[str]:
    """The systems of one seed and cluster; turned round in every second seed."""
    far = FAR[cluster] if seed >= schedule.far_seeds else ()
    systems = [name for name in chosen.systems if name not in far]
    return systems[::-1] if seed % 2 else systems


def measure(schedule: Schedule, chosen: Selection, say: Say) -> tuple[Training, ...]:
    """Every run, failures included."""
    if trouble := workload.missing():
        raise ValueError(trouble)
    trainings: list[Training] = []
    with ExitStack() as stack:
        links: Star | None = None
        clusters = chosen.clusters
        if SLOW_NETWORK in clusters:
            try:
                links = stack.enter_context(star())
            except NoNetwork as error:
                say(f"{SLOW_NETWORK} is left out: {error}")
                clusters = tuple(name for name in clusters if name != SLOW_NETWORK)
        for seed in range(schedule.seeds):
            for cluster in clusters:
                course = Course(cluster, seed, schedule.images, schedule.epochs, schedule.every)
                for system in order(chosen, cluster, seed, schedule):
                    before = time.monotonic()
                    found = train(SYSTEMS[system], course, links if cluster == SLOW_NETWORK else None)
                    trainings.append(found)
                    say(_line(found, schedule.target_accuracy, time.monotonic() - before))
    return tuple(trainings)


def _line(training: Training, target: float, took_s: float) -> str:
    reached, end = seconds_to(training, target), final(training)
    told = training.failure or "nothing kept"
    if end is not None:
        when = "never reached" if reached is None else f"reached after {reached:.1f} s"
        told = f"{100 * target:.1f} % {when}, {100 * end:.2f} % after {training.seconds[-1]:.1f} s"
    return f"seed {training.seed}  {training.cluster:12}  {training.system:14}  {told}  ({took_s:.0f} s)"
