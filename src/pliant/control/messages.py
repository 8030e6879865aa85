"""The messages of the control channel.

Question  Which messages are sent over the control channel, and with which fields?
Holds     Every message is a tagged msgspec struct, encoded as msgpack in one binary WebSocket frame. No tensors, state
          or pickles are sent here. Fields that the coordinator keeps or computes with are bounded; decoding any other
          frame raises ``msgspec.DecodeError``, and no other exception.
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
    """The properties that must be equal on all workers before a group is formed."""

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

    ``slot`` is the launcher's name for the process. ``worker`` is the present name of a process that reconnects, to the
    same or a new coordinator, and goes on in ``era`` at ``exchange``; empty for a newcomer, which gets a name.
    """

    slot: Name
    pid: Count
    version: Name
    worker: Name = ""
    era: Count = 0
    exchange: Count = 0
    active: bool = False
    signature: Signature | None = None
    """given after a reconnection: a new coordinator has not seen it"""
    address: Address = ""
    """given after a reconnection: where it serves its state"""


class Call(msgspec.Struct, frozen=True):
    """The call of ``batches`` or ``evaluate`` with which a worker asks to be a member."""

    place: Count
    """how many calls the script made before it"""
    task: Name
    """``train``, ``evaluate`` or ``end``"""
    length: Count


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker wants to be a member of the next era."""

    signature: Signature
    address: Address
    """``host:port`` where it serves its state; the host is the local address of the control connection"""
    call: Call | None = None


class Put(msgspec.Struct, frozen=True, tag="put"):
    """One key of the store over which a group is formed; goes to all members of the attempt."""

    attempt: Count
    key: Annotated[str, msgspec.Meta(max_length=1000)]
    value: bytes


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat of the process (sent by the link's thread), with the progress of its main loop."""

    era: Count
    round: Count
    progress: Count
    waiting: bool = False
    """the main loop waits for others, so missing progress is not its own fault"""
    usual_s: float = 0.0
    """how long a step of its main loop usually takes; 0 before the first contribution of a phase"""
    active: bool | None = None
    """whether it holds the whole state; None: not given. The last active member stays until another one is active"""
    exchange: Count = 0
    """exchanges settled so far"""
    lasts_s: float = 0.0
    """for how long the main loop has been at this point"""
    ending: bool = False
    """it waits at the end of its script, and could compute nothing meanwhile"""
    busy: str = ""
    """what the script says it is doing (``run.busy``); empty: it is not busy"""
    expected_s: float = 0.0
    """how long that takes in all, as far as known"""
    pace: float = 0.0
    """samples per second; 0: not known"""
    handoff_s: float = 0.0
    """how long this worker took to fetch the state; 0: not known"""


class Lines(msgspec.Struct, frozen=True, tag="lines"):
    """Journal records, JSON objects without checksum; ``first`` is the number of the first one in the run."""

    first: Count
    records: list[bytes]


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """This worker was asked to leave (SIGTERM, ``run.leave``): plan an era without it."""

    reason: str = ""


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The worker has stopped in ``era`` after settling ``exchange``: on request, or because its collective failed."""

    era: Count
    exchange: Count
    active: bool
    failed: str = ""
    """why, if it was not told to stop"""
    whole: bool = True
    """false: it is active, but has not received the user's own state yet"""


class Unformed(msgspec.Struct, frozen=True, tag="unformed"):
    """The group of ``era`` could not be formed here, and this worker has abandoned it for good."""

    era: Count
    unreached: Annotated[list[Name], msgspec.Meta(max_length=1000)] = []
    """members whose data ports could not be reached"""
    connecting: bool = True
    """it got as far as connecting; false if the coordinator was away, or another member never came"""


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """The worker is in ``era`` now."""

    era: Count
    exchange: Count


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This worker cannot go on. ``shown`` is true when the user already saw a traceback.

    ``fatal``: an error that all workers have and no restart can fix; it ends the run at once.
    """

    reason: str
    shown: bool = False
    fatal: bool = False
    """the error occurs on all workers: starting this one again cannot fix it, so the run ends"""
    own: bool = False
    """the error concerns this worker only, and starting it again cannot fix it: the run goes on without its slot"""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The script left ``join`` in an orderly way; ``left``: without the run's outcome, because it was asked to."""

    left: bool = False
    over: bool = False
    """it left because the run is over, and joined too late to hold its outcome: no other worker waits for it"""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A checkpoint is complete, and all members have settled its exchange. It exists once the journal names it."""

    name: Directory
    records: Count
    """number of workers' journal records before it"""
    round: Count


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """The script's plan of epochs or samples; only for the estimate of the time left."""

    epochs: Count | None = None
    samples: Count | None = None


