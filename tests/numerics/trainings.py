"""``Training`` as a worker has it, without a worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pliant.worker.training import Training


def training_of(
    model: nn.Module, optimizer: Optimizer, scheduler: Any = None, scaler: torch.amp.GradScaler | None = None
) -> Training:
    """A ``Training`` as in a group, with a reference batch of eight samples, no clipping and no look-ahead."""
    return Training(
        model,
        optimizer,
        reference=8,
        grouped=True,
        correction="none",
        clip_norm=None,
        scheduler=scheduler,
        schedule_by="batch",
        scaler=scaler,
    )
