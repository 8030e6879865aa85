"""A group whose members stay, in virtual time.

Question  What do real workers of known speeds do, and journal, while none of them comes, goes or dies?
Holds     ``Worker`` and everything below it are the production code; clock, group and tensors are virtual. There is no
          coordinator: the roster is given, and each worker's journal lines are kept beside it. Times are exact: a
          micro-batch takes what its worker's speed says, an exchange with sums is over ``sum_s`` after the last member
          has handed in, and a member that waits for it goes on at that instant. A scene has one history.
Source    ours; ``simulation`` is for runs whose members change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pliant.core.group_state import FinishedPhase, GroupState, Policy, founded
from pliant.core.journal import records as journal
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.rounds import Settled
from pliant.core.tickets import Kind, Ticket
from pliant.tensors.process_group import gloo as groups
from pliant.testing.clock import Process, World
from pliant.testing.collective import VirtualGroup
from pliant.testing.meeting import Meeting
from pliant.testing.memo import remembered
from pliant.testing.training import VirtualTraining
from pliant.types import WorkerId
from pliant.worker.elastic.enrolment import Solo
from pliant.worker.journal import JournalReporter
from pliant.worker.loop import Worker
from pliant.worker.script.calls import Counted, ScriptCall
from pliant.worker.submit import BucketReady

Answer = TypeVar("Answer")

_OPERATIONS = 3
"""of an exchange with sums: one for the tickets, one for each of two buckets"""

_SELDOM_S = 5.0
"""Between two looks of a member that waits: nothing but the end of an exchange can be seen here."""

_LIMIT_S = 50_000.0
"""Longer than any scene of a test takes."""


class EarlyExit(msgspec.Struct, frozen=True):
    """``member`` leaves its loop over batches after so many draws."""

    member: int
    draws: int
    computed: bool = True
    """whether it computes the last one"""


class SteadyCall(msgspec.Struct, frozen=True):
    """One call of ``batches`` or ``evaluate`` in every worker's script."""

    kind: Kind
    length: int
    epoch: int = 0
    exits: tuple[EarlyExit, ...] = ()


class SteadyScene(msgspec.Struct, frozen=True):
    """Who works at which speed (samples/s) on what."""

    policy: Policy
    speeds: tuple[float, ...]
    sizes: tuple[int, ...]
    script: tuple[SteadyCall, ...]
    ahead: tuple[int, ...] = ()
    sum_s: float = 0.01
    changes: tuple[tuple[float, int, float], ...] = ()
    """(from when, member, new speed)"""
    samples_limit: int | None = None
    evaluates_every: int = 0
    """call ``evaluate`` inside ``batches`` whenever ``step`` is True at a multiple of so many rounds; 0: never"""
    spoiled: frozenset[int] = frozenset()
    """positions whose loss is infinite"""

    def speed(self, member: int, now_s: float) -> float:
        """Of one member, at one time."""
        speed = self.speeds[member]
        for since_s, who, new in self.changes:
            if who == member and now_s >= since_s:
                speed = new
        return speed


class ComputedBatch(msgspec.Struct, frozen=True):
    """A micro-batch that was computed."""

    phase: int
    start_s: float
    stop_s: float
    samples: int


class IdleTime(msgspec.Struct, frozen=True):
    """Time that a worker spent waiting for an exchange inside a phase."""

    phase: int
    start_s: float
    stop_s: float
    last: bool
    """nothing of the phase was left to deal"""


class SeenSettlement(msgspec.Struct, frozen=True):
    """An exchange as one worker has settled it."""

    outcome: Settled
    took_part: tuple[bool, ...]
    """by member: whether it has handed in samples in that phase"""
    where: str
    """what the script had called: ``open``, ``draw``, ``step``, ``abandon`` or ``end``"""


class _JournalLines:
    """Where one worker's lines go: ``worker.journal.LineSink``."""

    def __init__(self) -> None:
        self.sends_lines = False
        self.kept: dict[int, bytes] = {}

    def keep(self, lines: Iterable[bytes], first: int) -> None:
        for number, line in enumerate(lines, start=first):
            assert number not in self.kept, f"line {number} is told twice"
            self.kept[number] = line

    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None: ...

    def unwritten(self) -> list[bytes]:
        return []

    def send_lines_again(self) -> None: ...


