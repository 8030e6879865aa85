"""The launcher's supervision of the coordinator's process.

Question  How does a run survive the death of its coordinator?
Holds     The launcher keeps the listening socket: connections made while there is no coordinator wait for the next
          one. A coordinator that dies again and again is given up, with a reason.
Source    ours; docs/design/0007-elastic.md. The limit is that of systemd's StartLimitBurst: 5 in 10 s.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pliant.core.journal.records import JOURNAL
from pliant.environment import plain_environment
from pliant.launch.logs import opened
from pliant.launch.process import OwnedProcess
from pliant.launch.run_directory import LOGS, PRIVATE, TOKEN

DEATHS = 5
WITHIN_S = 10.0
"""So many deaths within this time are borne; one more is not."""

REFUSED_EXIT = 3
"""The coordinator says itself, in its last line, why it cannot be started: another try would not help."""


class CoordinatorSupervisor:
    """Starts the coordinator and counts its deaths."""

    def __init__(
        self, directory: Path, listener: socket.socket, how: str = "start", publish: Callable[[], None] = lambda: None
    ) -> None:
        """``how`` it begins; once it has died it resumes the run. ``publish`` writes what it finds in the directory."""
        self._publish = publish
        self.term = 0
        """of the last one that was heard"""
        self._directory = directory
        self._how = how
        self._listener = listener
        self.died: Callable[[], None] = lambda: None
        """called in the event loop"""
        self._log = directory / LOGS / "coordinator.log"
        self._deaths: deque[float] = deque(maxlen=DEATHS + 1)
        self._status: int | None = None
        self._process: OwnedProcess | None = None

    @property
    def is_dead(self) -> bool:
        """Started, and ended."""
        return self._process is not None and not self._process.is_alive

    def start(self) -> None:
        """Start it; again, if it has died: it then resumes the run."""
        self.make_again()
        how = self._how if self._process is None else "resume"
        descriptor = self._listener.fileno()
        # -P: a module of the user's directory must not take the place of one of Python's own.
        command = [sys.executable, "-P", "-m", "pliant.launch.coordinator_process"]
        with opened(self._log) as log:
            self._process = OwnedProcess(
                [*command, str(self._directory), str(descriptor), how, str(self.term)],
                plain_environment(),
                self._ended,
                output=log,
                descriptors=(descriptor,),
            )

    def make_again(self) -> bool:
        """Write what belongs to the run directory, where somebody has removed it; whether that was so."""
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
    def has_lost_journal(self) -> bool:
        """Whether what the last coordinator had written is not there any more."""
        return self.term > 0 and not (self._directory / JOURNAL).exists()

    def hopeless(self) -> str | None:
        """Why there is no use in starting it again."""
        if self._status == REFUSED_EXIT:
            return self._last_words()
        if len(self._deaths) > DEATHS and self._deaths[-1] - self._deaths[0] <= WITHIN_S:
            return (
                f"the coordinator died {len(self._deaths)} times within {WITHIN_S:g} s, so the run ends; "
                f"what it said last is in {self._log}"
            )
        return None

    def close(self) -> None:
        """End it, if it lives."""
        if self._process is not None:
            self._process.dispose()

    def _ended(self, status: int) -> None:
        self._status = status
        self._deaths.append(time.monotonic())
        self.died()

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "the coordinator could not be started"
