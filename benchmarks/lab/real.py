"""``elastic-processes``: do real processes that come, go and die reach what the lab computes in one?

Question  Is a real elastic run the same training as the lab's, and as good as one on a fixed batch?
Holds     Per seed a real run: it begins with two workers, is scaled to five, loses one to SIGKILL (which is started
          again), and goes down to one; its batch is open, its gradients are one round old, at look-ahead points. The
          lab then makes the rounds of that run's journal, with the same samples, shares and rates, and the fixed
          reference batch, from the same weights; that the pipeline empties at the end of an epoch and with an era it
          leaves out. The journal passes the audit.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.lab import data, models, rules, traces
from benchmarks.lab.elastic import MODEL, SAMPLES
from benchmarks.lab.member import plan
from benchmarks.lab.trainer import Outcome, Trainer, orders, train
from benchmarks.lab.trial import trial
from benchmarks.processes import reason, started
from benchmarks.results import Trial
from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit
from pliant.errors import PliantError
from pliant.launch import requests, run_directory

Say = Callable[[str], None]

KEY, ACT = f"{MODEL} sgd", "real"
PROCESSES, REPLAYED = "processes", "replayed"
NAMES = {
    rules.FIXED: "fixed reference batch, one process",
    PROCESSES: "real processes that come, go and die",
    REPLAYED: "the same rounds, one process",
}
SEEDS, QUICK_SEEDS = 12, 3
RUN = "run"
END_S = 300.0
LOOK_S = 0.1


class _Reached(msgspec.Struct):
    accuracy: float
    loss: float


@dataclass(frozen=True, slots=True)
class History:
    """What a journal tells of a run."""

    rounds: tuple[tuple[int, ...], ...]
    """samples of each worker that there ever was"""
    factors: tuple[float, ...]
    order: Tensor
    """positions in the dataset, in the order in which rounds used them"""
    eras: int
    workers: int


class Recorded:
    """The factors of a run that has been, in place of a follower's."""

    def __init__(self, factors: tuple[float, ...]) -> None:
        self._factors: Iterator[float] = iter(factors)
        self.factor = 1.0

    def follow(self, batch: int, *, short: bool = False) -> float:
        self.factor = next(self._factors)
        return self.factor


