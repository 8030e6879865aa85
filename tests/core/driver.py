"""A group of virtual workers on a virtual clock.

Question  What does the real decision code do with workers of given speeds, and what gets journaled?
Holds     Deterministic. Each worker is a coroutine that follows worker/loop.py line by line: it draws what
          ``drawing.allowance`` and its grants permit, hands in, settles, or goes along; a summation is over ``sum_s``
          after the last worker has handed in. Every worker keeps its own ``GroupState`` and makes its own journal with
          the real ``JournalReporter``. ``World`` plays the coordinator: workers are killed, join and leave, era follows
          era.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from pliant.core import allowance, consistency, regrouping, rounds
from pliant.core.consistency import Mismatch
from pliant.core.finished_calls import NONE, FinishedCalls
from pliant.core.group_state import FinishedPhase, GroupState, Policy, Standing, founded
from pliant.core.journal import records as journal
from pliant.core.journal.records import Record
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.regrouping import Entry
from pliant.core.rounds import Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import WorkerId
from pliant.worker.journal import JournalReporter

# More steps than any scene of the tests needs: beyond it the group goes round in circles.
_MOST_STEPS = 400_000


class Break(msgspec.Struct, frozen=True):
    """``member`` leaves its loop after so many draws, the last one computed or not."""

    member: int
    draws: int
    computed: bool = True


class Call(msgspec.Struct, frozen=True):
    """One call of ``batches`` or ``evaluate`` in every worker's script."""

    kind: Kind
    length: int
    epoch: int = 0
    breaks: tuple[Break, ...] = ()


class Change(msgspec.Struct, frozen=True):
    """Something happens to a member. Who joins is not there before."""

    at_s: float
    what: Literal["kill", "join", "leave"]
    member: int
    spread_s: float = 0.0
    """kill: not used; otherwise the k-th member is prepared for the planned era k times this later"""
    lucky: int = 0
    """kill, as bits of members: who waits for a sum that all have handed in to still gets it"""


class Scene(msgspec.Struct, frozen=True):
    """Who works at which speed (samples/s) on what."""

    policy: Policy
    speeds: tuple[float, ...]
    sizes: tuple[int, ...]
    script: tuple[Call, ...]
    ahead: tuple[int, ...] = ()
    sum_s: float = 0.01
    changes: tuple[tuple[float, int, float], ...] = ()
    """(from when, member, new speed)"""
    samples_limit: int | None = None
    evaluates_every: int = 0
    """call ``evaluate`` inside ``batches`` whenever ``step`` is True at a multiple of so many rounds"""
    spoiled: frozenset[int] = frozenset()
    """positions whose loss is infinite"""
    happens: tuple[Change, ...] = ()
    takes: int = 2
    """exchanges until a follower holds the whole state"""

    def speed(self, member: int, now_s: float) -> float:
        speed = self.speeds[member]
        for since_s, who, new in self.changes:
            if who == member and now_s >= since_s:
                speed = new
        return speed


class EraBroken(Exception):
    """worker.elastic.rendezvous.EraBroken."""


class Left(Exception):
    """errors.Left."""


@dataclass
class Event:
    """Something to wait for."""

    at_s: float | None = None

    def over(self, now_s: float) -> bool:
        return self.at_s is not None and now_s >= self.at_s


@dataclass
class Exchange:
    """One collective."""

    tickets: list[Ticket | None]
    gathered: Event = field(default_factory=Event)
    done: Event = field(default_factory=Event)
    summed: set[int] = field(default_factory=set[int])
    decision: tuple[GroupState, Settled] | Mismatch | None = None
    opened: GroupState | Mismatch | None = None

    def add(self, place: int, now_s: float, sum_s: float) -> None:
        """``place``'s part of the sums."""
        self.summed.add(place)
        if len(self.summed) == len(self.tickets):
            self.done.at_s = now_s + sum_s


