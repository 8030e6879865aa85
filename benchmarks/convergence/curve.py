"""What a curve of accuracy over time says.

Question  When was the target accuracy reached, and what was reached in the end?
Holds     Pure functions. One lucky snapshot does not reach a target: the median of it and its neighbours counts.
          Between two snapshots time is interpolated, so that their distance does not round what is compared.
"""

from collections.abc import Sequence
from statistics import fmean, median

from benchmarks.results import Training

LAST = 3  # snapshots whose mean is the final accuracy


def smoothed(values: Sequence[float]) -> list[float]:
    """Each value's median with its two neighbours; an end has one neighbour, and the lower of both counts."""
    if len(values) < 2:
        return list(values)
    inner = [median(values[index - 1 : index + 2]) for index in range(1, len(values) - 1)]
    return [min(values[:2]), *inner, min(values[-2:])]


def seconds_to(training: Training, accuracy: float) -> float | None:
    """Training seconds until the smoothed accuracy first reached the target; None if it never did."""
    values = smoothed(training.accuracy)
    for index, value in enumerate(values):
        if value < accuracy:
            continue
        if index == 0:
            return training.seconds[0]
        before, since = values[index - 1], training.seconds[index - 1]
        return since + (training.seconds[index] - since) * (accuracy - before) / (value - before)
    return None


def final(training: Training) -> float | None:
    """The mean of the last snapshots: after equal samples for every system."""
    return fmean(training.accuracy[-LAST:]) if training.accuracy else None
