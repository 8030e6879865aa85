"""Pliant trains one PyTorch model on whatever workers there are right now."""

import sys
from typing import TYPE_CHECKING, Any

from pliant import rates
from pliant.environment import is_first
from pliant.environment import is_worker as _is_worker
from pliant.errors import (
    CheckpointError,
    Diverged,
    Drifted,
    JournalError,
    Left,
    NonFiniteLoss,
    PliantError,
    Refused,
    RunEnded,
    Unsupported,
    UsageError,
)

# The launcher and the coordinator need no torch, whose import takes seconds. In a script everything is loaded with
# ``import pliant``: a worker that joins a run loses no time later.
if TYPE_CHECKING or "torch" in sys.modules or _is_worker():
    from pliant.run import Run, join
    from pliant.settings import Floating
    from pliant.worker.script.hooks import Update

__all__ = [
    "CheckpointError",
    "Diverged",
    "Drifted",
    "Floating",
    "JournalError",
    "Left",
    "NonFiniteLoss",
    "PliantError",
    "Refused",
    "Run",
    "RunEnded",
    "Unsupported",
    "Update",
    "UsageError",
    "is_first",
    "join",
    "rates",
]


def __getattr__(name: str) -> Any:
    if name in ("Run", "join"):
        from pliant import run

        return getattr(run, name)
    if name == "Floating":
        from pliant.settings import Floating

        return Floating
    if name == "Update":
        from pliant.worker.script.hooks import Update

        return Update
    raise AttributeError(f"module 'pliant' has no attribute {name!r}")
