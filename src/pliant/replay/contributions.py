"""The workers' contributions, as a replay computes them.

Question  What has been computed of each contribution, and which update do all of them make?
Holds     Every segment is computed at the same point as in the run: with its worker's view of the buffers, and at the
          plain weights or at the look-ahead point of what that worker had handed in. A contribution is compared once,
          when all of it is computed.
Source    docs/design/0012-replay.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from pliant.core.journal.trace import Segment, TracedContribution, TracedRound
from pliant.core.rounds import GroupState
from pliant.core.tickets import Flag
from pliant.errors import Diverged
from pliant.replay.buffers import BufferHandIn, BufferViews
from pliant.replay.compare import Comparison
from pliant.tensors.gradients import FlatGradients
from pliant.worker.training import Training


@dataclass(slots=True)
class _ReplayedContribution:
    """A contribution as it is computed here."""

    buffer: FlatGradients | None = None
    weight: float = 0.0
    loss: Tensor | float = 0.0
    norm: float | None = 0.0
    present: int = 0
    scale: float = 1.0
    """the loss scale that the gradients in the buffer contain"""
    merged: Tensor | None = None
    finished: bool = False
    left_out: bool = False
    """a backward pass has failed"""


class ReplayedContributions:
    """The contributions that no update has used yet."""

    def __init__(self, training: Training, views: BufferViews, comparison: Comparison) -> None:
        self._training = training
        self._views = views
        self._comparison = comparison
        self._takes: dict[TracedContribution, _ReplayedContribution] = {}
        self._spare: list[FlatGradients] = []
        self._weights_before: list[Tensor] = []
        """the weights before the last update, kept only if a look-ahead may start from them"""

    def add(self, part: TracedContribution, weight: float, loss_sum: Tensor | float) -> None:
        """Count a micro-batch that was computed; its gradients are in the buffer."""
        take = self._takes[part]
        take.weight += weight
        take.loss = take.loss + loss_sum

    def leave_out(self, part: TracedContribution) -> None:
        """Drop what was computed of a contribution, because a backward pass of it has failed."""
        take = self._takes[part]
        take.weight, take.loss, take.left_out = 0.0, 0.0, True
        self._training.gradients.discard()

    def forget(self) -> None:
        """Drop all contributions that were computed and not used."""
        for take in self._takes.values():
            self._let_go(take)
        self._takes.clear()

    # -- evaluate

    def begin_evaluating(self, part: TracedContribution) -> None:
        """Begin a contribution to an ``evaluate``: sums and counts, no gradients."""
        self._takes.setdefault(part, _ReplayedContribution())

    def evaluated(self, part: TracedContribution) -> tuple[float, float]:
        """The sum and the count of such a contribution, which is complete."""
        take = self._takes.pop(part, _ReplayedContribution())
        return float(take.loss), take.weight

    # -- training

    def begin(self, stretch: Segment, group: GroupState) -> None:
        """Put the model at the point where this segment was computed."""
        part, training = stretch.part, self._training
        take = self._takes.get(part)
        begun = take is not None
        if take is None:
            take = self._takes[part] = _ReplayedContribution(scale=training.scale)
        before = None if begun else part.before
        if before is not None and (before.round == 0 or before.round > group.round):
            # The previous contribution was handed in before this one was begun.
            self._finish(before, group)
        take.buffer = take.buffer or self._blank(training.look())
        self._views.show(part.worker)
        training.back()
        if stretch.ahead:
            self._go_ahead(before, take.buffer, group)
        if take.scale != training.scale:
            # The loss scale has changed since the last segment, as it did on the worker.
            take.buffer.scale(training.scale / take.scale)
            take.scale = training.scale
        training.gradients.fill(take.buffer, begun=begun)
        if before is not None and before.round == 0:
            self._let_go(self._takes.pop(before))

    def apply(self, item: TracedRound, group: GroupState) -> float:
        """Make the update of a round, starting from ``group``; returns the learning rate."""
        training, outcome, record = self._training, item.outcome, item.record
        training.back()
        takes = [
            _ReplayedContribution(finished=True)
            if part.line is None or part.line.flags & Flag.FOLLOWING
            else self._finish(part, group)
            for part in item.parts
        ]
        present = 0
        for take in takes:
            present |= take.present
        self._merge(item, takes)
        if training.lookahead is not None and training.lookahead.repeats:
            self._weights_before = [p.detach().clone() for p in training.parameters]
        rate = training.rate * outcome.factor
        self._comparison.rate(rate, record)
        summed = self._summed(takes, outcome.layout)
        training.gradients.fill(summed, begun=True)
        training.apply(outcome, summed, present, measures=outcome.measures)
        training.advance_schedule(item.before.scheduled, item.group.scheduled)
        self._comparison.measure(training.measured, record)
        for part, take in zip(item.parts, takes, strict=True):
            self._takes.pop(part, None)
            self._let_go(take)
        return rate

    def _go_ahead(self, before: TracedContribution | None, blank: FlatGradients, group: GroupState) -> None:
        """Look ahead as this worker did, using the contribution that it had handed in before."""
        training = self._training
        if before is None or training.lookahead is None:
            raise Diverged(f"round {group.round}: the run looked ahead where the script has nothing to look from")
        handed = self._takes.get(before, _ReplayedContribution())
        training.gradients.fill(handed.buffer or blank, begun=True)
        training.park(handed.weight, handed.norm, handed.present)
        if not before.point.fresh and self._weights_before:
            training.lookahead.depart_from(self._weights_before)
        training.look_ahead(group.rate.factor)

    def _finish(self, part: TracedContribution, group: GroupState) -> _ReplayedContribution:
        """Close a contribution, all of which is computed, and compare it with its ticket."""
        take = self._takes.setdefault(part, _ReplayedContribution())
        if take.finished:
            return take
        take.finished = True
        training = self._training
        loss = float(take.loss)
        norm = 0.0
        if take.buffer is not None:
            training.gradients.fill(take.buffer, begun=True)
            # In the layout in which it was handed in: with an overlap that is the one agreed on before.
            training.gradients.lay_out(group.trained if group.overlap else training.look())
            take.buffer = training.gradients.filling
            assert take.buffer is not None
            take.present = training.gradients.present()
            take.buffer.scale(1.0 / take.scale)
            norm = take.buffer.squared_norm()
        take.norm = norm if math.isfinite(loss + norm) else None
        if take.left_out and part.line is not None and part.line.flags & Flag.NONFINITE:
            # Its ticket had been sent already when the backward pass failed.
            take.weight, loss, take.norm = part.line.weight, part.line.loss_sum, None
        if part.line is not None:
            take.merged = self._views.handed_in(group, part.worker, take.weight)
        self._comparison.ticket(part, take.weight, loss, take.norm, training.reference)
        return take

    def _merge(self, item: TracedRound, takes: list[_ReplayedContribution]) -> None:
        """Merge the buffers of all workers."""
        handed = [
            BufferHandIn(
                worker,
                take.merged,
                computed=take.buffer is not None,
                follows=part.line is not None and bool(part.line.flags & Flag.FOLLOWING),
            )
            for worker, part, take in zip(item.before.roster, item.parts, takes, strict=True)
        ]
        self._views.merge(item.before, handed, item.outcome)

    def _summed(self, takes: list[_ReplayedContribution], layout: bytes) -> FlatGradients:
        """The sum of all contributions, in the buffer of the first."""
        parameters = self._training.parameters
        for take in takes:
            if take.buffer is not None and layout:
                take.buffer = take.buffer.laid_out_for(parameters, layout)
        buffers = [take.buffer for take in takes if take.buffer is not None]
        if not buffers:
            return self._blank(layout or self._training.look())
        for other in buffers[1:]:
            for into, flat in zip(buffers[0].flats, other.flats, strict=True):
                into.add_(flat)
        return buffers[0]

    def _blank(self, members: bytes) -> FlatGradients:
        """An empty buffer for these parameters."""
        self._spare = [buffer for buffer in self._spare if buffer.members == members]
        return self._spare.pop() if self._spare else FlatGradients(self._training.parameters, members)

    def _let_go(self, take: _ReplayedContribution) -> None:
        """Reuse the buffer of a contribution whose gradients are not needed any more."""
        if take.buffer is not None:
            take.buffer.clear()
            self._spare.append(take.buffer)
