"""What the group decides from the tickets of an exchange.

Question  Given the tickets of all workers, which update is made, and which samples does each worker get next?
Holds     ``opened`` and ``settled`` are pure: every worker evaluates them on the same tickets and reaches the
          same batch, factor, deals and end of phase without communicating.
Source    ABS-SGD (Zhou et al. 2023) for the overlap; sharing and dealing are ours, docs/design/0002-rounds.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.core import allowance, consistency, drift, evaluation, ledger, standings, trained_set
from pliant.core.consistency import Mismatch
from pliant.core.drift import Drift
from pliant.core.group_state import FinishedPhase, GroupState, OpenPhase, Standing
from pliant.core.tickets import QUIET, Flag, Kind, Ticket
from pliant.core.tuning import delay, goodput, noise, pace, rates
from pliant.core.tuning.pace import Pacing
from pliant.types import Span

# An infinite loss now and then is a known cost of low precision; twenty rounds in a row never recover.
MAX_SKIPPED_IN_A_ROW = 20


class Settled(msgspec.Struct, frozen=True):
    """The outcome of one round."""

    phase: int
    kind: Kind
    round: int
    batch: int
    weight: float
    factor: float
    loss: float | None
    applied: bool
    """false: some contribution was not finite, or the total weight was 0; samples are spent, weights do not change"""
    spans: tuple[tuple[Span, ...], ...]
    seen: bool
    """every worker's loop body is at this round now: the moment at which ``step`` may return True"""
    ended: bool
    cut: tuple[Span, ...] = ()
    result: float | None = None
    results: dict[str, float | None] | None = None
    """if several means were measured: all of them; ``result`` is then one of them"""
    plan: tuple[int, int] | None = None
    """(term, era) of the planned era that begins after this exchange"""
    verdict: delay.DelayVerdict | None = None
    """the delay was decided anew"""
    momentum: float = 0.0
    """momentum in force: that of the first member with a vote"""
    measures: bool = False
    """measure the norm of the mean gradient, for a later ticket"""
    measured: tuple[int, float] | None = None
    """(round, squared norm of its mean gradient) that these tickets carried"""
    weighs: bool = False
    """take a digest of the weights, for a later ticket"""
    drift: Drift | None = None
    """the tickets show that the weights of some workers differ from the others'"""
    clip_norm: float | None = None
    """the bound in force with this round, if the scripts have set one since ``join``; 0: no clipping"""
    finite: bool = True
    """false: some worker's loss or gradient was not finite"""
    layout: bytes = b""
    """the parameters whose gradients were summed"""
    touched: bytes = b""
    """the parameters that every contribution was computed for: the update changes no other"""


def opened(group: GroupState, tickets: Sequence[Ticket]) -> GroupState | Mismatch:
    """The state after all workers have entered the next phase, with its first micro-batches dealt.

    ``tickets`` are in the order of the roster. A ``Mismatch`` ends the run.
    """
    mismatch = consistency.compared(group, tickets) or consistency.compared_openings(group, tickets)
    if mismatch:
        return mismatch
    present = consistency.opening(tickets)
    first = tickets[present.index(True)]
    if first.kind is Kind.TRAIN:
        agreed = trained_set.opened(group, tickets)
        if isinstance(agreed, Mismatch):
            return agreed
        group = agreed
    limit = first.length
    if first.kind is Kind.TRAIN and group.samples_limit is not None:
        limit = min(limit, max(0, group.samples_limit - group.samples))
    if first.kind is Kind.TRAIN and _is_enough(group):
        limit = 0
    phase = OpenPhase(
        number=group.phases + 1,
        kind=first.kind,
        epoch=first.epoch,
        length=first.length,
        sizes=tuple(ticket.size for ticket in tickets),
        ahead=tuple(ticket.ahead for ticket in tickets),
        ledger=ledger.opened(limit, len(group.roster)),
        took_part=(False,) * len(group.roster),
        present=present,
        inner=bool(first.flags & Flag.INNER),
    )
    group = replace(
        group,
        exchange=group.exchange + 1,
        phases=phase.number,
        open=(*group.open, phase),
        # LEAVING is not read here: a leaver says so again in the first round, and the journal of an opening has no
        # flags. A follower that becomes ready now is not inside the loop that an inner phase belongs to, so it begins
        # with the next phase.
        standings=group.standings if phase.inner else standings.ready(group, tickets),
    )
    if limit == 0:
        return _closed(group, phase, None)
    return allowance.dealt(group)


