"""Which surfaces are fuzzed, and for how long.

Question  Do all surfaces stand what they were given?
Holds     One process per surface, so that its memory is its own. What is run is in the results: inputs, refused, taken,
          failures, growth, speed.
Source    Issue 5, "Fuzzing"; docs/reliability.md.
"""

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

import msgspec

from benchmarks.fuzz.surface import Outcome, Surface, hammer
from benchmarks.results import Trial

SURFACES = {
    "control": "benchmarks.fuzz.control:ControlSurface",
    "socket": "benchmarks.fuzz.sockets:SocketSurface",
    "journal": "benchmarks.fuzz.journals:JournalSurface",
    "handoff": "benchmarks.fuzz.handoffs:HandoffSurface",
    "checkpoint": "benchmarks.fuzz.checkpoints:CheckpointSurface",
    "ticket": "benchmarks.fuzz.tickets:TicketSurface",
}
"""name → class; imported when it is asked for"""

QUICK = 2000
INPUTS = 1_000_000
SLOW = {"socket": 50}
"""Surfaces of which an input costs more: so many times fewer of them."""

Say = Callable[[str], None]


def selection(names: Sequence[str]) -> list[str]:
    """The surfaces asked for; all if none is named."""
    unknown = [name for name in names if name not in SURFACES]
    if unknown:
        raise ValueError(f"unknown surface: {', '.join(unknown)}; there are {', '.join(SURFACES)}")
    return list(names) or list(SURFACES)


def opened(name: str) -> Surface:
    """The surface, ready to be fired at."""
    module, _, kind = SURFACES[name].partition(":")
    return getattr(importlib.import_module(module), kind)()


def hammered(name: str, inputs: int, seed: int, start: int, say: Say, wanted: Callable[[], bool]) -> Outcome:
    """One surface in this process."""
    surface = opened(name)
    try:
        outcome = hammer(surface, inputs, seed, start, say, wanted)
    finally:
        surface.close()
    return outcome


def measure(names: Sequence[str], inputs: int, seed: int, start: int, say: Say) -> tuple[Trial, ...]:
    """Every surface in a process of its own, one after the other. Who is stopped tells how far it got."""
    trials: list[Trial] = []
    stopped = False
    for name in names:
        count = max(1, inputs // SLOW.get(name, 1))
        say(f"{name}: {count} inputs, seed {seed}")
        command = [sys.executable, "-m", "benchmarks.fuzz", name, str(count), str(seed), str(start)]
        if stopped:
            break
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                output, _ = process.communicate()
            except (SystemExit, KeyboardInterrupt):
                stopped = True
                process.terminate()
                output, _ = process.communicate()
        if process.returncode != 0:
            trials.append(Trial("pliant", name, "fuzz", seed, failure=f"ended with status {process.returncode}"))
            continue
        outcome = msgspec.json.decode(output, type=Outcome)
        for failure in outcome.failures:
            say(failure)
        trials.append(Trial("pliant", name, "fuzz", seed, figures(outcome)))
    return tuple(trials)


def figures(outcome: Outcome) -> dict[str, float]:
    """What is written down of a surface."""
    found = asdict(outcome)
    return {
        **{name: float(found[name]) for name in ("inputs", "accepted", "rejected")},
        "failures": float(outcome.failed),
        "lacking": float(max(0, INPUTS - outcome.inputs)),
        "grown_mb": outcome.grown_bytes / 2**20,
        "inputs_per_s": outcome.inputs / outcome.seconds if outcome.seconds else 0.0,
    }
