"""Pliant's trials with a worker that is alive but away: its leader saves, a main thread hangs.

Question  What do the others lose while it is away, is it killed, and is what it saved what it was to save?
Holds     Nothing tells the group beforehand. The worker's process beats all the time. A long save is compared with as
          long a time right before it in which nothing happened.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from benchmarks.recovery import orders
from benchmarks.recovery.disturbance import held_up_s, longest_gap, pace
from benchmarks.recovery.options import Options
from benchmarks.recovery.pliant_trials import (
    AFTER_S,
    RECOVERY_S,
    Done,
    audited,
    choose,
    in_sessions,
    recovered,
    slot_of,
)
from benchmarks.recovery.session import QUIET_S, WORKERS, Session, recent
from benchmarks.recovery.stamps import Absence, Trace, is_alive
from benchmarks.results import Trial
from benchmarks.workload import Device, make_model

DEAD_AFTER_S = 5.0  # the default of ``pliant.join``
HUNG_AFTER_S = 15.0  # ten minutes by default


def saves(model: str, repeats: int, seconds: float, done: Done) -> None:
    """The leader saves for so long, again and again; whoever leads by then."""

    def serve(first: int) -> Iterator[int]:
        with audited(model, Options(dead_after_s=DEAD_AFTER_S), first, done) as opened:
            for repeat in range(first, repeats):
                done(Trial("pliant", model, "save", repeat, _saved(opened.session, model, seconds)))
                yield repeat

    in_sessions("save", model, repeats, done, serve)


def _saved(running: Session, model: str, seconds: float) -> dict[str, float]:
    members = running.settled(WORKERS, QUIET_S)
    quiet_until_s = time.monotonic() + seconds
    running.until("a quiet time", lambda: time.monotonic() >= quiet_until_s, seconds + RECOVERY_S)
    leader = next(trace for trace in members if trace.steps[-1].leads)
    absence = _sent_away(running, leader, orders.Order("save", seconds))
    over = f"the end of a save of {seconds:g} s"
    running.until(over, lambda: absence.ends_s is not None or not is_alive(leader.pid), seconds + RECOVERY_S)
    # A killed one is replaced: the group is whole again in any case.
    running.settled(WORKERS, QUIET_S)
    killed = sum(not is_alive(trace.pid) for trace in members)
    returns_s = _return_s(leader, absence)
    begins_s, ends_s = absence.begins_s, (returns_s or time.monotonic()) + AFTER_S
    others = recent([trace for trace in members if trace is not leader], begins_s - seconds)
    lost_s = [held_up_s(trace, begins_s, ends_s) for trace in others]
    gap_s, _ = longest_gap(others, begins_s, ends_s, begins_s)
    away_until_s = absence.ends_s or ends_s
    return {
        "lost_s": sum(lost_s),
        "lost_most_s": max(lost_s),
        "quiet_s": sum(held_up_s(trace, begins_s - seconds, begins_s) for trace in others),
        "gap_s": gap_s,
        "pace": pace(others, begins_s, away_until_s) / pace(others, begins_s - seconds, begins_s),
        "killed": float(killed),
        "unsaved": float(not is_saved(running.directory / orders.SAVED, model, absence.round)),
        "away_s": away_until_s - begins_s,
    }


def _sent_away(running: Session, worker: Trace, order: orders.Order) -> Absence:
    """Let it go away with its next update; the beginning is its own stamp."""
    before = len(worker.absences)
    orders.give(running.directory, worker.pid, order)
    running.until(f"the beginning of a {order.what}", lambda: len(worker.absences) > before, RECOVERY_S)
    return worker.absences[-1]


def _return_s(worker: Trace, absence: Absence) -> float | None:
    """The end of its first micro-batch after it was away; none if it did not live to see it."""
    if absence.ends_s is None:
        return None
    return next((step.ends_s for step in worker.steps if step.begins_s > absence.ends_s), None)


def is_saved(file: Path, model: str, round_: int) -> bool:
    """Whether the file can be read as a whole, holds every tensor of the model, and is of this round."""
    expected = {name: tensor.shape for name, tensor in make_model(model, Device(lambda: 0.0)).state_dict().items()}
    try:
        with safe_open(str(file), framework="pt") as saved:
            found = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118  (it is no mapping)
            named = (saved.metadata() or {}).get("round")
    except (OSError, SafetensorError):
        return False
    whole = {name: tensor.shape for name, tensor in found.items()} == expected
    return whole and named == str(round_) and all(bool(tensor.isfinite().all()) for tensor in found.values())


def hangs(model: str, repeats: int, done: Done) -> None:
    """One main thread after the other hangs, the leader's now and then; each is killed in the end and comes back."""

    def serve(first: int) -> Iterator[int]:
        hit: dict[str, int] = {}
        options = Options(dead_after_s=DEAD_AFTER_S, hung_after_s=HUNG_AFTER_S)
        with audited(model, options, first, done) as opened:
            for repeat in range(first, repeats):
                members = opened.session.settled(WORKERS, QUIET_S)
                victim = choose(members, repeat, hit)
                hit[slot_of(victim)] = hit.get(slot_of(victim), 0) + 1
                others = [trace for trace in members if trace is not victim]
                done(Trial("pliant", model, "hang", repeat, _hung(opened.session, victim, others)))
                yield repeat

    in_sessions("hang", model, repeats, done, serve)


def _hung(running: Session, victim: Trace, others: list[Trace]) -> dict[str, float]:
    leads = float(victim.steps[-1].leads)
    absence = _sent_away(running, victim, orders.Order("hang"))
    found = recovered(running, others, absence.begins_s, "hang")
    running.until("the end of a hung process", lambda: not is_alive(victim.pid), HUNG_AFTER_S + RECOVERY_S)
    killed_s = time.monotonic() - absence.begins_s
    # Until it is gone: that they go on once is not enough.
    found["gap_s"], _ = longest_gap(
        recent(others, absence.begins_s - 5.0), absence.begins_s, time.monotonic(), absence.begins_s
    )
    limits = {"gap_limits": found["gap_s"] / (DEAD_AFTER_S + 1.0), "early_s": max(0.0, HUNG_AFTER_S - killed_s)}
    return {**found, **limits, "killed_s": killed_s, "leader": leads}
