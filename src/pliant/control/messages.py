"""What workers and the coordinator say to each other.

Question  Which messages cross the control channel, and with which fields?
Holds     Every message is a tagged msgspec struct, encoded as msgpack in one binary WebSocket frame.
          No tensor, no state and no pickle travels here.
"""

from __future__ import annotations

from typing import Union

import msgspec


class Signature(msgspec.Struct, frozen=True):
    """What must be equal on all workers before a group is formed."""

    version: str
    parameters: list[tuple[str, list[int], str]]
    """name, shape, dtype, in the optimizer's order"""
    settings: dict[str, str]


# worker -> coordinator


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a connection."""

    worker: str
    pid: int
    version: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """``join`` was called; the worker waits for its era."""

    signature: Signature
    address: str
    """the local address of the control connection, where the worker's group listens"""


class Put(msgspec.Struct, frozen=True, tag="put"):
    """One key of the store over which a group is formed; goes to all members of the attempt."""

    attempt: int
    key: str
    value: bytes


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life of the process (sent by the link's thread) and of its main loop (``progress``)."""

    round: int
    progress: int


class Lines(msgspec.Struct, frozen=True, tag="lines"):
    """Journal records, JSON objects without checksum, sent by the leader."""

    records: list[bytes]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This worker cannot go on. ``shown`` is true when the user already saw a traceback."""

    reason: str
    shown: bool = False


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The script left ``join`` in good order."""


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """How far the script means to go; only for the estimate of the time left."""

    epochs: int | None = None
    samples: int | None = None


# coordinator -> worker


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    job: str
    dead_after_s: float


class EraStart(msgspec.Struct, frozen=True, tag="era"):
    """The roster of the era and the number of the attempt to form its group (never used twice)."""

    era: int
    attempt: int
    roster: list[str]


class Push(msgspec.Struct, frozen=True, tag="push"):
    """A key that a member of the attempt has put."""

    attempt: int
    key: str
    value: bytes


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """This worker does not fit; the connection is closed after it."""

    reason: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The run is over for everybody."""

    reason: str


FromWorker = Union[Hello, Ready, Put, Beat, Lines, Failed, Finished, Plan]  # noqa: UP007 - msgspec reads it at run time
FromCoordinator = Union[Welcome, EraStart, Push, Refuse, Stop]  # noqa: UP007

_from_worker = msgspec.msgpack.Decoder(FromWorker)
_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator)
_encoder = msgspec.msgpack.Encoder()


def encode(message: FromWorker | FromCoordinator) -> bytes:
    """The bytes of one frame."""
    return _encoder.encode(message)


def decode_from_worker(frame: bytes) -> FromWorker:
    """Raises ``msgspec.DecodeError`` on anything that is not one of the worker's messages."""
    return _from_worker.decode(frame)


def decode_from_coordinator(frame: bytes) -> FromCoordinator:
    """Raises ``msgspec.DecodeError`` on anything that is not one of the coordinator's messages."""
    return _from_coordinator.decode(frame)
