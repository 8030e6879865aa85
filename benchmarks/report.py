"""Results as tables: for the terminal and, in the same shape, for the documentation.

Holds     Every system asked for has a row. One that failed shows the reason where its figures would be.
"""

from collections.abc import Callable, Iterable
from statistics import fmean, median

from rich.table import Table

from benchmarks import reliability, sweeping
from benchmarks.chaos import tables as chaos
from benchmarks.convergence import tables as convergence
from benchmarks.judge import Verdict, harvest_of, judge, middle, read_targets
from benchmarks.lab import tables as lab
from benchmarks.ratios import paired
from benchmarks.results import Results
from benchmarks.sheet import Sheet

NAMES = {
    "solo": "sum of solo speeds",
    "limit": "no communication (the limit)",
    "pliant_floating": "Pliant, floating batch",
    "pliant_fixed": "Pliant, fixed batch",
    "oracle": "DDP, oracle shares",
    "ddp": "DDP, equal shares",
    "accumulate": "DDP, 4-fold accumulation",
    "local_sgd": "Local SGD (8)",
    "torchft": "torchft over gloo",
    "plain": "plain PyTorch loop",
    "pliant_alone": "Pliant, one worker",
    "pliant": "Pliant",
    "torchft_tight": "torchft, tight timeouts",
    "torchft_default": "torchft, its defaults",
    "torchrun_tight": "torchrun restart, tight",
    "torchrun_default": "torchrun restart, its defaults",
    "memory_plain": "plain PyTorch loop",
    "memory_none": "Pliant, delay 1, no correction",
    "memory_lookahead": "Pliant, delay 1, look-ahead",
}


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _clusters(results: Results) -> list[str]:
    return sorted(_unique(cluster for run in results.runs for cluster in run.clusters))


def _row(results: Results, system: str, model: str, cells: Iterable[str]) -> tuple[str, ...]:
    shown = tuple(cells)
    failures = results.failures(system, model)
    if failures and all(cell == "–" for cell in shown):
        shown = (f"failed: {failures[0]}", *("" for _ in shown[1:]))
    return (NAMES.get(system, system), *shown)


def _harvest_sheets(results: Results, model: str) -> list[Sheet]:
    systems = [name for name in NAMES if any(run.system == name and run.model == model for run in results.runs)]
    clusters = _clusters(results)

    def speed(system: str, cluster: str) -> str:
        harvest = harvest_of(results, system, model, cluster)
        per_s = middle(results.series(system, model, cluster), "samples_per_s")
        return "–" if harvest is None else f"{harvest:.3f} ({_number(per_s, 0)}/s)"

    def updates(system: str, cluster: str) -> str:
        return _number(middle(results.series(system, model, cluster), "updates_per_s"), 1)

    def idle(system: str, cluster: str) -> str:
        repeats = [figures.idle for figures in results.series(system, model, cluster).values()]
        shares = [median(worker) for worker in zip(*repeats, strict=True)]
        return " ".join(f"{share:.2f}" for share in shares) if shares else "–"

    def sheet(title: str, cell: Callable[[str, str], str], shown: list[str]) -> Sheet:
        rows = [_row(results, name, model, (cell(name, cluster) for cluster in clusters)) for name in shown]
        return Sheet(f"{title}, {model} model", ("system", *clusters), tuple(rows))

    groups = [name for name in systems if name != "solo"]
    return [
        sheet("Harvest (and samples/s)", speed, systems),
        sheet("Updates/s", updates, groups),
        sheet("Idle share of each worker", idle, groups),
    ]


