"""Groups that behave like gloo's.

Question  What can happen to an exchange when a member is slow, stopped, cut off, or gone?
Holds     Operations of a member run one after another. A collective begins when all members have posted it, and
          ends at each member at a time of its own. When a member goes, an operation that had begun may complete, fail
          or hang for ever at any of the others. One that does not complete leaves garbage in its memory. Members that
          post different operations at the same position of the sequence are a bug of the protocol, and raise an error.
Source    Facts about gloo in DESIGN ("measured on this kind of machine").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from pliant.tensors.process_group.reachability import Unconnected
from pliant.testing.clock import Process, Timer, World
from pliant.testing.exact import POISON, PRIME, Flat
from pliant.testing.link import VirtualLink

_GATHER, _SUM, _SPREAD = "gather", "sum", "broadcast"


class _Operation:
    """One collective, at one member."""

    __slots__ = ("error", "flat", "kind", "over", "payload", "result", "root", "started", "timer")

    def __init__(self, kind: str, payload: bytes, flat: Flat | None, root: int) -> None:
        self.kind = kind
        self.payload = payload
        self.flat = flat
        self.root = root
        self.started = False
        self.over = False
        self.error: str | None = None
        self.result: list[bytes] = []
        self.timer: Timer | None = None


class VirtualSummation:
    """One exchange, running or over."""

    def __init__(self, process: Process, operations: Sequence[_Operation]) -> None:
        self._process = process
        self._operations = list(operations)
        self._start_s = process.world.now_s
        self._more = False
        self.seconds = 0.0

    def await_more(self) -> None:
        """The exchange is not over before its last part is added."""
        self._more = True

    def add(self, operations: Sequence[_Operation], *, last: bool) -> None:
        """Add a part."""
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
        """The tickets of all members; raises the error of the exchange."""
        for operation in self._operations:
            if operation.error is not None:
                raise RuntimeError(operation.error)
        first = self._operations[0] if self._operations else None
        return first.result if first is not None and first.kind == _GATHER else []


class Meeting:
    """The group of one attempt, with all its members."""

    def __init__(self, world: World, attempt: int, members: int, slowest_s: float) -> None:
        self.world = world
        self.attempt = attempt
        self.members = members
        self._slowest_s = slowest_s
        self.connecting: dict[int, VirtualForming] = {}
        self.processes: list[Process | None] = [None] * members
        self._operations: list[list[_Operation]] = [[] for _ in range(members)]
        self._done = [0] * members
        self._left = [False] * members
        self._fails: list[bool | None] = [None] * members
        """per member, after another one has gone: whether its operations fail (True) or hang (False)"""
        self._parted: frozenset[int] = frozenset()
        """two members whose connection broke, while both live"""

    # -- forming

    def connect(self, forming: VirtualForming) -> None:
        """A member has begun to connect."""
        self.connecting[forming.place] = forming
        self.processes[forming.place] = forming.process
        if len(self.connecting) < self.members:
            return
        barred = self._barred()
        for each in self.connecting.values():
            unreached = tuple(whom for who, whom in barred if who == each.place)
            if unreached:
                self._fail_later(each, Unconnected("the data ports of other members cannot be reached", unreached))
            elif barred:
                # It waits for members that have given up already, so it gives up last.
                self._fail_later(each, Unconnected("the members could not be connected"), 3.0)
            elif any(other.revoked or not other.process.alive for other in self.connecting.values()):
                self._fail_later(each, Unconnected("a member has gone"))
            else:
                self.world.after(self.world.between(0.001, 0.01), lambda each=each: each.succeed(self))

    def given_up(self, place: int) -> None:
        """A member has abandoned the forming, or has died meanwhile."""
        self.depart(place, abruptly=True)
        for each in list(self.connecting.values()):
            if each.place != place and not each.over and self.world.chance(0.7):
                self._fail_later(each, Unconnected("a member has gone"))

    def _fail_later(self, each: VirtualForming, error: Exception, least_s: float = 0.02) -> None:
        self.world.after(self.world.between(least_s, least_s + 1.0), lambda: each.fail(error))

    def _barred(self) -> list[tuple[int, int]]:
        """Pairs of places: the first cannot open a connection to the second."""
        pairs = itertools.permutations(range(self.members), 2)
        return [(who, whom) for who, whom in pairs if self._is_barred(self.processes[who], self.processes[whom])]

    def _is_barred(self, who: Process | None, whom: Process | None) -> bool:
        assert who is not None and whom is not None
        return who.walled == "out" or whom.walled == "in" or whom.name in who.parted

    # -- operating

    def post(self, place: int, kind: str, payload: bytes, flat: Flat | None, root: int) -> _Operation:
        """A member begins an operation."""
        if self._left[place]:
            raise RuntimeError("this group was left")
        operation = _Operation(kind, payload, flat, root)
        if self._fails[place] and self.world.chance(0.3):
            raise RuntimeError("connection closed by peer")
        self._operations[place].append(operation)
        if any(self._left) or self._parted:
            self._spoil(place)
        self._advance()
        return operation

    def _current(self, place: int) -> _Operation | None:
        done, operations = self._done[place], self._operations[place]
        return operations[done] if done < len(operations) else None

    def _advance(self) -> None:
        """Begin the operations that can begin."""
        for process in self.processes:
            if process is None or process.paused or process.unreachable:
                return
        current = [self._current(place) for place in range(self.members)]
        for place, operation in enumerate(current):
            if operation is None or operation.started or self._left[place]:
                continue
            if operation.kind == _SPREAD:
                self._spread(place, operation)
        step = min(self._done)
        if self._parted or any(self._left) or any(done != step for done in self._done):
            return
        together = [operation for operation in current if operation is not None]
        if len(together) < self.members or any(operation.started for operation in together):
            return
        if together[0].kind != _SPREAD:
            self._meet(step, together)

    def _spread(self, place: int, operation: _Operation) -> None:
        root, step = operation.root, self._done[place]
        if root == place:
            self._begin(place, operation, 0.0)
            return
        theirs = self._operations[root]
        if self._left[root] or self._done[root] < step or len(theirs) <= step:
            return
        source = theirs[step]
        if source.kind != _SPREAD or source.root != root:
            raise AssertionError(
                f"attempt {self.attempt}, operation {step}: {place} awaits a broadcast, {root} does {source.kind}"
            )
        if operation.payload and operation.payload != source.payload:
            raise AssertionError(
                f"attempt {self.attempt}: members {root} and {place} hold different states at a switch"
            )
        operation.result = [source.payload]
        self._begin(place, operation, self._delay())

    def _meet(self, step: int, together: list[_Operation]) -> None:
        first = together[0]
        kinds = [operation.kind for operation in together]
        if len(set(kinds)) > 1:
            raise AssertionError(f"attempt {self.attempt}, operation {step}: members do different things: {kinds}")
        totals: list[int] = []
        if first.kind == _GATHER:
            sizes = {len(operation.payload) for operation in together}
            if len(sizes) > 1:
                raise AssertionError(f"attempt {self.attempt}, operation {step}: tickets of different sizes: {sizes}")
            gathered = [operation.payload for operation in together]
            for operation in together:
                operation.result = gathered
        else:
            flats = [operation.flat for operation in together if operation.flat is not None]
            if len({len(flat.values) for flat in flats}) > 1:
                raise AssertionError(f"attempt {self.attempt}, operation {step}: sums of different sizes")
            totals = [sum(column) % PRIME for column in zip(*(flat.values for flat in flats), strict=True)]
            for flat in flats:
                flat.values = [POISON] * len(flat.values)
        for place, operation in enumerate(together):
            self._begin(place, operation, self._delay(), totals)

    def _delay(self) -> float:
        part = self.world.random.random()
        return 0.0002 + self._slowest_s * part * part

    def _begin(self, place: int, operation: _Operation, delay_s: float, totals: list[int] | None = None) -> None:
        process = self.processes[place]
        assert process is not None
        operation.started = True

        def complete() -> None:
            if operation.over or self._left[place]:
                return
            if process.unreachable:
                # Completed when the others can be reached again.
                operation.timer = self.world.after(0.05, lambda: process.in_background(complete))
                return
            if operation.flat is not None and totals is not None:
                operation.flat.values = list(totals)
            self._finish(place, operation)

        operation.timer = self.world.after(delay_s, lambda: process.in_background(complete))

    def _finish(self, place: int, operation: _Operation, error: str | None = None) -> None:
        operation.over, operation.error = True, error
        self._done[place] += 1
        process = self.processes[place]
        assert process is not None
        process.notice()
        self._advance()
        if any(self._left) or self._parted:
            self._spoil(place)

    # -- going

    def depart(self, place: int, *, abruptly: bool) -> None:
        """A member leaves the group, or dies."""
        if self._left[place]:
            return
        self._left[place] = True
        under_way = abruptly or self._current(place) is not None
        for operation in self._operations[place]:
            if operation.timer is not None:
                operation.timer.cancel()
        for other in range(self.members):
            if other == place or self._left[other]:
                continue
            if self._fails[other] is None:
                self._fails[other] = self.world.chance(0.6)
            operation = self._current(other)
            if operation is None:
                continue
            safe = operation.started and self._done[place] > self._done[other] and not under_way
            if operation.started and not safe and self.world.chance(0.5) and operation.timer is not None:
                operation.timer.cancel()
                operation.started = False
            self._spoil(other)

    def _spoil(self, place: int) -> None:
        """An operation that has not begun never begins: it fails, or hangs."""
        operation, process = self._current(place), self.processes[place]
        if operation is None or operation.started or process is None or self._left[place]:
            return
        if operation.kind == _SPREAD:
            root = operation.root
            if (not self._left[root] and self._parted != {root, place}) or root == place:
                return
        operation.started = True
        if self._fails[place]:

            def fail() -> None:
                if not operation.over and not self._left[place]:
                    self._finish(place, operation, "connection reset by peer")

            operation.timer = self.world.after(self.world.between(0.001, 0.05), lambda: process.in_background(fail))

    def part(self, one: int, other: int) -> None:
        """The connection between two members breaks. They see it; others that wait for them may not."""
        self._parted = frozenset((one, other))
        for place in range(self.members):
            if self._fails[place] is None:
                self._fails[place] = place in self._parted or self.world.chance(0.6)
            self._spoil(place)

    def changed(self) -> None:
        """A member was paused, resumed, cut off or reached again."""
        self._advance()


class VirtualGroup:
    """One member's view of a group: ``tensors.process_group.gloo.Gloo``."""

    def __init__(self, meeting: Meeting, place: int, process: Process) -> None:
        self.members = meeting.members
        self.place = place
        self.attempt = meeting.attempt
        self._meeting = meeting
        self._process = process

    def exchange(self, ticket: bytes, sums: Sequence[Flat]) -> VirtualSummation:
        return self._posted((_GATHER, ticket, None), *((_SUM, b"", flat) for flat in sums))

    def gather(self, ticket: bytes) -> VirtualSummation:
        return self._posted((_GATHER, ticket, None))

    def add_up(self, sums: Sequence[Flat]) -> VirtualSummation:
        return self._posted(*((_SUM, b"", flat) for flat in sums))

    def begin(self, ticket: bytes) -> VirtualSummation:
        summation = self.gather(ticket)
        summation.await_more()
        return summation

    def go_on(self, summation: VirtualSummation, sums: Sequence[Flat], *, last: bool = False) -> None:
        more = self._posted(*((_SUM, b"", flat) for flat in sums))
        summation.add(more._operations, last=last)

    def tell(self, payload: bytes, root: int) -> None:
        self._posted((_SPREAD, payload, None), root=root)

    def told(self, root: int, check: Callable[[], None]) -> bytes:
        heard = self._posted((_SPREAD, b"", None), root=root)
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


