"""The lab's results as tables.

Holds     Every figure is computed from the seeds in the results; differences are paired with their 95 % interval.
"""

from collections.abc import Callable, Iterable
from statistics import fmean, stdev

from benchmarks.differences import difference
from benchmarks.lab import real, rules, theory, traces
from benchmarks.lab.delay import ACTS
from benchmarks.lab.points import METHODS
from benchmarks.results import Results
from benchmarks.sheet import Sheet

NOTHING = "–"


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _scatter(values: Iterable[float]) -> str:
    found = list(values)
    if not found:
        return NOTHING
    return f"{fmean(found):.2f}" + (f" ± {stdev(found):.2f}" if len(found) > 1 else "")


def compared(results: Results, system: str, rival: str, key: str, act: str) -> str:
    """Mean accuracy, and the paired difference to the rival with its interval."""
    ours = results.by_seed(system, key, act, "accuracy")
    if not ours:
        return NOTHING
    dead = sum(results.by_seed(system, key, act, "diverged").values())
    lost = f", {dead:.0f} of {len(ours)} diverged" if dead else ""
    between = difference(ours, results.by_seed(rival, key, act, "accuracy"))
    if system == rival or between is None:
        return f"{_scatter(ours.values())}{lost}"
    return f"{fmean(ours.values()):.2f} ({between}){lost}"


def _seeds(results: Results, key: str, acts: Iterable[str]) -> str:
    wanted = set(acts)
    counts = {
        len(results.by_seed(system, key, act, "accuracy"))
        for system, act in {(t.system, t.act) for t in results.trials if t.model == key and t.act in wanted}
    }
    return f"{min(counts)} to {max(counts)} seeds" if len(counts) > 1 else f"{max(counts, default=0)} seeds"


def _longer(results: Results, rule: str, key: str, act: str) -> str:
    used = results.by_seed(rule, key, act, "samples")
    usual = results.by_seed(rules.FIXED, key, act, "samples")
    return _scatter(used[seed] / usual[seed] for seed in used if usual.get(seed))


def _elastic(results: Results) -> list[Sheet]:
    found: list[Sheet] = []
    for key in _unique(trial.model for trial in results.trials):
        mine = [trial for trial in results.trials if trial.model == key]
        acts = [act for act in traces.TRACES if any(trial.act == act for trial in mine)]
        systems = [rule for rule in rules.NAMES if any(trial.system == rule for trial in mine)]
        names = tuple(traces.NAMES[act] for act in acts)
        seeds = _seeds(results, key, acts)
        rows = [
            (rules.NAMES[rule], *(compared(results, rule, rules.FIXED, key, act) for act in acts)) for rule in systems
        ]
        title = f"Accuracy in % (difference to the fixed reference batch in points [95 %]), {key}, {seeds}"
        found.append(Sheet(title, ("rule", *names), tuple(rows)))
        rows = []
        for rule in systems:
            peaks = [results.by_seed(rule, key, act, "peak") for act in acts]
            rows.append((rules.NAMES[rule], *(_scatter(peak.values()) for peak in peaks)))
        title = f"Worst loss after a rise of the batch ÷ loss before it, {key}, {seeds}"
        found.append(Sheet(title, ("rule", *names), tuple(rows)))
        rows = [
            (rules.NAMES[rule], *(_longer(results, rule, key, act) for act in acts))
            for rule in systems
            if rules.learns(rule)
        ]
        if rows:
            title = f"Samples until the schedule was through ÷ samples of the others, {key}, {seeds}"
            found.append(Sheet(title, ("rule", *names), tuple(rows)))
    return found


