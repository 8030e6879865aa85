"""The worker's loop: draw, contribute, hand in, settle.

Question  In which order does one worker do what the group has decided?
Holds     It waits for the group only when it has nothing it may compute. All micro-batches of a contribution are
          computed at one point of the weights. With an overlap, settling a round hands in the following contribution
          at once and applies after that, so that the sum has the longest possible time. After ``step`` has returned
          True the model holds the plain weights until the next draw.
Source    ABS-SGD (Zhou et al. 2023); docs/protocol.md has the states and events.

One exchange after another, for worker i with an overlap (delay 1):

    draw … draw   hand in C1   draw … draw   settle 1, hand in C2, apply 1   draw … draw   settle 2, hand in C3, …
                  └─────── C1 is summed ───────┘         └───────── C2 is summed ────────────┘
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from pliant.core import rounds, tickets
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.rounds import Group, Mismatch, Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.errors import NonFiniteLoss, Refused, RunEnded, UsageError
from pliant.runtime.contribution import Contribution
from pliant.runtime.update import Training
from pliant.tensors.gradients import Buffer
from pliant.tensors.group import Alone, Gloo, Summation
from pliant.types import WorkerId

# How often a waiting worker looks whether the coordinator has ended the run.
_LOOK_S = 0.05
# How long a worker whose exchange failed waits for the coordinator to say why.
_REASON_S = 10.0


class Witness(Protocol):
    """Who is told what happened: the journal of a job, or nobody."""

    def check(self) -> None:
        """Raise if the run is over."""
        ...

    def opened(self, group: Group, openings: list[Ticket]) -> None: ...

    def settled(self, group: Group, outcome: Settled, handed_in: list[Ticket], rate: float) -> None: ...

    def beat(self, round: int) -> None: ...


class Flight:
    """A contribution that was handed in and not settled yet."""

    def __init__(self, summation: Summation, filled: Buffer | None, merged: Tensor | None, drawn: int) -> None:
        self.summation = summation
        self.filled = filled
        self.merged = merged
        self.drawn = drawn
        """micro-batches it consists of"""


class Worker:
    """One member of the group."""

    def __init__(
        self,
        me: WorkerId,
        group: Group,
        channel: Alone | Gloo,
        training: Training,
        witness: Witness,
        *,
        pace: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.me = me
        self.group = group
        self.training = training
        self._member = group.roster.index(me)
        self._channel = channel
        self._witness = witness
        self._clock = clock
        self._slowdown = 1.0 / pace - 1.0
        self._flight: Flight | None = None
        self._contribution = Contribution(clock())
        self._suspended: list[tuple[Contribution, Flight | None, float]] = []
        self._drawn_since_update = False
        self._sum_s = 0.0
        self._cost_s = 0.0
        self.last: Settled | None = None
        """the last settled exchange"""
        self.last_trained: Settled | None = None
        """the last settled round of a training phase"""
        self.applied_rate = training.rate

    # -- phases

    @property
    def inside(self) -> Kind | None:
        """The kind of the innermost open phase."""
        return self.group.phase.kind if self.group.open else None

    def limit_samples(self, samples: int | None) -> None:
        """End training phases where this many samples in all are reached; the same call on every worker."""
        self.group = replace(self.group, samples_limit=samples)

    def open(self, kind: Kind, *, epoch: int, length: int, order: int, size: int, ahead: int) -> int:
        """Enter the next phase together with all others; returns its number."""
        if self._flight is not None and self._drawn_since_update:
            raise UsageError(
                "evaluate was called in the middle of a round: inside batches call it only "
                "right after run.step() has returned True"
            )
        opening = replace(
            self._ticket(kind, Flag.OPENING), epoch=epoch, length=length, order=order, size=size, ahead=ahead
        )
        buffers, parameters = self.training.buffers, len(self.training.parameters)
        gathered, bitmap = self._exchange(opening, buffers.training_bits() << parameters, [])
        buffers.grow(bitmap >> parameters)
        group = rounds.opened(self.group, gathered)
        if isinstance(group, Mismatch):
            raise Refused(group.reason)
        self._witness.opened(group, gathered)
        if len(group.open) > len(self.group.open):
            self._suspended.append((self._contribution, self._flight, self._clock()))
            self._contribution, self._flight = Contribution(self._clock()), None
        self.group = group
        return group.phases

    def end(self) -> None:
        """Leave the run together with all others."""
        gathered, _ = self._exchange(self._ticket(Kind.END, Flag.OPENING), 0, [])
        mismatch = rounds.compared(self.group, gathered)
        if mismatch:
            raise Refused(mismatch.reason)

    def draw(self, phase: int) -> MicroBatch | None:
        """The next micro-batch of ``phase``, or None when it has ended; waits only when nothing may be computed."""
        while self._inside(phase):
            if self._flight is None and self._complete():
                self._hand_in(Flag.NONE)
            micro_batch = self._next()
            if micro_batch is not None:
                if self.group.phase.kind is Kind.TRAIN:
                    self._drawn_since_update = True
                    start = self._clock()
                    self.training.look_ahead(self.group.rate.factor)
                    self._cost_s += self._clock() - start
                self._contribution.draw(samples_of(micro_batch), time.thread_time())
                self._witness.beat(self.group.round)
                return micro_batch
            self._settle()
        return None

    def upcoming(self) -> tuple[MicroBatch, ...]:
        """What this worker will draw after the last drawn micro-batch, as far as it is dealt."""
        if not self.group.open:
            return ()
        return self.group.phase.ledger.hands[self._member].queue[self._drawn() :]

    def abandon(self, phase: int) -> None:
        """The user's loop was left early: hand in what there is and end the phase for all."""
        self._contribution.undraw()
        if self._inside(phase) and self._flight is not None:
            self._settle(Flag.BREAK)
        if self._inside(phase) and self._flight is None:
            self._hand_in(Flag.BREAK)
        if self._inside(phase):
            self._settle()

    def contributed(self, weight: float, loss_sum: Tensor | float) -> None:
        """A drawn micro-batch is computed; its gradients lie in the buffer."""
        self._contribution.add(weight, loss_sum)
        if self._slowdown > 0:
            time.sleep(self._slowdown * (time.thread_time() - self._contribution.cpu_start_s))

    def step(self) -> bool:
        """Settle the round in flight if it is due; True when all workers are at the same update now."""
        if not self._complete():
            return False
        if self._flight is None:
            if self.group.overlap:
                return False
            self._hand_in(Flag.NONE)
        assert self._flight is not None
        if self._next() is not None and not self._flight.summation.over:
            return False
        outcome = self._settle()
        self._drawn_since_update = not outcome.seen
        return outcome.seen

    # -- what may be drawn

    def _inside(self, phase: int) -> bool:
        return bool(self.group.open) and self.group.phase.number == phase

    def _drawn(self) -> int:
        """Micro-batches at the front of this worker's hand that it has drawn already."""
        return self._contribution.micro_batches + (self._flight.drawn if self._flight else 0)

    def _next(self) -> MicroBatch | None:
        """The micro-batch that may be added to the contribution now."""
        if self._flight is not None and not self.group.overlap:
            return None
        hand = self.group.phase.ledger.hands[self._member]
        drawn = self._drawn()
        if drawn >= hand.granted:
            return None
        bounds = rounds.allowance(self.group, self._member, 1 if self._flight else 0)
        mine = self._contribution
        if bounds.micro_batches is not None and mine.micro_batches >= bounds.micro_batches:
            return None
        micro_batch = hand.queue[drawn]
        if (
            bounds.samples is not None
            and mine.micro_batches
            and mine.samples + samples_of(micro_batch) > bounds.samples
        ):
            return None
        return micro_batch

    def _complete(self) -> bool:
        """Whether the contribution may be handed in: its share is done, or with an open batch it is not empty."""
        bounds = rounds.allowance(self.group, self._member, 1 if self._flight else 0)
        if bounds.micro_batches is not None:
            return self._contribution.micro_batches >= bounds.micro_batches
        mine = self._contribution
        if mine.micro_batches and self._clock() - mine.start_s - mine.idle_s >= bounds.seconds:
            return True
        return self._next() is None

    # -- exchanging

    def _ticket(self, kind: Kind, flags: Flag) -> Ticket:
        """A ticket that says where this worker is."""
        group = self.group
        return Ticket(group.era, group.round, group.phases, kind, flags, digest=rounds.digest(group))

    def _exchange(self, ticket: Ticket, bitmap: int, sums: list[Tensor]) -> tuple[list[Ticket], int]:
        """An exchange that nothing can be computed beside: everybody's tickets, and the union of the bitmaps."""
        summation = self._channel.exchange(tickets.pack(ticket, bitmap, self.training.bits), sums)
        self._await(summation)
        return self._gathered(summation)

    def _hand_in(self, flags: Flag, *, returning: bool = False) -> None:
        """Start the summation of the contribution and begin the next one."""
        mine, phase = self._contribution, self.group.phase
        bitmap, squared_norm, filled, merged = 0, 0.0, None, None
        if phase.kind is Kind.TRAIN:
            bitmap, norm = self._inspect(mine)
            if norm is None:
                flags |= Flag.NONFINITE
            elif mine.weight > 0:
                mean = self.training.reference / mine.weight
                squared_norm = norm * mean * mean
            if self.group.overlap:
                self.training.park(mine.weight, norm, bitmap)
            if len(self.group.roster) > 1:
                merged = self.training.buffers.hand_in(mine.weight, leader=self._member == 0)
            filled = self.training.gradients.hand_in(overlap=self.group.overlap, returning=returning)
        sums = [*(filled.flats if filled else []), *([merged] if merged is not None else [])]
        now = self._clock()
        ticket = replace(
            self._ticket(phase.kind, flags),
            epoch=phase.epoch,
            length=phase.length,
            size=phase.sizes[self._member],
            ahead=phase.ahead[self._member],
            micro_batches=mine.micro_batches,
            samples=mine.samples,
            weight=mine.weight,
            busy_s=max(0.0, now - mine.start_s - mine.idle_s),
            idle_s=mine.idle_s,
            sum_s=self._sum_s,
            cost_s=self._cost_s,
            loss_sum=mine.loss_total(),
            squared_norm=squared_norm,
            scale=self.training.scale,
        )
        packed = tickets.pack(ticket, bitmap, self.training.bits)
        summation = self._channel.exchange(packed, sums)
        self._flight = Flight(summation, filled, merged, mine.micro_batches)
        self._contribution = Contribution(self._clock())

    def _inspect(self, mine: Contribution) -> tuple[int, float | None]:
        """The bitmap of a contribution, and the squared norm of its sum; None if anything is not finite."""
        training = self.training
        training.gradients.check()
        bitmap = training.gradients.present() | training.buffers.changed() << len(training.parameters)
        # Alone the norm is not computed: nobody else can have brought in a bad gradient.
        norm = (training.unscale() or 0.0) if mine.micro_batches else 0.0
        return bitmap, norm if math.isfinite(mine.loss_total() + norm) else None

    def _settle(self, following: Flag = Flag.NONE) -> Settled:
        """Wait for the contribution in flight, decide, hand in the following one, apply."""
        flight = self._flight
        assert flight is not None
        self._contribution.idle_s += self._await(flight.summation)
        self._sum_s = flight.summation.seconds
        start = self._clock()
        handed_in, bitmap = self._gathered(flight.summation)
        before = self.group
        decision = rounds.settled(before, handed_in)
        if isinstance(decision, Mismatch):
            raise Refused(decision.reason)
        self.group, outcome = decision
        self._flight = None
        training = outcome.kind is Kind.TRAIN
        merged = training and self._merge(outcome, flight, bitmap)
        if before.overlap and not outcome.ended:
            self._hand_in(following, returning=True)
        if training:
            self.last_trained = outcome
            self.applied_rate = self.training.rate * outcome.factor
            self.training.apply(outcome, flight.filled, bitmap)
            self.training.advance_schedule(before.samples, self.group.samples)
        self._witness.settled(self.group, outcome, handed_in, self.applied_rate)
        self.last = outcome
        if outcome.ended:
            self._end_phase(training=training, merged=merged)
        self._cost_s = self._clock() - start
        self._give_up_if_hopeless()
        return outcome

    def _merge(self, outcome: Settled, flight: Flight, bitmap: int) -> bool:
        """Return to the plain weights and bring in the group's buffers; whether they are all up to date."""
        self.training.back()
        buffers = self.training.buffers
        merged = outcome.applied and flight.merged is not None
        if merged:
            buffers.merge(flight.merged, outcome.weight)
        return not buffers.grow(bitmap >> len(self.training.parameters)) and merged

    def _end_phase(self, *, training: bool, merged: bool) -> None:
        """Everything is applied: forget what a break cut off, make the buffers equal, go back to the outer phase."""
        if training and len(self.group.roster) > 1:
            self.training.gradients.discard()
            self._drain_buffers(merged=merged)
        self._contribution, self._flight, since = self._suspended.pop()
        self._contribution.start_s += self._clock() - since

    def _give_up_if_hopeless(self) -> None:
        if self.group.skipped_in_a_row >= rounds.MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLoss(
                f"{rounds.MAX_SKIPPED_IN_A_ROW} rounds in a row had an infinite or undefined loss or gradient: "
                "lower the learning rate, clip (clip_norm=1.0), or look for bad samples"
            )

    def _drain_buffers(self, *, merged: bool) -> None:
        """Make the buffers equal on all workers at the end of a phase."""
        buffers = self.training.buffers
        if merged or not buffers.live:
            buffers.drain()
            return
        # The last round brought no merge (it was skipped, or a buffer changed for the first time).
        mine = buffers.hand_in(1.0, leader=self._member == 0)
        assert mine is not None
        self._exchange(self._ticket(Kind.TRAIN, Flag.NONE), 0, [mine])
        buffers.merge(mine, float(len(self.group.roster)))

    def _await(self, summation: Summation) -> float:
        """Wait until the exchange is over; the seconds it took. Raises when the run has ended instead."""
        start = self._clock()
        while not summation.wait(_LOOK_S):
            self._witness.check()
        return self._clock() - start

    def _gathered(self, summation: Summation) -> tuple[list[Ticket], int]:
        """The tickets of an exchange that is over, and the union of their bitmaps."""
        try:
            packed = summation.tickets()
        except RuntimeError as error:
            # Somebody died; the coordinator knows who, and ends the run.
            deadline_s = self._clock() + _REASON_S
            while self._clock() < deadline_s:
                self._witness.check()
                time.sleep(_LOOK_S)
            raise RunEnded(f"the exchange with the other workers failed: {error}") from error
        unpacked = [tickets.unpack(data) for data in packed]
        bitmap = functools.reduce(operator.or_, (bits for _, bits in unpacked))
        return [ticket for ticket, _ in unpacked], bitmap

    def close(self) -> None:
        """Give the group and the optimizer back, whatever is still in flight."""
        self.training.close()
        self._channel.leave()
