"""A worker's line to the coordinator, over a virtual network.

Question  How does the real link behave when its two threads are events?
Holds     It *is* the real link: what is pledged, which lines are kept and sent, and what is said after a reconnection
          is ``control.link.Link``'s own code. Only the socket, the two threads and the clock are replaced.
Source    ours; control/link.py, whose loops ``_flush`` and ``_lost`` follow line by line.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from websockets.exceptions import ConnectionClosed

from pliant.control import link
from pliant.control.connect import CONNECT_S, FAREWELL_S
from pliant.control.line_buffer import LineBuffer
from pliant.control.link import AGAIN_S, GIVE_UP_S, Link, Position
from pliant.control.mailbox import Mailbox
from pliant.control.messages import (
    Beat,
    Finished,
    FromWorker,
    Hello,
    Put,
    Refuse,
    Stop,
    decode_from_coordinator,
    encode,
)
from pliant.errors import PliantError, Refused, RunEnded, Stopped
from pliant.testing.clock import Process
from pliant.testing.network import End, Network


class _Pending(Exception):
    """The answer to a hello is on its way."""


class _Socket:
    """The worker's end of a connection while it greets, with the methods that the real link uses."""

    def __init__(self, process: Process, end: End, *, blocking: bool) -> None:
        self._process = process
        self._blocking = blocking
        self._greeted = False
        self.end = end
        self.frames: deque[bytes] = deque()
        self.arrived: Callable[[], None] = process.notice
        end.received = self._received
        end.lost = lambda: process.in_background(lambda: self.arrived())

    def _received(self, frame: bytes) -> None:
        self.frames.append(frame)
        self._process.in_background(lambda: self.arrived())

    def send(self, frame: bytes) -> None:
        """The hello; it is said once, though the real code asks for it again when the answer is there."""
        if not self._greeted:
            self._greeted = True
            self.end.send(frame)

    def recv(self, timeout: float, decode: bool) -> bytes:
        process = self._process
        if not self._blocking and not self.frames:
            raise _Pending
        deadline_s = process.world.now_s + timeout
        while not self.frames:
            if self.end.closed:
                raise OSError("closed")
            if process.world.now_s >= deadline_s:
                raise TimeoutError
            process.idle(timeout)
        return self.frames.popleft()

    def close(self) -> None:
        """A greeting that is under way goes on."""