class _SteadyJournal(JournalReporter):
    """The real one, which also tells its member of each settled exchange."""

    def __init__(self, lines: _JournalLines, member: SteadyMember) -> None:
        super().__init__(lines)
        self._member = member

    def opened(self, group: GroupState, openings: list[Ticket]) -> None:
        super().opened(group, openings)
        self._member.states.append(group)

    def settled(self, group: GroupState, outcome: Settled, handed_in: list[Ticket], rate: float) -> None:
        super().settled(group, outcome, handed_in, rate)
        self._member.settled(group, outcome, handed_in)


class _SteadyMeeting(Meeting):
    """Every operation takes the same time."""

    def _delay(self) -> float:
        return self._slowest_s / _OPERATIONS


class _SteadyProcess(Process):
    """Notices at once what it waits for, and tells how long it has waited."""

    look_s = 0.0

    def __init__(
        self, world: World, name: str, body: Callable[[Process], int], waited: Callable[[float, float], None]
    ) -> None:
        super().__init__(world, name, 0, body)
        self._waited = waited

    def idle(self, seconds: float) -> None:
        since_s = self.world.now_s
        super().idle(max(seconds, _SELDOM_S))
        self._waited(since_s, self.world.now_s)


class _SteadyTraining(VirtualTraining):
    """Gradients with a squared mean of 1 and a noise scale of 50 samples, but for some chance."""

    def __init__(self, reference: int) -> None:
        super().__init__(reference=reference, buffers=0, start=1)
        self.counted = 0
        """samples that were computed since the last contribution was handed in"""
        self._contributions = 0

    def unscale(self) -> float | None:
        return self._norm_of_sum()

    def unscale_part(self, part: int) -> float:
        return self._norm_of_sum() if part == 0 else 0.0

    def _norm_of_sum(self) -> float:
        samples, self.counted = self.counted, 0
        self._contributions += 1
        chance = 0.8 + 0.1 * (self._contributions % 5)
        return (1.0 + 50.0 / samples * chance) * (samples / self.reference) ** 2 if samples else 0.0

    def _average(self, summed: Any, mean: float, *, measures: bool) -> float | None:
        taken = super()._average(summed, mean, measures=measures)
        return None if taken is None else 1.0 + 50.0 * mean / self.reference * (0.7 + 0.15 * (self._contributions % 5))


