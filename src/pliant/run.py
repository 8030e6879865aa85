"""The user's side: ``join`` and ``Run``.

Question  What does a training script see of Pliant?
Holds     Model and optimizer stay the user's own objects. The same script runs alone and in a group. An error is one
          line that says what to do.
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
    enroll: Callable[[JoinRequest], Session] = session.enrolled,
) -> Run:
    """Train ``model`` together with all workers of the job, or alone if no job is named in the environment.

    batch         samples per update: a whole number, or ``pliant.Floating(reference=…, at_most=…)``; without
                  ``at_most`` rounds are bounded where more samples stop paying
    delay         1: the next gradients are computed while the last ones are summed; 0: synchronous; ``"auto"``: 0 where
                  that is within 3 % of the speed of 1, as measured while training
    correction    what mends the delay: ``"lookahead"`` or ``"none"``
    rates         how the learning rate follows an open batch: ``"linear"`` (default), ``"sqrt"`` (default for Adam and
                  AdamW), ``"adascale"``, ``"constant"``, or an object of ``pliant.rates``; rises are ramped
    scheduler     a torch LR scheduler written for the reference batch, advanced by samples (``schedule_by="epoch"``:
                  once per epoch; AdaScale: by what they were worth); ReduceLROnPlateau follows the result of every
                  ``evaluate`` outside of a loop over batches. Do not step it yourself
    clip_norm     bound on the norm of the group's gradient
    scaler        a ``torch.amp.GradScaler`` for float16: ``backward`` and ``step`` make all of its calls
    state         objects with ``state_dict``, or plain values: equal on all workers from the start. ``run.state`` is
                  this very dict
    order         (epoch, n) -> indices, in place of the seed's permutation: anything with a length that can be indexed,
                  the same on all workers. It is read where it lies, so it may be lazy
    checkpoint    where checkpoints go: a directory that all workers see under the same name, or any address of fsspec
                  (``s3://…``). A run goes on from the last one: alone by itself, in a job when all workers were lost at
                  once, or with ``pliant run --resume``
    checkpoint_every   seconds between two of them; the last three are kept
    dead_after    seconds without a sign of life after which a worker counts as lost. One that gives signs of life but
                  does not get on while others wait is left out after that time or ten of its usual steps, and comes
                  back by itself
    hung_after    seconds without progress after which such a process is killed and started again
    enroll        how this worker finds its group; ``pliant.testing`` brings its own
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
        place = enroll(offer)
    except BaseException:
        # The optimizer is the script's own again, for another try.
        for training in trainings:
            training.close()
        raise
    others = OtherOptimizers(model, optimizer, place.carried["state"], stepping=lambda: place.worker.training.stepping)
    return Run(model, place, resolved, order=order, others=others)


class Run(RunFacts):
    """One worker's view of the run. Made by ``join``; use it as a context."""

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
        """Count epochs up to ``n`` in all, or as many as it takes to train on ``samples`` samples in all.

        ``steps``: as many as it takes to make so many updates in all; the last epoch is cut off there.
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
        """Have ``function(update)`` called after each update of the weights; use it as a decorator, or call it.

        It is called once for each ``pliant.Update``, in their order, the last one of an epoch included, on every worker
        that holds the whole state, with the plain weights and the group's buffers in the model. ``evaluate``, ``save``
        and logging may be done in it. What it keeps belongs in ``state=``: a newcomer is told of no earlier update.
        Several functions are called in the order in which they were registered.
        """
        self._worker.hooks.add_on_update(function)
        return function

    def on_roster(self, function: OnRoster) -> OnRoster:
        """Have ``function(before, now)`` called when the roster has changed; use it as a decorator, or call it.

        Workers call it at different moments, each when it looks around next.
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
        """This worker's micro-batches of the epoch: over the whole group each sample comes once.

        ``loader`` goes to torch's DataLoader: num_workers, pin_memory, persistent_workers, prefetch_factor, …
        """
        self._calls.check_no_loop()
        return self._calls.of(Kind.TRAIN, dataset, size, collate_fn, loader)

    @boundary
    def backward(self, loss: Tensor, *, weight: float | None = None) -> None:
        """Compute the gradients of ``loss``, the mean over this micro-batch.

        ``weight`` is the mean's denominator where it is not the number of samples (tokens, say); 0 is legal. A
        micro-batch may be computed in parts, each with its weight.
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
        """Hand in and update when due. True: an update was just applied, on all workers the same.

        Until the next micro-batch is drawn the model then holds the plain weights.
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
        """What ``measure`` says of ``dataset``, each sample once, computed by all workers together.

        A ``measure(batch)`` that returns (sum, count) gives the mean; one that returns a dict of such pairs, a dict of
        means. With ``gather=True`` it returns the outputs of its samples (a tensor, a list, a dict or tuple of these),
        and ``evaluate`` a list of all of them in the order of the dataset: on the leader, or ``everywhere``; None on
        the other workers, and on one that came while it was under way or later.
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
        """The plain weights, in eval mode and without gradients."""
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
        """The outputs that are not among those ``found``: this worker was not there when they were gathered."""
        lacking = outputs.missing([each for each, _ in found], len(dataset), self._membership.size or size)
        if not lacking:
            return []
        return [
            (micro_batch, asked.of(collated, samples_of(micro_batch)).output or b"")
            for micro_batch, collated in self._calls.once_more(lacking, dataset, collate_fn, loader)
        ]

    @contextmanager
    def plain_weights(self) -> Iterator[None]:
        """Show the true weights (and merged statistics) at any moment; the look-ahead point comes back after."""
        with self._worker.training.plain():
            yield

    def save(self, path: str | Path) -> None:
        """Write the model's plain weights as safetensors, loadable without Pliant. Only the leader writes.

        The others do not wait for it: a save that takes long is ``busy`` by itself. Weights of a later round that
        another leader has written there meanwhile are left as they are.
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
        """Say that this worker does something of its own for a while: saving, uploading, drawing pictures.

        While it lasts the others need not wait: if they would lose much, they go on without this worker, which takes
        their state over with its next call of ``batches``, ``step`` or ``evaluate``. The model is not touched
        meanwhile, and however long it takes, this process is not taken for a hung one.

        what      shown to people ("uploading")
        seconds   how long it takes as a rule; where it is not given, it is taken for as long as the last time
        """
        if self._calls.closed:
            yield
            return
        with self._worker.busy(str(what) or "busy", seconds):
            yield

    # -- the end

    def leave(self) -> None:
        """Go in good order, as on SIGTERM: hand in what there is and let the others go on without this worker.

        Returns at once; ``batches``, ``step`` and ``evaluate`` raise ``pliant.Left`` when it has happened.
        """
        self._membership.leave("run.leave() was called")

    @boundary
    def close(self) -> None:
        """Leave the run in good order, together with all others; the end of the ``with`` block does it."""
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
            # Of the script itself, in a function that was called when its loop was left.
            own = calls.trouble if not isinstance(calls.trouble, PliantError) else None
        try:
            if error is None and own is None:
                with self._membership.guarded():
                    self.close()
            elif not calls.closed:
                self._fail(error or own)
        finally:
            # Whatever was raised: nothing is left to be done when the interpreter ends.
            self._end()
        if own is not None:
            raise own

    def _fail(self, error: BaseException | None) -> None:
        """The script ends by an exception. One that is in a sample would end one worker after the other."""
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
