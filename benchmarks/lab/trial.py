"""A trained seed as an entry of the results."""

import math

from benchmarks.lab.trainer import Outcome
from benchmarks.results import Trial

DEAD = 0.98  # of the loss of a blind guess: such a model has learnt nothing
WORST = 99.0  # stands for a loss that is no number


def trial(system: str, key: str, act: str, outcome: Outcome, classes: int, peak: float | None = None) -> Trial:
    finite = math.isfinite(outcome.loss)
    diverged = not finite or outcome.loss >= DEAD * math.log(classes)
    figures = {
        "accuracy": round(outcome.accuracy, 3),
        "loss": round(min(outcome.loss, WORST), 4) if finite else WORST,
        "diverged": float(diverged),
        "samples": float(outcome.samples),
    }
    if peak is not None:
        figures["peak"] = round(peak, 3) if math.isfinite(peak) else WORST
    return Trial(system, key, act, outcome.seed, figures)
