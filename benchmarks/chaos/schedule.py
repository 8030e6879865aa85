"""One run under chaos, and what is compared with it.

Question  What does ``python -m benchmarks chaos --minutes M --seed S`` do?
Holds     Faults stop before the end, so that the run ends by itself. If it ends before, or stands still with nothing
          held up, that is a failure, and its files are kept. The undisturbed runs train on the same number of samples,
          with the same settings but other seeds and, because nothing has to happen to them, without emulated paces.
"""

import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from statistics import median

import pliant
from benchmarks.chaos import checks, pauses
from benchmarks.chaos.deeds import Deeds, Done
from benchmarks.chaos.faults import EVERY_S, NAMES, Fault, drawn
from benchmarks.chaos.stage import Stage, Trouble, stage
from benchmarks.results import Curve, Trial
from benchmarks.waiting import POLL_S, wait_for

SYSTEM, MODEL = "pliant", "digits"
UNDISTURBED, QUICK_UNDISTURBED = 8, 3
HERE, AWAY = 3, 2
TRAINING_S = 120.0
STALLED_S = 240.0  # all workers start anew on a busy machine
QUIET_S = 5.0
AHEAD = 2  # epochs between the word that the run is to end and its end
POINTS = 400  # of a curve
SETTLING_S, LONG_S = 10.0, 60.0  # what a process opens at first says nothing; what has lived so long can leak

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``kinds``: of faults; empty: all that this machine and this version can do."""

    seconds: float
    seed: int
    every_s: float = EVERY_S
    undisturbed: int = UNDISTURBED
    kinds: frozenset[str] = frozenset()
    surroundings: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that is known of a chaos run."""

    trials: tuple[Trial, ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]


def measure(plan: Plan, say: Say) -> Outcome:
    """The chaos run, its checks, the undisturbed runs."""
    notes = [f"seed {plan.seed}", f"{plan.seconds / 60:g} minutes of faults, one about every {plan.every_s:g} s"]
    trials: list[Trial] = []
    curves: tuple[Curve, ...] = ()
    checkpoints = "checkpoint" in signature(pliant.join).parameters
    if not checkpoints:
        notes.append("no total losses: this version has no checkpoints")
    try:
        with stage(plan.seed, notes, surroundings=plan.surroundings, checkpoints=checkpoints) as run:
            found = checks.Found(notes=notes)
            done, epochs = _disturbed(run, plan, found, say)
            curves = _judged(run, done, found, trials)
            say(f"checked: {_told(found.figures)}")
            if any(found.figures.get(name, 0.0) > bound for name, bound in checks.BOUNDS.items()):
                run.keep = True
                say(f"kept: {run.work}")
    except Trouble as trouble:
        say(f"failed: {trouble}")
        trials.append(Trial(SYSTEM, MODEL, "chaos", plan.seed, failure=str(trouble)))
        return Outcome(tuple(trials), curves, tuple(notes))
    _compared(plan, epochs, found, trials, say)
    trials.append(Trial(SYSTEM, MODEL, "chaos", plan.seed, found.figures))
    return Outcome(tuple(trials), curves, tuple(notes))


def _kinds(run: Stage, plan: Plan) -> frozenset[str]:
    kinds = set(plan.kinds or NAMES)
    if run.checkpoints is None:
        kinds -= {"total", "launcher"}
    if run.disk is None:
        kinds -= {"disk"}
    if len(run.network.hosts) == 1:
        kinds -= {"blink", "cut"}
    return frozenset(kinds)


