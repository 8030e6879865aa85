"""The rivals' trials: torchft and torchrun, with their defaults and as tight as this machine bears.

Question  How long does it take them from a kill to the next step, and what does a newcomer cost the others?
Holds     The same model, device, processes and stamps as Pliant's trials. A rival that crashes or does not come back
          within its time is reported with its reason; the others' trials go on. A killed replica of torchft is started
          again by the runner, as a scheduler would; torchrun restarts all of its workers itself.
"""

import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.recovery.disturbance import longest_gap, next_update_s, usual_gap_s
from benchmarks.recovery.options import Options
from benchmarks.recovery.session import (
    QUIET_S,
    RIVALS,
    WORKERS,
    Session,
    Trouble,
    recent,
    send,
    session,
    with_path,
)
from benchmarks.recovery.stamps import Trace
from benchmarks.results import Trial

LIMIT_S = {True: 30.0, False: 90.0}  # by ``tight``: torchft's own timeouts are 60 s
RESTARTS = 100
AFTER_S = 0.5

Done = Callable[[Trial], None]


def torchft_name(tight: bool) -> str:
    return "torchft_tight" if tight else "torchft_default"


def torchrun_name(tight: bool) -> str:
    return "torchrun_tight" if tight else "torchrun_default"


def _replica(directory: Path, index: str) -> list[str]:
    start = [*with_path(RIVALS / "torchft"), sys.executable, "-m", "benchmarks.systems"]
    return [*start, "torchft_elastic", str(directory), index]


def torchft(model: str, tight: bool, repeats: int, done: Done) -> None:
    """Kill one replica after another; each is started again and heals from the others."""
    system = torchft_name(tight)

    def lines(directory: Path) -> list[list[str]]:
        return [_replica(directory, index) for index in ("service", *map(str, range(WORKERS)))]

    repeat, failures = 0, 0
    while repeat < repeats and failures < 2:
        try:
            with session(lines, model, Options(tight=tight)) as running:
                while repeat < repeats:
                    members = running.settled(WORKERS, QUIET_S)
                    victim, at_s = _hit(members)
                    others = [trace for trace in members if trace is not victim]
                    done(Trial(system, model, "kill", repeat, _recovered(running, others, at_s, LIMIT_S[tight])))
                    running.settled(WORKERS - 1, QUIET_S)
                    index = victim.name.removeprefix("replica_")
                    done(Trial(system, model, "join", repeat, _joined(running, others, index)))
                    repeat += 1
        except Trouble as trouble:
            failures += 1
            done(Trial(system, model, "kill", repeat, failure=str(trouble)))


def _hit(members: list[Trace]) -> tuple[Trace, float]:
    victim = random.choice(members)
    time.sleep(random.uniform(0.0, 0.3))
    return victim, send(victim.pid, signal.SIGKILL)


def _recovered(
    running: Session, others: list[Trace], at_s: float, limit_s: float, *, restarts: bool = False
) -> dict[str, float]:
    """``restarts``: every process is a new one afterwards, and goes on from a checkpoint."""

    def seen() -> list[Trace]:
        return recent(list(running.traces.by_pid.values()) if restarts else others, at_s - 5.0)

    def next_s() -> float | None:
        return next_update_s(seen(), at_s, resumes_lower=restarts)

    running.until("the next step after a kill", lambda: next_s() is not None, limit_s)
    time.sleep(AFTER_S)
    running.traces.refresh()
    found = next_s()
    assert found is not None
    return {"next_update_s": found, "usual_gap_s": max(usual_gap_s(trace, at_s) for trace in seen())}


def _joined(running: Session, others: list[Trace], index: str) -> dict[str, float]:
    asked_s = time.monotonic()
    process = running.add(_replica(running.directory, index))

    def newcomer() -> Trace | None:
        # ``env`` becomes python: the number stays the same.
        trace = running.traces.by_pid.get(process.pid)
        return trace if trace is not None and any(s.after.progress > s.before.progress for s in trace.steps) else None

    running.until("a newcomer's first step", lambda: newcomer() is not None, LIMIT_S[False])
    joiner = newcomer()
    assert joiner is not None and joiner.ready_s is not None
    first_s = next(step.ends_s for step in joiner.steps if step.after.progress > step.before.progress)
    time.sleep(AFTER_S + 0.3)
    running.traces.refresh()
    seen = recent(others, asked_s - 5.0)
    gap_s, gap_rounds = longest_gap(seen, joiner.ready_s, first_s + AFTER_S, asked_s)
    return {
        "contributes_s": first_s - joiner.ready_s,
        "starts_s": first_s - asked_s,
        "gap_s": gap_s - max(usual_gap_s(trace, asked_s) for trace in seen),
        "gap_rounds": gap_rounds,
    }


def torchrun(model: str, tight: bool, repeats: int, done: Done) -> None:
    """Kill one worker after another; torchrun ends the others and starts all again."""
    system = torchrun_name(tight)

    def lines(directory: Path) -> list[list[str]]:
        start = [*with_path(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m", "torch.distributed.run"]
        options = ["--standalone", f"--nproc-per-node={WORKERS}", f"--max-restarts={RESTARTS}"]
        if tight:
            options += ["--monitor-interval=0.01", "--shutdown-timeout=1"]
        return [[*start, *options, "-m", "benchmarks.systems", "torchrun_elastic", str(directory)]]

    repeat, failures = 0, 0
    while repeat < repeats and failures < 2:
        try:
            with session(lines, model, Options(tight=tight)) as running:
                while repeat < repeats:
                    _, at_s = _hit(running.settled(WORKERS, QUIET_S))
                    found = _recovered(running, [], at_s, LIMIT_S[tight], restarts=True)
                    done(Trial(system, model, "kill", repeat, found))
                    repeat += 1
        except Trouble as trouble:
            failures += 1
            done(Trial(system, model, "kill", repeat, failure=str(trouble)))
