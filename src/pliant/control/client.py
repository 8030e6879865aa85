"""A worker's end of the control channel.

Question  How does a worker talk to the coordinator without ever waiting for it while it computes?
Holds     ``check``, ``journal`` and ``beat`` never block. What is queued is sent in order. ``get`` is served
          from a cache that the coordinator pushes into. A forked child holds no copy of the connection.
Source    ours; docs/protocol.md. DESIGN, facts measured: stores, pings and forked loaders.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from pliant.control.messages import (
    Beat,
    EraStart,
    Failed,
    Finished,
    FromCoordinator,
    FromWorker,
    Hello,
    Lines,
    Plan,
    Push,
    Put,
    Ready,
    Refuse,
    Signature,
    Stop,
    Welcome,
    decode_from_coordinator,
    encode,
)
from pliant.errors import PliantError, Refused, RunEnded, Stopped

CONNECT_S = 10.0
"""A coordinator answers within milliseconds; one that starts next to n importing workers within seconds."""

FAREWELL_S = 2.0
"""How long a worker waits at its end for the coordinator to take the last messages."""

FRAME_BYTES = 1 << 20
"""Journal records are put into frames of about this size; the server closes on one above 16 MiB."""

Answer = TypeVar("Answer")


class Link:
    """One connection to the coordinator. Made by ``connect``; not for use in forked children."""

    def __init__(self, connection: ClientConnection, address: str, worker: str, welcome: Welcome) -> None:
        self.worker = worker
        self.welcome = welcome
        self.local_address: str = connection.socket.getsockname()[0]
        self._address = address
        self._connection = connection
        self._changed = threading.Condition()
        self._trouble: PliantError | None = None
        self._leaving = False
        self._closed = False
        self._eras: deque[EraStart] = deque()
        self._attempt = 0
        self._keys: dict[tuple[int, str], bytes] = {}
        self._outbox: deque[FromWorker | bytes] = deque()
        self._waiting = threading.Event()
        self._round = 0
        self._progress = 0
        self._beat_every_s = welcome.dead_after_s / 10
        _close_in_children(self)
        self._receiver = threading.Thread(target=self._receive, name="pliant-link-in", daemon=True)
        self._sender = threading.Thread(target=self._send, name="pliant-link-out", daemon=True)
        self._receiver.start()
        self._sender.start()

    @classmethod
    def connect(cls, address: str, token: str, worker: str, version: str) -> Link:
        """Say hello at ``host:port`` and wait for the welcome."""
        connection = _opened(address, token)
        try:
            connection.send(encode(Hello(worker=worker, pid=os.getpid(), version=version)))
            answer = decode_from_coordinator(connection.recv(timeout=CONNECT_S, decode=False))
        except (ConnectionClosed, TimeoutError, msgspec.DecodeError, OSError) as error:
            connection.close()
            raise RunEnded(f"lost the coordinator at {address} while joining: the run has ended") from error
        match answer:
            case Welcome():
                return cls(connection, address, worker, answer)
            case Refuse(reason=reason):
                connection.close()
                raise Refused(reason)
            case Stop(reason=reason):
                connection.close()
                raise Stopped(reason)
            case _:
                connection.close()
                raise RunEnded(f"what answers at {address} is no Pliant coordinator of this version")

    def ready(self, signature: Signature) -> None:
        """Offer to take part with this model and these settings."""
        with contextlib.suppress(KeyError, ValueError):
            self._beat_every_s = float(signature.settings["dead_after"]) / 10
        self._queue(Ready(signature=signature, address=self.local_address))

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Tell how far the script means to go."""
        self._queue(Plan(epochs=epochs, samples=samples))

    def era(self, timeout_s: float | None = None) -> EraStart:
        """The next era; blocks until it is announced."""
        return self._wait_for(lambda: self._eras.popleft() if self._eras else None, timeout_s, "the next era")

    def put(self, attempt: int, key: str, value: bytes) -> None:
        """Set a key for all members of the attempt."""
        with self._changed:
            self._keys[attempt, key] = value
            self._changed.notify_all()
        # Not queued: forming a group is a chain of such messages, and a thread's wake-up would be in each link.
        try:
            self._connection.send(encode(Put(attempt=attempt, key=key, value=value)))
        except (ConnectionClosed, OSError):
            self._lose()
            self.check()

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        """The value of a key; blocks until a member of the attempt has put it."""
        return self._wait_for(lambda: self._keys.get((attempt, key)), timeout_s, f"{key!r}")

    def check(self) -> None:
        """Raise if the run is over for this worker."""
        if self._trouble is not None:
            raise type(self._trouble)(*self._trouble.args)

    def journal(self, payload: bytes) -> None:
        """Queue one journal record."""
        self._queue(payload)

    def beat(self, round: int, progress: int) -> None:
        """Note how far the main loop is; the sending thread tells it in its own time."""
        self._round, self._progress = round, progress

    def finish(self) -> None:
        """Send what is queued, say that all went well, and close."""
        self._leave(Finished())

    def fail(self, reason: str, shown: bool) -> None:
        """Send what is queued, say why this worker cannot go on, and close."""
        self._leave(Failed(reason=reason, shown=shown))

    def _leave(self, last: FromWorker) -> None:
        self._leaving = True
        self._queue(last)
        deadline_s = time.monotonic() + FAREWELL_S
        self._sender.join(FAREWELL_S)
        # The coordinator closes the connection when it has read everything.
        self._receiver.join(max(0.0, deadline_s - time.monotonic()))
        self._connection.close()
        self._receiver.join(FAREWELL_S)

    def _queue(self, entry: FromWorker | bytes) -> None:
        self._outbox.append(entry)
        self._waiting.set()

    def _wait_for(self, ask: Callable[[], Answer | None], timeout_s: float | None, what: str) -> Answer:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (answer := ask()) is None:
                self.check()
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(f"waited {timeout_s:g} s for {what}")
                self._changed.wait(left_s)
            return answer

    def _receive(self) -> None:
        try:
            while True:
                self._take(decode_from_coordinator(self._connection.recv(decode=False)))
        except (ConnectionClosed, OSError, EOFError, msgspec.DecodeError, TypeError):
            self._lose()

    def _take(self, message: FromCoordinator) -> None:
        with self._changed:
            match message:
                case EraStart():
                    self._attempt = message.attempt
                    self._keys = {key: value for key, value in self._keys.items() if key[0] >= message.attempt}
                    self._eras.append(message)
                case Push(attempt=attempt, key=key, value=value):
                    if attempt >= self._attempt:
                        self._keys[attempt, key] = value
                case Stop(reason=reason):
                    self._trouble = self._trouble or Stopped(reason)
                case Refuse(reason=reason):
                    self._trouble = self._trouble or Refused(reason)
                case Welcome():
                    pass
            self._changed.notify_all()

    def _lose(self) -> None:
        with self._changed:
            self._closed = True
            if not self._leaving:
                self._trouble = self._trouble or RunEnded(f"lost the coordinator at {self._address}")
            self._changed.notify_all()
        self._waiting.set()

    def _send(self) -> None:
        beaten_s = time.monotonic()
        last = False
        while not last and not self._closed:
            self._waiting.wait(max(0.0, beaten_s + self._beat_every_s - time.monotonic()))
            self._waiting.clear()
            entries = [self._outbox.popleft() for _ in range(len(self._outbox))]
            last = any(isinstance(entry, Finished | Failed) for entry in entries)
            messages = _framed(entries)
            if not last and time.monotonic() - beaten_s >= self._beat_every_s:
                beaten_s = time.monotonic()
                messages.append(Beat(round=self._round, progress=self._progress))
            try:
                for message in messages:
                    self._connection.send(encode(message))
            except (ConnectionClosed, OSError):
                self._lose()
                return