def _disturbed(run: Stage, plan: Plan, found: checks.Found, say: Say) -> tuple[list[Done], int]:
    """Let the run start, the faults happen, and the run end; what was done, and the last epoch."""
    run.start(HERE)
    for number in range(AWAY):
        away = run.network.hosts[1:] or run.network.hosts
        run.join(away[number % len(away)])
    _until(run, "the first epoch", lambda: (_epoch(run) or 0) >= 1)
    kept = run.checkpoints
    if kept is not None:
        _until(run, "the first checkpoint", lambda: kept.is_dir() and any(kept.iterdir()))
    deeds = Deeds(run, run.checkpoints is not None)
    watch = Watch(run)
    begins_s = time.monotonic()
    with deeds.tended():
        for fault in drawn(plan.seed, plan.seconds, _kinds(run, plan), plan.every_s):
            _strike(deeds, watch, fault, begins_s, say)
        while time.monotonic() < begins_s + plan.seconds:
            _pass(deeds, watch)
    quiet_s = time.monotonic() + QUIET_S
    while time.monotonic() < quiet_s:
        _pass(deeds, watch)
    last = (_epoch(run) or 0) + AHEAD
    run.finish(last)
    found.figures["nothing"] = float(deeds.nothing)
    say(f"{len(deeds.done)} faults done; the run ends after epoch {last}")
    while not run.ended:
        _pass(deeds, watch)
    run.await_end()
    found.figures |= watch.grown()
    return deeds.done, last


def _strike(deeds: Deeds, watch: "Watch", fault: Fault, begins_s: float, say: Say) -> None:
    while time.monotonic() < begins_s + fault.at_s:
        _pass(deeds, watch)
    before = len(deeds.done)
    deeds.strike(fault)
    for one in deeds.done[before:]:
        held = f" for {one.held_s:.1f} s" if one.held_s else ""
        instead = f" (in place of {one.drawn})" if one.drawn != one.kind else ""
        say(f"{one.at_s - begins_s:7.1f} s  {one.kind}{held}{instead}")


def _pass(deeds: Deeds, watch: "Watch") -> None:
    watch.look(deeds.holding)
    time.sleep(POLL_S)


class Watch:
    """Notices that the run has ended, or stands still; counts the descriptors of its launcher and its workers."""

    def __init__(self, run: Stage) -> None:
        self._run = run
        self._open: dict[int, list[tuple[float, int]]] = {}
        self._size = -1
        self._moved_s = self._looked_s = time.monotonic()

    def look(self, held: bool) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < 1.0:
            return
        self._looked_s = now_s
        self._count(now_s)
        size = sum(path.stat().st_size for path in self._run.out.glob("stamps-*"))
        if size != self._size or held:
            self._size, self._moved_s = size, now_s
        finishing = (self._run.out / "last-epoch").exists()
        if self._run.ended and not finishing:
            raise Trouble(f"the run ended by itself: {self._run.last_words()}")
        if now_s - self._moved_s > STALLED_S and not self._run.ended:
            raise Trouble(f"no update for {STALLED_S:g} s: {self._run.last_words()}")

    def _count(self, now_s: float) -> None:
        for pid in (self._run.owner.pid, *(worker.pid for worker in self._run.workers())):
            with suppress(OSError):
                self._open.setdefault(pid, []).append((now_s, len(list(Path(f"/proc/{pid}/fd").iterdir()))))

    def grown(self) -> dict[str, float]:
        """By how many descriptors the launcher, and the worst worker that lived long, have grown; half against half."""

        def growth(seen: list[tuple[float, int]]) -> float:
            later = [(at_s, count) for at_s, count in seen if at_s - seen[0][0] > SETTLING_S]
            half = len(later) // 2
            return median(n for _, n in later[half:]) - median(n for _, n in later[:half]) if half else 0.0

        long = [seen for seen in self._open.values() if seen[-1][0] - seen[0][0] > LONG_S]
        owner = self._open.get(self._run.owner.pid, [])
        return {
            "launcher_descriptors": growth(owner) if owner else 0.0,
            "worker_descriptors": max((growth(seen) for seen in long), default=0.0),
        }


def _until(run: Stage, what: str, condition: Callable[[], bool]) -> None:
    if not wait_for(lambda: condition() or run.ended, TRAINING_S) or run.ended:
        raise Trouble(f"{what}: {run.last_words()}")


