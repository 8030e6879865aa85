"""The states a worker, its process and a whole run can be in.

Question  What does the coordinator know of every worker?
Holds     States that exclude each other are classes of one union. Members are in the order of their names.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pliant.core.terms import Terms
from pliant.types import Era, WorkerId

DEAD_AFTER_S = 5.0
"""A worker in an era that gave no sign of life for this long is lost."""

# A worker's connection


@dataclass(frozen=True, slots=True)
class Away:
    """Has not called ``join`` yet."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """Connected; its model is not known yet."""

    peer: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Ready for an era."""

    peer: int
    terms: Terms


@dataclass(frozen=True, slots=True)
class Training:
    """A member of the era."""

    peer: int
    beat_s: float
    round: int = 0
    progress: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """Left ``join`` in good order."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Said itself that it cannot go on, or was refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection closed without a word."""

    since_s: float


Link = Away | Greeted | Waiting | Training | Done | Broken | Cut


# A worker's process


@dataclass(frozen=True, slots=True)
class Alive:
    """Not known to have ended."""


@dataclass(frozen=True, slots=True)
class Exited:
    """``status`` as waitpid tells it: the exit status, or minus the signal."""

    status: int
    since_s: float


Process = Alive | Exited


@dataclass(frozen=True, slots=True)
class Member:
    """One expected worker."""

    worker: WorkerId
    link: Link = Away()
    process: Process = Alive()


# The run


@dataclass(frozen=True, slots=True)
class Gathering:
    """Not all workers are ready."""


@dataclass(frozen=True, slots=True)
class Running:
    """An era is under way."""

    era: Era
    attempt: int


class Urge(enum.IntEnum):
    """What the workers of a stopping run were told last."""

    ASKED = 0
    TERMINATED = 1
    KILLED = 2


@dataclass(frozen=True, slots=True)
class Stopping:
    """Waiting for the processes to end. ``status`` is None where the culprit's exit status decides."""

    reason: str
    urge: Urge
    since_s: float
    culprit: WorkerId | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Over:
    """All processes have ended."""

    reason: str
    completed: bool
    exit_status: int


Stage = Gathering | Running | Stopping | Over


@dataclass(frozen=True, slots=True)
class Roster:
    """The whole state. ``members`` are in the order of their names, the first is the leader."""

    script: str
    version: str
    members: tuple[Member, ...]
    stage: Stage = Gathering()
    dead_after_s: float = DEAD_AFTER_S
    last_era: int = 0
    last_attempt: int = 0
