"""Accuracy over time, one panel per cluster.

Holds     Drawn from a results file alone. Of each system the mean over its seeds is drawn, snapshot by snapshot; the
          dashed line is the target.
"""

from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.convergence.curve import smoothed
from benchmarks.convergence.systems.names import SYSTEMS
from benchmarks.convergence.verdicts import runs_of
from benchmarks.results import Results, Training

LABELS = {
    "pliant_auto": "Pliant, auto",
    "pliant_delay_1": "Pliant, delay 1",
    "pliant_delay_0": "Pliant, delay 0",
    "lb_bsp": "DDP, measured shares",
    "oracle": "DDP, oracle shares",
    "ddp": "DDP, equal shares",
    "local_sgd": "Local SGD",
    "torchft": "torchft",
}
WIDTH_IN, HEIGHT_IN = 4.0, 3.2  # of one panel
BELOW = 0.25  # how far the picture goes below the target


def middle(runs: list[Training]) -> tuple[list[float], list[float]]:
    """Mean seconds and mean smoothed accuracy of the snapshots that all seeds have."""
    whole = [one for one in runs if one.failure is None and one.samples]
    count = min((len(one.samples) for one in whole), default=0)
    curves = [smoothed(one.accuracy) for one in whole]
    seconds = [fmean(one.seconds[number] for one in whole) for number in range(count)]
    return seconds, [fmean(curve[number] for curve in curves) for number in range(count)]


def write(results: Results, picture: Path) -> None:
    """Draw into ``picture``; the ending chooses the format."""
    # By name: matplotlib is installed for the benchmarks only.
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "pliant", "font.size": 8})
    pyplot: Any = import_module("matplotlib.pyplot")
    clusters = list(dict.fromkeys(one.cluster for one in results.trainings))
    figure, panels = pyplot.subplots(
        1, len(clusters), figsize=(WIDTH_IN * len(clusters), HEIGHT_IN), sharey=True, squeeze=False
    )
    for panel, cluster in zip(panels[0], clusters, strict=True):
        for number, system in enumerate(SYSTEMS):
            seconds, accuracy = middle(runs_of(results, system, cluster))
            if seconds:
                ours = system.startswith("pliant")
                style = {"color": f"C{number}", "linewidth": 1.8 if ours else 1.0, "label": LABELS[system]}
                panel.plot(seconds, [100 * value for value in accuracy], **style)
        target = 100 * results.target_accuracy
        panel.axhline(target, color="grey", linewidth=0.8, linestyle="--")
        panel.set(title=cluster.replace("_", " "), xlabel="seconds of training")
        panel.set_ylim(bottom=max(target - 100 * BELOW, 0))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("test accuracy (%)")
    panels[0][-1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    pyplot.close(figure)