class SteadyMember:
    """One worker, its script, and what was seen of it."""

    def __init__(self, scene: SteadyScene, world: World, place: int, meeting: Meeting | None) -> None:
        self.scene, self.place = scene, place
        self.computed: list[ComputedBatch] = []
        self.waits: list[IdleTime] = []
        self.states: list[GroupState] = []
        """after each opening and each settled exchange"""
        self.settlements: list[SeenSettlement] = []
        self.training = _SteadyTraining(scene.policy.batch)
        self.lines = _JournalLines()
        self.process = _SteadyProcess(world, f"w{place}", self._run, self._waited)
        self.worker = self._member_of(meeting)
        self._where = ""

    def _member_of(self, meeting: Meeting | None) -> Worker:
        roster = tuple(WorkerId(f"w{member}") for member in range(len(self.scene.speeds)))
        group, process = founded(self.scene.policy, 1, roster), self.process
        channel: groups.Alone | VirtualGroup = groups.Alone()
        if meeting is not None:
            meeting.processes[self.place] = process
            channel = VirtualGroup(meeting, self.place, process)
        witness = _SteadyJournal(self.lines, self)
        witness.era(group, None, sends=self.place == 0)
        me, clock = roster[self.place], process.world.clock
        return Worker(me, group, channel, self.training, witness, Solo(), clock=clock, sleep=process.idle)

    @property
    def group(self) -> GroupState:
        """The replicated state."""
        return self.worker.group

    # -- what is seen

    def settled(self, group: GroupState, outcome: Settled, handed_in: Sequence[Ticket]) -> None:
        """The worker has settled an exchange."""
        before = self.states[-1].phase.took_part
        took_part = tuple(took or ticket.samples > 0 for took, ticket in zip(before, handed_in, strict=True))
        self.settlements.append(SeenSettlement(outcome, took_part, self._where))
        self.states.append(group)

    def _waited(self, start_s: float, stop_s: float) -> None:
        group = self.group
        if group.open:
            self.waits.append(IdleTime(group.phase.number, start_s, stop_s, group.phase.ledger.free == 0))

    # -- the script

    def _run(self, process: Process) -> int:
        self.worker.limit(self.scene.samples_limit, None)
        for call in self.scene.script:
            self._call(call)
        self._doing("end", self.worker.end)
        return 0

    def _doing(self, where: str, ask: Callable[[], Answer]) -> Answer:
        self._where = where
        return ask()

    def _call(self, call: SteadyCall) -> None:
        ahead = self.scene.ahead[self.place] if self.scene.ahead else 0
        asked = ScriptCall(call.kind, call.epoch, Counted(call.length, 0), self.scene.sizes[self.place], ahead)
        with self.training.plain() if call.kind is Kind.EVALUATE else nullcontext():
            phase = self._doing("open", lambda: self.worker.open(asked))
            if not isinstance(phase, FinishedPhase):
                self._loop(call, phase)

    def _loop(self, call: SteadyCall, phase: int) -> None:
        exits = [each for each in call.exits if each.member == self.place]
        draws = 0
        while (micro_batch := self._doing("draw", lambda: self.worker.draw(phase))) is not None:
            draws += 1
            leaves = any(draws >= each.draws for each in exits)
            if not leaves or all(each.computed for each in exits):
                self._compute(call, phase, micro_batch)
                if self._doing("step", self.worker.step):
                    self._evaluate_inside(call)
            if leaves:
                self._doing("abandon", lambda: self.worker.abandon(phase))
                return
        self.worker.left()

    def _evaluate_inside(self, call: SteadyCall) -> None:
        every = self.scene.evaluates_every
        if call.kind is Kind.TRAIN and every and self.group.round % every == 0:
            self._call(SteadyCall(Kind.EVALUATE, 7))

    def _compute(self, call: SteadyCall, phase: int, micro_batch: MicroBatch) -> None:
        world, samples = self.process.world, samples_of(micro_batch)
        start_s = world.now_s
        self.process.compute(samples / self.scene.speed(self.place, start_s))
        self.computed.append(ComputedBatch(phase, start_s, world.now_s, samples))
        positions = [position for start, stop in micro_batch for position in range(start, stop)]
        loss_sum = float("inf") if self.scene.spoiled.intersection(positions) else 0.1 * samples
        if call.kind is Kind.EVALUATE:
            self.worker.contributed(float(samples), loss_sum)
            return

        def compute(ready: BucketReady | None) -> None:
            self.training.counted += samples
            self.training.gradients.add(call.epoch, positions, ready or (lambda part: None))

        self.worker.contribute(float(samples), loss_sum, compute, whole=True)


@dataclass(frozen=True, slots=True)
class SteadyHistory:
    """What has happened in a scene."""

    scene: SteadyScene
    records: list[journal.Record]
    members: list[SteadyMember]

    def computed(self, phase: int) -> list[list[ComputedBatch]]:
        """Each member's micro-batches of one phase."""
        return [[batch for batch in member.computed if batch.phase == phase] for member in self.members]


def played(scene: SteadyScene) -> SteadyHistory:
    """Run the scene to its end."""
    world = World(0)
    many = len(scene.speeds) > 1
    meeting = _SteadyMeeting(world, 1, len(scene.speeds), scene.sum_s) if many else None
    members = [SteadyMember(scene, world, place, meeting) for place in range(len(scene.speeds))]

    def over(status: int) -> None:
        if not any(member.process.alive for member in members):
            world.stop()

    for member in members:
        member.process.ended.append(over)
        member.process.start()
    world.at(_LIMIT_S, lambda: world.fail(AssertionError("the group has not come to its end")))
    with remembered():
        world.run()
    first, *others = members
    assert all(member.training.plain_values() == first.training.plain_values() for member in others)
    return SteadyHistory(scene, _journal_of(members), members)


def _journal_of(members: Sequence[SteadyMember]) -> list[journal.Record]:
    """The journal of the run: every worker keeps the same lines."""
    first, *others = (member.lines.kept for member in members)
    assert sorted(first) == list(range(len(first)))
    assert all(kept == first for kept in others), "workers keep different lines"
    records: list[journal.Record] = [journal.RunRecord("test", "0", 0.0)]
    records += [journal.decode(first[number]) for number in range(len(first))]
    return [*records, journal.EndRecord("done", True)]
