"""What a disturbance did to the others.

Question  How long after it was the next update applied, how much longer than usual did anyone wait, and how much time
          was lost?
Holds     Pure functions of the processes' stamps. A round that everybody had handed in before a kill completes without
          any recovery and is not counted: the next update is the first one of a later era that goes beyond all that
          the survivors had before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.recovery.stamps import Step, Trace, View

USUAL_S = 2.0  # so much time before a disturbance tells what is usual
HELD_UP = 2.0  # usual gaps: an update that takes longer was held up
FEW = 5  # gaps of an era: fewer do not tell what is usual in it


@dataclass(frozen=True, slots=True)
class Update:
    """A process saw that the group had moved on."""

    at_s: float
    view: View


def updates(steps: Iterable[Step]) -> list[Update]:
    """Where the progress grew: while the process waited for its next micro-batch, or in its step."""
    found: list[Update] = []
    last: int | None = None
    for step in steps:
        if last is not None and step.before.progress > last:
            found.append(Update(step.begins_s, step.before))
        if step.after.progress > step.before.progress:
            found.append(Update(step.ends_s, step.after))
        last = step.after.progress
    return found


def era_before(traces: Iterable[Trace], at_s: float) -> int:
    """The latest era any of them had seen by then."""
    return max((step.after.era for trace in traces for step in trace.steps if step.ends_s <= at_s), default=0)


def next_update_s(others: Sequence[Trace], at_s: float, *, resumes_lower: bool = False) -> float | None:
    """Seconds from ``at_s`` to the first update of a later era.

    ``resumes_lower``: training goes on from a checkpoint, so that progress falls back first and any update counts.
    """
    era = era_before(others, at_s)
    seen = [view for trace in others for step in trace.steps for view in (step.before, step.after)]
    floor = -1 if resumes_lower else max((view.progress for view in seen if view.era <= era), default=-1)
    times = [
        update.at_s - at_s
        for trace in others
        for update in updates(trace.steps)
        if update.at_s > at_s and update.view.era > era and update.view.progress > floor
    ]
    return min(times, default=None)


def gaps(trace: Trace, begins_s: float, ends_s: float) -> list[float]:
    """Times between updates, of all such pairs that overlap the window."""
    times = [update.at_s for update in updates(trace.steps)]
    pairs = pairwise(times)
    return [after - before for before, after in pairs if after > begins_s and before < ends_s]


def usual_gap_s(trace: Trace, before_s: float) -> float:
    """The median time between updates in the last seconds before."""
    found = gaps(trace, before_s - USUAL_S, before_s)
    return median(found) if found else 0.0


def longest_gap(others: Sequence[Trace], begins_s: float, ends_s: float, usual_before_s: float) -> tuple[float, float]:
    """The longest time between updates on any of them in the window, in seconds and in usual gaps."""
    longest = [
        (max(gaps(trace, begins_s, ends_s), default=0.0), usual_gap_s(trace, usual_before_s)) for trace in others
    ]
    return max(gap for gap, _ in longest), max(gap / usual for gap, usual in longest if usual > 0)


def lost_s(trace: Trace, begins_s: float, ends_s: float, usual_before_s: float) -> float:
    """Time between micro-batches (in the system's calls) in the window beyond what is usual for as many of them."""

    def between(begins: float, ends: float) -> list[float]:
        pairs = pairwise(trace.steps)
        return [after.begins_s - step.computed_s for step, after in pairs if begins < after.begins_s <= ends]

    usual, window = between(usual_before_s - USUAL_S, usual_before_s), between(begins_s, ends_s)
    return sum(window) - len(window) * sum(usual) / max(len(usual), 1)


def idle_s(
    trace: Trace,
    idle: dict[int, float],
    begins_s: float,
    ends_s: float,
    usual_before_s: float,
    turns_s: float | None = None,
) -> float:
    """The same from the journal: ``idle`` is this worker's idle time by the progress after each round.

    ``turns_s``: from then on the group is another one; what is usual for it is taken from the time after the window.
    """

    def told(begins: float, ends: float) -> list[float]:
        seen = [update.view.progress for update in updates(trace.steps) if begins < update.at_s <= ends]
        return [idle[progress] for progress in seen if progress in idle]

    def beyond(window: list[float], usual: list[float]) -> float:
        return sum(window) - len(window) * sum(usual) / max(len(usual), 1)

    before = told(usual_before_s - USUAL_S, usual_before_s)
    if turns_s is None:
        return beyond(told(begins_s, ends_s), before)
    after = told(ends_s, ends_s + USUAL_S)
    return beyond(told(begins_s, turns_s), before) + beyond(told(turns_s, ends_s), after)


def _usual_gaps_s(seen: Sequence[Update]) -> dict[int, float]:
    """The median time between updates of each era; of one with too few that of the era before."""
    by_era: dict[int, list[float]] = {}
    for before, after in pairwise(seen):
        found = by_era.setdefault(before.view.era, [])
        if after.view.era == before.view.era:
            found.append(after.at_s - before.at_s)
    usual: dict[int, float] = {}
    last_s = 0.0
    for era, found in by_era.items():
        last_s = median(found) if len(found) >= FEW or (not last_s and found) else last_s
        usual[era] = last_s
    return usual


def held_up_s(trace: Trace, begins_s: float, ends_s: float) -> float:
    """How much longer than usual this process waited for updates in the window, of those that took twice as long.

    What is usual is the median of the era in which the wait began. Smaller differences are how any two rounds differ:
    over a minute they add up to seconds, whatever happens. What a group of fewer workers takes longer for a round is
    no loss.
    """
    seen = updates(trace.steps)
    usual = _usual_gaps_s(seen)
    waits = [(after.at_s - before.at_s, usual[before.view.era], before, after) for before, after in pairwise(seen)]
    return sum(
        gap - usually
        for gap, usually, before, after in waits
        if after.at_s > begins_s and before.at_s < ends_s and gap > HELD_UP * usually
    )


def pace(traces: Iterable[Trace], begins_s: float, ends_s: float) -> float:
    """Samples per second that they computed in the window."""
    done = sum(step.samples for trace in traces for step in trace.steps if begins_s < step.computed_s <= ends_s)
    return done / (ends_s - begins_s)
