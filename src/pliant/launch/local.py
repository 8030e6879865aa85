"""A whole run on this machine: coordinator and workers.

Question  How does one command start a job, follow it, end it and clean up after it?
Holds     When ``run_job`` returns, however it does, no process it started is left. The exit status is the
          script's own. The token is in the workers' environment and in a file only its owner can read.
Source    ours; DESIGN, the user's interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, TypeVar

from pliant.control.app import Server, application
from pliant.core import events
from pliant.core.members import DEAD_AFTER_S
from pliant.errors import UsageError
from pliant.launch.output import SeenTracebacks
from pliant.launch.process import Stream, WorkerProcess
from pliant.runtime.coordinator import Charter, Coordinator, JournalFile
from pliant.runtime.environment import Job, worker_environment
from pliant.runtime.status import Status
from pliant.types import WorkerId

TICK_S = 0.1
"""How often time is let pass for the roster and the progress line."""

HOST = "127.0.0.1"

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What to run. ``paces`` and ``sizes`` are one per worker, or one for all, or none."""

    script: str
    args: tuple[str, ...] = ()
    workers: int = 1
    paces: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    directory: Path | None = None
    port: int = 0
    module: bool = False
    """``script`` is the name of a module, as for ``python -m``"""
    dead_after_s: float = DEAD_AFTER_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    exit_status: int
    status: Status
    directory: Path
    reason: str
    completed: bool


class Screen(Protocol):
    """Where a run shows itself."""

    def started(self, directory: Path, address: str) -> None: ...
    def output(self, worker: str, text: str, stream: Stream) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, status: Status) -> None: ...
    def ended(self, outcome: Outcome) -> None: ...


class Silent:
    """Shows nothing; the logs and the outcome have it all."""

    def started(self, directory: Path, address: str) -> None: ...
    def output(self, worker: str, text: str, stream: Stream) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, status: Status) -> None: ...
    def ended(self, outcome: Outcome) -> None: ...


def run(spec: JobSpec, *, ui: Screen | None = None) -> Outcome:
    """Run a job to its end."""
    return asyncio.run(run_job(spec, ui=ui or Silent()))


async def run_job(spec: JobSpec, *, ui: Screen) -> Outcome:
    """Run a job to its end in this event loop."""
    _check(spec)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bound(spec.port))
        address = f"{HOST}:{listener.getsockname()[1]}"
        token = secrets.token_urlsafe(32)
        directory = _directory(spec)
        journal_file = JournalFile(directory / "journal.jsonl")
        stack.callback(journal_file.close)
        _write_private(directory / "token", token)
        (directory / "address").write_text(address + "\n")
        launch = _Launch(spec, ui, directory, journal_file)
        ui.started(directory, address)
        server = Server(application(launch.coordinator, token))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            with launch.signals():
                launch.start(address, token)
                end = await launch.followed(serving)
        finally:
            launch.dispose()
            server.should_exit = True
            await serving
        outcome = Outcome(end.exit_status, launch.coordinator.current, directory, end.reason, end.completed)
        ui.ended(outcome)
        return outcome


