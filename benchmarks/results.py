"""What a benchmark leaves behind: every repeat, and on what kind of machine.

Holds     The values here are exactly the JSON file: encode and decode are inverse.
"""

import os
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that bear on the figures; nothing that names the machine or its owner."""

    cores: int
    memory_gb: float
    python: str
    torch: str
    system: str
    load_before: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One system on one cluster in one repeat."""

    samples_per_s: float
    updates_per_s: float = 0.0
    idle: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One system's process set; ``failure`` says why there are no figures."""

    system: str
    model: str
    repeat: int
    clusters: dict[str, Figures] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process held at most, in bytes; a copy is one set of all weights (or gradients)."""

    system: str
    tensor_bytes: float = 0.0
    resident_bytes: float = 0.0
    copy_bytes: float = 1.0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One worker that died, hung, came or went (times in seconds), or one trained seed.

    ``failure`` says why there are no figures.
    """

    system: str
    model: str
    act: str
    repeat: int
    figures: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure over the course of a run, as a mean over seeds."""

    system: str
    model: str
    act: str
    figure: str
    places: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Training:
    """One training run's curve: samples, seconds of training and accuracy of each snapshot, in order."""

    system: str
    cluster: str
    seed: int
    samples: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    accuracy: tuple[float, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """One invocation of one benchmark."""

    benchmark: str
    quick: bool
    machine: Machine
    runs: tuple[Run, ...] = ()
    memory: tuple[Memory, ...] = ()
    trials: tuple[Trial, ...] = ()
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()
    trainings: tuple[Training, ...] = ()
    target_accuracy: float = 0.0

    def series(self, system: str, model: str, cluster: str) -> dict[int, Figures]:
        """Figures by repeat, of the repeats that gave any."""
        return {
            run.repeat: run.clusters[cluster]
            for run in self.runs
            if run.system == system and run.model == model and cluster in run.clusters
        }

    def failures(self, system: str, model: str) -> list[str]:
        """Why this system has no figures, once per failed repeat."""
        runs = (run for run in self.runs if run.system == system and run.model == model)
        return [run.failure for run in runs if run.failure is not None]

    def measured(self, system: str, model: str, act: str, figure: str) -> list[float]:
        """One figure of every trial that gave it."""
        found = (t for t in self.trials if (t.system, t.model, t.act) == (system, model, act))
        return [trial.figures[figure] for trial in found if figure in trial.figures]

    def by_seed(self, system: str, model: str, act: str, figure: str) -> dict[int, float]:
        """One figure of every trial that gave it, by its seed."""
        found = (t for t in self.trials if (t.system, t.model, t.act) == (system, model, act))
        return {trial.repeat: trial.figures[figure] for trial in found if figure in trial.figures}

    def refusals(self, system: str, model: str, act: str) -> list[str]:
        """Why trials of this kind have no figures."""
        found = (t for t in self.trials if (t.system, t.model, t.act) == (system, model, act))
        return [trial.failure for trial in found if trial.failure is not None]


def machine() -> Machine:
    """The machine this process runs on."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cores=os.cpu_count() or 1,
        memory_gb=round(memory / 2**30, 1),
        python=platform.python_version(),
        torch=str(torch.__version__),
        system=platform.system(),
        load_before=round(os.getloadavg()[0], 2),
    )


def merged(before: Results, results: Results) -> Results:
    """Both; where both measured the same, the newer."""

    def kept(old: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
        known = {(one.system, one.model, one.act) for one in new}
        return (*(one for one in old if (one.system, one.model, one.act) not in known), *new)

    return replace(
        results,
        trials=kept(before.trials, results.trials),
        curves=kept(before.curves, results.curves),
        notes=tuple(dict.fromkeys((*before.notes, *results.notes))),
    )


def write(results: Results, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read(file: Path) -> Results:
    return msgspec.json.decode(file.read_bytes(), type=Results)
