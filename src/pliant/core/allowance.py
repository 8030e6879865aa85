"""What each member of the group may draw.

Question  Which members are dealt samples of a phase, and how many may each draw for its contribution now?
Holds     Functions of the replicated state alone, so every worker knows what every other one may draw. It is always
          clear which contribution a deal is for: with an overlap, deals made at the end of round r are for round r + 2.
Source    ours; docs/design/0001-data.md, docs/design/0002-rounds.md.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from pliant.core import dealing, ledger
from pliant.core.group_state import GroupState, OpenPhase, Standing
from pliant.core.ledger import Ledger
from pliant.core.shares import apportion, cut
from pliant.core.tickets import Kind
from pliant.core.tuning import pace


def at_work(group: GroupState, phase: OpenPhase) -> list[int]:
    """Members that are dealt samples in this phase."""
    return [
        member
        for member, standing in enumerate(group.standings)
        if standing is Standing.ACTIVE and phase.present[member]
    ]


def speaks(group: GroupState, member: int) -> bool:
    """Whether ``member`` has a vote on what the next exchange is: it is in the phase's loop, or may enter it anytime.

    The others (followers, spares, leavers) learn from the tickets what the group does, and do the same.
    """
    if not group.open or group.standings[member] is not Standing.ACTIVE:
        return False
    phase = group.phase
    return phase.present[member] and (phase.took_part[member] or phase.ledger.hands[member].granted > 0)


class Allowance(msgspec.Struct, frozen=True):
    """What one worker may draw for the contribution it is working on."""

    micro_batches: int | None = None
    """exactly this many (fixed batch); None: as many as the time allows"""
    samples: int | None = None
    """at most this many, if an open batch is bounded"""
    seconds: float = 0.0
    """least duration while there is anything to draw, so that a round of an open batch is worth its cost"""


def allowance(group: GroupState, member: int, in_flight: int) -> Allowance:
    """The allowance for ``member``'s contribution while ``in_flight`` of its earlier ones (0 or 1) are not settled."""
    phase, policy = group.phase, group.policy
    if group.standings[member] is not Standing.ACTIVE:
        return Allowance(micro_batches=0)
    if group.choice.turning and in_flight and phase.kind is Kind.TRAIN:
        return Allowance(micro_batches=0)
    if phase.kind is Kind.TRAIN and (not policy.floating or not group.overlap):
        quotas = phase.ledger.hands[member].quotas
        return Allowance(micro_batches=quotas[in_flight] if in_flight < len(quotas) else 0)
    working = at_work(group, phase)
    if member not in working:
        return Allowance(micro_batches=0)
    sizes = [phase.sizes[m] for m in working]
    if phase.kind is Kind.EVALUATE:
        return Allowance(seconds=dealing.patience_s(pace.seated(group.evaluating, working), sizes))
    training = pace.seated(group.training, working)
    seconds = dealing.patience_s(training, sizes, group.paying)
    limits = sample_limits(group) if in_flight or not phase.limits else phase.limits
    if not limits:
        return Allowance(seconds=seconds)
    if not limits[member]:
        return Allowance(micro_batches=0)
    return Allowance(samples=limits[member], seconds=seconds)


def sample_limits(group: GroupState) -> tuple[int, ...]:
    """Samples that each member may hand in to a round of a bounded open batch; empty if there is no bound.

    This is for a contribution begun now. One that was begun before the last round was settled keeps its older limits.
    """
    phase, bound = group.phase, group.at_most
    if bound is None or phase.kind is not Kind.TRAIN or not group.policy.floating or not group.overlap:
        return ()
    working = at_work(group, phase)
    if not working:
        return ()
    hands = [phase.ledger.hands[member] for member in working]
    largest = [max(map(ledger.samples_of, hand.queue[: hand.granted]), default=0) for hand in hands]
    found = dealing.contribution_limits(pace.seated(group.training, working), bound, len(working), largest)
    if group.policy.at_most is not None:
        # Micro-batches dealt when there were fewer workers may leave no room for those of every worker.
        found = dealing.within(found, bound)
    limits = [0] * len(group.roster)
    for member, limit in zip(working, found, strict=True):
        limits[member] = limit
    return tuple(limits)


def kept_limits(before: GroupState, after: OpenPhase) -> tuple[int, ...]:
    """The limits of the contributions that were begun before the round that has just been settled.

    A member that begins to work with this round gets no part of them: the others may have reached the bound already.
    Limits are kept only for a bound set by the user, and only if some member may have drawn samples under them.
    """
    if before.policy.at_most is None:
        return ()
    limits = sample_limits(before)
    hands = after.ledger.hands
    return limits if any(limit and hands[member].granted for member, limit in enumerate(limits)) else ()


def dealt(group: GroupState, *, spares: bool = True) -> GroupState:
    """Deal what the workers need of the innermost phase until the round after next.

    ``spares``: members that have had no samples so far may get some, too.
    """
    phase, policy = group.phase, group.policy
    working = at_work(group, phase)
    if not spares:
        working = [member for member in working if speaks(group, member)]
    if not working:
        return group
    pacing = pace.seated(group.training if phase.kind is Kind.TRAIN else group.evaluating, working)
    sizes, ahead = [phase.sizes[m] for m in working], [phase.ahead[m] for m in working]
    held = replace(phase.ledger, hands=tuple(phase.ledger.hands[m] for m in working))
    if phase.kind is Kind.TRAIN and (not policy.floating or not group.overlap):
        contributions = 2 if group.overlap else 1
        after = dealing.fixed(ledger.aligned(held), pacing, policy.batch, sizes, ahead, contributions)
    else:
        at_most, paying = (group.at_most, group.paying) if phase.kind is Kind.TRAIN else (None, None)
        after = dealing.floating(held, pacing, at_most, sizes, ahead, paying)
    if len(working) < len(phase.ledger.hands):
        hands = list(phase.ledger.hands)
        for member, hand in zip(working, after.hands, strict=True):
            hands[member] = hand
        after = replace(after, hands=tuple(hands))
    return replace(group, open=(*group.open[:-1], replace(phase, ledger=after)))


def made_up(group: GroupState, phase: OpenPhase, *, spares: bool) -> Ledger:
    """Fill up the fixed batch in progress to its full size, after hands have been returned to the pool.

    ``spares``: members that have had no samples so far may get some, too.
    """
    policy = group.policy
    if phase.kind is not Kind.TRAIN or (policy.floating and group.overlap):
        return phase.ledger
    if not any(hand.quotas for hand in phase.ledger.hands):
        # No member has computed so far. One that begins may have handed in an empty ticket for this round already.
        return ledger.first_only(phase.ledger) if not spares else phase.ledger
    working = at_work(group, phase)
    if not spares:
        working = [member for member in working if phase.took_part[member] or phase.ledger.hands[member].granted]
    held = ledger.first_only(phase.ledger)
    promised = sum(hand.granted_samples for hand in held.hands)
    missing = min(policy.batch - promised, held.free)
    # A batch that lacks one sample is better than a micro-batch of one sample.
    if missing < (dealing.LEAST if promised else 1) or not working:
        return held
    paces = group.training.paces()
    more = dealing.without_crumbs(apportion(missing, [paces[m] for m in working]), [paces[m] for m in working])
    for member, samples in zip(working, more, strict=True):
        if samples:
            held = ledger.add_to_first(held, member, cut(samples, phase.sizes[member]))
    return held
