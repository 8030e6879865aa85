"""Where a worker computes while the group's update is still on its way.

Question  At which point are the next gradients taken, so that one round of delay costs (almost) nothing?
Holds     The plain weights are kept aside bit for bit and come back before the true update is made. The peek never
          changes the optimizer's state. Storage never moves.
Source    PAPERS §3 (ours): ŵ = w − η(μu + ḡ), the update the worker's own gradient would make. SGD (momentum,
          dampening, Nesterov, weight decay) and Adam/AdamW (amsgrad too) are exact; for any other optimizer the
          last displacement is repeated: ŵ = w + (w − w_before).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

Peek = Callable[[dict[str, Any], dict[str, Any], Parameter, Tensor | None, float], None]
"""(param group, optimizer state of p, p, own gradient sum or None, its scale): moves p by the step it predicts"""


def peek_for(optimizer: Optimizer) -> Peek | None:
    """The exact peek of this optimizer, or None: the last displacement is repeated then."""
    if type(optimizer) is SGD:
        return _peek_sgd
    if type(optimizer) in (Adam, AdamW):
        return _peek_adam
    return None


class LookAhead:
    """Moves the model's parameters to the look-ahead point and back."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._parameters: list[Tensor] = [p for group in self._groups for p in group["params"] if p.requires_grad]
        self._peek = peek_for(optimizer)
        self._plain: list[Tensor] = []
        self._away = False

    @property
    def away(self) -> bool:
        """Whether the model holds a look-ahead point now."""
        return self._away

    @torch.no_grad()
    def go(self, gradients: Sequence[Tensor] | None, present: int, scale: float, factor: float) -> None:
        """Keep the plain weights aside and move to the look-ahead point.

        ``gradients`` are this worker's own sums, in the order of the parameters; ``scale`` turns them into the
        (clipped) mean; None: nothing was contributed, the gradient counts as zero and the momentum part remains.
        """
        if self._peek is None:
            self._repeat_displacement()
        else:
            self._keep()
            self._step_ahead(self._peek, gradients, present, scale, factor)
        self._away = True

    def _step_ahead(
        self, peek: Peek, gradients: Sequence[Tensor] | None, present: int, scale: float, factor: float
    ) -> None:
        index = 0
        for group in self._groups:
            hyper = {**group, "lr": float(group["lr"]) * factor}
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                own = None if gradients is None else gradients[index]
                # An optimizer passes over a parameter without gradient; so does the peek.
                if own is None or present >> index & 1:
                    peek(hyper, self._optimizer.state.get(p, {}), p, own, scale)
                index += 1

    def _keep(self) -> None:
        if not self._plain:
            self._plain = [torch.empty_like(p, memory_format=torch.preserve_format) for p in self._parameters]
        torch._foreach_copy_(self._plain, self._parameters)

    def _repeat_displacement(self) -> None:
        if not self._plain:
            self._keep()
            return
        for p, before in zip(self._parameters, self._plain, strict=True):
            ahead = p.detach() * 2 - before
            before.copy_(p)
            p.copy_(ahead)

    @torch.no_grad()
    def back(self) -> None:
        """Return to the plain weights, exactly."""
        if self._away:
            torch._foreach_copy_(self._parameters, self._plain)
            self._away = False

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap plain weights and look-ahead point in place; twice is nothing."""
        for p, plain in zip(self._parameters, self._plain, strict=True):
            held = p.detach().clone()
            p.copy_(plain)
            plain.copy_(held)


def _peek_sgd(group: dict[str, Any], state: dict[str, Any], p: Parameter, own: Tensor | None, scale: float) -> None:
    rate, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
    buffer = state.get("momentum_buffer")
    if own is None and buffer is None:
        return
    sign = -1.0 if group["maximize"] else 1.0
    # step = a·d + b·u with d = sign·ḡ + decay·w and u the buffer before the step
    if momentum == 0.0:
        a, b = 1.0, 0.0
    else:
        fresh = 1.0 if buffer is None else 1.0 - group["dampening"]
        a, b = (1.0 + momentum * fresh, momentum * momentum) if group["nesterov"] else (fresh, momentum)
    if decay:
        p.mul_(1.0 - rate * a * decay)
    if buffer is not None and b:
        p.add_(buffer, alpha=-rate * b)
    if own is not None:
        p.add_(own, alpha=-rate * a * sign * scale)


def _peek_adam(group: dict[str, Any], state: dict[str, Any], p: Parameter, own: Tensor | None, scale: float) -> None:
    rate, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if own is None and "exp_avg" not in state:
        return
    gradient = torch.zeros_like(p) if own is None else own * (-scale if group["maximize"] else scale)
    if decay and group.get("decoupled_weight_decay", False):
        p.mul_(1.0 - rate * decay)
    elif decay:
        gradient.add_(p, alpha=decay)
    step = float(state.get("step", 0.0)) + 1.0
    squares = gradient * gradient
    squares.mul_(1.0 - beta2)
    gradient.mul_(1.0 - beta1)
    if "exp_avg" in state:
        gradient.add_(state["exp_avg"], alpha=beta1)
        squares.add_(state["exp_avg_sq"], alpha=beta2)
    if group["amsgrad"] and "max_exp_avg_sq" in state:
        torch.maximum(squares, state["max_exp_avg_sq"], out=squares)
    denominator = squares.sqrt_().div_(math.sqrt(1.0 - beta2**step)).add_(eps)
    p.addcdiv_(gradient, denominator, value=-rate / (1.0 - beta1**step))
