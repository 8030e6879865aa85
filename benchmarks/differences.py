"""Differences of paired seeds.

Question  By how many points does one series exceed another, and how sure is that?
Holds     Only seeds that both series have are compared, each with itself: the same initial weights, the same order of
          samples.
Source    Student's t interval on the mean of paired differences; its quantile from Cornish and Fisher's expansion,
          right to 0.001 from ten degrees of freedom on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.ratios import T_95

NORMAL = 1.959964


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of paired differences, its 95 % interval, and the scatter of one pair."""

    mean: float
    low: float
    high: float
    pairs: int
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def quantile(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    if degrees in T_95:
        return T_95[degrees]
    z = NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Ours − theirs over common seeds; None without any. One pair has no bounded interval."""
    found = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not found:
        return None
    if len(found) == 1:
        return Difference(found[0], -math.inf, math.inf, 1, 0.0)
    centre, deviation = fmean(found), stdev(found)
    half = quantile(len(found) - 1) * deviation / math.sqrt(len(found))
    return Difference(centre, centre - half, centre + half, len(found), deviation)
