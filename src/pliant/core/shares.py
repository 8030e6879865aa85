"""How samples are shared among workers of unequal pace.

Question  How many samples does each worker get, so that all finish together?
Holds     Shares are whole, never negative and add up exactly; every worker computes the same ones, because
          ties go to the earlier member and sums are exactly rounded.
Source    Largest-remainder apportionment (Hamilton, 1792); water-filling for what is already held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_MICRO_BATCHES = 1_000_000
"""Bound on one deal to one worker. Real runs stay far below; a forged journal could otherwise exhaust memory."""


def shares(batch: int, paces: Sequence[float], least: int = 1) -> tuple[int, ...]:
    """Divide ``batch`` samples in proportion to ``paces`` (samples per second), at least ``least`` each.

    If ``batch`` is too small for that, the first workers get ``least`` or more, and the others, the spares, nothing.
    """
    working = max(1, min(len(paces), batch // least))
    rest = list(apportion(batch, paces[:working]))
    # A worker below ``least`` takes single samples from the largest share, so that no share falls below ``least``.
    least = min(least, batch // working)
    for member in range(working):
        while rest[member] < least:
            largest = max(range(working), key=lambda other: (rest[other], -other))
            rest[largest] -= 1
            rest[member] += 1
    return (*rest, *(0,) * (len(paces) - working))


def apportion(total: int, quotas: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to ``quotas`` that add up to ``total``, each within one of its exact share."""
    # fsum is exactly rounded: the sum cannot depend on the order of the workers.
    weight = math.fsum(quotas)
    if weight <= 0:
        quotas = [1.0] * len(quotas)
        weight = float(len(quotas))
    exact = [total * quota / weight for quota in quotas]
    whole = [math.floor(value) for value in exact]
    missing = total - sum(whole)
    by_remainder = sorted(range(len(exact)), key=lambda member: (whole[member] - exact[member], member))
    for step in range(missing):
        whole[by_remainder[step % len(whole)]] += 1
    return tuple(whole)


def entitlements(pool: int, held: Sequence[int], paces: Sequence[float]) -> tuple[int, ...]:
    """Divide ``pool`` so that workers that already hold ``held`` samples all finish together, as far as possible.

    A worker that already holds more than its share of all samples gets nothing; the others share by pace.
    """
    if pool == 0:
        return (0,) * len(paces)
    active = list(range(len(paces)))
    while True:
        horizon_s = (pool + sum(held[m] for m in active)) / math.fsum(paces[m] for m in active)
        early = [m for m in active if held[m] <= paces[m] * horizon_s]
        if not early or len(early) == len(active):
            break
        active = early
    wanted = [max(0.0, paces[m] * horizon_s - held[m]) if m in active else 0.0 for m in range(len(paces))]
    return apportion(pool, wanted)


def cut(samples: int, size: int) -> tuple[int, ...]:
    """Near-equal micro-batches of at most ``size`` samples; the larger ones first."""
    count = -(-samples // size)
    if count > MOST_MICRO_BATCHES:
        raise ValueError(f"{samples} samples in micro-batches of {size}: more than {MOST_MICRO_BATCHES} at once")
    least, larger = divmod(samples, count)
    return (least + 1,) * larger + (least,) * (count - larger)
