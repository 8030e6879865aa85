"""A worker's end of the control channel.

Question  How does a worker talk to the coordinator without ever waiting for it while it computes?
Holds     Nothing that the main loop calls between micro-batches blocks. What is queued is sent in order. A lost
          connection is opened again behind the scenes, under the same name, and what the coordinator must know is said
          again; journal lines are kept until it has them on disk. A forked child holds no copy of the connection.
          Nothing is said to anybody who does not know the job's token, which is never sent.
Source    ours; docs/protocol.md. DESIGN, facts measured: stores, pings and forked loaders.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK
from websockets.sync.client import ClientConnection

from pliant import forking
from pliant.control import connect as opening
from pliant.control.connect import CONNECT_S, FAREWELL_S
from pliant.control.handshake import Endpoint
from pliant.control.line_buffer import LineBuffer
from pliant.control.mailbox import Mailbox
from pliant.control.messages import (
    Again,
    Beat,
    Call,
    Entered,
    Failed,
    Finished,
    FromWorker,
    Hello,
    Hold,
    Leaving,
    Plan,
    Put,
    Ready,
    Refuse,
    Saved,
    Signature,
    Stop,
    Stopped,
    Unformed,
    Welcome,
    decode_from_coordinator,
    encode,
)
from pliant.errors import PliantError, Refused, RunEnded
from pliant.errors import Stopped as RunStopped

GIVE_UP_S = 60.0
"""How long a coordinator may be away: its launcher starts it again within a second. One that says ``hold`` is there."""

AGAIN_S = 0.1
"""Between two attempts to reach it."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far the main loop is; told with every sign of life."""

    era: int = 0
    exchange: int = 0
    round: int = 0
    active: bool = False
    progress: int = 0
    waiting: bool = False
    usual_s: float = 0.0
    since_s: float | None = None
    """when it got there, by ``time.monotonic``"""
    ending: bool = False
    busy: str = ""
    expected_s: float = 0.0
    pace: float = 0.0
    handoff_s: float = 0.0


