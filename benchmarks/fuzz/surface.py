"""One surface under fire, and what came of it.

Question  How many hostile inputs did a surface take, refuse or fail on, and did anything grow?
Holds     An input that is neither taken nor refused as documented is a failure, told with the command that repeats it.
          Memory is that of the whole process, from after the first inputs on. What one volley does depends on its
          number and the seed alone.
Source    ours; docs/reliability.md.
"""

import gc
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

WARM_UP = 0.02
"""The part of the inputs after which caches, arenas and the code itself are in memory."""

MOST_FAILURES = 20
"""So many are told; whatever comes behind them is most likely the same."""

TOLD_EVERY_S = 60.0

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Volley:
    """The inputs that were tried together."""

    accepted: int = 0
    rejected: int = 0

    @property
    def inputs(self) -> int:
        return self.accepted + self.rejected

    def count(self, accepted: bool) -> None:
        if accepted:
            self.accepted += 1
        else:
            self.rejected += 1


class Surface(Protocol):
    """Something that reads what others wrote."""

    name: str

    def fire(self, chance: Random) -> Volley:
        """Try some inputs; raises where a property does not hold."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Outcome:
    """What came of a surface."""

    surface: str
    inputs: int = 0
    accepted: int = 0
    rejected: int = 0
    failures: list[str] = field(default_factory=list[str])
    failed: int = 0
    grown_bytes: int = 0
    """the most by which the process was ever larger than after the first inputs"""
    seconds: float = 0.0


def resident_bytes() -> int:
    """What this process holds in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def chance_of(surface: str, seed: int, volley: int) -> Random:
    """What decides a volley."""
    return Random(f"{surface}/{seed}/{volley}")


def hammer(
    surface: Surface,
    inputs: int,
    seed: int,
    start: int = 0,
    say: Callable[[str], None] = lambda line: None,
    wanted: Callable[[], bool] = lambda: True,
) -> Outcome:
    """Fire volleys until so many inputs were tried, or nobody wants more."""
    outcome = Outcome(surface.name)
    base: int | None = None
    began_s = told_s = time.perf_counter()
    volley = start
    while outcome.inputs < inputs and wanted():
        try:
            fired = surface.fire(chance_of(surface.name, seed, volley))
        except Exception:
            outcome.inputs += 1
            outcome.failed += 1
            if len(outcome.failures) < MOST_FAILURES:
                command = f"--surface {surface.name} --seed {seed} --start {volley} --inputs 1"
                outcome.failures.append(f"python -m benchmarks fuzz {command}\n{traceback.format_exc()}")
        else:
            outcome.inputs += fired.inputs
            outcome.accepted += fired.accepted
            outcome.rejected += fired.rejected
        volley += 1
        if volley % 64 == 0 or outcome.inputs >= inputs:
            held = resident_bytes()
            if base is None and outcome.inputs >= WARM_UP * inputs:
                gc.collect()
                base = resident_bytes()
            outcome.grown_bytes = max(outcome.grown_bytes, held - base if base is not None else 0)
            now_s = time.perf_counter()
            if now_s - told_s > TOLD_EVERY_S:
                told_s = now_s
                say(f"{surface.name}: {outcome.inputs} inputs, {outcome.failed} failures")
    outcome.seconds = time.perf_counter() - began_s
    return outcome
