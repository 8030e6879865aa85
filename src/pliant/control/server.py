"""The server of the coordinator's port, below the application.

Question  How many bytes, seconds and connections may unauthenticated clients use?
Holds     Until a connection has proven that it knows the token, its frames are limited to a few hundred bytes and its
          headers to a few kilobytes; then the limit of its role holds. ``ConnectionLimits`` knows every connection from
          its opening to its close.
Source    ours; docs/design/0011-trust.md. Subclasses of uvicorn's protocols, which have one limit for all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from pliant.control.limits import PROOF_S, ConnectionLimits

UNPROVEN_FRAME_BYTES = 256
"""A proof has 64."""

HEADER_BYTES = 8192
"""Of a request that is not complete yet; ours have some 500."""

ADMITTED = "pliant.admitted"
"""The ASGI extension that the application calls, with the size of frames from then on, when a proof was right."""

_TLS_HELLO = 0x16


class ServerSettings(uvicorn.Config):
    """uvicorn's settings, with the connection limits for its protocols."""

    def __init__(self, app: Starlette, gate: ConnectionLimits) -> None:
        super().__init__(
            app,
            http=_Http,
            ws=_WebSocket,
            ws_max_size=UNPROVEN_FRAME_BYTES,
            h11_max_incomplete_event_size=HEADER_BYTES,
            # A worker in a long C call cannot answer; beats come from the link's own thread.
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            # uvicorn would believe what a local stranger says of its own address.
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        self.gate = gate


class Server(uvicorn.Server):
    """Serves an application in the caller's event loop, and does not handle signals."""

    def __init__(self, app: Starlette, gate: ConnectionLimits, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(ServerSettings(app, gate))
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn's own would give a stranger a minute for the TLS handshake."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            kind = cast(Any, self.config.http_protocol_class)
            return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        handshake_s = None if self._tls is None else PROOF_S
        self.servers = [
            await loop.create_server(
                protocol, sock=each, backlog=self.config.backlog, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
            for each in sockets or []
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the launcher's."""
        yield


class _Http(H11Protocol):
    """A connection from its first byte; an upgrade makes it a ``_WebSocket``."""

    _is_new = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._gate = cast(ServerSettings, self.config).gate
        self._address = self.client[0] if self.client else "an unknown address"
        if self._gate.opened(transport, self._address):
            self.loop.call_later(PROOF_S, self._gate.expire, transport)

    def data_received(self, data: bytes) -> None:
        if self._is_new and data[:1] == bytes([_TLS_HELLO]):
            self._gate.note(f"a TLS client came from {self._address}, but this port speaks no TLS", self._address)
        self._is_new = False
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.closed(self.transport)
        super().connection_lost(exc)


class _WebSocket(WebSocketsSansIOProtocol):
    """A worker's or a launcher's connection."""

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):
            cast(Any, self.scope)["extensions"][ADMITTED] = self._admitted

    def connection_lost(self, exc: Exception | None) -> None:
        cast(ServerSettings, self.config).gate.closed(self.transport)
        super().connection_lost(exc)

    def _admitted(self, frame_bytes: int) -> None:
        cast(ServerSettings, self.config).gate.proven(self.transport)
        # The first name is that of websockets 15 and later.
        for name in ("max_message_size", "max_size"):
            if hasattr(self.conn, name):
                setattr(self.conn, name, frame_bytes)
