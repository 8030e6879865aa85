"""The web application behind the coordinator's port.

Question  How do messages of workers and launchers, and HTTP requests of users and monitors, reach the coordinator?
Holds     Nothing is sent to a client before it has proven that it knows the job's token; then the coordinator proves
          the same. The token itself is never sent. A frame that is not a valid message closes its connection. No
          decision is made here: messages are passed to a ``CoordinatorApi`` as they come.
Source    ours; docs/protocol.md, docs/design/0011-trust.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from pliant import auth
from pliant.control.handshake import WRONG_TOKEN
from pliant.control.limits import PROOF_S, ConnectionLimits
from pliant.control.messages import (
    FromAgent,
    FromCoordinator,
    FromWorker,
    ToAgent,
    decode_from_agent,
    decode_from_worker,
    encode,
)
from pliant.control.server import ADMITTED

WORKER_FRAME_BYTES = 16 << 20
"""Journal lines come in frames of about 1 MiB; a model's signature has some 100 bytes per parameter."""

AGENT_FRAME_BYTES = 1 << 20
"""A launcher names its slots and how processes ended."""

BODY_BYTES = 4096
"""Of a wish."""

UNREAD_BYTES = 1 << 20
"""So much of a body that is too long is read and dropped: who is still sending would not hear the answer."""

MESSAGES_PER_S, BURST = 5000.0, 10000.0
"""A peer that says more is read no faster. A worker with a thousand rounds a second says half of it."""

NONCE_S = 30.0
"""How long a nonce for an HTTP request is good for; it is used within a round trip."""

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
Answer = Callable[[Request, bytes], Awaitable[Response]]

# What msgspec raises is a ValueError, but for nesting without end.
_NO_WISH = (ValueError, RecursionError)


class Scaling(msgspec.Struct, frozen=True):
    """The body of ``POST /scale``."""

    workers: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class Draining(msgspec.Struct, frozen=True):
    """The body of ``POST /drain``."""

    worker: str


class WebSocketPeer:
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


class CoordinatorApi(Protocol):
    """The receiver of messages and requests: the coordinator."""

    def connected(self, peer: WebSocketPeer) -> None: ...
    def received(self, peer: WebSocketPeer, message: FromWorker) -> None: ...
    def closed(self, peer: WebSocketPeer) -> None: ...
    def agent_connected(self, peer: WebSocketPeer) -> None: ...
    def agent_received(self, peer: WebSocketPeer, message: FromAgent) -> None: ...
    def agent_closed(self, peer: WebSocketPeer) -> None: ...

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


@dataclass(frozen=True, slots=True)
class _Role(Generic[Message]):
    """The differences between workers and launchers."""

    name: bytes
    frame_bytes: int
    decode: Callable[[bytes], Message]
    connected: Callable[[WebSocketPeer], None]
    received: Callable[[WebSocketPeer, Message], None]
    closed: Callable[[WebSocketPeer], None]


def application(desk: CoordinatorApi, token: str, gate: ConnectionLimits) -> Starlette:
    """The ASGI application for one job."""
    numbers = itertools.count(1)
    nonces = Nonces()
    registry = CollectorRegistry()
    registry.register(_Figures(desk))
    workers = _Role(b"worker", WORKER_FRAME_BYTES, decode_from_worker, desk.connected, desk.received, desk.closed)
    agents = _Role(
        b"agent", AGENT_FRAME_BYTES, decode_from_agent, desk.agent_connected, desk.agent_received, desk.agent_closed
    )

    async def worker(socket: WebSocket) -> None:
        await _serve(socket, token, gate, WebSocketPeer(next(numbers)), workers)

    async def agent(socket: WebSocket) -> None:
        await _serve(socket, token, gate, WebSocketPeer(next(numbers)), agents)

    async def nonce(request: Request) -> Response:
        return PlainTextResponse(nonces.issued().hex())

    async def status(request: Request, body: bytes) -> Response:
        return Response(desk.status(), media_type="application/json")

    async def events(request: Request, body: bytes) -> Response:
        return Response(desk.happenings(), media_type="application/json")

    async def metrics(request: Request, body: bytes) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def scale(request: Request, body: bytes) -> Response:
        try:
            wish = msgspec.json.decode(body, type=Scaling)
        except _NO_WISH:
            return _line(422, 'give the number of workers as JSON: {"workers": 4}')
        return _line(*desk.scale(wish.workers))

    async def drain(request: Request, body: bytes) -> Response:
        try:
            wish = msgspec.json.decode(body, type=Draining)
        except _NO_WISH:
            return _line(422, 'give the name of the worker as JSON: {"worker": "w1"}')
        return _line(*desk.drain(wish.worker))

    def guarded(answer: Answer, *, bearer: str = "") -> Callable[[Request], Awaitable[Response]]:
        async def ask(request: Request) -> Response:
            body = await _body(request)
            if body is None:
                return _line(413, f"a wish has at most {BODY_BYTES} bytes")
            if bearer and _bears(request, bearer):
                return await answer(request, body)
            given = auth.authorized(request.headers.get("authorization", ""))
            if given is None or not _asked_by_a_friend(request, body, token, *given):
                await asyncio.sleep(gate.failed(_address(request), f"{request.method} {request.url.path}"))
                return _line(403, "the job token is missing or wrong; it is in the run directory")
            if not nonces.spent(given[0]):
                return _line(401, "the nonce is not of this coordinator, too old, or was used before; ask for another")
            response = await answer(request, body)
            shown = auth.answer_proof(token, given[0], given[1], response.status_code, bytes(response.body))
            response.headers[auth.ANSWER_HEADER] = shown.hex()
            return response

        return ask

    return Starlette(
        routes=[
            WebSocketRoute("/worker", worker),
            WebSocketRoute("/agent", agent),
            Route("/nonce", nonce),
            Route("/status", guarded(status)),
            Route("/events", guarded(events)),
            Route("/metrics", guarded(metrics, bearer=auth.metrics_token(token))),
            Route("/scale", guarded(scale), methods=["POST"]),
            Route("/drain", guarded(drain), methods=["POST"]),
        ]
    )


