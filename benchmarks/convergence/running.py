"""One training run of one system.

Question  What accuracy had the group after so many samples and so many seconds, or why did the run fail?
Holds     Every wait has an end, no process outlives the run. The snapshots are evaluated after all processes ended.
          ``pliant run`` starts Pliant's workers; behind slow links there is one launcher per namespace, and the run
          waits for all workers before it begins (``--min-workers``).
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from benchmarks.convergence import course as courses
from benchmarks.convergence.course import Course
from benchmarks.convergence.network import Star
from benchmarks.convergence.systems.names import System
from benchmarks.convergence.trainee import KEPT, Kept
from benchmarks.convergence.workload import accuracy
from benchmarks.processes import END_S, Failure, reason, start, started
from benchmarks.results import Training
from benchmarks.waiting import wait_for
from pliant.launch import run_directory

READY_S = 150.0  # imports by all workers on a busy machine, group formed
FIRST_S = 60.0  # the first update, which forms torchft's group
SLOWEST_PER_S = 100.0  # samples: below this something is wrong
MODULE = "benchmarks.convergence.systems"
RUN = "run"


def _pliant(*words: str) -> list[str]:
    return [sys.executable, "-c", "from pliant.ui.cli import main; main()", "run", *words]


def commands(system: System, course: Course, directory: Path, star: Star | None) -> list[list[str]]:
    """The processes to start at once: Pliant's launchers of the other namespaces join them (``joiners``)."""
    here = [system.name, str(directory)]
    if system.launched:
        run = ["--dir", str(directory / RUN)]
        if star is None:
            return [_pliant("-n", str(course.workers), *run, "-m", MODULE, *here)]
        first = ["-n", "1", "--min-workers", str(course.workers), "--host", star.addresses[0], "--insecure"]
        return [star.at(0, _pliant(*first, *run, "-m", MODULE, *here))]
    indexes = [str(index) for index in range(course.workers)]
    lines = [[sys.executable, "-m", MODULE, *here, index] for index in indexes]
    if star is not None:
        lines = [star.at(index, line) for index, line in enumerate(lines)]
    if system.service:
        serving = [sys.executable, "-m", MODULE, *here, "service"]
        lines.insert(0, serving if star is None else star.at(0, serving))
    return lines


def joiners(system: System, course: Course, directory: Path, star: Star) -> list[list[str]]:
    """Pliant's launchers in the other namespaces; the first one's run directory tells where to join."""
    access, token = run_directory.access(directory / RUN), directory / RUN / run_directory.TOKEN
    there = ["--join", access.address, "--token-file", str(token), "-n", "1"]
    return [
        star.at(
            index,
            _pliant(*there, "--dir", str(directory / f"{RUN}-{index}"), "-m", MODULE, system.name, str(directory)),
        )
        for index in range(1, course.workers)
    ]


def train(system: System, course: Course, star: Star | None = None) -> Training:
    """The whole run with its curve."""
    if star is not None:
        course = replace(course, addresses=star.addresses)
    with tempfile.TemporaryDirectory(prefix="pliant-bench-") as name:
        directory = Path(name)
        courses.write(directory, course)
        with started(commands(system, course, directory, star), directory) as processes:
            if system.launched and star is not None:
                file = directory / RUN / run_directory.ADDRESS
                wait_for(lambda: file.exists() or processes[0].poll() is not None, READY_S)
                if file.exists():
                    for number, line in enumerate(joiners(system, course, directory, star), 1):
                        processes.append(start(line, directory, number))
            failure = _finished(course, directory, processes)
            if system.launched and failure is None:
                wait_for(lambda: all(process.poll() is not None for process in processes), END_S)
        if failure is not None:
            return Training(system.name, course.cluster, course.seed, failure=failure.reason)
        return _evaluated(system, course, directory)


def _finished(course: Course, directory: Path, processes: list[subprocess.Popen[bytes]]) -> Failure | None:
    def there(pattern: str) -> bool:
        return len(list(directory.glob(pattern))) == course.workers

    def ended() -> bool:
        return any(process.poll() is not None for process in processes)

    wait_for(lambda: there("ready-*") or ended(), READY_S)
    if not there("ready-*"):
        return Failure(reason(directory, "not ready in time"))
    partial = directory / "start.partial"
    partial.write_text(str(time.monotonic() + 0.2))
    partial.rename(directory / "start")
    # Who is done may end before the others: only an ending with an error is one too early.
    wait_for(
        lambda: there("done-*") or any(process.poll() not in (None, 0) for process in processes),
        FIRST_S + course.samples / SLOWEST_PER_S,
    )
    return None if there("done-*") else Failure(reason(directory, "not done in time"))


def _evaluated(system: System, course: Course, directory: Path) -> Training:
    kept = msgspec.json.decode((directory / KEPT).read_bytes(), type=Kept)
    weights = load_file(directory / "weights")
    found: list[float] = []
    for number in range(len(kept.samples)):
        first = f"{number}/"
        one = {key.removeprefix(first): tensor for key, tensor in weights.items() if key.startswith(first)}
        whole = all(bool(torch.isfinite(tensor).all()) for tensor in one.values())
        found.append(round(accuracy(one), 4) if whole else 0.0)
    return Training(
        system.name,
        course.cluster,
        course.seed,
        tuple(kept.samples),
        tuple(kept.seconds),
        tuple(found),
        kept.figures,
    )
