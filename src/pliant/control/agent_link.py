"""A launcher's end of the control channel.

Question  How does a launcher receive orders to start and end processes, and report which have ended?
Holds     ``send`` never blocks; messages are sent in order. If the connection closes, ``receive`` returns None: the
          launcher decides whether to reconnect, and what it must send again. Nothing is sent to a server that does not
          know the job's token, which itself is never sent.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus

from pliant.control import tls
from pliant.control.handshake import FAILURES, INCOMING_BYTES, Caller, Conversation, Endpoint, enlist, prove
from pliant.control.messages import Enlist, Enlisted, FromAgent, Over, ToAgent, decode_to_agent, encode
from pliant.errors import Refused, RunEnded

Outcome = TypeVar("Outcome")

CLOSE_S = 1.0
"""A coordinator that lives takes part in closing within milliseconds; one that does not is not waited for."""


class Unreachable(RunEnded):
    """No server listens at the address, or not any more: another try may succeed."""


LAUNCHER = Caller(b"agent", " (--token-file)", "enlisting", Unreachable)


class AgentLink:
    """One connection of a launcher; created by ``connect``."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._outbox: asyncio.Queue[FromAgent | None] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send())

    @classmethod
    async def connect(
        cls,
        address: str,
        token: str,
        request: Enlist,
        timeout_s: float,
        context: ssl.SSLContext | None = None,
        *,
        held: Callable[[], None] = lambda: None,
    ) -> tuple[AgentLink, Enlisted | Over]:
        """Enlist at ``host:port``; ``Over`` if the run has ended already. With a ``context`` under TLS.

        ``held`` is called whenever a coordinator that still reads the journal says that it is there.
        """

        def wait_on() -> None:
            limit.reschedule(_now_s() + timeout_s)
            held()

        door = Endpoint(address, token, context)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                connection = await _dial(door)
                answer = await _converse(connection, door, enlist(request, wait_on))
                return cls(connection), answer
        except TimeoutError as error:
            raise Unreachable(f"the coordinator at {address} did not answer within {timeout_s:g} s") from error

    def send(self, message: FromAgent) -> None:
        """Queue one message."""
        self._outbox.put_nowait(message)

    async def receive(self) -> ToAgent | None:
        """The next message; None when the connection is closed."""
        try:
            return decode_to_agent(await self._connection.recv(decode=False))
        except (ConnectionClosed, OSError, EOFError, msgspec.DecodeError):
            return None

    async def close(self) -> None:
        """Send what is queued and close."""
        self._outbox.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._sending
        self._sending.cancel()
        await self._connection.close()

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            while (message := await self._outbox.get()) is not None:
                await self._connection.send(encode(message))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _converse(connection: ClientConnection, door: Endpoint, conversation: Conversation[Outcome]) -> Outcome:
    """Send and receive a launcher's first frames; if that fails, the connection is cut."""
    try:
        frame = next(conversation)
        while True:
            if frame is not None:
                await connection.send(frame)
            frame = conversation.send(await connection.recv(decode=False))
    except StopIteration as end:
        return end.value
    except FAILURES as error:
        connection.transport.abort()
        raise LAUNCHER.failure(door, error) from error
    except BaseException:
        # Refused, or out of patience; nobody is left to close it in good order.
        connection.transport.abort()
        raise


async def _dial(door: Endpoint) -> ClientConnection:
    """Open a connection on which both ends have proven that they know the token."""
    address = door.address
    stream = await _reached(door)
    # With None for a plain address it would complain.
    secure: dict[str, Any] = {} if door.context is None else {"ssl": door.context}
    try:
        connection = await open_websocket(
            f"{'ws' if door.context is None else 'wss'}://{address}/agent",
            sock=stream,
            compression=None,
            open_timeout=None,
            ping_interval=None,
            close_timeout=CLOSE_S,
            max_size=INCOMING_BYTES,
            **secure,
        )
    except ssl.SSLError as error:
        why = tls.explained(error, address)
        raise why if isinstance(why, Refused) else Unreachable(str(why)) from None
    except InvalidStatus as error:
        raise door.stranger() from error
    except (InvalidMessage, ConnectionClosed, OSError, EOFError) as error:
        if door.context is None and await asyncio.to_thread(tls.speaks_tls, *door.place, CLOSE_S):
            raise tls.wants_tls(address) from None
        # It closed in the middle of the handshake: it has just died, or speaks something else.
        raise Unreachable(f"what listens at {address} closed the connection; is it a Pliant coordinator?") from error
    except InvalidHandshake as error:
        raise door.stranger() from error
    await _converse(connection, door, prove(door, LAUNCHER.role))
    return connection


async def _reached(door: Endpoint) -> socket.socket:
    """An own socket, so that no proxy of the environment comes between."""
    address = door.address
    host, _, port = address.rpartition(":")
    try:
        if not host or not 0 < int(port) < 1 << 16:
            raise ValueError
    except ValueError:
        raise Refused(f"{address!r} is no address; give HOST:PORT, as in the file `address` of a run") from None
    loop = asyncio.get_running_loop()
    trouble: OSError | None = None
    try:
        places = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"no machine is known as {host}; give the address of the run's machine") from error
    for family, kind, protocol, _, place in places:
        stream = socket.socket(family, kind, protocol)
        stream.setblocking(False)
        try:
            await loop.sock_connect(stream, place)
            return stream
        except OSError as error:
            stream.close()
            trouble = error
        except BaseException:
            stream.close()
            raise
    raise Unreachable(door.silence()) from trouble
