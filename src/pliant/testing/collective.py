"""Groups that behave like gloo's.

Question  What does a simulated worker use in the place of a gloo group?
Holds     Implementations of ``Channel``, ``Summation`` and ``PendingGroup``. The outcome of an operation is decided in
          ``meeting``, which sees the operations of all members.
Source    Facts about gloo in DESIGN ("measured on this kind of machine").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pliant.tensors.process_group.channel import Summation
from pliant.testing.clock import Process
from pliant.testing.exact import Flat
from pliant.testing.link import VirtualLink
from pliant.testing.meeting import GATHER, SPREAD, SUM, Meeting, Meetings, Operation


class VirtualSummation:
    """A ``Summation``."""

    def __init__(self, process: Process, operations: Sequence[Operation]) -> None:
        self._process = process
        self._operations = list(operations)
        self._start_s = process.world.now_s
        self._more = False
        self.seconds = 0.0

    def await_more(self) -> None:
        """More operations will be added: the exchange is not over before the last one."""
        self._more = True

    def add(self, operations: Sequence[Operation], *, last: bool) -> None:
        """Add further operations that were started; ``last``: there will be no more."""
        self._operations += operations
        if last:
            self._more, self._start_s = False, self._process.world.now_s

    @property
    def over(self) -> bool:
        """Whether it has completed or failed."""
        if not self._more and all(operation.over for operation in self._operations):
            if self.seconds == 0.0:
                self.seconds = self._process.world.now_s - self._start_s
            return True
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over, at most so long."""
        if not self.over:
            self._process.idle(timeout_s)
        return self.over

    def tickets(self) -> list[bytes]:
        """All tickets, in the order of the roster; raises the error if the exchange failed."""
        for operation in self._operations:
            if operation.error is not None:
                raise RuntimeError(operation.error)
        first = self._operations[0] if self._operations else None
        return first.result if first is not None and first.kind == GATHER else []


class VirtualGroup:
    """One member's view of a group: a ``Channel`` whose tensors are ``Flat``."""

    def __init__(self, meeting: Meeting, place: int, process: Process) -> None:
        self.members = meeting.members
        self.place = place
        self.attempt = meeting.attempt
        self._meeting = meeting
        self._process = process

    def exchange(self, ticket: bytes, sums: Sequence[Any]) -> VirtualSummation:
        return self._posted((GATHER, ticket, None), *((SUM, b"", flat) for flat in sums))

    def gather(self, ticket: bytes) -> VirtualSummation:
        return self._posted((GATHER, ticket, None))

    def add_up(self, sums: Sequence[Any]) -> VirtualSummation:
        return self._posted(*((SUM, b"", flat) for flat in sums))

    def begin(self, ticket: bytes) -> VirtualSummation:
        summation = self.gather(ticket)
        summation.await_more()
        return summation

    def go_on(self, summation: Summation, sums: Sequence[Any], *, last: bool = False) -> None:
        assert isinstance(summation, VirtualSummation)
        more = self._posted(*((SUM, b"", flat) for flat in sums))
        summation.add(more._operations, last=last)

    def broadcast(self, tensor: Any, root: int = 0, check: Callable[[], None] | None = None) -> None:
        if self.place == root:
            self.tell(msgspec.msgpack.encode(tensor.values), root)
        else:
            tensor.values = msgspec.msgpack.decode(self.told(root, check or (lambda: None)), type=list[int])

    def tell(self, payload: bytes, root: int) -> None:
        self._posted((SPREAD, payload, None), root=root)

    def told(self, root: int, check: Callable[[], None]) -> bytes:
        heard = self._posted((SPREAD, b"", None), root=root)
        while not heard.wait(0.005):
            check()
        heard.tickets()
        return heard._operations[0].result[0]

    def leave(self) -> None:
        if self._process.alive:
            self._meeting.depart(self.place, abruptly=False)

    def _posted(self, *operations: tuple[str, bytes, Flat | None], root: int = 0) -> VirtualSummation:
        self._process._check()
        posted = [self._meeting.post(self.place, *operation, root) for operation in operations]
        return VirtualSummation(self._process, posted)


class VirtualForming:
    """A group that is being formed: ``tensors.process_group.gloo.FormingGroup``."""

    def __init__(self, meetings: Meetings, link: VirtualLink, attempt: int, place: int, members: int) -> None:
        self.process = link.process
        self.place = place
        self.over = False
        self.revoked = False
        self._members = members
        self._attempt = attempt
        self._link = link
        self._error: Exception | None = None
        self._group: VirtualGroup | None = None
        self._meeting = meetings.of(attempt, members)
        if self._meeting.connecting.get(place) is not None:
            raise AssertionError(f"place {place} of attempt {attempt} is taken twice")
        self._connecting = False
        world = self.process.world
        world.note("forming", link.worker, attempt, f"{place} of {members}")
        if link.lacking:
            world.note("lacking forms", link.worker)
        world.after(60.0, lambda: self.fail(TimeoutError("timed out")))
        world.after(world.between(0.0001, 0.002), lambda: self.process.in_background(self._begin))

    def _begin(self) -> None:
        if self.over:
            return
        try:
            self._link.put(self._attempt, f"here/{self.place}", b"1")
        except TimeoutError as error:
            self.fail(error)
        self.look()

    def look(self) -> None:
        """Connect if all other members are there; called after each message of the coordinator."""
        if self.over or self._connecting:
            return
        try:
            for place in range(self._members):
                self._link.get(self._attempt, f"here/{place}", 0.0)
        except TimeoutError:
            return
        except Exception:
            self.fail(RuntimeError("the run is over"))
            return
        self._connecting = True
        self._meeting.connect(self)

    def succeed(self, meeting: Meeting) -> None:
        if self.over or self.revoked or not self.process.alive:
            return
        self.process.in_background(lambda: self._over(VirtualGroup(meeting, self.place, self.process)))

    def fail(self, error: Exception) -> None:
        if self.over or not self.process.alive:
            return
        self._error = error
        self.process.in_background(lambda: self._over(None))

    def _over(self, group: VirtualGroup | None) -> None:
        if not self.over:
            self.over = True
            if self.revoked and group is not None:
                group.leave()
            elif group is not None:
                self._group, self._error = group, None
            else:
                self._meeting.given_up(self.place)
            self.process.notice()

    @property
    def failed(self) -> bool:
        """Whether it has ended without a group."""
        return self.over and self._group is None and self._error is not None

    def result(self) -> VirtualGroup:
        """The group, which the caller now owns; raises the error if forming failed."""
        group, self._group = self._group, None
        if group is None:
            raise self._error or RuntimeError("the group was abandoned or taken before")
        return group

    def abandon(self) -> None:
        """Give up; a group that has been formed is left."""
        if not self.process.alive:
            return
        self.revoked = True
        group, self._group = self._group, None
        if group is not None:
            group.leave()
        elif not self.over:
            self._error, self.over = RuntimeError("abandoned"), True
            self._meeting.given_up(self.place)
