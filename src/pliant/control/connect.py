"""Opens and authenticates a worker's connection.

Question  How is the coordinator reached, and how do both ends know that they belong to the same job?
Holds     A connection is returned only when both ends have proven that they know the token, which is never sent.
          Any other server, or none, gives an error that says what to do.
Source    ours; docs/design/0011-trust.md.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, Literal, Protocol, TypeVar

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from pliant import forking
from pliant.control import tls
from pliant.control.handshake import FAILURES, INCOMING_BYTES, Caller, Conversation, Endpoint, prove
from pliant.errors import RunEnded

Outcome = TypeVar("Outcome")

WORKER = Caller(b"worker", ", or let `pliant run` start the workers", "joining: the run has ended", RunEnded)

CONNECT_S = 10.0
"""A coordinator answers within milliseconds; one that starts next to n importing workers within seconds."""

FAREWELL_S = 2.0
"""How long a worker waits at its end for the coordinator to take the last messages."""


class FrameConnection(Protocol):
    """One end of a connection that carries whole frames, in order (the WebSocket library's, or a virtual one)."""

    def send(self, message: bytes, /) -> None: ...

    def recv(self, timeout: float | None = None, *, decode: Literal[False]) -> bytes:
        """The next frame. Raises ``TimeoutError``, or ``ConnectionClosed`` after the last one."""
        ...

    def close(self) -> None: ...


def converse(connection: FrameConnection, door: Endpoint, conversation: Conversation[Outcome]) -> Outcome:
    """Send and receive a worker's first frames; each must come within ``CONNECT_S``."""
    try:
        frame = next(conversation)
        while True:
            if frame is not None:
                connection.send(frame)
            frame = conversation.send(connection.recv(timeout=CONNECT_S, decode=False))
    except StopIteration as end:
        return end.value
    except FAILURES as error:
        raise WORKER.failure(door, error) from error


def dial(door: Endpoint) -> ClientConnection:
    """Open a connection on which both ends have proven that they know the token."""
    stream = _reached(door)
    try:
        connection = open_websocket(
            f"ws://{door.address}/worker",
            # An own socket, so that no proxy of the environment comes between; TLS is under it.
            sock=stream,
            compression=None,
            open_timeout=CONNECT_S,
            ping_interval=None,
            close_timeout=FAREWELL_S,
            max_size=INCOMING_BYTES,
        )
    except (InvalidHandshake, ConnectionClosed, OSError, EOFError) as error:
        if door.context is None and tls.speaks_tls(*door.place, CONNECT_S):
            raise tls.wants_tls(door.address) from None
        raise RunEnded(f"what answers at {door.address} is no Pliant coordinator") from error
    # Newer websockets insist on this; the link closes the connection itself.
    connection = connection.__enter__()
    try:
        converse(connection, door, prove(door, WORKER.role))
    except BaseException:
        connection.close()
        raise
    return connection


def _reached(door: Endpoint) -> Any:
    try:
        stream = socket.create_connection(door.place, timeout=CONNECT_S)
    except (OSError, ValueError, OverflowError) as error:
        raise RunEnded(door.silence()) from error
    # A forked loader that kept a copy would hide its parent's death for seconds.
    forking.close_in_children(stream)
    if door.context is None:
        stream.settimeout(None)
        return stream
    secured = tls.SecureSocket(stream, door.context, door.place[0])
    try:
        secured.shake_hands()
    except ssl.SSLError as error:
        secured.close()
        raise tls.explained(error, door.address) from None
    except OSError as error:
        secured.close()
        raise WORKER.failure(door, error) from error
    secured.settimeout(None)
    return secured
