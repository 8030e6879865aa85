"""How the learning rate follows the batch.

Question  By which factor is the schedule's rate multiplied in this round?
Holds     A fixed batch always has factor 1. A rising factor is ramped, because the momentum buffer still
          carries the noise of the old batch; a falling one takes effect at once.
Source    Dynamic mini-batch SGD (Lin et al. 2019, eq. 6) for the ramp; its length from the noise recursion
          U ← μ²U + (1−μ²)/k (PAPERS §1, ours); sqrt rule for Adam (Malladi et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# The open batch fluctuates from round to round by about one micro-batch of every worker; a memory of ten
# rounds takes that out and still follows a change of roster within the ramp's own length.
_EMA_KEEP = 0.9


def constant(k: float) -> float:
    """The rate ignores the batch."""
    return 1.0


def linear(k: float) -> float:
    """The rate grows with the batch: SGD, while the batch is far below the noise scale."""
    return k


def sqrt(k: float) -> float:
    """The rate grows with the root of the batch: Adam and AdamW."""
    return math.sqrt(k)


RULES: Mapping[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "sqrt": sqrt}


# A rise that leaves the noise of an update below this multiple of its new steady state needs no ramp.
_EXCESS = 1.05


@dataclass(frozen=True, slots=True)
class Rate:
    """The factor now, the filtered batch behind it (None before the first round), the ramp's step."""

    factor: float = 1.0
    batch: float | None = None
    step: float = 0.0
    noise: float = 1.0
    """U: variance that the momentum buffer carries, 1 in the steady state of the reference batch"""


def ramp_rounds(target: float, factor: float, momentum: float) -> int:
    """Rounds a rise from ``factor`` to ``target`` takes, so that the noise stays within 5 % of its new steady state."""
    return math.ceil((1.2 + 0.45 * math.log2(max(1.0, target / factor))) / (1.0 - momentum))


def follow(rate: Rate, *, batch: int, reference: int, rule: str, momentum: float) -> Rate:
    """The rate after a full round of ``batch`` samples. Short rounds at an epoch's end never come here."""
    filtered = float(batch) if rate.batch is None else _EMA_KEEP * rate.batch + (1.0 - _EMA_KEEP) * batch
    k = filtered / reference
    target, squared = RULES[rule](k), momentum * momentum
    noise = squared * rate.noise + (1.0 - squared) / k
    # Judged by what the buffer still carries: many small rises in a row are as noisy as a large one.
    if target <= rate.factor or k * noise <= _EXCESS:
        return Rate(target, filtered, 0.0, noise)
    # A ramp keeps its first slope: dividing what is left anew each round would never arrive.
    step = max(rate.step, (target - rate.factor) / ramp_rounds(target, rate.factor, momentum))
    # A target that moves while the ramp runs can make it too steep; the noise itself is the bound.
    ceiling = target * math.sqrt(_EXCESS / (k * noise))
    return Rate(min(rate.factor + step, max(rate.factor, ceiling)), filtered, step, noise)
