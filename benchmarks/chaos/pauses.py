"""How long the training stood still.

Question  How much time lay between two updates around each fault?
Holds     Pure functions of the workers' stamps. An update counts when the first worker is seen to have applied it.
          After a total loss the samples fall back to the checkpoint's; what is computed again counts as updates too.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.chaos.deeds import Done

AFTER_S = 3.0
"""A fault's consequences begin within this time after it, and after it was put right."""


def stamps(directory: Path) -> list[tuple[float, int, int]]:
    """When any worker saw how many samples in which era, in the order of time."""
    found: list[tuple[float, int, int]] = []
    for path in directory.glob("stamps-*"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 4:
                found.append((float(words[0]), int(words[1]), int(words[2])))
    return sorted(found)


def updates(seen: Iterable[tuple[float, int, int]]) -> list[tuple[float, int]]:
    """When the group first had so many samples; a later era that has fewer begins anew from there."""
    found: list[tuple[float, int]] = []
    best, last_era = 0, 0
    for at_s, era, samples in seen:
        if era > last_era:
            last_era, best = era, min(best, samples)
        if samples > best and era == last_era:
            best = samples
            found.append((at_s, samples))
    return found


def gaps(times: Sequence[float]) -> list[tuple[float, float]]:
    """Where each time between two updates begins and ends."""
    return list(pairwise(times))


def pause_s(fault: Done, times: Sequence[float], until_s: float) -> float:
    """The longest time between two updates that the fault may be to blame for; nothing after ``until_s`` is."""
    ends = min(fault.at_s + fault.held_s + AFTER_S, max(until_s, fault.at_s + AFTER_S))
    return max((b - a for a, b in gaps(times) if b > fault.at_s and a < ends), default=math.nan)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]
