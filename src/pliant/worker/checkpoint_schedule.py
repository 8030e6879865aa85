"""A worker's part in the checkpoints of its run.

Question  Does this worker write one now, and how does it go on from one?
Holds     One member writes, where its script is at a place that another one can get to by itself. Who goes on from a
          checkpoint holds its state alone; the user's own state is installed when the script is in the call it is of.
Source    docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from pliant.core import regrouping
from pliant.core.group_state import Standing
from pliant.core.membership.roster import CHECKPOINTS_KEPT
from pliant.core.tickets import Kind
from pliant.errors import UsageError
from pliant.tensors.checkpoint import Manifest
from pliant.worker.checkpoint_writer import CheckpointWriter
from pliant.worker.elastic.catch_up import install_state
from pliant.worker.script.calls import top_level_calls
from pliant.worker.worker_state import WorkerState


class CheckpointSchedule:
    """Between the worker's loop and what is saved."""

    def __init__(self, member: WorkerState, saving: CheckpointWriter | None, carried: Mapping[str, Any] | None) -> None:
        self._member = member
        self.saving = saving
        """None: the script asks for none"""
        self._carried: Mapping[str, Any] = carried or {"state": {}}
        """what the script has given besides model and optimizer"""
        self.users_state: Mapping[str, Any] | None = None
        """the user's state of a checkpoint, until the script is in the call that it is of"""
        self._call = 0

    def save(self, *, drawn: bool = False) -> None:
        """Begin a checkpoint if one is due and this worker writes it; tell of one that is complete.

        ``drawn``: the script computes a micro-batch next. The copy has that time before the next update.
        """
        saving, member = self.saving, self._member
        if saving is None:
            return
        link = member.eras.place.link if member.eras is not None else None

        def tell(manifest: Manifest) -> None:
            if link is not None:
                link.saved(manifest.name, manifest.records, manifest.round)
            else:
                saving.tidy([name for name in reversed(saving.names()) if name <= manifest.name][:CHECKPOINTS_KEPT])

        saving.look(member.witness.certain, tell)
        if link is not None:
            saving.tidy(link.mailbox.named)
        if not saving.is_due or not self._writes():
            return
        if saving.prepare(member.training) and (drawn or not self._draws):
            saving.save(member.training, self._carried, member.handed)

    @property
    def _draws(self) -> bool:
        """Whether this worker will draw a micro-batch of the training phase that is open."""
        member = self._member
        return bool(member.group.open) and member.group.phase.kind is Kind.TRAIN and member.speaks

    def _writes(self) -> bool:
        """Whether this worker writes the checkpoints, and its script is where another one can get by itself."""
        member, group = self._member, self._member.group
        first = next((m for m, standing in enumerate(group.standings) if standing is Standing.ACTIVE), None)
        whole = self.users_state is None and (member.eras is None or member.eras.holds_all)
        if len(group.roster) == 1 and member.work.contribution.micro_batches:
            # Alone the model's buffers follow every forward pass, and those of this round will be made again.
            return False
        alike = len(group.open) == 1 and not group.phase.inner and member.script.is_at(group)
        return whole and first == member.index and alike

    def restore(self, names: Sequence[str], last_round: int) -> Manifest:
        """Hold the state of the first of these checkpoints that is whole, alone."""
        if self.saving is None:
            raise UsageError("the run goes on from a checkpoint, but this script calls join without checkpoint=…")
        member = self._member
        found = self.saving.restored(names, member.training, self._carried, member.group)
        limits = regrouping.limits(member.group)
        restored = regrouping.restored(found.handed.group, member.me, last_round)
        member.enter(replace(restored, **limits), undrained=found.handed.undrained)
        self.users_state, self._call = found.users_state, top_level_calls(member.group)
        member.work.forget(len(member.group.open))
        return found.manifest

    def install_users_state(self) -> None:
        """The script goes on: give it its own state back, if it is where that is of."""
        if self.users_state is not None and self._member.script.calls >= self._call:
            restored, self.users_state = self.users_state, None
            install_state(self._carried["state"], restored)
            # Together with it: which layers its code had frozen and unfrozen by then.
            self._member.training.settle_set()

    def forget(self) -> None:
        """This worker does not hold the state any more."""
        self.users_state = None
        if self.saving is not None:
            self.saving.forget()

    def end(self) -> None:
        """Alone: the script has come to its end, and the next one begins anew."""
        if self.saving is not None:
            self.saving.end()
