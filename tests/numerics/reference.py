"""Hand-written training in float64, against which the engine is compared.

Holds     Nothing of Pliant's numerics is used here: plain autograd and torch's own optimizers on the contributions that
          the group's tickets name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MicroBatch = tuple[Tensor, Tensor, float]
"""inputs, targets, weight"""


@dataclass
class Drawn:
    """What one worker drew, in order, over the whole run; the tickets cut it into contributions."""

    micro_batches: list[MicroBatch] = field(default_factory=list)


def contributions(drawn: Sequence[Drawn], counts: Sequence[Sequence[int]]) -> list[list[list[MicroBatch]]]:
    """Per round, per worker: the micro-batches it handed in. ``counts`` are the tickets' micro-batches per round."""
    fronts = [0] * len(drawn)
    rounds = []
    for row in counts:
        parts = []
        for member, count in enumerate(row):
            parts.append(drawn[member].micro_batches[fronts[member] : fronts[member] + count])
            fronts[member] += count
        rounds.append(parts)
    assert fronts == [len(worker.micro_batches) for worker in drawn]
    return rounds


def gradient_sum(
    model: nn.Module, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], part: Sequence[MicroBatch]
) -> tuple[list[Tensor | None], float]:
    """Σ weight·∇loss over a contribution at the model's present weights, and Σ weight."""
    parameters = list(model.parameters())
    total: list[Tensor | None] = [None] * len(parameters)
    weight_sum = 0.0
    for x, y, weight in part:
        gradients = torch.autograd.grad(loss_of(model, x, y), parameters, allow_unused=True)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                before = total[index]
                total[index] = gradient * weight if before is None else before + gradient * weight
        weight_sum += weight
    return total, weight_sum


def added(parts: Sequence[list[Tensor | None]]) -> list[Tensor | None]:
    result: list[Tensor | None] = []
    for column in zip(*parts, strict=True):
        present = [tensor for tensor in column if tensor is not None]
        result.append(torch.stack(present).sum(0) if present else None)
    return result


def update(
    model: nn.Module, optimizer: Optimizer, total: list[Tensor | None], weight: float, clip: float | None
) -> None:
    """One optimizer step on the mean gradient, clipped by torch's own function; none without any weight."""
    if not weight:
        return
    for p, gradient in zip(model.parameters(), total, strict=True):
        p.grad = None if gradient is None else gradient / weight
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def ahead(
    model: nn.Module, optimizer: Optimizer, total: list[Tensor | None], weight: float, clip: float | None
) -> nn.Module:
    """The model after a real step of a copied optimizer on one worker's own mean gradient."""
    twins: dict[str, Any] = copy.deepcopy({"model": model, "optimizer": optimizer})
    update(twins["model"], twins["optimizer"], total, weight, clip)
    return twins["model"]