class Meetings:
    """All groups of a world, by their attempt."""

    def __init__(self, world: World, slowest_s: float) -> None:
        self.world = world
        self._slowest_s = slowest_s
        self._meetings: dict[int, Meeting] = {}

    def of(self, attempt: int, members: int) -> Meeting:
        """The group of an attempt."""
        if attempt not in self._meetings:
            self._meetings[attempt] = Meeting(self.world, attempt, members, self._slowest_s)
        meeting = self._meetings[attempt]
        if meeting.members != members:
            raise AssertionError(f"attempt {attempt} is formed with {meeting.members} and with {members} members")
        return meeting

    def part(self, one: Process, other: Process) -> None:
        """The connections between two processes break."""
        for meeting in list(self._meetings.values()):
            if one in meeting.processes and other in meeting.processes:
                meeting.part(meeting.processes.index(one), meeting.processes.index(other))

    def watch(self, process: Process) -> None:
        """Tell the groups of a process when it ends or changes."""

        def ended(status: int) -> None:
            for meeting in list(self._meetings.values()):
                for place, member in enumerate(meeting.processes):
                    if member is process:
                        meeting.given_up(place)

        def changed() -> None:
            for meeting in list(self._meetings.values()):
                if process in meeting.processes:
                    meeting.changed()

        process.ended.append(ended)
        process.changed.append(changed)


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
        """Look whether all others are there: a message of the coordinator has come."""
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

    def result(self) -> Any:
        """Hand the group over to the caller; raises the error if there is none."""
        group, self._group = self._group, None
        if group is None:
            raise self._error or RuntimeError("the group was abandoned or taken before")
        return group

    def abandon(self) -> None:
        """Give up."""
        if not self.process.alive:
            return
        self.revoked = True
        group, self._group = self._group, None
        if group is not None:
            group.leave()
        elif not self.over:
            self._error, self.over = RuntimeError("abandoned"), True
            self._meeting.given_up(self.place)
