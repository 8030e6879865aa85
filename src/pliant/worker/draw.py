"""What a worker may draw of its hand.

Question  Which micro-batch comes next, and when is the contribution complete?
Holds     A worker draws only micro-batches that it was granted, no more than the group allows for the contribution in
          progress, and none once it leaves.
Source    docs/design/0002-rounds.md ("Allowances"); docs/protocol.md ("One round").
"""

from __future__ import annotations

from collections.abc import Callable

from pliant.core import allowance
from pliant.core.allowance import Allowance
from pliant.core.ledger import MicroBatch, samples_of
from pliant.worker.worker_state import WorkerState


class DrawLimits:
    """Compares the group's allowance with what this worker has accumulated."""

    def __init__(self, member: WorkerState, clock: Callable[[], float]) -> None:
        self._member = member
        self._clock = clock

    def _allowance(self) -> Allowance:
        return allowance.allowance(self._member.group, self._member.index, self._member.work.in_flight)

    def next(self) -> MicroBatch | None:
        """The micro-batch that may be added to the contribution now, if any."""
        member = self._member
        group, work = member.group, member.work
        if member.leaving or (work.flight is not None and not group.overlap):
            return None
        hand = group.phase.ledger.hands[member.index]
        drawn = work.drawn
        if drawn >= hand.granted:
            return None
        bounds, mine = self._allowance(), work.contribution
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

    def upcoming(self) -> tuple[MicroBatch, ...]:
        """The micro-batches dealt to this worker that it has not drawn yet."""
        group = self._member.group
        if not group.open:
            return ()
        return group.phase.ledger.hands[self._member.index].queue[self._member.work.drawn :]

    def complete(self) -> bool:
        """Whether the contribution may be handed in: its share is done; with an open batch, it is long enough."""
        if self._member.leaving:
            return True
        bounds, mine = self._allowance(), self._member.work.contribution
        if bounds.micro_batches is not None:
            return mine.micro_batches >= bounds.micro_batches
        if mine.micro_batches and self._clock() - mine.start_s - mine.idle_s >= bounds.seconds:
            return True
        return self.next() is None

    def last(self) -> bool:
        """Whether the micro-batch that was just drawn completes the contribution."""
        if self._member.leaving or self._member.work.flight is not None:
            return False
        share = self._allowance().micro_batches
        return share is not None and self._member.work.contribution.micro_batches >= share

    def due_at_once(self) -> bool:
        """Whether the next contribution is handed in as its round begins. Not if its share has just grown."""
        member = self._member
        if not member.speaks:
            return False
        bounds = allowance.allowance(member.group, member.index, 0)
        share = bounds.micro_batches
        return member.leaving or share is None or member.work.contribution.micro_batches >= share
