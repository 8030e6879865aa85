"""The coordinator's one port.

Question  How do workers' messages, people's questions and metrics reach the coordinator's loop?
Holds     Nothing is answered without the job token. A frame that is not one of the worker's messages closes
          its connection. No decision is made here: messages are handed to a ``Desk`` as they come.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
from collections.abc import Generator, Iterable, Mapping
from typing import Protocol

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from pliant.control.messages import FromCoordinator, FromWorker, decode_from_worker, encode

_COUNTERS = {
    "samples": "samples of all applied training rounds",
    "rounds": "rounds that changed the weights or were skipped",
}
_GAUGES = {
    "workers": "workers of the current era",
    "batch": "samples of the last training round",
    "rate": "learning rate of the last training round",
    "loss": "mean loss of the last training round",
}


class Peer:
    """One connection of a worker. ``send`` and ``close`` return at once; a task does the writing in order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, message: FromCoordinator) -> None:
        """Queue one message."""
        self._outbox.put_nowait(encode(message))

    def close(self) -> None:
        """Close the connection behind what is queued."""
        self._outbox.put_nowait(None)

    async def write_to(self, socket: WebSocket) -> None:
        """Carry out ``send`` and ``close`` until the connection is closed."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while (frame := await self._outbox.get()) is not None:
                await socket.send_bytes(frame)
            await socket.close()


class Desk(Protocol):
    """Who the messages are for."""

    def connected(self, peer: Peer) -> None: ...
    def received(self, peer: Peer, message: FromWorker) -> None: ...
    def closed(self, peer: Peer) -> None: ...
    def status(self) -> bytes:
        """The run's status as JSON."""
        ...

    def figures(self) -> Mapping[str, float]:
        """The run's numbers by the names of its metrics; those not known yet are left out."""
        ...


def application(desk: Desk, token: str) -> Starlette:
    """The ASGI application for one job."""
    numbers = itertools.count(1)
    registry = CollectorRegistry()
    registry.register(_Figures(desk))

    async def worker(socket: WebSocket) -> None:
        if not _is_authorized(socket, token):
            await socket.close()
            return
        await socket.accept()
        await _serve(Peer(next(numbers)), socket, desk)

    async def status(request: Request) -> Response:
        if not _is_authorized(request, token):
            return _forbidden()
        return Response(desk.status(), media_type="application/json")

    async def metrics(request: Request) -> Response:
        if not _is_authorized(request, token):
            return _forbidden()
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Starlette(routes=[WebSocketRoute("/worker", worker), Route("/status", status), Route("/metrics", metrics)])


class Server(uvicorn.Server):
    """Serves an application in the caller's event loop and leaves signals to the caller."""

    def __init__(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app,
            # The other implementation is deprecated and warns.
            ws="websockets-sansio",
            # A worker in a long C call cannot answer; beats come from the link's own thread.
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the launcher's."""
        yield


async def _serve(peer: Peer, socket: WebSocket, desk: Desk) -> None:
    writing = asyncio.create_task(peer.write_to(socket))
    desk.connected(peer)
    try:
        while True:
            desk.received(peer, decode_from_worker(await socket.receive_bytes()))
    except (WebSocketDisconnect, msgspec.DecodeError, KeyError):
        # KeyError: a text frame, in which Starlette finds no bytes.
        pass
    finally:
        desk.closed(peer)
        peer.close()
        await writing


def _is_authorized(connection: HTTPConnection, token: str) -> bool:
    given = connection.headers.get("authorization", "")
    # In constant time: the time taken must not tell how much of a guess is right.
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())


def _forbidden() -> Response:
    return PlainTextResponse("the job token is missing or wrong; it is in the run directory\n", status_code=403)


class _Figures(Collector):
    """The desk's numbers in the form Prometheus asks for."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterable[Metric]:
        figures = self._desk.figures()
        for name, text in _COUNTERS.items():
            if name in figures:
                yield CounterMetricFamily(f"pliant_{name}", text, value=figures[name])
        for name, text in _GAUGES.items():
            if name in figures:
                yield GaugeMetricFamily(f"pliant_{name}", text, value=figures[name])
