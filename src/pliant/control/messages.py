"""What workers and the coordinator say to each other.

Question  Which messages cross the control channel, and with which fields?
Holds     Every message is a tagged msgspec struct, encoded as msgpack in one binary WebSocket frame.
          No tensor, no state and no pickle travels here. What reaches the coordinator is bounded where it is kept or
          counted on; anything else is no message, and decoding it raises ``msgspec.DecodeError`` alone.
"""

from __future__ import annotations

from typing import Annotated, TypeVar, Union

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""What no counter of a run reaches, and what can be counted on from without leaving a machine word."""

Status = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
"""An exit status, or minus a signal."""

Name = Annotated[str, msgspec.Meta(max_length=100)]
"""Of a slot, a worker, a launcher, a version: ``w17.203`` is a long one."""

Directory = Annotated[str, msgspec.Meta(max_length=100, pattern=r"^[0-9A-Za-z][0-9A-Za-z_-]*\Z")]
"""Of a checkpoint: old ones are removed by this name, so it must not lead anywhere else."""

Slot = Annotated[str, msgspec.Meta(max_length=100, pattern=r"^w[0-9]+\Z")]
"""Of a process that a launcher is to start: its log bears this name, so it must not lead anywhere else."""

JobName = Annotated[str, msgspec.Meta(max_length=255, pattern=r"^(?!\.{1,2}\Z)[^/\x00]*\Z")]
"""Of a run directory: its checkpoints lie under this name, so it must not lead anywhere else."""

Address = Annotated[str, msgspec.Meta(max_length=300)]
"""``host:port``; names of hosts have at most 253 characters."""


class Signature(msgspec.Struct, frozen=True):
    """What must be equal on all workers before a group is formed."""

    version: Name
    parameters: list[tuple[str, list[int], str]]
    """name, shape, dtype, in the optimizer's order"""
    settings: dict[str, str]
    torch: Name = ""
    """major and minor version, as of Python"""
    python: Name = ""
    device: Name = ""
    """the kind of device that the parameters are on"""


# worker -> coordinator


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a worker's connection.

    ``slot`` is the launcher's name for the process. ``worker`` is the name this process bears already: it lost its
    connection, or met a new coordinator, and goes on in ``era`` at ``exchange``. Empty: a newcomer, to be named.
    """

    slot: Name
    pid: Count
    version: Name
    worker: Name = ""
    era: Count = 0
    exchange: Count = 0
    active: bool = False
    signature: Signature | None = None
    """of a worker that goes on: a new coordinator has not seen it"""
    address: Address = ""
    """where it hands its state on; of a worker that goes on"""


class Call(msgspec.Struct, frozen=True):
    """The call of ``batches`` or ``evaluate`` with which a worker enlists."""

    place: Count
    """how many calls the script made before it"""
    task: Name
    """``train``, ``evaluate`` or ``end``"""
    length: Count


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker wants to be a member of the next era."""

    signature: Signature
    address: Address
    """``host:port`` where it hands its state on; the host is the local address of the control connection"""
    call: Call | None = None


