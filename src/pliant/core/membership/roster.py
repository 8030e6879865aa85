"""What the coordinator knows: agents, slots, workers, the era and the run.

Question  Which states can a launcher, its processes, a worker, the course of eras and a whole run be in?
Holds     States that exclude each other are classes of one union. ``Roster.workers`` are those that are not gone:
          members in the order of their era, then the others in the order in which they became ready.
Source    ours; docs/protocol.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from pliant.core.membership.compatibility import Terms
from pliant.core.membership.events import AgentArrived, AgentId, Effect, PlanEra, SlotId, StartEra
from pliant.core.membership.reachability import Reachability
from pliant.types import WorkerId

DEAD_AFTER_S = 5.0
"""A member that gave no sign of life for this long is lost."""

HUNG_AFTER_S = 600.0
"""A process that gives signs of life but no progress is killed after this long."""

GRACE_S = 5.0
"""Between asking a worker to stop, terminating it and killing it."""

COOLDOWN_S = 0.5
"""Before a slot's process is started again; doubled every time."""

NAMES_PER_TERM = 100
"""A new coordinator does not know the names that the lost one gave to workers that never got into an era. It begins
with numbers that the lost one cannot have reached: with cooldowns, so many restarts take the better part of an hour."""

MOST_SLOTS = 1000
"""Processes that a run may have at a time. More were never formed into a group; without a bound one message of a
launcher, or one slip in ``pliant scale``, fills the memory."""

MOST_SLOTS_EVER = 4 * MOST_SLOTS
"""Those that are gone for good included."""

CHECKPOINTS_KEPT = 3
"""A damaged one is not the end."""

ATTEMPTS_PER_TERM = 1_000_000
"""Attempts are numbered from the term's number times this, so that no two coordinators use the same one."""


# A launcher


class Agent(msgspec.Struct, frozen=True):
    """One launcher. ``peer`` is None while its connection is lost, since ``gone_s``."""

    name: AgentId
    owner: bool
    peer: int | None
    gone_s: float = 0.0
    leaving: bool = False
    """its workers are to leave; the second signal does not wait for that"""
    released: bool = False
    """it was told that the run is over for it"""


# A slot and its process


class Alive(msgspec.Struct, frozen=True):
    """Started, and not known to have ended. ``greeted``: it has called ``join``."""

    greeted: bool = False


class Ending(msgspec.Struct, frozen=True):
    """Has ended; what that means is not decided yet."""

    status: int
    since_s: float
    greeted: bool
    error: str


class EndedProcess(msgspec.Struct, frozen=True):
    """Has ended. ``restart_s`` is when it is to be started again, if at all."""

    status: int
    restart_s: float | None = None


Process = Alive | Ending | EndedProcess


class SlotOutcome(enum.Enum):
    """What is to become of a slot."""

    KEPT = "kept"
    FINISHED = "finished"
    LEFT = "left"
    GIVEN_UP = "given up"


class StopStage(enum.IntEnum):
    """How firmly processes were told to end."""

    ASKED = 0
    TERMINATED = 1
    KILLED = 2


class Away(msgspec.Struct, frozen=True):
    """The process lives, but is off the roster; it comes back by itself when its main loop gets on."""

    since_s: float
    kill_s: float
    """when it is ended, and started again"""
    left_out: bool = False
    """it gave signs of life, but the others did not wait for it"""
    busy: str = ""
    """what its script has said that it is doing"""


class Slot(msgspec.Struct, frozen=True):
    """A place for one process. ``agent`` is empty while the launcher has not come back to a new coordinator."""

    name: SlotId
    agent: AgentId
    process: Process = Alive()
    pid: int = 0
    """of the process that ended last"""
    fate: SlotOutcome = SlotOutcome.KEPT
    names: int = 0
    """how many names were given to its workers"""
    cooldown_s: float = COOLDOWN_S
    restarts: int = 0
    failure: str = ""
    """what the present process said before it ended"""
    errors: tuple[str, ...] = ()
    """how its last processes failed, at most two; empty text for one that did not fail by itself"""
    inherited: bool = False
    """named by an earlier coordinator, and its present process has not been heard by this one"""
    unjoined: int = 0
    """processes in a row that failed before they called ``join``"""
    away: Away | None = None
    """its process, which lives, is off the roster"""
    urged: StopStage = StopStage.ASKED
    """the firmest signal that was sent to its present process"""

    @property
    def is_left_out(self) -> bool:
        """Whether its process is at something of its own, and comes back by itself."""
        return self.away is not None and self.away.left_out


# A worker


class Connected(msgspec.Struct, frozen=True):
    """``peer`` is the number of its connection."""

    peer: int


class Disconnected(msgspec.Struct, frozen=True):
    """The connection closed without a word."""

    since_s: float


Connection = Connected | Disconnected


class Greeted(msgspec.Struct, frozen=True):
    """Has called ``join``, and does not want to be in an era yet."""


class Waiting(msgspec.Struct, frozen=True):
    """Ready for an era."""

    terms: Terms
    address: str
    noted: bool = False
    """the user knows that it waits for a place"""


