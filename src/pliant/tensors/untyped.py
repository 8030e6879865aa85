"""Parts of torch that have no types, or no public name.

Question  On which functions and attributes of torch does Pliant rely that its stubs leave out?
Holds     Each is called here and nowhere else above this package, with its types.
Source    torch 2.6 and later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau


def backward(loss: Tensor) -> None:
    """Compute the gradients of a scalar."""
    loss.backward()


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor, in one call."""
    return list(torch._foreach_norm(tensors))


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors in place, in one call."""
    torch._foreach_mul_(tensors, factor)


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over the memory of an array."""
    return torch.from_numpy(np.ascontiguousarray(array))


def step_with(scheduler: ReduceLROnPlateau, result: float) -> None:
    """Give a scheduler that follows results the next one."""
    scheduler.step(result)


def scale_of(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The scaler's scale on the device; None before its first use."""
    return scaler._scale


def accounts_of(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """What the scaler was called for since its last ``update``, by the id of the optimizer."""
    return scaler._per_optimizer_states