class _Bell:
    """Stands for the event that wakes the sender's thread."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.set = ring


class VirtualLink(Link):
    """``control.link.Link`` without sockets and threads."""

    def __init__(self, process: Process, network: Network, slot: str, version: str) -> None:
        self.process = process
        self._network = network
        self._address, self._slot, self._version = "virtual:0", slot, version
        self.local_address = slot
        self.position = Position()
        self._pledges: dict[str, FromWorker] = {}
        self._puts: list[Put] = []
        self._outbox: deque[FromWorker] = deque()
        self._entries: list[FromWorker] = []
        self._waiting = _Bell(self._ring)  # type: ignore[assignment]
        self._leaving = self._until_heard = self._closed = False
        self._ringing = False
        self._received_all = False
        self._beaten_s = process.world.now_s
        self.stopped_era = 0
        """nothing up to this era may be settled any more"""
        socket = self._dialled(blocking=True)
        hello = Hello(slot=slot, pid=process.pid, version=version)
        self.mailbox = Mailbox(self._greet(socket, hello))  # type: ignore[arg-type]
        self._lines = LineBuffer(self.mailbox)
        self.sends_lines = False
        self._beat_every_s = self.mailbox.welcome.dead_after_s / 10
        self._attach(socket)
        self._tick()

    def _dialled(self, *, blocking: bool) -> _Socket:
        wire = self._network.dial(self.process)
        if wire is None:
            raise RunEnded("nobody listens")
        return _Socket(self.process, wire.near, blocking=blocking)

    def _attach(self, socket: _Socket) -> None:
        """From now on messages go to the mailbox."""
        self.connection = socket.end  # type: ignore[assignment]
        end = socket.end
        end.received = lambda frame: self.process.in_background(lambda: self._take(frame))
        end.lost = lambda: self.process.in_background(lambda: self._lost(end))
        while socket.frames:
            self._take(socket.frames.popleft())
        if end.closed:
            self._lost(end)

    # -- what the main loop says

    def stopped(self, era: int, exchange: int, *, active: bool, whole: bool = True, failed: str = "") -> None:
        self.stopped_era = max(self.stopped_era, era)
        self.process.world.note("stopped", self.worker, era, exchange, active, whole, failed[:40])
        if active or exchange > 0:
            # Who was only on its way into an era has none that could be broken.
            self.process.world.note("broken off", self.worker)
        self.lacking = active and not whole
        if self.lacking:
            self.process.world.note("lacking", self.worker)
        super().stopped(era, exchange, active=active, whole=whole, failed=failed)

    def tell_position(self) -> None:
        self._queue(link.beat_of(self.position, self.process.world.now_s))

    def unformed(self, era: int, unreached: Sequence[str], *, connecting: bool = True) -> None:
        self.process.world.note("unformed", self.worker, era, *unreached)
        super().unformed(era, unreached, connecting=connecting)

    def put(self, attempt: int, key: str, value: bytes) -> None:
        if self.process.alive:
            super().put(attempt, key, value)

    def _leave(self, last: FromWorker, patience_s: float = FAREWELL_S) -> None:
        process = self.process
        process.world.note("farewell", self.worker, type(last).__name__)
        if isinstance(last, Finished):
            (self.departed if last.left else self.concluded)()
        self._leaving = True
        self._pledge(last)
        deadline_s = process.world.now_s + patience_s
        while not self._received_all and process.world.now_s < deadline_s:
            process.idle(deadline_s - process.world.now_s)
        if self.mailbox.evicted is not None:
            self.unheard()
        self.close()

    def close(self) -> None:
        self._leaving = self._closed = True
        self.connection.close()

    # -- the sender's thread

    def _ring(self) -> None:
        if not self._ringing and self.process.alive:
            self._ringing = True
            delay_s = self.process.world.random.random() * 0.0005
            self.process.world.after(delay_s, lambda: self.process.in_background(self._flush))

    def _tick(self) -> None:
        if not self._closed and self.process.alive:
            self._flush()
            again_s = self._beat_every_s
            self.process.world.after(again_s, lambda: self.process.in_background(self._tick))

    def _flush(self) -> None:
        self._ringing = False
        world, entries = self.process.world, self._entries
        if self._closed or not self.process.alive:
            return
        entries += [self._outbox.popleft() for _ in range(len(self._outbox))]
        if not self._leaving and world.now_s - self._beaten_s >= self._beat_every_s - 1e-9:
            self._beaten_s = world.now_s
            entries.append(link.beat_of(self.position, world.now_s))
        try:
            for frame in self._lines.unsent(sends=self.sends_lines):
                self.connection.send(encode(frame))
                self._lines.sent(frame)
            while entries:
                self.connection.send(encode(entries[0]))
                entries.pop(0)
        except (ConnectionClosed, OSError):
            self._entries = [entry for entry in entries if not isinstance(entry, Beat)]
            world.after(AGAIN_S, lambda: self.process.in_background(self._ring))

    # -- the receiver's thread

    def _take(self, frame: bytes) -> None:
        message = decode_from_coordinator(frame)
        self.process.world.note("to " + self.worker, type(message).__name__)
        self.mailbox.take(message)
        self.heard()
        self.process.notice()

    lacking = False
    """when it stopped last the user's state was on its way to it"""
    concluded: Callable[[], None] = staticmethod(lambda: None)
    """called when the script has come to its end"""
    departed: Callable[[], None] = staticmethod(lambda: None)
    """called when it goes before that, and the others go on"""
    unheard: Callable[[], None] = staticmethod(lambda: None)
    """called when nobody will know of that end"""
    heard: Callable[[], None] = staticmethod(lambda: None)
    """called after every message: groups that are being formed look for their keys"""

    def _lost(self, end: Any) -> None:
        if end is not self.connection:
            return
        if self._is_over(heard=end.in_good_order):
            self._received_all = True
            self.process.notice()
            return
        self.process.world.note("cut", self.worker)
        self._try_again(self.process.world.now_s + GIVE_UP_S)

    def _try_again(self, deadline_s: float) -> None:
        """One round of the real ``_reconnected``."""
        world, process = self.process.world, self.process
        if self._closed or not process.alive:
            return
        if world.now_s >= deadline_s:
            self.mailbox.lose("lost the coordinator")
            process.notice()
            return

        def again() -> None:
            world.after(AGAIN_S, lambda: process.in_background(lambda: self._try_again(deadline_s)))

        try:
            socket = self._dialled(blocking=False)
        except RunEnded:
            again()
            return
        with contextlib.suppress(_Pending):
            self._resume(socket)  # type: ignore[arg-type]

        def arrived() -> None:
            socket.arrived = lambda: None
            timer.cancel()
            if socket.frames:
                self._answered(socket, again)
            else:
                again()

        socket.arrived = arrived
        timer = world.after(CONNECT_S, lambda: process.in_background(arrived))

    def _answered(self, socket: _Socket, again: Callable[[], None]) -> None:
        try:
            self._resume(socket)  # type: ignore[arg-type]
        except link._Evicted as error:
            self.mailbox.take(Refuse(reason=str(error), again=True))
        except Stopped as error:
            self.mailbox.take(Stop(reason=str(error), completed=error.completed))
        except Refused as error:
            self.mailbox.take(Refuse(reason=str(error)))
        except RunEnded:
            again()
            return
        else:
            self.process.world.note("reconnected", self.worker)
            self._attach(socket)
            self._ring()
            self.process.notice()
            return
        self._received_all = True
        self.process.notice()

    def _greet(self, connection: Any, hello: Hello) -> Any:
        # Every virtual process has a number of its own.
        return super()._greet(connection, msgspec.structs.replace(hello, pid=self.process.pid))


def connected(process: Process, network: Network, slot: str, version: str) -> VirtualLink:
    """``Link.connect``: raises as the real one does."""
    try:
        return VirtualLink(process, network, slot, version)
    except link._Evicted as error:
        raise Refused(str(error)) from error
    except PliantError:
        raise