# coordinator -> worker


class Past(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A finished call, with the result that the same call of a newcomer returns."""

    task: str
    epoch: int
    result: float | None = None
    results: dict[str, float | None] | None = None
    """if ``evaluate`` has measured several means"""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The connection now speaks for ``worker``."""

    job: JobName
    worker: str
    """the name given, or confirmed"""
    term: int
    dead_after_s: float
    written: int
    """number of workers' journal records on disk"""
    running: bool = False
    """training has begun: send ``Ready`` with the first call that is not past"""
    past: list[Past] = []
    """finished top-level calls, in their order"""
    rewinds: int = 0
    """how often the run has gone back to a checkpoint: a script that began before the last time is too far ahead"""


class EraStart(msgspec.Struct, frozen=True, tag="era"):
    """Form the group of this attempt (a number never used twice) and enter the era at once: nothing else is running."""

    term: int
    era: int
    attempt: int
    roster: list[str]
    donor: str
    """the member whose state all enter with: the one furthest ahead; in the first era the leader"""
    exchange: int
    """exchanges that the donor has settled"""
    addresses: dict[str, str]
    """where each member serves its state"""
    records: int = 0
    """number of workers' journal records so far: if no exchange was settled, all go on counting from there"""
    checkpoints: list[Directory] = []
    """set if no worker holds the state: the donor reads the first undamaged one, and sends its state to the others"""
    round: int = 0
    """with ``checkpoints``: the last round in the journal, whose number is not used again"""


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

    The group of the remaining members (``roster``) is formed meanwhile, so that it is ready when all have answered. If
    the next era has another roster, that group is abandoned.
    """

    term: int
    era: int
    reason: str
    attempt: int = 0
    roster: list[str] = []


class Void(msgspec.Struct, frozen=True, tag="void"):
    """The planned ``era`` is dropped: forget it, and go on."""

    term: int
    era: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Leave in an orderly way (``pliant drain``, ``pliant scale``)."""

    reason: str


class Push(msgspec.Struct, frozen=True, tag="push"):
    """Keys that members of the attempt have put."""

    attempt: int
    keys: dict[str, bytes]


class Written(msgspec.Struct, frozen=True, tag="written"):
    """This number of the workers' journal records are on disk; they need not be kept any more."""

    count: int


class Again(msgspec.Struct, frozen=True, tag="again"):
    """The coordinator lacks journal records from this number on: members that keep them send them again."""

    first: int


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """A new coordinator still reads the journal of a lost one: wait for its answer."""


class Named(msgspec.Struct, frozen=True, tag="named"):
    """The checkpoints that exist, newest first; older ones may be removed."""

    names: list[Directory]


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """This worker is refused; the connection is closed after it. ``again``: come back as a newcomer."""

    reason: str
    again: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The run is over for all. ``completed``: successfully, so a worker that comes too late exits with status 0."""

    reason: str
    completed: bool = False


# launcher (agent) -> coordinator


class Enlist(msgspec.Struct, frozen=True, tag="enlist"):
    """The first message of a launcher's connection. ``slots`` are those it already runs (after a reconnection)."""

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
    """The launcher's notice command reports that this machine will be taken away: its workers must leave."""


# coordinator -> launcher


class Enlisted(msgspec.Struct, frozen=True, tag="enlisted"):
    job: str
    agent: str
    term: int
    slots: list[Slot]
    """names of all its slots"""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start or restart the process of a slot. A name unknown to the launcher is a new slot (``pliant scale``)."""

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
