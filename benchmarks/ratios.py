"""Ratios of paired repeats.

Question  By what factor does one series exceed another, and how sure is that?
Holds     Only repeats that both series have are compared, each with its partner: a slow drift of the
          machine hits both and cancels. Means and intervals are taken over logarithms.
Source    Student's t interval on the mean of paired log ratios.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median, stdev

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the normal one is close.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
T_95_BEYOND = 2.2


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios and the 95 % interval of their geometric mean."""

    median: float
    low: float
    high: float
    pairs: int


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio | None:
    """The ratio ours ÷ theirs over common repeats; None without any. One pair has no bounded interval."""
    ratios = [ours[repeat] / theirs[repeat] for repeat in sorted(ours.keys() & theirs.keys()) if theirs[repeat] > 0]
    if not ratios or min(ratios) <= 0:
        return None
    if len(ratios) == 1:
        return Ratio(ratios[0], 0.0, math.inf, 1)
    logs = [math.log(ratio) for ratio in ratios]
    spread = T_95.get(len(logs) - 1, T_95_BEYOND) * stdev(logs) / math.sqrt(len(logs))
    centre = fmean(logs)
    return Ratio(median(ratios), math.exp(centre - spread), math.exp(centre + spread), len(ratios))
