"""The user's side: ``join`` and ``Run``.

Question  What does a training script see of Pliant?
Holds     Model and optimizer stay the user's own objects. The same script runs alone and in a group. An error is one
          line that says what to do. What ``Run`` shows is defined in ``facts``, what its loops do in ``micro_batches``.
"""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant import settings
from pliant.core.ledger import MicroBatch, samples_of
from pliant.core.tickets import Kind
from pliant.core.tuning.rates import Rule
from pliant.errors import PliantError, UsageError, boundary
from pliant.facts import RunFacts
from pliant.micro_batches import Collate, MicroBatches
from pliant.tensors import weights
from pliant.worker import session
from pliant.worker.evaluation import measures, outputs, predictions
from pliant.worker.script.hooks import OnRoster, OnUpdate
from pliant.worker.script.other_optimizers import OtherOptimizers, check_not_joined
from pliant.worker.script.sample_order import UserOrder
from pliant.worker.session import JoinRequest, Session
from pliant.worker.training import Training

# A slow disk: what is not away for longer is not left out.
_WRITTEN_PER_S = 200e6


@boundary
def join(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    batch: int | settings.Floating,
    delay: int | str = "auto",
    correction: str = "lookahead",
    rates: str | Rule | None = None,
    scheduler: Any | None = None,
    schedule_by: str = "batch",
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    state: dict[str, Any] | None = None,
    order: UserOrder | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 300.0,
    seed: int = 0,
    dead_after: float = 5.0,
    hung_after: float = 600.0,
) -> Run:
    """Train ``model`` together with all workers of the job, or alone if no job is named in the environment.

    model, optimizer   the script's own objects; they are neither wrapped nor replaced
    batch         samples per update: a whole number, or ``pliant.Floating(reference=…, at_most=…)`` for an open batch.
                  Without ``at_most`` a round is bounded where further samples would not pay
    delay         1: compute the next gradients while the last ones are summed; 0: synchronous; ``"auto"``: 0 where it
                  is at most 3 % slower than 1, as measured while training
    correction    how the delay is compensated: ``"lookahead"`` or ``"none"``
    rates         how the learning rate follows the size of an open batch: ``"linear"`` (default), ``"sqrt"`` (default
                  for Adam and AdamW), ``"adascale"``, ``"constant"``, or an object of ``pliant.rates``; increases are
                  ramped
    scheduler     a torch LR scheduler written for the reference batch. Do not step it yourself: Pliant advances it by
                  samples (AdaScale: by what they were worth). ReduceLROnPlateau is given the result of every
                  ``evaluate`` outside a loop over batches
    schedule_by   ``"batch"``: the scheduler counts reference batches; ``"epoch"``: it is advanced once per epoch
    clip_norm     upper bound on the norm of the group's gradient
    scaler        a ``torch.amp.GradScaler`` for float16; ``backward`` and ``step`` make all of its calls
    state         objects with ``state_dict``, or plain values, that all workers take over from the leader at the start.
                  ``run.state`` is this very dict
    order         (epoch, n) -> indices, used instead of the seed's permutation: any object with a length that can be
                  indexed, the same on all workers. It is read in place, so it may be lazy
    checkpoint    where checkpoints are written: a directory that all workers see under the same name, or any address
                  that fsspec knows (``s3://…``). A run continues from the last one: alone by itself, in a job when all
                  workers were lost at once, or with ``pliant run --resume``
    checkpoint_every   seconds between two checkpoints; the last three are kept
    seed          of the order of the samples and of the random numbers drawn in each micro-batch
    dead_after    seconds without a sign of life after which a worker counts as lost. A worker that is alive but makes
                  no progress while others wait is left out after this time or ten of its usual steps, whichever is
                  longer, and comes back by itself
    hung_after    seconds without progress after which the process of such a worker is killed and started again
    """
    try:
        settings.check_model(model, optimizer)
        settings.check_checkpoint(checkpoint, checkpoint_every)
        resolved = settings.resolved(
            optimizer,
            batch=batch,
            delay=delay,
            correction=correction,
            rates=rates,
            clip_norm=clip_norm,
            schedule_by=schedule_by,
            seed=seed,
            dead_after=dead_after,
            hung_after=hung_after,
            checkpoint=checkpoint,
        )
        settings.check_scheduler(scheduler, optimizer)
        settings.check_scaler(scaler)
        settings.check_state(state)
    except UsageError as error:
        session.turned_away(error)
        raise

    if scaler is not None and not scaler.is_enabled():
        scaler = None
    trainings: list[Training] = []

    def prepared(grouped: bool) -> Training:
        # In a job a second join is refused before, whatever optimizer it brings.
        check_not_joined(optimizer)
        training = Training(
            model,
            optimizer,
            reference=resolved.policy.batch,
            grouped=grouped,
            correction=resolved.correction if resolved.policy.delay != 0 else "none",
            clip_norm=resolved.clip_norm,
            scheduler=scheduler,
            schedule_by=schedule_by,
            scaler=scaler,
            moments=resolved.policy.rule.moments,
            overlaps=resolved.policy.delay != 0,
        )
        trainings.append(training)
        return training

    offer = JoinRequest(
        model=model,
        optimizer=optimizer,
        policy=resolved.policy,
        agreed={**resolved.agreed(), **({} if scaler is None else {"scaler": "GradScaler"})},
        carried={
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "state": {} if state is None else state,
        },
        prepared=prepared,
        checkpoint=resolved.checkpoint,
        checkpoint_every_s=float(checkpoint_every),
    )
    try:
        place = session.enrolled(offer)
    except BaseException:
        # The optimizer is given back to the script, for another try.
        for training in trainings:
            training.close()
        raise
    others = OtherOptimizers(model, optimizer, place.carried["state"], stepping=lambda: place.worker.training.stepping)
    return Run(model, place, resolved, order=order, others=others)


