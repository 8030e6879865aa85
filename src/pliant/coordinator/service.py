"""The coordinator as a service.

Question  How does a coordinator start, as the only one and under a new term, and when does it end?
Holds     At most one coordinator serves a run directory: it holds the lock as long as it lives, and raises the term
          under the lock. It serves until the run is over and all launchers were told so. ``Coordinator`` decides; this
          module has only clock, sockets and files.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pliant.control.app import application
from pliant.control.limits import ConnectionLimits
from pliant.control.server import Server
from pliant.coordinator.coordinator import Coordinator
from pliant.coordinator.journal import JournalFile
from pliant.coordinator.journal_summary import JournalSummary
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.waiting_room import WaitingRoom
from pliant.core.journal import records as journal
from pliant.core.membership import events
from pliant.errors import UsageError

TICK_S = 0.05
"""Interval of ticks: a tenth of the shortest delay that decides about a worker."""

FAREWELL_S = 1.0
"""How long launchers may take to receive the end of the run."""

WRITE_AGAIN_S = 0.5
"""How often a new coordinator retries if the disk is full."""

HOLD_EVERY_S = 1.0
"""How often waiting connections are told to wait: they would give up otherwise."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that may pass, for example when a user frees disk space."""

TERM, LOCK = "term", "lock"


async def serve(
    charter: RunSpec,
    directory: Path,
    listener: socket.socket,
    token: str,
    resume: bool,
    *,
    rewind: bool = False,
    repeat: bool = False,
    on_ready: Callable[[], None] | None = None,
    tls: ssl.SSLContext | None = None,
    least_term: int = 0,
) -> events.Ended:
    """Coordinate the run in ``directory`` until it is over.

    ``resume``: replace a lost coordinator. ``repeat``: if the run is over already, tell launchers and workers so.
    ``rewind``: all workers and the launcher were lost, and the run goes on from its last checkpoint. ``least_term``: a
    term that is known to have been used, even if the directory says otherwise.
    """
    with _Lock(directory) as lock, contextlib.ExitStack() as stack:
        gate = ConnectionLimits(_logged)
        hall = WaitingRoom()
        server = Server(application(hall, token, gate), gate, tls)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        terminated = asyncio.Event()
        with _signals(terminated):
            try:
                coordinator, journal_file = await _begun(
                    charter, directory, resume, repeat, rewind, hall.hold, least_term
                )
                stack.callback(journal_file.close)
                term = coordinator.state.term
                journal_file.mended = lambda: (_write_term(directory, term), lock.renew())[1]
                hall.lead_on(coordinator)
                return await _followed(coordinator, server, serving, terminated, on_ready)
            finally:
                server.should_exit = True
                await serving


async def _begun(
    charter: RunSpec,
    directory: Path,
    resume: bool,
    repeat: bool,
    rewind: bool,
    hold: Callable[[], None] = lambda: None,
    least_term: int = 0,
) -> tuple[Coordinator, JournalFile]:
    """Create the coordinator. One that replaces a lost one waits while the disk is full: the workers go on training.

    ``hold`` is called regularly while connections have to wait.
    """
    told = False
    while True:
        # Reading a long journal takes time; new connections are answered meanwhile.
        beginning = asyncio.ensure_future(
            asyncio.to_thread(_coordinator, charter, directory, resume, repeat, rewind, least_term)
        )
        try:
            while not (await asyncio.wait([beginning], timeout=HOLD_EVERY_S))[0]:
                hold()
            return beginning.result()
        except OSError as error:
            if not resume or error.errno not in NO_ROOM:
                raise
            if not told:
                with contextlib.suppress(OSError):
                    print(f"cannot write to {directory}: {error.strerror}; waiting", file=sys.stderr, flush=True)
                told = True
            await asyncio.sleep(WRITE_AGAIN_S)
            hold()


