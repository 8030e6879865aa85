"""What can happen to a run's workers, and what can be done about it.

Question  What does the coordinator's decision get to know, and what may it order?
Holds     Every event and effect is one frozen value; ``core.membership.advance.advance`` maps the ones to the others.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from typing import NewType

import msgspec

from pliant.core.membership.compatibility import Terms
from pliant.types import WorkerId

SlotId = NewType("SlotId", str)
"""A launcher's place for one process, ``w2``; the workers in it are ``w2``, ``w2.2``, ``w2.3``, …"""

AgentId = NewType("AgentId", str)
"""A launcher, ``a0``."""

# Events of workers


class Arrived(msgspec.Struct, frozen=True):
    """A worker's connection introduced itself. ``worker`` is empty for a newcomer; else it goes on under that name."""

    peer: int
    slot: SlotId
    worker: WorkerId
    version: str
    pid: int = 0
    era: int = 0
    exchange: int = 0
    active: bool = False
    terms: Terms | None = None
    address: str = ""


class JoinRequested(msgspec.Struct, frozen=True):
    """The worker wants to be a member of the next era.

    ``dead_after_s``, ``hung_after_s`` are the script's settings, if it has any. ``length`` is that of the dataset it
    enlists with, ``recorded`` that of the same call in the journal, where it is known.
    """

    worker: WorkerId
    terms: Terms
    address: str = ""
    dead_after_s: float | None = None
    hung_after_s: float | None = None
    length: int | None = None
    recorded: int | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """A sign of life, of the process and of its main loop."""

    worker: WorkerId
    round: int
    progress: int
    waiting: bool = False
    usual_s: float = 0.0
    active: bool | None = None
    era: int | None = None
    """the one it is in, or was in last; None: not said"""
    exchange: int | None = None
    """exchanges settled so far; None: not said"""
    lasts_s: float = 0.0
    """for how long its main loop has been where it is"""
    ending: bool = False
    """it waits at the end of its script"""
    busy: str = ""
    """what its script has said that it is doing"""
    expected_s: float = 0.0
    """how long that takes in all, as far as known"""
    pace: float = 0.0
    """samples per second; 0: not known"""
    handoff_s: float = 0.0
    """how long it took to take the state over; 0: not known"""


class Leaving(msgspec.Struct, frozen=True):
    """The worker was asked to go, by a signal or by its script."""

    worker: WorkerId
    reason: str = ""


class Stopped(msgspec.Struct, frozen=True):
    """The worker has stopped in ``era`` after settling ``exchange``; ``failed`` says why, if nobody told it to.

    ``whole``: it has the user's own state, too.
    """

    worker: WorkerId
    era: int
    exchange: int
    active: bool
    failed: str = ""
    whole: bool = True


class Unformed(msgspec.Struct, frozen=True):
    """The worker could not form the group of ``era``, and has given it up.

    ``unreached``: whose data ports it could not reach; ``connecting``: it came so far as to try.
    """

    worker: WorkerId
    era: int
    unreached: tuple[WorkerId, ...] = ()
    connecting: bool = True


class Entered(msgspec.Struct, frozen=True):
    """The worker is in ``era`` now."""

    worker: WorkerId
    era: int
    exchange: int


class Failed(msgspec.Struct, frozen=True):
    """The worker says it cannot go on. ``fatal``: no restart could mend it, on any worker; ``own``: only this one's."""

    worker: WorkerId
    reason: str
    fatal: bool = False
    own: bool = False


class Finished(msgspec.Struct, frozen=True):
    """The worker left ``join`` in good order; ``left``: because it was asked to go, or the run is ``over`` for all."""

    worker: WorkerId
    left: bool = False
    over: bool = False


class ConnectionLost(msgspec.Struct, frozen=True):
    """An admitted worker's connection is closed."""

    worker: WorkerId
    peer: int


# Events of agents and people


class AgentArrived(msgspec.Struct, frozen=True):
    """A launcher's connection introduced itself. ``agent`` is empty for a new one; ``slots`` are those it has."""

    peer: int
    agent: AgentId
    version: str
    slots: tuple[SlotId, ...]
    wanted: int
    owner: bool


class AgentLost(msgspec.Struct, frozen=True):
    """A launcher's connection is closed."""

    agent: AgentId
    peer: int


class ProcessExited(msgspec.Struct, frozen=True):
    """From a launcher's waitpid: exit status, or minus the signal; ``error`` is its last exception."""

    agent: AgentId
    slot: SlotId
    pid: int
    status: int
    error: str = ""


class Interrupted(msgspec.Struct, frozen=True):
    """A launcher got a signal: 2 for Ctrl-C, 15 for SIGTERM."""

    agent: AgentId
    signal: int


class PreemptionNotice(msgspec.Struct, frozen=True):
    """A launcher's machine goes away: its workers are to leave."""

    agent: AgentId