class EraMember(msgspec.Struct, frozen=True):
    """Belongs to the era, or to the planned one."""

    address: str
    since_s: float
    era: int = 0
    """the last one it said it was in; 0 for a newcomer"""
    exchange: int = 0
    """exchanges settled, as far as it has said"""
    active: bool | None = None
    """whether it holds the whole state; None: not known, and believed once it is in an era"""
    stopped_s: float | None = None
    """since when it has stopped in its era; None: it has not"""
    failed: str = ""
    """why it stopped, if nobody told it to"""
    whole: bool = True
    """false: when it stopped, the user's own state was still on its way to it"""
    leaving: str | None = None
    """why it is to go; None: it stays"""
    leaving_s: float = 0.0
    asked: bool = False
    """it was the coordinator that asked it to go"""
    progress: int = 0
    progress_s: float = 0.0
    """since when its main loop is where it is"""
    waiting: bool = False
    """its main loop waits for others"""
    ending: bool = False
    """... at the end of its script"""
    usual_s: float = 0.0
    """of a step of its main loop; 0: not known in this phase"""
    busy: str = ""
    """what its script has said that it is doing; empty: nothing"""
    expected_s: float = 0.0
    """how long that takes in all, as far as known"""
    pace: float = 0.0
    """samples per second; 0: not known"""
    handoff_s: float = 0.0
    """how long it took to take the state over; 0: not known"""
    terms: Terms | None = None
    """of one that waited before: it may have to wait again"""

    @property
    def is_active(self) -> bool:
        """Whether it is believed to hold the whole state."""
        return self.era > 0 if self.active is None else self.active


class Departing(msgspec.Struct, frozen=True):
    """Its last era is over; it says goodbye in its own time, but not later than ``dead_after``."""

    since_s: float = 0.0


Participation = Greeted | Waiting | EraMember | Departing


class SlotWorker(msgspec.Struct, frozen=True):
    """One incarnation of a slot."""

    name: WorkerId
    slot: SlotId
    pid: int
    line: Connection
    standing: Participation
    heard_s: float


# The course of eras


class Idle(msgspec.Struct, frozen=True):
    """There is no era."""


class EraForming(msgspec.Struct, frozen=True):
    """Everybody was told to enter an era; it is in force when all are in it. ``floor`` as in ``Steady``."""

    start: StartEra
    floor: int


class Steady(msgspec.Struct, frozen=True):
    """An era is in force. ``floor``: what members said of older eras is out of date."""

    era: int
    floor: int


class Planned(msgspec.Struct, frozen=True):
    """An era is in force and the next one is being formed beside it."""

    era: int
    floor: int
    plan: PlanEra


class Halting(msgspec.Struct, frozen=True):
    """Every era up to ``era`` is over; the members' answers are awaited."""

    era: int
    floor: int
    reason: str
    since_s: float
    attempt: int = 0
    """under which the group of ``roster`` is being formed already; 0: none is"""
    roster: tuple[WorkerId, ...] = ()
    noted: bool = False
    """the user knows that there are too few workers"""


Course = Idle | EraForming | Steady | Planned | Halting


# The run


class Gathering(msgspec.Struct, frozen=True):
    """No era has started yet, or none in which anything was done."""


class Running(msgspec.Struct, frozen=True):
    """There are eras."""


class Finishing(msgspec.Struct, frozen=True):
    """A member has finished its script; the others do so on their own."""

    since_s: float
    urged: bool = False


class Stopping(msgspec.Struct, frozen=True):
    """Waiting for the processes to end. ``status`` is None where the exit status of the slot ``culprit`` decides."""

    reason: str
    urge: StopStage
    since_s: float
    culprit: SlotId | None = None
    status: int | None = None


class RunOver(msgspec.Struct, frozen=True):
    """All processes have ended."""

    reason: str
    completed: bool
    exit_status: int


Stage = Gathering | Running | Finishing | Stopping | RunOver


class Rules(msgspec.Struct, frozen=True):
    """What is fixed for a run before it starts."""

    script: str
    version: str
    min_workers: int = 1
    max_workers: int | None = None
    grace_s: float = GRACE_S


class Roster(msgspec.Struct, frozen=True):
    """The whole state."""

    rules: Rules
    term: int
    started_s: float
    dead_after_s: float = DEAD_AFTER_S
    hung_after_s: float = HUNG_AFTER_S
    stage: Stage = Gathering()
    course: Course = Idle()
    agents: tuple[Agent, ...] = ()
    slots: tuple[Slot, ...] = ()
    workers: tuple[SlotWorker, ...] = ()
    terms: Terms | None = None
    """of the first era: what a newcomer has to agree with"""
    last_era: int = 0
    last_attempt: int = 0
    last_slot: int = -1
    last_agent: int = -1
    settled: int = 0
    """exchanges that were settled by somebody, as far as known"""
    fruitless: int = 0
    """eras started in a row without an exchange settled in between"""
    started_at: int = -1
    """``exchange`` of the last era that was started"""
    reach: Reachability = Reachability()
    """who cannot reach whom"""
    broken: str = ""
    """why the era cannot go on; empty: it can"""
    hearsay: bool = False
    """the era is known from its members alone: whoever died before this coordinator came may have been one of them"""
    patient_until_s: float = 0.0
    """until then nobody is lost for being silent"""
    trusting_until_s: float = 0.0
    """until then a new coordinator takes workers and launchers at their word"""
    held: tuple[AgentArrived, ...] = ()
    """new launchers that wait until a new coordinator knows which names are taken"""
    heard_s: float = 0.0
    """when the last event was taken"""
    ghosts: frozenset[WorkerId] = frozenset()
    """names that are gone for good"""
    last_loss: tuple[str, SlotId | None] | None = None
    verdict: str = ""
    """why the last slot was given up"""
    checkpoints: tuple[str, ...] = ()
    """those that the journal names, newest first"""
    rewinds: int = 0
    """how often the run has gone back to one of them"""
    rewound_to: str = ""
    """the newest there was the last time"""
    relapses: int = 0
    """how often in a row the script has failed since that one, and everything was lost with it, after the first time"""


