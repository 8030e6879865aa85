"""A group of virtual workers on a virtual clock.

Question  What does the real decision code do with workers of given speeds, and what gets journaled?
Holds     Deterministic. Each worker is a coroutine that follows runtime/worker.py line by line: it draws what
          ``rounds.allowance`` and its grants permit, hands in, and settles; a summation is over ``sum_s`` after the
          last worker has handed in. Every worker keeps its own ``Group``. The leader's journal is written by the
          real ``Reporter``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pliant.core import journal, rounds
from pliant.core.journal import Record
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.rounds import Group, Mismatch, Policy, Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.runtime.witness import Reporter
from pliant.types import WorkerId


@dataclass(frozen=True)
class Break:
    """``member`` leaves its loop after so many draws, the last one computed or not."""

    member: int
    draws: int
    computed: bool = True


@dataclass(frozen=True)
class Call:
    """One call of ``batches`` or ``evaluate`` in every worker's script."""

    kind: Kind
    length: int
    epoch: int = 0
    breaks: tuple[Break, ...] = ()


@dataclass(frozen=True)
class Scene:
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
    """call ``evaluate`` inside ``batches`` whenever ``step`` has been True so many times"""
    spoiled: frozenset[int] = frozenset()
    """positions whose loss is infinite"""

    def speed(self, member: int, now_s: float) -> float:
        speed = self.speeds[member]
        for since_s, who, new in self.changes:
            if who == member and now_s >= since_s:
                speed = new
        return speed


@dataclass
class Exchange:
    """One collective."""

    tickets: list[Ticket | None]
    done_s: float | None = None
    decision: tuple[Group, Settled] | Mismatch | None = None

    def over(self, now_s: float) -> bool:
        return self.done_s is not None and now_s >= self.done_s


@dataclass
class Contribution:
    start_s: float
    idle_s: float = 0.0
    micro_batches: int = 0
    samples: int = 0
    pending: int = 0
    weight: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Work:
    """A finished micro-batch."""

    phase: int
    start_s: float
    stop_s: float
    samples: int


@dataclass(frozen=True)
class Wait:
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


Steps = Generator["float | Exchange", None, Any]


