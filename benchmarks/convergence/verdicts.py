"""Times to target accuracy, compared.

Question  By what factor is Pliant at the target accuracy before its best rival, on each cluster, and how sure is that?
Holds     Pure functions of results. Ratios are the rival's time ÷ ours, paired by seed; their median counts, as in the
          other benchmarks. The best rival of a cluster is the one with the smallest ratio; a rival that reached the
          target in no run is slower than all. One that was not run on a cluster is named, and one that crashed misses
          the target, as does a run of ours that never gets there.
"""

from dataclasses import dataclass

from benchmarks.convergence.curve import seconds_to
from benchmarks.ratios import Ratio, paired
from benchmarks.results import Results, Training


@dataclass(frozen=True, slots=True)
class Best:
    """A cluster's best rival and its time ÷ ours."""

    rival: str
    ratio: Ratio
    left_out: tuple[str, ...] = ()


def runs_of(results: Results, system: str, cluster: str) -> list[Training]:
    return [one for one in results.trainings if one.system == system and one.cluster == cluster]


def times(results: Results, system: str, cluster: str) -> dict[int, float]:
    """Seconds to the target accuracy by seed, of the seeds that reached it."""
    found = {one.seed: seconds_to(one, results.target_accuracy) for one in runs_of(results, system, cluster)}
    return {seed: seconds for seed, seconds in found.items() if seconds is not None}


def compared(results: Results, ours: str, theirs: str, cluster: str) -> Ratio | None:
    """Their time ÷ ours over common seeds."""
    return paired(times(results, theirs, cluster), times(results, ours, cluster))


def best_rival(results: Results, ours: str, rivals: tuple[str, ...], cluster: str) -> Best | str:
    """The best of them, or why there is none to compare with."""
    mine = runs_of(results, ours, cluster)
    if not mine:
        return f"{cluster}: {ours} not measured"
    for one in mine:
        if one.failure is not None:
            return f"{cluster}: {ours} failed: {one.failure}"
        if seconds_to(one, results.target_accuracy) is None:
            return f"{cluster}: {ours} never reached the target with seed {one.seed}"
    left_out = tuple(rival for rival in rivals if not runs_of(results, rival, cluster))
    ratios: dict[str, Ratio] = {}
    for rival in rivals:
        failures = [one.failure for one in runs_of(results, rival, cluster) if one.failure is not None]
        if failures:
            return f"{cluster}: {rival} failed: {failures[0]}"
        if ratio := compared(results, ours, rival, cluster):
            ratios[rival] = ratio
    if not ratios:
        return f"{cluster}: no rival measured, or none reached the target"
    best = min(ratios, key=lambda rival: ratios[rival].median)
    return Best(best, ratios[best], left_out)
