"""The events and effects of the coordinator's decisions.

Question  What is the coordinator's decision told, and what can it order?
Holds     Every event and effect is one frozen value; ``core.membership.advance.advance`` maps events to effects.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from typing import NewType

import msgspec

from pliant.core.membership.compatibility import Terms
from pliant.types import WorkerId

SlotId = NewType("SlotId", str)
"""A launcher's slot for one process, ``w2``; its workers, one after the other, are ``w2``, ``w2.2``, ``w2.3``, …"""

AgentId = NewType("AgentId", str)
"""A launcher, ``a0``."""

# Events of workers


class Arrived(msgspec.Struct, frozen=True):
    """A worker has connected. ``worker`` is empty for a newcomer; otherwise it goes on under that name."""

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
    """The worker asks to be a member of the next era.

    ``dead_after_s`` and ``hung_after_s`` are the script's settings, if any. ``length`` is the length of the dataset in
    the script's call, ``recorded`` that of the same call in the journal, if known.
    """

    worker: WorkerId
    terms: Terms
    address: str = ""
    dead_after_s: float | None = None
    hung_after_s: float | None = None
    length: int | None = None
    recorded: int | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    """A sign of life of the process, sent at short intervals, with the progress of its main loop."""

    worker: WorkerId
    round: int
    progress: int
    waiting: bool = False
    usual_s: float = 0.0
    active: bool | None = None
    era: int | None = None
    """the era it is in, or was in last; None: not given"""
    exchange: int | None = None
    """exchanges settled so far; None: not given"""
    lasts_s: float = 0.0
    """for how long its main loop has been at this point"""
    ending: bool = False
    """it waits at the end of its script"""
    busy: str = ""
    """what the script says it is doing (``run.busy``)"""
    expected_s: float = 0.0
    """how long that takes in all, as far as known"""
    pace: float = 0.0
    """samples per second; 0: not known"""
    handoff_s: float = 0.0
    """how long it took to fetch the state; 0: not known"""


class Leaving(msgspec.Struct, frozen=True):
    """The worker leaves, because of a signal or because its script asked for it."""

    worker: WorkerId
    reason: str = ""


class Stopped(msgspec.Struct, frozen=True):
    """The worker has stopped in ``era`` after settling ``exchange`` exchanges.

    ``failed`` says why, if the coordinator did not tell it to stop. ``active``: it holds the model's whole state.
    ``whole``: it has the user's own state, too.
    """

    worker: WorkerId
    era: int
    exchange: int
    active: bool
    failed: str = ""
    whole: bool = True


class Unformed(msgspec.Struct, frozen=True):
    """The worker could not form the group of ``era``, and has abandoned it.

    ``unreached``: members whose data ports it could not reach. ``connecting``: it got as far as trying to connect.
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
    """The worker reports that it cannot go on. ``fatal``: no restart can fix the error, on any worker. ``own``: the
    same, but only for this worker."""

    worker: WorkerId
    reason: str
    fatal: bool = False
    own: bool = False


class Finished(msgspec.Struct, frozen=True):
    """The worker left ``join`` in an orderly way; ``left``: it was asked to, or the run is ``over`` for all."""

    worker: WorkerId
    left: bool = False
    over: bool = False


class ConnectionLost(msgspec.Struct, frozen=True):
    """An admitted worker's connection is closed."""

    worker: WorkerId
    peer: int


# Events of agents and people


class AgentArrived(msgspec.Struct, frozen=True):
    """A launcher has connected. ``agent`` is empty for a new one; ``slots`` are those it already has."""

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
    """A process has ended. ``status`` is the exit status, or minus the signal; ``error`` is the last exception."""

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
    """A launcher's machine will be taken away: its workers must leave."""

    agent: AgentId


class Scaled(msgspec.Struct, frozen=True):
    """A user asks for this number of workers; ``processes.scale_refusal`` has accepted it."""

    workers: int


class Drained(msgspec.Struct, frozen=True):
    """A user asks this slot's worker to leave; ``processes.drain_refusal`` has accepted it."""

    slot: SlotId


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class CoordinatorFailed(msgspec.Struct, frozen=True):
    """The coordinator itself cannot go on, for example because its disk is full."""

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
    """Tell the connection why it is refused, and close it. ``again``: it may come back as a newcomer."""

    peer: int
    reason: str
    again: bool = False


class Dismiss(msgspec.Struct, frozen=True):
    """Tell the connection that the run is over for it, and close it."""

    peer: int
    reason: str
    completed: bool = False


class Close(msgspec.Struct, frozen=True):
    """Close the connection: its worker has said goodbye, or another connection has replaced it."""

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
    """set if no worker holds the state: the donor reads the first of these that is undamaged"""


class PlanEra(msgspec.Struct, frozen=True):
    """Tell ``to``, the present and the coming members, to form the group in the background."""

    era: int
    attempt: int
    roster: tuple[WorkerId, ...]
    donor: WorkerId
    addresses: tuple[tuple[WorkerId, str], ...]
    to: tuple[WorkerId, ...]


class BreakEra(msgspec.Struct, frozen=True):
    """Tell ``to`` that every era up to this one is over, and which workers are likely to be in the next one."""

    era: int
    reason: str
    to: tuple[WorkerId, ...]
    attempt: int = 0
    """attempt number under which their group may be formed already; 0: not known"""
    roster: tuple[WorkerId, ...] = ()


class VoidPlan(msgspec.Struct, frozen=True):
    """Tell ``to`` that the planned era is dropped; the present one goes on."""

    era: int
    to: tuple[WorkerId, ...]


class AskToLeave(msgspec.Struct, frozen=True):
    """Ask a member to leave in an orderly way."""

    worker: WorkerId
    reason: str


class StopAll(msgspec.Struct, frozen=True):
    """Tell every connected worker that the run is over."""

    reason: str


# Effects on agents


class Enroll(msgspec.Struct, frozen=True):
    """From now on the connection speaks for the launcher; ``slots`` are all its slots."""

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
    """The first worker has finished its script: record that durably."""

    worker: WorkerId


class Note(msgspec.Struct, frozen=True):
    """An event for the user: ``kind`` is a word for programs, ``text`` one line for people.

    Quiet ones are kept in the list of events, but not shown on the launchers' terminals.
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