class Link:
    """The leader's line to the coordinator."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def check(self) -> None: ...

    def beat(self, round: int, progress: int) -> None: ...

    def journal(self, payload: bytes) -> None:
        self._records.append(journal.decode(payload))


class VirtualWorker:
    """runtime.worker.Worker without tensors; every ``yield`` lets virtual time pass."""

    def __init__(self, scene: Scene, member: int, group: Group, exchanges: list[Exchange], records: list[Record]):
        self.scene, self.member, self.group, self.exchanges = scene, member, group, exchanges
        self.now_s = 0.0
        self.replicates = True
        """decides for itself; otherwise it takes over what the first one decided, which is faster"""
        self.witness = Reporter(Link(records), leader=member == 0)  # type: ignore[arg-type]
        self.work: list[Work] = []
        self.waits: list[Wait] = []
        self.states: list[Group] = []
        self.outcomes: list[tuple[Settled, tuple[bool, ...], str]] = []
        """each settled exchange, who had taken part, and where this worker was: in step, draw or abandon"""
        self._flight: tuple[Exchange, int] | None = None
        self._contribution = Contribution(0.0)
        self._suspended: list[tuple[Contribution, float]] = []
        self._sum_s = 0.0
        self._next_exchange = 0
        self._seen = 0

    # the user's script

    def run(self) -> Steps:
        for call in self.scene.script:
            yield from self._call(call)
        ticket = self._ticket(Kind.END, Flag.OPENING)
        gathered = yield from self._gather(ticket)
        assert rounds.compared(self.group, gathered) is None

    def _call(self, call: Call) -> Steps:
        number = yield from self._open(call)
        leaving = [b for b in call.breaks if b.member == self.member]
        draws = 0
        while (micro_batch := (yield from self._draw(number))) is not None:
            draws += 1
            out = any(draws >= b.draws for b in leaving)
            if not (out and not all(b.computed for b in leaving)):
                yield from self._compute(micro_batch)
                if (yield from self._step()) and call.kind is Kind.TRAIN:
                    self._seen += 1
                    if self.scene.evaluates_every and self._seen % self.scene.evaluates_every == 0:
                        yield from self._call(Call(Kind.EVALUATE, 7))
            if out:
                yield from self._abandon(number)
                return

    def _compute(self, micro_batch: MicroBatch) -> Steps:
        start_s, samples = self.now_s, samples_of(micro_batch)
        yield self.now_s + samples / self.scene.speed(self.member, self.now_s)
        self.work.append(Work(self.group.phase.number, start_s, self.now_s, samples))
        mine = self._contribution
        mine.weight += samples
        mine.pending = 0
        spoiled = any(start <= bad < stop for start, stop in micro_batch for bad in self.scene.spoiled)
        mine.loss += float("inf") if spoiled else 0.1 * samples

    # runtime.worker.Worker

    def _open(self, call: Call) -> Steps:
        opening = replace(
            self._ticket(call.kind, Flag.OPENING),
            epoch=call.epoch,
            length=call.length,
            size=self.scene.sizes[self.member],
            ahead=self.scene.ahead[self.member] if self.scene.ahead else 0,
        )
        gathered = yield from self._gather(opening)
        group = rounds.opened(self.group, gathered)
        assert not isinstance(group, Mismatch), group.reason
        self.witness.opened(group, gathered)
        if len(group.open) > len(self.group.open):
            self._suspended.append((self._contribution, self.now_s))
            self._contribution = Contribution(self.now_s)
        self.group = group
        return group.phases

    def _draw(self, phase: int) -> Steps:
        while self._inside(phase):
            if self._flight is None and self._complete():
                self._hand_in(Flag.NONE)
            micro_batch = self._next()
            if micro_batch is not None:
                samples = samples_of(micro_batch)
                self._contribution.micro_batches += 1
                self._contribution.samples += samples
                self._contribution.pending = samples
                return micro_batch
            yield from self._settle("draw")
        return None

    def _abandon(self, phase: int) -> Steps:
        mine = self._contribution
        if mine.pending:
            mine.micro_batches -= 1
            mine.samples -= mine.pending
            mine.pending = 0
        if self._inside(phase) and self._flight is not None:
            yield from self._settle("abandon")
        if self._inside(phase):
            self._hand_in(Flag.BREAK)
            yield from self._settle("abandon")

    def _step(self) -> Steps:
        if not self._complete():
            return False
        if self._flight is None:
            if self.group.overlap:
                return False
            self._hand_in(Flag.NONE)
        assert self._flight is not None
        if self._next() is not None and not self._flight[0].over(self.now_s):
            return False
        outcome = yield from self._settle("step")
        return outcome.seen

    def _inside(self, phase: int) -> bool:
        return bool(self.group.open) and self.group.phase.number == phase

    def _next(self) -> MicroBatch | None:
        if self._flight is not None and not self.group.overlap:
            return None
        hand = self.group.phase.ledger.hands[self.member]
        mine = self._contribution
        drawn = mine.micro_batches + (self._flight[1] if self._flight else 0)
        if drawn >= hand.granted:
            return None
        bounds = rounds.allowance(self.group, self.member, 1 if self._flight else 0)
        if bounds.micro_batches is not None and mine.micro_batches >= bounds.micro_batches:
            return None
        micro_batch = hand.queue[drawn]
        wanted = mine.samples + samples_of(micro_batch)
        if bounds.samples is not None and mine.micro_batches and wanted > bounds.samples:
            return None
        return micro_batch

    def _complete(self) -> bool:
        bounds = rounds.allowance(self.group, self.member, 1 if self._flight else 0)
        if bounds.micro_batches is not None:
            return self._contribution.micro_batches >= bounds.micro_batches
        return self._contribution.micro_batches > 0 or self._next() is None

    def _ticket(self, kind: Kind, flags: Flag) -> Ticket:
        group = self.group
        return Ticket(group.era, group.round, group.phases, kind, flags, digest=rounds.digest(group))

    def _exchange(self, ticket: Ticket) -> Exchange:
        if self._next_exchange == len(self.exchanges):
            self.exchanges.append(Exchange([None] * len(self.group.roster)))
        exchange = self.exchanges[self._next_exchange]
        self._next_exchange += 1
        assert exchange.tickets[self.member] is None
        exchange.tickets[self.member] = ticket
        if all(other is not None for other in exchange.tickets):
            exchange.done_s = self.now_s + self.scene.sum_s
        return exchange

    def _gather(self, ticket: Ticket) -> Steps:
        exchange = self._exchange(ticket)
        yield exchange
        return exchange.tickets

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
        )
        self._flight = (self._exchange(ticket), mine.micro_batches)
        self._handed_in_s = self.now_s
        self._contribution = Contribution(self.now_s)

    def _settle(self, where: str) -> Steps:
        assert self._flight is not None
        exchange, _ = self._flight
        since_s, phase = self.now_s, self.group.phase
        yield exchange
        self._contribution.idle_s += self.now_s - since_s
        if self.now_s > since_s:
            last = phase.ledger.free == 0
            self.waits.append(Wait(phase.number, since_s, self.now_s, last))
        assert exchange.done_s is not None
        self._sum_s = exchange.done_s - self._handed_in_s
        gathered: Sequence[Any] = exchange.tickets
        decision = exchange.decision
        if decision is None or self.replicates:
            decision = exchange.decision = rounds.settled(self.group, gathered)
        assert not isinstance(decision, Mismatch), decision.reason
        self.group, outcome = decision
        self._flight = None
        self.witness.settled(self.group, outcome, list(gathered), 0.1 * outcome.factor)
        took_part = tuple(a or t.samples > 0 for a, t in zip(phase.took_part, gathered, strict=True))
        self.outcomes.append((outcome, took_part, where))
        self.states.append(self.group)
        if outcome.ended:
            self._contribution, since_s = self._suspended.pop()
            self._contribution.start_s += self.now_s - since_s
        return outcome


def played(scene: Scene, *, replicates: bool = False) -> Play:
    """Run the scene to its end; ``replicates``: every worker decides for itself."""
    roster = tuple(WorkerId(f"w{member}") for member in range(len(scene.speeds)))
    records: list[Record] = [journal.RunRecord("test", "0", 0.0), journal.EraRecord(1, list(roster))]
    group = replace(rounds.founded(scene.policy, 1, roster), samples_limit=scene.samples_limit)
    exchanges: list[Exchange] = []
    workers = [VirtualWorker(scene, member, group, exchanges, records) for member in range(len(roster))]
    for worker in workers:
        worker.replicates = replicates
    running: dict[int, Steps] = {worker.member: worker.run() for worker in workers}
    waiting: dict[int, Exchange] = {}
    ready = dict.fromkeys(running, 0.0)
    while running:
        for member, exchange in list(waiting.items()):
            if exchange.done_s is not None:
                ready[member] = max(workers[member].now_s, exchange.done_s)
                del waiting[member]
        assert ready, "deadlock: every worker waits for another one"
        member = min(ready, key=lambda m: (ready[m], m))
        workers[member].now_s = ready.pop(member)
        try:
            what = next(running[member])
        except StopIteration:
            del running[member]
            continue
        if isinstance(what, Exchange):
            waiting[member] = what
        else:
            ready[member] = what
    records.append(journal.EndRecord("done", True))
    return Play(scene, records, workers)
