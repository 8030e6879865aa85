"""What a script reads of its run.

Question  Which values does ``Run`` show, and where does each come from?
Holds     Reading changes nothing, but that ``grad_norm`` is taken from the first time on that it is asked for. All but
          this worker's own name, its leadership and its ``loss`` are the same on all workers after the same round.
Source    docs/guide/reference.md ("Facts").
"""

from __future__ import annotations

import math

from pliant import settings
from pliant.core.group_state import GroupState
from pliant.core.tickets import Kind
from pliant.micro_batches import MicroBatches
from pliant.types import WorkerId
from pliant.worker.script.training_loop import TrainingLoop


class RunFacts:
    """The properties of ``Run``."""

    def __init__(self, worker: TrainingLoop, resolved: settings.Settings, calls: MicroBatches) -> None:
        self._worker = worker
        self._settings = resolved
        self._calls = calls

    @property
    def _group(self) -> GroupState:
        return self._worker.group

    @property
    def worker(self) -> WorkerId:
        """This worker's name."""
        return self._worker.me

    @property
    def roster(self) -> tuple[WorkerId, ...]:
        """The workers of the era, the leader first."""
        return self._group.roster

    @property
    def era(self) -> int:
        """The number of the period with this roster."""
        return self._group.era

    @property
    def round(self) -> int:
        """Rounds settled so far."""
        return self._group.round

    @property
    def samples(self) -> int:
        """Training samples of the group that went into settled rounds."""
        return self._group.samples

    @property
    def updates(self) -> int:
        """Updates of the weights so far: rounds that were neither skipped nor lost."""
        return self._group.updates

    @property
    def batch(self) -> int:
        """Samples of the last round (before the first one: the reference batch)."""
        last = self._worker.last_trained
        return last.batch if last else self._settings.policy.batch

    @property
    def delay(self) -> int:
        """1 while the next gradients are computed beside the last sum, else 0; what ``"auto"`` has chosen."""
        return int(self._group.overlaps(Kind.TRAIN))

    @property
    def rate(self) -> float:
        """The learning rate of the last update, first parameter group."""
        return self._worker.applied_rate

    @property
    def noise_scale(self) -> float | None:
        """The batch, in samples, at which half of the gradient's square is noise: up to it more samples pay.

        None until rounds with two or more contributors have shown it; infinite where no signal can be told from noise.
        """
        return self._group.noise.scale

    @property
    def efficiency(self) -> float | None:
        """What a sample brings the training on, beside one in a round of the reference batch; None while unknown."""
        return self._group.efficiency

    @property
    def scheduled(self) -> float:
        """The samples that the schedule has counted: ``samples``, or with AdaScale what they were worth."""
        return self._group.scheduled

    @property
    def loss(self) -> float:
        """The group's mean loss in the last round; NaN before this worker's first one, and where it was not finite."""
        last = self._worker.last_trained
        return math.nan if last is None or last.loss is None else last.loss

    @property
    def grad_norm(self) -> float:
        """The norm of the mean gradient of the last update, before clipping; NaN where it was not taken.

        It is taken with every update where ``clip_norm`` is set or ``on_update`` is used, and else from the first time
        on that it is asked for.
        """
        self._worker.training.takes_norm = True
        return self._worker.training.grad_norm

    @property
    def clip_norm(self) -> float | None:
        """The bound on the norm of the group's gradient.

        May be set, by all scripts alike: it is in force from the first round on to which all of them bring it.
        """
        return self._worker.clip_norm

    @clip_norm.setter
    def clip_norm(self, bound: float | None) -> None:
        settings.check_clip_norm(bound)
        self._worker.set_clip_norm(bound)

    @property
    def is_leader(self) -> bool:
        """Whether this worker prints and writes for the group; nobody does it a second time after a resume."""
        return self._worker.leads

    @property
    def progress(self) -> float:
        """Epochs done, as a float."""
        return self._calls.epoch + (self.samples - self._calls.before) / self._calls.length
