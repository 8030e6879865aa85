"""Chaos as tables and as a picture.

Holds     Made from a results file alone.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.chaos.faults import NAMES
from benchmarks.chaos.pauses import percentile
from benchmarks.results import Results
from benchmarks.sheet import Sheet

SYSTEM, MODEL, ACT = "pliant", "digits", "chaos"

CHECKS = (
    ("problems", "problems that `pliant audit` found"),
    ("finished", "workers that came to the end"),
    ("other_weights", "of these, weights other than the first one's"),
    ("replay", "`pliant replay`: largest relative difference of weights"),
    ("replay_tickets", "the same of weights and tickets"),
    ("left_processes", "processes left behind"),
    ("left_sockets", "sockets left listening"),
    ("left_files", "files left behind"),
    ("launcher_descriptors", "open descriptors of the launcher, second half − first half"),
    ("worker_descriptors", "the same of the worst worker that lived for a minute"),
    ("accuracy", "accuracy (%)"),
    ("low", "95 % of undisturbed runs: from (%)"),
    ("high", "to (%)"),
)
COUNTS = (
    ("minutes", "minutes"),
    ("faults", "faults"),
    ("nothing", "drawn faults that found nobody to hit"),
    ("rounds", "rounds"),
    ("samples", "samples"),
    ("eras", "eras"),
    ("names", "workers that there ever were"),
    ("terms", "coordinators"),
    ("gap_median_s", "usual time between updates (s)"),
    ("gap_worst_s", "longest time between updates (s)"),
    ("journal_mb", "journal (MB)"),
)


def _number(value: float) -> str:
    return (
        f"{value:.0f}"
        if value == int(value) and abs(value) < 1e9
        else f"{value:.3g}"
        if abs(value) < 1e-3
        else f"{value:.2f}"
    )


def _pauses(results: Results, kinds: Sequence[str]) -> list[float]:
    return [value for kind in kinds for value in results.measured(SYSTEM, MODEL, kind, "pause_s")]


def sheets(results: Results) -> list[Sheet]:
    """What was done and how long the training stood still; what was found afterwards."""
    present = [kind for kind in NAMES if any(trial.act == kind for trial in results.trials)]
    rows: list[tuple[str, ...]] = []
    for name, kinds in [*((NAMES[kind], [kind]) for kind in present), ("all", present)]:
        found = _pauses(results, kinds)
        count = sum(trial.act in kinds for trial in results.trials)
        shown = (median(found), percentile(found, 0.95), max(found)) if found else ()
        rows.append((name, str(count), *(f"{value:.2f}" for value in shown), *("–" for _ in range(3 - len(shown)))))
    columns = ("fault", "times", "median pause (s)", "95 % (s)", "worst (s)")
    told = (
        [Sheet("Faults, and the longest time between two updates around each", columns, tuple(rows))] if present else []
    )
    whole = [trial for trial in results.trials if trial.act == ACT and trial.system == SYSTEM]
    for trial in whole:
        if trial.failure is not None:
            told.append(Sheet("The run", ("", ""), (("failed", trial.failure),)))
            continue
        for title, names in (("The run", COUNTS), ("Afterwards", CHECKS)):
            cells = [
                (text, _number(trial.figures[name]) if name in trial.figures else "not run") for name, text in names
            ]
            told.append(Sheet(title, ("", ""), tuple(cells)))
    return told


def draw(results: Results, pyplot: Any) -> Any:
    """Samples over time with every fault as a mark; the pauses of each kind."""
    present = [kind for kind in NAMES if any(trial.act == kind for trial in results.trials)]
    picture, (above, below) = pyplot.subplots(2, 1, figsize=(9, 5.5), height_ratios=(1, 1.4))
    for curve in results.curves:
        above.plot(
            [place / 60 for place in curve.places], [value / 1000 for value in curve.values], color="#333333", lw=1
        )
    above.set_xlabel("minutes")
    above.set_ylabel("thousand samples")
    for row, kind in enumerate(present):
        marks = [trial.figures["at_s"] / 60 for trial in results.trials if trial.act == kind]
        heights = [0.02 + 0.05 * row] * len(marks)
        above.plot(marks, heights, "|", ms=4, color=f"C{row % 10}", transform=above.get_xaxis_transform())
        found = _pauses(results, [kind])
        below.plot(found, [-row] * len(found), "o", ms=3, alpha=0.5, color=f"C{row % 10}")
    below.set_xscale("log")
    below.set_yticks([-row for row in range(len(present))], [NAMES[kind].replace("`", "") for kind in present])
    below.set_xlabel("longest time between two updates around the fault (s)")
    return picture