def _overhead_sheets(results: Results) -> list[Sheet]:
    rows: list[tuple[str, ...]] = []
    for ours, theirs in (("pliant_alone", "plain"), ("pliant_fixed", "ddp"), ("pliant_floating", "ddp")):
        for model in ("small", "large"):
            if not any(run.system == ours and run.model == model for run in results.runs):
                continue
            series = [results.series(name, model, "real") for name in (ours, theirs)]
            speeds = [{repeat: found.samples_per_s for repeat, found in one.items()} for one in series]
            ratio = paired(speeds[0], speeds[1])
            cells = ["–"] * 3
            if ratio is not None:
                per_s = [f"{median(one.values()):.0f}/s" for one in speeds]
                cells = [*per_s, f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"]
            row = _row(results, ours, model, cells)
            rows.append((f"{row[0]} ÷ {NAMES[theirs]}, {model}", *row[1:]))
    return [Sheet("Speed without emulation", ("", "Pliant", "rival", "ratio [95 %]"), tuple(rows))] if rows else []


def _memory_sheets(results: Results) -> list[Sheet]:
    plain = next((memory for memory in results.memory if memory.system == "memory_plain"), None)
    if plain is None:
        return []
    rows: list[tuple[str, ...]] = []
    for memory in results.memory:
        cells = (f"failed: {memory.failure}", "", "")
        if memory.failure is None:
            extra = [
                (memory.tensor_bytes - plain.tensor_bytes) / plain.copy_bytes,
                (memory.resident_bytes - plain.resident_bytes) / plain.copy_bytes,
            ]
            cells = (f"{memory.tensor_bytes / 1e6:.0f} MB", f"{extra[0]:+.2f}", f"{extra[1]:+.2f}")
        rows.append((NAMES[memory.system], *cells))
    columns = ("", "tensors at most", "beyond plain, in copies", "peak of the process beyond plain, in copies")
    return [Sheet("Memory, large model", columns, tuple(rows))]


def _statistics_sheets(results: Results) -> list[Sheet]:
    rows = [
        (
            trial.model,
            str(trial.repeat),
            f"{trial.figures['rounds']:.0f}",
            f"{100 * trial.figures['added']:+.3f} %",
        )
        for trial in results.trials
        if trial.act == "statistics"
    ]
    columns = ("model", "repeat", "rounds", "added CPU seconds")
    return [Sheet("Cost of statistics, as a share of a round", columns, tuple(rows))] if rows else []


# Columns per table of the recovery: act, title, figure and heading; times in seconds.
RECOVERY = (
    ("kill", "From SIGKILL to the next update (s)", (("next_update_s", "next update"), ("usual_gap_s", "usual gap"))),
    ("stop", "From SIGSTOP to the next update (s), dead_after 1 s", (("next_update_s", "next update"),)),
    (
        "save",
        "The leader saves for a long time (s)",
        (
            ("lost_s", "lost by the others in all"),
            ("lost_most_s", "by one of them"),
            ("quiet_s", "the others in as long a time before"),
            ("gap_s", "longest gap"),
            ("pace", "pace of the others beside that before"),
            ("away_s", "away"),
            ("killed", "killed"),
            ("unsaved", "saves not whole or of another round"),
        ),
    ),
    (
        "hang",
        "A main thread hangs (s), dead_after 5 s, hung_after 15 s",
        (
            ("gap_s", "longest gap of the others"),
            ("gap_limits", "beside dead_after + 1 s"),
            ("next_update_s", "next update"),
            ("killed_s", "killed after"),
        ),
    ),
    (
        "join",
        "A worker joins (s)",
        (
            ("idle_s", "idle of the others in all"),
            ("idle_beyond_before_s", "the same beyond that before"),
            ("lost_s", "of the others between micro-batches in all"),
            ("gap_s", "longest gap beyond the usual one"),
            ("contributes_s", "first contribution after import and model"),
            ("starts_s", "first contribution after the request"),
        ),
    ),
    (
        "leave",
        "A worker leaves",
        (
            ("recomputed", "samples recomputed"),
            ("gap_rounds", "longest gap in usual ones"),
            ("quiet_rounds", "the same over as long a time before"),
        ),
    ),
    (
        "link",
        "A worker joins over a slow link (s)",
        (
            ("rounds_followed", "rounds until the state was there"),
            ("gap_s", "longest gap beyond the usual one"),
            ("steady_gap_s", "usual gap with the newcomer in"),
            ("contributes_s", "first contribution after import and model"),
        ),
    ),
    ("audit", "Audit of every run", (("problems", "problems"),)),
)


def _recovery_sheets(results: Results) -> list[Sheet]:
    shown: list[Sheet] = []
    for act, title, columns in RECOVERY:
        kinds = dict.fromkeys((t.system, t.model) for t in results.trials if t.act == act)
        rows = [_trial_row(results, system, model, act, columns) for system, model in kinds]
        if rows:
            headings = tuple(f"{heading}: median, worst" for _, heading in columns)
            shown.append(Sheet(title, ("system", "model", "trials", *headings), tuple(rows)))
    return shown


def _trial_row(
    results: Results, system: str, model: str, act: str, columns: tuple[tuple[str, str], ...]
) -> tuple[str, ...]:
    series = [results.measured(system, model, act, figure) for figure, _ in columns]
    cells = [f"{median(values):.3f}, {max(values):.3f}" if values else "–" for values in series]
    refusals = results.refusals(system, model, act)
    if refusals and not any(series):
        cells = [f"failed: {refusals[0]}", *("" for _ in cells[1:])]
    count = str(max(len(values) for values in series)) + (f" + {len(refusals)} failed" if refusals else "")
    return (NAMES.get(system, system), model, count, *cells)


def sheets(results: Results) -> list[Sheet]:
    """All tables of a benchmark."""
    if results.benchmark == "harvest":
        models = _unique(run.model for run in results.runs)
        return [sheet for model in models for sheet in _harvest_sheets(results, model)]
    if results.benchmark == "convergence":
        return [Sheet(title, columns, tuple(rows)) for title, columns, rows in convergence.tables(results)]
    if results.benchmark == "recovery":
        return _recovery_sheets(results)
    if results.benchmark == "chaos":
        return chaos.sheets(results)
    if results.benchmark in reliability.SHEETS:
        return reliability.SHEETS[results.benchmark](results)
    if results.benchmark == "sweeps":
        return sweeping.sheets(results)
    if results.benchmark in lab.SHEETS:
        return lab.SHEETS[results.benchmark](results)
    return _overhead_sheets(results) + _memory_sheets(results) + _statistics_sheets(results)


def judged(results: Results) -> list[Verdict]:
    """Verdicts on the targets of which anything is in the results; one measured in part is missed."""
    present = {(trial.system, trial.model, trial.act) for trial in results.trials}
    wanted = (
        target
        for target in read_targets().target
        if any((target.system, target.model, act) in present for act in (*target.acts, target.act))
    )
    return judge(results, tuple(wanted))


def verdict_sheet(title: str, words: tuple[str, str], verdicts: list[Verdict]) -> Sheet:
    rows = tuple((words[0] if one.met else words[1], one.name, one.detail) for one in verdicts)
    return Sheet(title, ("", "target", "measured"), rows)


def terminal(sheet: Sheet) -> Table:
    table = Table(*sheet.columns, title=sheet.title, title_justify="left")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def markdown(sheet: Sheet) -> str:
    lines = [f"**{sheet.title}**", "", _line(sheet.columns), _line(["---"] * len(sheet.columns))]
    return "\n".join([*lines, *(_line(row) for row in sheet.rows), ""])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def facts(results: Results) -> str:
    """One line on the machine and the number of repeats."""
    machine = results.machine
    repeats = 1 + max((one.repeat for one in (*results.runs, *results.trials)), default=0)
    if results.trainings:
        repeats = len({one.seed for one in results.trainings})
    per_run = [len(run.clusters) for run in results.runs if run.clusters]
    windows = f"{fmean(per_run):.0f} windows per run, " if per_run else ""
    counted = "seeds" if results.benchmark in lab.SHEETS else "repeats"
    notes = "".join(f"; {note}" for note in results.notes)
    return (
        f"{machine.cores} cores, {machine.memory_gb} GB, {machine.system}, Python {machine.python}, "
        f"torch {machine.torch}; {windows}{repeats} {counted}{', quick' if results.quick else ''}; "
        f"load before the start {machine.load_before}{notes}"
    )
