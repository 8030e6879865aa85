"""``python -m benchmarks harvest|overhead|recovery|convergence [--quick] [--json FILE] [--only NAME …]``,
``table FILE`` and ``plot FILE PICTURE``.

Question  Are the targets met on this machine?
Holds     The exit status is 0 only if every judged target is met.
"""

import argparse
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks import harvest, overhead, report
from benchmarks.convergence import plot
from benchmarks.convergence import schedule as convergence
from benchmarks.judge import judge, read_targets
from benchmarks.recovery import schedule as recovery
from benchmarks.results import Results, machine, read, write

FILE_WIDTH = 160  # of tables where the output is no terminal


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Judge Pliant by its targets.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("harvest", "overhead", "recovery", "convergence"):
        command = commands.add_parser(name)
        command.add_argument("--quick", action="store_true", help="the same targets in under 15 minutes")
        command.add_argument("--json", type=Path, metavar="FILE", help="write every repeat here")
        command.add_argument(
            "--only", nargs="+", default=[], metavar="NAME", help="systems, models, clusters, parts or acts"
        )
        if name == "convergence":
            command.add_argument("--seeds", type=int, metavar="N", help="so many instead of the usual number")
    table = commands.add_parser("table", help="the tables of a results file as markdown")
    table.add_argument("file", type=Path)
    drawn = commands.add_parser("plot", help="accuracy over time from a results file of convergence")
    drawn.add_argument("file", type=Path)
    drawn.add_argument("picture", type=Path, help="an .svg or .png file to write")
    return parser.parse_args()


def _harvested(quick: bool, only: list[str], say: harvest.Say) -> tuple[Results, frozenset[str]]:
    chosen = harvest.selection(only)
    facts = machine()
    runs = harvest.measure(harvest.QUICK if quick else harvest.FULL, chosen, say)
    asked = frozenset({*chosen.systems, *chosen.models, *chosen.clusters, "solo"})
    return Results("harvest", quick, facts, runs), asked


def _overheads(quick: bool, only: list[str], say: harvest.Say) -> tuple[Results, frozenset[str]]:
    parts = overhead.selection(only)
    schedule = overhead.QUICK if quick else overhead.FULL
    facts = machine()
    runs = overhead.measure(schedule, parts, say)
    memory = overhead.measure_memory(schedule, parts, say)
    systems = {"alone": overhead.ALONE, "pair": overhead.PAIR, "memory": overhead.MEMORY}
    asked = frozenset({*(name for part in parts for name in systems[part]), "small", "large", "real"})
    return Results("overhead", quick, facts, runs, memory), asked


def _recoveries(quick: bool, only: list[str], say: harvest.Say) -> tuple[Results, frozenset[str]]:
    chosen = recovery.selection(only)
    facts = machine()
    trials = recovery.measure(recovery.QUICK if quick else recovery.FULL, chosen, say)
    return Results("recovery", quick, facts, trials=trials), chosen.asked


def _converged(
    quick: bool, only: list[str], say: harvest.Say, seeds: int | None = None
) -> tuple[Results, frozenset[str]]:
    chosen = convergence.selection(only)
    schedule = convergence.QUICK if quick else convergence.FULL
    if seeds is not None:
        schedule = replace(schedule, seeds=seeds)
    facts = machine()
    trainings = convergence.measure(schedule, chosen, say)
    asked = frozenset({*chosen.systems, *chosen.clusters})
    results = Results("convergence", quick, facts, trainings=trainings, target_accuracy=schedule.target_accuracy)
    return results, asked


def main() -> int:
    arguments = _arguments()
    if arguments.command == "table":
        results = read(arguments.file)
        print("\n".join(report.markdown(sheet) for sheet in report.sheets(results)))
        print(report.facts(results))
        return 0
    if arguments.command == "plot":
        plot.write(read(arguments.file), arguments.picture)
        return 0
    # An ending by signal must still end the worker processes: as an exception it does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    measures = {
        "harvest": _harvested,
        "overhead": _overheads,
        "recovery": _recoveries,
        "convergence": partial(_converged, seeds=getattr(arguments, "seeds", None)),
    }
    measure = measures[arguments.command]
    try:
        results, asked = measure(arguments.quick, arguments.only, _say)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        write(results, arguments.json)
    return _show(results, asked, console)


def _show(results: Results, asked: frozenset[str], console: Console) -> int:
    targets = read_targets()
    verdicts = judge(results, targets.target, asked)
    conditions = judge(results, targets.condition, asked)
    for sheet in report.sheets(results):
        console.print(report.terminal(sheet))
    if conditions:
        console.print(report.terminal(report.verdict_sheet("Conditions", ("holds", "fails"), conditions)))
    for verdict in verdicts:
        console.print(
            f"[bold]{'met' if verdict.met else 'missed'}[/]  {verdict.name}: {verdict.detail}", soft_wrap=True
        )
    mine = sum(target.benchmark == results.benchmark for target in targets.target)
    if len(verdicts) < mine:
        console.print(f"{mine - len(verdicts)} targets not judged: --only left out part of what they compare")
    console.print(report.facts(results))
    return 0 if all(verdict.met for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
