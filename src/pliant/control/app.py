"""The coordinator's one port.

Question  How do workers' and launchers' messages, people's wishes and metrics reach the coordinator's loop?
Holds     Nothing is answered without the job token. A frame that is no message closes its connection. No decision is
          made here: messages are handed to a ``Desk`` as they come.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from typing import Annotated, Protocol, TypeVar

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

from pliant.control.messages import (
    FromAgent,
    FromCoordinator,
    FromWorker,
    ToAgent,
    decode_from_agent,
    decode_from_worker,
    encode,
)

_COUNTERS = {
    "samples": "samples of all applied training rounds",
    "rounds": "rounds that changed the weights or were skipped",
    "eras": "eras that took effect",
    "restarts": "processes that were started again",
}
_GAUGES = {
    "workers": "workers of the current era",
    "era": "number of the current era",
    "term": "number of this coordinator",
    "batch": "samples of the last training round",
    "rate": "learning rate of the last training round",
    "loss": "mean loss of the last training round",
}

OUTBOX_BYTES = 64 << 20
"""Of what a peer was sent and has not read: beyond it the connection is given up, or sleepers would fill the memory."""

Message = TypeVar("Message")
Answer = Callable[[Request], Awaitable[Response]]

# What msgspec raises is a ValueError, but for nesting without end.
_NO_WISH = (ValueError, RecursionError)


class Scaling(msgspec.Struct, frozen=True):
    """The body of ``POST /scale``."""

    workers: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class Draining(msgspec.Struct, frozen=True):
    """The body of ``POST /drain``."""

    worker: str


class Peer:
    """One connection. ``send`` and ``close`` return at once; a task does the writing in order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_choked = False
        """it does not read what it is sent"""
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queued_bytes = 0
        self._serving = asyncio.current_task()

    def send(self, message: FromCoordinator | ToAgent) -> None:
        """Queue one message."""
        frame = encode(message)
        if self._queued_bytes + len(frame) <= OUTBOX_BYTES:
            self._queued_bytes += len(frame)
            self._outbox.put_nowait(frame)
        elif not self.is_choked and self._serving is not None:
            self.is_choked = True
            self._serving.cancel()

    def close(self) -> None:
        """Close the connection behind what is queued."""
        self._outbox.put_nowait(None)

    async def write_to(self, socket: WebSocket) -> None:
        """Carry out ``send`` and ``close`` until the connection is closed."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while (frame := await self._outbox.get()) is not None:
                await socket.send_bytes(frame)
                self._queued_bytes -= len(frame)
            await socket.close()


class Desk(Protocol):
    """Who the messages are for."""

    def connected(self, peer: Peer) -> None: ...
    def received(self, peer: Peer, message: FromWorker) -> None: ...
    def closed(self, peer: Peer) -> None: ...
    def agent_connected(self, peer: Peer) -> None: ...
    def agent_received(self, peer: Peer, message: FromAgent) -> None: ...
    def agent_closed(self, peer: Peer) -> None: ...

    def status(self) -> bytes:
        """The run's status as JSON."""
        ...

    def happenings(self) -> bytes:
        """The run's notable events as a JSON list, newest last."""
        ...

    def scale(self, workers: int) -> tuple[int, str]:
        """Have so many workers; an HTTP status and one line."""
        ...

    def drain(self, worker: str) -> tuple[int, str]:
        """Let a worker go; an HTTP status and one line."""
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
        await _serve(socket, token, Peer(next(numbers)), decode_from_worker, desk.connected, desk.received, desk.closed)

    async def agent(socket: WebSocket) -> None:
        await _serve(
            socket,
            token,
            Peer(next(numbers)),
            decode_from_agent,
            desk.agent_connected,
            desk.agent_received,
            desk.agent_closed,
        )

    async def status(request: Request) -> Response:
        return Response(desk.status(), media_type="application/json")

    async def events(request: Request) -> Response:
        return Response(desk.happenings(), media_type="application/json")

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def scale(request: Request) -> Response:
        try:
            wish = msgspec.json.decode(await request.body(), type=Scaling)
        except _NO_WISH:
            return _line(422, 'give the number of workers as JSON: {"workers": 4}')
        return _line(*desk.scale(wish.workers))

    async def drain(request: Request) -> Response:
        try:
            wish = msgspec.json.decode(await request.body(), type=Draining)
        except _NO_WISH:
            return _line(422, 'give the name of the worker as JSON: {"worker": "w1"}')
        return _line(*desk.drain(wish.worker))

    def guarded(answer: Answer) -> Answer:
        async def ask(request: Request) -> Response:
            return await answer(request) if _is_authorized(request, token) else _forbidden()

        return ask

    return Starlette(
        routes=[
            WebSocketRoute("/worker", worker),
            WebSocketRoute("/agent", agent),
            Route("/status", guarded(status)),
            Route("/events", guarded(events)),
            Route("/metrics", guarded(metrics)),
            Route("/scale", guarded(scale), methods=["POST"]),
            Route("/drain", guarded(drain), methods=["POST"]),
        ]
    )


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


async def _serve(
    socket: WebSocket,
    token: str,
    peer: Peer,
    decode: Callable[[bytes], Message],
    connected: Callable[[Peer], None],
    received: Callable[[Peer, Message], None],
    closed: Callable[[Peer], None],
) -> None:
    """One connection from its beginning to its end."""
    if not _is_authorized(socket, token):
        await socket.close()
        return
    await socket.accept()
    writing = asyncio.create_task(peer.write_to(socket))
    connected(peer)
    try:
        while True:
            received(peer, decode(await socket.receive_bytes()))
    except (WebSocketDisconnect, msgspec.DecodeError, KeyError):
        # KeyError: a text frame, in which Starlette finds no bytes.
        pass
    except asyncio.CancelledError:
        if not peer.is_choked:
            raise
    finally:
        closed(peer)
        peer.close()
        if peer.is_choked:
            writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing


def _line(status: int, text: str) -> Response:
    return PlainTextResponse(text + "\n", status_code=status)


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
