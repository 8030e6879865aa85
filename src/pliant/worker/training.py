"""Updates of the user's model, as the group decides them.

Question  How does a reduced gradient become new weights, the same on every worker?
Holds     The optimizer sees the plain weights, the weighted mean gradient (clipped by its norm over all parameters),
          and the schedule's learning rate times the group's factor (and Adam's moments, if the rule moves them).
          Afterwards the parameter groups have the schedule's values again, because chained schedulers read them back.
          The schedule counts samples, not rounds; one that follows results is stepped by ``evaluate``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pliant.bitmaps import members as members_of
from pliant.core import drift
from pliant.core.rounds import Settled
from pliant.core.tuning import rates
from pliant.errors import UsageError
from pliant.tensors import untyped
from pliant.tensors.background_copy import BackgroundCopy
from pliant.tensors.buffers import ModelBuffers
from pliant.tensors.digest import WeightsDigest
from pliant.tensors.gradients import FlatGradients, Gradients
from pliant.tensors.lookahead import LookAhead
from pliant.worker.script.loss_scale import LossScale
from pliant.worker.script.schedule_guard import ScheduleGuard
from pliant.worker.script.trained_set import TrainedSet

_STEP = (
    "optimizer.step() was called by the script: remove it from the loop; "
    "run.step() updates the weights when the group's gradient is there"
)


# Hyper-parameters that a scheduler may change.
_SCHEDULED = ("lr", "momentum", "betas")


def momentum_of(optimizer: Optimizer) -> float:
    """The decay of past gradients in a step: SGD's momentum, Adam's first beta."""
    group = optimizer.param_groups[0]
    return float(group["momentum"] if "momentum" in group else group.get("betas", (0.0,))[0])


class Training:
    """The user's model and optimizer, and everything that an update changes."""

    grad_norm = math.nan
    """of the last update's mean gradient, before clipping; NaN if it was not taken"""
    takes_norm = False
    """whether that norm is taken with every update, even if clipping does not need it"""
    copying: BackgroundCopy | None = None
    """a copy of weights and optimizer state that is being made; it is completed before either changes"""
    _shown = 0
    """how many ``plain`` contexts are entered"""
    _swapped = False
    """one of them has put the plain weights into the model in place of the look-ahead point"""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        reference: int,
        grouped: bool,
        correction: str,
        clip_norm: float | None,
        scheduler: Any | None,
        schedule_by: str,
        scaler: torch.amp.GradScaler | None,
        moments: bool = False,
        overlaps: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.trained = TrainedSet(model, optimizer)
        self.parameters = self.trained.parameters
        """all that can ever be trained; bitmaps are indexed by these"""
        self.gradients = Gradients(self.parameters, grouped=grouped, overlaps=overlaps, members=self.trained.look())
        self.gradients.optimized = self.trained.optimized
        self.buffers = ModelBuffers(model)
        self.lookahead = LookAhead(optimizer, self.parameters) if correction == "lookahead" and grouped else None
        self.held: int | None = None
        """the bitmap of parameters that a newcomer holds so far; None: all of them"""
        self.epochs_ended = 0
        self.measured = (0, 0.0)
        """the last round whose mean-gradient norm was taken, and that norm, squared"""
        self.weighed = (0, 0)
        """the last round after which a digest of part of the weights was taken, and that digest"""
        self.sketches, self.sketch = False, 0.0
        """whether a sketch is taken as well, for workers with other arithmetic; and the last one"""
        self._had_gradients = self._missed_gradients = 0
        # Not of merged buffers, which are made anew in each round, nor of optimizer state, which shows in the weights.
        self.fingerprint = WeightsDigest(self.parameters, parts=drift.PARTS, reduces=clip_norm is not None)
        merged = self.buffers.identities()
        self._constants: list[Tensor] = [b for b in model.buffers() if id(b) not in merged]
        self.reference = float(reference)
        self._clip_norm = clip_norm
        self._moments = moments
        self._scheduler, self._schedule_by = scheduler, schedule_by
        self.schedule_guard = ScheduleGuard(scheduler, optimizer)
        self.loss_scale = LossScale(scaler, optimizer) if scaler is not None and scaler.is_enabled() else None
        self._stepping = False
        self._hook = optimizer.register_step_pre_hook(self._own_step_only)

    def _own_step_only(self, *_: Any) -> None:
        if not self._stepping:
            raise UsageError(_STEP)

    @property
    def stepping(self) -> bool:
        """Whether an update is being made."""
        return self._stepping

    def close(self) -> None:
        """Give the optimizer back to the script: plain weights, no hook, no views."""
        self.finish_copy()
        self.back()
        self._hook.remove()
        for index in self.trained.optimized:
            self.parameters[index].grad = None

    @property
    def bits(self) -> int:
        """Length of the bitmap in a ticket: parameters with a gradient, then buffers that changed."""
        return len(self.parameters) + len(self.buffers)

    @property
    def scale(self) -> float:
        return self.loss_scale.value if self.loss_scale else 1.0

    @property
    def rate(self) -> float:
        """The schedule's rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def momentum(self) -> float:
        """The present momentum, which a schedule may change."""
        return momentum_of(self.optimizer)

    def backward(self, loss: Tensor, weight: float, ready: Callable[[int], None] | None = None) -> None:
        """Add ``weight`` times the gradient of ``loss`` to the contribution (in units of the reference batch).

        ``ready`` is called with each bucket of gradients that is complete.
        """
        now = self.look()
        self.check()
        self.schedule_guard.check()
        if self.loss_scale is not None:
            self.loss_scale.refuse_scaled(loss)
        self.gradients.admit(now)
        share = weight / self.reference
        scaled = loss if share == 1.0 else loss * share
        with self.gradients.watched(ready) if ready is not None else nullcontext():
            untyped.backward(self.loss_scale.scaled(scaled) if self.loss_scale else scaled)
        self.gradients.accumulated()

    def explain(self, error: BaseException) -> None:
        """The script ends with ``error``: add what to do about it, if that is known here."""
        if self.loss_scale is not None:
            self.loss_scale.explain(error)

    def check(self) -> None:
        """Raise if the script has spoilt the gradients since the last ``backward``."""
        if self.loss_scale is not None:
            self.loss_scale.refuse_own_calls()
        self.gradients.check()

    # -- which parameters are trained

    def look(self) -> bytes:
        """The set of parameters that the script trains now (``core.trained_set``)."""
        now = self.trained.look()
        if len(self.gradients.optimized) != len(self.trained.optimized):
            self.gradients.optimized = self.trained.optimized
        return now

    def settle_set(self) -> None:
        """Apply the set of trained parameters that was taken over, if that is still to be done."""
        self.trained.settle()
        self.look()

    @property
    def contributed(self) -> bytes:
        """The set of parameters that the contribution in progress is for."""
        return self.gradients.trained or self.look()

    def adopt(self, agreed: bytes) -> list[int]:
        """Train what the others have agreed on; returns the parameters that this optimizer lacks for it."""
        lacking = self.trained.adopt(agreed) if agreed else []
        self.look()
        return lacking

    def check_parameters(self, present: int) -> None:
        """A contribution has gradients for ``present``; raise if parameters of the model were replaced."""
        self._had_gradients |= present
        missing = self._had_gradients & ~present & ~self._missed_gradients
        if missing:
            # Once for each parameter: a branch of the model may be unused now and then.
            self._missed_gradients |= missing
            self.trained.check()

    def unscale(self) -> float | None:
        """Divide the contribution by the loss scale; returns its squared norm, None if unknown."""
        filling = self.gradients.filling
        if filling is not None:
            filling.scale(1.0 / self.scale)
            return filling.squared_norm()
        if self.loss_scale is None:
            return None
        own = self._own_gradients()
        if not own:
            # The only backward pass has failed, or nothing was computed.
            return 0.0
        untyped.multiply(own, 1.0 / self.scale)
        return sum(float(norm) ** 2 for norm in untyped.norms(own))

    def unscale_part(self, part: int) -> float:
        """The same for one bucket."""
        filling = self.gradients.filling
        assert filling is not None
        return filling.scaled_norm(part, 1.0 / self.scale)

    def park(self, weight: float, squared_norm: float | None, present: int) -> None:
        """Remember where this contribution alone would lead; ``squared_norm`` None: it is not usable."""
        if self.lookahead is None:
            return
        filling = self.gradients.filling
        assert filling is not None
        members = members_of(filling.members)
        self.finish_copy()
        if weight <= 0 or squared_norm is None:
            self.lookahead.park(None, present, 0.0, members)
            return
        mean = self.reference / weight
        self.lookahead.park(filling.views, present, mean * self._clipped(math.sqrt(squared_norm) * mean), members)

    def look_ahead(self, factor: float) -> None:
        """Move to the point where the update in flight will probably lead, unless the model is there already."""
        if self.lookahead is not None and self.lookahead.due:
            self.finish_copy()
            self.lookahead.go(self._hyper(factor))

    @property
    def ahead(self) -> bool:
        """Whether the model is at a look-ahead point."""
        return self.lookahead is not None and self.lookahead.away

    def cancel_look_ahead(self) -> None:
        """The update in flight will not be made: do not look ahead to it."""
        if self.lookahead is not None:
            self.lookahead.due = False

    def _clipped(self, norm: float) -> float:
        return 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + 1e-6))

    def back(self) -> None:
        """Return to the plain weights."""
        if self.lookahead is not None:
            self.lookahead.back()

    def apply(
        self,
        outcome: Settled,
        summed: FlatGradients | None,
        present: int,
        averaged: Callable[[FlatGradients | None], bool] | None = None,
        *,
        measures: bool = False,
    ) -> None:
        """Make the update of a settled round, or none if the group skips it. The model holds the plain weights.

        ``averaged`` is shown the mean gradients before the update, or None if there is none, and says whether it keeps
        them; ``measures``: their norm is taken.
        """
        kept = False
        self.settle_set()
        self.follow_clip_norm(outcome.clip_norm)
        if outcome.applied:
            present = self._without_untouched(outcome.touched, summed, present)
            takes = measures or self.takes_norm
            square = self._average(summed, self.reference / outcome.weight, measures=takes)
            self.grad_norm = math.nan if square is None else math.sqrt(square)
            if square is not None and measures:
                self.measured = outcome.round, square
            if averaged is not None and summed is not None:
                kept = averaged(summed)
            self.gradients.expose(summed, present if self.held is None else present & self.held)
            self._optimize(outcome.factor)
        elif averaged is not None:
            averaged(None)
        if kept:
            self.gradients.lose(summed)
        else:
            self.gradients.take_back(summed)
        self.follow_scale(applied=outcome.applied, finite=outcome.finite)

    def _without_untouched(self, touched: bytes, summed: FlatGradients | None, present: int) -> int:
        """Which gradients the update uses: only of parameters that all contributions were computed for."""
        if not touched:
            return present
        present &= (1 << len(self.parameters)) - 1
        used = present & int.from_bytes(touched, "little")
        if used != present:
            unused = [index for index in range(len(self.parameters)) if (present ^ used) >> index & 1]
            if summed is not None:
                summed.leave_out(unused)
            else:
                for index in unused:
                    self.parameters[index].grad = None
        return used

    def follow_clip_norm(self, bound: float | None) -> None:
        """Use the bound on the gradient's norm that the group has agreed on; None: the one given at ``join``."""
        if bound is not None and bound != (self._clip_norm or 0.0):
            self._clip_norm = bound or None
            self.fingerprint.note_reduction()

    @property
    def clip_norm(self) -> float | None:
        """The bound on the gradient's norm in force."""
        return self._clip_norm

    def rates(self, factor: float) -> tuple[float, ...]:
        """The learning rates of an update made now, for each parameter group."""
        return tuple(float(values["lr"]) for values in self._hyper(factor))

    def weigh(self, number: int, turn: int | None) -> None:
        """Take the digest of part of the weights after round ``number``; ``turn`` None: of all of them.

        The model holds the plain weights.
        """
        if self.held is None:
            self.weighed = number, self.fingerprint.of(turn)
            self.sketch = self.fingerprint.sketch(turn) if self.sketches else 0.0

    # -- handing the state on

    def constants(self) -> list[Tensor]:
        """Buffers that are never merged."""
        return self._constants

    def scheduled(self) -> list[dict[str, Any]]:
        """A copy of the hyper-parameters that the schedule has set in each parameter group."""
        return [
            # A rate that is a tensor is changed in place.
            {name: _held(group[name]) for name in _SCHEDULED if name in group}
            for group in self.optimizer.param_groups
        ]

    def catch_up(self, gradients: dict[int, Tensor], factor: float, scheduled: list[dict[str, Any]] | None) -> None:
        """Make one past update of the parameters in ``gradients``, with the hyper-parameters ``scheduled`` of then."""
        self.settle_set()
        before = [p.grad for p in self.parameters]
        now = [{name: group[name] for name in _SCHEDULED if name in group} for group in self.optimizer.param_groups]
        for index, p in enumerate(self.parameters):
            p.grad = gradients.get(index)
        self._schedule(scheduled or now)
        try:
            if gradients:
                self._optimize(factor)
        finally:
            for p, gradient in zip(self.parameters, before, strict=True):
                p.grad = gradient
            self._schedule(now)

    def _schedule(self, hyper: list[dict[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, hyper, strict=True):
            group.update(values)

    def follow_scale(self, *, applied: bool, finite: bool) -> None:
        """Change the loss scale as all workers do after a round; a round without weight does not change it."""
        if self.loss_scale is not None and (applied or not finite):
            moved = self.loss_scale.follow(finite=finite)
            if moved != 1.0 and self.gradients.filling is not None:
                # A contribution that was begun before is continued, and is divided by one scale in the end.
                self.gradients.filling.scale(moved)

    def read_scale(self) -> None:
        """The scaler has just been loaded with the leader's state."""
        if self.loss_scale is not None:
            self.loss_scale.read()

    def scale_state(self) -> list[float] | None:
        return None if self.loss_scale is None else self.loss_scale.state()

    def take_scale(self, state: list[float] | None) -> None:
        if state is not None and self.loss_scale is not None:
            self.loss_scale.take(state)

    def _average(self, summed: FlatGradients | None, mean: float, *, measures: bool) -> float | None:
        """Turn sums into clipped means; returns the squared norm of the means before clipping, if it was taken."""
        square = None
        if summed is not None:
            if measures or self._clip_norm is not None:
                square = summed.squared_norm() * mean * mean
            summed.scale(mean * (1.0 if square is None else self._clipped(math.sqrt(square))))
            return square
        own = self._own_gradients()
        if own and (measures or self._clip_norm is not None):
            square = sum(float(norm) ** 2 for norm in untyped.norms(own)) * mean * mean
        scale = mean * (1.0 if square is None else self._clipped(math.sqrt(square)))
        if scale != 1.0 and own:
            untyped.multiply(own, scale)
        return square

    def _own_gradients(self) -> list[Tensor]:
        """Without a group: the gradients that the optimizer will see."""
        gradients = (self.parameters[index].grad for index in self.trained.optimized)
        return [gradient for gradient in gradients if gradient is not None]

    def _hyper(self, factor: float) -> list[dict[str, Any]]:
        """The hyper-parameters of an update: the schedule's rate times ``factor``, and moments by the rule."""
        hyper: list[dict[str, Any]] = []
        for group in self.optimizer.param_groups:
            values: dict[str, Any] = {"lr": group["lr"] if factor == 1.0 else group["lr"] * factor}
            if self._moments:
                values["betas"], values["eps"] = rates.moments(group["betas"], group["eps"], factor)
            hyper.append(values)
        return hyper

    def _optimize(self, factor: float) -> None:
        self.finish_copy()
        hyper = self._hyper(factor)
        groups = self.optimizer.param_groups
        before = [{name: group[name] for name in values} for group, values in zip(groups, hyper, strict=True)]
        self._schedule(hyper)
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
            self._schedule(before)

    def advance_schedule(self, before: float, after: float) -> None:
        """Step the scheduler once for each reference batch that was completed between two counts of samples."""
        if self._schedule_by != "batch" or isinstance(self._scheduler, ReduceLROnPlateau):
            return
        for _ in range(int(after // self.reference) - int(before // self.reference)):
            self._step_schedule()

    def evaluated(self, result: float) -> None:
        """A top-level ``evaluate`` is over: step a schedule that follows results."""
        scheduler = self._scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            self.settle_set()
            self.schedule_guard.own(lambda: untyped.step_with(scheduler, result))

    def end_epoch(self, epoch: int) -> None:
        """Epoch ``epoch`` is over. Of a newcomer's past epochs the schedule has counted those it arrived with."""
        if epoch < self.epochs_ended:
            return
        self.epochs_ended = epoch + 1
        if self._schedule_by == "epoch" and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._step_schedule()

    def _step_schedule(self) -> None:
        if self._scheduler is None:
            return
        self.settle_set()
        with warnings.catch_warnings():
            # A skipped round advances the schedule without an optimizer step, as intended.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule_guard.own(self._scheduler.step)

    # -- plain weights

    def finish_copy(self) -> None:
        """Complete the copy that is being made, before weights or optimizer state change."""
        if self.copying is not None:
            copying, self.copying = self.copying, None
            copying.finish()

    def plain_weights(self, index: int) -> Tensor:
        """The tensor that holds the plain weights of a parameter at present."""
        if self.lookahead is not None and self.lookahead.away and not self._swapped:
            return self.lookahead.plain(index)
        return self.parameters[index]

    @contextmanager
    def plain(self, *, weights: bool = True) -> Generator[None]:
        """Put the plain weights and the group's merged buffers into the model meanwhile; may be nested.

        Without ``weights`` only the buffers.
        """
        self._shown += 1
        shows = self._shown == 1
        away = weights and shows and self.lookahead is not None and self.lookahead.away
        if away:
            self.finish_copy()
            self.lookahead.exchange()  # type: ignore[union-attr]
            self._swapped = True
        if shows:
            self.buffers.exchange()
        try:
            yield
        finally:
            self._shown -= 1
            if shows:
                self.buffers.exchange()
            if away:
                self.finish_copy()
                self.lookahead.exchange()  # type: ignore[union-attr]
                self._swapped = False


def _held(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
