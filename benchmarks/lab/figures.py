"""The lab's results as pictures.

Holds     A picture is made from a results file alone, and the same file gives the same picture.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.chaos import tables as chaos
from benchmarks.differences import difference
from benchmarks.lab import rules, theory, traces
from benchmarks.lab.delay import ACTS, THREE
from benchmarks.lab.points import METHODS
from benchmarks.results import Curve, Results

COLOURS = {
    "fixed": "#333333",
    "none": "#999999",
    "linear_at_once": "#d1603d",
    "sqrt_at_once": "#d1603d",
    "linear": "#2a6f97",
    "sqrt": "#2a6f97",
    "adascale": "#5b8e3e",
    "sqrt_moments": "#8d6bb1",
    "adascale_moments": "#5b8e3e",
    "synchronous": "#333333",
    "plain": "#d1603d",
    "lookahead": "#2a6f97",
    "momentum": "#c9a227",
}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "pliant", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8})
    from matplotlib import pyplot

    return pyplot


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _curves(results: Results, act: str, figure: str) -> list[Curve]:
    return [curve for curve in results.curves if curve.act == act and curve.figure == figure]


def _elastic(results: Results, pyplot: Any) -> Any:
    """For each trace the batch, the loss under every rule, and how far the accuracy ends from the truth."""
    acts = [act for act in traces.TRACES if any(trial.act == act for trial in results.trials)]
    key = results.trials[0].model
    picture, axes = pyplot.subplots(
        3, len(acts), figsize=(3 * len(acts), 5.6), squeeze=False, height_ratios=(1, 2, 1.6)
    )
    for column, act in enumerate(acts):
        above, middle, below = axes[:, column]
        for curve in _curves(results, act, "batch"):
            end = _curves(results, act, "loss")[0].places[-1]
            ks = [value / traces.REFERENCE for value in (*curve.values, curve.values[-1])]
            above.step([place / 1000 for place in (*curve.places, end)], ks, where="post", color="#333333")
        above.set_title(traces.NAMES[act])
        above.set_yscale("log", base=2)
        shown = [curve for curve in _curves(results, act, "loss") if curve.model == key]
        for curve in shown:
            places = [place / 1000 for place in curve.places]
            middle.plot(places, curve.values, color=COLOURS[curve.system], lw=0.8, label=rules.NAMES[curve.system])
        middle.set_ylim(0.2, 0.9)
        middle.set_xlabel("thousand samples")
        names = [curve.system for curve in shown if curve.system != rules.FIXED]
        truth = results.by_seed(rules.FIXED, key, act, "accuracy")
        for row, name in enumerate(names):
            found = difference(results.by_seed(name, key, act, "accuracy"), truth)
            if found is not None:
                half = found.high - found.mean
                below.errorbar(found.mean, -row, xerr=half, fmt="o", ms=3, capsize=2, color=COLOURS[name])
        below.axvline(0.0, color="#333333", lw=0.8)
        below.set_yticks(
            [-row for row in range(len(names))], [rules.NAMES[name] for name in names] if not column else []
        )
        below.set_xlabel("points from the fixed batch")
    axes[0][0].set_ylabel("batch ÷ reference")
    axes[1][0].set_ylabel("training loss")
    axes[1][0].legend(frameon=False)
    return picture


def _delay(results: Results, pyplot: Any) -> Any:
    """Accuracy over the rate for each momentum, and the settings at the best rate."""
    key = results.trials[0].model
    cells = [act for act in dict.fromkeys(trial.act for trial in results.trials) if act not in ACTS]
    momenta = list(dict.fromkeys(cell.split(" η ")[0] for cell in cells))
    picture, axes = pyplot.subplots(1, len(momenta) + 1, figsize=(3 * (len(momenta) + 1), 2.8), squeeze=False)
    for momentum, axis in zip(momenta, axes[0], strict=False):
        mine = [cell for cell in cells if cell.startswith(momentum + " ")]
        rates = [float(cell.split(" η ")[1]) for cell in mine]
        for method in THREE:
            values = [list(results.by_seed(method, key, cell, "accuracy").values()) for cell in mine]
            axis.plot(rates, [fmean(v) for v in values], "o-", ms=3, color=COLOURS[method], label=METHODS[method])
        axis.set_xscale("log", base=2)
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.set_title(momentum)
        axis.set_xlabel("η")
    if momenta:
        axes[0][0].set_ylabel("accuracy, %")
        axes[0][0].legend(frameon=False)
    last = axes[0][-1]
    acts = [act for act in ACTS if any(trial.act == act for trial in results.trials)]
    for row, act in enumerate(acts):
        truth = results.by_seed("synchronous", key, act, "accuracy")
        found = difference(results.by_seed("lookahead", key, act, "accuracy"), truth)
        if found is not None:
            half = found.high - found.mean
            last.errorbar(found.mean, -row, xerr=half, fmt="o", ms=3, capsize=2, color=COLOURS["lookahead"])
    last.axvline(0.0, color="#333333", lw=0.8)
    last.set_yticks([-row for row in range(len(acts))], [ACTS[act] for act in acts])
    last.set_xlabel("look-ahead − delay 0, points")
    return picture


def _theory(results: Results, pyplot: Any) -> Any:
    """The variance of the update after the change: measured (dots) and predicted (lines)."""
    acts = list(dict.fromkeys(curve.act for curve in results.curves))
    picture, axes = pyplot.subplots(1, len(acts), figsize=(3 * len(acts), 2.4), squeeze=False)
    for act, axis in zip(acts, axes[0], strict=True):
        for rule, name in theory.NOISE.items():
            for curve in results.curves:
                if (curve.system, curve.act) == (rule, act):
                    style = {"ls": "-"} if curve.figure == "predicted" else {"ls": "", "marker": ".", "ms": 3}
                    axis.plot(curve.places, curve.values, color=COLOURS[rule], label=f"{name}, {curve.figure}", **style)
        axis.set_title(act)
        axis.set_xlabel("rounds after the change")
    axes[0][0].set_ylabel("variance ÷ new steady state")
    axes[0][-1].legend(frameon=False)
    return picture


DRAWN = {"elastic-accuracy": _elastic, "delay": _delay, "scaling-theory": _theory, "chaos": chaos.draw}


def draw(results: Results, file: Path) -> None:
    """Write the picture of these results."""
    pyplot = _pyplot()
    picture = DRAWN[results.benchmark](results, pyplot)
    for axis in picture.axes:
        _bare(axis)
    picture.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(picture)
