"""The coordinator's state: agents, slots, workers, the era and the run.

Question  Which states can a launcher, its processes, a worker, the course of eras and a whole run be in?
Holds     States that exclude each other are classes of one union. ``Roster.workers`` are the workers that are not gone:
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
"""A member without a heartbeat for this long is lost."""

HUNG_AFTER_S = 600.0
"""A process that sends heartbeats but makes no progress is killed after this long."""

GRACE_S = 5.0
"""Time between asking a worker to stop, terminating it and killing it."""

COOLDOWN_S = 0.5
"""Delay before a slot's process is started again; doubled every time."""

NAMES_PER_TERM = 100
"""A new coordinator does not know the names that the lost one gave to workers that never got into an era. It begins
with numbers that the lost one cannot have reached: with cooldowns, this many restarts take most of an hour."""

MOST_SLOTS = 1000
"""Processes that a run may have at a time. Larger groups have never been tried; without a bound one message of a
launcher, or a typing error in ``pliant scale``, exhausts the memory."""

MOST_SLOTS_EVER = 4 * MOST_SLOTS
"""The same, including the slots that are gone for good."""

CHECKPOINTS_KEPT = 3
"""More than one, in case one is damaged."""

ATTEMPTS_PER_TERM = 1_000_000
"""Attempts are numbered from the term times this, so that no two coordinators use the same number."""


# A launcher


class Agent(msgspec.Struct, frozen=True):
    """One launcher. ``peer`` is None while its connection is lost, since ``gone_s``."""

    name: AgentId
    owner: bool
    peer: int | None
    gone_s: float = 0.0
    leaving: bool = False
    """its workers were asked to leave; a second signal does not wait for that"""
    released: bool = False
    """it was told that the run is over for it"""


# A slot and its process


class Alive(msgspec.Struct, frozen=True):
    """The process was started, and is not known to have ended. ``greeted``: it has called ``join``."""

    greeted: bool = False


class Ending(msgspec.Struct, frozen=True):
    """The process has ended; what follows from that is not decided yet."""

    status: int
    since_s: float
    greeted: bool
    error: str


class EndedProcess(msgspec.Struct, frozen=True):
    """The process has ended. ``restart_s`` is when it is started again, if at all."""

    status: int
    restart_s: float | None = None


Process = Alive | Ending | EndedProcess


class SlotOutcome(enum.Enum):
    """Whether a slot still gets a process, and why not."""

    KEPT = "kept"
    FINISHED = "finished"
    LEFT = "left"
    GIVEN_UP = "given up"


class StopStage(enum.IntEnum):
    """How firmly processes were told to end: by a message, SIGTERM or SIGKILL."""

    ASKED = 0
    TERMINATED = 1
    KILLED = 2


class Away(msgspec.Struct, frozen=True):
    """The process lives, but is off the roster; it comes back by itself when its main loop makes progress."""

    since_s: float
    kill_s: float
    """when the process is killed and started again"""
    left_out: bool = False
    """it sent heartbeats, but the others did not wait for it"""
    busy: str = ""
    """what the script says it is doing"""


class Slot(msgspec.Struct, frozen=True):
    """Room for one process, at one launcher. ``agent`` is empty until the launcher has found a new coordinator."""

    name: SlotId
    agent: AgentId
    process: Process = Alive()
    pid: int = 0
    """pid of the process that ended last"""
    fate: SlotOutcome = SlotOutcome.KEPT
    names: int = 0
    """how many names were given to its workers"""
    cooldown_s: float = COOLDOWN_S
    restarts: int = 0
    failure: str = ""
    """the error that the present process reported before it ended"""
    errors: tuple[str, ...] = ()
    """errors of its last two processes; an empty text for one that did not fail by itself"""
    inherited: bool = False
    """named by an earlier coordinator; this one has not heard from its present process"""
    unjoined: int = 0
    """processes in a row that failed before they called ``join``"""
    away: Away | None = None
    """set while its process lives but is off the roster"""
    urged: StopStage = StopStage.ASKED
    """the strongest signal that was sent to its present process"""

    @property
    def is_left_out(self) -> bool:
        """Whether its process is off the roster for being slow or busy, and comes back by itself."""
        return self.away is not None and self.away.left_out


# A worker


class Connected(msgspec.Struct, frozen=True):
    """The worker is connected; ``peer`` is the number of the connection."""

    peer: int


class Disconnected(msgspec.Struct, frozen=True):
    """The connection closed without a goodbye."""

    since_s: float


Connection = Connected | Disconnected