class Channel:
    """The group of one era."""

    def __init__(self, members: int, sum_s: float) -> None:
        self._sum_s = sum_s
        self._exchanges: list[Exchange] = []
        self._posted = [0] * members

    def post(self, place: int, ticket: Ticket, now_s: float, *, sums: bool) -> Exchange:
        if self._posted[place] == len(self._exchanges):
            self._exchanges.append(Exchange([None] * len(self._posted)))
        exchange = self._exchanges[self._posted[place]]
        self._posted[place] += 1
        assert exchange.tickets[place] is None
        exchange.tickets[place] = ticket
        if None not in exchange.tickets:
            exchange.gathered.at_s = now_s + self._sum_s
        if sums:
            exchange.add(place, now_s, self._sum_s)
        return exchange


@dataclass
class Contribution:
    start_s: float
    idle_s: float = 0.0
    micro_batches: int = 0
    samples: int = 0
    pending: int = 0
    weight: float = 0.0
    loss: float = 0.0


@dataclass
class Flight:
    exchange: Exchange
    drawn: int
    handed_in_s: float
    leaving: bool = False
    closed: bool = False


class Work(msgspec.Struct, frozen=True):
    """A finished micro-batch."""

    phase: int
    start_s: float
    stop_s: float
    samples: int


class Wait(msgspec.Struct, frozen=True):
    """Time in which a worker had nothing to compute."""

    phase: int
    start_s: float
    stop_s: float
    last: bool
    """nothing of the phase was left to deal"""


@dataclass
class Play:
    """What happened."""

    scene: Scene
    records: list[Record]
    workers: list[VirtualWorker]

    def work(self, phase: int) -> list[list[Work]]:
        return [[work for work in worker.work if work.phase == phase] for worker in self.workers]


class Pause:
    """What a worker yields when the coordinator has the next word."""


STOPPED, ENLISTED = Pause(), Pause()

Steps = Generator["float | Event | Pause", None, Any]


class Link:
    """A worker's line to the coordinator."""

    def __init__(self) -> None:
        self.sends_lines = False
        self.lines: dict[int, bytes] = {}

    def keep(self, lines: Iterable[bytes], first: int) -> None:
        for number, line in enumerate(lines, start=first):
            assert number not in self.lines
            self.lines[number] = line

    def send_lines_again(self) -> None: ...


