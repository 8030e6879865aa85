"""How the loss scale of mixed precision changes.

Question  Which scale does the group use next, after a round with or without an overflow?
Holds     The scale is a function of the rounds alone, so it is equal on all workers. It stays within the range of
          float32, the type in which it is multiplied with a loss.
Source    torch.amp.GradScaler's rule: back off on a non-finite round, grow after an interval without one.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

_LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""Largest float32. Where no overflow ever happens (bfloat16, say), a scale would finally grow beyond it."""


class Scale(msgspec.Struct, frozen=True):
    """The scale, the rule's settings, and the finite rounds since the last change."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    finite_rounds: int = 0


def after(scale: Scale, *, finite: bool) -> Scale:
    """The scale for contributions begun after a round."""
    if not finite:
        return replace(scale, scale=scale.scale * scale.backoff_factor, finite_rounds=0)
    if scale.finite_rounds + 1 == scale.growth_interval:
        grown = scale.scale * scale.growth_factor
        return replace(scale, scale=grown if grown <= _LARGEST else scale.scale, finite_rounds=0)
    return replace(scale, finite_rounds=scale.finite_rounds + 1)