class Link:
    """One worker's line to the coordinator. Made by ``connect``; not for use in forked children."""

    def __init__(self, connection: ClientConnection, door: Endpoint, slot: str, version: str) -> None:
        self.connection = connection
        self._door, self._address, self._slot, self._version = door, door.address, slot, version
        self._held_s = float("-inf")
        """when a coordinator that still reads the journal was heard last"""
        self.local_address: str = connection.socket.getsockname()[0]
        self.position = Position()
        self.mailbox = Mailbox(self._greet(connection, Hello(slot=slot, pid=os.getpid(), version=version)))
        self._pledges: dict[str, FromWorker] = {}
        """what a coordinator that has not heard it yet must be told"""
        self._puts: list[Put] = []
        """keys of the last group that was formed, or is being formed: some may have been lost with a connection"""
        self._lines = LineBuffer(self.mailbox)
        self.sends_lines = False
        self._asked = False
        """for lines, whoever usually sends them"""
        self._outbox: deque[FromWorker] = deque()
        self._waiting = threading.Event()
        self._leaving = self._until_heard = self._closed = False
        self._beat_every_s = self.mailbox.welcome.dead_after_s / 10
        forking.drop_in_children(self, _drop_socket)
        self._receiver = threading.Thread(target=self._receive, name="pliant-link-in", daemon=True)
        self._sender = threading.Thread(target=self._send, name="pliant-link-out", daemon=True)
        self._receiver.start()
        self._sender.start()

    @classmethod
    def connect(cls, address: str, token: str, slot: str, version: str, context: ssl.SSLContext | None = None) -> Link:
        """Say hello at ``host:port`` as a newcomer and wait for the welcome, which names this worker.

        With a ``context`` under TLS.
        """
        door = Endpoint(address, token, context)
        connection = opening.opened(door)
        try:
            return cls(connection, door, slot, version)
        except BaseException:
            connection.close()
            raise

    @property
    def worker(self) -> str:
        """The name that the coordinator has given."""
        return self.mailbox.worker

    def _greet(self, connection: ClientConnection, hello: Hello) -> Welcome:
        try:
            connection.send(encode(hello))
            answer = Hold()
            while isinstance(answer, Hold):
                answer = decode_from_coordinator(connection.recv(timeout=CONNECT_S, decode=False))
                if isinstance(answer, Hold):
                    self._held_s = time.monotonic()
        except (ConnectionClosed, TimeoutError, msgspec.DecodeError, OSError) as error:
            raise RunEnded(f"lost the coordinator at {self._address} while joining: the run has ended") from error
        match answer:
            case Welcome():
                return answer
            case Refuse(reason=reason, again=True):
                raise _Evicted(reason)
            case Refuse(reason=reason):
                raise Refused(reason)
            case Stop(reason=reason, completed=completed):
                raise RunStopped(reason, completed=completed)
            case _:
                raise RunEnded(f"what answers at {self._address} is no Pliant coordinator of this version")

    # -- what the main loop says

    def ready(self, signature: Signature, address: str, call: Call | None) -> None:
        """Ask to become a member, with this model and these settings."""
        with contextlib.suppress(KeyError, ValueError):
            self._beat_every_s = float(signature.settings["dead_after"]) / 10
        self._pledge(Ready(signature=signature, address=address, call=call))

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Tell how far the script means to go."""
        self._pledge(Plan(epochs=epochs, samples=samples))

    def saved(self, name: str, records: int, round_: int) -> None:
        """Tell that a checkpoint is complete."""
        self._pledge(Saved(name=name, records=records, round=round_))

    def leaving(self, reason: str) -> None:
        """Ask for an era without this worker. Safe in a signal handler."""
        self._pledge(Leaving(reason=reason))

    def stopped(self, era: int, exchange: int, *, active: bool, whole: bool = True, failed: str = "") -> None:
        """Say that nothing more of ``era`` will be settled here."""
        self._pledge(Stopped(era=era, exchange=exchange, active=active, failed=failed, whole=whole))

    def unformed(self, era: int, unreached: Sequence[str], *, connecting: bool = True) -> None:
        """Say that the group of ``era`` could not be formed, and whose data ports could not be reached."""
        self._pledge(Unformed(era=era, unreached=list(unreached), connecting=connecting))

    def entered(self, era: int, exchange: int) -> None:
        """Say that this worker is in ``era`` now."""
        self._pledges.pop("Stopped", None)
        self._pledges.pop("Unformed", None)
        ready = self._pledges.pop("Ready", None)
        if isinstance(ready, Ready):
            self._offer = ready
        self._queue(Entered(era=era, exchange=exchange))

    _offer: Ready | None = None

    def _pledge(self, message: FromWorker) -> None:
        self._pledges[type(message).__name__] = message
        self._queue(message)

    def put(self, attempt: int, key: str, value: bytes) -> None:
        """Set a key for all members of the attempt."""
        self.mailbox.set_key(attempt, key, value)
        message = Put(attempt=attempt, key=key, value=value)
        self._puts = [*(each for each in self._puts if each.attempt >= attempt), message]
        # Not queued: forming a group is a chain of such messages, and a thread's wake-up would be in each link.
        try:
            self.connection.send(encode(message))
        except (ConnectionClosed, OSError) as error:
            raise TimeoutError("the coordinator is away: no group can be formed now") from error

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        """The value of a key; blocks until a member of the attempt has put it."""
        return self.mailbox.key(attempt, key, timeout_s)

    def tell_position(self) -> None:
        """Do not wait for the next sign of life: the main loop is about to be away."""
        self._queue(beat_of(self.position, time.monotonic()))

    def check(self) -> None:
        """Raise if the run is over for this worker."""
        self.mailbox.check()

    def keep(self, lines: Iterable[bytes], first: int) -> None:
        """Keep journal lines, numbered from ``first``, until they are on disk; the leader's are sent."""
        self._lines.keep(lines, first)
        self._waiting.set()

    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None:
        """Keep lines that come right before this worker's own."""
        self._lines.keep_earlier(lines, first)

    def send_lines_again(self) -> None:
        """Begin once more with what is not on disk: an era has started, and somebody else may have sent before."""
        self._lines.begin_again(self.mailbox.written)
        self.sends_lines = True
        self._waiting.set()

    def unwritten(self) -> list[bytes]:
        """The lines that may not be on disk yet."""
        return self._lines.unwritten()

    def finish(self, *, left: bool, over: bool = False) -> None:
        """Send what is queued, say that all went well, and close; ``over``: it left because the run has ended.

        Who has come to the end of the run holds its result. That has to be known: a coordinator that is away just now
        would begin the run again.
        """
        self._until_heard = not left
        self._leave(Finished(left=left, over=over), FAREWELL_S if left else GIVE_UP_S)

    def fail(self, reason: str, *, shown: bool, fatal: bool = False, own: bool = False) -> None:
        """Send what is queued, say why this worker cannot go on, and close."""
        self._leave(Failed(reason=reason, shown=shown, fatal=fatal, own=own))

    def close(self) -> None:
        """Close without a word: this name is gone."""
        self._leaving = self._closed = True
        self._waiting.set()
        self.connection.close()

    def _leave(self, last: FromWorker, patience_s: float = FAREWELL_S) -> None:
        self._leaving = True
        self._pledge(last)
        # The coordinator closes the connection when it has read everything.
        until_s = time.monotonic() + patience_s
        while self._receiver.is_alive() and time.monotonic() < until_s:
            self._receiver.join(until_s - time.monotonic())
            if self._until_heard:
                until_s = self._given_up_s(until_s)
        self._closed = True
        self._waiting.set()
        self.connection.close()
        self._sender.join(FAREWELL_S)
        self._receiver.join(FAREWELL_S)

    def _queue(self, entry: FromWorker) -> None:
        self._outbox.append(entry)
        self._waiting.set()

    # -- the threads

    def _receive(self) -> None:
        while not self._closed:
            try:
                message = decode_from_coordinator(self.connection.recv(decode=False))
                self.mailbox.take(message)
                if isinstance(message, Again):
                    self._lines.begin_again(message.first)
                    self._asked = True
                    self._waiting.set()
            except (ConnectionClosed, OSError, EOFError, msgspec.DecodeError, TypeError) as error:
                if self._is_over(heard=isinstance(error, ConnectionClosedOK)) or not self._reconnected():
                    return

    def _is_over(self, *, heard: bool) -> bool:
        """Whether a closed connection is the last one; ``heard``: the coordinator has closed it in good order."""
        if self._closed or self.mailbox.trouble or self.mailbox.evicted:
            return True
        return self._leaving and (heard or not self._until_heard)

    def _given_up_s(self, until_s: float) -> float:
        """Until when the coordinator is waited for: one that still read the journal was there when it was heard."""
        return max(until_s, self._held_s + GIVE_UP_S)

    def _reconnected(self) -> bool:
        """Find the coordinator again, under the same name."""
        until_s = time.monotonic() + GIVE_UP_S
        while not self._closed and time.monotonic() < self._given_up_s(until_s):
            try:
                self._resume(opening.opened(self._door))
            except _Evicted as error:
                self.mailbox.take(Refuse(reason=str(error), again=True))
                return False
            except RunStopped as error:
                self.mailbox.take(Stop(reason=str(error), completed=error.completed))
                return False
            except Refused as error:
                self.mailbox.take(Refuse(reason=str(error)))
                return False
            except RunEnded:
                time.sleep(AGAIN_S)
            else:
                return True
        self.mailbox.lose(f"lost the coordinator at {self._address}")
        return False

    def _resume(self, connection: ClientConnection) -> None:
        at, offer = self.position, self._pledges.get("Ready") or self._offer
        known = isinstance(offer, Ready)
        hello = Hello(
            slot=self._slot,
            pid=os.getpid(),
            version=self._version,
            worker=self.worker,
            era=at.era,
            exchange=at.exchange,
            active=at.active,
            signature=offer.signature if known else None,
            address=offer.address if known else "",
        )
        try:
            welcome = self._greet(connection, hello)
        except BaseException:
            connection.close()
            raise
        self.mailbox.take(welcome)
        self.connection = connection
        self._lines.begin_again(welcome.written)
        for message in [*self._pledges.values(), *self._puts]:
            self._queue(message)

    def _send(self) -> None:
        beaten_s = time.monotonic()
        entries: list[FromWorker] = []
        while not self._closed:
            self._waiting.wait(max(0.0, beaten_s + self._beat_every_s - time.monotonic()))
            self._waiting.clear()
            entries += [self._outbox.popleft() for _ in range(len(self._outbox))]
            if not self._leaving and time.monotonic() - beaten_s >= self._beat_every_s:
                beaten_s = time.monotonic()
                entries.append(beat_of(self.position, beaten_s))
            try:
                asked, self._asked = self._asked, False
                for frame in self._lines.unsent(sends=self.sends_lines or asked):
                    self.connection.send(encode(frame))
                    self._lines.sent(frame)
                while entries:
                    self.connection.send(encode(entries[0]))
                    entries.pop(0)
            except (ConnectionClosed, OSError):
                entries = [entry for entry in entries if not isinstance(entry, Beat)]
                time.sleep(AGAIN_S)
                self._waiting.set()


class _Evicted(PliantError):
    """The name is no longer on the roster."""


def beat_of(at: Position, now_s: float) -> Beat:
    """The sign of life of a worker that is there; ``now_s`` by the same clock as ``since_s``."""
    return Beat(
        era=at.era,
        round=at.round,
        progress=at.progress,
        waiting=at.waiting,
        usual_s=at.usual_s,
        active=at.active if at.era > 0 else None,
        exchange=at.exchange,
        lasts_s=0.0 if at.since_s is None else max(0.0, now_s - at.since_s),
        ending=at.ending,
        busy=at.busy,
        expected_s=at.expected_s,
        pace=at.pace,
        handoff_s=at.handoff_s,
    )


def _drop_socket(link: Link) -> None:
    """A forked loader that keeps a copy of the socket would hide its parent's death for seconds."""
    with contextlib.suppress(OSError):
        link.connection.socket.close()
