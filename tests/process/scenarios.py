"""Runs that go through faults of their own making, and what must hold of every one of them afterwards."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from running import Launcher, Running, records

from pliant.core.journal.records import EndRecord, EraRecord, ExchangeRecord, PhaseEndRecord, PhaseRecord, RoundRecord

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
TALLIED = 96
"""training samples of the script"""

SHORT_S, LONG_S = 2.0, 20.0
"""``dead_after``: half of a doze, so that a dozing worker is always lost and a slow one is not; and beyond any doubt"""


@dataclass(frozen=True)
class Fault:
    """What a worker does to itself, once, when it is at a point of the script and the files in ``after`` exist.

    ``who`` is a slot, the name of one incarnation, or * for whoever comes first. The script makes the files
    ``drew-w1.2`` (it has begun to compute), ``without-w1`` (it is off the roster), ``under-way`` (after the first
    updates) and ``fault-0``.
    """

    who: str
    at: str
    does: tuple[str, ...]
    after: tuple[str, ...] = ()


def fault(who: str, at: str, does: str, *after: str) -> Fault:
    """``does``: kill, stop, nap, doze, term, hang, leave, raise, coordinator, cut, kill w1; several with commas."""
    return Fault(who, at, tuple(does.split(",")), after)


@dataclass(frozen=True)
class Scenario:
    """A run: its settings, the faults, and the files that must exist before it ends."""

    faults: Sequence[Fault] = ()
    until: tuple[str, ...] = ()
    """settings besides the faults"""
    workers: int = 3
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    schedule: str = "lambda"
    nested: bool = False
    loaders: int = 0
    sleep_s: float = 0.01

    @property
    def dead_after(self) -> float:
        """Short where a worker falls silent; else so long that none is lost because the machine is busy."""
        deeds = {deed for each in self.faults for deed in each.does}
        return SHORT_S if deeds & {"stop", "doze", "hang", "cut", "coordinator"} else LONG_S

    def write(self, path: Path) -> None:
        happened = [f"fault-{number}" for number in range(len(self.faults))]
        given = {**asdict(self), "dead_after": self.dead_after, "until": [*self.until, *happened]}
        path.write_text(json.dumps(given))


def start(launch: Launcher, scenario: Scenario, *options: str) -> Running:
    """Start the run; it ends by itself once everything has happened."""
    scenario.write(launch.directory / "scenario.json")
    words = ("run", "-n", str(scenario.workers), "--dir", "job", *options)
    return launch.command(*words, str(SCRIPT), "scenario.json")


def passed_through(launch: Launcher, scenario: Scenario, *options: str) -> Running:
    """Start the run, let it end, and check all that must hold."""
    run = start(launch, scenario, *options)
    check(launch, run, scenario)
    return run


def check(launch: Launcher, run: Running, scenario: Scenario) -> None:
    """The run has completed; every sample once per epoch; all workers that finished hold the same state."""
    assert run.wait() == 0, run.output
    for number, each in enumerate(scenario.faults):
        assert (launch.directory / f"fault-{number}").exists(), f"{each} never happened:\n{run.output}"
    audit = launch.command("audit", "job", "--json")
    assert audit.wait() == 0, audit.output
    assert json.loads(audit.output)["problems"] == []
    last = records(run)[-1]
    assert isinstance(last, EndRecord) and last.completed, run.output
    finals = {line.partition("] final ")[2] for line in run.lines if "] final " in line}
    assert len(finals) == 1, f"{finals}\n{run.output}"
    used = rounds_of_samples(run)
    if scenario.optimizer == "sgd":
        tallies = list(launch.directory.glob("tally-*.json"))
        assert tallies
        for path in tallies:
            for mine, rounds in zip(json.loads(path.read_text()), used, strict=True):
                assert math.isclose(-mine, math.fsum(rounds), rel_tol=1e-9), path


def rounds_of_samples(run: Running) -> list[list[float]]:
    """Per training sample what its rounds have subtracted from its tally; each sample is in one round per epoch."""
    used: list[list[float]] = [[] for _ in range(TALLIED)]
    open_: dict[int, tuple[PhaseRecord, list[int]]] = {}
    numbers, eras = [0], [0]
    for record in records(run):
        match record:
            case EraRecord(era=era):
                eras.append(era)
            case PhaseRecord(phase=phase):
                open_[phase] = (record, [])
            case RoundRecord(phase=phase, tickets=tickets) | ExchangeRecord(phase=phase, tickets=tickets):
                positions = [p for ticket in tickets for first, stop in ticket.spans for p in range(first, stop)]
                open_[phase][1].extend(positions)
                if isinstance(record, RoundRecord):
                    numbers.append(record.round)
                    for position in positions:
                        used[position].append(record.factor / record.weight if record.applied else 0.0)
            case PhaseEndRecord(phase=phase, cut=cut):
                opened, positions = open_.pop(phase)
                assert not cut and sorted(positions) == list(range(opened.limit)), opened
            case _:
                pass
    assert not open_
    assert numbers == sorted(set(numbers)) and eras == sorted(set(eras))
    return used


def rosters(run: Running) -> list[list[str]]:
    """The eras of the run."""
    return [record.roster for record in records(run) if isinstance(record, EraRecord)]