def _coordinator(
    charter: RunSpec, directory: Path, resume: bool, repeat: bool, rewind: bool = False, least_term: int = 0
) -> tuple[Coordinator, JournalFile]:
    path = directory / journal.JOURNAL
    disk = Background()
    if not resume:
        journal_file = JournalFile(path, run=disk)
        term = _raised_term(directory, least_term)
        return Coordinator(charter, journal_file, time.monotonic, time.time(), term=term), journal_file
    if not path.exists() or path.stat().st_size == 0:
        path.unlink(missing_ok=True)
        if least_term == 0:
            # The lost coordinator had not written anything.
            return _coordinator(charter, directory, resume=False, repeat=False)
        journal_file, account = JournalFile(path, run=disk), JournalSummary(charter.job)
        lost = journal.GapRecord(0, 0, "the run directory was lost with all that was written")
        for record in (charter.record(time.time()), lost):
            journal_file.append([record])
            account.add(record, None)
    else:
        journal_file, account = JournalFile.reopened(path, ended=repeat, run=disk)
    try:
        term = _raised_term(directory, least_term)
    except OSError:
        journal_file.close()
        raise
    coordinator = Coordinator.resumed(charter, journal_file, account, term, time.monotonic, time.time(), rewind=rewind)
    return coordinator, journal_file


class Background:
    """Runs disk operations in order in one thread, so that a slow disk does not delay the coordinator."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def __call__(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pliant-disk")
        self._thread.submit(work)


async def _followed(
    coordinator: Coordinator,
    server: Server,
    serving: asyncio.Task[None],
    terminated: asyncio.Event,
    on_ready: Callable[[], None] | None,
) -> events.Ended:
    """Send ticks to the coordinator until the run is over."""
    over = coordinator.end is not None
    while coordinator.end is None:
        await asyncio.wait([serving], timeout=TICK_S)
        if serving.done():
            raise RuntimeError("the coordinator's server ended by itself") from serving.exception()
        if on_ready is not None and server.started:
            on_ready()
            on_ready = None
        if terminated.is_set():
            terminated.clear()
            coordinator.handle(events.CoordinatorFailed("the coordinator was terminated"), time.monotonic())
        coordinator.handle(events.Tick(), time.monotonic())
    until_s = time.monotonic() + FAREWELL_S
    # Launchers close their connections when they have received the end.
    while (over or coordinator.has_agents) and time.monotonic() < until_s and not serving.done():
        await asyncio.sleep(TICK_S / 5)
    return coordinator.end


def _logged(text: str) -> None:
    """One line in the coordinator's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals(terminated: asyncio.Event) -> Generator[None]:
    """Ctrl-C is the launcher's to judge; SIGTERM ends the run, unless whoever started us ignores it."""
    loop = asyncio.get_running_loop()
    taken: list[int] = []
    for number, action in ((signal.SIGINT, lambda: None), (signal.SIGTERM, terminated.set)):
        if signal.getsignal(number) is signal.SIG_DFL:
            # Outside the main thread Python cannot handle signals.
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, action)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


class _Lock:
    """A lock on the run directory; the system releases it when this process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = -1

    def __enter__(self) -> _Lock:
        descriptor = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise UsageError(f"the coordinator of the run in {self._directory} is alive; it needs no other") from error
        self._descriptor = descriptor
        return self

    def renew(self) -> None:
        """Lock a directory that was created again."""
        before = self._descriptor
        self.__enter__()
        os.close(before)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _raised_term(directory: Path, least: int) -> int:
    """The term of this coordinator, on disk before it is used; higher than any that is known to have been used."""
    path = directory / TERM
    try:
        term = max(int(path.read_text()), least) + 1
    except FileNotFoundError:
        term = least + 1
    except ValueError as error:
        raise UsageError(f"{path} is damaged: it must hold a whole number") from error
    _write_term(directory, term)
    return term


def _write_term(directory: Path, term: int) -> None:
    fresh = directory / f"{TERM}.new"
    with fresh.open("w") as file:
        file.write(f"{term}\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(directory / TERM)
