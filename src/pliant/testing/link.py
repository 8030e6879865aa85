"""A worker's link to the coordinator, over a virtual network.

Question  How does the real link behave when its steps are events?
Holds     It is the real link: what is sent, received, kept and said again is ``control.link.Link``'s own code. Only the
          connection, the clock and the driver are replaced; the driver takes the steps that two threads take in
          production, at moments that the seed decides.
Source    ours; control/link_threads.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from websockets.exceptions import ConnectionClosedError, ConnectionClosedOK

from pliant.control.connect import CONNECT_S
from pliant.control.handshake import Conversation, Endpoint
from pliant.control.link import Link
from pliant.control.link_threads import AGAIN_S, LinkSteps
from pliant.control.messages import Finished, FromCoordinator, FromWorker
from pliant.errors import RunEnded
from pliant.testing.clock import Process, Timer
from pliant.testing.network import End, Network


class VirtualConnection:
    """The worker's end of a virtual connection, with the interface of a real one."""

    def __init__(self, process: Process, end: End) -> None:
        self._process = process
        self._end = end
        self._frames: deque[bytes] = deque()
        self.changed: Callable[[], None] = process.notice
        """called in the background of the process when a frame has come, or the connection is closed"""
        end.received = self._received
        end.lost = lambda: process.in_background(lambda: self.changed())

    def _received(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._process.in_background(lambda: self.changed())

    @property
    def readable(self) -> bool:
        """Whether ``recv`` returns or raises at once."""
        return bool(self._frames) or self._end.closed

    def send(self, message: bytes, /) -> None:
        self._end.send(message)

    def recv(self, timeout: float | None = None, *, decode: bool = False) -> bytes:
        """The next frame; without a ``timeout`` it must be there."""
        world = self._process.world
        patience_s = timeout or 0.0
        deadline_s = world.now_s + patience_s
        while not self._frames:
            if self._end.closed:
                raise (ConnectionClosedOK if self._end.in_good_order else ConnectionClosedError)(None, None)
            if world.now_s >= deadline_s:
                raise TimeoutError
            self._process.idle(patience_s)
        return self._frames.popleft()

    def close(self) -> None:
        self._end.close()


class LinkEvents:
    """Drives a link by events of a virtual process."""

    def __init__(self, process: Process, network: Network) -> None:
        self._process, self._world = process, process.world
        self._network = network
        self._link: LinkSteps
        self._ringing = False
        self._over = False

    def dial(self) -> VirtualConnection:
        """A new connection; ``RunEnded`` if nobody listens."""
        wire = self._network.dial(self._process)
        if wire is None:
            raise RunEnded("nobody listens")
        return VirtualConnection(self._process, wire.near)

    def drive(self, link: LinkSteps) -> None:
        self._link = link
        self._receive_from(link.connection)
        self._tick()

    def rest(self, seconds: float) -> bool:
        if not self._over:
            self._process.idle(seconds)
        return self._over

    def stop(self) -> None: ...

    def join(self) -> None: ...

    # -- sending

    def wake(self) -> None:
        if not self._ringing and self._process.alive:
            self._ringing = True
            self._later(self._world.random.random() * 0.0005, self._flush)

    def _tick(self) -> None:
        """Flush once in a period of the signs of life, whether something is queued or not."""
        if not self._link.closed and self._process.alive:
            self._flush()
            self._later(self._link.beat_every_s, self._tick)

    def _flush(self) -> None:
        self._ringing = False
        if self._link.closed or not self._process.alive:
            return
        if not self._link.flush_once(self._world.now_s):
            self._later(AGAIN_S, self.wake)

    # -- receiving

    def _receive_from(self, connection: Any) -> None:
        """Take what has come, and from now on what comes."""
        connection.changed = lambda: self._receive(connection)
        while connection.readable and self._receive(connection):
            pass

    def _receive(self, connection: VirtualConnection) -> bool:
        link = self._link
        if link.connection is not connection or not connection.readable:
            return False
        if link.receive_once():
            return True
        connection.changed = lambda: None
        if link.is_over:
            self._end_receiving()
        else:
            self._world.note("cut", link.mailbox.worker)
            self._search()
        return False

    def _end_receiving(self) -> None:
        self._over = True
        self._process.notice()

    def _search(self) -> None:
        """Try once to find the coordinator again."""
        link = self._link
        if link.closed or not self._process.alive:
            return
        if not link.searches():
            self._end_receiving()
            return
        try:
            connection = self.dial()
        except RunEnded:
            self._later(AGAIN_S, self._search)
            return
        greeting = link.greet_again()
        frame = next(greeting)
        assert frame is not None
        connection.send(frame)
        self._await_answer(connection, greeting)

    def _await_answer(self, connection: VirtualConnection, greeting: Conversation[Any]) -> None:
        def changed() -> None:
            connection.changed = lambda: None
            timer.cancel()
            self._answered(connection, greeting)

        connection.changed = changed
        timer = self._later(CONNECT_S, changed)

    def _answered(self, connection: VirtualConnection, greeting: Conversation[Any]) -> None:
        try:
            greeting.send(connection.recv())
        except StopIteration as end:
            if self._link.take_up(connection, end.value):
                self._world.note("reconnected", self._link.mailbox.worker)
                self._receive_from(connection)
                self.wake()
                self._process.notice()
            else:
                self._end_receiving()
        except (ConnectionClosedOK, ConnectionClosedError, TimeoutError):
            self._later(AGAIN_S, self._search)
        else:
            self._await_answer(connection, greeting)

    def _later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        return self._world.after(delay_s, lambda: self._process.in_background(action))


class VirtualLink(Link):
    """``control.link.Link``, observed; raises as ``Link.connect`` does."""

    def __init__(self, process: Process, network: Network, slot: str, version: str) -> None:
        self.process = process
        self.stopped_era = 0
        """nothing up to this era may be settled any more"""
        driver = LinkEvents(process, network)
        door = Endpoint("virtual:0", "")
        clock = process.world.clock
        super().__init__(driver.dial(), door, slot, version, driver, local_address=slot, pid=process.pid, clock=clock)

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

    def stopped(self, era: int, exchange: int, *, active: bool, whole: bool = True, failed: str = "") -> None:
        self.stopped_era = max(self.stopped_era, era)
        self.process.world.note("stopped", self.worker, era, exchange, active, whole, failed[:40])
        if active or exchange > 0:
            # A worker that was only on its way into an era has none that could be broken.
            self.process.world.note("broken off", self.worker)
        self.lacking = active and not whole
        if self.lacking:
            self.process.world.note("lacking", self.worker)
        super().stopped(era, exchange, active=active, whole=whole, failed=failed)

    def unformed(self, era: int, unreached: Sequence[str], *, connecting: bool = True) -> None:
        self.process.world.note("unformed", self.worker, era, *unreached)
        super().unformed(era, unreached, connecting=connecting)

    def put(self, attempt: int, key: str, value: bytes) -> None:
        if self.process.alive:
            super().put(attempt, key, value)

    def _take(self, message: FromCoordinator) -> None:
        self.process.world.note("to " + self.worker, type(message).__name__)
        try:
            super()._take(message)
            self.heard()
        except Exception as error:
            # The link would take it for a lost connection.
            self.process.world.fail(error)
        self.process.notice()

    def _leave(self, last: FromWorker, patience_s: float) -> None:
        self.process.world.note("farewell", self.worker, type(last).__name__)
        if isinstance(last, Finished):
            (self.departed if last.left else self.concluded)()
        super()._leave(last, patience_s)
        if self.mailbox.evicted is not None:
            self.unheard()
