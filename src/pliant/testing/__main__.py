"""``python -m pliant.testing``: many histories from many seeds; ``… habits``: many training scripts.

Question  Which seeds break an invariant, and how is such a history repeated?
Holds     Every failure is printed with the exact command that repeats it. The seeds are divided among processes; the
          history of a seed depends on nothing else.
Source    ours.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pliant.testing.scenes import NAMES, drawn
from pliant.testing.simulation import Outcome, Simulation


class Summary(msgspec.Struct):
    """The outcome of a range of seeds."""

    seeds: int = 0
    completed: int = 0
    exchanges: int = 0
    virtual_s: float = 0.0
    counts: dict[str, int] = {}
    failures: list[tuple[str, int, str]] = []
    """scene, seed, error"""

    def add(self, outcome: Outcome) -> None:
        """Add one history."""
        self.seeds += 1
        self.completed += outcome.completed
        self.exchanges += outcome.exchanges
        self.virtual_s += outcome.virtual_s
        self.counts = dict(Counter(self.counts) + Counter(_kinds(outcome.counts)))
        if outcome.error is not None:
            self.failures.append((outcome.scene, outcome.seed, outcome.error))

    def merge(self, other: Summary) -> None:
        """Add the summary of another process."""
        self.seeds += other.seeds
        self.completed += other.completed
        self.exchanges += other.exchanges
        self.virtual_s += other.virtual_s
        self.counts = dict(Counter(self.counts) + Counter(other.counts))
        self.failures += other.failures


def _kinds(counts: dict[str, int]) -> dict[str, int]:
    """Counts by kind of note, without the names of workers."""
    kinds: Counter[str] = Counter()
    for kind, count in counts.items():
        kinds["told" if kind.startswith("to ") else kind] += count
    return dict(kinds)


def simulated(scene: str, seed: int, *, trace: bool = False) -> Outcome:
    """Simulate one history; ``scene`` is a name of ``scenes.NAMES``."""
    return Simulation(drawn(scene, seed), seed, trace=trace).run()


def scene_of(seed: int, scene: str | None = None) -> str:
    """The scene of a seed if none is named."""
    names = list(NAMES)
    return scene if scene is not None else names[seed % len(names)]


def simulate(seeds: Iterable[int], scene: str | None = None) -> Summary:
    """Simulate many histories in this process; failures are printed at once."""
    summary = Summary()
    for seed in seeds:
        outcome = simulated(scene_of(seed, scene), seed)
        summary.add(outcome)
        if outcome.error is not None:
            print(_failure(outcome.scene, seed, outcome.error), file=sys.stderr, flush=True)
    return summary


def simulate_in_processes(start: int, seeds: int, scene: str | None = None, processes: int | None = None) -> Summary:
    """Simulate many histories on all cores."""
    processes = processes or os.cpu_count() or 1
    command = [sys.executable, "-m", "pliant.testing", "--json", "--start", str(start), "--seeds", str(seeds)]
    command += ["--scene", scene] if scene is not None else []
    running = [
        subprocess.Popen([*command, "--part", f"{part}/{processes}"], stdout=subprocess.PIPE)
        for part in range(processes)
    ]
    summary = Summary()
    for process in running:
        output, _ = process.communicate()
        if process.returncode not in (0, 1):
            raise RuntimeError(f"a simulating process ended with status {process.returncode}")
        summary.merge(msgspec.json.decode(output, type=Summary))
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a seed failed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["habits"]:
        from pliant.testing.habits import command

        return command.main(words[1:])
    parser = argparse.ArgumentParser(prog="python -m pliant.testing", description="Histories from seeds.")
    parser.add_argument("--seeds", type=int, default=100, metavar="N")
    parser.add_argument("--start", type=int, default=0, metavar="S")
    parser.add_argument("--scene", choices=tuple(NAMES), help="default: all of them in turn")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.trace:
        return _traced(range(given.start, given.start + given.seeds), given.scene)
    if given.part:
        part, parts = (int(number) for number in given.part.split("/"))
        if hasattr(os, "sched_setaffinity"):
            # Its threads take turns: passing the baton takes a third less time if they share a core.
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[part % len(cores)]})
        # Histories leave few reference cycles: the collector need not run often.
        gc.freeze()
        gc.set_threshold(200_000, 50, 50)
        summary = simulate(_while_wanted(range(given.start + part, given.start + given.seeds, parts)), given.scene)
        sys.stdout.write(msgspec.json.encode(summary).decode())
        return int(bool(summary.failures))
    start_s = time.perf_counter()
    summary = simulate_in_processes(given.start, given.seeds, given.scene)
    _show(summary, time.perf_counter() - start_s)
    return int(bool(summary.failures))


def _while_wanted(seeds: Iterable[int]) -> Iterator[int]:
    """Yield the seeds until the parent process is gone."""
    parent = os.getppid()
    for seed in seeds:
        if os.getppid() != parent:
            return
        yield seed


def _traced(seeds: Iterable[int], scene: str | None) -> int:
    failed = False
    for seed in seeds:
        name = scene_of(seed, scene)
        print(drawn(name, seed))
        outcome = simulated(name, seed, trace=True)
        print("\n".join(outcome.log))
        print(f"{name} {seed}: {outcome.error or 'all well'} (checksum {outcome.checksum:08x})")
        failed = failed or outcome.error is not None
    return int(failed)


def _failure(scene: str, seed: int, error: str) -> str:
    """The error, and the command that repeats it."""
    replayed = f"python -m pliant.testing --scene {scene} --start {seed} --seeds 1 --trace"
    return f"FAILED {scene} {seed}: {error}\n       {replayed}"


def _show(summary: Summary, seconds: float) -> None:
    for scene, seed, error in sorted(summary.failures):
        print(_failure(scene, seed, error))
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(summary.counts.items()))
    print(f"events: {kinds}")
    print(
        f"{summary.seeds} seeds, {len(summary.failures)} failed, {summary.completed} runs completed, "
        f"{summary.exchanges} exchanges, {summary.virtual_s:.0f} virtual s; {summary.seeds / seconds:.1f} seeds/s"
    )


if __name__ == "__main__":
    sys.exit(main())