def settled(group: GroupState, tickets: Sequence[Ticket]) -> tuple[GroupState, Settled] | Mismatch:
    """Spend the samples of the contributions, decide the update, and deal the next micro-batches.

    ``tickets`` are in the order of the roster. A ``Mismatch`` ends the run.
    """
    mismatch = consistency.compared(group, tickets) or consistency.compared_clip_norms(group, tickets)
    if not mismatch and group.phase.kind is Kind.EVALUATE:
        mismatch = evaluation.compared(group.phase.sums, group.roster, tickets)
    if mismatch:
        return mismatch
    before, phase = group, group.phase
    sets = trained_set.Decision(b"", b"")
    if phase.kind is Kind.TRAIN:
        decision = trained_set.decide(group, tickets)
        if isinstance(decision, Mismatch):
            return decision
        group, sets = decision
    remaining, spans = ledger.settle(phase.ledger, [ticket.micro_batches for ticket in tickets])
    short = remaining.free == 0
    took_part = tuple([took or ticket.samples > 0 for took, ticket in zip(phase.took_part, tickets, strict=True)])
    phase = replace(phase, ledger=remaining, took_part=took_part)
    # Most tickets carry no flag.
    flagged = [ticket for ticket in tickets if ticket.flags is not QUIET]
    broken = any(ticket.flags & Flag.BREAK for ticket in flagged)
    weight = math.fsum([ticket.weight for ticket in tickets])
    total = math.fsum([ticket.loss_sum for ticket in tickets])
    batch = sum([ticket.samples for ticket in tickets])
    if phase.kind is Kind.EVALUATE:
        sums = evaluation.added(phase.sums, tickets)
        phase = replace(phase, total=phase.total + total, count=phase.count + weight, sums=sums)
        group = replace(group, evaluating=pace.forgiven(pace.measure(group.evaluating, tickets), tickets))
        finite, told, momentum = True, None, 0.0
    else:
        finite = not any(ticket.flags & Flag.NONFINITE for ticket in flagged)
        told, momentum = noise.told(group.noise, tickets), _momentum(group, tickets)
        group = _trained(group, tickets, told, momentum, finite=finite, short=short)
    ended = broken or remaining.is_spent or (phase.kind is Kind.TRAIN and _is_enough(group))
    plan = consistency.agreed_plan(group, tickets)
    differs = None
    if phase.kind is Kind.TRAIN and not ended and plan is None:
        # Otherwise the next round's tickets show it again, or a later digest does.
        differs = standings.drifted(group, phase, tickets)
    group, phase = standings.moved(replace(group, exchange=group.exchange + 1), phase, tickets, differs)
    result = phase.total / phase.count if ended and phase.kind is Kind.EVALUATE and phase.count else None
    results = evaluation.means(phase.sums) if ended else None
    ended = ended or standings.deserted(group, phase)
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
        seen=not broken and not differs and phase.ledger is remaining and _is_seen(group, phase, tickets, ended=ended),
        ended=ended,
        cut=ledger.unspent(phase.ledger) if ended else (),
        result=result,
        results=results,
        plan=plan,
        momentum=momentum,
        measures=phase.kind is Kind.TRAIN and any(each.round == group.round for each in group.noise.awaited),
        measured=told,
        weighs=phase.kind is Kind.TRAIN and len(group.roster) > 1 and drift.is_due(group.round, group.policy.watched),
        drift=differs,
        clip_norm=group.clip_norm,
        finite=finite,
        layout=sets.layout,
        touched=sets.touched,
    )
    phase = replace(phase, seen=outcome.seen, resumed=False, limits=allowance.kept_limits(before, phase))
    if phase.kind is Kind.TRAIN and group.policy.delay == delay.AUTO and len(group.roster) > 1:
        full = not (short or ended) and before.standings == group.standings
        group, phase, verdict = _reconsidered(group, phase, tickets, full=full)
        outcome = replace(outcome, verdict=verdict) if verdict is not None else outcome
    if ended:
        return _closed(group, phase, result, results), outcome
    return _dealt_on(before, replace(group, open=(*group.open[:-1], phase)), outcome)