class Greeted(msgspec.Struct, frozen=True):
    """It has called ``join``, but has not asked to be in an era yet."""


class Waiting(msgspec.Struct, frozen=True):
    """It is ready for an era."""

    terms: Terms
    address: str
    noted: bool = False
    """the user was told that it waits because the run is full"""


class EraMember(msgspec.Struct, frozen=True):
    """It belongs to the present era, or to the planned one."""

    address: str
    since_s: float
    era: int = 0
    """the last era it reported to be in; 0 for a newcomer"""
    exchange: int = 0
    """exchanges it has settled, as last reported"""
    active: bool | None = None
    """whether it holds the whole state; None: not known, and assumed once it is in an era"""
    stopped_s: float | None = None
    """since when it has stopped in its era; None: it has not"""
    failed: str = ""
    """why it stopped, if the coordinator had not broken the era"""
    whole: bool = True
    """false: when it stopped, it had not received the user's own state yet"""
    leaving: str | None = None
    """why it leaves; None: it stays"""
    leaving_s: float = 0.0
    asked: bool = False
    """the coordinator asked it to leave"""
    progress: int = 0
    progress_s: float = 0.0
    """since when its main loop has been at this point"""
    waiting: bool = False
    """its main loop waits for others"""
    ending: bool = False
    """its main loop waits at the end of its script"""
    usual_s: float = 0.0
    """usual time of a step of its main loop; 0: not known in this phase"""
    busy: str = ""
    """what the script says it is doing (``run.busy``); empty: it is not busy"""
    expected_s: float = 0.0
    """how long that takes in all, as far as known"""
    pace: float = 0.0
    """samples per second; 0: not known"""
    handoff_s: float = 0.0
    """how long it took to fetch the state; 0: not known"""
    terms: Terms | None = None
    """kept from when it waited: it may have to wait again"""

    @property
    def is_active(self) -> bool:
        """Whether it is assumed to hold the whole state."""
        return self.era > 0 if self.active is None else self.active


class Departing(msgspec.Struct, frozen=True):
    """Its last era is over; it has ``dead_after`` to say goodbye."""

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
    """All members were told to enter an era; it is in force when all have. ``floor`` as in ``Steady``."""

    start: StartEra
    floor: int


class Steady(msgspec.Struct, frozen=True):
    """An era is in force. ``floor``: reports about eras below this number are out of date."""

    era: int
    floor: int


class Planned(msgspec.Struct, frozen=True):
    """An era is in force, and the planned one is being formed in the background."""

    era: int
    floor: int
    plan: PlanEra


class Halting(msgspec.Struct, frozen=True):
    """Every era up to ``era`` is over; the coordinator waits for the members' answers."""

    era: int
    floor: int
    reason: str
    since_s: float
    attempt: int = 0
    """attempt number of the group of ``roster`` that is already being formed; 0: no group is"""
    roster: tuple[WorkerId, ...] = ()
    noted: bool = False
    """the user was told that there are too few workers"""


Course = Idle | EraForming | Steady | Planned | Halting


# The run


class Gathering(msgspec.Struct, frozen=True):
    """No era has started yet, or no exchange was settled in any."""


class Running(msgspec.Struct, frozen=True):
    """The run has begun: eras follow each other."""


class Finishing(msgspec.Struct, frozen=True):
    """A member has finished its script; the others finish theirs without further eras."""

    since_s: float
    urged: bool = False


class Stopping(msgspec.Struct, frozen=True):
    """Waiting for the processes to end. ``status`` None: the exit status of the slot ``culprit`` decides."""

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
    """Settings that are fixed before a run starts."""

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
    """terms of the first era; a newcomer's must agree with them"""
    last_era: int = 0
    last_attempt: int = 0
    last_slot: int = -1
    last_agent: int = -1
    settled: int = 0
    """the most exchanges settled by any worker, as far as known"""
    fruitless: int = 0
    """eras started in a row without an exchange settled in between"""
    started_at: int = -1
    """``exchange`` of the last era that was started"""
    reach: Reachability = Reachability()
    """which workers cannot reach each other"""
    broken: str = ""
    """why the era cannot go on; empty: it can"""
    hearsay: bool = False
    """the era is known only from reports of its members: others that died before this coordinator came may have been in
    it"""
    patient_until_s: float = 0.0
    """until then no worker is lost for being silent"""
    trusting_until_s: float = 0.0
    """until then a new coordinator believes what workers and launchers say about themselves"""
    held: tuple[AgentArrived, ...] = ()
    """new launchers that wait until a new coordinator knows which names are taken"""
    heard_s: float = 0.0
    """when the last event was processed"""
    ghosts: frozenset[WorkerId] = frozenset()
    """names that are gone for good"""
    last_loss: tuple[str, SlotId | None] | None = None
    verdict: str = ""
    """why the last slot was given up"""
    checkpoints: tuple[str, ...] = ()
    """the checkpoints that the journal names, newest first"""
    rewinds: int = 0
    """how often the run has gone back to a checkpoint"""
    rewound_to: str = ""
    """the checkpoint that it went back to last"""
    relapses: int = 0
    """total losses in a row by a failing script without a newer checkpoint; the first one is not counted"""


