"""The launcher's supervision of the coordinator's process.

Question  How does a run survive the death of its coordinator?
Holds     The launcher keeps the listening socket: connections made while there is no coordinator wait for the next
          one. A coordinator that dies again and again is given up, with a reason. Where the coordinator runs, and the
          clock, are handed in.
Source    ours; docs/design/0007-elastic.md. The limit is that of systemd's StartLimitBurst: 5 in 10 s.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pliant.core.journal.records import JOURNAL
from pliant.environment import plain_environment
from pliant.launch.logs import opened
from pliant.launch.process import OwnedProcess
from pliant.launch.run_directory import LOGS, PRIVATE, TOKEN

DEATHS = 5
WITHIN_S = 10.0
"""After more deaths than ``DEATHS`` within this time the coordinator is given up."""

REFUSED_EXIT = 3
"""The coordinator says itself, in its last line, why it cannot be started: another try would not help."""


class CoordinatorChild(Protocol):
    """A process of a coordinator (``process.OwnedProcess``)."""

    @property
    def is_alive(self) -> bool:
        """Whether its end was not told yet."""
        ...

    def dispose(self) -> None: ...


class CoordinatorHost(Protocol):
    """Where coordinators are started, and what they leave behind (``LocalCoordinator``)."""

    def begin(self, how: str, term: int, ended: Callable[[int], None], /) -> CoordinatorChild:
        """Start a coordinator that follows the one of ``term``; ``ended`` is told its wait status."""
        ...

    def make_again(self) -> bool:
        """Write what belongs to the run directory, where it was removed; whether that was so."""
        ...

    @property
    def has_journal(self) -> bool: ...

    @property
    def log(self) -> str: ...

    def last_words(self) -> str:
        """The last line of the log."""
        ...


class CoordinatorSupervisor:
    """Starts the coordinator and counts its deaths."""

    def __init__(self, host: CoordinatorHost, how: str = "start", clock: Callable[[], float] = time.monotonic) -> None:
        """``how`` the first coordinator begins; the next ones resume the run."""
        self._host = host
        self._how = how
        self._clock = clock
        self.term = 0
        """of the last coordinator that the launcher has heard from"""
        self.died: Callable[[], None] = lambda: None
        """called when it has ended"""
        self._deaths: deque[float] = deque(maxlen=DEATHS + 1)
        self._status: int | None = None
        self._process: CoordinatorChild | None = None

    @property
    def is_dead(self) -> bool:
        """Started, and ended."""
        return self._process is not None and not self._process.is_alive

    def start(self) -> None:
        """Start it; again, if it has died: it then resumes the run."""
        self.make_again()
        how = self._how if self._process is None else "resume"
        self._process = self._host.begin(how, self.term, self._ended)

    def make_again(self) -> bool:
        """Write what belongs to the run directory, where it was removed; whether that was so."""
        return self._host.make_again()

    @property
    def has_lost_journal(self) -> bool:
        """Whether what the last coordinator had written is not there any more."""
        return self.term > 0 and not self._host.has_journal

    def hopeless(self) -> str | None:
        """Why it is not to be started again; None: it is."""
        if self._status == REFUSED_EXIT:
            return self._host.last_words()
        if len(self._deaths) > DEATHS and self._deaths[-1] - self._deaths[0] <= WITHIN_S:
            return (
                f"the coordinator died {len(self._deaths)} times within {WITHIN_S:g} s, so the run ends; "
                f"what it said last is in {self._host.log}"
            )
        return None

    def close(self) -> None:
        """End it, if it lives."""
        if self._process is not None:
            self._process.dispose()

    def _ended(self, status: int) -> None:
        self._status = status
        self._deaths.append(self._clock())
        self.died()


class LocalCoordinator:
    """Coordinators on this machine, one after another, in a run directory."""

    def __init__(self, directory: Path, listener: socket.socket, publish: Callable[[], None] = lambda: None) -> None:
        """``publish`` writes what coordinators and other commands find in the directory."""
        self._directory = directory
        self._listener = listener
        self._publish = publish
        self._log = directory / LOGS / "coordinator.log"

    def begin(self, how: str, term: int, ended: Callable[[int], None]) -> OwnedProcess:
        """Start a coordinator that follows the one of ``term``; ``ended`` is called in the event loop."""
        descriptor = self._listener.fileno()
        # -P: a module of the user's directory must not take the place of one of Python's own.
        command = [sys.executable, "-P", "-m", "pliant.launch.coordinator_process"]
        with opened(self._log) as log:
            return OwnedProcess(
                [*command, str(self._directory), str(descriptor), how, str(term)],
                plain_environment(),
                ended,
                output=log,
                descriptors=(descriptor,),
            )

    def make_again(self) -> bool:
        """Write what belongs to the run directory, where it was removed; whether that was so."""
        if (self._directory / TOKEN).exists():
            return False
        try:
            self._directory.mkdir(PRIVATE, parents=True, exist_ok=True)
            (self._directory / LOGS).mkdir(PRIVATE, exist_ok=True)
            self._publish()
        except OSError:
            # It is tried again.
            return False
        return True

    @property
    def has_journal(self) -> bool:
        """Whether a journal is there."""
        return (self._directory / JOURNAL).exists()

    @property
    def log(self) -> str:
        """Where coordinators write what they have to say."""
        return str(self._log)

    def last_words(self) -> str:
        """The last line of the log."""
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "the coordinator could not be started"
