"""A worker's end of the control channel.

Question  How does a worker talk to the coordinator without ever waiting for it while it computes?
Holds     Nothing that the main loop calls between micro-batches blocks. What is queued is sent in order. A lost
          connection is opened again behind the scenes, under the same name, and what the coordinator must know is said
          again; journal lines are kept until it has them on disk. Nothing is said to anybody who does not know the
          job's token, which is never sent. No threads and no waiting here: a driver takes the steps, ``LinkThreads`` in
          production, events of a virtual process in the simulator.
Source    ours; docs/protocol.md. DESIGN, facts measured: stores and pings.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

from pliant.control.connect import FAREWELL_S, FrameConnection, converse, dial
from pliant.control.handshake import Conversation, Endpoint, greet
from pliant.control.line_buffer import LineBuffer
from pliant.control.link_threads import LinkDriver, LinkThreads
from pliant.control.mailbox import Mailbox
from pliant.control.messages import (
    Again,
    Beat,
    Call,
    Entered,
    Failed,
    Finished,
    FromCoordinator,
    FromWorker,
    Hello,
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
from pliant.errors import Refused
from pliant.errors import Stopped as RunStopped

GIVE_UP_S = 60.0
"""How long a coordinator may be away: its launcher starts it again within a second. One that says ``hold`` is there."""


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

    def __init__(
        self,
        connection: FrameConnection,
        door: Endpoint,
        slot: str,
        version: str,
        driver: LinkDriver,
        *,
        local_address: str,
        pid: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = connection
        self.local_address = local_address
        self._door, self._driver, self._clock = door, driver, clock
        self._newcomer = Hello(slot=slot, pid=pid, version=version)
        self._beaten_s = clock()
        """when the last sign of life was due"""
        self._held_s = float("-inf")
        """when a coordinator that still reads the journal was heard last"""
        self.position = Position()
        self.mailbox = Mailbox(_welcome(converse(connection, door, greet(self._newcomer, door, self._note_hold))))
        self._pledges: dict[type[FromWorker], FromWorker] = {}
        """what a coordinator that has not heard it yet must be told"""
        self._offer: Ready | None = None
        """what it has become a member with"""
        self._puts: list[Put] = []
        """keys of the last group that was formed, or is being formed: some may have been lost with a connection"""
        self._lines = LineBuffer(self.mailbox)
        self.sends_lines = False
        self._asked = False
        """for lines, whoever usually sends them"""
        self._outbox: deque[FromWorker] = deque()
        self._unsent: list[FromWorker] = []
        """taken from there, and not sent yet"""
        self._leaving = self._until_heard = self.closed = False
        self._dismissed = False
        """the coordinator has closed the last connection in good order"""
        self._search_until_s = 0.0
        self.beat_every_s = self.mailbox.welcome.dead_after_s / 10
        driver.drive(self)

    @classmethod
    def connect(cls, address: str, token: str, slot: str, version: str, context: ssl.SSLContext | None = None) -> Link:
        """Say hello at ``host:port`` as a newcomer and wait for the welcome, which names this worker.

        With a ``context`` under TLS.
        """
        door = Endpoint(address, token, context)
        connection = dial(door)
        local_address: str = connection.socket.getsockname()[0]
        try:
            driver = LinkThreads(door)
            return cls(connection, door, slot, version, driver, local_address=local_address, pid=os.getpid())
        except BaseException:
            connection.close()
            raise

    @property
    def worker(self) -> str:
        """The name that the coordinator has given."""
        return self.mailbox.worker

    # -- what the main loop says

    def ready(self, signature: Signature, address: str, call: Call | None) -> None:
        """Ask to become a member, with this model and these settings."""
        with contextlib.suppress(KeyError, ValueError):
            self.beat_every_s = float(signature.settings["dead_after"]) / 10
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
        self._pledges.pop(Stopped, None)
        self._pledges.pop(Unformed, None)
        ready = self._pledges.pop(Ready, None)
        if isinstance(ready, Ready):
            self._offer = ready
        self._queue(Entered(era=era, exchange=exchange))

    def _pledge(self, message: FromWorker) -> None:
        self._pledges[type(message)] = message
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
        self._queue(beat_of(self.position, self._clock()))

    def check(self) -> None:
        """Raise if the run is over for this worker."""
        self.mailbox.check()

    def keep(self, lines: Iterable[bytes], first: int) -> None:
        """Keep journal lines, numbered from ``first``, until they are on disk; the leader's are sent."""
        self._lines.keep(lines, first)
        self._driver.wake()

    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None:
        """Keep lines that come right before this worker's own."""
        self._lines.keep_earlier(lines, first)

    def send_lines_again(self) -> None:
        """Begin once more with what is not on disk: an era has started, and somebody else may have sent before."""
        self._lines.begin_again(self.mailbox.written)
        self.sends_lines = True
        self._driver.wake()

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
        self._leave(Failed(reason=reason, shown=shown, fatal=fatal, own=own), FAREWELL_S)

    def close(self) -> None:
        """Close without a word: this name is gone."""
        self._leaving = self.closed = True
        self._driver.stop()
        self.connection.close()

    def _leave(self, last: FromWorker, patience_s: float) -> None:
        self._leaving = True
        self._pledge(last)
        # The coordinator closes the connection when it has read everything.
        until_s = self._clock() + patience_s
        while (left_s := until_s - self._clock()) > 0 and not self._driver.rest(left_s):
            if self._until_heard:
                until_s = self._given_up_s(until_s)
        self.close()
        self._driver.join()

    def _queue(self, entry: FromWorker) -> None:
        self._outbox.append(entry)
        self._driver.wake()

    # -- the steps of sending

    def flush_by_s(self, now_s: float) -> float:
        """When ``flush_once`` is due even if nothing is queued: a sign of life has to be sent, as long as it stays."""
        return (now_s if self._leaving else self._beaten_s) + self.beat_every_s

    def flush_once(self, now_s: float) -> bool:
        """Send the journal lines and messages that wait, and a sign of life if it is time; False if that failed."""
        self._unsent += [self._outbox.popleft() for _ in range(len(self._outbox))]
        if now_s >= self.flush_by_s(now_s):
            self._beaten_s = now_s
            self._unsent.append(beat_of(self.position, now_s))
        try:
            asked, self._asked = self._asked, False
            for frame in self._lines.unsent(sends=self.sends_lines or asked):
                self.connection.send(encode(frame))
                self._lines.sent(frame)
            while self._unsent:
                self.connection.send(encode(self._unsent[0]))
                self._unsent.pop(0)
        except (ConnectionClosed, OSError):
            self._unsent = [entry for entry in self._unsent if not isinstance(entry, Beat)]
            return False
        return True

    # -- the steps of receiving

    def receive_once(self) -> bool:
        """Take the next message; False if the connection is closed."""
        try:
            self._take(decode_from_coordinator(self.connection.recv(decode=False)))
        except (ConnectionClosed, OSError, EOFError, msgspec.DecodeError, TypeError) as error:
            self._dismissed = isinstance(error, ConnectionClosedOK)
            self._search_until_s = self._clock() + GIVE_UP_S
            return False
        return True

    def _take(self, message: FromCoordinator) -> None:
        self.mailbox.take(message)
        if isinstance(message, Again):
            self._lines.begin_again(message.first)
            self._asked = True
            self._driver.wake()

    @property
    def is_over(self) -> bool:
        """Whether the connection that was closed is the last one."""
        if self.closed or self.mailbox.trouble or self.mailbox.evicted:
            return True
        return self._leaving and (self._dismissed or not self._until_heard)

    def searches(self) -> bool:
        """Whether to try once more to find the coordinator; if not, the run is over here."""
        if not self.closed and self._clock() < self._given_up_s(self._search_until_s):
            return True
        self.mailbox.lose(f"lost the coordinator at {self._door.address}")
        return False

    def _given_up_s(self, until_s: float) -> float:
        """Until when the coordinator is waited for: one that still read the journal was there when it was heard."""
        return max(until_s, self._held_s + GIVE_UP_S)

    def _note_hold(self) -> None:
        self._held_s = self._clock()

    def greet_again(self) -> Conversation[Welcome | Refuse | Stop]:
        """The first frames of another connection, under the same name."""
        at, offer = self.position, self._pledges.get(Ready) or self._offer
        known = isinstance(offer, Ready)
        hello = msgspec.structs.replace(
            self._newcomer,
            worker=self.worker,
            era=at.era,
            exchange=at.exchange,
            active=at.active,
            signature=offer.signature if known else None,
            address=offer.address if known else "",
        )
        return greet(hello, self._door, self._note_hold)

    def take_up(self, connection: FrameConnection, answer: Welcome | Refuse | Stop) -> bool:
        """Go on over this connection if it is welcome there; say again what the coordinator may not have heard."""
        self.mailbox.take(answer)
        if not isinstance(answer, Welcome):
            return False
        self.connection = connection
        self._lines.begin_again(answer.written)
        for message in [*self._pledges.values(), *self._puts]:
            self._queue(message)
        return True


def _welcome(answer: Welcome | Refuse | Stop) -> Welcome:
    """Raises the reason if a newcomer is not let in."""
    match answer:
        case Welcome():
            return answer
        case Refuse(reason=reason):
            raise Refused(reason)
        case Stop(reason=reason, completed=completed):
            raise RunStopped(reason, completed=completed)


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