def _framed(entries: Iterable[FromWorker | bytes]) -> list[FromWorker]:
    """The messages to send, in order, with neighbouring journal records put together."""
    messages: list[FromWorker] = []
    records: list[bytes] = []
    size = 0
    for entry in entries:
        if isinstance(entry, bytes) and size < FRAME_BYTES:
            records.append(entry)
            size += len(entry)
            continue
        if records:
            messages.append(Lines(records=records))
        records, size = ([entry], len(entry)) if isinstance(entry, bytes) else ([], 0)
        if not isinstance(entry, bytes):
            messages.append(entry)
    if records:
        messages.append(Lines(records=records))
    return messages


def _opened(address: str, token: str) -> ClientConnection:
    host, _, port = address.rpartition(":")
    try:
        # An own socket, so that no proxy of the environment comes between.
        stream = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
    except (OSError, ValueError, OverflowError) as error:
        raise RunEnded(
            f"nobody listens at {address}: the run has ended, or its address is wrong; start one with `pliant run`"
        ) from error
    stream.settimeout(None)
    try:
        connection = open_websocket(
            f"ws://{address}/worker",
            sock=stream,
            compression=None,
            additional_headers={"Authorization": f"Bearer {token}"},
            open_timeout=CONNECT_S,
            ping_interval=None,
            close_timeout=FAREWELL_S,
            max_size=None,
        )
    except InvalidStatus as error:
        if error.response.status_code != 403:
            raise RunEnded(f"what answers at {address} is no Pliant coordinator") from error
        raise Refused(
            f"the coordinator at {address} refused the job token; "
            "use the one in the file `token` of its run directory, or let `pliant run` start the workers"
        ) from error
    except (InvalidHandshake, OSError, EOFError) as error:
        raise RunEnded(f"what answers at {address} is no Pliant coordinator") from error
    # Newer websockets insist on this; the link closes the connection itself.
    return connection.__enter__()


_links: weakref.WeakSet[Link] = weakref.WeakSet()
_registered = False


def _close_in_children(link: Link) -> None:
    """A forked loader that keeps a copy of the socket would hide its parent's death for seconds."""
    global _registered
    _links.add(link)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_drop_sockets)


def _drop_sockets() -> None:
    for link in list(_links):
        with contextlib.suppress(OSError):
            link._connection.socket.close()  # pyright: ignore[reportPrivateUsage]
