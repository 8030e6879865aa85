"""``python -m benchmarks NAME [--quick] [--json FILE] [--only NAME …]``, ``table FILE``, ``figure FILE``, ``publish``.

Question  Are the targets met on this machine?
Holds     The exit status is 0 only if every judged target is met.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks import checkpointing, coordinating, harvest, journaling, limits, overhead, report, sweeping
from benchmarks.chaos import schedule as chaos
from benchmarks.convergence import plot
from benchmarks.convergence import schedule as convergence
from benchmarks.fuzz import schedule as fuzz
from benchmarks.judge import judge, read_targets
from benchmarks.lab import delay, document, elastic, figures, real, theory
from benchmarks.recovery import schedule as recovery
from benchmarks.results import Machine, Results, Trial, machine, merged, read, write

FILE_WIDTH = 160  # of tables where the output is no terminal
SPOT_TRACE = "PLIANT_SPOT_TRACE"


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Judge Pliant by its targets.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in MEASURES:
        command = commands.add_parser(name)
        command.add_argument("--quick", action="store_true", help="the same targets in under 15 minutes")
        command.add_argument("--json", type=Path, metavar="FILE", help="write every repeat here")
        command.add_argument(
            "--only", nargs="+", default=[], metavar="NAME", help="systems, models, clusters, parts, acts, rules, …"
        )
        if name in ("elastic-accuracy", "delay", "fuzz"):
            command.add_argument("--add", action="store_true", help="to what is in the file already")
        if name in ("elastic-accuracy", "elastic-processes", "delay"):
            command.add_argument("--seeds", type=int, metavar="N", help="instead of 24 (processes: 12; quick: 8, 3)")
        if name == "elastic-accuracy":
            command.add_argument("--spot-trace", type=Path, metavar="FILE", help=f"CSV of GPU counts; or {SPOT_TRACE}")
        if name == "fuzz":
            command.add_argument("--inputs", type=int, metavar="N", help="per surface; a slow one gets fewer")
            command.add_argument("--surface", nargs="+", default=[], metavar="NAME", help=", ".join(fuzz.SURFACES))
            command.add_argument("--seed", type=int, default=0, metavar="S")
            command.add_argument("--start", type=int, default=0, metavar="V", help="the first volley; to repeat one")
        if name == "journal":
            command.add_argument("--rounds", type=int, metavar="N", help=f"instead of {journaling.FULL}")
        if name == "convergence":
            command.add_argument("--seeds", type=int, metavar="N", help="so many instead of the usual number")
        if name == "chaos":
            command.add_argument("--minutes", type=float, default=10.0, metavar="M", help="how long faults happen")
            command.add_argument("--seed", type=int, default=0, metavar="S", help="which faults, and when")
    table = commands.add_parser("table", help="the tables of a results file as markdown")
    table.add_argument("file", type=Path)
    figure = commands.add_parser("figure", help="the picture of a results file")
    figure.add_argument("file", type=Path)
    figure.add_argument("picture", type=Path, help="an .svg or .png file to write")
    commands.add_parser("publish", help="make the tables and pictures of docs anew from docs/results")
    return parser.parse_args()


def _harvested(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    quick, only = arguments.quick, arguments.only
    chosen = harvest.selection(only)
    facts = machine()
    runs = harvest.measure(harvest.QUICK if quick else harvest.FULL, chosen, say)
    asked = frozenset({*chosen.systems, *chosen.models, *chosen.clusters, "solo"})
    return Results("harvest", quick, facts, runs), asked


def _overheads(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    quick, only = arguments.quick, arguments.only
    parts = overhead.selection(only)
    schedule = overhead.QUICK if quick else overhead.FULL
    facts = machine()
    runs = overhead.measure(schedule, parts, say)
    memory = overhead.measure_memory(schedule, parts, say)
    trials = overhead.measure_statistics(schedule, parts, say)
    systems = {
        "alone": overhead.ALONE,
        "pair": overhead.PAIR,
        "memory": overhead.MEMORY,
        "statistics": ("pliant", "statistics"),
    }
    asked = frozenset({*(name for part in parts for name in systems[part]), "small", "large", "real"})
    return Results("overhead", quick, facts, runs, memory, trials), asked


def _recoveries(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    quick, only = arguments.quick, arguments.only
    chosen = recovery.selection(only)
    results = Results("recovery", quick, machine())
    trials = recovery.measure(recovery.QUICK if quick else recovery.FULL, chosen, say, _keeper(arguments, results))
    return replace(results, trials=trials), chosen.asked


def _converged(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    chosen = convergence.selection(arguments.only)
    schedule = convergence.QUICK if arguments.quick else convergence.FULL
    if arguments.seeds is not None:
        schedule = replace(schedule, seeds=arguments.seeds)
    facts = machine()
    trainings = convergence.measure(schedule, chosen, say)
    asked = frozenset({*chosen.systems, *chosen.clusters})
    results = Results(
        "convergence", arguments.quick, facts, trainings=trainings, target_accuracy=schedule.target_accuracy
    )
    return results, asked


def _elastic(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    chosen = elastic.selection(arguments.only)
    facts = _one_thread()
    spot = arguments.spot_trace or (Path(os.environ[SPOT_TRACE]) if SPOT_TRACE in os.environ else None)
    seeds = arguments.seeds or (elastic.QUICK_SEEDS if arguments.quick else elastic.SEEDS)
    found = elastic.measure(seeds, chosen, spot, say)
    results = Results(
        "elastic-accuracy", arguments.quick, facts, trials=found.trials, curves=found.curves, notes=found.notes
    )
    return results, chosen.asked


def _real(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    facts = _one_thread()
    seeds = arguments.seeds or (real.QUICK_SEEDS if arguments.quick else real.SEEDS)
    trials, notes = real.measure(seeds, say)
    return Results("elastic-processes", arguments.quick, facts, trials=trials, notes=notes), frozenset(
        {*real.NAMES, real.KEY, real.ACT}
    )


def _delayed(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    chosen = delay.selection(arguments.only)
    facts = _one_thread()
    trials, notes = delay.measure(arguments.quick, arguments.seeds, chosen, say)
    return Results("delay", arguments.quick, facts, trials=trials, notes=notes), chosen.asked


def _theory(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    parts = theory.selection(arguments.only)
    facts = _one_thread()
    trials, curves = theory.measure(arguments.quick, parts, say)
    results = Results("scaling-theory", arguments.quick, facts, trials=trials, curves=curves)
    return results, frozenset(name for trial in trials for name in (trial.system, trial.model, trial.act))


def _chaos(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    kinds = chaos.kinds(arguments.only)
    facts = _one_thread()
    undisturbed = chaos.QUICK_UNDISTURBED if arguments.quick else chaos.UNDISTURBED
    plan = chaos.Plan(60 * arguments.minutes, arguments.seed, undisturbed=undisturbed, kinds=kinds)
    found = chaos.measure(plan, say)
    results = Results("chaos", arguments.quick, facts, trials=found.trials, curves=found.curves, notes=found.notes)
    return results, frozenset({chaos.SYSTEM, chaos.MODEL, "chaos"})


def _fuzzed(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    names = fuzz.selection([*arguments.surface, *arguments.only])
    inputs = arguments.inputs or (fuzz.QUICK if arguments.quick else fuzz.INPUTS)
    facts = machine()
    trials = fuzz.measure(names, inputs, arguments.seed, arguments.start, say)
    return Results("fuzz", arguments.quick, facts, trials=trials), frozenset({"pliant", "fuzz", *names})


def _journaled(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    facts = machine()
    trials = journaling.measure(arguments.rounds or (journaling.QUICK if arguments.quick else journaling.FULL), say)
    asked = frozenset(name for trial in trials for name in (trial.system, trial.model, trial.act))
    return Results("journal", arguments.quick, facts, trials=trials), asked


def _saved(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    results = Results("checkpoints", arguments.quick, machine())
    rounds = checkpointing.QUICK_ROUNDS if arguments.quick else checkpointing.ROUNDS
    repeats = checkpointing.QUICK_REPEATS if arguments.quick else checkpointing.REPEATS
    trials = checkpointing.measure(rounds, repeats, say, _keeper(arguments, results))
    return replace(results, trials=trials), frozenset({"pliant", "large", "checkpoints"})


def _coordinated(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    facts = machine()
    trials = (
        *coordinating.measure(coordinating.QUICK_S if arguments.quick else coordinating.FULL_S, say),
        coordinating.succeed(coordinating.QUICK_ROUNDS if arguments.quick else coordinating.FULL_ROUNDS, say),
    )
    asked = frozenset(name for trial in trials for name in (trial.system, trial.model, trial.act))
    return Results("coordinator", arguments.quick, facts, trials=trials), asked


def _limited(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    parts = limits.selection(arguments.only)
    facts = _one_thread()
    trials = limits.measure(parts, arguments.quick, say)
    asked = frozenset(name for trial in trials for name in (trial.system, trial.model, trial.act))
    return Results("limits", arguments.quick, facts, trials=trials), asked


def _swept(arguments: argparse.Namespace, say: harvest.Say) -> tuple[Results, frozenset[str]]:
    rules = sweeping.selection(arguments.only)
    results = Results("sweeps", arguments.quick, _one_thread())
    repeats = sweeping.QUICK if arguments.quick else sweeping.FULL
    trials = sweeping.measure(repeats, rules, say, _keeper(arguments, results))
    return replace(results, trials=tuple(trials)), frozenset({*sweeping.SYSTEMS, *sweeping.ACTS, *rules})


def _keeper(arguments: argparse.Namespace, results: Results) -> Callable[[tuple[Trial, ...]], None]:
    """Writes what there is after every repeat: the file of a run that is ended early holds the repeats before."""

    def keep(trials: tuple[Trial, ...]) -> None:
        if arguments.json is not None:
            write(replace(results, trials=trials), arguments.json)

    return keep


def _one_thread() -> Machine:
    """A stack of seeds is too small to share among threads, and two of these may run side by side."""
    import torch

    torch.set_num_threads(1)
    return machine()


MEASURES = {
    "harvest": _harvested,
    "overhead": _overheads,
    "recovery": _recoveries,
    "convergence": _converged,
    "elastic-accuracy": _elastic,
    "elastic-processes": _real,
    "delay": _delayed,
    "scaling-theory": _theory,
    "chaos": _chaos,
    "fuzz": _fuzzed,
    "journal": _journaled,
    "checkpoints": _saved,
    "coordinator": _coordinated,
    "limits": _limited,
    "sweeps": _swept,
}


def main() -> int:
    arguments = _arguments()
    if arguments.command == "figure":
        results = read(arguments.file)
        (plot.write if results.trainings else figures.draw)(results, arguments.picture)
        return 0
    if arguments.command == "publish":
        files = [*document.publish(), *document.publish(document.RELIABILITY)]
        print("\n".join(str(file) for file in files))
        return 0
    if arguments.command == "table":
        results = read(arguments.file)
        print("\n".join(report.markdown(sheet) for sheet in report.sheets(results)))
        print(report.facts(results))
        return 0
    # An ending by signal must still end the worker processes: as an exception it does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    try:
        results, asked = MEASURES[arguments.command](arguments, _say)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        if getattr(arguments, "add", False) and arguments.json.exists():
            results = merged(read(arguments.json), results)
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
