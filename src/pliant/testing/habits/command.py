"""``python -m pliant.testing habits``: many drawn scripts.

Question  Which scripts does Pliant train wrongly, and how is one of them seen again?
Holds     Every failure is printed with the command that runs that very script. The scripts depend on the seed and their
          number alone.
Source    ours.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pliant.testing.habits import threads
from pliant.testing.habits.shrinking import shrunk
from pliant.testing.habits.values import Habits, packed, unpacked

Check = Callable[[Habits, Path], None]


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 if a script failed."""
    given = _parsed(arguments)
    # The workers are threads: those of torch would only get in their way.
    torch.set_num_threads(1)
    check = _check(processes=bool(given.processes) or given.real)
    if given.replay:
        return _replayed(unpacked(given.replay), check, shrink=given.shrink)
    start_s = time.perf_counter()
    count = given.processes or given.scripts
    failed = [
        failure for failure in drawn(count, given.seed, processes=bool(given.processes)) if _fails(failure, check)
    ]
    print(f"{count} scripts, {len(failed)} failed; {count / (time.perf_counter() - start_s):.1f} scripts/s")
    return int(bool(failed))


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pliant.testing habits", description="Drawn training scripts.")
    parser.add_argument("--scripts", type=int, default=200, metavar="N", help="workers are threads")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="real processes, with faults")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--replay", default="", metavar="JSON", help="this script only")
    parser.add_argument("--real", action="store_true", help="replay it as processes")
    parser.add_argument("--shrink", action="store_true", help="and look for a plainer one that fails, too")
    return parser.parse_args(arguments)


def _check(*, processes: bool) -> Check:
    if processes:
        from pliant.testing.habits import processes as real

        return real.checked
    return threads.checked


def drawn(count: int, seed: int, *, processes: bool = False) -> list[Habits]:
    """So many scripts from one seed. Needs hypothesis.

    Each is drawn by itself: in a row hypothesis makes most of them out of others, with one or two habits changed.
    """
    return [_drawn(seed << 32 | number, processes=processes) for number in range(count)]


def _drawn(seed: int, *, processes: bool) -> Habits:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from pliant.testing.habits import strategies

    found: list[Habits] = []

    @seeded(seed)
    @settings(
        # The first one is always the plainest, and the second begins with another choice than that.
        max_examples=3,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(strategies.habits(processes=processes))
    def note(habits: Habits) -> None:
        found.append(habits)

    note()
    return found[-1]


def _fails(habits: Habits, check: Check) -> bool:
    """Run it and tell of a failure at once."""
    error = failure(habits, check)
    if error is not None:
        print(f"FAILED {type(error).__name__}: {error}\n       {again(habits, check)}", flush=True)
    return error is not None


def failure(habits: Habits, check: Check) -> Exception | None:
    """What is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="habits-") as directory:
        try:
            check(habits, Path(directory))
        except Exception as error:
            return error
    return None


def again(habits: Habits, check: Check = threads.checked) -> str:
    """The command that runs this very script."""
    real = "" if check is threads.checked else " --real"
    return f"python -m pliant.testing habits{real} --replay '{packed(habits)}'"


def _replayed(habits: Habits, check: Check, *, shrink: bool) -> int:
    error = failure(habits, check)
    if error is None:
        print(f"{habits}: all well")
        return 0
    if shrink:
        # Twice: what fails now and then is not lost to one lucky run.
        habits = shrunk(habits, lambda plainer: any(failure(plainer, check) for _ in range(2)))
        error = failure(habits, check) or error
    traceback.print_exception(error)
    print(f"{habits}\n{again(habits, check)}")
    return 1
