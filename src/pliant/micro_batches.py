"""The loops of one script over its micro-batches.

Question  Where is the script in its calls of ``batches`` and ``evaluate``, and what does each draw yield?
Holds     One loop over ``batches`` at a time; an ``evaluate`` may be inside it. Before each micro-batch all generators
          of random numbers are seeded from (seed, epoch, position). A loop that is left early has its phase ended for
          all: at once after a ``break``, by the next call after an exception.
Source    docs/protocol.md ("Phases, break, refusals"); docs/design/0024-break.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pliant import data
from pliant.core.group_state import FinishedPhase
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.tickets import Kind
from pliant.errors import PliantError, UsageError, boundary, without_own_frames
from pliant.loop_exit import left_by_break
from pliant.tensors.randomness import MICRO_BATCH, seed_everything, stream
from pliant.worker.script.calls import ScriptCall
from pliant.worker.script.other_optimizers import OtherOptimizers
from pliant.worker.script.sample_order import AsItIs, Order, Ordering, UserOrder, epoch_order
from pliant.worker.script.training_loop import TrainingLoop

_LOADER_OPTIONS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "timeout", "worker_init_fn")

Collate = Callable[[list[Any]], Any] | None


class MicroBatches:
    """Where the script is in its calls, and the iterators that those return."""

    def __init__(
        self, worker: TrainingLoop, *, most: int | None, seed: int, order: UserOrder | None, others: OtherOptimizers
    ) -> None:
        """``most``: the largest micro-batch, where the launcher sets one; ``order``: the script's own."""
        self._worker = worker
        self._most = most
        self._seed = seed
        self._order = order
        self._others = others
        self._loaders: dict[tuple[Any, ...], data.Loader] = {}
        self.epoch = 0
        self.before, self.length = 0, 1
        """samples before the last loop over batches of this epoch, and what that loop goes over"""
        self.drawn = 0
        """samples of the micro-batch that the script has; 0: it has none"""
        self.computed = False
        """``backward`` was called for the drawn micro-batch"""
        self.passed = False
        """a call of this epoch lay in the past of the group"""
        self.phase: int | None = None
        """the number of the last call's phase; None: the group was past it"""
        self.ended: FinishedPhase | None = None
        """how the last ``batches`` or ``evaluate`` ended"""
        self.bad: tuple[BaseException | None, str | None] = (None, None)
        """the exception of the last sample that could not be read, and what to end the whole run with"""
        self.trouble: BaseException | None = None
        """what ending a phase has raised where nothing could be raised: the next call does"""
        self.closed = False
        """the run is over for this script"""
        self._left: int | None = None
        """the phase of a loop that was left early, until it is ended"""

    # -- what may be called

    def check_open(self) -> None:
        """Raise where the run is over; end a loop that was left early."""
        if self.closed:
            raise UsageError("the run is closed: call batches and evaluate inside the with block of join")
        self.catch_up()
        if self.trouble is not None:
            raise self.trouble

    def check_no_loop(self) -> None:
        """Refuse a second loop beside one that is open."""
        self.check_open()
        self._worker.hooks.refuse("batches")
        if self._worker.inside is not None:
            raise UsageError(
                "batches was called while another loop over batches is open: finish or break it first; "
                "two datasets side by side (zip) are one dataset of pairs"
            )

    def catch_up(self) -> None:
        """End the phase whose loop was left early, together with all others."""
        phase, self._left = self._left, None
        if phase is None or self.closed or sys.is_finalizing():
            return
        try:
            self._worker.abandon(phase)
        except (Exception, SystemExit) as error:
            # Raised where a loop is being left, it would only be printed: the next call raises it.
            self.trouble = error

    # -- one call

    def of(self, kind: Kind, dataset: Any, size: int, collate_fn: Collate, options: dict[str, Any]) -> Iterator[Any]:
        """The collated micro-batches of this worker in one call; ``options`` are those of the loader.

        The script's ``for`` loop must hold this very generator: how it is closed says how the loop was left.
        """
        if kind is Kind.TRAIN:
            # It was so when the loop was made; since then another one may have begun.
            self.check_no_loop()
        length = data.checked(dataset, size)
        epoch = self.epoch
        source = self._loader(dataset, collate_fn, options)
        ordering = self._ordering(kind, length)
        call = ScriptCall(kind, epoch=epoch, samples=ordering, size=self._most or size, ahead=source.ahead)
        phase = boundary(self._worker.open)(call)
        if isinstance(phase, FinishedPhase):
            self.ended, self.phase, self.passed = phase, None, True
            return
        self.phase, order = phase, ordering.made
        if kind is Kind.TRAIN:
            self.before, self.length = self._worker.group.samples - self._done(phase), max(1, len(order))
        reading = source.pass_over(order, self._seed, epoch, self._worker.upcoming)
        try:
            while (micro_batch := self._worker.draw(phase)) is not None:
                collated = reading.fetch(micro_batch)
                self._worker.note_progress()
                self._seed_for(micro_batch, epoch)
                self.drawn, self.computed = samples_of(micro_batch), False
                if kind is Kind.TRAIN:
                    self._others.enter_micro_batch()
                yield collated
            self.ended = self._worker.left()
        except GeneratorExit:
            self._worker.training.back()
            self._left = phase
            if left_by_break(sys._getframe(1)):
                self.catch_up()
            raise
        except PliantError as error:
            raise error.with_traceback(without_own_frames(error.__traceback__)) from None
        except Exception as error:
            if reading.bad is not None and reading.bad.error is error:
                self._met(reading.bad, epoch, phase)
            raise
        finally:
            self.drawn = 0
            if kind is Kind.TRAIN:
                self._others.leave_loop()
            reading.close()

    def once_more(
        self, wanted: Sequence[MicroBatch], dataset: Any, collate_fn: Collate, options: dict[str, Any]
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """These micro-batches of ``dataset``, collated as in an ``evaluate``, outside of any phase."""
        lacking, epoch = list(wanted), self.epoch
        source = self._loader(dataset, collate_fn, options)
        reading = source.pass_over(AsItIs(len(dataset)), self._seed, epoch, lambda: tuple(lacking))
        try:
            while lacking:
                micro_batch = lacking.pop(0)
                self._worker.note_progress()
                collated = reading.fetch(micro_batch)
                self._seed_for(micro_batch, epoch)
                yield micro_batch, collated
        finally:
            reading.close()

    def _seed_for(self, micro_batch: MicroBatch, epoch: int) -> None:
        seed_everything(stream(self._seed, epoch, micro_batch[0][0], MICRO_BATCH))

    def _ordering(self, kind: Kind, length: int) -> Ordering:
        """The order of a call that goes over a dataset of this length."""
        epoch, seed, own = self.epoch, self._seed, self._order

        def make(scheme: str) -> Order:
            if kind is Kind.EVALUATE:
                return AsItIs(length, scheme=scheme)
            return epoch_order(own, seed, epoch, length, scheme)

        return Ordering(make, lambda: self._worker.group.policy.order)

    def _met(self, bad: data.BadSample, epoch: int, phase: int) -> None:
        """A sample cannot be read. A script that passes over that leaves its loop, with everybody else."""
        me, where = self._worker.me, bad.where(epoch)
        bad.error.add_note(f"pliant: {me} was reading {where}")
        self.bad = bad.error, f"{me} could not read {where}: {bad.summary}" if bad.everywhere else None
        self._worker.training.back()
        self._left = phase

    def _done(self, phase: int) -> int:
        """Samples of ``phase`` that are settled already: a newcomer comes in the middle of it."""
        found = next((each for each in self._worker.group.open if each.number == phase), None)
        return 0 if found is None else found.ledger.limit - found.ledger.remaining

    def _loader(self, dataset: Any, collate_fn: Collate, options: dict[str, Any]) -> data.Loader:
        unknown = sorted(set(options) - set(_LOADER_OPTIONS))
        if unknown:
            raise UsageError(
                f"batches does not take {', '.join(unknown)}: of DataLoader's arguments it passes on collate_fn, "
                f"{', '.join(_LOADER_OPTIONS)}; the order of the samples is Pliant's, or that of `join(order=…)`"
            )
        if not options.get("persistent_workers"):
            return data.Loader(dataset, collate_fn=collate_fn, options=options)
        key = (id(dataset), id(collate_fn), *sorted((name, id(value)) for name, value in options.items()))
        if key not in self._loaders:
            self._loaders[key] = data.Loader(dataset, collate_fn=collate_fn, options=options)
        return self._loaders[key]