Step = tuple[Roster, tuple[Effect, ...]]


# Looking up and replacing


def era_of(course: Course) -> int:
    """The number of the present or last era; 0 if there has been no era."""
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
    """The worker of that name; None if it is gone or unknown."""
    return next((worker for worker in state.workers if worker.name == name), None)


def worker_in(state: Roster, slot: SlotId) -> SlotWorker | None:
    """The present worker of the slot, if any."""
    return next((worker for worker in state.workers if worker.slot == slot), None)


def slot_of(state: Roster, name: SlotId) -> Slot | None:
    """The slot of that name; None if it was never assigned."""
    return next((slot for slot in state.slots if slot.name == name), None)


def agent_of(state: Roster, name: AgentId) -> Agent | None:
    """The launcher of that name; None if it is unknown."""
    return next((agent for agent in state.agents if agent.name == name), None)


def owner_of(state: Roster) -> Agent | None:
    """The launcher that started the run; the run ends with it."""
    return next((agent for agent in state.agents if agent.owner), None)


def is_reachable(state: Roster, slot: Slot) -> bool:
    """Whether the slot's launcher is connected, so that it can be told to start or end the process."""
    agent = agent_of(state, slot.agent)
    return agent is not None and agent.peer is not None


def with_worker(state: Roster, worker: SlotWorker) -> Roster:
    """The state in which this worker replaces the one of its name, or is added at the end."""
    if worker_of(state, worker.name) is None:
        return replace(state, workers=(*state.workers, worker))
    return replace(state, workers=tuple(worker if w.name == worker.name else w for w in state.workers))


def without_worker(state: Roster, name: WorkerId) -> Roster:
    """The state after a worker has gone for good."""
    workers = tuple(worker for worker in state.workers if worker.name != name)
    # Later no worker is believed any more: a name that is not on the roster is gone.
    trusting = state.heard_s < state.trusting_until_s
    return replace(state, workers=workers, ghosts=state.ghosts | {name} if trusting else state.ghosts)


def with_standing(state: Roster, worker: SlotWorker, standing: Participation) -> Roster:
    """The state in which the worker has this standing."""
    return with_worker(state, replace(worker, standing=standing))


def with_slot(state: Roster, slot: Slot) -> Roster:
    """The state in which this slot replaces the one of its name, or is inserted in the order of names."""
    if slot_of(state, slot.name) is None:
        return with_slots(state, (slot,))
    return replace(state, slots=tuple(slot if s.name == slot.name else s for s in state.slots))


def with_slots(state: Roster, slots: tuple[Slot, ...]) -> Roster:
    """The state with all these new slots, in the order of names."""
    return replace(state, slots=tuple(sorted((*state.slots, *slots), key=lambda s: name_order(s.name))))


def with_agent(state: Roster, agent: Agent) -> Roster:
    """The state in which this agent replaces the one of its name, or is added at the end."""
    if agent_of(state, agent.name) is None:
        return replace(state, agents=(*state.agents, agent))
    return replace(state, agents=tuple(agent if a.name == agent.name else a for a in state.agents))


def name_order(name: str) -> tuple[str, int, str]:
    """Sort key for names: w10 comes after w9."""
    letters = name.rstrip("0123456789")
    digits = name[len(letters) :]
    return letters, int(digits or "-1"), name


def slot_part(name: str) -> tuple[SlotId, int]:
    """A worker name's slot and number: ``w2.3`` is the third worker of slot ``w2``."""
    slot, _, number = name.partition(".")
    return SlotId(slot), int(number) if number.isdecimal() else 1


def listed(names: list[WorkerId]) -> str:
    """The remaining workers in words: ``w0, w1 go on``."""
    if not names:
        return "nobody is left"
    return f"{', '.join(names)} {'goes' if len(names) == 1 else 'go'} on"
