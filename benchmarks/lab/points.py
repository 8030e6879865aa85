"""Where a worker takes its next gradients while an update is in flight, and what else mends the delay.

Question  Which point, or which correction of a late gradient, makes one round of delay cost the least?
Holds     All start from the library's own look-ahead; it holds the plain weights aside and brings them back.
Source    pliant.tensors.lookahead for "lookahead"; Zheng et al. 2017 (DC-ASGD, adaptive λ) for "compensated"; the
          others are ours: docs/design/0009-delay.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from pliant.tensors.lookahead import LookAhead

METHODS = {
    "synchronous": "delay 0",
    "plain": "delay 1, plain",
    "lookahead": "delay 1, look-ahead",
    "noise_weighted": "look-ahead, own gradient weighted by its noise",
    "warm_up": "look-ahead after a synchronous tenth",
    "short_warm_up": "look-ahead after a synchronous fiftieth",
    "displacement": "look-ahead, halfway to the last displacement",
    "compensated_plain": "plain, delay compensation",
    "compensated": "look-ahead, delay compensation",
}
WARM_UP = {"warm_up": 0.1, "short_warm_up": 0.02, "synchronous": 1.0}
"""share of the samples without delay"""
COMPENSATION = 1.0  # λ0 of DC-ASGD's adaptive form
SLOW, TINY = 0.95, 1e-7  # DC-ASGD: memory of the mean square, and what keeps its root from zero


@dataclass(slots=True)
class Contribution:
    """What a worker hands in: summed gradients of every seed, and the point they were taken at if it is needed."""

    samples: int
    sums: list[Tensor] | None = None
    losses: Tensor | None = None
    taken_at: list[Tensor] | None = None

    def mean(self) -> list[Tensor] | None:
        return None if self.sums is None or not self.samples else [one / self.samples for one in self.sums]


def per_seed(values: Sequence[Tensor]) -> Tensor:
    """Squared norm over all parameters, seed by seed."""
    return torch.stack([value.flatten(1).square().sum(1) for value in values]).sum(0)


def spread(value: Tensor, like: Tensor) -> Tensor:
    return value.view(-1, *[1] * (like.dim() - 1))


@dataclass(slots=True)
class Noise:
    """Squared gradient norm and per-sample variance, averaged over rounds; the form for unequal shares."""

    signal: Tensor | None = None
    variance: Tensor | None = None

    def take(self, contributions: Sequence[Contribution], mean: Sequence[Tensor]) -> None:
        batch = sum(one.samples for one in contributions)
        whole = per_seed(mean)
        for one in contributions:
            own = one.mean()
            if own is None or one.samples == batch:
                continue
            part = per_seed(own)
            signal = (batch * whole - one.samples * part) / (batch - one.samples)
            variance = (part - whole) / (1 / one.samples - 1 / batch)
            self.signal = signal if self.signal is None else self.signal.lerp(signal, 0.02)
            self.variance = variance if self.variance is None else self.variance.lerp(variance, 0.02)

    def trust(self, samples: int) -> Tensor | None:
        """How much of a mean over ``samples`` is signal: 0 to 1 for every seed."""
        if self.signal is None or self.variance is None:
            return None
        signal, noise = self.signal.clamp(min=0.0), self.variance.clamp(min=1e-12) / samples
        return signal / (signal + noise)


@dataclass(slots=True)
class Points:
    """The points of all workers of one run."""

    optimizer: Optimizer
    method: str
    parameters: list[Tensor]
    ahead: LookAhead = field(init=False)
    noise: Noise = field(default_factory=Noise)
    last_mean: list[Tensor] | None = None
    before: list[Tensor] | None = None
    mean_square: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self.ahead = LookAhead(self.optimizer)

    @property
    def keeps_point(self) -> bool:
        return self.method.startswith("compensated")

    def go(self, own: Contribution | None, factor: float) -> None:
        """Move to where a worker computes that handed in ``own``, which is still in flight."""
        if self.method in ("plain", "compensated_plain"):
            return
        mean = None if own is None else own.mean()
        if self.method == "noise_weighted" and mean is not None and own is not None:
            mean = self._weighted(mean, own.samples)
        self.ahead.park(mean, -1, 1.0)
        plain = [p.detach().clone() for p in self.parameters] if self.method == "displacement" else []
        self.ahead.go([{"lr": float(group["lr"]) * factor} for group in self.optimizer.param_groups])
        if plain and self.before is not None:
            with torch.no_grad():
                for p, now, old in zip(self.parameters, plain, self.before, strict=True):
                    p.lerp_(2 * now - old, 0.5)

    def _weighted(self, mean: list[Tensor], samples: int) -> list[Tensor]:
        trust = self.noise.trust(samples)
        if trust is None or self.last_mean is None:
            return mean
        return [old.lerp(own, spread(trust, own)) for own, old in zip(mean, self.last_mean, strict=True)]

    def back(self) -> None:
        self.ahead.back()

    @torch.no_grad()
    def compensate(self, contributions: Sequence[Contribution]) -> None:
        """Correct late gradients to first order for how far the weights are from where they were taken."""
        for one in contributions:
            own = one.mean()
            if own is None or one.taken_at is None or one.sums is None:
                continue
            if self.mean_square is None:
                self.mean_square = [gradient.square() for gradient in own]
            for index, (gradient, p) in enumerate(zip(own, self.parameters, strict=True)):
                square = self.mean_square[index].lerp_(gradient.square(), 1 - SLOW)
                strength = COMPENSATION / (square + TINY).sqrt()
                one.sums[index].add_(strength * gradient.square() * (p - one.taken_at[index]), alpha=one.samples)

    def applied(self, contributions: Sequence[Contribution], mean: list[Tensor], before: list[Tensor] | None) -> None:
        """An update was made of these."""
        self.last_mean, self.before = mean, before
        if self.method == "noise_weighted":
            self.noise.take(contributions, mean)
