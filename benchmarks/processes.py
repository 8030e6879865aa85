"""Running one set of worker processes through a plan.

Question  What did each worker of this system count, or why did the set fail?
Holds     Every wait has an end. Whatever happens, no process of the set outlives ``run_set``. All
          sets get the same environment: one thread each, loopback only, memory kept by the allocator.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.clusters import Plan
from benchmarks.waiting import wait_for
from benchmarks.worker import Report

ROOT = Path(__file__).resolve().parent.parent
READY_S = 90.0  # imports of torch by all workers on a busy machine, group formed, first update
COUNTS_S = 30.0  # beyond the plan's end: the slowest worker's last micro-batch and a late scheduler
END_S = 15.0


@dataclass(frozen=True, slots=True)
class System:
    """How a system's processes are started."""

    name: str
    launched: bool = False  # by ``pliant run``, which starts the workers itself
    service: bool = False  # a process beside the workers


SYSTEMS = {
    system.name: system
    for system in (
        System("limit"),
        System("pliant_floating", launched=True),
        System("oracle"),
        System("pliant_fixed", launched=True),
        System("ddp"),
        System("accumulate"),
        System("local_sgd"),
        System("torchft", service=True),
        System("plain"),
        System("pliant_alone"),
        System("memory_plain"),
        System("memory_none", launched=True),
        System("memory_lookahead", launched=True),
    )
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A set that gave no counts, and why."""

    reason: str


def environment() -> dict[str, str]:
    """The parent's, with what every measured process shares."""
    inherited = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([inherited] if inherited else [])]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        # A 44 MB gradient is allocated and freed in every micro-batch. By default the C library returns
        # it to the kernel each time and pays for its pages again: 20 ms of CPU that belong to no system.
        "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),
        "MALLOC_TRIM_THRESHOLD_": str(2**33),
        "MALLOC_TOP_PAD_": str(2**26),
        # Huge pages: streaming over 44 MB misses the address cache less, which four workers share.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def commands(system: System, plan: Plan, directory: Path) -> list[list[str]]:
    """One command line per process this runner starts."""
    if system.launched:
        launcher = [sys.executable, "-c", "from pliant.ui.cli import main; main()", "run"]
        options = ["-n", str(plan.workers), "--dir", str(directory / "run"), "-m", "benchmarks.systems"]
        return [[*launcher, *options, system.name, str(directory)]]
    start = [sys.executable, "-m", "benchmarks.systems", system.name, str(directory)]
    indexes = [str(index) for index in range(plan.workers)]
    return [[*start, index] for index in (["service"] if system.service else []) + indexes]


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the process's own group, then wait for the process itself."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        if number != signal.SIGKILL:
            _end(process, signal.SIGKILL)


def _end_orphans(directory: Path) -> None:
    """End workers whose launcher died before them; the directory in the command line proves they are ours."""
    for mark in directory.glob("process-*"):
        number = mark.name.removeprefix("process-")
        try:
            ours = str(directory).encode() in Path("/proc", number, "cmdline").read_bytes()
        except OSError:
            continue
        if ours:
            with suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)


def start(line: list[str], directory: Path, number: int) -> subprocess.Popen[bytes]:
    """One process in its own session, its output in ``log-N``."""
    with (directory / f"log-{number}").open("wb") as log:
        return subprocess.Popen(
            line,
            env=environment(),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def started(lines: list[list[str]], directory: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes; all are ended on leaving, with those added to the list meanwhile."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, line in enumerate(lines):
            processes.append(start(line, directory, number))
        yield processes
    finally:
        for process in processes:
            # A launcher ends its workers on SIGTERM; the rivals' workers have nothing to end.
            _end(process, signal.SIGTERM if len(lines) == 1 else signal.SIGKILL)
        _end_orphans(directory)


def reason(directory: Path, otherwise: str) -> str:
    """The last error any process wrote, without paths and names: they tell the machine, not the trouble."""
    for log in sorted(directory.glob("log-*")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"Error|error:|Exception", line)]
        if errors:
            found = errors[-1].strip().replace(socket.gethostname(), "…")
            return re.sub(r"(/[\w.\-]+){2,}", "…", found)[:200]
    return otherwise


def run_set(system: System, plan: Plan) -> list[Report] | Failure:
    """What each worker counted, in order, or the reason why there is nothing."""
    with tempfile.TemporaryDirectory(prefix="pliant-bench-") as name:
        directory = Path(name)
        (directory / "plan.json").write_bytes(msgspec.json.encode(plan))
        with started(commands(system, plan, directory), directory) as processes:
            measured = _measure(plan, directory, processes)
            if system.launched and not isinstance(measured, Failure):
                wait_for(lambda: processes[0].poll() is not None, END_S)
            return measured


def _measure(plan: Plan, directory: Path, processes: list[subprocess.Popen[bytes]]) -> list[Report] | Failure:
    def all_there(pattern: str) -> Callable[[], bool]:
        def met() -> bool:
            ended = any(process.poll() is not None for process in processes)
            return ended or len(list(directory.glob(pattern))) == plan.workers

        return met

    def missing(pattern: str) -> bool:
        return len(list(directory.glob(pattern))) < plan.workers

    wait_for(all_there("ready-*"), READY_S)
    if missing("ready-*"):
        return Failure(reason(directory, "not ready in time"))
    partial = directory / "start.partial"
    partial.write_text(str(time.monotonic() + 0.1))
    partial.rename(directory / "start")
    wait_for(all_there("counts-*.json"), plan.ends_s + COUNTS_S)
    if missing("counts-*.json"):
        return Failure(reason(directory, "no counts in time"))
    (directory / "stop").touch()
    files = [directory / f"counts-{index}.json" for index in range(plan.workers)]
    return [msgspec.json.decode(file.read_bytes(), type=Report) for file in files]
