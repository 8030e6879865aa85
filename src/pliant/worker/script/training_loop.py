"""What a script's calls need of the loop that trains.

Question  Which questions and orders do ``Run`` and ``Session`` have for a worker?
Holds     Everything that they use is named here. ``worker.loop.Worker`` does it for a run, ``replay.Replayer`` for a
          recorded one; ``tests/contract/test_training_loop.py`` holds both to it.
Source    docs/protocol.md ("One round", "Phases, break, refusals").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from pliant.core.group_state import FinishedPhase, GroupState
from pliant.core.ledger import MicroBatch
from pliant.core.rounds import Settled
from pliant.core.tickets import Kind, Sums
from pliant.types import WorkerId
from pliant.worker.script.calls import ScriptCall
from pliant.worker.script.hooks import Registered
from pliant.worker.submit import BucketReady


class ScriptTraining(Protocol):
    """What a script's calls need of the user's model and optimizer (``worker.training.Training``)."""

    takes_norm: bool
    """whether the norm of the gradient is taken with every update"""

    @property
    def grad_norm(self) -> float:
        """The norm of the last update's mean gradient, before clipping; NaN where it was not taken."""
        ...

    @property
    def stepping(self) -> bool:
        """Whether an update is being made."""
        ...

    @property
    def ahead(self) -> bool:
        """Whether the model is at a look-ahead point."""
        ...

    def backward(self, loss: Tensor, weight: float, ready: BucketReady | None = None) -> None:
        """Add ``weight`` times the gradient of ``loss`` to the contribution."""
        ...

    def back(self) -> None:
        """Return to the plain weights."""
        ...

    def plain(self) -> AbstractContextManager[None]:
        """Show the plain weights and the merged buffers for a while."""
        ...

    def end_epoch(self, epoch: int) -> None:
        """Epoch ``epoch`` is over: a schedule that counts epochs is advanced."""
        ...

    def explain(self, error: BaseException) -> None:
        """Add a note on what to do to an error that ends the script, where that is known."""
        ...


class TrainingLoop(Protocol):
    """One worker, as its script sees it.

    The order of calls: ``open``; then, until ``draw`` returns None, ``draw``, ``contribute`` or ``contributed``,
    ``step``; then ``left``. A loop that is left early is ended by ``abandon`` in place of ``left``. An ``evaluate`` may
    be opened inside a training phase right after ``step`` has returned True. ``end`` and ``close`` come last.
    """

    # -- facts

    @property
    def me(self) -> WorkerId:
        """This worker's name."""
        ...

    @property
    def group(self) -> GroupState:
        """The replicated state, a value: the next one takes its place when something is settled."""
        ...

    @property
    def training(self) -> ScriptTraining:
        """The user's model and optimizer."""
        ...

    @property
    def hooks(self) -> Registered:
        """What the script has registered, and which calls are refused in there."""
        ...

    @property
    def inside(self) -> Kind | None:
        """The kind of the innermost call that the script is in."""
        ...

    @property
    def leads(self) -> bool:
        """Whether it prints and writes for the group now."""
        ...

    @property
    def last_trained(self) -> Settled | None:
        """The last settled round of a training phase."""
        ...

    @property
    def applied_rate(self) -> float:
        """The learning rate of the last update, first parameter group."""
        ...

    @property
    def clip_norm(self) -> float | None:
        """The bound on the gradient's norm."""
        ...

    @property
    def may_repeat(self) -> bool:
        """Whether the micro-batch that was drawn last may be given to ``backward`` once more after an error."""
        ...

    def upcoming(self) -> tuple[MicroBatch, ...]:
        """The micro-batches that will be drawn next, as far as they are known: for the loader to read ahead."""
        ...

    # -- settings

    def set_clip_norm(self, bound: float | None) -> None:
        """Ask for another bound on the gradient's norm."""
        ...

    def limit(self, samples: int | None, updates: int | None) -> None:
        """End training phases where this many samples or updates in all are reached."""
        ...

    # -- a call of ``batches`` or ``evaluate``

    def open(self, call: ScriptCall) -> int | FinishedPhase:
        """Enter the next phase: its number; or how it ended, if the group is past it."""
        ...

    def draw(self, phase: int) -> MicroBatch | None:
        """The next micro-batch of ``phase``, or None when it has ended."""
        ...

    def contribute(
        self, weight: float, loss_sum: Tensor | float, compute: Callable[[BucketReady | None], None], *, whole: bool
    ) -> None:
        """Have the gradients of the drawn micro-batch computed; ``whole``: nothing more of it will come."""
        ...

    def contributed(
        self, weight: float, loss_sum: Tensor | float, sums: Sums = (), output: bytes | None = None
    ) -> None:
        """The drawn micro-batch of an ``evaluate`` is computed: its count, its sum, and what is gathered."""
        ...

    def step(self) -> bool:
        """Hand in and settle what is due; in a loop over batches, True when all workers are at the same update now."""
        ...

    def left(self) -> FinishedPhase | None:
        """The script is out of its innermost call, whose phase has ended: how."""
        ...

    def abandon(self, phase: int) -> None:
        """The script has left its innermost call early: end ``phase`` for all."""
        ...

    def gathered(self, phase: int, *, everywhere: bool) -> list[tuple[MicroBatch, bytes]] | None:
        """The outputs of the ``evaluate`` that has just ended; None on a worker that is not to have them."""
        ...

    # -- elsewhere in the script

    def note_progress(self) -> None:
        """This worker computes, though no exchange shows it."""
        ...

    def busy(self, what: str, seconds: float | None) -> AbstractContextManager[None]:
        """The script does something of its own for a while: the others need not wait for it."""
        ...

    def leave_if_late(self) -> None:
        """The script is at the end of its epochs; raises ``Left`` where it came too late to take part in them."""
        ...

    def leave(self, reason: str) -> None:
        """Go in good order as soon as the group can do without this worker."""
        ...

    def end(self) -> None:
        """The script has come to its end: leave the run together with all others."""
        ...

    def finished(self) -> None:
        """After ``end``, without a coordinator: the next run of the script begins anew."""
        ...

    def close(self) -> None:
        """Give the group and the optimizer back; may be called twice."""
        ...
