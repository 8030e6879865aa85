"""The handoff of state, over a virtual network.

Question  What can go wrong between a donor and a newcomer?
Holds     As in ``tensors.handoff``: the donor answers between two exchanges, as of the requested exchange or a later
          one; answers come in the order of the requests, each after a time of its own; when a donor goes, the streams
          to its newcomers break.
Source    ours; docs/design/0007-elastic.md ("Handing the state on").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pliant.tensors.handoff import is_due
from pliant.testing.clock import Process, World
from pliant.worker.elastic.user_state import STATE
from pliant.worker.snapshot import is_parameter

Snapshot = Callable[[Sequence[str], int], dict[str, Any]]


class _VirtualRequest:
    def __init__(self, recipient: VirtualRecipient, era: int, as_of: int, want: list[str]) -> None:
        self.recipient, self.since, self.want = recipient, (era, as_of), want


class Streams:
    """All donors of a world, by their address."""

    def __init__(self, world: World, slowest_s: float) -> None:
        self.world = world
        self.slowest_s = slowest_s
        self.donors: dict[str, VirtualDonor] = {}
        self.breaks = 0.0
        """probability that a stream breaks in the middle of an answer"""
        self.parameters_s = 0.0
        """additional time of an answer with parameters, at most"""
        self.late_heads = 0.0
        """probability that the head of an answer comes as late as its tensors"""
        self.state_s = 0.0
        """additional time of the user's state"""

    def delay(self) -> float:
        part = self.world.random.random()
        return 0.0005 + self.slowest_s * part * part


class VirtualDonor:
    """``tensors.handoff.Donor``."""

    def __init__(self, streams: Streams, process: Process) -> None:
        self._streams = streams
        self.process = process
        self.address = f"{process.name}/{process.pid}"
        self.pending = False
        self._waiting: list[_VirtualRequest] = []
        self._closed = False
        self.recipients: list[VirtualRecipient] = []
        streams.donors[self.address] = self
        process.ended.append(lambda status: self._hang_up())

    def serve(self, era: int, exchange: int, snapshot: Snapshot) -> None:
        """Answer what is due: the group is between two exchanges, after ``exchange``."""
        due = [each for each in self._waiting if is_due(*each.since, era, exchange)]
        self._waiting = [each for each in self._waiting if each not in due]
        self.pending = bool(self._waiting)
        for request in due:
            try:
                state = snapshot(request.want, request.since[1])
            except LookupError as error:
                request.recipient.fail(str(error))
            else:
                self._answer(request, (exchange, state))

    def _answer(self, request: _VirtualRequest, answer: Any) -> None:
        streams = self._streams
        streams.world.note("handoff", self.address, *request.since, answer[0], ",".join(request.want))
        if streams.world.chance(streams.breaks):
            streams.world.after(streams.delay(), lambda: request.recipient.fail("broke in the middle"))
            return
        takes_s = streams.delay() + (streams.state_s if request.want == [STATE] else 0.0)
        if streams.parameters_s > 0.0 and any(map(is_parameter, request.want)):
            takes_s += streams.world.between(0.0, streams.parameters_s)
        late = streams.late_heads > 0.0 and streams.world.chance(streams.late_heads)
        head_s = takes_s if late else min(takes_s, 0.0005)
        due_s = streams.world.now_s + takes_s
        streams.world.after(head_s, lambda: request.recipient.begin(answer[0], due_s))
        streams.world.after(takes_s, lambda: request.recipient.take(answer))

    def ask(self, request: _VirtualRequest) -> None:
        """A request has arrived."""
        if self._closed or not self.process.alive:
            request.recipient.fail("has closed the connection")
            return
        self._waiting.append(request)
        self.pending = True
        self.process.notice()

    def close(self) -> None:
        if self.process.alive:
            self._hang_up()

    def _hang_up(self) -> None:
        self._closed, self._waiting, self.pending = True, [], False
        for recipient in self.recipients:
            self._streams.world.after(self._streams.delay(), lambda r=recipient: r.fail("has closed the connection"))


class VirtualRecipient:
    """``tensors.handoff.Recipient``."""

    def __init__(self, streams: Streams, process: Process, address: str) -> None:
        self._streams = streams
        self._process = process
        self._address = address
        self._arrived: deque[Any] = deque()
        self._asked: deque[_VirtualRequest] = deque()
        self._busy = False
        self._closed = False
        self._begun: tuple[int, float, float] | None = None
        """of the answer that is arriving: its exchange, when it began, when it will be complete"""
        self.failed: str | None = None
        donor = streams.donors.get(address)
        self._donor = donor
        if donor is None or donor._closed or not donor.process.alive:
            streams.world.after(streams.delay(), lambda: self.fail("is out of reach"))
        else:
            donor.recipients.append(self)

    def request(self, era: int, as_of: int, want: Sequence[str]) -> None:
        """Ask for ``want`` as of an exchange or a later one; requests are answered one after another."""
        if list(want) == [STATE]:
            self._streams.world.note("lacks state", self._process.name)
        self._asked.append(_VirtualRequest(self, era, as_of, list(want)))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._asked or self._donor is None or self.failed is not None:
            return
        self._busy = True
        request, donor = self._asked.popleft(), self._donor
        self._streams.world.after(
            self._streams.delay(), lambda: donor.process.in_background(lambda: donor.ask(request))
        )

    def arrived(self) -> Any:
        return self._arrived.popleft() if self._arrived else None

    def begin(self, exchange: int, due_s: float) -> None:
        """The head of an answer has arrived."""
        if not self._closed and self.failed is None:
            self._begun = exchange, self._streams.world.now_s, due_s

    def begun(self) -> tuple[int, float] | None:
        if self._begun is None:
            return None
        exchange, since_s, due_s = self._begun
        return exchange, min(1.0, (self._streams.world.now_s - since_s) / max(1e-9, due_s - since_s))

    def take(self, answer: Any) -> None:
        """An answer has arrived."""
        if self._closed or self.failed is not None or not self._process.alive:
            return
        self._arrived.append(answer)
        self._busy, self._begun = False, None
        self._process.in_background(self._process.notice)
        self._next()

    def fail(self, reason: str) -> None:
        if not self._closed and self.failed is None:
            self.failed = reason
            self._process.in_background(self._process.notice)

    def close(self) -> None:
        self._closed = True
        if self._donor is not None:
            self._donor._waiting = [each for each in self._donor._waiting if each.recipient is not self]
            self._donor.pending = bool(self._donor._waiting)