def read(path: Path, seed: int, available: int) -> History:
    """The rounds of an audited journal; raises ``ValueError`` where it is not right."""
    with path.open("rb") as lines:
        problems = audit(journal.read(lines)).problems
    if problems:
        raise ValueError(problems[0])
    planned = orders([seed], available, SAMPLES)[0].view(-1, available)
    rounds: list[dict[str, int]] = []
    factors: list[float] = []
    used: list[Tensor] = []
    epoch = eras = 0
    names: list[str] = []
    roster: list[str] = []
    with path.open("rb") as lines:
        for record in journal.read(lines):
            match record:
                case journal.EraRecord(roster=roster):
                    eras += 1
                    names += [name for name in roster if name not in names]
                case journal.PhaseRecord(epoch=number):
                    epoch = number
                case journal.RoundRecord(tickets=tickets, factor=factor, batch=batch) if batch:
                    rounds.append(dict(zip(roster, (ticket.samples for ticket in tickets), strict=True)))
                    factors.append(factor)
                    used += [planned[epoch, first:stop] for ticket in tickets for first, stop in ticket.spans]
                case _:
                    pass
    shares = tuple(tuple(each.get(name, 0) for name in names) for each in rounds)
    return History(shares, tuple(factors), torch.cat(used), eras, len(names))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, by what is on disk."""

    samples: int = 0
    workers: int = 0

    @classmethod
    def of(cls, path: Path) -> "Progress":
        try:
            text = path.read_bytes()
        except OSError:
            return cls()
        samples = re.findall(rb'"samples_total":(\d+)', text[-20_000:])
        rosters = re.findall(rb'"kind":"era".*?"roster":\[([^\]]*)\]', text)
        return cls(int(samples[-1]) if samples else 0, rosters[-1].count(b",") + 1 if rosters else 0)


def _disturbed(directory: Path, ended: Callable[[], bool], chance: random.Random) -> None:
    """Scale the run up, kill a worker, scale it down, as it gets there; raises ``ValueError`` if it does not."""

    def kill() -> None:
        alive = [int(mark.name.removeprefix("pid-")) for mark in directory.glob("pid-*")]
        alive = [pid for pid in alive if Path("/proc", str(pid)).exists()]
        os.kill(chance.choice(alive), signal.SIGKILL)

    def scale(workers: int) -> None:
        requests.post(run_directory.access(directory / RUN), "/scale", {"workers": workers})

    # From how many samples on, and with how many workers there.
    deeds: list[tuple[float, int, Callable[[], None]]] = [
        (0.05, 2, lambda: scale(5)),
        (0.3, 5, kill),
        (0.35, 4, lambda: None),
        (0.6, 5, lambda: scale(1)),
    ]
    until_s = time.monotonic() + END_S
    while not ended():
        if time.monotonic() > until_s:
            raise ValueError(f"did not end within {END_S:.0f} s")
        progress = Progress.of(directory / RUN / journal.JOURNAL)
        if deeds and progress.workers == deeds[0][1] and progress.samples >= deeds[0][0] * SAMPLES:
            try:
                deeds.pop(0)[2]()
            except PliantError as error:
                raise ValueError(str(error)) from error
        time.sleep(LOOK_S)
    if deeds:
        raise ValueError("the run was over before everything had happened; is the machine very busy?")


def real(seed: int, available: int) -> tuple[Outcome, History]:
    """One run of real processes; raises ``ValueError`` where it fails."""
    with tempfile.TemporaryDirectory(prefix="pliant-lab-") as name:
        directory = Path(name)
        options = ["-n", "2", "--dir", str(directory / RUN), "-m", "benchmarks.lab.member", str(seed), str(directory)]
        line = [sys.executable, "-c", "from pliant.ui.cli import main; main()", "run", *options]
        with started([line], directory) as (process,):
            _disturbed(directory, lambda: process.poll() is not None, random.Random(seed))
            files = list(directory.glob("reached-*.json"))
            if process.returncode or not files:
                raise ValueError(reason(directory, f"ended with status {process.returncode}"))
        history = read(directory / RUN / journal.JOURNAL, seed, available)
        reached = msgspec.json.decode(files[0].read_bytes(), type=_Reached)
    return Outcome(seed, reached.accuracy, reached.loss, (), sum(map(sum, history.rounds))), history


def replayed(seed: int, history: History, ready: data.Data) -> Outcome:
    """What the lab makes of the same rounds."""
    trainer = Trainer(replace(plan(history.rounds), method="lookahead"), ready, [seed])
    trainer.order = history.order[None]
    trainer.follower = Recorded(history.factors)
    return trainer.run()[0]


def measure(seeds: int, say: Say) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
    """Every seed three times."""
    ready = models.prepared(MODEL, data.images())
    trials: list[Trial] = []
    fixed = train(plan(tuple((batch,) for batch in traces.fixed(SAMPLES))), ready, range(seeds))
    eras, workers = 0, 0
    for seed in range(seeds):
        try:
            reached, history = real(seed, len(ready.inputs))
        except ValueError as error:
            say(f"seed {seed}: {error}")
            trials.append(Trial(PROCESSES, KEY, ACT, seed, failure=str(error)))
            continue
        again = replayed(seed, history, ready)
        eras, workers = eras + history.eras, workers + history.workers
        batches = [sum(shares) for shares in history.rounds]
        told = f"{len(batches)} rounds of {min(batches)} to {max(batches)}, {history.eras} eras"
        found = f"{reached.accuracy:.2f}, replayed {again.accuracy:.2f}, fixed {fixed[seed].accuracy:.2f}"
        say(f"seed {seed}: {found}; {told}")
        for system, one in ((PROCESSES, reached), (REPLAYED, again), (rules.FIXED, fixed[seed])):
            trials.append(trial(system, KEY, ACT, one, ready.classes))
    note = f"{eras / max(1, seeds):.1f} eras and {workers / max(1, seeds):.1f} workers a run"
    return tuple(trials), (f"data: {ready.name}", f"{SAMPLES} samples a seed", note)