class _Launch:
    """The processes of one run, and the coordinator that follows them."""

    def __init__(self, spec: JobSpec, ui: Screen, directory: Path, journal_file: JournalFile) -> None:
        self._spec = spec
        self._ui = ui
        self._end: asyncio.Future[events.Ended] = asyncio.get_running_loop().create_future()
        names = tuple(WorkerId(f"w{number}") for number in range(spec.workers))
        charter = Charter(
            job=directory.name,
            script=Path(spec.script).name,
            workers=names,
            version=version("pliant"),
            dead_after_s=spec.dead_after_s,
        )
        self.coordinator = Coordinator(charter, journal_file, self, time.monotonic, time.time())
        seen = SeenTracebacks()
        logs = directory / "logs"
        logs.mkdir(exist_ok=True)
        self._processes = {
            name: WorkerProcess(name, logs / f"{name}.log", seen, ui.output, self._exited) for name in names
        }

    def start(self, address: str, token: str) -> None:
        """Start all workers."""
        spec = self._spec
        command = [sys.executable, "-u", *(("-m",) if spec.module else ()), spec.script, *spec.args]
        paces = _each(spec.paces, spec.workers, 1.0)
        sizes = _each(spec.sizes, spec.workers, None)
        for process, pace, size in zip(self._processes.values(), paces, sizes, strict=True):
            job = Job(address, token, process.worker, pace, size)
            process.start(command, worker_environment(job, spec.workers))

    async def followed(self, serving: asyncio.Task[None]) -> events.Ended:
        """Let time pass until the run is over."""
        while True:
            done, _ = await asyncio.wait([self._end, serving], timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            if self._end in done:
                self._ui.progress(self.coordinator.current)
                return self._end.result()
            if serving in done:
                raise RuntimeError("the coordinator's server ended by itself") from serving.exception()
            self.coordinator.handle(events.Tick(), time.monotonic())
            for process in self._processes.values():
                process.pause()
            self._ui.progress(self.coordinator.current)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take the launcher's signals as events. Outside the main thread Python has none."""
        loop = asyncio.get_running_loop()
        taken: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Who started us with nohup does not want to hear of it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(ValueError, RuntimeError):
                    loop.add_signal_handler(number, self._interrupted, number)
                    taken.append(number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    def dispose(self) -> None:
        """Leave no process behind, whatever happened."""
        for process in self._processes.values():
            process.dispose()

    # what the coordinator asks for

    def terminate(self, worker: WorkerId) -> None:
        """Ask the process to end."""
        self._processes[worker].signal(signal.SIGTERM)

    def kill(self, worker: WorkerId) -> None:
        """End the process and its children."""
        self._processes[worker].kill()

    def note(self, text: str) -> None:
        """Show one line."""
        self._ui.note(text)

    def ended(self, end: events.Ended) -> None:
        """The run is over."""
        self._end.set_result(end)

    def _exited(self, worker: WorkerId, status: int) -> None:
        self.coordinator.handle(events.ProcessExited(worker, status), time.monotonic())

    def _interrupted(self, number: int) -> None:
        self.coordinator.handle(events.Interrupted(number), time.monotonic())


def _check(spec: JobSpec) -> None:
    if not spec.module and not Path(spec.script).is_file():
        raise UsageError(f"no script at {spec.script}; give the path of the training script")
    if spec.workers < 1:
        raise UsageError(f"{spec.workers} workers cannot train; give at least one with -n")
    for what, values in (("--pace", spec.paces), ("--size", spec.sizes)):
        if len(values) not in (0, 1, spec.workers):
            raise UsageError(
                f"{what} has {len(values)} values for {spec.workers} workers; give one each, or one for all"
            )
    if any(not 0.0 < pace <= 1.0 for pace in spec.paces):
        raise UsageError("--pace takes numbers above 0 and at most 1: the part of its speed a worker keeps")
    if any(size < 1 for size in spec.sizes):
        raise UsageError("--size takes positive whole numbers: the samples of a worker's micro-batch")


def _each(values: Sequence[Item], workers: int, default: Item) -> Sequence[Item]:
    if len(values) == workers:
        return values
    return [values[0] if values else default] * workers


def _bound(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        # From here on workers can connect; they wait until the server accepts.
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} is in use; give another --port, or none to take a free one") from error
        raise UsageError(f"cannot listen on port {port}: {error.strerror}; give another --port") from error
    return listener


def _directory(spec: JobSpec) -> Path:
    """The run directory, made if needed; a name is taken only once."""
    if spec.directory is not None:
        try:
            spec.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {spec.directory}: {error.strerror}; give another --dir") from error
        return spec.directory.resolve()
    runs = Path("runs")
    name = f"{Path(spec.script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for candidate in (name, *(f"{name}-{number}" for number in range(2, 100))):
        try:
            (runs / candidate).mkdir(parents=True)
        except FileExistsError:
            continue
        return (runs / candidate).resolve()
    raise UsageError(f"runs/{name} and 98 more exist; give a --dir")


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
