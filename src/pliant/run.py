"""The user's side: ``join`` and ``Run``.

Question  What does a training script see of Pliant?
Holds     Model and optimizer stay the user's own objects. The same script runs alone and in a group. An error is one
          line that says what to do.
"""

from __future__ import annotations

import atexit
import dis
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant import data, settings
from pliant.core.group import Past
from pliant.core.ledger import samples_of
from pliant.core.rates import Rule
from pliant.core.tickets import Kind
from pliant.errors import PliantError, UsageError, boundary, without_own_frames
from pliant.runtime import membership
from pliant.runtime.membership import Membership, Offer
from pliant.runtime.script import Opening
from pliant.runtime.update import Training
from pliant.tensors import weights
from pliant.tensors.randomness import MICRO_BATCH, seed_everything, stream
from pliant.types import WorkerId

_LOADER_OPTIONS = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "timeout", "worker_init_fn")


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
    order: data.Order | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 300.0,
    seed: int = 0,
    dead_after: float = 5.0,
    enroll: Callable[[Offer], Membership] = membership.enrolled,
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
    order         (epoch, n) -> indices, in place of the seed's permutation
    checkpoint    where checkpoints go: a directory that all workers see, or any address of fsspec (``s3://…``). A run
                  goes on from the last one: alone by itself, in a job when all workers were lost at once, or with
                  ``pliant run --resume``
    checkpoint_every   seconds between two of them; the last three are kept
    dead_after    seconds without a sign of life after which a worker counts as lost
    enroll        how this worker finds its group; ``pliant.testing`` brings its own
    """
    try:
        settings.check_model(model, optimizer)
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
        )
        settings.check_scheduler(scheduler)
        settings.check_scaler(scaler)
        settings.check_state(state)
        settings.check_checkpoint(checkpoint, checkpoint_every)
    except UsageError as error:
        membership.turned_away(error)
        raise

    if scaler is not None and not scaler.is_enabled():
        scaler = None

    def prepared(grouped: bool) -> Training:
        return Training(
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

    offer = Offer(
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
        checkpoint=None if checkpoint is None else str(checkpoint),
        checkpoint_every_s=float(checkpoint_every),
    )
    return Run(model, enroll(offer), resolved, order=order)


class Run:
    """One worker's view of the run. Made by ``join``; use it as a context."""

    def __init__(
        self,
        model: nn.Module,
        place: Membership,
        resolved: settings.Settings,
        *,
        order: data.Order | None,
    ) -> None:
        self.state: dict[str, Any] = place.carried["state"]
        """the user's own values and objects, equal on all workers at the start"""
        self._model = model
        self._membership = place
        self._worker = place.worker
        self._settings = resolved
        self._order = order
        self._epoch = 0
        # Samples before the last loop over batches of this epoch, and what that loop goes over.
        self._before, self._length = 0, 1
        self._loaders: dict[tuple[Any, ...], data.Loader] = {}
        self._drawn = 0
        self._computed = False
        """``backward`` was called for the drawn micro-batch"""
        self._passed = False
        """a call of this epoch lay in the past of the group"""
        self._result: float | None = None
        """of the last ``evaluate``"""
        self._left: int | None = None
        self._trouble: PliantError | None = None
        self._closed = False
        atexit.register(self._at_exit)

    # -- facts

    @property
    def worker(self) -> WorkerId:
        """This worker's name."""
        return self._worker.me

    @property
    def roster(self) -> tuple[WorkerId, ...]:
        """The workers of the era, the leader first."""
        return self._worker.group.roster

    @property
    def era(self) -> int:
        """The number of the period with this roster."""
        return self._worker.group.era

    @property
    def round(self) -> int:
        """Rounds settled so far."""
        return self._worker.group.round

    @property
    def samples(self) -> int:
        """Training samples of the group that went into settled rounds."""
        return self._worker.group.samples

    @property
    def batch(self) -> int:
        """Samples of the last round (before the first one: the reference batch)."""
        last = self._worker.last_trained
        return last.batch if last else self._settings.policy.batch

    @property
    def delay(self) -> int:
        """1 while the next gradients are computed beside the last sum, else 0; what ``"auto"`` has chosen."""
        return int(self._worker.group.overlaps(Kind.TRAIN))

    @property
    def rate(self) -> float:
        """The learning rate of the last update, first parameter group."""
        return self._worker.applied_rate

    @property
    def noise_scale(self) -> float | None:
        """The batch, in samples, at which half of the gradient's square is noise: up to it more samples pay.

        None until rounds with two or more contributors have shown it; infinite where no signal can be told from noise.
        """
        return self._worker.group.noise.scale

    @property
    def efficiency(self) -> float | None:
        """What a sample brings the training on, beside one in a round of the reference batch; None while unknown."""
        return self._worker.group.efficiency

    @property
    def scheduled(self) -> float:
        """The samples that the schedule has counted: ``samples``, or with AdaScale what they were worth."""
        return self._worker.group.scheduled

    @property
    def loss(self) -> float:
        """The group's mean loss in the last round; NaN before this worker's first one, and where it was not finite."""
        last = self._worker.last_trained
        return math.nan if last is None or last.loss is None else last.loss

    @property
    def is_leader(self) -> bool:
        """Whether this worker prints and writes for the group; nobody does it a second time after a resume."""
        return self._worker.leads

    @property
    def progress(self) -> float:
        """Epochs done, as a float."""
        return self._epoch + (self.samples - self._before) / self._length

    # -- the loop

    def epochs(self, n: int | None = None, *, samples: int | None = None) -> Iterator[int]:
        """Count epochs up to ``n`` in all, or as many as it takes to train on ``samples`` samples in all."""
        if (n is None) == (samples is None):
            raise UsageError("epochs takes either a number of epochs or samples=N")
        self._membership.plan(n, samples)
        self._worker.limit_samples(samples)
        while (n is not None and self._epoch < n) or (samples is not None and self.samples < samples):
            before, self._passed = self.samples, False
            yield self._epoch
            self._worker.training.end_epoch(self._epoch)
            self._epoch += 1
            self._before = self.samples
            if samples is not None and self.samples == before and not self._passed:
                raise UsageError("an epoch trained on no sample, so samples=N is never reached: call batches in it")

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
        self._check_open()
        if self._worker.inside is not None:
            raise UsageError("batches was called while another loop over batches is open: finish or break it first")
        return self._micro_batches(Kind.TRAIN, dataset, size, collate_fn, loader)

    def _micro_batches(
        self, kind: Kind, dataset: Any, size: int, collate_fn: Callable[[list[Any]], Any] | None, loader: dict[str, Any]
    ) -> Iterator[Any]:
        length = data.checked(dataset, size)
        epoch, seed = self._epoch, self._settings.seed
        order = self._order if kind is Kind.TRAIN else _as_it_is
        indices = data.epoch_order(order, seed, epoch, length)
        source = self._loader(dataset, collate_fn, loader)
        call = Opening(
            kind,
            epoch=epoch,
            length=len(indices),
            order=data.order_checksum(indices),
            size=self._membership.size or size,
            ahead=source.ahead,
        )
        phase = self._worker.open(call)
        if isinstance(phase, Past):
            self._result, self._passed = phase.result, True
            return
        if kind is Kind.TRAIN:
            self._before, self._length = self.samples, max(1, len(indices))
        reading = source.pass_over(indices, seed, epoch, self._worker.upcoming)
        try:
            while (micro_batch := self._worker.draw(phase)) is not None:
                collated = reading.fetch(micro_batch)
                seed_everything(stream(seed, epoch, micro_batch[0][0], MICRO_BATCH))
                self._drawn, self._computed = samples_of(micro_batch), False
                yield collated
            self._result = self._worker.left()
        except GeneratorExit:
            self._worker.training.back()
            self._left = phase
            if _left_by_break(sys._getframe(1)):
                self._catch_up()
            raise
        except PliantError as error:
            raise error.with_traceback(without_own_frames(error.__traceback__)) from None
        finally:
            self._drawn = 0
            reading.close()

    def _loader(self, dataset: Any, collate_fn: Any, options: dict[str, Any]) -> data.Loader:
        unknown = sorted(set(options) - set(_LOADER_OPTIONS))
        if unknown:
            raise UsageError(
                f"batches does not take {', '.join(unknown)}: of DataLoader's arguments it passes on collate_fn, "
                f"{', '.join(_LOADER_OPTIONS)}; the order of the samples is Pliant's (see order=)"
            )
        if not options.get("persistent_workers"):
            return data.Loader(dataset, collate_fn=collate_fn, options=options)
        key = (id(dataset), id(collate_fn), *sorted((name, id(value)) for name, value in options.items()))
        if key not in self._loaders:
            self._loaders[key] = data.Loader(dataset, collate_fn=collate_fn, options=options)
        return self._loaders[key]

    @boundary
    def backward(self, loss: Tensor, *, weight: float | None = None) -> None:
        """Compute the gradients of ``loss``, the mean over this micro-batch.

        ``weight`` is the mean's denominator where it is not the number of samples (tokens, say); 0 is legal. A
        micro-batch may be computed in parts, each with its weight.
        """
        if self._worker.inside is not Kind.TRAIN or not self._drawn:
            raise UsageError(
                "backward was called outside of a loop over run.batches(…): there is nothing to count it to"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"the loss is not a scalar but {shape}: take its mean over the micro-batch first")
        weighs = float(self._drawn if weight is None else weight)
        if not (weighs >= 0 and math.isfinite(weighs)):
            raise UsageError(f"weight is {weight!r}: give the number of samples or tokens behind the loss, 0 or more")
        if weight is None and self._computed:
            raise UsageError(
                "backward was called twice for one micro-batch: add the losses up and call it once, "
                "or give each call the weight= of its part"
            )
        self._computed = True
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
            self._computed = not self._worker.may_repeat
            raise

    @boundary
    def step(self) -> bool:
        """Hand in and update when due. True: an update was just applied, on all workers the same.

        Until the next micro-batch is drawn the model then holds the plain weights.
        """
        if self._worker.inside is not Kind.TRAIN or not self._drawn:
            raise UsageError("step was called outside of a loop over run.batches(…): there is nothing to hand in")
        return self._worker.step()

    @boundary
    def evaluate(
        self,
        measure: Callable[[Any], tuple[Any, Any]],
        dataset: Any,
        size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader: Any,
    ) -> float:
        """The mean of ``measure(batch) -> (sum, count)`` over ``dataset``, computed by all workers together."""
        self._check_open()
        if self._worker.inside is Kind.EVALUATE:
            raise UsageError("evaluate was called inside evaluate: finish the first one")
        drawn, training = self._drawn, [(module, module.training) for module in self._model.modules()]
        self._result = None
        self._model.eval()
        try:
            with torch.no_grad(), self._worker.training.plain():
                for micro_batch in self._micro_batches(Kind.EVALUATE, dataset, size, collate_fn, loader):
                    total, count = _measured(measure(micro_batch))
                    if not (count >= 0 and math.isfinite(count)):
                        raise UsageError(
                            f"evaluate's measure returned count={count}: return (sum, count), count 0 or more"
                        )
                    self._worker.contributed(count, total)
                    self._worker.step()
        finally:
            self._drawn = drawn
            for module, was_training in training:
                module.training = was_training
        return math.nan if self._result is None else self._result

    @contextmanager
    def plain_weights(self) -> Iterator[None]:
        """Show the true weights (and merged statistics) at any moment; the look-ahead point comes back after."""
        with self._worker.training.plain():
            yield

    def save(self, path: str | Path) -> None:
        """Write the model's plain weights as safetensors, loadable without Pliant. Only the leader writes."""
        if not self.is_leader:
            return
        with self.plain_weights():
            weights.save(self._model, Path(path), {"round": str(self.round)})

    # -- the end

    def leave(self) -> None:
        """Go in good order, as on SIGTERM: hand in what there is and let the others go on without this worker.

        Returns at once; ``batches``, ``step`` and ``evaluate`` raise ``pliant.Left`` when it has happened.
        """
        self._membership.leave("run.leave() was called")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the run is closed: call batches and evaluate inside the with block of join")
        self._catch_up()
        if self._trouble is not None:
            raise self._trouble

    def _catch_up(self) -> None:
        """End the phase whose loop was left early, together with all others."""
        phase, self._left = self._left, None
        if phase is None or self._closed or sys.is_finalizing():
            return
        try:
            self._worker.abandon(phase)
        except PliantError as error:
            # Raised where a loop is being left, it would only be printed: the next call raises it.
            self._trouble = error

    @boundary
    def close(self) -> None:
        """Leave the run in good order, together with all others; the end of the ``with`` block does it."""
        if not self._closed:
            self._check_open()
            self._closed = True
            atexit.unregister(self._at_exit)
            self._membership.finish()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self._membership.guarded():
                self.close()
        elif not self._closed:
            self._closed = True
            self._worker.training.explain(error)
            atexit.unregister(self._at_exit)
            self._membership.fail(error)

    def _at_exit(self) -> None:
        """A script without a ``with`` block has ended."""
        if not self._closed and getattr(sys, "last_value", None) is None:
            self.close()


def _left_by_break(frame: FrameType) -> bool:
    """Whether the loop in ``frame`` drops its iterator by ``break`` or ``return``, not because an exception passes.

    An exception is a crash of this worker, or caught by the script: then the phase is ended at the next call.
    """
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("POP_TOP", "POP_ITER")


def _measured(answer: Any) -> tuple[float, float]:
    """What a user's ``measure`` has returned."""
    try:
        total, count = (float(value) for value in answer)
    except (TypeError, ValueError):
        raise UsageError(
            f"evaluate's measure returned a {type(answer).__name__}: return (sum, count), two numbers"
        ) from None
    return total, count


def _as_it_is(epoch: int, length: int) -> range:
    return range(length)