class Put(msgspec.Struct, frozen=True, tag="put"):
    """One key of the store over which a group is formed; goes to all members of the attempt."""

    attempt: Count
    key: Annotated[str, msgspec.Meta(max_length=1000)]
    value: bytes


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life of the process (sent by the link's thread) and of its main loop (``progress``)."""

    era: Count
    round: Count
    progress: Count
    waiting: bool = False
    """the main loop waits for others: no progress is no fault of its own"""
    usual_s: float = 0.0
    """how long a step of its main loop usually takes; 0 before the first contribution of a phase"""
    active: bool | None = None
    """whether it holds the whole state; None: not said. The last active member is not let go before another is"""
    exchange: Count = 0
    """exchanges settled so far"""
    lasts_s: float = 0.0
    """for how long the main loop has been where it is"""
    ending: bool = False
    """it waits at the end of its script, and would compute nothing meanwhile"""
    busy: str = ""
    """what the script has said that it is doing; empty: nothing"""
    expected_s: float = 0.0
    """how long that takes in all, as far as known"""
    pace: float = 0.0
    """samples per second; 0: not known"""
    handoff_s: float = 0.0
    """how long this worker took to take the state over; 0: not known"""


class Lines(msgspec.Struct, frozen=True, tag="lines"):
    """Journal records, JSON objects without checksum; ``first`` is the number of the first one in the run."""

    first: Count
    records: list[bytes]


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """This worker was asked to go (SIGTERM, ``run.leave``): plan an era without it."""

    reason: str = ""


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The worker has stopped in ``era`` after settling ``exchange``: told so, or because its collective failed."""

    era: Count
    exchange: Count
    active: bool
    failed: str = ""
    """why, if nobody told it to stop"""
    whole: bool = True
    """false: of an active one, the user's own state is still on its way to it"""


class Unformed(msgspec.Struct, frozen=True, tag="unformed"):
    """The group of ``era`` could not be formed here, and this worker has given it up for good."""

    era: Count
    unreached: Annotated[list[Name], msgspec.Meta(max_length=1000)] = []
    """whose data ports could not be reached"""
    connecting: bool = True
    """it came so far as to connect: false where the coordinator was away, or somebody else never came"""


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """The worker is in ``era`` now."""

    era: Count
    exchange: Count


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This worker cannot go on. ``shown`` is true when the user already saw a traceback.

    ``fatal``: an error that all workers make alike and no restart can mend; it ends the run at once.
    """

    reason: str
    shown: bool = False
    fatal: bool = False
    """found on all workers alike: starting this one again cannot mend it, so the run ends"""
    own: bool = False
    """found on this worker only, and starting it again cannot mend it: the run goes on without its slot"""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The script left ``join`` in good order; ``left``: without the run's outcome, because it was asked to go."""

    left: bool = False
    over: bool = False
    """it left because the run is over, and came too late to hold its outcome: nobody waits for it any more"""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A checkpoint is complete, and every member has settled what it is of. It exists once the journal names it."""

    name: Directory
    records: Count
    """journal records of the workers that lead to it"""
    round: Count


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """How far the script means to go; only for the estimate of the time left."""

    epochs: Count | None = None
    samples: Count | None = None


# coordinator -> worker


class Past(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A call that all workers have left: what a newcomer's call at that place returns."""

    task: str
    epoch: int
    result: float | None = None
    results: dict[str, float | None] | None = None
    """where ``evaluate`` has measured several means"""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    job: JobName
    worker: str
    """the name given, or confirmed"""
    term: int
    dead_after_s: float
    written: int
    """journal records of the workers that are on disk"""
    running: bool = False
    """training has begun: enlist with the first call that is not past"""
    past: list[Past] = []
    """finished top-level calls, in their order"""
    rewinds: int = 0
    """how often the run has gone back to a checkpoint: a script that began before the last time is past it"""


class EraStart(msgspec.Struct, frozen=True, tag="era"):
    """Form the group of this attempt (a number never used twice) and enter the era at once: nothing else is running."""

    term: int
    era: int
    attempt: int
    roster: list[str]
    donor: str
    """holds the state that all enter with: the furthest ahead; in the first era the leader"""
    exchange: int
    """what the donor has settled"""
    addresses: dict[str, str]
    """where each member hands its state on"""
    records: int = 0
    """journal records of the workers that are written: where nothing was settled, all go on counting from there"""
    checkpoints: list[Directory] = []
    """nobody holds the state: the donor reads the first of these that is whole, and tells the others"""
    round: int = 0
    """with these: the last one in the journal, whose number is not used again"""


class EraPlan(msgspec.Struct, frozen=True, tag="era_plan"):
    """Form the group of this attempt in the background; the era begins when all tickets carry (term, era)."""

    term: int
    era: int
    attempt: int
    roster: list[str]
    donor: str
    addresses: dict[str, str]


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """Every era up to ``era`` is over: stop, settle nothing more, answer ``stopped``.

    The group of those who are left is formed meanwhile, so that it is there when they have all answered; where the
    next era has another roster it is given up.
    """

    term: int
    era: int
    reason: str
    attempt: int = 0
    roster: list[str] = []


class Void(msgspec.Struct, frozen=True, tag="void"):
    """The planned ``era`` will not come about: forget it, and go on."""

    term: int
    era: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Go in good order (``pliant drain``, ``pliant scale``)."""

    reason: str


class Push(msgspec.Struct, frozen=True, tag="push"):
    """Keys that members of the attempt have put."""

    attempt: int
    keys: dict[str, bytes]


class Written(msgspec.Struct, frozen=True, tag="written"):
    """So many of the workers' journal records are on disk; earlier ones need not be kept."""

    count: int


class Again(msgspec.Struct, frozen=True, tag="again"):
    """The coordinator lacks journal records from this number on: whoever keeps them sends them once more."""

    first: int


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """A coordinator that takes a lost one's place still reads the journal: wait for its answer."""


class Named(msgspec.Struct, frozen=True, tag="named"):
    """The checkpoints that exist, newest first; older ones may be removed."""

    names: list[Directory]


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """This worker does not fit; the connection is closed after it. ``again``: come back as a newcomer."""

    reason: str
    again: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The run is over for everybody. ``completed``: well, so a latecomer exits with status 0."""

    reason: str
    completed: bool = False


# launcher (agent) -> coordinator


class Enlist(msgspec.Struct, frozen=True, tag="enlist"):
    """The first message of a launcher's connection. ``slots`` are those it runs already (a coordinator's restart)."""

    agent: Name
    """empty: to be named"""
    version: Name
    slots: list[Name]
    wanted: Count
    """slots to be named for it"""
    owner: bool
    """the run ends with this launcher (``pliant run`` without ``--join``)"""


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A slot's process has ended: exit status, or minus the signal. ``error`` is its last exception, if any."""

    slot: Name
    pid: Count
    status: Status
    error: str = ""


