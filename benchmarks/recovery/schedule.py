"""Which trials there are, how often each, and in which order.

Question  What does ``python -m benchmarks recovery`` measure?
Holds     Pliant and its rivals on the same machine in the same run. The slow link needs root and is measured only when
          it is asked for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.recovery import absences, link, pliant_trials, rivals
from benchmarks.results import Trial

ACTS = ("kill", "stop", "save", "hang", "join", "leave", "link")
SYSTEMS = ("pliant", "torchft", "torchrun")
MODELS = ("small", "large")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many trials of each kind."""

    kills: int
    stops: int
    saves: int
    save_s: float
    hangs: int
    changes: int  # a join and a leave each, per model
    torchft_tight: int
    torchft_default: int
    torchrun_tight: int
    torchrun_default: int
    links: int


FULL = Schedule(
    kills=12,
    stops=10,
    saves=5,
    save_s=60.0,
    hangs=8,
    changes=10,
    torchft_tight=10,
    torchft_default=2,
    torchrun_tight=10,
    torchrun_default=5,
    links=3,
)
QUICK = Schedule(
    kills=8,
    stops=5,
    saves=2,
    save_s=10.0,
    hangs=3,
    changes=5,
    torchft_tight=5,
    torchft_default=1,
    torchrun_tight=3,
    torchrun_default=2,
    links=1,
)


@dataclass(frozen=True, slots=True)
class Selection:
    """What is left of acts, systems and models after ``--only``."""

    acts: frozenset[str]
    systems: frozenset[str]
    models: frozenset[str]

    @property
    def asked(self) -> frozenset[str]:
        """All names that targets may speak about."""
        rivals_asked = {f"{name}_{how}" for name in self.systems - {"pliant"} for how in ("tight", "default")}
        # Only joins and leaves have a large model.
        models = self.models if self.acts & {"join", "leave"} else self.models - {"large"}
        return frozenset({*self.acts, *self.systems, *models, *rivals_asked, "audit"})


def selection(only: list[str]) -> Selection:
    """Names of any kind narrow down their own kind; the link only if it is named."""
    every = ACTS, SYSTEMS, MODELS
    if unknown := set(only) - {name for kind in every for name in kind}:
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    acts, systems, models = (frozenset(only).intersection(kind) or frozenset(kind) for kind in every)
    return Selection(acts if "link" in only else acts - {"link"}, systems, models)


def measure(
    schedule: Schedule, chosen: Selection, say: Say, keep: Callable[[tuple[Trial, ...]], None] = lambda trials: None
) -> tuple[Trial, ...]:
    """Every trial, failures included; ``keep`` gets all there are after each."""
    trials: list[Trial] = []

    def done(trial: Trial) -> None:
        trials.append(trial)
        say(_line(trial))
        keep(tuple(trials))

    for name, part in _parts(schedule, chosen, done):
        before = time.monotonic()
        part()
        say(f"{name}: {time.monotonic() - before:.0f} s")
    return tuple(trials)


def _parts(schedule: Schedule, chosen: Selection, done: pliant_trials.Done) -> list[tuple[str, Callable[[], None]]]:
    parts: list[tuple[str, Callable[[], None]]] = []
    acts, models = chosen.acts, chosen.models
    small = "small" in models
    if "pliant" in chosen.systems:
        if "kill" in acts and small:
            parts.append(("pliant kill", lambda: pliant_trials.unplanned("kill", "small", schedule.kills, done)))
        if "stop" in acts and small:
            parts.append(("pliant stop", lambda: pliant_trials.unplanned("stop", "small", schedule.stops, done)))
        if "save" in acts and small:
            save = lambda: absences.saves("small", schedule.saves, schedule.save_s, done)  # noqa: E731
            parts.append((f"pliant save, {schedule.save_s:g} s", save))
        if "hang" in acts and small:
            parts.append(("pliant hang", lambda: absences.hangs("small", schedule.hangs, done)))
        for model in MODELS:
            if model in models and acts & {"join", "leave"}:
                name = f"pliant join, leave, {model}"
                parts.append((name, lambda model=model: pliant_trials.planned(model, schedule.changes, done)))
        if "link" in acts:
            parts.append(("pliant link", lambda: link.slow_link(schedule.links, done)))
    if "torchft" in chosen.systems and acts & {"kill", "join"} and small:
        for tight, repeats in ((True, schedule.torchft_tight), (False, schedule.torchft_default)):
            name = rivals.torchft_name(tight)
            parts.append((name, lambda t=tight, r=repeats: rivals.torchft("small", t, r, done)))
    if "torchrun" in chosen.systems and "kill" in acts and small:
        for tight, repeats in ((True, schedule.torchrun_tight), (False, schedule.torchrun_default)):
            name = rivals.torchrun_name(tight)
            parts.append((name, lambda t=tight, r=repeats: rivals.torchrun("small", t, r, done)))
    return parts


def _line(trial: Trial) -> str:
    figures = "  ".join(f"{name} {value:.3f}" for name, value in trial.figures.items())
    return f"repeat {trial.repeat}  {trial.model:5}  {trial.system:16}  {trial.act:5}  {trial.failure or figures}"
