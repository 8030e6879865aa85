"""Opens and authenticates a worker's connection.

Question  How is the coordinator reached, and how do both ends know that they belong to the same job?
Holds     A connection is returned only when both ends have proven that they know the token, which is never sent.
          Any other server, or none, gives an error that says what to do.
Source    ours; docs/design/0011-trust.md.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from pliant import auth
from pliant.control import tls
from pliant.control.handshake import INCOMING_BYTES, WRONG_TOKEN, Endpoint
from pliant.errors import Refused, RunEnded

CONNECT_S = 10.0
"""A coordinator answers within milliseconds; one that starts next to n importing workers within seconds."""

FAREWELL_S = 2.0
"""How long a worker waits at its end for the coordinator to take the last messages."""


def opened(door: Endpoint) -> ClientConnection:
    """A connection on which both ends have proven that they know the token."""
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
        _prove(connection, door)
    except BaseException:
        connection.close()
        raise
    return connection


def _reached(door: Endpoint) -> Any:
    try:
        stream = socket.create_connection(door.place, timeout=CONNECT_S)
    except (OSError, ValueError, OverflowError) as error:
        raise RunEnded(
            f"nobody listens at {door.address}: the run has ended, or its address is wrong; start one with `pliant run`"
        ) from error
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
        raise RunEnded(f"lost the coordinator at {door.address} while joining: the run has ended") from error
    secured.settimeout(None)
    return secured


def _prove(connection: ClientConnection, door: Endpoint) -> None:
    """The first frames: prove that one knows the token, and that the coordinator does."""
    stranger = RunEnded(f"what answers at {door.address} is no Pliant coordinator of this version")
    mine = secrets.token_bytes(auth.NONCE_BYTES)
    try:
        theirs = auth.challenged(connection.recv(timeout=CONNECT_S, decode=False))
        if theirs is None:
            raise stranger
        connection.send(auth.answer(door.token, b"worker", theirs, mine))
        shown = connection.recv(timeout=CONNECT_S, decode=False)
    except ConnectionClosed as error:
        if error.rcvd is not None and error.rcvd.code == WRONG_TOKEN:
            raise Refused(
                f"the coordinator at {door.address} refused the job token; "
                "use the one in the file `token` of its run directory, or let `pliant run` start the workers"
            ) from None
        raise RunEnded(f"lost the coordinator at {door.address} while joining: the run has ended") from error
    except (TimeoutError, OSError) as error:
        raise RunEnded(f"lost the coordinator at {door.address} while joining: the run has ended") from error
    if not auth.is_confirmed(shown, door.token, b"worker", theirs, mine):
        raise door.impostor()
