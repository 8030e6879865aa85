"""The library's rate decisions, as the lab uses them.

Question  By which factor is the schedule's rate multiplied in a round of this batch, and how far does it move the
          schedule on?
Holds     Every call of the library's rate code from the lab is in this module. Where a rule looks at the gradient's
          noise every seed has a factor of its own, decided by the same code from that seed's norms.
Source    pliant.core.tuning.rates, pliant.core.tuning.noise.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pliant.core.tickets import Kind, Ticket
from pliant.core.tuning import noise, rates

FIXED = "fixed"
"""not a rule but the truth to compare with: the reference batch throughout"""

NAMES = {
    FIXED: "fixed reference batch",
    "none": "no scaling",
    "linear_at_once": "linear, at once",
    "linear": "linear, ramped",
    "adascale": "AdaScale, ramped",
    "sqrt_at_once": "√k, at once",
    "sqrt": "√k, ramped",
    "sqrt_moments": "√k with β and ε, ramped",
    "adascale_moments": "AdaScale with β and ε, ramped",
}
_RULES = {
    FIXED: rates.constant(),
    "none": rates.constant(),
    "linear": rates.linear(),
    "sqrt": rates.sqrt(),
    "sqrt_moments": rates.sqrt(moments=True),
    "adascale": rates.adascale(),
    "adascale_moments": rates.adascale(moments=True),
}
AT_ONCE = "_at_once"
PARTS = 4  # contributions of a round whose norms are taken


def learns(name: str) -> bool:
    """Whether the rule looks at the gradient's noise, and so has a factor for every seed."""
    return name.startswith("adascale")


def moves_moments(name: str) -> bool:
    """Whether Adam's betas and epsilon follow, too."""
    return name.endswith("_moments")


def moments(betas: tuple[float, float], epsilon: float, factor: float) -> tuple[tuple[float, float], float]:
    """Adam's betas and epsilon in an update whose rate is ``factor`` times the schedule's."""
    return rates.moments(betas, epsilon, factor)


class Follower:
    """The factor of one run, round after round."""

    def __init__(self, name: str, *, reference: int, momentum: float) -> None:
        self._rule = _RULES[name.removesuffix(AT_ONCE)]
        self._at_once = name.endswith(AT_ONCE)
        self._reference, self._momentum = reference, momentum
        self._rate, self.noise = rates.Rate(), noise.Noise()
        self._round = self._samples = 0
        self.factor = 1.0
        """of the last full round: what is known while the next one is computed"""
        self.scheduled = 0.0
        """samples by which the schedule has moved on"""

    def follow(self, batch: int, *, short: bool = False) -> float:
        """The factor for the update of a round of ``batch`` samples; a short one never enters the rule."""
        if self._at_once and not short:
            # Not ``rates.at_once``, which follows the filtered batch: what is compared with has no filter either.
            self.factor = rates.target(self._rule, batch / self._reference)
        elif not short:
            self._rate = rates.follow(
                self._rate,
                batch=batch,
                reference=self._reference,
                rule=self._rule,
                momentum=self._momentum,
                noise_scale=self.noise.scale,
            )
            self.factor = self._rate.factor
        self.scheduled += rates.progress(self._rule, self._rate, batch=batch, reference=self._reference, short=short)
        self._round += 1
        self._samples += batch
        return self.factor

    @property
    def is_due(self) -> bool:
        """Whether the norms of the coming round are to be taken."""
        return noise.is_due(self.noise, self._round + 1)

    def learn(self, parts: Sequence[tuple[int, float]], square: float) -> None:
        """After ``follow``: samples and squared norm of the round's contributions, and the squared norm of the mean."""
        tickets = [
            Ticket(1, self._round, 1, Kind.TRAIN, samples=samples, weight=float(samples), squared_norm=norm)
            for samples, norm in parts
        ]
        known = noise.contributed(self.noise, self._round, self._samples, tickets)
        if known.awaited:
            self.noise = noise.measured(known, self._round, square, self._reference)


class Followers:
    """The factors of a stack of seeds under a rule that looks at the noise."""

    def __init__(self, name: str, seeds: int, *, reference: int, momentum: float) -> None:
        self._each = [Follower(name, reference=reference, momentum=momentum) for _ in range(seeds)]

    @property
    def is_due(self) -> bool:
        return self._each[0].is_due

    @property
    def scheduled(self) -> list[float]:
        return [one.scheduled for one in self._each]

    def follow(self, batch: int) -> list[float]:
        return [one.follow(batch) for one in self._each]

    def learn(self, parts: Sequence[tuple[int, Tensor]], squares: Tensor) -> None:
        """The norms have a place for every seed."""
        norms = torch.stack([square for _, square in parts]).tolist()
        for place, (one, square) in enumerate(zip(self._each, squares.tolist(), strict=True)):
            one.learn([(samples, norm[place]) for (samples, _), norm in zip(parts, norms, strict=True)], square)