Step = tuple[Roster, tuple[Effect, ...]]


# Looking up and replacing


def era_of(course: Course) -> int:
    """The number of the era in force, or of the last one that was; 0: there is none."""
    match course:
        case Idle():
            return 0
        case EraForming(start=start):
            return start.era
        case Steady(era=era) | Planned(era=era) | Halting(era=era):
            return era


def members_of(state: Roster) -> Iterator[tuple[SlotWorker, EraMember]]:
    """All members, in order."""
    for worker in state.workers:
        if isinstance(worker.standing, EraMember):
            yield worker, worker.standing


def worker_of(state: Roster, name: WorkerId) -> SlotWorker | None:
    """None for one that is gone, or never was."""
    return next((worker for worker in state.workers if worker.name == name), None)


def worker_in(state: Roster, slot: SlotId) -> SlotWorker | None:
    """Who speaks for the slot."""
    return next((worker for worker in state.workers if worker.slot == slot), None)


def slot_of(state: Roster, name: SlotId) -> Slot | None:
    """None for one that nobody was given."""
    return next((slot for slot in state.slots if slot.name == name), None)


def agent_of(state: Roster, name: AgentId) -> Agent | None:
    """None for one that never came."""
    return next((agent for agent in state.agents if agent.name == name), None)


def owner_of(state: Roster) -> Agent | None:
    """The launcher with which the run ends."""
    return next((agent for agent in state.agents if agent.owner), None)


def is_reachable(state: Roster, slot: Slot) -> bool:
    """Whether its launcher would hear what is to be done with it."""
    agent = agent_of(state, slot.agent)
    return agent is not None and agent.peer is not None


def with_worker(state: Roster, worker: SlotWorker) -> Roster:
    """The state with this worker in the place of the one of its name, or at the end."""
    if worker_of(state, worker.name) is None:
        return replace(state, workers=(*state.workers, worker))
    return replace(state, workers=tuple(worker if w.name == worker.name else w for w in state.workers))


def without_worker(state: Roster, name: WorkerId) -> Roster:
    """The state after a worker has gone for good."""
    workers = tuple(worker for worker in state.workers if worker.name != name)
    # Later nobody is taken at its word any more: a name that is not here is gone.
    trusting = state.heard_s < state.trusting_until_s
    return replace(state, workers=workers, ghosts=state.ghosts | {name} if trusting else state.ghosts)


def with_standing(state: Roster, worker: SlotWorker, standing: Participation) -> Roster:
    """The state with another standing of the worker."""
    return with_worker(state, replace(worker, standing=standing))


def with_slot(state: Roster, slot: Slot) -> Roster:
    """The state with this slot in the place of the one of its name, or in the order of names."""
    if slot_of(state, slot.name) is None:
        return with_slots(state, (slot,))
    return replace(state, slots=tuple(slot if s.name == slot.name else s for s in state.slots))


def with_slots(state: Roster, slots: tuple[Slot, ...]) -> Roster:
    """The state with all these new slots, in the order of names."""
    return replace(state, slots=tuple(sorted((*state.slots, *slots), key=lambda s: name_order(s.name))))


def with_agent(state: Roster, agent: Agent) -> Roster:
    """The state with this agent in the place of the one of its name, or at the end."""
    if agent_of(state, agent.name) is None:
        return replace(state, agents=(*state.agents, agent))
    return replace(state, agents=tuple(agent if a.name == agent.name else a for a in state.agents))


def name_order(name: str) -> tuple[str, int, str]:
    """Sorts w10 behind w9."""
    letters = name.rstrip("0123456789")
    digits = name[len(letters) :]
    return letters, int(digits or "-1"), name


def slot_part(name: str) -> tuple[SlotId, int]:
    """The slot of a worker's name, and which of its names it is: ``w2.3`` is the third of ``w2``."""
    slot, _, number = name.partition(".")
    return SlotId(slot), int(number) if number.isdecimal() else 1


def listed(names: list[WorkerId]) -> str:
    """``w0, w1 go on``: who is left, in words."""
    if not names:
        return "nobody is left"
    return f"{', '.join(names)} {'goes' if len(names) == 1 else 'go'} on"
