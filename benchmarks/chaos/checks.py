"""What must hold when everything is over.

Question  Is every sample accounted for, do all workers hold the same weights, and is anything left behind?
Holds     Every check says what it found, as figures; none is passed over in silence: one that could not be made has no
          figure, and a note says why.
"""

import json
import math
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.chaos.stage import Stage, cli, environment, knows
from benchmarks.differences import quantile
from pliant.core.journal import records as journal

RUN_FILES = {
    "journal.jsonl",
    "address",
    "token",
    "charter.json",
    "state.json",
    "logs",
    "term",
    "lock",
    "weights.safetensors",
} | {
    "trust.json",
    "metrics-token",
}
REPLAY_S = 3600.0
FAILED = 1e9  # a check that could not be made: worse than any bound, and a number that JSON knows
BOUNDS = {
    "problems": 0.0,
    "other_weights": 0.0,
    "replay": 1e-9,
    "left_processes": 0.0,
    "left_sockets": 0.0,
    "left_files": 0.0,
    "gap_worst_s": 60.0,
}
"""Beyond these the run's files are kept."""


@dataclass(slots=True)
class Found:
    """Figures by name, and what has to be said beside them."""

    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def audited(stage: Stage, found: Found) -> None:
    """``pliant audit``."""
    line = cli("audit", str(stage.journal), "--json")
    told = subprocess.run(line, capture_output=True, text=True, check=False, env=environment(stage.mark))
    try:
        report = json.loads(told.stdout)
    except json.JSONDecodeError:
        found.figures["problems"] = FAILED
        found.notes.append(f"audit: {(told.stdout + told.stderr).strip().splitlines()[-1:]}")
        return
    # A status other than 0 without a problem would be a problem of its own.
    found.figures["problems"] = float(len(report["problems"]) or told.returncode)
    found.notes += [f"audit: {problem}" for problem in report["problems"][:3]]


def counted(stage: Stage, found: Found) -> None:
    """Eras, rounds and samples, by the journal."""
    eras = rounds = samples = names = 0
    known: set[str] = set()
    with stage.journal.open("rb") as lines:
        for record in journal.read(lines):
            match record:
                case journal.EraRecord(roster=roster):
                    eras += 1
                    known.update(roster)
                case journal.RoundRecord(samples_total=samples):
                    rounds += 1
                case _:
                    pass
    names = len(known)
    found.figures |= {"eras": float(eras), "rounds": float(rounds), "samples": float(samples), "names": float(names)}
    found.figures["journal_mb"] = stage.journal.stat().st_size / 1e6
    found.figures["terms"] = float((stage.run / "term").read_text())


def agreed(stage: Stage, found: Found) -> None:
    """Each worker that came to the end wrote a digest of its weights, and its accuracy."""
    finals = [json.loads(path.read_text()) for path in stage.out.glob("final-*.json")]
    found.figures["finished"] = float(len(finals))
    if not finals:
        found.notes.append("weights: nobody came to the end")
        return
    found.figures["other_weights"] = float(len({final["weights"] for final in finals}) - 1)
    found.figures["accuracy"] = 100 * finals[0]["accuracy"]


def replayed(stage: Stage, found: Found) -> None:
    """``pliant replay``, where it is."""
    if not knows("replay"):
        found.notes.append("replay: not run, this version has no such command")
        return
    again = stage.work / "again"
    again.mkdir()
    (again / "last-epoch").write_text((stage.out / "last-epoch").read_text())
    weights = stage.out / "weights.safetensors"
    line = cli("replay", "--json", "--weights", str(weights), str(stage.journal), *stage.script)
    try:
        told = subprocess.run(
            line, capture_output=True, text=True, check=False, cwd=again, env=environment(stage.mark), timeout=REPLAY_S
        )
    except subprocess.TimeoutExpired:
        found.notes.append(f"replay: not done within {REPLAY_S:g} s")
        return
    try:
        findings = json.loads(told.stdout.strip().splitlines()[-1])
        apart = [findings[name]["relative"] for name in ("weights", "largest") if findings[name] is not None]
        found.figures["replay"] = float(findings["weights"]["relative"])
        found.figures["replay_tickets"] = float(max(apart))
        if not findings["agrees"]:
            found.figures["replay"] = FAILED
            found.notes.append(f"replay: first difference {findings['first']}")
    except (IndexError, KeyError, TypeError, ValueError):
        found.figures["replay"] = FAILED
        said = (told.stdout + told.stderr).strip().splitlines()[-2:]
        found.notes.append(f"replay: status {told.returncode}: {' / '.join(said)[:400]}")


def left_behind(stage: Stage, processes: int, found: Found) -> None:
    """Processes, sockets and files that should not be there any more."""
    found.figures["left_processes"] = float(processes)
    sockets = stage.network.listening()
    found.figures["left_sockets"] = float(len(sockets))
    pids = {str(pid) for pid in stage.known}
    files = [str(path) for path in (stage.work / "tmp").iterdir()]
    files += [str(path) for path in stage.run.iterdir() if path.name not in RUN_FILES]
    files += [str(path) for path in Path("/dev/shm").iterdir() if pids & set(re.findall(r"\d+", path.name))]
    found.figures["left_files"] = float(len(files))
    found.notes += [f"left behind: {name}" for name in (*sockets, *files)[:5]]


def within(accuracy: float, undisturbed: list[float]) -> tuple[float, float, float]:
    """How far outside of the 95 % prediction interval of the undisturbed runs; 0 inside. The interval."""
    centre, count = fmean(undisturbed), len(undisturbed)
    half = quantile(count - 1) * stdev(undisturbed) * math.sqrt(1 + 1 / count)
    low, high = centre - half, centre + half
    return max(0.0, low - accuracy, accuracy - high), low, high
