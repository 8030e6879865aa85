"""How free positions are dealt to the workers.

Question  Which micro-batches does each worker get next, so that no worker runs out and all finish together?
Holds     A fixed batch is dealt exactly, contribution by contribution, in shares by pace. An open batch is dealt
          ahead of need. Near the end each worker gets half of its share of the remaining samples, or what it will
          use up before the next deal, so that deals shrink geometrically and the last ones end together.
Source    Guided self-scheduling (Polychronopoulos and Kuck 1987) for the end; the rest ours,
          docs/design/0001-data.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pliant.core import ledger as positions
from pliant.core.ledger import Ledger
from pliant.core.shares import apportion, cut, entitlements, shares
from pliant.core.tuning.pace import Pacing

# What an open batch deals ahead, in rounds: the contribution in progress, the next one, and as much again for
# a round that takes twice as long because a worker slowed down.
_ROUNDS_AHEAD = 4.0
# ... and in micro-batches, for rounds that are shorter than one of them.
_MICRO_BATCHES_AHEAD = 3
# What a worker must hold to reach the next deal, in rounds: part of its hand was computed since it last handed in, and
# deals come once a round. (Plus a micro-batch, because every worker finishes one before handing in.)
_ROUNDS_NEEDED = 2.0
# Avoid micro-batches of a single sample: BatchNorm cannot train on one.
LEAST = 2
# Any number of samples from two on can be cut into micro-batches of two or three: no single sample is left over.
_SMALLEST = 3
# An open batch cuts a slow worker's micro-batches down to this part of the size it asked for, not further: below,
# running statistics and the device's efficiency suffer more than a longer round costs.
_SMALLEST_PART = 4
# An open batch lets a round last until its cost (update, look-ahead, hand-in) is this part of it ...
_COST_SHARE = 0.02
# ... but no longer than this many full micro-batches of the fastest worker.
_PATIENT_MICRO_BATCHES = 8
# A loader never learns more rounds than this in advance: otherwise shares would follow the pace too late.
_MOST_ROUNDS_AHEAD = 16


def fixed(
    ledger: Ledger,
    pacing: Pacing,
    batch: int,
    sizes: Sequence[int],
    ahead: Sequence[int],
    contributions: int,
) -> Ledger:
    """Promise whole rounds of ``batch`` samples until ``contributions`` are dealt, more if a loader prefetches.

    The epoch's last round has the remaining samples. ``sizes`` and ``ahead``: largest micro-batch of each member, and
    how many micro-batches its loader wants to know in advance.
    """
    paces = pacing.paces()
    # Every member takes part in a full round, if need be with one sample; a short last round goes to the fast ones.
    least = 1 if batch < LEAST * len(paces) else LEAST
    full = shares(batch, paces, least) if ledger.free >= batch else ()
    while free := ledger.free:
        share = full if free >= batch else without_crumbs(apportion(free, paces), paces)
        depth = contributions + _rounds_ahead(share, sizes, ahead)
        if len(ledger.hands[0].quotas) >= depth:
            break
        cuts = [cut(samples, size) if samples else () for samples, size in zip(share, sizes, strict=True)]
        ledger = positions.promise(ledger, cuts)
    return ledger


def _rounds_ahead(share: Sequence[int], sizes: Sequence[int], ahead: Sequence[int]) -> int:
    """How many rounds beyond the coming ones the most demanding loader wants to know."""
    rounds = [
        math.ceil(wanted / math.ceil(samples / size))
        for samples, size, wanted in zip(share, sizes, ahead, strict=True)
        if samples
    ]
    return min(max(rounds, default=0), _MOST_ROUNDS_AHEAD)


def floating(
    ledger: Ledger,
    pacing: Pacing,
    at_most: int | None,
    sizes: Sequence[int],
    ahead: Sequence[int],
    paying: int | None = None,
) -> Ledger:
    """Deal every worker enough to stay busy until the tickets of the next round are in.

    ``at_most``: bound on the samples of a round, if any. ``paying``: the largest round that still raises goodput.
    """
    ledger = positions.take_back(ledger)
    members = len(sizes) if at_most is None else min(len(sizes), at_most)
    paces = _attainable(pacing, at_most, members)
    # A round will last as long as the last ones did, or as its cost demands.
    round_s = max(pacing.round_s, patience_s(pacing, sizes, paying))
    sizes = micro_batch_sizes(pacing, at_most, sizes)
    held = [hand.granted_samples for hand in ledger.hands[:members]]
    parts = without_crumbs(entitlements(ledger.free, held, paces), paces)
    grants: list[int] = []
    for member in range(members):
        size, part = sizes[member], parts[member]
        used = paces[member] * round_s if pacing.measured else 0.0
        wanted = math.ceil(_ROUNDS_AHEAD * used) + _MICRO_BATCHES_AHEAD * size - held[member]
        # Whole micro-batches: at most half of the worker's part, or what it needs now. A last one is dealt completely.
        needed = math.ceil(_ROUNDS_NEEDED * used) + size - held[member]
        bound = part if part <= size else max(size, part // 2 // size * size, min(part, -(-needed // size) * size))
        grants.append(max(0, min(bound, -(-wanted // size) * size)))
    if ledger.free - sum(grants) < LEAST:
        grants = list(parts)
    for member, samples in enumerate(grants):
        if samples:
            ledger = positions.deal(ledger, member, cut(samples, sizes[member]))
        ledger = positions.grant(ledger, member, len(ledger.hands[member].queue))
    for member in range(members):
        ledger = _for_the_loader(ledger, member, sizes[member], ahead[member], parts[member] - grants[member])
    return ledger


def without_crumbs(parts: Sequence[int], paces: Sequence[float]) -> tuple[int, ...]:
    """The same samples, with parts below ``LEAST`` put together for the fastest of the workers that had one."""
    whole = [part if part >= LEAST else 0 for part in parts]
    missing = sum(parts) - sum(whole)
    crumbs = sorted((m for m, part in enumerate(parts) if 0 < part < LEAST), key=lambda m: (-paces[m], m))
    for member in crumbs[: missing // LEAST]:
        whole[member] += LEAST
        missing -= LEAST
    whole[max(range(len(whole)), key=lambda m: (whole[m] or parts[m], paces[m], -m))] += missing
    return tuple(whole)


def _for_the_loader(ledger: Ledger, member: int, size: int, ahead: int, part: int) -> Ledger:
    """Deal what a loader may fetch in advance, but do not grant it: it can still be taken back."""
    count = min(ahead, part // 2 // size)
    return positions.deal(ledger, member, (size,) * count) if count > 0 else ledger


def _attainable(pacing: Pacing, at_most: int | None, members: int) -> tuple[float, ...]:
    """Samples per second that each of the first ``members`` workers can hand in: its pace, or its limit per round."""
    paces = pacing.paces()[:members]
    if at_most is None or pacing.round_s <= 0:
        return paces
    limits = contribution_limits(pacing, at_most, len(pacing.members))
    return tuple(min(pace, limit / pacing.round_s) for pace, limit in zip(paces, limits[:members], strict=True))


def micro_batch_sizes(pacing: Pacing, at_most: int | None, sizes: Sequence[int]) -> tuple[int, ...]:
    """The micro-batch size each worker is dealt: at most its own, smaller if it would hold up the round.

    A round lasts as long as the slowest micro-batch in it. So a slow worker's micro-batches are cut to the time of the
    fastest worker's full one, or of the summation if that takes longer.
    """
    if at_most is not None:
        sizes = [min(size, _least(at_most, len(sizes))) for size in sizes]
    if not pacing.measured:
        return tuple(sizes)
    paces = pacing.paces()
    tempo_s = max(pacing.sum_s, min(size / pace for size, pace in zip(sizes, paces, strict=True)))
    return tuple(
        min(size, max(_SMALLEST, -(-size // _SMALLEST_PART), round(pace * tempo_s)))
        for size, pace in zip(sizes, paces, strict=True)
    )


def patience_s(pacing: Pacing, sizes: Sequence[int], paying: int | None = None) -> float:
    """How long a contribution to an open batch lasts at least, so that the cost of the round stays a small part of it.

    It is no longer than a few micro-batches of the fastest worker, so that updates stay frequent even if they are
    expensive, and no longer than ``paying`` samples take, because larger rounds do not raise goodput.
    """
    if not pacing.measured:
        return 0.0
    paces = pacing.paces()
    fastest_s = min(size / pace for size, pace in zip(sizes, paces, strict=True))
    patience = min(pacing.cost_s / _COST_SHARE, _PATIENT_MICRO_BATCHES * fastest_s)
    return patience if paying is None else min(patience, paying / math.fsum(paces))


def contribution_limits(
    pacing: Pacing, at_most: int, members: int, largest: Sequence[int] | None = None
) -> tuple[int, ...]:
    """How many samples each worker may hand in to one round of an open batch bounded by ``at_most``.

    Every worker may hand in at least the largest micro-batch it may be dealt, or has already (``largest``: dealt when
    there were fewer workers). The remainder is shared by pace.
    """
    working = min(members, at_most)
    least = [_least(at_most, members)] * working
    if largest is not None:
        least = [max(pair) for pair in zip(least, largest[:working], strict=True)]
    extra = apportion(max(0, at_most - sum(least)), pacing.paces()[:working])
    limits = [one + more for one, more in zip(least, extra, strict=True)]
    return (*limits, *(0,) * (members - working))


def within(limits: Sequence[int], at_most: int) -> tuple[int, ...]:
    """The limits that fit into ``at_most`` together, the largest first; the others become 0.

    A worker with a larger micro-batch than it would be dealt now hands it in first, which makes room for the others.
    """
    left, kept = at_most, [0] * len(limits)
    for member in sorted(range(len(limits)), key=lambda m: (-limits[m], m)):
        # The first always fits; otherwise no worker could go on.
        if limits[member] <= left or left == at_most:
            kept[member] = limits[member]
            left -= limits[member]
    return tuple(kept)


def _least(at_most: int, members: int) -> int:
    # Half of the bound goes to one micro-batch each, half by pace: micro-batches dealt under an older pace
    # then never add up to more than the bound.
    return max(1, at_most // (2 * members))
