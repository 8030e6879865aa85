"""The first frames of a connection to the coordinator.

Question  Which frames does a worker or a launcher send first, which does it expect, and what if others come?
Holds     No sockets here: a conversation says which frame to send next, and is sent each frame that has come. The same
          ones run over blocking sockets, under asyncio and in the simulator. Nothing is said to a coordinator that has
          not proven that it knows the token, which itself is never sent.
Source    ours; docs/protocol.md, docs/design/0011-trust.md.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from websockets.exceptions import ConnectionClosed

from pliant import auth
from pliant.control.messages import (
    Enlist,
    Enlisted,
    Hello,
    Hold,
    Over,
    Refuse,
    Stop,
    Welcome,
    decode_from_coordinator,
    decode_to_agent,
    encode,
)
from pliant.errors import PliantError, Refused, RunEnded, UsageError

Outcome = TypeVar("Outcome")
Conversation = Generator[bytes | None, bytes, Outcome]
"""Yields the frame to send next, or None if there is none, and is then sent the next frame that comes."""

WRONG_TOKEN = 4403
"""The code with which the coordinator closes the WebSocket of one that does not know the token."""

INCOMING_BYTES = 16 << 20
"""The largest frame that is taken from a coordinator: an era of some 100,000 members."""


def address_of(host: str, port: int | str) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_in(address: str) -> str:
    """The host of an address, without brackets."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def check_brackets(address: str) -> None:
    """Refuse an IPv6 address whose port cannot be told from it."""
    host, _, port = address.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise UsageError(f"{address!r} is no address; put an IPv6 one in brackets, e.g. [{host.strip('[]')}]:{port}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The coordinator's address and token; with a ``context`` it uses TLS."""

    address: str
    token: str
    context: ssl.SSLContext | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Host and port; ``ValueError`` if the address has another form."""
        return host_in(self.address), int(self.address.rpartition(":")[2])

    def impostor(self) -> Refused:
        """Who answers has not proven that it knows the token."""
        return Refused(
            f"what answers at {self.address} does not know the job token: it is no coordinator of this run, "
            "so nothing was said to it"
        )

    def stranger(self) -> RunEnded:
        """What answers does not speak this protocol."""
        return RunEnded(f"what answers at {self.address} is no Pliant coordinator of this version")

    def silence(self) -> str:
        """Nothing accepts connections there."""
        return (
            f"nobody listens at {self.address}: the run has ended, or its address is wrong; start one with `pliant run`"
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """A kind of process that connects, and the words and errors for it if that fails."""

    role: bytes
    """in its proof"""
    token_advice: str
    """follows the name of the file that has the token"""
    intent: str
    """what it was doing when the connection was lost"""
    lost: type[RunEnded]

    def failure(self, door: Endpoint, error: Exception) -> PliantError:
        """The error to raise if one of ``FAILURES`` ends a conversation."""
        if isinstance(error, msgspec.DecodeError):
            return door.stranger()
        if isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code == WRONG_TOKEN:
            return Refused(
                f"the coordinator at {door.address} refused the job token; "
                f"use the one in the file `token` of its run directory{self.token_advice}"
            )
        return self.lost(f"lost the coordinator at {door.address} while {self.intent}")


FAILURES = (ConnectionClosed, OSError, EOFError, msgspec.DecodeError)
"""What can go wrong while a conversation is under way."""


def prove(door: Endpoint, role: bytes) -> Conversation[None]:
    """Prove that this end knows the token, and have the coordinator prove that it does."""
    mine = secrets.token_bytes(auth.NONCE_BYTES)
    theirs = auth.challenged((yield None))
    if theirs is None:
        raise door.stranger()
    shown = yield auth.answer(door.token, role, theirs, mine)
    if not auth.is_confirmed(shown, door.token, role, theirs, mine):
        raise door.impostor()


def greet(hello: Hello, door: Endpoint, held: Callable[[], None]) -> Conversation[Welcome | Refuse | Stop]:
    """A worker's first message, and the answer; ``held`` is called for each message that tells it to wait."""
    frame = yield encode(hello)
    while True:
        match decode_from_coordinator(frame):
            case Welcome() | Refuse() | Stop() as answer:
                return answer
            case Hold():
                held()
            case _:
                raise door.stranger()
        frame = yield None


def enlist(request: Enlist, held: Callable[[], None]) -> Conversation[Enlisted | Over]:
    """A launcher's first message, and the answer; ``held`` is called for each message that tells it to wait."""
    frame = yield encode(request)
    while True:
        match decode_to_agent(frame):
            case Enlisted() | Over() as answer:
                return answer
            case Refuse(reason=reason):
                raise Refused(reason)
            case Hold():
                held()
            case _:
                # A last status comes before the end of a run that is over.
                pass
        frame = yield None
