"""Whether the targets are met.

Question  Which targets do these results meet, and by what?
Holds     A pure function of results and targets. A target speaks about every cluster and rival it
          names, and the worst of them decides. What was not measured is missed, with the reason; what
          was left out by ``--only`` is judged in no way. A rival that crashed cannot be compared with:
          that is said, and the target is missed.
"""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import msgspec

from benchmarks.convergence.tables import ratio_text
from benchmarks.convergence.verdicts import Best, best_rival
from benchmarks.differences import difference
from benchmarks.ratios import paired
from benchmarks.results import Figures, Results

FILE = Path(__file__).with_name("targets.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One line of targets.toml."""

    benchmark: str
    kind: str
    name: str
    system: str
    rivals: tuple[str, ...] = ()
    model: str = ""
    clusters: tuple[str, ...] = ()
    at_least: float = 0.0
    at_most: float = math.inf
    margin: float = 0.0
    slack: float = 0.0
    act: str = ""
    acts: tuple[str, ...] = ()
    figure: str = ""
    of: str = "worst"  # of the trials: "worst", "median" or "mean"


@dataclass(frozen=True, slots=True)
class Targets:
    """The whole file."""

    target: tuple[Target, ...]
    condition: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target's outcome; ``detail`` is the measured value, or why there is none."""

    name: str
    met: bool
    detail: str


@dataclass(frozen=True, slots=True)
class _Found:
    """One comparison of a target: how far above its bound (negative: below), and in words."""

    above: float
    text: str


def read_targets(file: Path = FILE) -> Targets:
    return msgspec.convert(tomllib.loads(file.read_text()), Targets)


def _speeds(series: dict[int, Figures]) -> dict[int, float]:
    return {repeat: found.samples_per_s for repeat, found in series.items()}


def _missing(results: Results, model: str, *systems: str) -> _Found:
    for system in systems:
        if failures := results.failures(system, model):
            return _Found(-math.inf, f"{system} failed: {failures[0]}")
    return _Found(-math.inf, "not measured")


def harvest_of(results: Results, system: str, model: str, cluster: str) -> float | None:
    """The median over repeats of the system's samples/s ÷ the limit's."""
    limit = _speeds(results.series("limit", model, cluster))
    ratio = paired(_speeds(results.series(system, model, cluster)), limit)
    return None if ratio is None else ratio.median


def _harvest(results: Results, target: Target, cluster: str) -> list[_Found]:
    value = harvest_of(results, target.system, target.model, cluster)
    if value is None:
        return [_missing(results, target.model, target.system, "limit")]
    return [_Found(value - target.at_least, f"{cluster} {value:.3f}")]


def _not_below(results: Results, target: Target, cluster: str) -> list[_Found]:
    ours = harvest_of(results, target.system, target.model, cluster)
    theirs = harvest_of(results, target.rivals[0], target.model, cluster)
    if ours is None or theirs is None:
        return [_missing(results, target.model, target.system, *target.rivals)]
    return [_Found(ours - theirs + target.margin, f"{cluster} {ours:.3f} against {theirs:.3f}")]


def _compared(results: Results, target: Target, cluster: str) -> list[_Found]:
    """The ratio to each rival: of samples/s, of updates/s, or its interval's lower end."""
    found: list[_Found] = []
    ours = results.series(target.system, target.model, cluster)
    for rival in target.rivals:
        theirs = results.series(rival, target.model, cluster)
        if target.kind == "updates":
            ratio = paired(
                {repeat: figures.updates_per_s for repeat, figures in ours.items()},
                {repeat: figures.updates_per_s for repeat, figures in theirs.items()},
            )
        else:
            ratio = paired(_speeds(ours), _speeds(theirs))
        if ratio is None:
            found.append(_missing(results, target.model, target.system, rival))
            continue
        value = ratio.low if target.kind == "interval" else ratio.median
        interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.pairs > 1 else ""
        found.append(_Found(value - target.at_least, f"{cluster} {ratio.median:.3f}{interval} × {rival}"))
    return found


def _memory(results: Results, target: Target) -> list[_Found]:
    by_name = {memory.system: memory for memory in results.memory}
    pair = [by_name.get(name) for name in (target.system, *target.rivals)]
    if pair[0] is None or pair[1] is None:
        return [_Found(-math.inf, "not measured")]
    for memory in pair:
        if memory is not None and memory.failure is not None:
            return [_Found(-math.inf, f"{memory.system} failed: {memory.failure}")]
    copies = (pair[0].tensor_bytes - pair[1].tensor_bytes) / pair[1].copy_bytes
    return [_Found(target.at_most + target.slack - copies, f"{copies:.3f} copies")]


def _no_trial(results: Results, target: Target, system: str) -> _Found:
    refusals = results.refusals(system, target.model, target.act)
    return _Found(-math.inf, f"{system} failed: {refusals[0]}" if refusals else f"{system}: not measured")


def _bounded(results: Results, target: Target) -> list[_Found]:
    """A figure of all trials of an act; one that failed misses the target."""
    values = results.measured(target.system, target.model, target.act, target.figure)
    if not values or results.refusals(target.system, target.model, target.act):
        return [_no_trial(results, target, target.system)]
    value = {"worst": max, "median": median, "mean": fmean}[target.of](values)
    beside = f"worst {max(values):.3f}" if target.of != "worst" else f"median {median(values):.3f}"
    return [_Found(target.at_most + target.slack - value, f"{target.of} {value:.3f} of {len(values)} ({beside})")]


def _faster(results: Results, target: Target) -> list[_Found]:
    """The rival's median ÷ ours; trials are not paired, each has its own moment."""
    found: list[_Found] = []
    ours = results.measured(target.system, target.model, target.act, target.figure)
    for rival in target.rivals:
        theirs = results.measured(rival, target.model, target.act, target.figure)
        if not ours or not theirs:
            found.append(_no_trial(results, target, target.system if not ours else rival))
            continue
        ratio = median(theirs) / median(ours)
        text = f"{ratio:.1f} × ({median(ours):.3f} s against {median(theirs):.3f} s of {rival})"
        found.append(_Found(ratio - target.at_least, text))
    return found


def _points(results: Results, target: Target) -> list[_Found]:
    """The paired difference to each rival under each act: its mean, or the lower end of its interval."""
    found: list[_Found] = []
    for act in target.acts:
        ours = results.by_seed(target.system, target.model, act, target.figure)
        for rival in target.rivals:
            theirs = results.by_seed(rival, target.model, act, target.figure)
            between = difference(ours, theirs)
            if between is None:
                found.append(_Found(-math.inf, f"{act} not measured"))
                continue
            value = between.low if target.kind == "points_low" else between.mean
            found.append(_Found(value - target.at_least, f"{act} {between}"))
    return found


def _best_rivals(results: Results, target: Target) -> tuple[dict[str, Best], list[_Found]]:
    """The best rival of each cluster; where there is none, what misses the target."""
    best: dict[str, Best] = {}
    troubles: list[_Found] = []
    for cluster in target.clusters:
        found = best_rival(results, target.system, target.rivals, cluster)
        if isinstance(found, str):
            troubles.append(_Found(-math.inf, found))
        else:
            best[cluster] = found
    return best, troubles


def _told(cluster: str, best: Best) -> str:
    left_out = f" (not run: {', '.join(best.left_out)})" if best.left_out else ""
    return f"{cluster} {ratio_text(best.ratio)} by {best.rival}{left_out}"


def _sooner_on_average(results: Results, target: Target) -> list[_Found]:
    """The best rival's time to target ÷ ours, averaged over the clusters; each is shown."""
    best, troubles = _best_rivals(results, target)
    if troubles:
        return troubles
    mean = fmean(one.ratio.median for one in best.values())
    told = ", ".join(_told(cluster, one) for cluster, one in best.items())
    return [_Found(mean - target.at_least, f"{mean:.3f} on average: {told}")]


def _sooner(results: Results, target: Target) -> list[_Found]:
    """The same on every cluster: its median, or (``sooner_for_sure``) its interval's lower end."""
    best, troubles = _best_rivals(results, target)
    for_sure = target.kind == "sooner_for_sure"
    values = {cluster: one.ratio.low if for_sure else one.ratio.median for cluster, one in best.items()}
    return troubles + [_Found(values[name] - target.at_least, _told(name, one)) for name, one in best.items()]


def verdict(results: Results, target: Target) -> Verdict:
    """The worst of the target's comparisons decides; all are shown."""
    rules = {"harvest": _harvest, "not_below": _not_below}
    whole = {
        "memory": _memory,
        "bounded": _bounded,
        "faster": _faster,
        "points": _points,
        "points_low": _points,
        "sooner_on_average": _sooner_on_average,
        "sooner": _sooner,
        "sooner_for_sure": _sooner,
    }
    if target.kind in whole:
        found = whole[target.kind](results, target)
    else:
        rule = rules.get(target.kind, _compared)
        found = [one for cluster in target.clusters for one in rule(results, target, cluster)]
    met = min(one.above for one in found) >= 0
    return Verdict(target.name, met, ", ".join(dict.fromkeys(one.text for one in found)))


def judge(results: Results, targets: tuple[Target, ...], asked: frozenset[str] | None = None) -> list[Verdict]:
    """One verdict per target of this benchmark; ``asked`` leaves out targets on what was not asked for."""
    mine = [target for target in targets if target.benchmark == results.benchmark]
    if asked is not None:
        mine = [target for target in mine if _names(target) <= asked]
    return [verdict(results, target) for target in mine]


def _names(target: Target) -> set[str]:
    single = (name for name in (target.model, target.act) if name)
    return {target.system, *target.rivals, *target.clusters, *target.acts, *single}


def middle(series: dict[int, Figures], of: str) -> float | None:
    """The median over repeats of one figure."""
    values = [getattr(figures, of) for figures in series.values()]
    return median(values) if values else None
