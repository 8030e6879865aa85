"""The worker's loop: draw, contribute, hand in, settle.

Question  In which order does one worker do what the group has decided?
Holds     It waits for the group only when it has nothing it may compute. All micro-batches of a contribution are
          computed at one point of the weights. With an overlap, settling a round hands in the following contribution
          at once and applies after that, so that the sum has the longest possible time. After ``step`` has returned
          True the model holds the plain weights until the next draw. When its era is over it settles nothing more of
          it, and goes on in the next one with what it has accumulated.
Source    ABS-SGD (Zhou et al. 2023); docs/protocol.md has the states and events, docs/design/0007-elastic.md the eras.

One exchange after another, for worker i with an overlap (delay 1):

    draw … draw   hand in C1   draw … draw   settle 1, hand in C2, apply 1   draw … draw   settle 2, hand in C3, …
                  └─────── C1 is summed ───────┘         └───────── C2 is summed ────────────┘
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace
from torch import Tensor

from pliant.core import agreement, drawing, drift, regrouping, rounds, standings, tickets
from pliant.core.agreement import Mismatch
from pliant.core.group import Group, Past, Standing, founded
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.members import CHECKPOINTS_KEPT
from pliant.core.regrouping import Entry
from pliant.core.rounds import Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.errors import Drifted, Left, NonFiniteLoss, Refused, RunEnded, UsageError
from pliant.runtime import eras as changes
from pliant.runtime.contribution import Contribution
from pliant.runtime.eras import Eras, Handed
from pliant.runtime.place import EraBroken, Evicted, Seat
from pliant.runtime.saving import Saving
from pliant.runtime.script import Opening, Script, top_level_calls
from pliant.runtime.takeover import install_state
from pliant.runtime.update import Training
from pliant.runtime.witness import Witness
from pliant.tensors.checkpoint import Manifest
from pliant.tensors.gradients import Buffer
from pliant.types import WorkerId

# How long a waiting worker polls before it looks whether its era is over.
_LOOK_S = 0.002
# How long the first sum after a loss is waited for, with an overlap too: mostly it is in by then, and the update comes
# a whole contribution earlier.
_SOON_S = 0.03
# Between two rounds in which nobody computes: all members leave, or wait for what they need.
_NOBODY_S = 0.02
_PAST_IT = "the run has gone back to a checkpoint, and this script is past it"

Answer = TypeVar("Answer")


class Flight:
    """A contribution that was handed in and not settled yet."""

    def __init__(self, summation: Any, filled: Buffer | None, merged: Tensor | None, drawn: int) -> None:
        self.summation = summation
        self.filled = filled
        self.merged = merged
        self.drawn = drawn
        """micro-batches it consists of"""
        self.point = tickets.NOWHERE
        """where they were computed"""
        self.gathered: tuple[list[Ticket], int] | None = None
        """the tickets, where they were gathered first"""
        self.leaving = False
        """whether its ticket said that this worker draws no more"""
        self.closed = False
        """whether this worker has taken part in the exchange after it, in the same group"""


class Worker:
    """One member of the group."""

    writes = True
    """whether it prints and writes for the group while it leads; who replays a run does not"""

    def __init__(
        self,
        me: WorkerId,
        group: Group,
        channel: Any,
        training: Training,
        witness: Witness,
        *,
        eras: Eras | None = None,
        check: Callable[[], None] | None = None,
        saving: Saving | None = None,
        carried: Mapping[str, Any] | None = None,
        pace: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.me = me
        self.group = group
        self.training = training
        self._channel = channel
        self._witness = witness
        self._eras = eras
        self._check = check
        self._saving = saving
        self._carried: Mapping[str, Any] = carried or {"state": {}}
        """what the script has given besides model and optimizer"""
        self._restored: Mapping[str, Any] | None = None
        """the user's state of a checkpoint, until the script is in the call that it is of"""
        self._restored_call = 0
        self._clock = clock
        self._sleep = sleep
        self._slowdown = 1.0 / pace - 1.0
        self._flight: Flight | None = None
        self._contribution = Contribution(clock())
        self._suspended: list[tuple[Contribution, Flight | None, float]] = []
        """what lies outside each open phase, outermost first"""
        self._retired: list[tuple[Any, Any]] = []
        """groups of planned eras that are over, with their last exchange"""
        self._script = Script()
        self._drawn_since_update = False
        self._beyond = False
        """evicted after more than a beginning: this script cannot begin anew"""
        self._broken: EraBroken | None = None
        """found while a round was being settled: this worker stops as soon as that is done"""
        self._undrained = False
        """the exchange that makes the buffers equal at a phase's end is still to come"""
        self._turned = -1
        """the last exchange that opened or ended a phase"""
        self._awaited = False
        """somebody has come to the end of the last phase without the user's state of that moment"""
        self._expelled: Drifted | None = None
        """this worker's weights differ again: it goes when all know"""
        self._sum_s = 0.0
        self._cost_s = 0.0
        self.last: Settled | None = None
        """the last settled exchange"""
        self.last_trained: Settled | None = None
        """the last settled round of a training phase"""
        self.applied_rate = training.rate

    # -- facts

    @property
    def _member(self) -> int:
        return self.group.roster.index(self.me)

    @property
    def standing(self) -> Standing:
        return self.group.standings[self._member]

    @property
    def inside(self) -> Kind | None:
        """The kind of the innermost call that the script is in."""
        call = self._script.innermost
        return call.kind if call is not None else None

    def past(self, epoch: int) -> bool:
        """Whether the group is beyond ``epoch`` already: a newcomer passes over it."""
        known = [phase.epoch for phase in (*self.group.past, *self.group.open)]
        if self._eras is not None:
            known.append(self._eras.last_past_epoch())
        return max(known, default=-1) > epoch

    def limit_samples(self, samples: int | None) -> None:
        """End training phases where this many samples in all are reached; the same call on every worker."""
        self.group = replace(self.group, samples_limit=samples)

    # -- what the script calls

    def open(self, call: Opening) -> int | Past:
        """Enter the next phase together with all others: its number; or how it ended, if the group is past it."""
        if self._script.stack and self._flight is not None and self._drawn_since_update:
            raise UsageError(
                "evaluate was called in the middle of a round: inside batches call it only "
                "right after run.step() has returned True"
            )
        self._script.enters(call, self.group)
        try:
            answer = self._through(lambda: self._opened(call))
        except BaseException:
            self._script.gives_up()
            raise
        if isinstance(answer, Past):
            self.left()
        return answer

    def draw(self, phase: int) -> MicroBatch | None:
        """The next micro-batch of ``phase``, or None when it has ended; waits only when nothing may be computed."""
        return self._through(lambda: self._drawn_next(phase))

    def step(self) -> bool:
        """Settle the round in flight if it is due; True when all workers are at the same update now."""
        return self._through(self._stepped, or_else=False)

    def abandon(self, phase: int) -> None:
        """The user's loop was left early: hand in what there is and end the phase for all."""
        self._contribution.undraw()
        self._through(lambda: self._abandoned(phase))
        self.left()

    def left(self) -> float | None:
        """The script is out of its innermost call; the call's result."""
        past = self._script.past(self.group)
        self._script.leaves()
        return past.result if past is not None else None

    def contributed(self, weight: float, loss_sum: Tensor | float) -> None:
        """A drawn micro-batch is computed; its gradients lie in the buffer."""
        self._contribution.add(weight, loss_sum)
        if self._slowdown > 0:
            self._sleep(self._slowdown * (time.thread_time() - self._contribution.cpu_start_s))

    def end(self) -> None:
        """Leave the run together with all others. Raises ``Left`` where this worker does not hold the final state."""
        self._through(self._ended)
        self._witness.confirmed()
        if self._eras is not None:
            # Whoever sends them may not get to it, and nobody keeps them any longer.
            self._eras.place.link.send_lines_again()
        if self.standing is Standing.FOLLOWING or (self._eras is not None and not self._eras.holds_all):
            raise Left

    def leave(self, reason: str) -> None:
        """Go in good order as soon as the group can do without this worker."""
        if self._eras is not None:
            self._eras.leave(reason)

    def close(self) -> None:
        """Give the group and the optimizer back, whatever is still in flight."""
        self.training.close()
        self._channel.leave()
        for channel, _ in self._retired:
            channel.leave()
        if self._eras is not None:
            self._eras.close()

    def _through(self, action: Callable[[], Answer], or_else: Answer | None = None) -> Answer:
        """Do it, in this era or the next; ``or_else``: the outcome of an interrupted action that is not repeated."""
        while True:
            try:
                return action()
            except (EraBroken, Evicted) as trouble:
                self._go_on(trouble)
            if or_else is not None:
                return or_else

    def _go_on(self, trouble: EraBroken | Evicted) -> None:
        """Get into an era again; whoever stops with the others may find that it is off the roster itself."""
        self._go_if_expelled()
        while True:
            try:
                if isinstance(trouble, EraBroken):
                    self._regroup(str(trouble))
                else:
                    self._come_back()
                return
            except (EraBroken, Evicted) as another:
                trouble = another

    # -- phases

    def _opened(self, call: Opening) -> int | Past:
        past = self._become_member(call)
        if past is not None:
            return past
        self._finish_draining()
        while True:
            past = self._script.past(self.group)
            if past is not None:
                self._make_sure(ended=True)
                return past
            phase = self._script.phase(self.group)
            if phase is not None:
                self._make_sure()
                return phase
            self._look()
            self._rest()
            if len(self.group.open) >= self._script.depth:
                # The group is in a call that this script does not make.
                self._follow()
                continue
            inner = Flag.INNER if self._script.is_in_ended_loop else Flag.NONE
            opening = replace(
                self._ticket(call.kind, Flag.OPENING | inner | self._readiness()),
                epoch=call.epoch,
                length=call.length,
                order=call.order,
                size=call.size,
                ahead=call.ahead,
            )
            bits = self.training.buffers.training_bits() << len(self.training.parameters)
            self._take_opening(*self._exchange(opening, bits, []))

    def _take_opening(self, gathered: list[Ticket], bitmap: int) -> None:
        """All have entered the next phase."""
        before = self.group
        self.training.buffers.grow(bitmap >> len(self.training.parameters))
        group = rounds.opened(before, gathered)
        if isinstance(group, Mismatch):
            raise Refused(group.reason)
        self._witness.opened(group, gathered)
        if len(group.open) > len(before.open):
            self._suspended.append((self._contribution, self._flight, self._clock()))
            self._contribution, self._flight = Contribution(self._clock()), None
        self.group = group
        self._turned = group.exchange
        plan = agreement.agreed_plan(group, gathered)
        if plan is not None:
            self._switch(plan)

    def _drawn_next(self, phase: int) -> MicroBatch | None:
        while self._still_in(phase):
            self._look()
            self._rest()
            if not self._speaks(phase):
                self._follow()
                continue
            if self._flight is None and self._complete():
                self.training.back()
                self._hand_in(Flag.NONE)
            if self._settled_soon():
                continue
            micro_batch = self._next()
            if micro_batch is not None:
                self._take_users_state()
                if self.group.phase.kind is Kind.TRAIN:
                    self._drawn_since_update = True
                    start = self._clock()
                    self.training.look_ahead(self.group.rate.factor)
                    self._cost_s += self._clock() - start
                cpu_s, ahead = time.thread_time(), self.training.ahead
                self._contribution.draw(samples_of(micro_batch), cpu_s, self.group.round, ahead=ahead)
                self._progress()
                return micro_batch
            self._settle_or_hand_in()
        return None

    def _settled_soon(self) -> bool:
        """After a loss the run has stood still: make the first update before the next micro-batch, if that is quick."""
        flight = self._flight
        if flight is None or not self.group.phase.resumed or self._contribution.micro_batches:
            return False
        start = self._clock()
        while not flight.summation.wait(_LOOK_S) and self._clock() - start < _SOON_S:
            self._look()
        self._contribution.idle_s += self._clock() - start
        if flight.summation.over:
            self._settle()
        return bool(flight.summation.over)

    def _still_in(self, phase: int) -> bool:
        """Whether ``phase`` goes on; where it has ended, its buffers are made equal."""
        self._enter_again(phase)
        if any(each.number == phase for each in self.group.open):
            return True
        self._come_to_the_end()
        return False

    def _come_to_the_end(self) -> None:
        """The phase is over, the script's code inside it has run, and that after it is next."""
        self._finish_draining()
        self._make_sure(ended=True)
        if self._awaited and self._eras is not None:
            self._eras.keep_users_state(self._script.position)
            self._rest()

    def _enter_again(self, phase: int) -> None:
        """The run has begun anew while this script was in its first call: enter that once more."""
        call = self._script.innermost
        if phase > self.group.phases and call is not None:
            self._opened(call)

    def _make_sure(self, *, ended: bool = False) -> None:
        """Before the script acts on a phase's opening or end: have the others settled that exchange, too?

        Whoever does not hold the whole state is taken back to where those are who do. The next exchange shows where
        they are, and so does the user's state.
        """
        turned = self._turned
        while self.standing is Standing.FOLLOWING and self.group.exchange == turned:
            self._look()
            self._follow()
        if ended or self._script.is_at(self.group):
            self._take_users_state(ended=ended)

    def _settle_or_hand_in(self) -> None:
        if self._flight is None:
            self.training.back()
            self._hand_in(Flag.NONE)
        self._settle()

    def _speaks(self, phase: int) -> bool:
        return self.group.phase.number == phase and drawing.speaks(self.group, self._member)

    def upcoming(self) -> tuple[MicroBatch, ...]:
        """What this worker will draw after the last drawn micro-batch, as far as it is dealt."""
        if not self.group.open:
            return ()
        return self.group.phase.ledger.hands[self._member].queue[self._drawn() :]

    def _abandoned(self, phase: int) -> None:
        def inside() -> bool:
            return any(each.number == phase for each in self.group.open)

        self._enter_again(phase)
        while inside() and not self._speaks(phase):
            self._look()
            self._follow()
        if inside() and self._flight is not None:
            self._settle(Flag.BREAK)
        if inside() and self.standing is Standing.FOLLOWING:
            # Its weights differ: what it says counts again when it holds the others'.
            self._abandoned(phase)
            return
        if inside() and self._flight is None:
            self.training.back()
            self._hand_in(Flag.BREAK)
        if inside():
            self._settle()
        self._come_to_the_end()

    def _stepped(self) -> bool:
        self._look()
        self._rest()
        if not self.group.open or not self._speaks(self.group.phase.number) or not self._complete():
            return False
        if self._flight is None:
            if self.group.overlap:
                return False
            self.training.back()
            self._hand_in(Flag.NONE)
        assert self._flight is not None
        if self._next() is not None and not self._flight.summation.over:
            return False
        outcome = self._settle(in_body=True)
        self._drawn_since_update = not outcome.seen
        if outcome.ended:
            self._script.ended_in_body()
        return outcome.seen

    def _ended(self) -> None:
        if self._eras is not None and not self._eras.enlisted:
            return
        while not self.group.over:
            self._look()
            self._rest()
            # Now: once the others have reached their end, nobody can be asked any more.
            self._take_users_state()
            if self.group.open:
                self._follow()
                continue
            self._finish_draining()
            gathered, bitmap = self._exchange(self._ticket(Kind.END, Flag.OPENING), 0, [])
            if gathered[agreement.opening(gathered).index(True)].kind is Kind.END:
                self._conclude(gathered)
            else:
                # Others are still in the body of their last loop.
                self._take_opening(gathered, bitmap)

    def _conclude(self, gathered: list[Ticket]) -> None:
        mismatch = agreement.compared(self.group, gathered)
        if mismatch:
            raise Refused(mismatch.reason)
        self.group = rounds.concluded(self.group)

    # -- what may be drawn

    def _drawn(self) -> int:
        """Micro-batches at the front of this worker's hand that it has drawn already."""
        return self._contribution.micro_batches + (self._flight.drawn if self._flight else 0)

    @property
    def _leaving(self) -> bool:
        """Whether this worker draws no more, because it was asked to go.

        Not inside an ``evaluate`` in a loop, and not before the round in flight is settled or something was drawn
        beside it: the others may count on this worker being inside its loop body.
        """
        if self._eras is None or not self._eras.leaving or self._script.depth > 1:
            return False
        return self._flight is None or self._flight.leaving or self._contribution.micro_batches > 0

    def _next(self) -> MicroBatch | None:
        """The micro-batch that may be added to the contribution now."""
        if self._leaving or (self._flight is not None and not self.group.overlap):
            return None
        hand = self.group.phase.ledger.hands[self._member]
        drawn = self._drawn()
        if drawn >= hand.granted:
            return None
        bounds = drawing.allowance(self.group, self._member, 1 if self._flight else 0)
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
        if self._leaving:
            return True
        bounds = drawing.allowance(self.group, self._member, 1 if self._flight else 0)
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
        if self._leaving:
            flags |= Flag.LEAVING
        plan_term, plan_era = self._eras.place.prepared(group.era) if self._eras is not None else (0, 0)
        return Ticket(
            group.era,
            group.round,
            group.phases,
            kind,
            flags,
            digest=agreement.digest(group),
            exchange=group.exchange,
            plan_term=plan_term,
            plan_era=plan_era,
            momentum=self.training.momentum,
            measured_round=self.training.measured[0],
            measured_norm=self.training.measured[1],
            weights_round=self.training.weighed[0],
            weights=self.training.weighed[1],
            arithmetic=self.training.fingerprint.arithmetic,
        )

    def _readiness(self) -> Flag:
        """Whether this worker can compute from the coming exchange on, where it could not before."""
        if self._leaving or self._expelled or not self._script.is_at(self.group):
            return Flag.NONE
        if self._eras is not None and self.standing is Standing.FOLLOWING:
            if not self._eras.complete:
                return Flag.NONE
            self._eras.ask_users_state(self.group.exchange + (2 if self._flight else 1))
            return Flag.READY
        late = self.group.open and not self.group.phase.present[self._member]
        return Flag.READY if late else Flag.NONE

    def _exchange(self, ticket: Ticket, bitmap: int, sums: list[Tensor]) -> tuple[list[Ticket], int]:
        """An exchange that nothing can be computed beside: everybody's tickets, and the union of the bitmaps."""
        packed = tickets.pack(ticket, bitmap, self.training.bits)
        summation = self._started(lambda: self._channel.exchange(packed, sums))
        self._await(summation)
        return self._gathered(summation)

    def _started(self, post: Callable[[], Any]) -> Any:
        try:
            return post()
        except RuntimeError as error:
            raise EraBroken(f"the exchange with the other workers failed: {error}") from error

    def _holders(self) -> list[int]:
        """Members that hold the whole state."""
        return [m for m, standing in enumerate(self.group.standings) if standing is not Standing.FOLLOWING]

    def _hand_in(self, flags: Flag, *, returning: bool = False) -> None:
        """Start the summation of the contribution and begin the next one.

        ``returning``: the round just settled is still to be applied, and its buffer comes back then.
        """
        mine, phase = self._contribution, self.group.phase
        # First: it may find that the era is over, and nothing must have been given away then.
        ticket = self._ticket(phase.kind, flags)
        bitmap, squared_norm, filled, merged = 0, 0.0, None, None
        if phase.kind is Kind.TRAIN:
            bitmap, norm = self._inspect(mine)
            if norm is None:
                ticket = replace(ticket, flags=ticket.flags | Flag.NONFINITE)
            elif mine.weight > 0:
                mean = self.training.reference / mine.weight
                squared_norm = norm * mean * mean
            if self.group.overlap:
                self.training.park(mine.weight, norm, bitmap)
            filled, merged = self._given_away(mine.weight, overlap=self.group.overlap, returning=returning)
        sums = [*(filled.flats if filled else []), *([merged] if merged is not None else [])]
        now = self._clock()
        ticket = replace(
            ticket,
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
            point=mine.point(fresh=not returning) if phase.kind is Kind.TRAIN else tickets.NOWHERE,
        )
        packed = tickets.pack(ticket, bitmap, self.training.bits)
        drawn = mine.micro_batches
        self._contribution = Contribution(self._clock())
        self._flight = Flight(None, filled, merged, drawn)
        self._flight.leaving = bool(ticket.flags & Flag.LEAVING)
        self._flight.point = ticket.point
        self._flight.summation = self._started(lambda: self._channel.exchange(packed, sums))

    def _given_away(self, weight: float, *, overlap: bool, returning: bool) -> tuple[Buffer | None, Tensor | None]:
        """This worker's part of a round's sums: gradients and buffers; ``overlap``: it goes on accumulating."""
        merged = None
        if len(self.group.roster) > 1:
            merged = self.training.buffers.hand_in(weight, leader=self._member == self._holders()[0])
        else:
            self.training.buffers.go_alone()
        return self.training.gradients.hand_in(overlap=overlap, returning=returning), merged

    def _inspect(self, mine: Contribution) -> tuple[int, float | None]:
        """The bitmap of a contribution, and the squared norm of its sum; None if anything is not finite."""
        training = self.training
        training.gradients.check()
        bitmap = training.gradients.present() | training.buffers.changed() << len(training.parameters)
        # Alone the norm is not computed: nobody else can have brought in a bad gradient.
        norm = (training.unscale() or 0.0) if mine.micro_batches else 0.0
        return bitmap, norm if math.isfinite(mine.loss_total() + norm) else None

    def _settle(self, following: Flag = Flag.NONE, *, in_body: bool = False) -> Settled:
        """Wait for the contribution in flight, decide, hand in the following one, apply.

        ``in_body``: ``step`` will say so if the update is seen.
        """
        self._check_era()
        flight = self._flight
        assert flight is not None
        self._contribution.idle_s += self._await(flight.summation)
        self._sum_s = flight.summation.seconds
        start = self._clock()
        handed_in, bitmap = self._tickets_of(flight)
        before = self.group
        decision = rounds.settled(before, handed_in)
        if isinstance(decision, Mismatch):
            raise Refused(decision.reason)
        self.group, outcome = decision
        self._flight = None
        training = outcome.kind is Kind.TRAIN
        merged = training and self._merge(outcome, flight, bitmap)
        # Whoever went along has handed in nothing to the following round already, in order to see the tickets.
        overlaps = before.overlap and self.group.overlap
        if overlaps and not (outcome.ended or outcome.plan or flight.closed) and self._hands_in_at_once():
            if flight.gathered is not None:
                # It went along: what it would hand in is the very buffer that is still to be applied.
                self.training.gradients.lose(flight.filled)
            self._hand_in_or_remember(following, returning=True)
        if training:
            self._apply(before, outcome, flight, bitmap)
            self._answer_for(outcome)
        self._witness.settled(self.group, outcome, handed_in, self.applied_rate)
        self.last = outcome
        missed = training and outcome.seen and not in_body
        if missed and self._eras is not None and self.standing is not Standing.FOLLOWING:
            self._eras.fell_behind(self.training, before, leaving=self.standing is Standing.LEAVING)
        if outcome.ended:
            self._turned = self.group.exchange
            self._awaited = standings.somebody_came_along(self.group, handed_in)
            self._follow_result(outcome)
            self._end_phase(training=training, merged=merged)
        if outcome.plan is not None:
            try:
                self._switch(outcome.plan, closed=flight.closed)
            except EraBroken as broken:
                self._broken = broken
            overlaps = before.overlap and self.group.overlap
            if self._broken is None and overlaps and self.group.open and self._hands_in_at_once():
                self._hand_in_or_remember(following, returning=False)
        self._cost_s = self._clock() - start
        self._give_up_if_hopeless()
        return outcome

    def _hand_in_or_remember(self, flags: Flag, *, returning: bool) -> None:
        """Hand in; where that fails the settled round is applied all the same, and ``step`` still says so."""
        try:
            self._hand_in(flags, returning=returning)
        except EraBroken as broken:
            self._broken = broken

    def _hands_in_at_once(self) -> bool:
        """Whether the following contribution is handed in as its round begins: unless its share has just grown."""
        if not drawing.speaks(self.group, self._member):
            return False
        bounds = drawing.allowance(self.group, self._member, 0)
        return self._leaving or bounds.micro_batches is None or self._contribution.micro_batches >= bounds.micro_batches

    def _merge(self, outcome: Settled, flight: Flight, bitmap: int) -> bool:
        """Return to the plain weights and bring in the group's buffers; whether they are all up to date."""
        self.training.back()
        buffers = self.training.buffers
        merged = outcome.applied and flight.merged is not None
        if merged:
            buffers.merge(flight.merged, outcome.weight)
        return not buffers.grow(bitmap >> len(self.training.parameters)) and merged

    def _apply(self, before: Group, outcome: Settled, flight: Flight, bitmap: int) -> None:
        """Make the update that the group has decided on."""
        scheduled = (before.scheduled, self.group.scheduled)
        averaged = None
        if self._eras is not None:
            averaged = self._eras.averaged(before.exchange + 1, bitmap, outcome.factor, scheduled)
        self.last_trained = outcome
        self.applied_rate = self.training.rate * outcome.factor
        self.training.apply(outcome, flight.filled, bitmap, averaged, measures=outcome.measures)
        self.training.advance_schedule(*scheduled)
        if outcome.weighs:
            self.training.weigh(outcome.round, drift.turn(outcome.round, self.group.policy.watched))

    def _answer_for(self, outcome: Settled) -> None:
        """Where this worker's weights differ from the others': take the state over like a newcomer, or go.

        What it has computed for the following round is of no use.
        """
        differs = outcome.drift
        if differs is None or self._member not in differs.named:
            return
        again = self._member in differs.expelled
        if again or self._eras is None:
            error = self._expelled = Drifted(
                f"{self.me}'s weights differ from the others' after round {differs.round}{', again' if again else ''}: "
                "look for bad memory, a non-deterministic kernel, or code that changes the weights on one worker only"
            )
            if self._eras is None:
                raise error
        self._contribution = Contribution(self._clock())
        self.training.cancel_look_ahead()
        self.training.gradients.discard()
        self.training.weighed = (0, 0)
        self._eras.heal(self.training, self.group, differs.donor)

    def _go_if_expelled(self) -> None:
        """The others have settled the exchange that has shown it, or cannot any more."""
        if self._expelled is not None:
            raise self._expelled

    def _follow_result(self, outcome: Settled) -> None:
        """A schedule may follow the results of ``evaluate``: those that every script asks for, outside of its loops."""
        top = not self.group.open and not self.group.past[-1].inner
        if outcome.kind is Kind.EVALUATE and top and outcome.result is not None:
            self.training.evaluated(outcome.result)
            if self._eras is not None:
                self._eras.evaluated(self.group.exchange, outcome.result)

    def _end_phase(self, *, training: bool, merged: bool) -> None:
        """Everything is applied: forget what a break cut off, make the buffers equal, go back to the outer phase."""
        if training and len(self.group.roster) > 1:
            self.training.gradients.discard()
            buffers = self.training.buffers
            # Without a merge in the last round (it was skipped, or a buffer changed for the first time) one is due.
            self._undrained = bool(buffers.live) and not merged
            if not self._undrained:
                buffers.drain()
        self._leave_phase()

    def _leave_phase(self) -> None:
        """Go on with what lies outside."""
        self._contribution, self._flight, since = self._suspended.pop()
        self._contribution.start_s += self._clock() - since

    def _finish_draining(self) -> None:
        """Make the buffers equal on all workers at the end of a phase, where the last round has not done so."""
        if self._undrained:
            mine = self._own_buffers()
            self._exchange(self._ticket(Kind.DRAIN, Flag.NONE), 0, [mine])
            self._drain(mine)

    def _own_buffers(self) -> Tensor:
        holds = self.standing is not Standing.FOLLOWING
        mine = self.training.buffers.hand_in(1.0 if holds else 0.0, leader=self._member == self._holders()[0])
        assert mine is not None
        return mine

    def _drain(self, summed: Tensor) -> None:
        self.training.buffers.merge(summed, float(len(self._holders())))
        self._undrained = False
        self.group = rounds.drained(self.group)

    def _give_up_if_hopeless(self) -> None:
        if self.group.skipped_in_a_row >= rounds.MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLoss(
                f"{rounds.MAX_SKIPPED_IN_A_ROW} rounds in a row had an infinite or undefined loss or gradient: "
                "lower the learning rate, clip (clip_norm=1.0), or look for bad samples"
            )

    def _await(self, summation: Any, meanwhile: Callable[[], None] | None = None) -> float:
        """Wait until the exchange is over; the seconds it took. Raises when the era or the run has ended instead."""
        start = self._clock()
        if not summation.over:
            self._progress(waiting=True)
            while not summation.wait(_LOOK_S):
                self._look()
                # The script's code for the last update has run: a newcomer may be waiting for just that.
                self._rest()
                if meanwhile is not None:
                    meanwhile()
            self._progress()
        return self._clock() - start

    def _tickets_of(self, flight: Flight) -> tuple[list[Ticket], int]:
        if flight.gathered is None:
            return self._gathered(flight.summation)
        self._gathered_nothing(flight.summation)
        return flight.gathered

    def _gathered(self, summation: Any) -> tuple[list[Ticket], int]:
        """The tickets of an exchange that is over, and the union of their bitmaps."""
        try:
            packed = summation.tickets()
        except RuntimeError as error:
            # Somebody died; the coordinator finds out who.
            raise EraBroken(f"the exchange with the other workers failed: {error}") from error
        unpacked = [tickets.unpack(data) for data in packed]
        bitmap = functools.reduce(operator.or_, (bits for _, bits in unpacked))
        return [ticket for ticket, _ in unpacked], bitmap

    # -- going along

    def _follow(self) -> None:
        """Take part in one exchange without knowing beforehand what it will be.

        An ``evaluate`` may be opened before the round in flight is settled; whoever is not inside the loop learns only
        from the tickets of the next exchange which of the two it was.
        """
        if Standing.ACTIVE not in self.group.standings:
            # Nobody computes, so nothing slows the rounds down: they would chase each other.
            self._sleep(_NOBODY_S)
        held = self._flight
        ticket = self._ticket(self._kind(), Flag.FOLLOWING | self._readiness())
        call = self._script.innermost
        if call is not None:
            ticket = replace(ticket, size=call.size, ahead=call.ahead)
        packed = tickets.pack(ticket, 0, self.training.bits)
        summation = self._started(lambda: self._channel.gather(packed))
        self._await(summation, self._pursue)
        gathered, bitmap = self._gathered(summation)
        self._go_if_expelled()
        speaking = [ticket for ticket in gathered if not ticket.flags & Flag.FOLLOWING]
        # Whoever is in the body of a loop that has ended comes first.
        says = max(speaking, key=lambda ticket: ticket.flags & Flag.INNER, default=None)
        if held is not None and (says is None or says.exchange > self.group.exchange):
            era = self.group.era
            held.closed = True
            self._settle()
            self._check_era()
            if self.group.era != era:
                return
        if says is None or (not says.flags & Flag.OPENING and says.kind is not Kind.DRAIN):
            self._follow_round(gathered, bitmap)
        elif says.kind is Kind.DRAIN:
            self._follow_drain()
        elif says.kind is Kind.END:
            self._conclude(gathered)
        else:
            self._take_opening(gathered, bitmap)
        self._pursue()

    def _kind(self) -> Kind:
        return self.group.phase.kind if self.group.open else Kind.TRAIN

    def _follow_round(self, gathered: list[Ticket], bitmap: int) -> None:
        """Add nothing to the sums of a round; settle it at once unless an ``evaluate`` may come before.

        A newcomer that was just dealt its first samples computes meanwhile.
        """
        if not self.group.open:
            return
        phase = self.group.phase
        begins = self._begins()
        filled, merged = None, None
        if phase.kind is Kind.TRAIN:
            filled, merged = self._given_away(0.0, overlap=begins, returning=False)
        sums = [*(filled.flats if filled else []), *([merged] if merged is not None else [])]
        flight = Flight(None, filled, merged, 0)
        flight.gathered = gathered, bitmap
        self._flight = flight
        flight.summation = self._started(lambda: self._channel.add_up(sums))
        if begins:
            return
        self._await(flight.summation, self._pursue)
        if not (phase.kind is Kind.TRAIN and phase.seen and self.group.overlap):
            self._settle()

    def _begins(self) -> bool:
        """Whether this worker may compute beside the round that it has added nothing to."""
        group = self.group
        return (
            group.overlap
            and group.phase.kind is Kind.TRAIN
            and not group.phase.seen
            and self._script.is_at(self.group)
            and drawing.speaks(group, self._member)
        )

    def _gathered_nothing(self, summation: Any) -> None:
        try:
            summation.tickets()
        except RuntimeError as error:
            raise EraBroken(f"the exchange with the other workers failed: {error}") from error

    def _follow_drain(self) -> None:
        mine = self._own_buffers()
        summation = self._started(lambda: self._channel.add_up([mine]))
        self._await(summation, self._pursue)
        self._gathered_nothing(summation)
        self._drain(mine)

    def _pursue(self) -> None:
        """Take the state over, as far as that is due."""
        if self._eras is not None and self.standing is Standing.FOLLOWING:
            self._eras.pursue(self.group.exchange)

    def _take_users_state(self, *, ended: bool = False) -> None:
        """Before the first micro-batch of a newcomer: the user's own state, as of now.

        ``ended``: as it was at the end of the call that the script is in. Others may have run the code after it.
        """
        if self.standing is not Standing.ACTIVE:
            return
        if self._restored is not None and self._script.calls >= self._restored_call:
            restored, self._restored = self._restored, None
            install_state(self._carried["state"], restored)
        if self._eras is None:
            return
        left = self._script.position if ended else None
        while not self._eras.users_state_arrived(self.group.exchange, left):
            self._look()
            # Another newcomer may ask here, and is to ask elsewhere.
            self._rest()
            self._sleep(_LOOK_S)

    # -- eras

    def _check_era(self) -> None:
        """Raise what was remembered while a round was being settled."""
        broken, self._broken = self._broken, None
        if broken is not None:
            raise broken

    def _look(self) -> None:
        """Between micro-batches: is the era over, am I asked to go, does a retired group end?"""
        self._check_era()
        if self._check is not None:
            self._check()
        eras = self._eras
        if eras is None:
            return
        eras.place.look(self.group.era)
        if not eras.leaving and eras.place.asked_to_leave:
            eras.leave("asked by the coordinator")
        if self._retired:
            self._retired = [pair for pair in self._retired if not self._ended_well(*pair)]

    def _ended_well(self, channel: Any, last: Any) -> bool:
        if last.over:
            channel.leave()
        return bool(last.over)

    def _rest(self) -> None:
        """The script's code for the last update has run: newcomers may copy the state, and so may a checkpoint."""
        eras = self._eras
        if eras is not None and eras.wanted and self.standing is not Standing.FOLLOWING:
            eras.serve(self.training, self.group, self._restored)
        elif eras is not None and eras.wanted:
            eras.refuse(self.group)
        if self._saving is not None:
            self._save(self._saving)

    # -- checkpoints

    def _save(self, saving: Saving) -> None:
        """Copy the state for a checkpoint if one is due and this is who writes it; tell of one that is complete."""
        link = self._eras.place.link if self._eras is not None else None

        def tell(manifest: Manifest) -> None:
            if link is not None:
                link.saved(manifest.name, manifest.records, manifest.round)
            else:
                saving.tidy([name for name in reversed(saving.names()) if name <= manifest.name][:CHECKPOINTS_KEPT])

        saving.look(self._witness.certain, tell)
        if link is not None:
            saving.tidy(link.mailbox.named)
        if saving.is_due and self._writes():
            with self.training.plain():
                saving.save(self.training, self._carried, self._handed())

    def _writes(self) -> bool:
        """Whether this worker writes the checkpoints, and its script is where another one can get by itself."""
        first = next((m for m, standing in enumerate(self.group.standings) if standing is Standing.ACTIVE), None)
        whole = self._restored is None and (self._eras is None or self._eras.holds_all)
        if len(self.group.roster) == 1 and self._contribution.micro_batches:
            # Alone the model's buffers follow every forward pass, and those of this round will be made again.
            return False
        alike = len(self.group.open) == 1 and not self.group.phase.inner and self._script.is_at(self.group)
        return whole and first == self._member and alike

    def finished(self) -> None:
        """Alone: the script has come to its end, and the next one begins anew."""
        if self._saving is not None:
            self._saving.end()

    def restore(self, names: Sequence[str]) -> None:
        """Alone: go on from the first of these checkpoints that is whole."""
        self._restore(names, 0)

    def _restore(self, names: Sequence[str], last_round: int) -> Manifest:
        """Hold the state of a checkpoint, alone."""
        if self._saving is None:
            raise UsageError("the run goes on from a checkpoint, but this script calls join without checkpoint=…")
        found = self._saving.restored(names, self.training, self._carried, self.group)
        limit = self.group.samples_limit
        self.group = replace(regrouping.restored(found.handed.group, self.me, last_round), samples_limit=limit)
        self._restored, self._restored_call = found.users_state, top_level_calls(self.group)
        self._undrained = found.handed.undrained
        now = self._clock()
        self._flight, self._contribution = None, Contribution(now)
        self._suspended = [(Contribution(now), None, now) for _ in self.group.open]
        return found.manifest

    def _progress(self, *, waiting: bool = False) -> None:
        if self._eras is not None:
            self._eras.progress(self.group, self.standing, self._clock(), waiting=waiting)

    def _become_member(self, call: Opening) -> Past | None:
        """A newcomer enlists with the first call that is not past; earlier ones have an answer already."""
        eras = self._eras
        if eras is None or eras.enlisted:
            return None
        past = eras.past_call(self._script.calls)
        if past is None:
            eras.enlist(self._script.calls, call.kind.name.lower(), call.length)
            self._enter_next()
        return past

    def _switch(self, plan: tuple[int, int], *, closed: bool = False) -> None:
        """A planned era begins: go on in its group, or depart."""
        eras, old = self._eras, self._channel
        assert eras is not None
        seat = eras.place.taken_up(plan)
        if not closed:
            # Whoever goes along has yet to learn that this exchange was settled.
            packed = tickets.pack(self._ticket(Kind.TRAIN, Flag.NONE), 0, self.training.bits)
            try:
                self._retired.append((old, old.gather(packed)))
            except RuntimeError:
                # Somebody of the old era has died; whether that matters to the new one shows there.
                old.leave()
        else:
            old.leave()
        if seat is None:
            self._depart()
            return
        before = self.group
        self.group = regrouping.switched(before, seat.era, seat.roster)
        self._channel = seat.channel
        handed = changes.encoded(self._handed())
        self._entered(seat, None)
        eras.go_on(self.group, seat, knows_best=False)
        if any(worker not in before.roster for worker in seat.roster):
            self._started(lambda: seat.channel.tell(handed, seat.donor))

    def _handed(self) -> Handed:
        return Handed(self.group, self._witness.records, self.training.buffers.live, self._undrained)

    def _entered(self, seat: Seat, entries: Sequence[Entry] | None) -> None:
        assert self._eras is not None
        self._witness.era(self.group, entries, sends=seat.roster[seat.donor] == self.me)
        self._eras.entered(seat)
        self._progress()
        self._eras.place.link.entered(seat.era, self.group.exchange)

    def _depart(self) -> None:
        """This worker is not on the roster any more, as it was asked."""
        assert self._eras is not None
        deadline_s = self._clock() + 1.0
        while not all(last.over for _, last in self._retired) and self._clock() < deadline_s:
            self._sleep(_LOOK_S)
        self._eras.place.link.finish(left=True)
        raise Left

    def _regroup(self, reason: str) -> None:
        """The era is over: drop what was in flight, say how far this worker is, enter the next one."""
        eras = self._eras
        if eras is None:
            raise RunEnded(reason)
        self._lose_flights()
        self._channel.leave()
        self._stop(self.group.era, reason)
        self._enter_next()

    def _stop(self, era: int, reason: str) -> None:
        assert self._eras is not None
        told = self._eras.place.link.mailbox.broken_era >= era
        active = self.standing is not Standing.FOLLOWING
        exchange = self.group.exchange
        if active and not self._eras.holds_all:
            # The user's own state was still on its way: who has it is the better donor.
            exchange = max(1, exchange - 1)
        self._eras.place.stop(era, exchange, active=active, failed="" if told else reason)

    def _lose_flights(self) -> None:
        flights = [self._flight, *(flight for _, flight, _ in self._suspended)]
        for flight in flights:
            if flight is not None:
                self.training.gradients.lose(flight.filled)
        if not self._contribution.micro_batches:
            self.training.cancel_look_ahead()

    def _enter_next(self) -> None:
        """Wait for an era with this worker in it, and enter it."""
        eras = self._eras
        assert eras is not None
        era = self.group.era
        while True:
            self._progress(waiting=True)
            seat = eras.place.next_seat(era, lambda plan: eras.expect(self.training, plan))
            try:
                self._enter(seat)
                return
            except EraBroken as broken:
                seat.channel.leave()
                era = seat.era
                self._stop(era, str(broken))

    def found(self) -> None:
        """Enter the first era together with all others (or, coming too late for it, a later one)."""
        self._through(self._founded)

    def _founded(self) -> None:
        eras = self._eras
        assert eras is not None
        if not eras.place.link.mailbox.welcome.running:
            eras.enlisted = True
            eras.place.enlist(None)
            self._enter_next()

    def _enter(self, seat: Seat) -> None:
        """Agree with the others of a new era on where it begins."""
        eras = self._eras
        assert eras is not None

        def look() -> None:
            eras.place.look_entering(seat.era)

        if seat.exchange == 0:
            # Nobody has done anything yet: all begin with the leader's state.
            if self._beyond:
                raise RunEnded("the run begins anew, and this script is past its beginning")
            self._drawn_since_update = False
            self._heard(lambda: eras.share(seat.channel, look))
            self._channel = seat.channel
            limit = self.group.samples_limit
            self.group = replace(founded(self.group.policy, seat.era, seat.roster), samples_limit=limit)
            self._witness.joined(seat.records)
            self._entered(seat, None)
            return
        donor = seat.roster[seat.donor] == self.me
        entries = None
        if donor and seat.checkpoints:
            if self._beyond:
                raise RunEnded(_PAST_IT)
            manifest = self._restore(seat.checkpoints, seat.round)
            self._witness.joined(seat.records)
            self._witness.rewound(manifest.name, manifest.records, self.me, self.group.round)
        if donor:
            handed = self._handed()
            self._started(lambda: seat.channel.tell(changes.encoded(handed), seat.donor))
        else:
            handed = changes.decoded(self._heard(lambda: seat.channel.told(seat.donor, look)))
        group = handed.group
        holds = donor or (
            self.me in self.group.roster
            and self.group.exchange == group.exchange
            and self.group.era == group.era
            and self.standing is not Standing.FOLLOWING
        )
        if seat.exchange >= 0:
            mine = changes.packed_entry(self._entry(active=holds))
            summation = self._started(lambda: seat.channel.gather(mine))
            while not summation.wait(_LOOK_S):
                look()
            entries = [changes.unpacked_entry(data) for data in self._heard(summation.tickets)]
            group = regrouping.regrouped(group, seat.era, seat.roster, entries)
        keep = not holds and self.group.exchange == handed.group.exchange and self.group.era == handed.group.era
        eras.trust_own_state(handed.group, was_active=self.standing is Standing.ACTIVE)
        self._channel = seat.channel
        self._turned = -1
        if holds:
            self._keep_contributions(len(group.open))
        else:
            self._begin_anew(handed, len(group.open), keep=keep)
        self.group = group
        self._entered(seat, entries)
        if self.standing is Standing.FOLLOWING:
            eras.take_over(self.training, group, seat, keep=keep)
        else:
            eras.go_on(group, seat, knows_best=donor)

    def _heard(self, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except RuntimeError as error:
            raise EraBroken(f"the entry into the era failed: {error}") from error

    def _entry(self, *, active: bool) -> Entry:
        """What this worker loses and keeps, per open phase from the outermost on."""
        if not active:
            return Entry(active=False)
        pairs = [(contribution, flight) for contribution, flight, _ in self._suspended[1:]]
        if self._suspended:
            pairs.append((self._contribution, self._flight))
        dropped = tuple(flight.drawn if flight else 0 for _, flight in pairs)
        points = tuple(flight.point if flight else tickets.NOWHERE for _, flight in pairs)
        return Entry(True, dropped, tuple(contribution.micro_batches for contribution, _ in pairs), points)

    def _keep_contributions(self, depth: int) -> None:
        """What was in flight is lost; what was accumulated since goes on, in the phases that go on."""
        self._flight = None
        self._suspended = [(contribution, None, since) for contribution, _, since in self._suspended]
        while len(self._suspended) > depth:
            self._leave_phase()

    def _begin_anew(self, handed: Handed, depth: int, *, keep: bool) -> None:
        """This worker does not hold the state that the era begins with: nothing it has computed is of use.

        ``keep``: it has missed nothing. Its journal lines may be the last copies, and there may be nobody to ask.
        """
        now = self._clock()
        self._flight, self._contribution = None, Contribution(now)
        self._restored = None
        if self._saving is not None:
            self._saving.forget()
        self._script.begins_anew()
        self._suspended = [(Contribution(now), None, now) for _ in range(depth)]
        self.training.back()
        self.training.cancel_look_ahead()
        self.training.gradients.discard()
        self.training.buffers.grow(handed.live)
        self._undrained = handed.undrained
        if not keep:
            self._witness.joined(handed.records)
        if not self._script.is_at(self.group):
            self._drawn_since_update = False

    def _come_back(self) -> None:
        """Taken off the roster while asleep: return as a newcomer, with the script where it is."""
        eras = self._eras
        assert eras is not None
        self._lose_flights()
        self._channel.leave()
        self._beyond = self._beyond or self._script.calls > 0 or self._script.depth > 1 or self.group.round > 0
        rewinds = eras.rewinds
        eras.returned()
        if self._beyond and eras.rewinds != rewinds:
            raise RunEnded(_PAST_IT)
        self.me = eras.place.me
        self._witness.moved(eras.place.link)
        now = self._clock()
        self._flight, self._contribution, self._suspended = None, Contribution(now), []
        self.group = founded(self.group.policy, 0, (self.me,))
        self.group = replace(self.group, standings=(Standing.FOLLOWING,))
        self.training.back()
        self.training.cancel_look_ahead()
        self.training.gradients.discard()
        call = self._script.stack[0] if self._script.stack else None
        if call is not None:
            eras.enlist(self._script.calls, call.kind.name.lower(), call.length)
            self._enter_next()
