"""What the group decides from the tickets of a round.

Question  Given what every worker handed in, which update is made and who does what next?
Holds     ``opened`` and ``settled`` are pure: every worker evaluates them on the same tickets and reaches the
          same batch, factor, deals and end of phase without asking anyone. Which contribution a deal is for is
          never in doubt: with an overlap the deals made at the end of round r are for round r + 2.
Source    ABS-SGD (Zhou et al. 2023) for the overlap; sharing and dealing are ours, docs/design/0002-rounds.md.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pliant.core import dealing, ledger, pace, rates
from pliant.core.ledger import Ledger
from pliant.core.pace import Pacing
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import Span, WorkerId

# An infinite loss now and then is a known cost of low precision; twenty rounds in a row never recover.
MAX_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decisions depend on; the same on all workers."""

    batch: int
    floating: bool = False
    at_most: int | None = None
    delay: int = 1
    rule: str = "linear"
    momentum: float = 0.0


@dataclass(frozen=True, slots=True)
class OpenPhase:
    """A call of ``batches`` or ``evaluate`` that has not ended."""

    number: int
    kind: Kind
    epoch: int
    length: int
    sizes: tuple[int, ...]
    ahead: tuple[int, ...]
    ledger: Ledger
    took_part: tuple[bool, ...]
    """who has handed in a sample in this phase"""
    total: float = 0.0
    count: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """The replicated state: equal on all workers after the same tickets."""

    policy: Policy
    era: int
    roster: tuple[WorkerId, ...]
    round: int = 0
    """rounds settled so far"""
    phases: int = 0
    """phases opened so far"""
    samples: int = 0
    """samples of settled training rounds"""
    samples_limit: int | None = None
    rate: rates.Rate = field(default_factory=rates.Rate)
    skipped: int = 0
    skipped_in_a_row: int = 0
    training: Pacing = field(default_factory=lambda: pace.unmeasured(1))
    evaluating: Pacing = field(default_factory=lambda: pace.unmeasured(1))
    open: tuple[OpenPhase, ...] = ()
    """innermost last: an ``evaluate`` may be called inside a ``batches`` loop"""

    @property
    def phase(self) -> OpenPhase:
        return self.open[-1]

    @property
    def overlap(self) -> bool:
        """Whether the next contribution is computed while the last one is summed."""
        if len(self.roster) == 1:
            return False
        return self.policy.delay == 1 or (bool(self.open) and self.phase.kind is Kind.EVALUATE)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The workers are not doing the same thing; the run cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of one round."""

    phase: int
    kind: Kind
    round: int
    batch: int
    weight: float
    factor: float
    loss: float | None
    applied: bool
    """false: some worker's part was not finite; samples are spent, weights stay"""
    spans: tuple[tuple[Span, ...], ...]
    seen: bool
    """every worker's loop body is at this round now: the moment at which ``step`` may return True"""
    ended: bool
    cut: tuple[Span, ...] = ()
    result: float | None = None


def founded(policy: Policy, era: int, roster: Sequence[WorkerId]) -> Group:
    """The state at the first era's start."""
    blank = pace.unmeasured(len(roster))
    return Group(policy, era, tuple(roster), training=blank, evaluating=blank)


def digest(group: Group) -> int:
    """A fingerprint of the state's counters; tickets carry it so that a divergence is seen in the next round."""
    cursor = group.phase.ledger.cursor if group.open else -1
    limit = -1 if group.samples_limit is None else group.samples_limit
    counters = (group.era, group.round, group.phases, group.samples, cursor, limit)
    return zlib.crc32(struct.pack("<qqqqqqd", *counters, group.rate.factor))


