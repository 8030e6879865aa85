"""Detects learning rates that the script changes beside Pliant.

Question  Has the script stepped a scheduler that Pliant steps, or one that Pliant does not know of?
Holds     Between two calls of ``backward`` the given scheduler changes only by Pliant's own steps and by states that
          were taken over. Without a given one, the rates of an optimizer that some scheduler was made for must not
          change; if there is no scheduler at all, the script may set them as it likes.
Source    ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pliant.errors import UsageError

_STEPPED = (
    "scheduler.step() was called by the script: remove it from the loop; Pliant steps the scheduler given to join, "
    'by samples (schedule_by="epoch": once per epoch)'
)
_UNKNOWN = (
    "the learning rate was moved by a scheduler that join does not know of: give it to join(scheduler=…) and remove "
    "scheduler.step() from the loop; Pliant steps it, on all workers alike"
)


class ScheduleGuard:
    """Compares the schedule, before each ``backward``, with what Pliant has left it at."""

    def __init__(self, scheduler: Any | None, optimizer: Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer
        self._left: list[Any] | None = None
        """where it was left; None: unknown, so that anything is right (at the start, and after state was installed)"""
        self._added: list[float] = []
        """what Pliant's own steps have added since then"""

    def check(self) -> None:
        """Raise if the script has changed it since the last check."""
        now = self._now()
        if now is None:
            return
        expected = now if self._left is None else self._left
        if self._left is not None and self._added:
            expected = [a + b for a, b in zip(self._left, self._added, strict=True)]
        self._left, self._added = now, []
        # A parameter group that was added since then has its own rate.
        if now[: len(expected)] != expected:
            raise UsageError(_UNKNOWN if self._scheduler is None else _STEPPED)

    def own(self, step: Callable[[], None]) -> None:
        """Step the scheduler for Pliant."""
        before = _counts(self._scheduler)
        step()
        made = [after - first for after, first in zip(_counts(self._scheduler), before, strict=True)]
        self._added = [a + b for a, b in zip(self._added, made, strict=True)] if self._added else made

    def forget(self) -> None:
        """The state of scheduler and optimizer was installed, from another worker or a checkpoint."""
        self._left, self._added = None, []

    def _now(self) -> list[Any] | None:
        if self._scheduler is not None:
            return _counts(self._scheduler)
        # torch's schedulers mark the optimizer that they are made for.
        if not hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            return None
        return [_rate(group["lr"]) for group in self._optimizer.param_groups]


def _counts(scheduler: Any) -> list[float]:
    """The counters of a scheduler, and of those that it consists of."""
    counts = [getattr(scheduler, name, 0) for name in ("last_epoch", "_step_count")]
    found: list[float] = [count if isinstance(count, int | float) else 0 for count in counts]
    for inner in getattr(scheduler, "_schedulers", ()):
        found += _counts(inner)
    return found


def _rate(value: Any) -> Any:
    # Reading a number from a device would wait for it.
    return (id(value), value._version) if isinstance(value, Tensor) else value
