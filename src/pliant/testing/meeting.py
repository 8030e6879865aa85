"""The groups of a simulated run, seen from above.

Question  What can happen to an exchange when a member is slow, stopped, cut off, or gone?
Holds     The operations of a member run one after another. A gathering or a sum begins when all members have reached
          it, and completes at each member at its own time. When a member leaves, each of the others may still complete
          what had begun, fail, or hang for ever. An operation that did not complete leaves garbage in its memory. If
          members do different operations at the same step, the protocol has a bug, and the simulation fails.
Source    Facts about gloo in DESIGN ("measured on this kind of machine").
"""

from __future__ import annotations

import itertools
from typing import Protocol

from pliant.tensors.process_group.reachability import Unconnected
from pliant.testing.clock import Process, Timer, World
from pliant.testing.exact import POISON, PRIME, Flat

GATHER, SUM, SPREAD = "gather", "sum", "broadcast"


class Operation:
    """One collective, at one member: its ``kind`` is GATHER, SUM or SPREAD."""

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


class Connecting(Protocol):
    """A member that is forming the group (``collective.VirtualForming``)."""

    process: Process
    place: int
    over: bool
    revoked: bool

    def succeed(self, meeting: Meeting) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Meeting:
    """The group of one attempt, seen from above."""

    def __init__(self, world: World, attempt: int, members: int, slowest_s: float) -> None:
        self.world = world
        self.attempt = attempt
        self.members = members
        self._slowest_s = slowest_s
        self.connecting: dict[int, Connecting] = {}
        self.processes: list[Process | None] = [None] * members
        self._operations: list[list[Operation]] = [[] for _ in range(members)]
        self._done = [0] * members
        self._left = [False] * members
        self._fails: list[bool | None] = [None] * members
        """what happens to a member's operations since another one has left: True: they fail, False: they hang"""
        self._parted: frozenset[int] = frozenset()
        """two members whose connection broke, while both live"""

    # -- forming

    def connect(self, forming: Connecting) -> None:
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
                # It waits for members that have given up, for longer than those.
                self._fail_later(each, Unconnected("the members could not be connected"), 3.0)
            elif any(other.revoked or not other.process.alive for other in self.connecting.values()):
                self._fail_later(each, Unconnected("a member has gone"))
            else:
                self.world.after(self.world.between(0.001, 0.01), lambda each=each: each.succeed(self))

    def given_up(self, place: int) -> None:
        """A member has abandoned the forming, or died in it."""
        self.depart(place, abruptly=True)
        for each in list(self.connecting.values()):
            if each.place != place and not each.over and self.world.chance(0.7):
                self._fail_later(each, Unconnected("a member has gone"))

    def _fail_later(self, each: Connecting, error: Exception, least_s: float = 0.02) -> None:
        self.world.after(self.world.between(least_s, least_s + 1.0), lambda: each.fail(error))

    def _barred(self) -> list[tuple[int, int]]:
        """Pairs of places (from, to) between which no connection can be opened."""
        pairs = itertools.permutations(range(self.members), 2)
        return [(who, whom) for who, whom in pairs if self._is_barred(self.processes[who], self.processes[whom])]

    def _is_barred(self, who: Process | None, whom: Process | None) -> bool:
        assert who is not None and whom is not None
        return who.walled == "out" or whom.walled == "in" or whom.name in who.parted

    # -- operating

    def post(self, place: int, kind: str, payload: bytes, flat: Flat | None, root: int) -> Operation:
        """A member begins an operation."""
        if self._left[place]:
            raise RuntimeError("this group was left")
        operation = Operation(kind, payload, flat, root)
        if self._fails[place] and self.world.chance(0.3):
            raise RuntimeError("connection closed by peer")
        self._operations[place].append(operation)
        if any(self._left) or self._parted:
            self._spoil(place)
        self._advance()
        return operation

    def _current(self, place: int) -> Operation | None:
        done, operations = self._done[place], self._operations[place]
        return operations[done] if done < len(operations) else None

    def _advance(self) -> None:
        """Begin every operation that can begin."""
        for process in self.processes:
            if process is None or process.paused or process.unreachable:
                return
        current = [self._current(place) for place in range(self.members)]
        for place, operation in enumerate(current):
            if operation is None or operation.started or self._left[place]:
                continue
            if operation.kind == SPREAD:
                self._spread(place, operation)
        step = min(self._done)
        if self._parted or any(self._left) or any(done != step for done in self._done):
            return
        together = [operation for operation in current if operation is not None]
        if len(together) < self.members or any(operation.started for operation in together):
            return
        if together[0].kind != SPREAD:
            self._meet(step, together)

    def _spread(self, place: int, operation: Operation) -> None:
        root, step = operation.root, self._done[place]
        if root == place:
            self._begin(place, operation, 0.0)
            return
        theirs = self._operations[root]
        if self._left[root] or self._done[root] < step or len(theirs) <= step:
            return
        source = theirs[step]
        if source.kind != SPREAD or source.root != root:
            raise AssertionError(
                f"attempt {self.attempt}, operation {step}: {place} awaits a broadcast, {root} does {source.kind}"
            )
        if operation.payload and operation.payload != source.payload:
            raise AssertionError(
                f"attempt {self.attempt}: members {root} and {place} hold different states at a switch"
            )
        operation.result = [source.payload]
        self._begin(place, operation, self._delay())

    def _meet(self, step: int, together: list[Operation]) -> None:
        first = together[0]
        kinds = [operation.kind for operation in together]
        if len(set(kinds)) > 1:
            raise AssertionError(f"attempt {self.attempt}, operation {step}: members do different things: {kinds}")
        totals: list[int] = []
        if first.kind == GATHER:
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

    def _begin(self, place: int, operation: Operation, delay_s: float, totals: list[int] | None = None) -> None:
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

    def _finish(self, place: int, operation: Operation, error: str | None = None) -> None:
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
        """Let a member's operation that has not begun fail, or hang: it never will."""
        operation, process = self._current(place), self.processes[place]
        if operation is None or operation.started or process is None or self._left[place]:
            return
        if operation.kind == SPREAD:
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
        """Break the connection between two members. They notice; the others, which wait for them, may not."""
        self._parted = frozenset((one, other))
        for place in range(self.members):
            if self._fails[place] is None:
                self._fails[place] = place in self._parted or self.world.chance(0.6)
            self._spoil(place)

    def changed(self) -> None:
        """A member was paused, resumed, cut off or reached again."""
        self._advance()


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
        """Tell the groups of a process when it ends, stops or cannot be reached."""

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