class Interrupted(msgspec.Struct, frozen=True, tag="interrupted"):
    """The launcher got a signal: 2 for Ctrl-C, 15 for SIGTERM."""

    signal: Annotated[int, msgspec.Meta(ge=1, le=64)]


class Noticed(msgspec.Struct, frozen=True, tag="noticed"):
    """The launcher's notice command says that this machine goes away: its workers are to leave."""


# coordinator -> launcher


class Enlisted(msgspec.Struct, frozen=True, tag="enlisted"):
    job: str
    agent: str
    term: int
    slots: list[Slot]
    """names of all its slots"""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start (again) the process of a slot. A name the launcher does not know yet is a new slot (``pliant scale``)."""

    slot: Slot


class Terminate(msgspec.Struct, frozen=True, tag="terminate"):
    """Send SIGTERM to the slot's process."""

    slot: str


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Send SIGKILL to the slot's process and its children."""

    slot: str


class Note(msgspec.Struct, frozen=True, tag="note"):
    """One line for the user."""

    text: str


class StatusUpdate(msgspec.Struct, frozen=True, tag="status"):
    """The run's status as JSON, several times a second."""

    status: bytes


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The run has ended; the launcher ends with this status."""

    reason: str
    completed: bool
    exit_status: int


FromWorker = Union[  # noqa: UP007 - msgspec reads it at run time
    Hello, Ready, Put, Beat, Lines, Leaving, Stopped, Unformed, Entered, Failed, Finished, Plan, Saved
]
FromCoordinator = Union[  # noqa: UP007
    Welcome, EraStart, EraPlan, Broken, Void, Leave, Push, Written, Again, Hold, Named, Refuse, Stop
]
FromAgent = Union[Enlist, Exited, Interrupted, Noticed]  # noqa: UP007
ToAgent = Union[Enlisted, Start, Terminate, Kill, Note, StatusUpdate, Over, Refuse, Hold]  # noqa: UP007

_from_worker = msgspec.msgpack.Decoder(FromWorker)
_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator)
_from_agent = msgspec.msgpack.Decoder(FromAgent)
_to_agent = msgspec.msgpack.Decoder(ToAgent)
_encoder = msgspec.msgpack.Encoder()


Message = TypeVar("Message")


def encode(message: FromWorker | FromCoordinator | FromAgent | ToAgent) -> bytes:
    """The bytes of one frame."""
    return _encoder.encode(message)


def decode_from_worker(frame: bytes) -> FromWorker:
    """Raises ``msgspec.DecodeError`` on anything that is not one of the worker's messages."""
    return _decoded(_from_worker, frame)


def decode_from_coordinator(frame: bytes) -> FromCoordinator:
    """Raises ``msgspec.DecodeError`` on anything that is not one of the coordinator's messages."""
    return _decoded(_from_coordinator, frame)


def decode_from_agent(frame: bytes) -> FromAgent:
    """Raises ``msgspec.DecodeError`` on anything that is not one of a launcher's messages."""
    return _decoded(_from_agent, frame)


def decode_to_agent(frame: bytes) -> ToAgent:
    """Raises ``msgspec.DecodeError`` on anything that is not a message for a launcher."""
    return _decoded(_to_agent, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    try:
        return decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"no message: {error}") from None
