"""The workers' processes of one launcher.

Question  Which processes run here, and how did those end that do not?
Holds     A slot has at most one process at a time. How its last one ended is known until the next is started, so that
          it can be told again to a coordinator that has not heard of it. How a process is started, and the clock, are
          handed in.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pliant.control.messages import Exited
from pliant.environment import Job, worker_environment
from pliant.launch.job import JobSpec, each
from pliant.launch.output import SeenTracebacks
from pliant.launch.process import Stream, WorkerProcess
from pliant.launch.run_directory import LOGS, Access


class SlotProcess(Protocol):
    """A running process of a slot (``process.WorkerProcess``)."""

    @property
    def slot(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def is_alive(self) -> bool:
        """Whether its end was not told yet."""
        ...

    @property
    def error(self) -> str: ...

    def signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def dispose(self) -> None: ...


ProcessEnded = Callable[[SlotProcess, int], None]
"""is told of the end of a process, with its wait status"""


class SlotProcesses:
    """Starts, signals and ends processes by the names of their slots. Unknown names are passed over."""

    def __init__(
        self,
        started: Callable[[str, int, ProcessEnded], SlotProcess],
        grace_s: float,
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``started``: a new process for a slot, which is the n-th here; ``later`` calls something after a while."""
        self._started = started
        self._grace_s = grace_s
        self._later = later
        self._clock = clock
        self._processes: dict[str, SlotProcess] = {}
        self._started_s: dict[str, float] = {}
        self.ended: Callable[[Exited], None] = lambda exited: None
        """is told how a process has ended"""
        self.exits: dict[str, Exited] = {}
        """by slot: how its process has ended, where none was started since"""

    @property
    def names(self) -> list[str]:
        """All slots, in the order of their first start."""
        return list(self._processes)

    @property
    def alive(self) -> list[str]:
        """Slots whose process runs."""
        return [slot for slot, process in self._processes.items() if process.is_alive]

    def alive_for(self, seconds: float) -> list[str]:
        """Slots whose process has run for so long."""
        now_s = self._clock()
        return [slot for slot in self.alive if now_s - self._started_s[slot] >= seconds]

    def start(self, slot: str) -> None:
        """Start the slot's process, unless it runs."""
        if slot in self._processes and self._processes[slot].is_alive:
            return
        place = self.names.index(slot) if slot in self._processes else len(self._processes)
        self._started_s[slot] = self._clock()
        self.exits.pop(slot, None)
        self._processes[slot] = self._started(slot, place, self._exited)

    def terminate(self, slot: str) -> None:
        """Ask the slot's process to end; it is killed if it has not ended within the grace."""
        process = self._processes.get(slot)
        if process is not None and process.is_alive:
            process.signal(signal.SIGTERM)
            # Bound to this process: one that takes its place later has its own time.
            self._later(self._grace_s, process.kill)

    def kill(self, slot: str) -> None:
        """End the slot's process and its children."""
        if slot in self._processes:
            self._processes[slot].kill()

    def pause(self) -> None:
        """Show lines that were held back until more output comes."""
        for process in self._processes.values():
            process.pause()

    def dispose(self) -> None:
        """Leave no process behind, whatever happened."""
        for process in self._processes.values():
            process.dispose()

    def _exited(self, process: SlotProcess, status: int) -> None:
        exited = Exited(process.slot, process.pid, status, process.error)
        self.exits[process.slot] = exited
        self.ended(exited)


class WorkerStarter:
    """Starts workers on this machine, as a job says."""

    def __init__(
        self,
        spec: JobSpec,
        directory: Path,
        access: Access,
        show: Callable[[str, str, Stream], None],
        *,
        owns: bool = False,
    ) -> None:
        """``owns``: the run in ``directory`` is this launcher's own."""
        self._spec = spec
        self._logs = directory / LOGS
        self._run = str(directory) if owns else ""
        self._access = access
        self._show = show
        self._seen = SeenTracebacks()

    def started(self, slot: str, place: int, ended: ProcessEnded) -> WorkerProcess:
        """A process that runs the script, as the ``place``-th worker here."""
        spec = self._spec
        job = Job(
            self._access.address,
            self._access.token,
            slot,
            each(spec.paces, place, 1.0),
            each(spec.sizes, place, None),
            grace_s=spec.grace_s,
            authority=str(self._access.authority or ""),
            directory=self._run,
        )
        command = [sys.executable, "-u", *(("-m",) if spec.module else ()), spec.script, *spec.args]
        process = WorkerProcess(slot, self._logs / f"{slot}.log", self._seen, self._show, ended)
        try:
            process.start(command, worker_environment(job, spec.workers))
        except BaseException:
            process.dispose()
            raise
        return process
