"""Pliant trains one PyTorch model on whatever workers there are right now."""

from typing import TYPE_CHECKING, Any

from pliant.errors import JournalError, Left, NonFiniteLoss, PliantError, Refused, RunEnded, UsageError

if TYPE_CHECKING:
    from pliant.run import Run, join
    from pliant.settings import Floating

__all__ = [
    "Floating",
    "JournalError",
    "Left",
    "NonFiniteLoss",
    "PliantError",
    "Refused",
    "Run",
    "RunEnded",
    "UsageError",
    "join",
]


def __getattr__(name: str) -> Any:
    # The launcher and the coordinator need no torch, whose import takes seconds: it comes with the first use.
    if name in ("Run", "join"):
        from pliant import run

        return getattr(run, name)
    if name == "Floating":
        from pliant.settings import Floating

        return Floating
    raise AttributeError(f"module 'pliant' has no attribute {name!r}")