class Scaled(msgspec.Struct, frozen=True):
    """Somebody wants so many workers; ``slots.scale_refusal`` has nothing against it."""

    workers: int


class Drained(msgspec.Struct, frozen=True):
    """Somebody wants this slot's worker to leave; ``slots.drain_refusal`` has nothing against it."""

    slot: SlotId


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class CoordinatorFailed(msgspec.Struct, frozen=True):
    """The coordinator itself cannot go on: its disk is full, for one."""

    reason: str


OfWorker = JoinRequested | Leaving | Stopped | Unformed | Entered | Failed | Finished | ConnectionLost
OfAgent = AgentLost | ProcessExited | Interrupted | PreemptionNotice
Event = Arrived | AgentArrived | Heartbeat | OfWorker | OfAgent | Scaled | Drained | Tick | CoordinatorFailed


# Effects on workers


class Admit(msgspec.Struct, frozen=True):
    """From now on the connection speaks for the worker. ``running``: training has begun."""

    peer: int
    worker: WorkerId
    running: bool


class Refuse(msgspec.Struct, frozen=True):
    """Tell the connection why it is not wanted, and close it. ``again``: it may come back as a newcomer."""

    peer: int
    reason: str
    again: bool = False


class Dismiss(msgspec.Struct, frozen=True):
    """Tell the connection that the run is over for it, and close it."""

    peer: int
    reason: str
    completed: bool = False


class Close(msgspec.Struct, frozen=True):
    """The connection has said its last word, or another one has taken its place."""

    peer: int


class StartEra(msgspec.Struct, frozen=True):
    """Tell ``to`` to form the group and to enter the era at once."""

    era: int
    attempt: int
    roster: tuple[WorkerId, ...]
    donor: WorkerId
    exchange: int
    addresses: tuple[tuple[WorkerId, str], ...]
    to: tuple[WorkerId, ...]
    checkpoints: tuple[str, ...] = ()
    """nobody holds the state: the donor reads the first of these that is whole"""


class PlanEra(msgspec.Struct, frozen=True):
    """Tell ``to``, the present and the coming members, to form the group in the background."""

    era: int
    attempt: int
    roster: tuple[WorkerId, ...]
    donor: WorkerId
    addresses: tuple[tuple[WorkerId, str], ...]
    to: tuple[WorkerId, ...]


class BreakEra(msgspec.Struct, frozen=True):
    """Tell ``to`` that every era up to this one is over, and who is likely to be in the next one."""

    era: int
    reason: str
    to: tuple[WorkerId, ...]
    attempt: int = 0
    """under which their group may be formed beforehand; 0: nobody knows"""
    roster: tuple[WorkerId, ...] = ()


class VoidPlan(msgspec.Struct, frozen=True):
    """Tell ``to`` that the planned era will not come about; the present one goes on."""

    era: int
    to: tuple[WorkerId, ...]


class AskToLeave(msgspec.Struct, frozen=True):
    """Ask a member to go in good order."""

    worker: WorkerId
    reason: str


class StopAll(msgspec.Struct, frozen=True):
    """Tell every connected worker that the run is over."""

    reason: str


# Effects on agents


class Enroll(msgspec.Struct, frozen=True):
    """From now on the connection speaks for the launcher; ``slots`` are all it has."""

    peer: int
    agent: AgentId
    slots: tuple[SlotId, ...]


class Start(msgspec.Struct, frozen=True):
    """Let the launcher start a process in the slot."""

    agent: AgentId
    slot: SlotId


class Terminate(msgspec.Struct, frozen=True):
    """Let the launcher send SIGTERM to the slot's process."""

    agent: AgentId
    slot: SlotId


class Kill(msgspec.Struct, frozen=True):
    """Let the launcher send SIGKILL to the slot's process and its children."""

    agent: AgentId
    slot: SlotId


class ReleaseAgent(msgspec.Struct, frozen=True):
    """The run is over for this launcher, though not for the others."""

    agent: AgentId
    reason: str
    exit_status: int


class Finishes(msgspec.Struct, frozen=True):
    """The first worker has come to the end of its script: that must not be forgotten."""

    worker: WorkerId


class Note(msgspec.Struct, frozen=True):
    """Something notable happened: ``kind`` is a word for programs, ``text`` one line for people.

    Quiet ones are kept among the run's events, but not shown on the launchers' screens.
    """

    kind: str
    text: str
    worker: str = ""
    quiet: bool = False


class Ended(msgspec.Struct, frozen=True):
    """The run is over; nothing follows."""

    reason: str
    completed: bool
    exit_status: int


OnWorker = Admit | Refuse | Dismiss | Close | StartEra | PlanEra | BreakEra | VoidPlan | AskToLeave | StopAll
OnAgent = Enroll | Start | Terminate | Kill | ReleaseAgent
Effect = OnWorker | OnAgent | Finishes | Note | Ended