class Nonces:
    """Nonces for HTTP requests. A nonce contains the time and the issuer's seal, so unused ones need no memory, and no
    client can exhaust them. Only used ones are remembered, until they expire."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_hex(32)
        self._spent: dict[bytes, float] = {}

    def issued(self) -> bytes:
        """A new one: time, random bytes, seal."""
        content = int(self._clock() * 1e3).to_bytes(8, "big") + secrets.token_bytes(8)
        return content + self._seal(content)

    def spent(self, nonce: bytes) -> bool:
        """Use one up; False if it is none of these, too old or used before."""
        now_s = self._clock()
        # In the order of their use: the first ones go first.
        for old in [each for each, until_s in self._spent.items() if until_s < now_s]:
            del self._spent[old]
        content, seal = nonce[:16], nonce[16:]
        issued_s = int.from_bytes(content[:8], "big") / 1e3
        if not hmac.compare_digest(seal, self._seal(content)) or nonce in self._spent:
            return False
        if now_s > issued_s + NONCE_S:
            return False
        self._spent[nonce] = issued_s + NONCE_S + 1.0
        return True

    def _seal(self, content: bytes) -> bytes:
        return auth.proof(self._secret, b"nonce", content)[:16]


async def _serve(
    socket: WebSocket, token: str, gate: ConnectionLimits, peer: WebSocketPeer, role: _Role[Message]
) -> None:
    """One connection from its beginning to its end."""
    await socket.accept()
    try:
        if not await _is_proven(socket, token, gate, role.name):
            return
    except (WebSocketDisconnect, KeyError, RuntimeError, TimeoutError):
        # KeyError: a text frame, in which Starlette finds no bytes.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await socket.close(WRONG_TOKEN)
        return
    socket.scope["extensions"][ADMITTED](role.frame_bytes)
    writing = asyncio.create_task(peer.write_to(socket))
    role.connected(peer)
    flow = _Flow()
    try:
        while True:
            role.received(peer, role.decode(await socket.receive_bytes()))
            await flow.passed()
    except (WebSocketDisconnect, msgspec.DecodeError, KeyError):
        pass
    except asyncio.CancelledError:
        if not peer.is_choked:
            raise
    finally:
        role.closed(peer)
        peer.close()
        if peer.is_choked:
            writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing


async def _is_proven(socket: WebSocket, token: str, gate: ConnectionLimits, role: bytes) -> bool:
    """Challenge, answer, confirmation; a wrong answer closes the connection."""
    nonce = secrets.token_bytes(auth.NONCE_BYTES)
    await socket.send_bytes(auth.challenge(nonce))
    async with asyncio.timeout(PROOF_S):
        answer = await socket.receive_bytes()
    confirmation = auth.confirmation(token, role, nonce, answer)
    if confirmation is None:
        await asyncio.sleep(gate.failed(_address(socket), f"a {'launcher' if role == b'agent' else 'worker'}"))
        await socket.close(WRONG_TOKEN, "wrong token")
        return False
    await socket.send_bytes(confirmation)
    return True


class _Flow:
    """Bounds how fast a peer's messages are read."""

    def __init__(self) -> None:
        self._left, self._at_s = BURST, time.monotonic()

    async def passed(self) -> None:
        """One message more; waits where there were too many."""
        self._left -= 1.0
        if self._left < 1.0:
            now_s = time.monotonic()
            self._left = min(BURST, self._left + (now_s - self._at_s) * MESSAGES_PER_S)
            self._at_s = now_s
            if self._left < 1.0:
                await asyncio.sleep((1.0 - self._left) / MESSAGES_PER_S)


async def _body(request: Request) -> bytes | None:
    """What was sent with a request; None if that is too much."""
    body, size = b"", 0
    with contextlib.suppress(ClientDisconnect):
        async for chunk in request.stream():
            size += len(chunk)
            if size <= BODY_BYTES:
                body += chunk
            elif size > UNREAD_BYTES:
                break
    return body if size <= BODY_BYTES else None


def _line(status: int, text: str) -> Response:
    return PlainTextResponse(text + "\n", status_code=status)


def _address(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client else "an unknown address"


def _asked_by_a_friend(request: Request, body: bytes, token: str, nonce: bytes, own: bytes, given: bytes) -> bool:
    query = f"?{request.url.query}" if request.url.query else ""
    expected = auth.request_proof(token, nonce, own, request.method, request.url.path + query, body)
    return hmac.compare_digest(given, expected)


def _bears(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())


class _Figures(Collector):
    """The coordinator's numbers as a Prometheus collector."""

    def __init__(self, desk: CoordinatorApi) -> None:
        self._desk = desk

    def collect(self) -> Iterable[Metric]:
        figures = self._desk.figures()
        for name, text in _COUNTERS.items():
            if name in figures:
                yield CounterMetricFamily(f"pliant_{name}", text, value=figures[name])
        for name, text in _GAUGES.items():
            if name in figures:
                yield GaugeMetricFamily(f"pliant_{name}", text, value=figures[name])