def _is_seen(group: GroupState, phase: OpenPhase, tickets: Sequence[Ticket], *, ended: bool) -> bool:
    """Whether every working member is inside its own ``step`` at this round; a worker whose share has grown is not.

    At the last round of a phase a spare already waits for the user's state as it is after the loop. The workers in the
    loop body must then leave the loop. They must not open an ``evaluate`` in the body, because the spare would be dealt
    samples of it.
    """
    if ended and standings.somebody_came_along(group, tickets):
        return False
    return _all_work(group, phase, tickets)


def _dealt_on(before: GroupState, group: GroupState, outcome: Settled) -> tuple[GroupState, Settled]:
    """Deal after a round that does not end its phase; if a member gets its first samples now, the round is not seen."""
    # When the overlap ends, these deals are for the very next round, and a member without a vote may have handed in its
    # ticket for that round already: it gets nothing.
    overlap_ends = before.choice.turning and not group.choice.turning
    group = allowance.dealt(group, spares=not overlap_ends)
    if outcome.seen:
        phase = group.phase
        if any(hand.granted and not took for hand, took in zip(phase.ledger.hands, phase.took_part, strict=True)):
            # A member without samples until now has just been dealt its first ones: it is not in a loop body yet.
            group = replace(group, open=(*group.open[:-1], replace(phase, seen=False)))
            outcome = replace(outcome, seen=False)
    return group, outcome


def drained(group: GroupState) -> GroupState:
    """The state after the exchange that made the buffers equal."""
    return replace(group, exchange=group.exchange + 1)


def concluded(group: GroupState, tickets: Sequence[Ticket]) -> GroupState:
    """The state after an exchange at the end of the script; the run is over when all active members are there.

    A member that took part without a vote is still in its last call. It may need the others afterwards: they hold the
    user's state as of the end of that call.
    """
    pairs = zip(group.standings, tickets, strict=True)
    awaited = any(standing is Standing.ACTIVE and ticket.flags & Flag.FOLLOWING for standing, ticket in pairs)
    return replace(group, exchange=group.exchange + 1, over=not awaited)


def _closed(
    group: GroupState, phase: OpenPhase, result: float | None, results: dict[str, float | None] | None = None
) -> GroupState:
    """The state after the innermost phase has ended."""
    finished = FinishedPhase(phase.kind, phase.epoch, result, phase.inner, results)
    outer = group.open[:-1]
    if not outer:
        return replace(group, open=(), past=group.past.added(finished))
    return replace(group, open=(*outer[:-1], replace(outer[-1], nested=(*outer[-1].nested, finished))))


def _all_work(group: GroupState, phase: OpenPhase, tickets: Sequence[Ticket]) -> bool:
    """Whether every working member is inside its loop body now, and so will return from ``step``."""
    if any(ticket.flags is not QUIET and ticket.flags & Flag.READY for ticket in tickets):
        return False
    if phase.resumed:
        return False
    hands = phase.ledger.hands
    working = [member for member in allowance.at_work(group, phase) if phase.took_part[member] or hands[member].granted]
    if not all(phase.took_part[member] for member in working):
        return False
    if group.overlap:
        return all(_due(hands[member]) for member in working)
    return all(tickets[member].samples > 0 for member in working)


def _due(hand: ledger.Hand) -> bool:
    """Whether the contribution after the settled one certainly has a micro-batch."""
    return hand.quotas[0] > 0 if hand.quotas else hand.granted > 0


