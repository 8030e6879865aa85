"""The gradient noise scale, estimated from scalars in the tickets.

Question  How much of a round's gradient is signal, and up to which batch do more samples improve it?
Holds     Unbiased for any shares: each worker's mean gradient g_i of n_i samples and the group's g = Σ p_i·g_i estimate
          S (the trace of one sample's covariance) and G² (the squared norm of the true gradient). S and G² are averaged
          separately, because a mean of ratios is not the ratio of means. A round with a single contributor gives no
          estimate. The norm of a sum is known only after the round, so a later ticket carries it.
Source    McCandlish et al. 2018, appendix A, for two batch sizes; AdaScale (Johnson et al. 2020) for the memory; the
          form for unequal shares is ours, docs/design/0008-rates.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.core.tickets import Ticket

# Every round is measured until there are this many estimates; afterwards only every ``STRIDE``-th round, because the
# norm of the sum is an extra pass over the gradients.
DENSE = 16
# Few are enough: both averages reach over hundreds of rounds.
STRIDE = 8
# With fewer estimates than this the noise scale counts as unknown.
ENOUGH = 5
# Memory of the averages, in reference batches (AdaScale's θ = 1 − S/1000).
MEMORY = 1000.0
# A round's norm comes with the next ticket or the one after that; an older one was lost with an era.
_MOST_OPEN = 4


class Contributed(msgspec.Struct, frozen=True):
    """What is kept of a round's tickets until the norm of its mean gradient is known. p_i are shares of the weight."""

    round: int
    batch: int
    samples: int
    """samples of all settled rounds, this one included"""
    square: float
    """Σ p_i |g_i|²"""
    between: float
    """Σ p_i (1 − p_i) / n_i: the factor of S in the spread of the workers around the mean"""
    within: float
    """Σ p_i² / n_i: the factor of S in |g|²; 1/B if weights are samples"""


class Noise(msgspec.Struct, frozen=True):
    """Decaying means of the estimates, and the rounds whose norm is still to come."""

    variance: float = 0.0
    """S"""
    signal: float = 0.0
    """G²; single estimates may be negative, and so may their mean where there is hardly any signal"""
    weight: float = 0.0
    """weight of the means, in units of ``MEMORY``"""
    measured: int = 0
    """estimates so far"""
    samples: int = 0
    """samples of all settled rounds at the last estimate"""
    awaited: tuple[Contributed, ...] = ()

    @property
    def scale(self) -> float | None:
        """B_noise in samples: S/G². None while unknown, infinite if the signal cannot be told from the noise."""
        if self.measured < ENOUGH:
            return None
        if self.variance <= 0.0:
            return 0.0
        return self.variance / self.signal if self.signal > 0.0 else math.inf


def is_due(noise: Noise, number: int) -> bool:
    """Whether the norm of round ``number``'s mean gradient is measured."""
    return noise.measured < DENSE or number % STRIDE == 0


def contributed(noise: Noise, number: int, samples: int, tickets: Sequence[Ticket]) -> Noise:
    """Remember the contributions of a round that is applied; ``samples`` are those of all rounds up to it."""
    parts = [(t.weight, t.samples, t.squared_norm) for t in tickets if t.weight > 0 and t.samples > 0]
    if len(parts) < 2:
        return noise
    total = math.fsum(weight for weight, _, _ in parts)
    shares = [(weight / total, count, square) for weight, count, square in parts]
    kept = Contributed(
        round=number,
        batch=sum(count for _, count, _ in shares),
        samples=samples,
        square=math.fsum(share * square for share, _, square in shares),
        between=math.fsum(share * (1.0 - share) / count for share, count, _ in shares),
        within=math.fsum(share * share / count for share, count, _ in shares),
    )
    return replace(noise, awaited=(*noise.awaited, kept)[-_MOST_OPEN:])


def told(noise: Noise, tickets: Sequence[Ticket]) -> tuple[int, float] | None:
    """(round, squared norm of its mean gradient) from these tickets: from the first member that sends one.

    The sum has the same bits everywhere, but its norm may differ between processors: one value must be used by all.
    """
    awaited = {each.round for each in noise.awaited}
    for ticket in tickets:
        if ticket.measured_round in awaited and math.isfinite(ticket.measured_norm):
            return ticket.measured_round, ticket.measured_norm
    return None


def measured(noise: Noise, number: int, square: float, reference: int) -> Noise:
    """Take in the squared norm of the mean gradient of round ``number``, which is awaited."""
    kept = next(each for each in noise.awaited if each.round == number)
    # Σ p_i |g_i|² − |g|² = Σ p_i |g_i − g|² ≥ 0, except for rounding; its expectation is S times ``between``.
    variance = max(0.0, kept.square - square) / kept.between
    signal = square - variance * kept.within
    since = kept.samples - noise.samples
    keep = max(0.0, 1.0 - since / (MEMORY * reference))
    # An estimate has the weight of the samples since the last one, but of at most STRIDE rounds.
    added = min(1.0, min(since, STRIDE * kept.batch) / (MEMORY * reference))
    weight = keep * noise.weight + added
    return Noise(
        variance=noise.variance + added / weight * (variance - noise.variance),
        signal=noise.signal + added / weight * (signal - noise.signal),
        weight=weight,
        measured=noise.measured + 1,
        samples=kept.samples,
        awaited=tuple(each for each in noise.awaited if each.round > number),
    )
