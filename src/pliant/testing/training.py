"""Training over exact numbers: the model, its optimizer, and what a worker does with them.

Question  Which model does a simulated worker train?
Holds     ``VirtualTraining`` is ``worker.training.Training`` itself over the numbers of ``exact``; the optimizer is
          SGD with momentum, and a scheduler moves its rate and momentum with every step.
Source    ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from pliant.testing.exact import (
    PARAMETERS,
    PRIME,
    Number,
    VirtualBuffers,
    VirtualGradients,
    VirtualLookAhead,
    VirtualWeightsDigest,
    exact,
)
from pliant.worker.script.schedule_guard import ScheduleGuard
from pliant.worker.script.trained_set import TrainedSet
from pliant.worker.training import Training


class _Model:
    """The part of ``nn.Module`` that ``worker.script.trained_set`` uses."""

    def __init__(self, numbers: Sequence[Number]) -> None:
        self._numbers = numbers

    def parameters(self) -> Sequence[Number]:
        return self._numbers

    def named_parameters(self) -> list[tuple[str, Number]]:
        return [(f"number {index}", number) for index, number in enumerate(self._numbers)]


class VirtualOptimizer:
    """SGD with momentum."""

    def __init__(self, parameters: Sequence[Number], rate: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": rate, "momentum": 0.5, "params": list(parameters)}]
        self.state: dict[Number, dict[str, Any]] = _States()

    def step(self) -> None:
        for group in self.param_groups:
            rate, keep = exact(group["lr"]), exact(group["momentum"])
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, rate, keep)

    def _move(self, p: Number, rate: int, keep: int) -> None:
        state = self.state[p]
        carried = state["momentum"].value if "momentum" in state else 0
        momentum = (carried * keep + p.grad.value) % PRIME  # type: ignore[union-attr]
        state["momentum"] = Number(momentum)
        p.value = (p.value - rate * momentum) % PRIME

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.param_groups.append(group)


class _States(dict[Number, dict[str, Any]]):
    def __missing__(self, key: Number) -> dict[str, Any]:
        self[key] = {}
        return self[key]


class VirtualScheduler:
    """Moves the rate and the momentum with every step."""

    def __init__(self, optimizer: VirtualOptimizer) -> None:
        self._optimizer = optimizer
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for group in self._optimizer.param_groups:
            group.update(lr=(1 + self.steps % 5) / 8, momentum=(1 + self.steps % 3) / 4)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class VirtualTraining(Training):
    """``worker.training.Training`` over exact numbers: the same code with other tensors."""

    def __init__(self, *, reference: int, buffers: int, start: int, grows: bool = False, nbytes: int = 8) -> None:
        """``grows``: the optimizer gets the last parameter only later, from the script; ``nbytes``: of a parameter."""
        numbers: Any = [Number((start + index) % PRIME, nbytes) for index in range(PARAMETERS)]
        self.optimizer: Any = VirtualOptimizer(numbers[:-1] if grows else numbers, 0.125)
        self.trained = TrainedSet(cast(Any, _Model(numbers)), self.optimizer)
        self.parameters = self.trained.parameters
        self._had_gradients = self._missed_gradients = 0
        self.gradients: Any = VirtualGradients(numbers, self.trained.look)
        self.gradients.optimized = self.trained.optimized
        self.buffers: Any = VirtualBuffers(buffers)
        self.lookahead: Any = VirtualLookAhead(numbers)
        self.held = None
        self.epochs_ended = 0
        self._constants = []
        self.reference = float(reference)
        self._clip_norm = None
        self._moments = False
        self.measured = (0, 0.0)
        self.weighed = (0, 0)
        self.sketches, self.sketch = False, 0.0
        self.fingerprint: Any = VirtualWeightsDigest(numbers)
        self.scheduler = VirtualScheduler(self.optimizer)
        self._scheduler, self._schedule_by = self.scheduler, "batch"
        self.schedule_guard = ScheduleGuard(self.scheduler, self.optimizer)
        self.loss_scale = None
        self._stepping = False

    def close(self) -> None:
        self.finish_copy()
        self.back()

    def unscale(self) -> float | None:
        return self.gradients.filling.squared_norm()

    def unscale_part(self, part: int) -> float:
        return self.gradients.filling.scaled_norm(part, 1.0)

    def _step_schedule(self) -> None:
        self.settle_set()
        self.scheduler.step()

    def apply(
        self,
        outcome: Any,
        summed: Any,
        present: int,
        averaged: Callable[[Any], bool] | None = None,
        *,
        measures: bool = False,
    ) -> None:
        assert not self.lookahead.away, "an update is made at the look-ahead point"
        super().apply(outcome, summed, present, averaged, measures=measures)

    def plain_values(self) -> tuple[int, ...]:
        """The plain weights and the momenta, also while the model is at a look-ahead point."""
        with self.plain():
            weights = tuple(p.value for p in self.parameters)  # type: ignore[attr-defined]
        state = self.optimizer.state
        return (*weights, *(state[p]["momentum"].value if "momentum" in state[p] else 0 for p in self.parameters))