def opened(group: Group, tickets: Sequence[Ticket]) -> Group | Mismatch:
    """All workers entered the next phase: deal its first micro-batches."""
    mismatch = compared(group, tickets) or _compare_openings(group, tickets)
    if mismatch:
        return mismatch
    first = tickets[0]
    limit = first.length
    if first.kind is Kind.TRAIN and group.samples_limit is not None:
        limit = min(limit, max(0, group.samples_limit - group.samples))
    phase = OpenPhase(
        number=group.phases + 1,
        kind=first.kind,
        epoch=first.epoch,
        length=first.length,
        sizes=tuple(ticket.size for ticket in tickets),
        ahead=tuple(ticket.ahead for ticket in tickets),
        ledger=ledger.opened(limit, len(group.roster)),
        took_part=(False,) * len(group.roster),
    )
    group = replace(group, phases=phase.number, open=(*group.open, phase))
    if limit == 0:
        return replace(group, open=group.open[:-1])
    return _dealt(group)


def settled(group: Group, tickets: Sequence[Ticket]) -> tuple[Group, Settled] | Mismatch:
    """Spend the samples of the handed-in contributions, decide the update, deal what comes next."""
    mismatch = compared(group, tickets)
    if mismatch:
        return mismatch
    phase = group.phase
    remaining, spans = ledger.settle(phase.ledger, [ticket.micro_batches for ticket in tickets])
    short = remaining.free == 0
    took_part = tuple(before or ticket.samples > 0 for before, ticket in zip(phase.took_part, tickets, strict=True))
    phase = replace(phase, ledger=remaining, took_part=took_part)
    broken = any(ticket.flags & Flag.BREAK for ticket in tickets)
    ended = broken or remaining.remaining == 0
    weight = math.fsum(ticket.weight for ticket in tickets)
    total = math.fsum(ticket.loss_sum for ticket in tickets)
    batch = sum(ticket.samples for ticket in tickets)
    if phase.kind is Kind.EVALUATE:
        phase = replace(phase, total=phase.total + total, count=phase.count + weight)
        group = replace(group, evaluating=pace.measure(group.evaluating, tickets))
        finite = True
    else:
        finite = not any(ticket.flags & Flag.NONFINITE for ticket in tickets)
        group = _trained(group, tickets, batch, finite=finite, short=short)
    outcome = Settled(
        phase=phase.number,
        kind=phase.kind,
        round=group.round,
        batch=batch,
        weight=weight,
        factor=group.rate.factor,
        loss=total / weight if weight > 0 and math.isfinite(total) else None,
        applied=finite and weight > 0,
        spans=spans,
        # Whoever breaks has left its loop body.
        seen=not broken and _all_work(group, phase, tickets),
        ended=ended,
        cut=ledger.unspent(remaining) if ended else (),
        result=phase.total / phase.count if phase.kind is Kind.EVALUATE and phase.count else None,
    )
    if ended:
        return replace(group, open=group.open[:-1]), outcome
    return _dealt(replace(group, open=(*group.open[:-1], phase))), outcome


def _all_work(group: Group, phase: OpenPhase, tickets: Sequence[Ticket]) -> bool:
    """Whether everyone who takes part is inside its loop body now, and so will return from ``step``."""
    working = [member for member, took_part in enumerate(phase.took_part) if took_part]
    if group.overlap:
        return all(_due(phase.ledger.hands[member]) for member in working)
    return all(tickets[member].samples > 0 for member in working)


def _due(hand: ledger.Hand) -> bool:
    """Whether the contribution after the settled one has a micro-batch for certain."""
    return hand.quotas[0] > 0 if hand.quotas else hand.granted > 0


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one worker may draw for the contribution it is working on."""

    micro_batches: int | None = None
    """exactly so many (fixed batch); None: as many as the time allows"""
    samples: int | None = None
    """no more than so many, where an open batch is bounded"""
    seconds: float = 0.0
    """not handed in before, as long as there is anything to draw: an open batch's round is to be worth its cost"""


def allowance(group: Group, member: int, in_flight: int) -> Allowance:
    """The bounds of ``member``'s contribution while ``in_flight`` of its earlier ones (0 or 1) are not settled."""
    phase, policy = group.phase, group.policy
    if phase.kind is Kind.TRAIN and (not policy.floating or not group.overlap):
        quotas = phase.ledger.hands[member].quotas
        return Allowance(micro_batches=quotas[in_flight] if in_flight < len(quotas) else 0)
    if phase.kind is Kind.EVALUATE:
        return Allowance(seconds=dealing.patience_s(group.evaluating, phase.sizes))
    seconds = dealing.patience_s(group.training, phase.sizes)
    if policy.at_most is None:
        return Allowance(seconds=seconds)
    limits = dealing.contribution_limits(group.training, policy.at_most, len(group.roster))
    return Allowance(samples=limits[member], seconds=seconds)