class VirtualWorker:
    """worker.loop.Worker without tensors; every ``yield`` lets virtual time pass."""

    def __init__(self, world: World, member: int, group: GroupState) -> None:
        self.scene, self.member, self.group, self._world = world.scene, member, group, world
        self.me = WorkerId(f"w{member}")
        self.now_s = 0.0
        self.replicates = True
        """decides for itself; otherwise it takes over what the first one decided, which is faster"""
        self.link = Link()
        self.witness = JournalReporter(self.link)
        self.work: list[Work] = []
        self.waits: list[Wait] = []
        self.states: list[GroupState] = []
        """after each exchange or era"""
        self.outcomes: list[tuple[Settled, tuple[bool, ...], str]] = []
        """each settled exchange, who had taken part, and where this worker was: in step, draw, abandon or follow"""
        self.alive, self.enlisted, self.entered, self.stopped = True, False, False, False
        self.asked_to_leave = self.leaving = False
        self.channel: Channel | None = None
        self._complete_from = 0
        """the exchange from which a follower holds the whole state"""
        self._known_past = NONE
        self._flight: Flight | None = None
        self._contribution = Contribution(0.0)
        self._suspended: list[tuple[Contribution, Flight | None, float]] = []
        self._stack: list[Call] = []
        self._calls = self._nested = 0
        self._sum_s = 0.0
        self._measured = (0, 0.0)

    def found(self, channel: Channel) -> None:
        self.channel = channel
        self.enlisted = self.entered = True
        self.witness.joined(0)
        self.witness.era(self.group, None, sends=self.member == 0)

    def arrive(self, now_s: float, past: FinishedCalls) -> None:
        self.now_s = now_s
        self._known_past = past

    @property
    def place(self) -> int:
        return self.group.roster.index(self.me)

    @property
    def standing(self) -> Standing:
        return self.group.standings[self.place]

    # the user's script

    def run(self) -> Steps:
        try:
            for call in self.scene.script:
                yield from self._call(call)
            yield from self._through(self._ended)
            self.witness.confirmed()
        except Left:
            self.alive = False

    def _call(self, call: Call) -> Steps:
        number = yield from self._open(call)
        if isinstance(number, FinishedPhase):
            return
        leaving = [b for b in call.breaks if b.member == self.member]
        draws = 0
        while (micro_batch := (yield from self._draw(number))) is not None:
            draws += 1
            out = any(draws >= b.draws for b in leaving)
            if not (out and not all(b.computed for b in leaving)):
                yield from self._compute(micro_batch)
                if (yield from self._step()) and call.kind is Kind.TRAIN:
                    every = self.scene.evaluates_every
                    if every and self.group.round % every == 0:
                        yield from self._call(Call(Kind.EVALUATE, 7))
            if out:
                yield from self._abandon(number)
                return
        self._left()

    def _compute(self, micro_batch: MicroBatch) -> Steps:
        start_s, samples = self.now_s, samples_of(micro_batch)
        yield self.now_s + samples / self.scene.speed(self.member, self.now_s)
        self.work.append(Work(self.group.phase.number, start_s, self.now_s, samples))
        mine = self._contribution
        mine.weight += samples
        mine.pending = 0
        spoiled = any(start <= bad < stop for start, stop in micro_batch for bad in self.scene.spoiled)
        mine.loss += float("inf") if spoiled else 0.1 * samples

    # worker.loop.Worker: what the script calls

    def _open(self, call: Call) -> Steps:
        self._stack.append(call)
        answer = yield from self._through(lambda: self._opened(call))
        if isinstance(answer, FinishedPhase):
            self._left()
        return answer

    def _draw(self, phase: int) -> Steps:
        return (yield from self._through(lambda: self._drawn_next(phase)))

    def _step(self) -> Steps:
        return (yield from self._through(self._stepped, or_else=False))

    def _abandon(self, phase: int) -> Steps:
        mine = self._contribution
        if mine.pending:
            mine.micro_batches -= 1
            mine.samples -= mine.pending
            mine.pending = 0
        yield from self._through(lambda: self._abandoned(phase))
        self._left()

    def _left(self) -> None:
        self._stack.pop()
        if self._stack:
            self._nested += 1
        else:
            self._calls, self._nested = self._calls + 1, 0

    def _through(self, action: Callable[[], Steps], or_else: Any = None) -> Steps:
        while True:
            try:
                return (yield from action())
            except EraBroken:
                self.stopped = True
                yield STOPPED
            if or_else is not None:
                return or_else

    # phases

    def _opened(self, call: Call) -> Steps:
        if not self.enlisted:
            if self._calls < len(self._known_past):
                return self._known_past[self._calls]
            self.enlisted = True
            yield ENLISTED
        while True:
            past = self._past_call()
            if past is not None:
                return past
            phase = self._joined_phase()
            if phase is not None:
                return phase
            self._look()
            opening = replace(
                self._ticket(call.kind, Flag.OPENING | self._readiness()),
                epoch=call.epoch,
                length=call.length,
                size=self.scene.sizes[self.member],
                ahead=self.scene.ahead[self.member] if self.scene.ahead else 0,
            )
            exchange = self._post(opening, sums=False)
            yield from self._await(exchange.gathered)
            self._take_opening(exchange)

    def _past_call(self) -> FinishedPhase | None:
        group, nested = self.group, len(self._stack) > 1
        if self._calls < len(group.past):
            past = group.past[self._calls]
            return FinishedPhase(Kind.EVALUATE, past.epoch) if nested else past
        if nested and group.open and self._nested < len(group.open[0].nested):
            return group.open[0].nested[self._nested]
        return None

    def _joined_phase(self) -> int | None:
        depth = len(self._stack)
        if len(self.group.open) < depth or self._calls != len(self.group.past):
            return None
        return self.group.open[depth - 1].number

    def _in_position(self) -> bool:
        return len(self._stack) == len(self.group.open) and self._joined_phase() is not None

    def _take_opening(self, exchange: Exchange) -> None:
        gathered, before = _all(exchange), self.group
        if exchange.opened is None or self.replicates:
            exchange.opened = rounds.opened(before, gathered)
        group = exchange.opened
        assert not isinstance(group, Mismatch), group.reason
        self.witness.opened(group, gathered)
        if len(group.open) > len(before.open):
            self._suspended.append((self._contribution, self._flight, self.now_s))
            self._contribution, self._flight = Contribution(self.now_s), None
        self.group = group
        self.states.append(group)
        plan = consistency.agreed_plan(group, gathered)
        if plan is not None:
            self._switch(plan)

    def _drawn_next(self, phase: int) -> Steps:
        while self._inside(phase):
            self._look()
            if not self._speaks(phase):
                yield from self._follow()
                continue
            if self._flight is None and self._complete():
                self._hand_in(Flag.NONE)
            micro_batch = self._next()
            if micro_batch is not None:
                if len(self._stack) == 1:
                    # What was called inside this loop before it got here is past.
                    self._nested = len(self.group.phase.nested)
                samples = samples_of(micro_batch)
                self._contribution.micro_batches += 1
                self._contribution.samples += samples
                self._contribution.pending = samples
                return micro_batch
            if self._flight is None:
                self._hand_in(Flag.NONE)
            yield from self._settle("draw")
        return None

    def _inside(self, phase: int) -> bool:
        return any(each.number == phase for each in self.group.open)

    def _speaks(self, phase: int) -> bool:
        return self.group.phase.number == phase and allowance.speaks(self.group, self.place)

    def _abandoned(self, phase: int) -> Steps:
        while self._inside(phase) and not self._speaks(phase):
            self._look()
            yield from self._follow()
        if self._inside(phase) and self._flight is not None:
            yield from self._settle("abandon", Flag.BREAK)
        if self._inside(phase) and self._flight is None:
            self._hand_in(Flag.BREAK)
        if self._inside(phase):
            yield from self._settle("abandon")

    def _stepped(self) -> Steps:
        self._look()
        if not self.group.open or not self._speaks(self.group.phase.number) or not self._complete():
            return False
        if self._flight is None:
            if self.group.overlap:
                return False
            self._hand_in(Flag.NONE)
        assert self._flight is not None
        if self._next() is not None and not self._flight.exchange.done.over(self.now_s):
            return False
        outcome = yield from self._settle("step")
        return outcome.seen

    def _ended(self) -> Steps:
        if not self.enlisted:
            return
        while not self.group.over:
            self._look()
            if self.group.open:
                yield from self._follow()
                continue
            exchange = self._post(self._ticket(Kind.END, Flag.OPENING), sums=False)
            yield from self._await(exchange.gathered)
            self._conclude(_all(exchange))

    def _conclude(self, gathered: list[Ticket]) -> None:
        mismatch = consistency.compared(self.group, gathered)
        assert mismatch is None, mismatch.reason
        self.group = rounds.concluded(self.group, gathered)
        self.states.append(self.group)

    # what may be drawn

    def _next(self) -> MicroBatch | None:
        if self._stops() or (self._flight is not None and not self.group.overlap):
            return None
        hand = self.group.phase.ledger.hands[self.place]
        mine = self._contribution
        drawn = mine.micro_batches + (self._flight.drawn if self._flight else 0)
        if drawn >= hand.granted:
            return None
        bounds = allowance.allowance(self.group, self.place, 1 if self._flight else 0)
        if bounds.micro_batches is not None and mine.micro_batches >= bounds.micro_batches:
            return None
        micro_batch = hand.queue[drawn]
        wanted = mine.samples + samples_of(micro_batch)
        if bounds.samples is not None and mine.micro_batches and wanted > bounds.samples:
            return None
        return micro_batch

    def _stops(self) -> bool:
        """Whether it draws no more: not before a ticket has said so, unless a step is certain to come first."""
        return self.leaving and (self._flight is None or self._flight.leaving or self._contribution.micro_batches > 0)

    def _complete(self) -> bool:
        if self._stops():
            return True
        bounds = allowance.allowance(self.group, self.place, 1 if self._flight else 0)
        if bounds.micro_batches is not None:
            return self._contribution.micro_batches >= bounds.micro_batches
        return self._contribution.micro_batches > 0 or self._next() is None

    # exchanging

    def _ticket(self, kind: Kind, flags: Flag) -> Ticket:
        group = self.group
        if self.leaving:
            flags |= Flag.LEAVING
        plan_term, plan_era = self._world.prepared(self)
        return Ticket(
            group.era,
            group.round,
            group.phases,
            kind,
            flags,
            digest=consistency.digest(group),
            exchange=group.exchange,
            plan_term=plan_term,
            plan_era=plan_era,
            momentum=group.policy.momentum,
            measured_round=self._measured[0],
            measured_norm=self._measured[1],
        )

    def _readiness(self) -> Flag:
        if self.leaving or not self._in_position():
            return Flag.NONE
        if self.standing is Standing.FOLLOWING:
            return Flag.READY if self.group.exchange >= self._complete_from else Flag.NONE
        late = self.group.open and not self.group.phase.present[self.place]
        return Flag.READY if late else Flag.NONE

    def _post(self, ticket: Ticket, *, sums: bool) -> Exchange:
        assert self.channel is not None
        return self.channel.post(self.place, ticket, self.now_s, sums=sums)

    def _await(self, event: Event) -> Steps:
        if not event.over(self.now_s):
            self._look()
            yield event

    def _look(self) -> None:
        if self._world.broken_era >= self.group.era:
            raise EraBroken
        if self.asked_to_leave and len(self._stack) < 2:
            # Inside a nested call it may be the only one who is.
            self.leaving = True

    def _hand_in(self, flags: Flag) -> None:
        mine, phase = self._contribution, self.group.phase
        if phase.kind is Kind.TRAIN and mine.loss == float("inf"):
            flags |= Flag.NONFINITE
        ticket = replace(
            self._ticket(phase.kind, flags),
            micro_batches=mine.micro_batches,
            samples=mine.samples,
            weight=mine.weight,
            busy_s=max(0.0, self.now_s - mine.start_s - mine.idle_s),
            idle_s=mine.idle_s,
            sum_s=self._sum_s,
            loss_sum=mine.loss,
            # A signal of 1 and a noise scale of 50 samples, were it not for chance.
            squared_norm=1.0 + 50.0 / mine.samples * (0.8 + 0.1 * (self.group.round % 5)) if mine.samples else 0.0,
        )
        self._flight = Flight(self._post(ticket, sums=True), mine.micro_batches, self.now_s, self.leaving)
        self._contribution = Contribution(self.now_s)

    def _settle(self, where: str, following: Flag = Flag.NONE) -> Steps:
        flight = self._flight
        assert flight is not None
        exchange = flight.exchange
        since_s, before = self.now_s, self.group
        yield from self._await(exchange.done)
        self._contribution.idle_s += self.now_s - since_s
        if self.now_s > since_s:
            last = before.phase.ledger.free == 0
            self.waits.append(Wait(before.phase.number, since_s, self.now_s, last))
        self._sum_s = (exchange.done.at_s or 0.0) - flight.handed_in_s
        gathered = _all(exchange)
        decision = exchange.decision
        if decision is None or self.replicates:
            decision = exchange.decision = rounds.settled(before, gathered)
        assert not isinstance(decision, Mismatch), decision.reason
        self.group, outcome = decision
        self._flight = None
        at_once = before.overlap and not outcome.ended and outcome.plan is None and not flight.closed
        if at_once and self._hands_in_at_once():
            self._hand_in(following)
        if outcome.measures:
            self._measured = outcome.round, 1.0 + 50.0 / outcome.batch * (0.7 + 0.15 * (outcome.round % 5))
        self.witness.settled(self.group, outcome, gathered, 0.1 * outcome.factor)
        took_part = tuple(a or t.samples > 0 for a, t in zip(before.phase.took_part, gathered, strict=True))
        self.outcomes.append((outcome, took_part, where))
        self.states.append(self.group)
        if outcome.ended:
            self._contribution, self._flight, since_s = self._suspended.pop()
            self._contribution.start_s += self.now_s - since_s
        if outcome.plan is not None:
            self._switch(outcome.plan, closed=flight.closed)
            if self.group.overlap and self.group.open and self._hands_in_at_once():
                self._hand_in(following)
        return outcome

    def _hands_in_at_once(self) -> bool:
        if not allowance.speaks(self.group, self.place):
            return False
        bounds = allowance.allowance(self.group, self.place, 0)
        return self.leaving or bounds.micro_batches is None or self._contribution.micro_batches >= bounds.micro_batches

    # going along

    def _follow(self) -> Steps:
        held = self._flight
        kind = self.group.phase.kind if self.group.open else Kind.TRAIN
        ticket = replace(
            self._ticket(kind, Flag.FOLLOWING | self._readiness()),
            size=self.scene.sizes[self.member],
            ahead=self.scene.ahead[self.member] if self.scene.ahead else 0,
        )
        exchange = self._post(ticket, sums=False)
        yield from self._await(exchange.gathered)
        gathered = _all(exchange)
        says = next((ticket for ticket in gathered if not ticket.flags & Flag.FOLLOWING), None)
        if held is not None and (says is None or says.exchange > self.group.exchange):
            era = self.group.era
            held.closed = True
            yield from self._settle("follow")
            if self.group.era != era:
                return
        if says is None or not says.flags & Flag.OPENING:
            yield from self._follow_round(exchange)
        elif says.kind is Kind.END:
            self._conclude(gathered)
        else:
            self._take_opening(exchange)

    def _follow_round(self, exchange: Exchange) -> Steps:
        if not self.group.open:
            return
        phase = self.group.phase
        self._flight = Flight(exchange, 0, self.now_s)
        exchange.add(self.place, self.now_s, self.scene.sum_s)
        yield from self._await(exchange.done)
        if not (phase.kind is Kind.TRAIN and phase.seen and self.group.overlap):
            yield from self._settle("follow")

    # eras

    def _switch(self, plan: tuple[int, int], *, closed: bool = False) -> None:
        if not closed:
            self._post(self._ticket(Kind.TRAIN, Flag.NONE), sums=False)
        roster = self._world.plans[plan[1]].roster
        if self.me not in roster:
            raise Left
        self.group = regrouping.switched(self.group, plan[1], roster)
        self._world.switch(self.group, self.witness.records)
        self._enter(None)

    def _enter(self, entries: Sequence[Entry] | None) -> None:
        self.entered, self.stopped = True, False
        self.channel = self._world.channel(self.group)
        self.states.append(self.group)
        self.witness.era(self.group, entries, sends=self.place == 0)

    def regroup(self, group: GroupState, records: int, entries: Sequence[Entry] | None) -> None:
        """Enter an era whose state and entries are known, from outside."""
        holds = entries is not None and entries[group.roster.index(self.me)].active
        if holds:
            self._flight = None
            self._suspended = [(contribution, None, since) for contribution, _, since in self._suspended]
        else:
            self._flight, self._contribution = None, Contribution(self.now_s)
            self._suspended = [(Contribution(self.now_s), None, self.now_s) for _ in group.open]
            self.witness.joined(records)
            self._complete_from = group.exchange + self.scene.takes
        self.group = group
        self._enter(entries)

    def entry(self, *, active: bool) -> Entry:
        if not active:
            return Entry(active=False)
        pairs = [(contribution, flight) for contribution, flight, _ in self._suspended[1:]]
        if self._suspended:
            pairs.append((self._contribution, self._flight))
        dropped = tuple(flight.drawn if flight else 0 for _, flight in pairs)
        return Entry(True, dropped, tuple(contribution.micro_batches for contribution, _ in pairs))


