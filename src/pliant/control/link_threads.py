"""The threads behind a worker's link.

Question  Who sends and receives while the main loop computes?
Holds     One thread sends; the other receives and, when the connection is lost, looks for the coordinator. They take
          the steps of the link, one after another, and decide nothing. A simulator takes the same steps as events.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from pliant.control.connect import FAREWELL_S, FrameConnection, converse, dial
from pliant.control.handshake import Conversation, Endpoint
from pliant.control.mailbox import Mailbox
from pliant.control.messages import Refuse, Stop, Welcome
from pliant.errors import Refused, RunEnded

AGAIN_S = 0.1
"""Between two attempts to reach the coordinator."""


class LinkSteps(Protocol):
    """A link, as a driver sees it (``control.link.Link``)."""

    connection: FrameConnection
    mailbox: Mailbox
    closed: bool
    beat_every_s: float

    def flush_by_s(self, now_s: float) -> float: ...
    def flush_once(self, now_s: float) -> bool: ...
    def receive_once(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...
    def searches(self) -> bool: ...
    def greet_again(self) -> Conversation[Welcome | Refuse | Stop]: ...
    def take_up(self, connection: FrameConnection, answer: Welcome | Refuse | Stop) -> bool: ...


class LinkDriver(Protocol):
    """Takes the steps of a link: threads, or the events of a simulator."""

    def drive(self, link: LinkSteps) -> None:
        """Begin with the steps of this link."""

    def wake(self) -> None:
        """Have ``flush_once`` called soon: there is something to send."""

    def rest(self, seconds: float) -> bool:
        """Wait until nothing more is received, at most so long; whether that is so."""
        ...

    def stop(self) -> None:
        """Take no more steps: the link is closed."""

    def join(self) -> None:
        """Wait for a step that is still being taken."""


class LinkThreads:
    """Drives a link by two threads."""

    def __init__(self, door: Endpoint) -> None:
        self._door = door
        self._waiting, self._over = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def drive(self, link: LinkSteps) -> None:
        for work, name in ((self._receive, "pliant-link-in"), (self._send, "pliant-link-out")):
            self._threads.append(threading.Thread(target=work, args=(link,), name=name, daemon=True))
            self._threads[-1].start()

    def wake(self) -> None:
        self._waiting.set()

    def rest(self, seconds: float) -> bool:
        return self._over.wait(seconds)

    def stop(self) -> None:
        self._waiting.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(FAREWELL_S)

    def _send(self, link: LinkSteps) -> None:
        while not link.closed:
            now_s = time.monotonic()
            self._waiting.wait(max(0.0, link.flush_by_s(now_s) - now_s))
            self._waiting.clear()
            if not link.flush_once(time.monotonic()):
                time.sleep(AGAIN_S)
                self._waiting.set()

    def _receive(self, link: LinkSteps) -> None:
        try:
            while link.receive_once() or (not link.is_over and self._reconnect(link)):
                pass
        finally:
            self._over.set()

    def _reconnect(self, link: LinkSteps) -> bool:
        """Find the coordinator again; False if it is gone for good, or lets this worker in no more."""
        while link.searches():
            try:
                connection, answer = self._greeted(link)
            except Refused as error:
                link.mailbox.take(Refuse(reason=str(error)))
                return False
            except RunEnded:
                time.sleep(AGAIN_S)
            else:
                return link.take_up(connection, answer)
        return False

    def _greeted(self, link: LinkSteps) -> tuple[FrameConnection, Welcome | Refuse | Stop]:
        connection = dial(self._door)
        try:
            answer = converse(connection, self._door, link.greet_again())
        except BaseException:
            connection.close()
            raise
        if not isinstance(answer, Welcome):
            connection.close()
        return connection, answer
