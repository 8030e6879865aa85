"""What can happen to a run's workers, and what can be done about it.

Question  What does the coordinator's decision get to know, and what may it order?
Holds     Every event and effect is one frozen value; ``core.roster.advance`` maps the ones to the others.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from pliant.core.terms import Terms
from pliant.types import Era, WorkerId

# Events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A connection introduced itself."""

    peer: int
    worker: WorkerId
    version: str


@dataclass(frozen=True, slots=True)
class Offered:
    """``join`` was called. ``dead_after_s`` is the script's setting, if it has one."""

    worker: WorkerId
    terms: Terms
    dead_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Beaten:
    """A sign of life."""

    worker: WorkerId
    round: int
    progress: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker says it cannot go on."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker left ``join`` in good order."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """An admitted worker's connection is closed."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """From waitpid: exit status, or minus the signal."""

    worker: WorkerId
    status: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The launcher got a signal: 2 for Ctrl-C, 15 for SIGTERM."""

    signal: int


@dataclass(frozen=True, slots=True)
class Hindered:
    """The coordinator itself cannot go on: its disk is full, for one."""

    reason: str


Event = Arrived | Offered | Beaten | Failed | Finished | ConnectionLost | ProcessExited | Tick | Interrupted | Hindered


# Effects


@dataclass(frozen=True, slots=True)
class Admit:
    """From now on the connection speaks for the worker."""

    peer: int
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the connection why it is not wanted, and close it."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a latecomer that the run is over."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartEra:
    """Tell all members."""

    era: Era
    attempt: int
    roster: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A worker has said its last word; its connection can be closed."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class StopAll:
    """Tell every connected worker that the run is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to the process."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the process and its children."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over; nothing follows."""

    reason: str
    completed: bool
    exit_status: int


Effect = Admit | Refuse | Dismiss | StartEra | Release | StopAll | Terminate | Kill | Note | Ended
