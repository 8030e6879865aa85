"""Runs as real processes: started, listened to line by line, and never left behind."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prepared import Nursery, PreparedProcess

import pliant
from pliant.core.journal import records as journal

LIMIT_S = 200.0
"""Far longer than any run of a test takes: only a hang reaches it."""
QUICK = (Path(__file__).parent / "scripts" / "quick.py").read_text()
"""The beginning of a script that makes an optimizer."""


def searched(*cases: Any) -> list[Any]:
    """Cases of a test that other cases cover: they run only in long searches."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def shared_out(names: Collection[str], *sought: str) -> list[Any]:
    """Cases by name; what is in the ``sought`` ones is, taken one by one, in others, too: only in long searches."""
    unknown = set(sought) - set(names)
    assert not unknown, unknown
    return [pytest.param(name, marks=[pytest.mark.soak] if name in sought else []) for name in names]


def plain_environment() -> dict[str, str]:
    """The environment for a process that is no worker, and that finds the very package that is tested here."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
    source = str(Path(pliant.__file__).resolve().parents[1])
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, [source, found.get("PYTHONPATH", "")]))}


_USUAL = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execvp(sys.argv[1], sys.argv[1:])
"""


def hearing(command: Sequence[str]) -> list[str]:
    """The command, which hears signals whatever the tests' own process ignores: under ``nohup`` that is inherited."""
    # Not a preexec_fn: the tests' own process has threads. Without site this takes some ten milliseconds.
    return [sys.executable, "-I", "-S", "-c", _USUAL, *command]


@contextlib.contextmanager
def heard_here() -> Iterator[None]:
    """For signals that a test sends to its own process."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, action) for number, action in usual.items()}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


class Running:
    """A ``pliant run`` whose output is read line by line."""

    def __init__(
        self, command: list[str], directory: Path, environment: dict[str, str], nursery: Nursery | None = None
    ) -> None:
        """``nursery``: the command is Python's, and the process is forked instead of executed."""
        self.directory = directory
        found = {**plain_environment(), **environment}
        self.process: subprocess.Popen[str] | PreparedProcess
        if nursery is not None:
            self.process = nursery.popen(command[1:], directory, found)
        else:
            self.process = subprocess.Popen(
                hearing(command),
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=found,
            )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, text: str, times: int = 1) -> str:
        """The first line that has ``text``, or the last of ``times`` of them."""
        with contextlib.suppress(queue.Empty):
            while (line := self._queue.get(timeout=LIMIT_S)) is not None:
                self.lines.append(line)
                times -= text in line
                if times == 0:
                    return line
        raise AssertionError(f"{text!r} was never printed:\n" + "\n".join(self.lines))

    def printed(self, text: str) -> str:
        """The first line that has ``text``, which may have come before what was waited for last."""
        return next((line for line in self.lines if text in line), "") or self.until(text)

    def wait(self) -> int:
        """The exit status; the whole output is in ``lines`` afterwards."""
        try:
            status = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            while not self._queue.empty():
                self.lines.append(str(self._queue.get()))
            raise AssertionError("it does not end:\n" + self.output) from None
        while (line := self._queue.get(timeout=LIMIT_S)) is not None:
            self.lines.append(line)
        return status

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def close(self) -> bool:
        """End it if it still runs, which means that a test has failed; whether it did."""
        runs = self.process.poll() is None
        if runs:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return runs


class Launcher:
    """Starts runs in one directory and ends what a failed test leaves."""

    def __init__(self, directory: Path, prelude: str = "", nursery: Callable[[], Nursery] | None = None) -> None:
        """``nursery`` makes one, or gives the one there is; None: every process is executed anew."""
        self.directory = directory
        self._nursery = nursery
        self.prelude = prelude
        """put before every script"""
        self.runs: list[Running] = []

    def __call__(self, script: str, *args: str, workers: int = 2, options: tuple[str, ...] = ()) -> Running:
        (self.directory / "train.py").write_text(self.prelude + textwrap.dedent(script))
        return self.command("run", "-n", str(workers), "--dir", "job", *options, "train.py", *args)

    def command(self, *words: str) -> Running:
        """Start the ``pliant`` command."""
        return self.python("-W", "error", "-c", "from pliant.ui.cli import main; main()", *words)

    def python(self, *words: str, **environment: str) -> Running:
        """Start an interpreter in the same directory."""
        nursery = None if self._nursery is None else self._nursery()
        # A path of its own is for a sitecustomize, which only a new interpreter loads.
        if nursery is not None and {**plain_environment(), **environment}["PYTHONPATH"] != nursery.path:
            nursery = None
        run = Running([sys.executable, *words], self.directory, environment, nursery)
        self.runs.append(run)
        return run


def processes_in(directory: Path) -> list[int]:
    """Live processes with this working directory."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_in(entry, directory):
            found.append(int(entry.name))
    return found


def _is_in(entry: Path, directory: Path) -> bool:
    try:
        running = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return running and (entry / "cwd").readlink() == directory
    except OSError:
        return False


def coordinator_of(run: Running) -> int:
    """The process of the run's coordinator."""
    (found,) = coordinators_in(run.directory)
    return found


def coordinators_in(directory: Path) -> list[int]:
    """Live processes of coordinators with this working directory."""
    return [pid for pid in processes_in(directory) if b"pliant.launch.coordinator_process" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def remove(directory: Path) -> None:
    """Remove a directory in one step, by renaming it first: missing files are soon written again."""
    shutil.rmtree(directory.rename(directory.with_name("removed")))


def wait_for(path: Path, *runs: Running) -> None:
    """Wait until the file exists, as long as the runs go on."""
    until_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < until_s, f"{path.name} was never made"
        for run in runs:
            assert run.process.poll() is None, f"it ended before there was {path.name}:\n{run.wait()} {run.output}"
        time.sleep(0.05)


def gone(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], LIMIT_S)[0], f"{pid} still runs"
    finally:
        os.close(descriptor)


def records(run: Running) -> list[journal.Record]:
    """The journal's records so far. The last line may be incomplete in a run that goes on or was killed."""
    with (run.directory / "job" / "journal.jsonl").open("rb") as lines:
        return list(journal.read(line for line in lines if line.endswith(b"\n")))