def _epoch(run: Stage) -> int | None:
    """The latest that any worker has seen."""
    epochs: list[int] = []
    for path in run.out.glob("stamps-*"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200))
            lines = file.read().split(b"\n")[:-1]
        if lines and len(lines[-1].split()) == 4:
            epochs.append(int(lines[-1].split()[3]))
    return max(epochs, default=None)


def _judged(run: Stage, done: list[Done], found: checks.Found, trials: list[Trial]) -> tuple[Curve, ...]:
    """All checks, and how long the training stood still."""
    processes = run.sweep()
    checks.audited(run, found)
    checks.counted(run, found)
    checks.agreed(run, found)
    checks.left_behind(run, processes, found)
    checks.replayed(run, found)
    seen = pauses.updates(pauses.stamps(run.out))
    times = [at_s for at_s, _ in seen]
    all_gaps = [b - a for a, b in pauses.gaps(times)]
    begins_s = times[0]
    found.figures |= {
        "faults": float(len(done)),
        "minutes": (times[-1] - begins_s) / 60,
        "gap_median_s": median(all_gaps),
        "gap_worst_s": max(all_gaps),
    }
    for number, one in enumerate(done):
        until_s = done[number + 1].at_s if number + 1 < len(done) else math.inf
        pause_s = pauses.pause_s(one, times, until_s)
        figures = {"at_s": one.at_s - begins_s, "held_s": one.held_s}
        if math.isfinite(pause_s):
            figures["pause_s"] = pause_s
        trials.append(
            Trial(SYSTEM, MODEL, one.kind, number, {name: round(value, 4) for name, value in figures.items()})
        )
    return (_curve(seen, begins_s),)


def _curve(seen: list[tuple[float, int]], begins_s: float) -> Curve:
    step = max(1, len(seen) // POINTS)
    kept = seen[::step]
    places = tuple(round(at_s - begins_s, 1) for at_s, _ in kept)
    return Curve(SYSTEM, MODEL, "chaos", "samples", places, tuple(float(samples) for _, samples in kept))


def _compared(plan: Plan, epochs: int, found: checks.Found, trials: list[Trial], say: Say) -> None:
    """Undisturbed runs over as many epochs, and where the disturbed one's accuracy lies among theirs."""
    reached: list[float] = []
    for number in range(plan.undisturbed):
        seed = plan.seed + 1 + number
        try:
            figures = _undisturbed(seed, epochs)
        except Trouble as trouble:
            trials.append(Trial("undisturbed", MODEL, "chaos", seed, failure=str(trouble)))
            continue
        say(f"undisturbed, seed {seed}: {_told(figures)}")
        reached.append(figures["accuracy"])
        trials.append(Trial("undisturbed", MODEL, "chaos", seed, figures))
    if len(reached) > 1 and "accuracy" in found.figures:
        outside, low, high = checks.within(found.figures["accuracy"], reached)
        found.figures |= {"outside": outside, "low": low, "high": high}


def _undisturbed(seed: int, epochs: int) -> dict[str, float]:
    found = checks.Found()
    with stage(seed, [], surroundings=False) as run:
        run.finish(epochs)
        run.device_ms = "0"
        run.start(2)
        if not wait_for(lambda: run.ended, TRAINING_S + epochs):
            raise Trouble("an undisturbed run did not end")
        run.await_end()
        checks.agreed(run, found)
        checks.counted(run, found)
    return {name: found.figures[name] for name in ("accuracy", "samples", "rounds") if name in found.figures}


def _told(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in figures.items())


def kinds(names: Collection[str]) -> frozenset[str]:
    """``--only``: kinds of faults."""
    if unknown := set(names) - set(NAMES):
        raise ValueError(f"unknown in --only: {', '.join(sorted(unknown))}")
    return frozenset(names)
