"""The model's buffers as each worker saw them, in the one model of a replay.

Question  Which running statistics did this worker see, and what became of them at the end of the round?
Holds     The model shows the view of one worker at a time. ``tensors.buffers`` treats each view as it did in the run.
Source    docs/design/0012-replay.md; docs/design/0004-numerics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pliant.core.group_state import GroupState, Standing
from pliant.core.rounds import Settled
from pliant.tensors.buffers import ModelBuffers
from pliant.types import WorkerId
from pliant.worker.training import Training


@dataclass(slots=True)
class _View:
    buffers: ModelBuffers
    values: list[Tensor]
    changed: int = 0


@dataclass(frozen=True, slots=True)
class BufferHandIn:
    """What one member hands in to a round's sums."""

    worker: WorkerId
    merged: Tensor | None
    """its share of the merged buffers"""
    computed: bool
    follows: bool


def holders(group: GroupState) -> list[WorkerId]:
    """Members that hold the state; the first one is the leader."""
    pairs = zip(group.roster, group.standings, strict=True)
    return [worker for worker, standing in pairs if standing is not Standing.FOLLOWING]


class BufferViews:
    """The views of all workers that hold the state."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        self._model = model
        self._training = training
        self._live = 0
        self._was_merged = False
        """whether the last round has merged the buffers"""
        self._shown = _View(training.buffers, training.buffers.held())
        self._known: dict[WorkerId, _View] = {}

    def change(self, group: GroupState) -> None:
        """Follow a change of the roster."""
        self._known = {worker: self._known[worker] for worker in holders(group) if worker in self._known}
        if group.exchange == 0:
            # Nothing was done yet: all workers hold what the leader holds.
            self._known = {worker: self._fresh() for worker in group.roster}
        elif not self._known:
            self._known = {group.roster[0]: self._shown}

    def begin_anew(self, workers: Sequence[WorkerId], *, shown: bool) -> None:
        """These workers have read the state from a checkpoint; ``shown``: the model shows it already."""
        self._known = {worker: self._shown if shown else self._fresh() for worker in workers}
        if not shown:
            self.show(workers[0])

    def show(self, worker: WorkerId) -> None:
        """Show this worker's values in the model."""
        self._show(self._of(worker))

    def handed_in(self, group: GroupState, worker: WorkerId, weight: float) -> Tensor | None:
        """This worker's share of the merged buffers; None in a group of one, which merges nothing."""
        view = self._of(worker)
        self._show(view)
        if len(group.roster) < 2:
            view.buffers.go_alone(kept=True)
            return None
        return view.buffers.hand_in(weight, leader=worker == holders(group)[0])

    def begin(self, bits: int) -> None:
        """A loop begins; merge the buffers of the bitmap ``bits`` from now on.

        A spare takes part in the first round already: it hands in what it holds now.
        """
        shown = self._shown
        if bits & ~self._live:
            for view in (*self._known.values(), shown):
                self._show(view)
                view.buffers.begin(bits, kept=True)
                view.buffers.hand_in(0.0, leader=False)
            self.grow(bits)

    def grow(self, bits: int) -> bool:
        """Merge the buffers of the bitmap ``bits``, too, from now on; returns whether there are new ones."""
        new = bits & ~self._live
        self._live |= bits
        for view in (*self._known.values(), self._shown):
            view.buffers.live = self._live
        return bool(new)

    def merge(self, group: GroupState, handed: Sequence[BufferHandIn], outcome: Settled) -> None:
        """Put the merged buffers of a round into every view."""
        if not len(self._shown.buffers):
            return
        for worker in holders(group):
            # Every worker that holds the state takes part, whether it has computed anything or not.
            self._of(worker)
        changed = 0
        parts: list[Tensor] = []
        for each in handed:
            view = self._known.get(each.worker)
            if view is None:
                continue
            if each.computed:
                changed |= view.changed | (view.buffers.changed() if view is self._shown else 0)
            merged = each.merged
            if each.follows and each.worker == holders(group)[0]:
                # It adds nothing to the means, but integer buffers are taken from the leader.
                merged = self.handed_in(group, each.worker, 0.0)
            if merged is not None:
                parts.append(merged)
        self._was_merged = outcome.applied and bool(parts)
        members = [self._known[each.worker] for each in handed if each.worker in self._known]
        if self._was_merged:
            summed = torch.stack(parts).sum(0)
            for view in members:
                self._show(view)
                view.buffers.merge(summed, outcome.weight)
        if self.grow(changed):
            self._was_merged = False
        for view in members if self._live else ():
            # A follower hands in what it holds now; a worker that computes will hand in something newer.
            self._show(view)
            view.buffers.hand_in(0.0, leader=False)

    def drain(self, group: GroupState) -> None:
        """Make the buffers of all views equal at the end of a loop."""
        if not len(self._shown.buffers) or not self._live:
            return
        known = [self._of(worker) for worker in holders(group)]
        if self._was_merged or len(group.roster) < 2:
            for view in known:
                self._show(view)
                view.buffers.drain()
        else:
            parts: list[Tensor] = []
            for view in known:
                self._show(view)
                part = view.buffers.hand_in(1.0, leader=view is known[0])
                parts += [] if part is None else [part]
            if parts:
                summed = torch.stack(parts).sum(0)
                for view in known:
                    self._show(view)
                    view.buffers.merge(summed, float(len(parts)))
        self._show(known[0])

    # -- one view

    def _of(self, worker: WorkerId) -> _View:
        if worker not in self._known:
            self._known[worker] = self._fresh()
        return self._known[worker]

    def _fresh(self) -> _View:
        """A new view with the group's values."""
        buffers = ModelBuffers(self._model)
        buffers.live = self._live
        values = self._shown.buffers.merged()
        view = _View(buffers, values)
        if len(buffers) and self._live:
            held = self._shown
            self._show(view)
            buffers.adopt(dict(enumerate(values)), merged=False)
            buffers.hand_in(0.0, leader=False)
            self._show(held)
        return view

    def _show(self, view: _View) -> None:
        shown = self._shown
        if view is shown or not len(view.buffers):
            return
        shown.changed |= shown.buffers.changed()
        shown.values = shown.buffers.held()
        view.buffers.show(view.values)
        self._shown = view
        self._training.buffers = view.buffers