def _real(results: Results) -> list[Sheet]:
    rows = []
    for system, name in real.NAMES.items():
        values = [
            compared(results, system, rival, real.KEY, real.ACT) if system != rival else NOTHING
            for rival in (rules.FIXED, real.REPLAYED)
        ]
        own = results.by_seed(system, real.KEY, real.ACT, "accuracy")
        rows.append((name, _scatter(own.values()), *(value.partition(" ")[2] or NOTHING for value in values)))
    title = f"Accuracy in %, differences in points [95 %], {real.KEY}, {_seeds(results, real.KEY, [real.ACT])}"
    return [Sheet(title, ("", "accuracy", "to the fixed batch", "to the same rounds in one process"), tuple(rows))]


def _grid(results: Results, key: str, cells: list[str]) -> Sheet:
    shown = [method for method in METHODS if any(t.system == method and t.act in cells for t in results.trials)]
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        texts: list[str] = []
        for method in shown:
            values = results.by_seed(method, key, cell, "accuracy")
            dead = sum(results.by_seed(method, key, cell, "diverged").values())
            texts.append(_scatter(values.values()) + (f", {dead:.0f} of {len(values)} diverged" if dead else ""))
        rows.append((cell, *texts))
    title = f"Accuracy in % over η and μ, shares 96/96/48/16, {key}, {_seeds(results, key, cells)}"
    return Sheet(title, ("", *(METHODS[method] for method in shown)), tuple(rows))


def _delay(results: Results) -> list[Sheet]:
    found: list[Sheet] = []
    for key in _unique(trial.model for trial in results.trials):
        mine = [trial for trial in results.trials if trial.model == key]
        cells = _unique(trial.act for trial in mine if trial.act not in ACTS)
        if cells:
            found.append(_grid(results, key, cells))
        acts = [act for act in ACTS if any(trial.act == act for trial in mine)]
        methods = [one for one in METHODS if any(t.system == one and t.act in acts for t in mine)]
        if acts:
            rows = [
                (METHODS[one], *(compared(results, one, "synchronous", key, act) for act in acts)) for one in methods
            ]
            title = f"Accuracy in % (difference to delay 0 in points [95 %]), {key}, {_seeds(results, key, acts)}"
            found.append(Sheet(title, ("", *(ACTS[act] for act in acts)), tuple(rows)))
    return found


def _theory(results: Results) -> list[Sheet]:
    def figure(system: str, model: str, act: str, name: str) -> str:
        values = results.measured(system, model, act, name)
        return f"{values[0]:.3f}" if values else NOTHING

    found: list[Sheet] = []
    acts = _unique(trial.act for trial in results.trials if trial.model == "noise")
    if acts:
        columns = tuple(f"{name}, {what}" for name in theory.NOISE.values() for what in ("measured", "predicted"))
        rows = [
            (act, *(figure(rule, "noise", act, what) for rule in theory.NOISE for what in ("measured", "predicted")))
            for act in acts
        ]
        title = "Peak variance of the update ÷ its new steady state, batch 1 → k at fixed weights, μ 0.9"
        found.append(Sheet(title, ("", *columns), tuple(rows)))
    acts = _unique(trial.act for trial in results.trials if trial.model == "edge")
    if acts:
        rows = [
            (
                act,
                *(
                    f"{figure(m, 'edge', act, 'measured')} ({figure(m, 'edge', act, 'predicted')})"
                    for m in theory.EDGES
                ),
            )
            for act in acts
        ]
        title = "Largest stable ηλ on a quadratic: measured (derived)"
        found.append(Sheet(title, ("", *theory.EDGES.values()), tuple(rows)))
    acts = _unique(trial.act for trial in results.trials if trial.model == "unlike")
    if acts:
        rows = [(act, figure("lookahead", "unlike", act, "measured")) for act in acts]
        title = "Largest stable ηλ of look-ahead, two workers of unlike curvature λ, μ 0.9"
        found.append(Sheet(title, ("curvatures, of λ", "measured"), tuple(rows)))
    return found


SHEETS: dict[str, Callable[[Results], list[Sheet]]] = {
    "elastic-accuracy": _elastic,
    "elastic-processes": _real,
    "delay": _delay,
    "scaling-theory": _theory,
}
