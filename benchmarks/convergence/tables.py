"""The convergence tables.

Holds     Every system that was run has a row. Times are shown for all seeds, in order; one that never reached the
          target says so, one that failed shows its reason.
"""

from collections.abc import Callable
from statistics import fmean

from benchmarks.convergence.curve import final, seconds_to
from benchmarks.convergence.systems.names import ORACLE, OURS, SYSTEMS
from benchmarks.convergence.verdicts import Best, best_rival, compared, runs_of
from benchmarks.ratios import Ratio
from benchmarks.results import Results, Training

NAMES = {
    "pliant_auto": 'Pliant, `delay="auto"`',
    "pliant_delay_1": "Pliant, `delay=1`",
    "pliant_delay_0": "Pliant, `delay=0`",
    "lb_bsp": "DDP, shares by measured speed (LB-BSP)",
    "oracle": "DDP, oracle shares (no real system)",
    "ddp": "DDP, equal shares",
    "local_sgd": "Local SGD (8)",
    "torchft": "torchft over gloo",
}
RIVALS = tuple(name for name in SYSTEMS if name != ORACLE and not name.startswith("pliant"))

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _clusters(results: Results) -> list[str]:
    return list(dict.fromkeys(one.cluster for one in results.trainings))


def ratio_text(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio.median:.2f}" + (f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.pairs > 1 else "")


def tables(results: Results) -> list[Table]:
    """Title, columns and rows of each."""
    clusters = _clusters(results)
    shown = [name for name in SYSTEMS if any(one.system == name for one in results.trainings)]
    target = results.target_accuracy

    def cell_per_cluster(cell: Callable[[list[Training]], str]) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for system in shown:
            cells: list[str] = []
            for cluster in clusters:
                runs = runs_of(results, system, cluster)
                failures = [one.failure for one in runs if one.failure is not None]
                cells.append(f"failed: {failures[0]}" if failures else cell(runs) if runs else "–")
            rows.append((NAMES[system], *cells))
        return rows

    def reached(runs: list[Training]) -> str:
        return " ".join("never" if (s := seconds_to(one, target)) is None else f"{s:.1f}" for one in runs)

    def ended(runs: list[Training]) -> str:
        values = [100 * value for one in runs if (value := final(one)) is not None]
        return f"{fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else "–"

    def lasted(runs: list[Training]) -> str:
        seconds = [one.seconds[-1] for one in runs if one.seconds]
        return f"{fmean(seconds):.1f}" if seconds else "–"

    def overlapped(runs: list[Training]) -> str:
        shares = [one.figures["delayed"] for one in runs if "delayed" in one.figures]
        return " ".join(f"{share:.2f}" for share in shares) or "–"

    columns = ("system", *clusters)
    ours = [row for row in cell_per_cluster(overlapped) if row[0] == NAMES[OURS]]
    return [
        (f"Seconds to {100 * target:.1f} % accuracy, seed by seed", columns, cell_per_cluster(reached)),
        ("Its time to target ÷ that of Pliant, auto: median [95 %]", columns, _ratios(results, shown, clusters)),
        ("Final accuracy in %, after equal samples: mean (lowest–highest)", columns, cell_per_cluster(ended)),
        ("Seconds for all samples, mean", columns, cell_per_cluster(lasted)),
        ("Share of the micro-batches that auto computed with delay 1, seed by seed", columns, ours),
    ]


def _ratios(results: Results, shown: list[str], clusters: list[str]) -> list[tuple[str, ...]]:
    rows = [
        (NAMES[system], *(ratio_text(compared(results, OURS, system, cluster)) for cluster in clusters))
        for system in shown
        if system != OURS
    ]
    found = [best_rival(results, OURS, RIVALS, cluster) for cluster in clusters]
    cells = [f"{ratio_text(one.ratio)} {one.rival}" if isinstance(one, Best) else one for one in found]
    return [*rows, ("best rival", *cells)]
