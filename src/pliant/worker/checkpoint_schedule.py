"""A worker's part in the checkpoints of its run.

Question  Does this worker write a checkpoint now, and how does it go on from one?
Holds     One member writes, when its script is at a position that another script can reach by itself. A worker that
          goes on from a checkpoint is the only one to hold its state; the user's own state is installed when the script
          reaches the call that the checkpoint was taken in.
Source    docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from pliant.core import regrouping
from pliant.core.group_state import Standing
from pliant.core.tickets import Kind
from pliant.tensors.checkpoint import Manifest
from pliant.worker.checkpoint_writer import CheckpointWriter, NoCheckpoints
from pliant.worker.script.calls import top_level_calls
from pliant.worker.worker_state import WorkerState


class CheckpointSchedule:
    """Decides when this worker writes a checkpoint, and restores one."""

    def __init__(self, member: WorkerState, saving: CheckpointWriter | None, carried: Mapping[str, Any]) -> None:
        """``carried``: what the script has given besides model and optimizer."""
        self._member = member
        self.saving = saving if saving is not None else NoCheckpoints()
        self._carried = carried

    def save(self, *, drawn: bool = False) -> None:
        """Begin a checkpoint if one is due and this worker writes it; report one that is complete.

        ``drawn``: the script computes a micro-batch next, so that the copy has that time before the next update.
        """
        saving, member = self.saving, self._member

        def tell(manifest: Manifest) -> None:
            member.enrolment.saved(manifest.name, manifest.records, manifest.round, saving.names)

        saving.look(member.witness.certain, tell)
        saving.tidy(member.enrolment.checkpoints)
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
        """Whether this worker writes the checkpoints, and another script can reach this position by itself."""
        member, group = self._member, self._member.group
        first = next((m for m, standing in enumerate(group.standings) if standing is Standing.ACTIVE), None)
        if len(group.roster) == 1 and member.work.contribution.micro_batches:
            # With one worker the model's buffers follow every forward pass, and this round's passes will be repeated.
            return False
        alike = len(group.open) == 1 and not group.phase.inner and member.script.is_at(group)
        return member.users_state.is_whole and first == member.index and alike

    def restore(self, names: Sequence[str], last_round: int) -> Manifest:
        """Restore the first of these checkpoints that is whole; this worker is its only holder."""
        member = self._member
        found = self.saving.restored(names, member.training, self._carried, member.group)
        limits = regrouping.limits(member.group)
        restored = regrouping.restored(found.handed.group, member.me, last_round)
        member.enter(replace(restored, **limits), undrained=found.handed.undrained)
        member.users_state.restore(found.users_state, top_level_calls(member.group))
        member.work.forget(len(member.group.open))
        return found.manifest

    def forget(self) -> None:
        """This worker does not hold the state any more."""
        self._member.users_state.forget_restored()
        self.saving.forget()

    def end(self) -> None:
        """Without a coordinator: the script has ended, and the next run begins anew."""
        self.saving.end()
