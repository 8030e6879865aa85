"""Carrying out what the group decided: one update of the user's model.

Question  How does a reduced gradient become new weights, the same on every worker?
Holds     The optimizer sees plain weights, the weighted mean gradient (clipped as one), and a learning rate that is
          the schedule's times the group's factor; afterwards the group's ``lr`` is the schedule's again, because
          chained schedulers read it back. The schedule counts samples, never rounds.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant.core import scaling
from pliant.core.rounds import Settled
from pliant.errors import UsageError
from pliant.tensors.buffers import Buffers
from pliant.tensors.gradients import Buffer, Gradients
from pliant.tensors.lookahead import LookAhead

_STEP = (
    "optimizer.step() was called by the script: remove it from the loop; "
    "run.step() updates the weights when the group's gradient is there"
)


class Training:
    """The user's model and optimizer, and everything an update touches."""

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
    ) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.gradients = Gradients(self.parameters, grouped=grouped)
        self.buffers = Buffers(model)
        self.lookahead = LookAhead(optimizer) if correction == "lookahead" and grouped else None
        self.held: int | None = None
        """the bitmap of parameters this worker holds, while it takes the state over; None: all of them"""
        self.epochs_ended = 0
        trained = {id(p) for p in self.parameters}
        merged = self.buffers.identities()
        self._constants: list[Tensor] = [p for p in model.parameters() if id(p) not in trained]
        self._constants += [b for b in model.buffers() if id(b) not in merged]
        self.reference = float(reference)
        self._clip_norm = clip_norm
        self._scheduler, self._schedule_by = scheduler, schedule_by
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scale = _scale_of(self._scaler) if self._scaler else None
        self._stepping = False
        self._hook = optimizer.register_step_pre_hook(self._own_step_only)

    def _own_step_only(self, *_: Any) -> None:
        if not self._stepping:
            raise UsageError(_STEP)

    def close(self) -> None:
        """Give the optimizer back to the script: plain weights, no hook, no views."""
        self.back()
        self._hook.remove()
        for p in self.parameters:
            p.grad = None

    @property
    def bits(self) -> int:
        """Length of the bitmap in a ticket: parameters with a gradient, then buffers that changed."""
        return len(self.parameters) + len(self.buffers)

    @property
    def scale(self) -> float:
        return self._scale.scale if self._scale else 1.0

    @property
    def rate(self) -> float:
        """The schedule's rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add ``weight`` times the gradient of ``loss`` to the contribution (in units of the reference batch)."""
        self.gradients.check()
        share = weight / self.reference
        scaled = loss if share == 1.0 else loss * share
        (self._scaler.scale(scaled) if self._scaler else scaled).backward()
        self.gradients.accumulated()

    def unscale(self) -> float | None:
        """Take the loss scale out of the contribution; the squared norm of what is left, None where unknown."""
        filling = self.gradients.filling
        if filling is not None:
            filling.scale(1.0 / self.scale)
            return filling.squared_norm()
        if self._scaler is None:
            return None
        own = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(own, 1.0 / self.scale)
        return sum(float(norm) ** 2 for norm in torch._foreach_norm(own))

    def park(self, weight: float, squared_norm: float | None, present: int) -> None:
        """Remember where this contribution alone would lead; ``squared_norm`` None: it is not usable."""
        if self.lookahead is None:
            return
        filling = self.gradients.filling
        assert filling is not None
        if weight <= 0 or squared_norm is None:
            self.lookahead.park(None, present, 0.0)
            return
        mean = self.reference / weight
        self.lookahead.park(filling.views, present, mean * self._clipped(math.sqrt(squared_norm) * mean))

    def look_ahead(self, factor: float) -> None:
        """Move to where the update in flight will probably lead, if that has not been done."""
        if self.lookahead is not None and self.lookahead.due:
            self.lookahead.go(factor)

    def cancel_look_ahead(self) -> None:
        """The update that was to be looked ahead to is not coming."""
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
        summed: Buffer | None,
        present: int,
        averaged: Callable[[Sequence[Tensor] | None], None] | None = None,
    ) -> None:
        """Make the update of a settled round, or none if the group skips it. The model holds the plain weights.

        ``averaged`` is shown the mean gradients before the update, or None if there is none.
        """
        if outcome.applied:
            mean = self.reference / outcome.weight
            self._average(summed, mean)
            if averaged is not None and summed is not None:
                averaged(summed.views)
            self.gradients.expose(summed, present if self.held is None else present & self.held)
            self._optimize(outcome.factor)
        elif averaged is not None:
            averaged(None)
        self.gradients.take_back(summed)
        self.follow_scale(applied=outcome.applied)

    # -- taking the state over

    def constants(self) -> list[Tensor]:
        """Frozen parameters, and buffers that are never merged."""
        return self._constants

    def catch_up(self, gradients: dict[int, Tensor], factor: float, rates: list[float] | None) -> None:
        """Make one past update of the parameters in ``gradients``; ``rates`` are the schedule's of that time."""
        before = [p.grad for p in self.parameters]
        groups = self.optimizer.param_groups
        now = [group["lr"] for group in groups]
        for index, p in enumerate(self.parameters):
            p.grad = gradients.get(index)
        for group, rate in zip(groups, rates or now, strict=True):
            group["lr"] = rate
        try:
            if gradients:
                self._optimize(factor)
        finally:
            for p, gradient in zip(self.parameters, before, strict=True):
                p.grad = gradient
            for group, rate in zip(groups, now, strict=True):
                group["lr"] = rate

    def follow_scale(self, *, applied: bool) -> None:
        """Move the loss scale as all workers do after a round."""
        if self._scale is not None and self._scaler is not None:
            self._scale = scaling.after(self._scale, finite=applied)
            self._scaler.update(self._scale.scale)

    def scale_state(self) -> list[float] | None:
        return None if self._scale is None else list(dataclasses.astuple(self._scale))

    def take_scale(self, state: list[float] | None) -> None:
        if state is not None and self._scale is not None and self._scaler is not None:
            kinds = [type(value) for value in dataclasses.astuple(self._scale)]
            self._scale = scaling.Scale(*(kind(value) for kind, value in zip(kinds, state, strict=True)))
            self._scaler.update(self._scale.scale)

    def _average(self, summed: Buffer | None, mean: float) -> None:
        if summed is not None:
            norm = math.sqrt(summed.squared_norm()) if self._clip_norm is not None else 0.0
            summed.scale(mean * self._clipped(norm * mean))
            return
        own = [p.grad for p in self.parameters if p.grad is not None]
        clip = 1.0
        if self._clip_norm is not None:
            norms = torch._foreach_norm(own)
            clip = self._clipped(math.sqrt(sum(float(norm) ** 2 for norm in norms)) * mean)
        if mean * clip != 1.0:
            torch._foreach_mul_(own, mean * clip)

    def _optimize(self, factor: float) -> None:
        groups = self.optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        if factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * factor
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
            for group, rate in zip(groups, scheduled, strict=True):
                group["lr"] = rate

    def advance_schedule(self, before: int, after: int) -> None:
        """Step the scheduler once for every reference batch of samples completed between two counts."""
        if self._scheduler is None or self._schedule_by != "batch":
            return
        for _ in range(int(after // self.reference) - int(before // self.reference)):
            self._step_schedule()

    def end_epoch(self, epoch: int) -> None:
        """Epoch ``epoch`` is over; a newcomer's past epochs were counted by the others."""
        if epoch < self.epochs_ended:
            return
        self.epochs_ended = epoch + 1
        if self._scheduler is not None and self._schedule_by == "epoch":
            self._step_schedule()

    def _step_schedule(self) -> None:
        with warnings.catch_warnings():
            # A round the group skips advances the schedule without an optimizer step: intended here.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._scheduler.step()  # type: ignore[union-attr]

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Show the plain weights and the group's merged buffers for a while."""
        away = self.lookahead is not None and self.lookahead.away
        if away:
            self.lookahead.exchange()  # type: ignore[union-attr]
        self.buffers.exchange()
        try:
            yield
        finally:
            self.buffers.exchange()
            if away:
                self.lookahead.exchange()  # type: ignore[union-attr]


def _scale_of(scaler: torch.amp.GradScaler) -> scaling.Scale:
    return scaling.Scale(
        scale=float(scaler.get_scale()),
        growth_factor=float(scaler.get_growth_factor()),
        backoff_factor=float(scaler.get_backoff_factor()),
        growth_interval=int(scaler.get_growth_interval()),
    )