def _reconsidered(
    group: GroupState, phase: OpenPhase, tickets: Sequence[Ticket], *, full: bool
) -> tuple[GroupState, OpenPhase, delay.DelayVerdict | None]:
    """Decide whether the coming rounds overlap. No sample of the first round with the new delay has been drawn yet."""
    before = group.choice
    choice, verdict = delay.after(before, tickets, trial=group.policy.trial, full=full)
    group = replace(group, choice=choice)
    if choice.delay != before.delay and group.policy.floating:
        # Without an overlap a round has the reference batch; an open batch has been dealt much more.
        held = ledger.collected(phase.ledger) if choice.delay == 0 else ledger.unbounded(phase.ledger)
        phase = replace(phase, ledger=held)
    # The next round is settled while the worker draws a micro-batch, not in ``step``.
    return group, replace(phase, resumed=choice.delay != before.delay or choice.turning), verdict


def _trained(
    group: GroupState,
    tickets: Sequence[Ticket],
    told: tuple[int, float] | None,
    momentum: float,
    *,
    finite: bool,
    short: bool,
) -> GroupState:
    """The counts, paces, statistics and the rate after a round of training."""
    policy, batch = group.policy, sum(ticket.samples for ticket in tickets)
    known = group.noise if told is None else noise.measured(group.noise, *told, policy.batch)
    rate, paying, scheduled = group.rate, group.paying, float(batch)
    training = pace.measure(group.training, tickets)
    if policy.floating and batch > 0:
        reference, rule = policy.batch, policy.rule
        if not short:
            rate = rates.follow(
                rate, batch=batch, reference=reference, rule=rule, momentum=momentum, noise_scale=known.scale
            )
            paying = _paying(group, training, known.scale)
        scheduled = rates.progress(rule, rate, batch=batch, reference=reference, short=short)
    number, samples = group.round + 1, group.samples + batch
    applied = finite and any(ticket.weight > 0 for ticket in tickets)
    clip_norm, disputed = _clip_norm(group, tickets)
    if finite and noise.is_due(known, number):
        known = noise.contributed(known, number, samples, tickets)
    return replace(
        group,
        round=number,
        samples=samples,
        updates=group.updates + applied,
        clip_norm=clip_norm,
        clip_disputed=disputed,
        rate=rate,
        scheduled=group.scheduled + scheduled,
        noise=known,
        paying=paying,
        skipped=group.skipped + (not finite),
        skipped_in_a_row=0 if finite else group.skipped_in_a_row + 1,
        training=training,
    )


def _is_enough(group: GroupState) -> bool:
    """Whether the script's limit of updates is reached."""
    return group.updates_limit is not None and group.updates >= group.updates_limit


def _clip_norm(group: GroupState, tickets: Sequence[Ticket]) -> tuple[float | None, int]:
    """The bound on the gradient's norm in force from this round on, and for how many rounds scripts have differed.

    A bound takes effect when all workers that have set a bound have set the same one.
    """
    wanted = consistency.clip_norm_wanted(tickets)
    if len(wanted) > 1:
        return group.clip_norm, group.clip_disputed + 1
    return (wanted.pop() if wanted else group.clip_norm), 0


def _momentum(group: GroupState, tickets: Sequence[Ticket]) -> float:
    """The momentum in force: that of the first member with a vote. A follower may not have the right one yet."""
    said = [t.momentum for t in tickets if t.flags is QUIET or not t.flags & Flag.FOLLOWING]
    return said[0] if said and said[0] >= 0.0 else group.policy.momentum


def _paying(group: GroupState, training: Pacing, noise_scale: float | None) -> int | None:
    """The largest round that still raises goodput, by the paces and costs of the working members."""
    if group.policy.at_most is not None or not group.overlap:
        return None
    working = allowance.at_work(group, group.phase)
    if not working:
        return None
    sizes = [group.phase.sizes[member] for member in working]
    return goodput.paying(group.paying, pace.seated(training, working), sizes, group.policy.batch, noise_scale)