class Run(RunFacts):
    """One worker's view of the run. Returned by ``join``; use it as a context manager."""

    def __init__(
        self,
        model: nn.Module,
        place: Session,
        resolved: settings.Settings,
        *,
        order: UserOrder | None,
        others: OtherOptimizers,
    ) -> None:
        self.state: dict[str, Any] = place.carried["state"]
        """the user's own values and objects, equal on all workers at the start"""
        self._model = model
        self._membership = place
        self._others = others
        calls = MicroBatches(place.worker, most=place.size, seed=resolved.seed, order=order, others=others)
        super().__init__(place.worker, resolved, calls)
        atexit.register(self._at_exit)

    # -- the loop

    def epochs(self, n: int | None = None, *, samples: int | None = None, steps: int | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs, from 0. Give exactly one limit; each counts from the beginning of the run.

        n         number of epochs
        samples   number of training samples; the last epoch is cut off there
        steps     number of updates; the last epoch is cut off there
        """
        if [n, samples, steps].count(None) != 2:
            raise UsageError("epochs takes one of these: a number of epochs, samples=N, steps=N")
        calls = self._calls
        self._membership.plan(n, samples)
        self._worker.limit(samples, steps)
        while self._is_short_of(n, samples, steps):
            before, calls.passed = self.samples, False
            yield calls.epoch
            self._worker.training.end_epoch(calls.epoch)
            calls.epoch += 1
            calls.before = self.samples
            if n is None and self.samples == before and not calls.passed:
                name = "samples" if steps is None else "steps"
                raise UsageError(f"an epoch trained on no sample, so {name}=N is never reached: call batches in it")
        self._worker.leave_if_late()

    def _is_short_of(self, n: int | None, samples: int | None, steps: int | None) -> bool:
        return (
            (n is not None and self._calls.epoch < n)
            or (samples is not None and self.samples < samples)
            or (steps is not None and self.updates < steps)
        )

    def on_update(self, function: OnUpdate) -> OnUpdate:
        """Register ``function(update)`` to be called after each update of the weights; also usable as a decorator.

        It is called once for each ``pliant.Update``, in order, including the last one of an epoch, on every worker that
        holds the whole state. The model then holds the plain weights and the group's buffers. ``evaluate``, ``save``
        and logging are allowed in it. Keep what it counts in ``state=``, because a newcomer is told of no earlier
        update. Several functions are called in the order of their registration.
        """
        self._worker.hooks.add_on_update(function)
        return function

    def on_roster(self, function: OnRoster) -> OnRoster:
        """Register ``function(before, now)`` to be called with both rosters after a change; also usable as a decorator.

        Workers call it at different moments, each between two of its micro-batches.
        """
        self._worker.hooks.add_on_roster(function)
        return function

    @boundary
    def batches(
        self,
        dataset: Any,
        size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader: Any,
    ) -> Iterator[Any]:
        """Iterate over this worker's micro-batches of the epoch. Over the whole group each sample comes once.

        dataset      anything with a length that can be indexed
        size         most samples in a micro-batch of this worker
        collate_fn   makes a micro-batch of a list of samples; torch's default if None
        loader       passed on to torch's DataLoader: num_workers, pin_memory, persistent_workers, prefetch_factor,
                     timeout, worker_init_fn

        ``break`` ends the loop for all workers after the current round.
        """
        self._calls.check_no_loop()
        return self._calls.of(Kind.TRAIN, dataset, size, collate_fn, loader)

    @boundary
    def backward(self, loss: Tensor, *, weight: float | None = None) -> None:
        """Compute the gradients of a loss. Call it instead of ``loss.backward()``.

        loss     the mean over this micro-batch, or over a part of it; a scalar
        weight   what that mean was divided by, where it is not the number of samples (tokens, say); 0 is allowed. A
                 micro-batch may be computed in several parts if each is given its weight
        """
        self._worker.hooks.refuse("backward")
        if self._worker.inside is not Kind.TRAIN or not self._calls.drawn:
            raise UsageError(
                "backward was called outside of a loop over run.batches(…): there is nothing to count it to"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"the loss is not a scalar but {shape}: take its mean over the micro-batch first")
        weighs = float(self._calls.drawn if weight is None else weight)
        if not (weighs >= 0 and math.isfinite(weighs)):
            raise UsageError(f"weight is {weight!r}: give the number of samples or tokens behind the loss, 0 or more")
        if weight is None and self._calls.computed:
            raise UsageError(
                "backward was called twice for one micro-batch: add the losses up and call it once, "
                "or give each call the weight= of its part"
            )
        self._calls.computed = True
        scalar, training = loss.reshape(()), self._worker.training
        try:
            self._worker.contribute(
                weighs,
                scalar.detach().to(torch.float64) * weighs,
                lambda ready: training.backward(scalar, weighs, ready),
                whole=weight is None,
            )
        except Exception:
            # The script may try the same micro-batch again, in smaller parts say.
            self._calls.computed = not self._worker.may_repeat
            raise

    @boundary
    def step(self) -> bool:
        """Hand in the gradients and update the weights when that is due. Call it instead of ``optimizer.step()``.

        Returns True if an update was just applied, the same on all workers. The model then holds the plain weights
        until the next micro-batch is drawn.
        """
        self._worker.hooks.refuse("step")
        if self._worker.inside is not Kind.TRAIN or not self._calls.drawn:
            raise UsageError("step was called outside of a loop over run.batches(…): there is nothing to hand in")
        return self._worker.step()

    @boundary
    def evaluate(
        self,
        measure: Callable[[Any], Any],
        dataset: Any,
        size: int,
        *,
        gather: bool = False,
        everywhere: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader: Any,
    ) -> Any:
        """Evaluate the plain weights on ``dataset``, each sample once, by all workers together.

        measure      called with each micro-batch. If it returns (sum, count), ``evaluate`` returns the mean; if it
                     returns a dict of such pairs, a dict of means
        dataset      anything with a length that can be indexed
        size         most samples in a micro-batch of this worker
        gather       ``measure`` returns the outputs of its samples (a tensor, a list, or a dict or tuple of these), and
                     ``evaluate`` returns the list of all outputs in the order of the dataset: on the leader only, None
                     on the other workers and on those that joined during this call or later
        everywhere   with ``gather``: all workers get the list
        collate_fn, loader   as in ``batches``
        """
        calls = self._calls
        calls.check_open()
        if self._worker.inside is Kind.EVALUATE:
            raise UsageError("evaluate was called inside evaluate: finish the first one")
        if everywhere and not gather:
            raise UsageError("everywhere=True is for gather=True: means are returned on all workers anyway")
        asked = measures.Measure(measure, gather=gather)
        calls.ended = calls.phase = None
        with self._evaluating():
            for micro_batch in calls.of(Kind.EVALUATE, dataset, size, collate_fn, loader):
                found = asked.of(micro_batch, calls.drawn)
                self._worker.contributed(found.count, found.total, found.sums, found.output)
                self._worker.step()
            if gather:
                gathered = None
                if calls.phase is not None:
                    gathered = self._worker.gathered(calls.phase, everywhere=everywhere)
                if gathered is None:
                    return None
                gathered += self._computed_again(gathered, asked, dataset, size, collate_fn, loader)
                return predictions.in_order(gathered, len(dataset))
        return measures.result_of(calls.ended)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Show the plain weights, in eval mode and without gradients."""
        drawn, training = self._calls.drawn, [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad(), self._worker.training.plain():
                yield
        finally:
            self._calls.drawn = drawn
            for module, was_training in training:
                module.training = was_training

    def _computed_again(
        self,
        found: Sequence[tuple[MicroBatch, bytes]],
        asked: measures.Measure,
        dataset: Any,
        size: int,
        collate_fn: Collate,
        loader: dict[str, Any],
    ) -> list[tuple[MicroBatch, bytes]]:
        """Compute the outputs that are missing in ``found``: this worker was absent when they were gathered."""
        lacking = outputs.missing([each for each, _ in found], len(dataset), self._membership.size or size)
        if not lacking:
            return []
        return [
            (micro_batch, asked.of(collated, samples_of(micro_batch)).output or b"")
            for micro_batch, collated in self._calls.once_more(lacking, dataset, collate_fn, loader)
        ]

    @contextmanager
    def plain_weights(self) -> Iterator[None]:
        """Show the true weights and merged statistics at any moment; afterwards the look-ahead point is restored."""
        with self._worker.training.plain():
            yield

    def save(self, path: str | Path) -> None:
        """Write the model's plain weights to ``path`` as safetensors, loadable without Pliant. Only the leader writes.

        The other workers do not wait for a long save: it counts as ``busy``. If another leader has meanwhile written
        the weights of a later round there, they are kept.
        """
        if not self.is_leader:
            return
        target, seconds = Path(path), weights.size_of(self._model) / _WRITTEN_PER_S
        with self.busy(f"saving {target.name}", seconds), self.plain_weights():
            written = weights.save(self._model, target, round_=self.round, run=self._membership.run)
        if not written:
            print(f"pliant: {target} holds a later round already: round {self.round} was not saved", file=sys.stderr)

    @contextmanager
    def busy(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Announce that this worker does something of its own for a while: saving, uploading, drawing pictures.

        If waiting would cost the other workers much, they go on without this one, which takes their state over with its
        next call of ``batches``, ``step`` or ``evaluate``. Until then its model is not touched. However long it takes,
        this process does not count as hung.

        what      shown to users ("uploading")
        seconds   how long it usually takes; None: as long as the last time under this name
        """
        if self._calls.closed:
            yield
            return
        with self._worker.busy(str(what) or "busy", seconds):
            yield

    # -- the end

    def leave(self) -> None:
        """Leave the run, as on SIGTERM: hand in what is computed; the other workers go on.

        Returns at once. ``batches``, ``step`` and ``evaluate`` raise ``pliant.Left`` once this worker has left.
        """
        self._membership.leave("run.leave() was called")

    @boundary
    def close(self) -> None:
        """End the run together with all other workers. The end of the ``with`` block calls it."""
        if not self._calls.closed:
            self._calls.check_open()
            self._end()
            self._membership.finish()

    def _end(self) -> None:
        """The run is over for this script."""
        self._calls.closed = True
        self._others.close()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own, calls = None, self._calls
        if error is None and not calls.closed:
            calls.catch_up()
            # The script's own exception, raised in a function that was called when its loop was left.
            own = calls.trouble if not isinstance(calls.trouble, PliantError) else None
        try:
            if error is None and own is None:
                with self._membership.guarded():
                    self.close()
            elif not calls.closed:
                self._fail(error or own)
        finally:
            # Also after an error: nothing is left to be done at exit.
            self._end()
        if own is not None:
            raise own

    def _fail(self, error: BaseException | None) -> None:
        """The script ends by an exception. If every worker would meet it, the whole run ends with its reason."""
        assert error is not None
        self._worker.training.explain(error)
        self._end()
        met, reason = self._calls.bad
        self._membership.fail(error, reason if met is not None and met in _causes(error) else None)

    def _at_exit(self) -> None:
        """A script without a ``with`` block has ended."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if self._calls.closed:
            return
        if error is None:
            self.close()
        elif self._calls.bad[0] in _causes(error):
            self._fail(error)


def _causes(error: BaseException | None) -> list[BaseException]:
    """An exception, and those that led to it."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