def _trained(group: Group, tickets: Sequence[Ticket], batch: int, *, finite: bool, short: bool) -> Group:
    policy = group.policy
    rate = group.rate
    if policy.floating and not short and batch > 0:
        rate = rates.follow(rate, batch=batch, reference=policy.batch, rule=policy.rule, momentum=policy.momentum)
    return replace(
        group,
        round=group.round + 1,
        samples=group.samples + batch,
        rate=rate,
        skipped=group.skipped + (not finite),
        skipped_in_a_row=0 if finite else group.skipped_in_a_row + 1,
        training=pace.measure(group.training, tickets),
    )


def _dealt(group: Group) -> Group:
    """Deal within the innermost phase what the workers need until the round after next."""
    phase, policy = group.phase, group.policy
    pacing = group.training if phase.kind is Kind.TRAIN else group.evaluating
    if phase.kind is Kind.TRAIN and (not policy.floating or not group.overlap):
        contributions = 2 if group.overlap else 1
        after = dealing.fixed(phase.ledger, pacing, policy.batch, phase.sizes, phase.ahead, contributions)
    else:
        at_most = policy.at_most if phase.kind is Kind.TRAIN else None
        after = dealing.floating(phase.ledger, pacing, at_most, phase.sizes, phase.ahead)
    return replace(group, open=(*group.open[:-1], replace(phase, ledger=after)))


_NAMES = {Kind.TRAIN: "batches", Kind.EVALUATE: "evaluate", Kind.END: "the end of the script"}


def compared(group: Group, tickets: Sequence[Ticket]) -> Mismatch | None:
    """Whether all workers are at the same point of the same script; the first difference, by name, if not."""
    first = tickets[0]
    for worker, ticket in zip(group.roster[1:], tickets[1:], strict=True):
        pair = (group.roster[0], worker)
        opening, other = first.flags & Flag.OPENING, ticket.flags & Flag.OPENING
        if ticket.kind is not first.kind or opening != other:
            here, there = _doing(first), _doing(ticket)
            return Mismatch(
                f"{pair[0]} is in {here} while {pair[1]} is in {there}: "
                "call batches and evaluate on every worker, in the same order (not under is_leader)"
            )
        if ticket.era != first.era or ticket.digest != first.digest:
            return Mismatch(
                f"{pair[0]} and {pair[1]} disagree about the run's state (round {group.round}): "
                "make sure that no worker skips or repeats calls of batches, step or evaluate"
            )
    return None


def _doing(ticket: Ticket) -> str:
    if ticket.kind is Kind.END:
        return "the end of the script"
    verb = "the start of " if ticket.flags & Flag.OPENING else "the middle of "
    return f"{verb}{_NAMES[ticket.kind]}"


def _compare_openings(group: Group, tickets: Sequence[Ticket]) -> Mismatch | None:
    first = tickets[0]
    for worker, ticket in zip(group.roster[1:], tickets[1:], strict=True):
        if ticket.length != first.length:
            return Mismatch(
                f"dataset lengths differ: {first.length} samples on {group.roster[0]} but {ticket.length} "
                f"on {worker}; give {_NAMES[first.kind]} the same dataset on every worker"
            )
        if ticket.order != first.order:
            return Mismatch(
                f"the order of the samples differs between {group.roster[0]} and {worker}: "
                "make order= a function of epoch and length alone, and give every worker the same seed"
            )
        if ticket.epoch != first.epoch:
            return Mismatch(
                f"{group.roster[0]} is in epoch {first.epoch} but {worker} in epoch {ticket.epoch}: "
                "run the same loop on every worker"
            )
    return None
