"""A worker's part in an exchange: open, settle, apply.

Question  How does what a worker has accumulated become an update that all workers make alike?
Holds     With an overlap, the next contribution is handed in as soon as a round is settled, and the update is applied
          after that, so that the next summation has the longest possible time. A settled round is applied even if that
          hand-in fails. The model holds the plain weights whenever something is handed in or applied.
Source    ABS-SGD (Zhou et al. 2023); docs/protocol.md ("One round", "Drift", "Phases").
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace
from torch import Tensor

from pliant.core import consistency, drift, evaluation, postscripts, rounds, standings, trained_set
from pliant.core.consistency import Mismatch
from pliant.core.evaluation import Appendix
from pliant.core.group_state import GroupState, Standing
from pliant.core.rounds import Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.errors import Drifted, NonFiniteLoss, Refused
from pliant.worker.collectives import Collectives
from pliant.worker.draw import DrawLimits
from pliant.worker.elastic.enrolment import Solo
from pliant.worker.elastic.transition import EraTransition
from pliant.worker.in_flight import InFlight
from pliant.worker.poll import Poller
from pliant.worker.script.calls import ScriptCall
from pliant.worker.script.hooks import Hooks
from pliant.worker.submit import Submission
from pliant.worker.worker_state import WorkerState


class Settlement:
    """What one worker does with an exchange that is over."""

    def __init__(
        self,
        member: WorkerState,
        channels: Collectives,
        lookout: Poller,
        bounds: DrawLimits,
        handing: Submission,
        crossing: EraTransition | Solo,
        hooks: Hooks,
        clock: Callable[[], float],
    ) -> None:
        self._member = member
        self._channels = channels
        self._lookout = lookout
        self._bounds = bounds
        self._crossing = crossing
        self._handing = handing
        self._hooks = hooks
        self._clock = clock
        self.last_trained: Settled | None = None
        """the last settled round of a training phase"""
        self.applied_rate = member.training.rate
        self.expelled: Drifted | None = None
        """this worker's weights differ a second time: it leaves once all have settled the exchange that shows it"""

    # -- openings and the end

    def open(self, call: ScriptCall, flags: Flag) -> None:
        """Announce the phase that this worker enters. The others may open another one before it."""
        training = self._member.training
        training.settle_set()
        training.trained.check()
        opening = replace(
            self._member.ticket(call.kind, Flag.OPENING | flags),
            epoch=call.epoch,
            length=call.samples.length,
            order=call.samples.checksum,
            size=call.size,
            ahead=call.ahead,
        )
        bits = training.buffers.training_bits() << len(training.parameters)
        self.opened(*self._exchanged(opening, bits, []))

    def opened(self, gathered: list[Ticket], bitmap: int) -> None:
        """All have entered the next phase."""
        member = self._member
        before, training = member.group, member.training
        training.buffers.begin(bitmap >> len(training.parameters), kept=member.enrolment.has_eras)
        gathered = standings.heard_in_body(before, gathered)
        group = rounds.opened(before, gathered)
        if isinstance(group, Mismatch):
            raise self._refused(group)
        member.witness.opened(group, gathered)
        member.advance(group, gathered)
        if gathered[consistency.opening(gathered).index(True)].kind is Kind.TRAIN:
            self._adopt(before, gathered)
        plan = consistency.agreed_plan(group, gathered)
        if plan is not None:
            self._crossing.switch(plan)

    def end(self) -> None:
        """Announce that this script has ended; others may still be in the body of their last loop."""
        gathered, bitmap = self._exchanged(self._member.ticket(Kind.END, Flag.OPENING), 0, [])
        if gathered[consistency.opening(gathered).index(True)].kind is Kind.END:
            self.conclude(gathered)
        else:
            self.opened(gathered, bitmap)

    def conclude(self, gathered: list[Ticket]) -> None:
        """Settle an exchange in which scripts have ended."""
        mismatch = consistency.compared(self._member.group, gathered)
        if mismatch:
            raise self._refused(mismatch)
        self._member.advance(rounds.concluded(self._member.group, gathered))

    def _exchanged(self, ticket: Ticket, bitmap: int, sums: list[Tensor]) -> tuple[list[Ticket], int]:
        """Make an exchange and wait for it: the tickets of all members, and the union of their bitmaps."""
        summation = self._channels.exchange(self._member.packed(ticket, bitmap), sums)
        self._lookout.wait(summation)
        return self._channels.gathered(summation)

    def _refused(self, mismatch: Mismatch) -> Refused:
        reason = mismatch.reason
        if mismatch.parameters:
            reason = reason.format(parameters=self._member.training.trained.named(mismatch.parameters))
        return Refused(reason)

    def _adopt(self, before: GroupState, tickets: list[Ticket]) -> None:
        """Train the set of parameters that the group has agreed on, where this script has not run the code for it.

        That is so on a follower, and on a worker that has just become active.
        """
        member = self._member
        agreed, me = member.group.trained, before.roster.index(member.me)
        follows = bool(tickets[me].flags & Flag.FOLLOWING)
        voters = trained_set.voters(before, tickets) if before.open else []
        if me in voters or not (follows or before.open):
            return
        if before.open and not voters and not member.follows:
            # No member had a vote. The script of a checkpoint may have run that code; only its state shows it.
            return
        # A newcomer gets the set with the state, unless it changes meanwhile.
        if agreed == (before.trained if member.follows else member.training.look()):
            return
        lacking = member.training.adopt(agreed)
        if lacking and member.follows:
            member.reception.lacks(lacking)
        elif lacking:
            raise Drifted(
                f"{member.me} has taken no part in the rounds in which {member.training.trained.named(lacking)} came "
                "to be trained, and its optimizer lacks it: it starts again"
            )

    # -- settling

    def settle(self, following: Flag = Flag.NONE, *, in_body: bool = False) -> Settled:
        """Wait for the contribution in flight, decide, hand in the next one, apply.

        With functions of ``on_update`` these run before the next contribution is handed in.
        ``in_body``: called by ``step``, which returns True if the update is seen by all.
        """
        self._lookout.check_era()
        member, work, flight = self._member, self._member.work, self._member.work.flight
        assert flight is not None
        work.contribution.idle_s += self._lookout.wait(flight.summation)
        if flight.announced:
            self._handing.complete(flight)
            work.contribution.idle_s += self._lookout.wait(flight.summation)
        work.sum_s = flight.summation.seconds
        start = self._clock()
        handed_in, bitmap = self._tickets_of(flight)
        before = member.group
        appendices: list[Appendix] = []
        if before.phase.kind is Kind.EVALUATE:
            appendices = self._channels.appendices(flight.summation)
            handed_in = evaluation.read(handed_in, appendices)
        decision = rounds.settled(before, handed_in)
        if isinstance(decision, Mismatch):
            raise self._refused(decision)
        group, outcome = decision
        member.advance(group, handed_in)
        work.flight = None
        is_training = outcome.kind is Kind.TRAIN
        merged = is_training and self._merge(outcome, flight, bitmap)
        # A follower (closed) has taken part in the next exchange already, without a contribution.
        goes_on = not (outcome.ended or outcome.plan or flight.closed)
        followed = is_training and outcome.applied and self._hooks.follow_updates
        if goes_on and not followed and self._overlaps(before) and self._bounds.due_at_once():
            if flight.gathered is not None:
                # It followed this round: the buffer that it would hand in now is still to be applied.
                member.training.gradients.lose(flight.filled)
            self._handing.hand_in_or_remember(following, returning=True)
        if outcome.kind is Kind.EVALUATE:
            work.outputs.add(outcome.phase, [hand.queue for hand in before.phase.ledger.hands], appendices)
        rates = member.training.rates(outcome.factor) if followed else ()
        if is_training:
            member.training.sketches = drift.are_unlike(handed_in)
            self._apply(before, outcome, flight, bitmap)
            if not followed:
                self._weigh(outcome)
            self._adopt(before, handed_in)
            self._answer_for(outcome)
        member.witness.settled(member.group, outcome, handed_in, self.applied_rate)
        due = followed and self._is_followed_here(before, outcome)
        behind = is_training and not in_body and (outcome.seen or (followed and not due))
        if behind and not due:
            self._fall_behind(before)
        if outcome.ended:
            self._end_phase(outcome, handed_in, merged=merged)
        if outcome.plan is not None:
            self._switch_or_remember(outcome.plan, closed=flight.closed)
        work.cost_s = self._clock() - start
        if followed and not outcome.ended:
            member.undrained = self._is_undrained(merged)
        if due:
            self._hooks.note(outcome, rates, lambda: self._fall_behind(before) if behind else None)
        # A follower that has taken part in the next exchange already looks first at what that is.
        waits = flight.closed and outcome.plan is None and self._lookout.broken is None
        if (followed and not waits and self._follow_update()) or (outcome.plan is not None and not followed):
            self._hand_in_late(before, following)
        if followed and not member.follows:
            self._weigh(outcome)
        self._give_up_if_hopeless()
        return outcome

    def _is_followed_here(self, before: GroupState, outcome: Settled) -> bool:
        """Whether ``on_update`` runs here: this worker holds the whole state, and its script is in that loop."""
        script = self._member.script
        return not self._member.follows and script.depth == 1 and script.phase(before) == outcome.phase

    def _follow_update(self) -> bool:
        """Call the functions of ``on_update``; whether the era is still the same."""
        era = self._member.group.era
        if self._member.undrained and self._lookout.broken is not None:
            # They are called in the next era.
            return False
        self.follow_update()
        return self._member.group.era == era

    def follow_update(self) -> None:
        """Call them if they are due, after the buffers are made equal."""
        if self._hooks.due:
            self.finish_draining()
            self._hooks.call()

    def _tickets_of(self, flight: InFlight) -> tuple[list[Ticket], int]:
        if flight.gathered is None:
            gathered, bitmap = self._channels.gathered(flight.summation)
        else:
            self._channels.added_up(flight.summation)
            gathered, bitmap = flight.gathered
        if flight.postscript is None:
            return gathered, bitmap
        return postscripts.read(self._member.training.gradients.read(flight.postscript), gathered)

    def _overlaps(self, before: GroupState) -> bool:
        """Whether the next contribution was computed during the round just settled, and is handed in now."""
        return before.overlap and self._member.group.overlap

    def _switch_or_remember(self, plan: tuple[int, int], *, closed: bool) -> None:
        """Change to the planned era, which begins after this exchange."""
        with self._lookout.deferring():
            self._crossing.switch(plan, closed=closed)

    def _hand_in_late(self, before: GroupState, following: Flag) -> None:
        """Hand in the next contribution after the update: a new era has begun, or ``on_update`` was called first."""
        member = self._member
        going_on = self._lookout.broken is None and member.work.flight is None and member.group.open
        if going_on and self._overlaps(before) and self._bounds.due_at_once():
            self._handing.hand_in_or_remember(following, returning=False)

    def _fall_behind(self, before: GroupState) -> None:
        """Ask for the user's state: the script's code for this update runs on the workers that compute, not here."""
        member = self._member
        if not member.follows:
            member.users_state.fell_behind(before, member.group, leaving=member.standing is Standing.LEAVING)

    def _give_up_if_hopeless(self) -> None:
        if self._member.group.skipped_in_a_row >= rounds.MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLoss(
                f"{rounds.MAX_SKIPPED_IN_A_ROW} rounds in a row had an infinite or undefined loss or gradient: "
                "lower the learning rate, clip (clip_norm=1.0), or look for bad samples"
            )

    # -- applying

    def _merge(self, outcome: Settled, flight: InFlight, bitmap: int) -> bool:
        """Return to the plain weights and merge the model's buffers; whether all of them are up to date."""
        training = self._member.training
        training.back()
        merged = outcome.applied and flight.merged is not None
        if merged:
            training.buffers.merge(flight.merged, outcome.weight)
        return not training.buffers.grow(bitmap >> len(training.parameters)) and merged

    def _apply(self, before: GroupState, outcome: Settled, flight: InFlight, bitmap: int) -> None:
        """Make the update that the group has decided on."""
        member, training = self._member, self._member.training
        scheduled = (before.scheduled, member.group.scheduled)
        touched = bitmap & int.from_bytes(outcome.touched, "little") if outcome.touched else bitmap
        averaged = member.reception.averaged(
            before.exchange + 1, touched, outcome.factor, scheduled, finite=outcome.finite
        )
        self.last_trained = outcome
        self.applied_rate = training.rate * outcome.factor
        training.apply(outcome, flight.filled, bitmap, averaged, measures=outcome.measures)
        training.advance_schedule(*scheduled)

    def _weigh(self, outcome: Settled) -> None:
        """Take a digest of the weights if one is due.

        With an overlap the digest is taken after the next contribution is handed in, in every case: only digests of the
        same round are compared, and a follower's ticket for the next exchange cannot hold one of this round.
        """
        member = self._member
        if outcome.weighs and member.group.round == outcome.round:
            member.training.weigh(outcome.round, drift.turn(outcome.round, member.group.policy.watched))

    def _answer_for(self, outcome: Settled) -> None:
        """If this worker's weights differ from the others', take the state over like a newcomer, or leave.

        What it has computed for the next round is discarded.
        """
        member, differs = self._member, outcome.drift
        if differs is None or member.index not in differs.named:
            return
        again, healed = member.index in differs.expelled, member.enrolment.has_eras
        if again or not healed:
            error = self.expelled = Drifted(
                f"{member.me}'s weights differ from the others' after round {differs.round}"
                f"{', again' if again else ''}: "
                "look for bad memory, a non-deterministic kernel, or code that changes the weights on one worker only"
            )
            if not healed:
                raise error
        member.work.begin()
        member.training.cancel_look_ahead()
        member.training.gradients.discard()
        member.training.weighed, member.training.sketch = (0, 0), 0.0
        member.users_state.drop()
        member.reception.heal(member.group, differs.donor)

    def go_if_expelled(self) -> None:
        """Leave now: the others have settled the exchange that shows it, or never will."""
        if self.expelled is not None:
            raise self.expelled

    # -- the end of a phase

    def _end_phase(self, outcome: Settled, handed_in: list[Ticket], *, merged: bool) -> None:
        """The phase is over and applied: discard what a break cut off, and go back to the outer phase."""
        member, training = self._member, self._member.training
        if standings.somebody_came_along(member.group, handed_in):
            member.users_state.expect_at_end(outcome.phase)
        self._follow_result(outcome)
        if outcome.kind is Kind.TRAIN:
            if len(member.group.roster) > 1:
                training.gradients.discard()
                member.undrained = self._is_undrained(merged)
            if not member.undrained:
                training.buffers.drain()
        call = member.script.innermost
        if call is None or call.kind is not Kind.EVALUATE:
            # This script does not ask for what an ``evaluate`` has gathered.
            member.work.outputs.forget()
        member.work.leave_phase()

    def _is_undrained(self, merged: bool) -> bool:
        """Whether the buffers are still to be made equal: the round was skipped, or one changed for the first time."""
        member = self._member
        return len(member.group.roster) > 1 and bool(member.training.buffers.live) and not merged

    def _follow_result(self, outcome: Settled) -> None:
        """Step a schedule that follows results: those of an ``evaluate`` outside of loops, which all scripts call."""
        member = self._member
        top = not member.group.open and not member.group.past.ended_inside
        if outcome.kind is Kind.EVALUATE and top and outcome.result is not None:
            member.training.evaluated(outcome.result)
            member.reception.evaluated(member.group.exchange, outcome.result)

    def finish_draining(self) -> None:
        """Make the buffers equal on all workers at the end of a phase, if its last round has not done so."""
        if self._member.undrained:
            mine = self.own_buffers()
            self._exchanged(self._member.ticket(Kind.DRAIN, Flag.NONE), 0, [mine])
            self.drained(mine)

    def own_buffers(self) -> Tensor:
        """This worker's part of the exchange that makes the buffers equal (a drain)."""
        member = self._member
        leader = member.index == member.holders[0]
        mine = member.training.buffers.hand_in(0.0 if member.follows else 1.0, leader=leader)
        assert mine is not None
        return mine

    def drained(self, summed: Tensor) -> None:
        """The sum over the buffers of all workers is here: use their mean."""
        member = self._member
        member.training.buffers.merge(summed, float(len(member.holders)))
        member.undrained = False
        member.advance(rounds.drained(member.group))
        member.reception.drained(member.group.exchange)
