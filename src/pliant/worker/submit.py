"""Hand in: a contribution and its ticket are given to the group.

Question  How does what a worker has accumulated get into the group's sum, and what do the others learn of it?
Holds     Nothing is given away before it is known that the era goes on. With an overlap the worker accumulates in
          another buffer at once. If a synchronous round waits for nothing but a worker's last backward pass, its ticket
          is sent before the pass, each bucket of gradients follows when it is complete, and a postscript says what the
          ticket could not say yet. All workers sum the same buckets in the same order, however early one is.
Source    ABS-SGD (Zhou et al. 2023); docs/design/0015-parts.md; docs/protocol.md ("One round").
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from msgspec.structs import replace
from torch import Tensor

from pliant.core import evaluation, postscripts, trained_set
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.tensors.gradients import FlatGradients
from pliant.worker.collectives import Collectives
from pliant.worker.contribution import Contribution
from pliant.worker.in_flight import InFlight
from pliant.worker.poll import Poller
from pliant.worker.worker_state import WorkerState

BucketReady = Callable[[int], None]
"""called with the number of a bucket of gradients that is complete"""

_LATE = (
    "pliant: a gradient was added to after it had been summed (is a weight shared by segments that are computed again "
    "in the backward pass?): this round is passed over, and from now on gradients are summed after the pass"
)


class Submission:
    """What one worker gives to the group's sums."""

    def __init__(self, member: WorkerState, channels: Collectives, lookout: Poller, clock: Callable[[], float]) -> None:
        self._member = member
        self._channels = channels
        self._lookout = lookout
        self._clock = clock

    def hand_in(self, flags: Flag, *, returning: bool = False) -> None:
        """Start the summation of the contribution and begin the next one.

        ``returning``: the round just settled is still to be applied; its buffer is free after that.
        """
        if self._member.group.phase.kind is Kind.TRAIN:
            # From here on it has a vote, and its script is where those of the others are.
            self._member.training.settle_set()
        if self.changes_set:
            self._announce(flags)
            return
        if self.in_parts(self._member.group.trained):
            self._begin_parts(flags)
            self._complete_parts(usable=True)
            return
        member, work = self._member, self._member.work
        mine, phase = work.contribution, member.group.phase
        # First: it may find that the era is over, and nothing must have been given away then.
        ticket = member.ticket(phase.kind, flags)
        bitmap, squared_norm, flight = 0, 0.0, InFlight(None, None, mine.micro_batches)
        if phase.kind is Kind.TRAIN:
            member.training.gradients.lay_out(member.group.trained)
            bitmap, norm = self._inspected(mine)
            if norm is None:
                ticket = replace(ticket, flags=ticket.flags | Flag.NONFINITE)
            else:
                squared_norm = self._of_mean(norm, mine)
            overlap = member.group.overlap
            if overlap:
                member.training.follow_clip_norm(member.group.clip_norm)
                member.training.park(mine.weight, norm, bitmap)
            flight.filled, flight.merged = self.given_away(mine.weight, overlap=overlap, returning=returning)
            flight.point = mine.point(fresh=not returning)
        ticket = self._filled_in(ticket, mine, flight, squared_norm)
        appendix = evaluation.packed(mine.appendix()) if phase.kind is Kind.EVALUATE else b""
        packed = member.packed(replace(ticket, appendix=len(appendix)) if appendix else ticket, bitmap)
        work.begin()
        work.flight = flight
        if phase.kind is Kind.TRAIN:
            flight.summation = self._channels.exchange(packed, flight.sums)
        else:
            flight.summation = self._channels.exchange_appended(packed, appendix)

    def _filled_in(self, ticket: Ticket, mine: Contribution, flight: InFlight, squared_norm: float = 0.0) -> Ticket:
        """The ticket, with everything that is known of the contribution."""
        member, work, phase = self._member, self._member.work, self._member.group.phase
        flight.leaving = bool(ticket.flags & Flag.LEAVING)
        return replace(
            ticket,
            epoch=phase.epoch,
            length=phase.length,
            size=phase.sizes[member.index],
            ahead=phase.ahead[member.index],
            micro_batches=mine.micro_batches,
            samples=mine.samples,
            weight=mine.weight,
            busy_s=self._busy_s(mine),
            idle_s=mine.idle_s,
            sum_s=work.sum_s,
            cost_s=work.cost_s,
            loss_sum=mine.loss_total(),
            squared_norm=squared_norm,
            scale=member.training.scale,
            point=flight.point,
        )

    def _busy_s(self, mine: Contribution) -> float:
        return max(0.0, self._clock() - mine.start_s - mine.idle_s)

    def _of_mean(self, norm: float, mine: Contribution) -> float:
        """The squared norm of the mean gradient, where ``norm`` is that of the sum."""
        if mine.weight <= 0:
            return 0.0
        mean = self._member.training.reference / mine.weight
        return norm * mean * mean

    def _inspected(self, mine: Contribution) -> tuple[int, float | None]:
        """The bitmap of a contribution, and the squared norm of its sum; None if loss or norm is not finite."""
        bitmap = self._bitmap()
        # Without a group the norm is not computed: no other worker can have brought in a bad gradient.
        norm = (self._member.training.unscale() or 0.0) if mine.micro_batches else 0.0
        return bitmap, norm if math.isfinite(mine.loss_total() + norm) else None

    def _bitmap(self) -> int:
        """Which parameters have a gradient in this contribution, and which buffers have changed."""
        training = self._member.training
        training.check()
        present = training.gradients.present()
        training.check_parameters(present)
        return present | training.buffers.changed() << len(training.parameters)

    def given_away(
        self, weight: float, *, overlap: bool, returning: bool
    ) -> tuple[FlatGradients | None, Tensor | None]:
        """This worker's part of a round's sums: gradients and buffers; ``overlap``: it accumulates meanwhile."""
        member, training, merged = self._member, self._member.training, None
        if len(member.group.roster) > 1:
            merged = training.buffers.hand_in(weight, leader=member.index == member.holders[0])
        else:
            training.buffers.go_alone(kept=member.enrolment.has_eras)
        return training.gradients.hand_in(overlap=overlap, returning=returning), merged

    # -- other parameters than were agreed on

    @property
    def changes_set(self) -> bool:
        """Whether the contribution is for other parameters than were agreed on, and they may count at once.

        With an overlap the agreed layout stays in force for one more round, and this contribution is summed in it.
        """
        group = self._member.group
        waits = group.open and group.phase.kind is Kind.TRAIN and not group.overlap
        return bool(waits) and self._member.training.look() != group.trained

    def _announce(self, flags: Flag) -> None:
        """Hand in the ticket alone; what is summed depends on what the others train (``complete``)."""
        member, work, training = self._member, self._member.work, self._member.training
        mine = work.contribution
        training.check()
        ticket = member.ticket(Kind.TRAIN, flags)
        training.gradients.lay_out(ticket.wanted)
        flight = InFlight(None, None, mine.micro_batches)
        flight.announced, flight.point = True, mine.point(fresh=True)
        flight.bitmap, norm = self._inspected(mine)
        if norm is None:
            ticket = replace(ticket, flags=ticket.flags | Flag.NONFINITE)
        else:
            flight.squares = self._of_mean(norm, mine)
        ticket = self._filled_in(ticket, mine, flight, flight.squares)
        packed = member.packed(ticket, flight.bitmap)
        work.begin()
        work.flight = flight
        flight.weight = mine.weight
        flight.filled = training.gradients.hand_in(overlap=False, returning=False)
        flight.summation = self._channels.gather(packed)

    def complete(self, flight: InFlight) -> None:
        """The tickets of all members are known: start the sum over the parameters that all of them train."""
        member, training = self._member, self._member.training
        flight.gathered = gathered, _ = self._channels.gathered(flight.summation)
        layout = trained_set.layout(member.group, gathered)
        training.gradients.lay_out(layout)
        flight.filled, flight.merged = self.given_away(flight.weight, overlap=False, returning=False)
        if self.in_parts(layout):
            usable = not gathered[member.index].flags & Flag.NONFINITE
            flight.postscript = training.gradients.written(
                postscripts.written(
                    len(member.group.roster),
                    member.index,
                    training.bits,
                    busy_s=gathered[member.index].busy_s,
                    squared_norm=flight.squares if usable else None,
                    bitmap=flight.bitmap,
                )
            )
        flight.announced = False
        flight.summation = self._channels.add_up(flight.sums)

    def hand_in_or_remember(self, flags: Flag, *, returning: bool) -> None:
        """Hand in. If that fails, the settled round is still applied, and ``step`` still reports it."""
        with self._lookout.deferring():
            self.hand_in(flags, returning=returning)

    # -- in buckets

    def in_parts(self, layout: bytes) -> bool:
        """Whether gradients of this layout are summed in buckets: only their own backward pass overlaps the sum."""
        group = self._member.group
        waits = group.open and group.phase.kind is Kind.TRAIN and not group.overlap
        return bool(waits) and len(group.roster) > 1 and self._member.training.gradients.parts(layout) > 1

    def hand_in_while(self, compute: Callable[[BucketReady | None], None]) -> None:
        """Hand in while ``compute`` makes the contribution's last gradients: each bucket when it is complete.

        What is accumulated so far, and the last loss, are counted already.
        """
        with self._lookout.deferring():
            self._begin_parts(Flag.NONE)
        if self._lookout.broken is not None:
            compute(None)
            return
        try:
            compute(self._give)
        except Exception:
            # The script may go on after it: the others must not wait for gradients that do not come.
            self._complete_or_remember(usable=False)
            raise
        late = self._member.training.gradients.late
        if late:
            print(_LATE, file=sys.stderr, flush=True)
        self._complete_or_remember(usable=not late)

    def _begin_parts(self, flags: Flag) -> None:
        """Send the ticket of the contribution; its buckets follow."""
        member, work = self._member, self._member.work
        mine = work.contribution
        # Raises if the script has spoilt the gradients, before any other worker is told.
        member.training.check()
        member.training.gradients.lay_out(member.group.trained)
        ticket = member.ticket(Kind.TRAIN, flags)
        flight = InFlight(None, None, mine.micro_batches)
        flight.point = mine.point(fresh=True)
        packed = member.packed(self._filled_in(ticket, mine, flight))
        flight.summation = self._channels.begin(packed)
        flight.filled = member.training.gradients.hand_in(overlap=False, returning=False)
        work.flight = flight

    def _give(self, part: int) -> None:
        """A bucket is complete: start its sum. If that fails the era is over, which ``step`` will report."""
        with self._lookout.deferring():
            self._add_part(part)

    def _add_part(self, part: int) -> None:
        flight = self._member.work.flight
        assert flight is not None and flight.filled is not None
        if self._lookout.broken is None and part == flight.given:
            flight.given += 1
            flight.squared_norm += self._member.training.unscale_part(part)
            self._channels.go_on(flight.summation, [flight.filled.parts[part]])

    def _complete_or_remember(self, *, usable: bool) -> None:
        if self._lookout.broken is not None:
            # The whole contribution counts as handed in, and is lost.
            self._member.work.begin()
            return
        with self._lookout.deferring():
            self._complete_parts(usable=usable)

    def _complete_parts(self, *, usable: bool) -> None:
        """All gradients are complete: give the remaining buckets, the buffers and the postscript."""
        member, work, training = self._member, self._member.work, self._member.training
        mine, flight = work.contribution, work.flight
        assert flight is not None and flight.filled is not None
        # From here on it counts as handed in, whatever fails.
        work.begin()
        bitmap = self._bitmap() if usable else 0
        for part in range(flight.given, len(flight.filled.parts)):
            self._add_part(part)
        usable = usable and math.isfinite(mine.loss_total() + flight.squared_norm)
        flight.merged = training.buffers.hand_in(mine.weight, leader=member.index == member.holders[0])
        flight.postscript = training.gradients.written(
            postscripts.written(
                len(member.group.roster),
                member.index,
                training.bits,
                busy_s=self._busy_s(mine),
                squared_norm=self._of_mean(flight.squared_norm, mine) if usable else None,
                bitmap=bitmap,
            )
        )
        self._channels.go_on(flight.summation, flight.behind, last=True)
