"""The look-ahead point: the weights at which a worker computes while the group's update is still being summed.

Question  At which weights are the next gradients computed, so that one round of delay costs (almost) nothing?
Holds     The plain weights are kept aside bit for bit and restored before the true update is made. The look-ahead step
          (*peek*) never changes the optimizer's state. Storage never moves.
Source    PAPERS §3 (ours): ŵ = w − η(μu + ḡ), the update that the worker's own gradient would make. This is exact for
          SGD (momentum, dampening, Nesterov, weight decay) and Adam/AdamW (with amsgrad). For any other optimizer the
          last displacement is repeated: ŵ = w + (w − w_before).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from pliant.tensors import allocation

Peek = Callable[[dict[str, Any], dict[str, Any], Tensor, Tensor | None], None]
"""Moves the weights in place by one step of the optimizer. Arguments: parameter group, optimizer state, weights, own
mean gradient (None: zero)."""

# Elements handled at a time: half a megabyte stays in the cache between the passes over it.
_PIECE = 1 << 17


def peek_for(optimizer: Optimizer) -> Peek | None:
    """The exact peek for this optimizer; None: the last displacement is repeated instead."""
    if type(optimizer) is SGD:
        return _peek_sgd
    if type(optimizer) in (Adam, AdamW):
        return _peek_adam
    return None


class LookAhead:
    """Moves the model's parameters to the look-ahead point and back.

    It needs memory for one copy of the weights. While the model is at the look-ahead point, the copy holds the plain
    weights. From a hand-in until the next look-ahead step (``park`` to ``go``) it holds the worker's own gradient,
    because the buffer that was handed in is being summed in place.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor] | None = None) -> None:
        """``parameters``: in the order of bitmaps and gradients; None: all of the optimizer's that are trained."""
        self._optimizer = optimizer
        if parameters is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._parameters = parameters
        self._index = {id(p): index for index, p in enumerate(parameters)}
        self._peek = peek_for(optimizer)
        self._copy: dict[int, Tensor] = {}
        """by parameter, for those whose gradients are summed"""
        self._parked: int | None = None
        self.due = False
        """a contribution was handed in: compute the next micro-batch at the look-ahead point"""
        self.away = False
        """the model holds a look-ahead point now"""

    @torch.no_grad()
    def park(
        self,
        gradients: Sequence[Tensor | None] | None,
        present: int,
        scale: float,
        members: Sequence[int] | None = None,
    ) -> None:
        """Keep this worker's own gradient for the look-ahead step. The model must hold the plain weights.

        ``gradients``: the worker's sums; None if it contributed nothing (a gradient of zero). ``present``: bitmap of
        the parameters that have one. ``scale`` turns sums into the (clipped) mean. ``members``: the parameters in the
        layout; None: all.
        """
        self.due = True
        self._make_room(range(len(self._parameters)) if members is None else members)
        if self._peek is None:
            # The weights before the coming update. At a phase's start there is no update, so nothing is repeated.
            torch._foreach_copy_(list(self._copy.values()), self._laid_out)
            return
        self._parked = None if gradients is None else present
        if gradients is not None:
            for index, copy in self._copy.items():
                gradient = gradients[index]
                assert gradient is not None
                torch.mul(gradient, scale, out=copy)

    def _make_room(self, members: Sequence[int]) -> None:
        if self._copy.keys() != set(members):
            self._copy = {index: self._copy.get(index, _like(self._parameters[index])) for index in members}

    @property
    def _laid_out(self) -> list[Tensor]:
        return [self._parameters[index] for index in self._copy]

    @torch.no_grad()
    def depart_from(self, weights: Sequence[Tensor]) -> None:
        """Set the weights at which the gradient was parked; it matters only if the last displacement is repeated."""
        if self.repeats:
            torch._foreach_copy_(list(self._copy.values()), [weights[index] for index in self._copy])

    @property
    def repeats(self) -> bool:
        """Whether there is no exact peek for this optimizer."""
        return self._peek is None

    @torch.no_grad()
    def go(self, hyper: Sequence[dict[str, Any]]) -> None:
        """Keep the plain weights aside and move to the look-ahead point.

        ``hyper``: for each parameter group, the settings (``lr`` and others) that the coming update will use instead of
        the group's own.
        """
        self.due = False
        self.away = True
        if self._peek is None:
            self._repeat_displacement()
            return
        for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
            # Before torch 2.7 AdamW's groups have no ``decoupled_weight_decay``.
            decoupled = isinstance(self._optimizer, AdamW) or group.get("decoupled_weight_decay", False)
            settings = {**group, **values, "lr": float(values["lr"]), "decoupled": decoupled}
            for p in group["params"]:
                index = self._index.get(id(p))
                if index in self._copy:
                    self._go(self._peek, settings, index, p)

    def _go(self, peek: Peek, hyper: dict[str, Any], index: int, p: Tensor) -> None:
        """Swap the parked gradient for the plain weights and step ahead, piece by piece."""
        contributed = self._parked is not None
        # An optimizer skips a parameter without a gradient; so does the peek.
        moves = self._parked is None or bool(self._parked >> index & 1)
        for weights, copy, state in _pieces(p, self._copy[index], self._optimizer.state.get(p, {})):
            own = copy.clone() if contributed and moves else None
            copy.copy_(weights)
            if moves:
                peek(hyper, state, weights, own)

    def _repeat_displacement(self) -> None:
        for p, before in zip(self._laid_out, self._copy.values(), strict=True):
            ahead = p.detach() * 2 - before
            before.copy_(p)
            p.copy_(ahead)

    @torch.no_grad()
    def back(self) -> None:
        """Return to the plain weights, exactly."""
        self.due = False
        if self.away:
            torch._foreach_copy_(self._laid_out, list(self._copy.values()))
            self.away = False

    def plain(self, index: int) -> Tensor:
        """The plain weights of a parameter, while the model is at the look-ahead point."""
        return self._copy.get(index, self._parameters[index])

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap plain weights and look-ahead point in place; a second call undoes the first."""
        for p, plain in zip(self._laid_out, self._copy.values(), strict=True):
            held = p.detach().clone()
            p.copy_(plain)
            plain.copy_(held)


def _like(p: Tensor) -> Tensor:
    if p.is_contiguous():
        return allocation.fresh(p.shape, p.dtype, p.device)
    return torch.empty_like(p, memory_format=torch.preserve_format)


def _pieces(p: Tensor, copy: Tensor, state: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """The weights, their copy and their optimizer state in pieces that fit into the cache."""
    like = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == p.shape}
    if p.numel() <= _PIECE or not all(t.is_contiguous() for t in (p, copy, *like.values())):
        yield p.detach(), copy, state
        return
    weights, flat = p.detach().view(-1), copy.view(-1)
    flats = {name: value.view(-1) for name, value in like.items()}
    for start in range(0, p.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        yield weights[piece], flat[piece], {**state, **{name: value[piece] for name, value in flats.items()}}


def _peek_sgd(group: dict[str, Any], state: dict[str, Any], p: Tensor, own: Tensor | None) -> None:
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
        p.add_(own, alpha=-rate * a * sign)


def _peek_adam(group: dict[str, Any], state: dict[str, Any], p: Tensor, own: Tensor | None) -> None:
    rate, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if own is None and "exp_avg" not in state:
        return
    gradient = torch.zeros_like(p) if own is None else own
    if group["maximize"]:
        gradient.neg_()
    if decay and group["decoupled"]:
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
