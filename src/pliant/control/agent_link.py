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
import secrets
import socket
import ssl
from collections.abc import Callable
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus

from pliant import auth
from pliant.control import tls
from pliant.control.handshake import INCOMING_BYTES, WRONG_TOKEN, Endpoint
from pliant.control.messages import Enlist, Enlisted, FromAgent, Hold, Over, Refuse, ToAgent, decode_to_agent, encode
from pliant.errors import Refused, RunEnded

CLOSE_S = 1.0
"""A coordinator that lives takes part in closing within milliseconds; one that does not is not waited for."""


class Unreachable(RunEnded):
    """No server listens at the address, or not any more: another try may succeed."""


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
        enlist: Enlist,
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

        try:
            async with asyncio.timeout(timeout_s) as limit:
                connection = await _opened(Endpoint(address, token, context))
                return await _enlisted(connection, address, enlist, wait_on)
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


async def _enlisted(
    connection: ClientConnection, address: str, enlist: Enlist, held: Callable[[], None]
) -> tuple[AgentLink, Enlisted | Over]:
    try:
        await connection.send(encode(enlist))
        while True:
            match decode_to_agent(await connection.recv(decode=False)):
                case Enlisted() | Over() as answer:
                    return AgentLink(connection), answer
                case Refuse(reason=reason):
                    raise Refused(reason)
                case Hold():
                    held()
                case _:
                    # A last status comes before the end of a run that is over.
                    pass
    except (ConnectionClosed, OSError, EOFError) as error:
        raise Unreachable(f"lost the coordinator at {address} while enlisting") from error
    except msgspec.DecodeError as error:
        connection.transport.abort()
        raise _stranger(address) from error
    except BaseException:
        # Refused, or out of patience; nobody is left to close it in good order.
        connection.transport.abort()
        raise


async def _opened(door: Endpoint) -> ClientConnection:
    """A connection on which both ends have proven that they know the token."""
    address = door.address
    stream = await _reached(address)
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
        raise _stranger(address) from error
    except (InvalidMessage, ConnectionClosed, OSError, EOFError) as error:
        if door.context is None and await asyncio.to_thread(tls.speaks_tls, *door.place, CLOSE_S):
            raise tls.wants_tls(address) from None
        # It closed in the middle of the handshake: it has just died, or speaks something else.
        raise Unreachable(f"what listens at {address} closed the connection; is it a Pliant coordinator?") from error
    except InvalidHandshake as error:
        raise _stranger(address) from error
    try:
        await _prove(connection, door)
    except BaseException:
        connection.transport.abort()
        raise
    return connection


async def _prove(connection: ClientConnection, door: Endpoint) -> None:
    """The first frames: prove that one knows the token, and that the coordinator does."""
    mine = secrets.token_bytes(auth.NONCE_BYTES)
    try:
        theirs = auth.challenged(await connection.recv(decode=False))
        if theirs is None:
            raise _stranger(door.address)
        await connection.send(auth.answer(door.token, b"agent", theirs, mine))
        shown = await connection.recv(decode=False)
    except ConnectionClosed as error:
        if error.rcvd is not None and error.rcvd.code == WRONG_TOKEN:
            raise Refused(
                f"the coordinator at {door.address} refused the job token; "
                "use the one in the file `token` of its run directory (--token-file)"
            ) from None
        raise Unreachable(f"lost the coordinator at {door.address} while enlisting") from error
    except (OSError, EOFError) as error:
        raise Unreachable(f"lost the coordinator at {door.address} while enlisting") from error
    if not auth.is_confirmed(shown, door.token, b"agent", theirs, mine):
        raise door.impostor()


async def _reached(address: str) -> socket.socket:
    """An own socket, so that no proxy of the environment comes between."""
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
    raise Unreachable(
        f"nobody listens at {address}: the run has ended, or its address is wrong; start one with `pliant run`"
    ) from trouble


def _stranger(address: str) -> RunEnded:
    return RunEnded(f"what answers at {address} is no Pliant coordinator of this version")