def _all(exchange: Exchange) -> list[Ticket]:
    return [ticket for ticket in exchange.tickets if ticket is not None]


@dataclass
class Plan:
    era: int
    roster: tuple[WorkerId, ...]
    prepared_s: dict[WorkerId, float]


class World:
    """The coordinator, the clock and the wires."""

    def __init__(self, scene: Scene, *, replicates: bool) -> None:
        self.scene = scene
        self.broken_era = 0
        self.plans: dict[int, Plan] = {}
        self._pending: Plan | None = None
        self._last_era = 1
        self._channels: dict[int, Channel] = {}
        self._waiting: dict[int, Event | Pause] = {}
        self._ready: dict[int, float] = {}
        self._summing: set[int] = set()
        """who is about to get what all have handed in"""
        self._happens = sorted(scene.happens, key=lambda change: change.at_s, reverse=True)
        self._spread_s = 0.0
        late = {change.member for change in scene.happens if change.what == "join"}
        founders = [member for member in range(len(scene.speeds)) if member not in late]
        roster = tuple(WorkerId(f"w{member}") for member in founders)
        first = replace(founded(scene.policy, 1, roster), samples_limit=scene.samples_limit)
        self.workers: list[VirtualWorker] = []
        self._running: dict[int, Steps] = {}
        for member in range(len(scene.speeds)):
            group = first if member in founders else founded(scene.policy, 0, (WorkerId(f"w{member}"),))
            worker = VirtualWorker(self, member, group)
            worker.replicates = replicates
            self.workers.append(worker)
            if member in founders:
                worker.found(self.channel(first))
                self._start(worker, 0.0)
            else:
                worker.alive = False

    # what workers ask

    def channel(self, group: GroupState) -> Channel:
        return self._channels.setdefault(group.era, Channel(len(group.roster), self.scene.sum_s))

    def prepared(self, worker: VirtualWorker) -> tuple[int, int]:
        plan = self._pending
        if plan is None or plan.era <= worker.group.era or plan.prepared_s[worker.me] > worker.now_s:
            return 0, 0
        return 1, plan.era

    def switch(self, group: GroupState, records: int) -> None:
        """A member has begun the planned era: newcomers are told the state."""
        for worker in self.workers:
            if worker.me in group.roster and not worker.entered:
                worker.regroup(group, records, None)
                self._resume(worker, self._now_s + self.scene.sum_s)

    # the clock

    def run(self) -> None:
        self._now_s = 0.0
        for _ in range(_MOST_STEPS):
            if not self._running:
                return
            self._one()
        raise AssertionError("the group goes round in circles")

    def _one(self) -> None:
        for member, event in list(self._waiting.items()):
            if isinstance(event, Event) and event.at_s is not None:
                self._resume(self.workers[member], event.at_s)
                self._summing.add(member)
        next_s = min(self._ready.values(), default=None)
        if self._happens and (next_s is None or self._happens[-1].at_s <= next_s):
            change = self._happens.pop()
            self._now_s = max(self._now_s, change.at_s)
            self._happen(change)
            return
        if next_s is None and self._over():
            # Newcomers that the run has ended without.
            self._running = {}
            return
        assert self._ready, "deadlock: every worker waits for another one"
        member = min(self._ready, key=lambda m: (self._ready[m], m))
        self._now_s = self.workers[member].now_s = self._ready.pop(member)
        self._advance(member)

    def _over(self) -> bool:
        return any(worker.group.over for worker in self.workers)

    def _advance(self, member: int, error: Exception | None = None) -> None:
        steps = self._running[member]
        self._summing.discard(member)
        try:
            what = steps.throw(error) if error is not None else next(steps)
        except StopIteration:
            del self._running[member]
            what = None
        if isinstance(what, Event | Pause):
            self._waiting[member] = what
        elif what is not None:
            self._ready[member] = what
        if self.scene.happens:
            self._coordinate()

    def _start(self, worker: VirtualWorker, now_s: float) -> None:
        worker.alive = True
        self._running[worker.member] = worker.run()
        self._ready[worker.member] = now_s

    def _resume(self, worker: VirtualWorker, at_s: float) -> None:
        self._waiting.pop(worker.member, None)
        self._ready[worker.member] = max(worker.now_s, at_s)

    # the coordinator

    def _members(self) -> list[VirtualWorker]:
        """Everybody in the group, in the order of the latest roster."""
        there = [worker for worker in self.workers if worker.alive and worker.entered]
        latest = max(there, key=lambda worker: worker.group.era)
        order = {name: index for index, name in enumerate(latest.group.roster)}
        return sorted(there, key=lambda worker: order.get(worker.me, len(order)))

    def _staying(self, without: VirtualWorker) -> bool:
        """Whether somebody else computes, goes on to, and is in all the calls that are open."""
        return any(
            worker.standing is Standing.ACTIVE
            and not worker.asked_to_leave
            and all(phase.present[worker.place] for phase in worker.group.open[1:])
            for worker in self._members()
            if worker is not without
        )

    def _happen(self, change: Change) -> None:
        worker = self.workers[change.member]
        if self._over():
            return
        self._spread_s = change.spread_s
        if change.what == "join":
            shortest = min((w.group.past for w in self._members()), key=len)
            worker.arrive(change.at_s, shortest)
            self._start(worker, change.at_s)
        elif not worker.alive or not worker.entered or not self._staying(worker):
            return
        elif change.what == "leave":
            worker.asked_to_leave = True
        else:
            self._kill(worker, change)
        self._coordinate()

    def _kill(self, worker: VirtualWorker, change: Change) -> None:
        worker.alive = False
        self._running.pop(worker.member)
        self._waiting.pop(worker.member, None)
        self._ready.pop(worker.member, None)
        self.broken_era = self._last_era
        self._pending = None
        for other in self._members():
            lucky = change.lucky >> other.member & 1 and other.standing is not Standing.FOLLOWING
            unlucky = other.member in self._summing and not lucky
            if unlucky or isinstance(self._waiting.get(other.member), Event):
                self._waiting.pop(other.member, None)
                self._ready.pop(other.member, None)
                self._throw(other)

    def _throw(self, worker: VirtualWorker) -> None:
        worker.now_s = self._now_s
        self._advance(worker.member, EraBroken())

    def _coordinate(self) -> None:
        if self._over() or not any(worker.alive and worker.entered for worker in self.workers):
            return
        members = self._members()
        if any(worker.stopped or worker.group.era <= self.broken_era for worker in members):
            if all(worker.stopped for worker in members):
                self._regroup(members)
        elif self._pending is None or all(worker.group.era >= self._pending.era for worker in members):
            self._pending = None
            self._plan(members)

    def _newcomers(self) -> list[VirtualWorker]:
        return [
            worker
            for worker in self.workers
            if worker.alive and not worker.entered and self._waiting.get(worker.member) is ENLISTED
        ]

    def _plan(self, members: list[VirtualWorker]) -> None:
        if len({worker.group.era for worker in members}) > 1:
            return
        staying = [worker for worker in members if not worker.leaving]
        if not any(worker.standing is Standing.ACTIVE for worker in staying):
            return
        newcomers = self._newcomers()
        if len(staying) == len(members) and not newcomers:
            return
        self._last_era += 1
        roster = tuple(worker.me for worker in [*staying, *newcomers])
        prepared_s = {worker.me: self._now_s + self._spread_s * k for k, worker in enumerate(staying)}
        prepared_s |= {worker.me: self._now_s for worker in members if worker not in staying}
        self._pending = self.plans[self._last_era] = Plan(self._last_era, roster, prepared_s)

    def _regroup(self, members: list[VirtualWorker]) -> None:
        holders = [worker for worker in members if worker.standing is not Standing.FOLLOWING]
        donor = max(holders, key=lambda worker: worker.group.exchange)
        handed, records = donor.group, donor.witness.records
        assert all(worker.group.exchange >= handed.exchange - 1 for worker in holders)
        for worker in members:
            if worker.me not in handed.roster and worker.leaving:
                # It left with the era that has just begun, and did not get to know.
                worker.alive = False
                self._running.pop(worker.member)
                self._waiting.pop(worker.member)
        members = [*(worker for worker in members if worker.alive), *self._newcomers()]
        same = (handed.era, handed.exchange)
        entries = [
            worker.entry(active=worker in holders and (worker.group.era, worker.group.exchange) == same)
            for worker in members
        ]
        self._last_era += 1
        group = regrouping.regrouped(handed, self._last_era, [worker.me for worker in members], entries)
        for worker in members:
            worker.now_s = self._now_s
            worker.regroup(group, records, entries)
            self._resume(worker, self._now_s + self.scene.sum_s)


def played(scene: Scene, *, replicates: bool = False) -> Play:
    """Run the scene to its end; ``replicates``: every worker decides for itself."""
    world = World(scene, replicates=replicates)
    world.run()
    lines: dict[int, bytes] = {}
    for worker in world.workers:
        for number, line in worker.link.lines.items():
            # Whoever tells it, it is the same.
            assert lines.setdefault(number, line) == line
    assert sorted(lines) == list(range(len(lines)))
    records: list[Record] = [journal.RunRecord("test", "0", 0.0)]
    records += [journal.decode(lines[number]) for number in range(len(lines))]
    records.append(journal.EndRecord("done", True))
    return Play(scene, records, world.workers)
