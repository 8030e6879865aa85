"""What the group decides from the tickets of a round.

Question  Given what every worker handed in, which update is made and who does what next?
Holds     ``opened`` and ``settled`` are pure: every worker evaluates them on the same tickets and reaches the
          same batch, factor, deals and end of phase without asking anyone. Which contribution a deal is for is
          never in doubt: with an overlap the deals made at the end of round r are for round r + 2.
Source    ABS-SGD (Zhou et al. 2023) for the overlap; sharing and dealing are ours, docs/design/0002-rounds.md.
"""

from __future__ import annotations

import enum
import math
import struct
import zlib
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.core import dealing, drift, goodput, ledger, noise, overlap, pace, rates
from pliant.core.drift import Drift
from pliant.core.ledger import Ledger
from pliant.core.pace import Pacing
from pliant.core.shares import apportion, cut
from pliant.core.tickets import Flag, Kind, Point, Ticket
from pliant.types import Span, WorkerId

# An infinite loss now and then is a known cost of low precision; twenty rounds in a row never recover.
MAX_SKIPPED_IN_A_ROW = 20
# Most tickets announce nothing, and asking that takes a fraction of the time of masking a flag.
_NONE = Flag.NONE
_MOVING = Flag.LEAVING | Flag.READY


class Policy(msgspec.Struct, frozen=True):
    """The settings that decisions depend on; the same on all workers."""

    batch: int
    floating: bool = False
    at_most: int | None = None
    delay: int = 1
    """1, 0 or ``overlap.AUTO``"""
    trial: int = overlap.TRIAL
    """with the latter: rounds for which a delay is tried"""
    rule: rates.Rule = rates.LINEAR
    momentum: float = 0.0
    watched: int = drift.EVERY
    """rounds from one digest of the weights to the next; 0: none is taken"""


class Standing(enum.IntEnum):
    """What a member of the roster can do now."""

    FOLLOWING = 0
    """does not hold the whole state yet: weight 0, no deals"""
    ACTIVE = 1
    LEAVING = 2
    """draws no more; gone with the next planned era"""


class Past(msgspec.Struct, frozen=True):
    """A finished top-level phase: what the same call of a newcomer returns."""

    kind: Kind
    epoch: int
    result: float | None = None
    inner: bool = False
    """called in the body of the loop before it, whose phase had ended: a newcomer does not make this call"""


class OpenPhase(msgspec.Struct, frozen=True):
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
    present: tuple[bool, ...]
    """whose script has made this call; the others go along without samples"""
    seen: bool = False
    """the last round was seen: an ``evaluate`` may be opened before the round in flight is settled"""
    resumed: bool = False
    """an unplanned era has begun since the last round: some may settle the next one outside of ``step``"""
    inner: bool = False
    """see ``Past``"""
    nested: tuple[Past, ...] = ()
    """finished phases inside this one, in their order"""
    total: float = 0.0
    count: float = 0.0


class Group(msgspec.Struct, frozen=True):
    """The replicated state: equal on all workers after the same tickets."""

    policy: Policy
    era: int
    roster: tuple[WorkerId, ...]
    standings: tuple[Standing, ...]
    exchange: int = 0
    """exchanges settled so far, of any kind"""
    round: int = 0
    """the number of the last settled round; void numbers are passed over"""
    phases: int = 0
    """phases opened so far"""
    samples: int = 0
    """samples of settled training rounds"""
    samples_limit: int | None = None
    rate: rates.Rate = msgspec.field(default_factory=rates.Rate)
    choice: overlap.Choice = msgspec.field(default_factory=overlap.Choice)
    """which delay is in force, where that is decided from round to round"""
    scheduled: float = 0.0
    """samples by which the schedule has moved on: those of ``samples``, under AdaScale what they were worth"""
    noise: noise.Noise = msgspec.field(default_factory=noise.Noise)
    paying: int | None = None
    """up to how many samples a round of an open batch pays, where the user sets no bound; None: any, or not known"""
    skipped: int = 0
    skipped_in_a_row: int = 0
    training: Pacing = msgspec.field(default_factory=lambda: pace.unmeasured(1))
    evaluating: Pacing = msgspec.field(default_factory=lambda: pace.unmeasured(1))
    open: tuple[OpenPhase, ...] = ()
    """innermost last: an ``evaluate`` may be called inside a ``batches`` loop"""
    past: tuple[Past, ...] = ()
    """finished top-level phases, in their order"""
    given_up: tuple[OpenPhase, ...] = ()
    """phases that the last unplanned era has ended: nobody was left in them, and nobody else would have come"""
    offences: tuple[tuple[WorkerId, int], ...] = ()
    """members whose weights have differed from the others', and how often"""
    over: bool = False
    """all scripts have reached their end"""

    @property
    def phase(self) -> OpenPhase:
        return self.open[-1]

    @property
    def overlap(self) -> bool:
        """Whether the next contribution is computed while the last one is summed."""
        return self.overlaps(self.phase.kind) if self.open else self.overlaps(Kind.TRAIN)

    @property
    def delay(self) -> int:
        """What is in force in a training phase of a group."""
        return self.choice.delay if self.policy.delay == overlap.AUTO else self.policy.delay

    def overlaps(self, kind: Kind) -> bool:
        """The same for a phase of another kind."""
        return len(self.roster) > 1 and (self.delay == 1 or kind is Kind.EVALUATE)

    @property
    def at_most(self) -> int | None:
        """How many samples a round of an open batch may have.

        Where more than so many stop paying, rounds end by then (``allowance``); up to twice as many a round may take
        in, lest a fast worker waits for a slow one.
        """
        if self.policy.at_most is not None or self.paying is None:
            return self.policy.at_most
        return 2 * self.paying

    @property
    def efficiency(self) -> float | None:
        """What a sample is worth beside one in a round of the reference batch; None while unknown."""
        scale = self.noise.scale
        if scale is None:
            return None
        return goodput.efficiency(self.rate.batch or self.policy.batch, self.policy.batch, scale)


class Mismatch(msgspec.Struct, frozen=True):
    """The workers are not doing the same thing; the run cannot go on."""

    reason: str


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
    """false: some worker's part was not finite; samples are spent, weights stay"""
    spans: tuple[tuple[Span, ...], ...]
    seen: bool
    """every worker's loop body is at this round now: the moment at which ``step`` may return True"""
    ended: bool
    cut: tuple[Span, ...] = ()
    result: float | None = None
    plan: tuple[int, int] | None = None
    """(term, era) of the planned era that begins after this exchange"""
    verdict: overlap.Verdict | None = None
    """the delay was decided anew"""
    momentum: float = 0.0
    """in force, by the first who speaks"""
    measures: bool = False
    """the norm of the mean gradient is to be taken, for a later ticket"""
    measured: tuple[int, float] | None = None
    """(round, squared norm of its mean gradient) that the tickets have brought"""
    weighs: bool = False
    """a digest of the weights is to be taken, for a later ticket"""
    drift: Drift | None = None
    """whose weights differ from the others', as the tickets show"""


def founded(policy: Policy, era: int, roster: Sequence[WorkerId]) -> Group:
    """The state at the first era's start."""
    blank = pace.unmeasured(len(roster))
    standings = (Standing.ACTIVE,) * len(roster)
    return Group(policy, era, tuple(roster), standings, training=blank, evaluating=blank)


def digest(group: Group) -> int:
    """A fingerprint of the state's counters; tickets carry it so that a divergence is seen in the next round."""
    cursor = group.phase.ledger.cursor if group.open else -1
    limit = -1 if group.samples_limit is None else group.samples_limit
    counters = (group.era, group.round, group.phases, group.samples, cursor, limit, group.delay)
    measures = (group.rate.factor, group.scheduled, group.noise.variance, group.noise.signal)
    return zlib.crc32(struct.pack("<qqqqqqqdddd", *counters, *measures) + bytes(group.standings))


def opened(group: Group, tickets: Sequence[Ticket]) -> Group | Mismatch:
    """All workers entered the next phase: deal its first micro-batches."""
    mismatch = compared(group, tickets) or _compare_openings(group, tickets)
    if mismatch:
        return mismatch
    present = opening(tickets)
    first = tickets[present.index(True)]
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
        present=present,
        inner=bool(first.flags & Flag.INNER),
    )
    # Who leaves says so again in the first round: the journal of an opening does not tell.
    standings = _ready(group, tickets)
    group = replace(
        group, exchange=group.exchange + 1, phases=phase.number, open=(*group.open, phase), standings=standings
    )
    if limit == 0:
        return _closed(group, phase, None)
    return _dealt(group)


def opening(tickets: Sequence[Ticket]) -> tuple[bool, ...]:
    """Who makes the call that these tickets open; the others go along.

    In the body of a loop whose phase has ended only those make one who are in the body. The others have left the loop:
    what they open or end comes after it.
    """
    within = Flag.INNER if any(ticket.flags & Flag.INNER for ticket in tickets) else Flag.OPENING
    return tuple(bool(ticket.flags & within) for ticket in tickets)


def settled(group: Group, tickets: Sequence[Ticket]) -> tuple[Group, Settled] | Mismatch:
    """Spend the samples of the handed-in contributions, decide the update, deal what comes next."""
    mismatch = compared(group, tickets)
    if mismatch:
        return mismatch
    phase, standings, was_turning = group.phase, group.standings, group.choice.turning
    remaining, spans = ledger.settle(phase.ledger, [ticket.micro_batches for ticket in tickets])
    short = remaining.free == 0
    took_part = tuple([took or ticket.samples > 0 for took, ticket in zip(phase.took_part, tickets, strict=True)])
    phase = replace(phase, ledger=remaining, took_part=took_part)
    # Most rounds are quiet.
    flagged = [ticket for ticket in tickets if ticket.flags is not _NONE]
    broken = any(ticket.flags & Flag.BREAK for ticket in flagged)
    weight = math.fsum([ticket.weight for ticket in tickets])
    total = math.fsum([ticket.loss_sum for ticket in tickets])
    batch = sum([ticket.samples for ticket in tickets])
    if phase.kind is Kind.EVALUATE:
        phase = replace(phase, total=phase.total + total, count=phase.count + weight)
        group = replace(group, evaluating=pace.forgiven(pace.measure(group.evaluating, tickets), tickets))
        finite, told, momentum = True, None, 0.0
    else:
        finite = not any(ticket.flags & Flag.NONFINITE for ticket in flagged)
        told, momentum = noise.told(group.noise, tickets), _momentum(group, tickets)
        group = _trained(group, tickets, told, momentum, finite=finite, short=short)
    ended = broken or remaining.is_spent
    plan = agreed_plan(group, tickets)
    differs = None
    if phase.kind is Kind.TRAIN and not ended and plan is None:
        # Else the next round's tickets tell it again, or a later digest does.
        differs = _drifted(group, phase, tickets)
    group, phase = _moved(replace(group, exchange=group.exchange + 1), phase, tickets, differs)
    result = phase.total / phase.count if ended and phase.kind is Kind.EVALUATE and phase.count else None
    ended = ended or _deserted(group, phase)
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
        # Whoever breaks has left its loop body; whose share has grown does not hand in at once.
        seen=not broken and not differs and phase.ledger is remaining and _all_work(group, phase, tickets),
        ended=ended,
        cut=ledger.unspent(phase.ledger) if ended else (),
        result=result,
        plan=plan,
        momentum=momentum,
        measures=phase.kind is Kind.TRAIN and any(each.round == group.round for each in group.noise.awaited),
        measured=told,
        weighs=phase.kind is Kind.TRAIN and len(group.roster) > 1 and drift.is_due(group.round, group.policy.watched),
        drift=differs,
    )
    phase = replace(phase, seen=outcome.seen, resumed=False)
    if phase.kind is Kind.TRAIN and group.policy.delay == overlap.AUTO and len(group.roster) > 1:
        full = not (short or ended) and standings == group.standings
        group, phase, verdict = _reconsidered(group, phase, tickets, full=full)
        outcome = replace(outcome, verdict=verdict) if verdict is not None else outcome
    if ended:
        return _closed(group, phase, result), outcome
    # Where the overlap ends, this is for the very next round: whoever merely goes along may have done so already.
    overlap_ends = was_turning and not group.choice.turning
    group = _dealt(replace(group, open=(*group.open[:-1], phase)), spares=not overlap_ends)
    if outcome.seen:
        hands = group.phase.ledger.hands
        if any(hand.granted and not took for hand, took in zip(hands, took_part, strict=True)):
            # Somebody who went along until now has just been dealt its first samples: it is in no loop body yet.
            group = replace(group, open=(*group.open[:-1], replace(group.phase, seen=False)))
            outcome = replace(outcome, seen=False)
    return group, outcome


def _reconsidered(
    group: Group, phase: OpenPhase, tickets: Sequence[Ticket], *, full: bool
) -> tuple[Group, OpenPhase, overlap.Verdict | None]:
    """Decide whether the coming rounds overlap. Nobody has drawn anything of the first round of the other kind."""
    before = group.choice
    choice, verdict = overlap.after(before, tickets, trial=group.policy.trial, full=full)
    group = replace(group, choice=choice)
    if choice.delay != before.delay and group.policy.floating:
        # Without an overlap a round is of the reference batch; what was dealt for open ones is much more.
        held = ledger.collected(phase.ledger) if choice.delay == 0 else ledger.unbounded(phase.ledger)
        phase = replace(phase, ledger=held)
    # The next round is settled while a micro-batch is asked for, not in ``step``.
    return group, replace(phase, resumed=choice.delay != before.delay or choice.turning), verdict


def speaks(group: Group, member: int) -> bool:
    """Whether ``member`` has a say in what the next exchange is: it is in the phase's loop, or may be any moment.

    The others (followers, spares, those who leave) learn from the tickets what the group does, and go along.
    """
    if not group.open or group.standings[member] is not Standing.ACTIVE:
        return False
    phase = group.phase
    return phase.present[member] and (phase.took_part[member] or phase.ledger.hands[member].granted > 0)


def somebody_came_along(group: Group, tickets: Sequence[Ticket]) -> bool:
    """Whether somebody may have come to the end of a phase without having computed since it joined."""
    return any(
        standing is not Standing.LEAVING and not ticket.micro_batches
        for standing, ticket in zip(group.standings, tickets, strict=True)
    )


def drained(group: Group) -> Group:
    """The buffers were made equal by an exchange of their own."""
    return replace(group, exchange=group.exchange + 1)


def concluded(group: Group) -> Group:
    """All scripts have reached their end."""
    return replace(group, exchange=group.exchange + 1, over=True)


def _closed(group: Group, phase: OpenPhase, result: float | None) -> Group:
    """The innermost phase is over."""
    finished = Past(phase.kind, phase.epoch, result, phase.inner)
    outer = group.open[:-1]
    if not outer:
        return replace(group, open=(), past=(*group.past, finished))
    return replace(group, open=(*outer[:-1], replace(outer[-1], nested=(*outer[-1].nested, finished))))


# -- who can do what


def _ready(group: Group, tickets: Sequence[Ticket]) -> tuple[Standing, ...]:
    """The standings with those active who hold the whole state now."""
    return tuple(
        Standing.ACTIVE if ticket.flags & Flag.READY and standing is Standing.FOLLOWING else standing
        for standing, ticket in zip(group.standings, tickets, strict=True)
    )


def _drifted(group: Group, phase: OpenPhase, tickets: Sequence[Ticket]) -> Drift | None:
    """Whose weights differ. Who merely goes along may have said already that it is ready: it is not asked."""
    if len(tickets) < 2 or all(ticket.weights_round == 0 for ticket in tickets):
        return None
    return drift.judged(group.roster, _working(group, phase), tickets, dict(group.offences))


def _moved(
    group: Group, phase: OpenPhase, tickets: Sequence[Ticket], differs: Drift | None = None
) -> tuple[Group, OpenPhase]:
    """Take in who has become ready or entered the phase late, give back the hands of those who leave.

    Who ``differs`` is a newcomer again: what it has computed is of no use.
    """
    standings = group.standings
    if any(ticket.flags is not _NONE and ticket.flags & _MOVING for ticket in tickets):
        standings = tuple(
            # Who does not hold the state has nothing to leave behind, and must not be taken for one who does.
            Standing.LEAVING if ticket.flags & Flag.LEAVING and standing is not Standing.FOLLOWING else standing
            for standing, ticket in zip(_ready(group, tickets), tickets, strict=True)
        )
        group = replace(group, standings=standings)
    elif Standing.LEAVING not in standings and differs is None:
        return group, phase
    held = phase.ledger
    present, sizes, ahead = list(phase.present), list(phase.sizes), list(phase.ahead)
    took_part = list(phase.took_part)
    moved = False
    if differs is not None:
        moved = True
        group = _with_offences(group, differs)
        standings = group.standings
        for member in differs.named:
            held = ledger.give_back(held, member)
            present[member] = took_part[member] = False
    for member, ticket in enumerate(tickets):
        # Whoever said so inside a nested phase still holds something of the outer one.
        if standings[member] is Standing.LEAVING:
            moved = moved or bool(held.hands[member].queue)
            held = ledger.give_back(held, member)
        elif ticket.flags & Flag.READY and not present[member]:
            moved = True
            present[member], sizes[member], ahead[member] = True, ticket.size, ticket.ahead
        elif ticket.flags & Flag.READY:
            moved = True
    if not moved:
        return group, phase
    phase = replace(
        phase,
        ledger=held,
        present=tuple(present),
        sizes=tuple(sizes),
        ahead=tuple(ahead),
        took_part=tuple(took_part),
    )
    # With an overlap a spare may have gone along with the contribution in progress already.
    return group, replace(phase, ledger=_made_up(group, phase, spares=not group.overlap))


def _with_offences(group: Group, differs: Drift) -> Group:
    """Whoever differs does not hold the state any more, and that is remembered."""
    offences = dict(group.offences)
    standings = list(group.standings)
    for member in differs.named:
        worker = group.roster[member]
        offences[worker] = offences.get(worker, 0) + 1
        standings[member] = Standing.FOLLOWING
    return replace(group, standings=tuple(standings), offences=tuple(offences.items()))


def _working(group: Group, phase: OpenPhase) -> list[int]:
    """Members that are dealt samples in this phase."""
    return [
        member
        for member, standing in enumerate(group.standings)
        if standing is Standing.ACTIVE and phase.present[member]
    ]


def _deserted(group: Group, phase: OpenPhase) -> bool:
    """Whether an ``evaluate`` in a loop body goes on without anyone to compute it: who comes now is elsewhere."""
    body = phase.inner or len(group.open) > 1
    return body and Standing.LEAVING in group.standings and not _working(group, phase)


def agreed_plan(group: Group, tickets: Sequence[Ticket]) -> tuple[int, int] | None:
    """The planned era all members are prepared for; never inside a nested phase: a round is in flight there."""
    plans = {(ticket.plan_term, ticket.plan_era) for ticket in tickets}
    if len(plans) > 1 or len(group.open) > 1:
        return None
    (plan,) = plans
    return plan if plan[1] > group.era and not _must_wait(group, tickets) else None


def _must_wait(group: Group, tickets: Sequence[Ticket]) -> bool:
    """Whether the state would leave with those who hold it.

    Who plans an era does not know yet of a member that takes the state over again.
    """
    offenders, waiting, holders = dict(group.offences), False, False
    for worker, standing, ticket in zip(group.roster, group.standings, tickets, strict=True):
        # Who goes along does not have all of it yet, though it may have said that it can compute.
        follows = standing is Standing.FOLLOWING or bool(ticket.flags & Flag.FOLLOWING)
        waiting = waiting or (follows and worker in offenders)
        holders = holders or not (follows or standing is Standing.LEAVING or ticket.flags & Flag.LEAVING)
    return waiting and not holders


# -- eras


class Entry(msgspec.Struct, frozen=True):
    """What a member brings into an unplanned era, for every open phase from the outermost on."""

    active: bool
    """it holds the state that the era begins with"""
    dropped: tuple[int, ...] = ()
    """micro-batches handed in and not settled: lost with the failed sum"""
    kept: tuple[int, ...] = ()
    """micro-batches accumulated since"""
    points: tuple[Point, ...] = ()
    """where what is dropped was computed"""


def switched(group: Group, era: int, roster: Sequence[WorkerId]) -> Group:
    """A planned era: who stays keeps everything, who is new follows."""
    places = [group.roster.index(worker) if worker in group.roster else None for worker in roster]
    standings = tuple(Standing.FOLLOWING if place is None else group.standings[place] for place in places)
    before = group
    group = _with_roster(group, era, roster, places, standings)
    phases = tuple(_seated(phase, places) for phase in group.open)
    group = replace(group, open=phases)
    if not phases or group.phase.kind is not Kind.TRAIN:
        return group
    phase, unused = group.phase, [place for place in range(len(before.roster)) if place not in places]
    if before.overlap != group.overlap and group.policy.floating:
        # By the user's bound: that of what pays changes from round to round, and more may be drawn than it is now.
        bound = group.policy.at_most
        held = ledger.unbounded(phase.ledger) if group.overlap else ledger.bounded(phase.ledger, bound)
        phase = replace(phase, ledger=held)
        group = replace(group, open=(*group.open[:-1], phase))
    if any(before.phase.ledger.hands[place].queue for place in unused) and not phase.seen:
        # Somebody has gone without a word.
        phase = replace(phase, ledger=_made_up(group, phase, spares=True))
        return _dealt(replace(group, open=(*group.open[:-1], phase)))
    # With an overlap the contribution in progress has to be dealt before anybody is ready: it may have gone along.
    return _dealt(group) if group.overlap and not before.overlap else group


def restored(group: Group, worker: WorkerId, round_: int) -> Group:
    """The state of a checkpoint, with ``worker`` alone to hold it: what was dealt is in the pool again."""
    alone = regrouped(group, group.era, (worker,), (Entry(active=False),))
    return replace(alone, standings=(Standing.ACTIVE,), round=max(group.round, round_))


def regrouped(group: Group, era: int, roster: Sequence[WorkerId], entries: Sequence[Entry]) -> Group:
    """An unplanned era: what was in flight is lost, what was accumulated stays; the next round's number is void."""
    places = [group.roster.index(worker) if worker in group.roster else None for worker in roster]
    standings = tuple(
        group.standings[place]
        if place is not None and entry.active and group.standings[place] is not Standing.FOLLOWING
        else Standing.FOLLOWING
        for place, entry in zip(places, entries, strict=True)
    )
    before = group
    group = _with_roster(group, era, roster, places, standings)
    group = replace(group, exchange=group.exchange + 1, round=group.round + 1)
    phases: list[OpenPhase] = []
    still_open = _inhabited(before.open, places, standings)
    group = replace(group, given_up=before.open[len(still_open) :])
    for depth, phase in enumerate(still_open):
        kept = [
            ledger.Kept(place, entry.dropped[depth], entry.kept[depth])
            if place is not None and standing is Standing.ACTIVE and depth < len(entry.kept)
            else None
            for place, entry, standing in zip(places, entries, standings, strict=True)
        ]
        quotas = phase.kind is Kind.TRAIN and (not before.policy.floating or not group.overlaps(phase.kind))
        held = ledger.regrouped(phase.ledger, kept, quotas=quotas)
        phases.append(replace(_seated(phase, places), ledger=held, resumed=True))
    group = replace(group, open=tuple(phases))
    for depth in range(len(phases)):
        inner = replace(group, open=group.open[: depth + 1])
        # Whether anybody is left who is in its loop body, and may open an ``evaluate`` there.
        inside = zip(inner.phase.took_part, standings, strict=True)
        seen = inner.phase.seen and any(took and standing is not Standing.FOLLOWING for took, standing in inside)
        made_up = replace(inner.phase, ledger=_made_up(inner, inner.phase, spares=not seen), seen=seen)
        inner = replace(inner, open=(*inner.open[:-1], made_up))
        # Where an ``evaluate`` may be opened now nobody new may begin to work.
        inner = _dealt(inner, spares=not seen)
        group = replace(group, open=(*inner.open, *group.open[depth + 1 :]))
    return group


def _inhabited(
    phases: tuple[OpenPhase, ...], places: Sequence[int | None], standings: Sequence[Standing]
) -> tuple[OpenPhase, ...]:
    """Without an ``evaluate`` in a loop body that nobody is in any more: the others are elsewhere in their scripts."""
    holders = [p for p, s in zip(places, standings, strict=True) if p is not None and s is not Standing.FOLLOWING]
    depth = len(phases)
    while depth and (depth > 1 or phases[depth - 1].inner) and not any(phases[depth - 1].present[p] for p in holders):
        depth -= 1
    return phases[:depth]


def _with_roster(
    group: Group,
    era: int,
    roster: Sequence[WorkerId],
    places: Sequence[int | None],
    standings: tuple[Standing, ...],
) -> Group:
    return replace(
        group,
        era=era,
        roster=tuple(roster),
        standings=standings,
        choice=overlap.moved(group.choice),
        # A name is used once: who is gone does not come back under it.
        offences=tuple((worker, count) for worker, count in group.offences if worker in roster),
        training=pace.seated(group.training, places),
        evaluating=pace.seated(group.evaluating, places),
    )


def _seated(phase: OpenPhase, places: Sequence[int | None]) -> OpenPhase:
    """The phase with its members in the order of the new roster; newcomers have not made the call."""
    held = phase.ledger
    gone = [member for member in range(len(held.hands)) if member not in places]
    for member in gone:
        held = ledger.give_back(held, member)
    hands = tuple(ledger.Hand() if place is None else held.hands[place] for place in places)
    return replace(
        phase,
        sizes=tuple(1 if place is None else phase.sizes[place] for place in places),
        ahead=tuple(0 if place is None else phase.ahead[place] for place in places),
        took_part=tuple(False if place is None else phase.took_part[place] for place in places),
        present=tuple(False if place is None else phase.present[place] for place in places),
        ledger=replace(held, hands=hands),
    )


def _made_up(group: Group, phase: OpenPhase, *, spares: bool) -> Ledger:
    """Make a fixed batch whose contribution is in progress up to its size, after hands went back to the pool.

    ``spares``: whoever merely went along until now may get something of it.
    """
    policy = group.policy
    if phase.kind is not Kind.TRAIN or (policy.floating and group.overlap):
        return phase.ledger
    if not any(hand.quotas for hand in phase.ledger.hands):
        # Nobody has computed so far; who begins may have gone along with the contribution in progress already.
        return ledger.first_only(phase.ledger) if not spares else phase.ledger
    working = _working(group, phase)
    if not spares:
        working = [member for member in working if phase.took_part[member] or phase.ledger.hands[member].granted]
    held = ledger.first_only(phase.ledger)
    promised = sum(hand.granted_samples for hand in held.hands)
    missing = min(policy.batch - promised, held.free)
    # A micro-batch of a single sample would be worse than a batch that lacks one.
    if missing < (dealing.LEAST if promised else 1) or not working:
        return held
    paces = group.training.paces()
    more = dealing.without_crumbs(apportion(missing, [paces[m] for m in working]), [paces[m] for m in working])
    for member, samples in zip(working, more, strict=True):
        if samples:
            held = ledger.add_to_first(held, member, cut(samples, phase.sizes[member]))
    return held


def _all_work(group: Group, phase: OpenPhase, tickets: Sequence[Ticket]) -> bool:
    """Whether everyone who takes part is inside its loop body now, and so will return from ``step``."""
    if any(ticket.flags is not _NONE and ticket.flags & Flag.READY for ticket in tickets):
        return False
    if phase.resumed:
        return False
    hands = phase.ledger.hands
    working = [member for member in _working(group, phase) if phase.took_part[member] or hands[member].granted]
    if not all(phase.took_part[member] for member in working):
        return False
    if group.overlap:
        return all(_due(hands[member]) for member in working)
    return all(tickets[member].samples > 0 for member in working)


def _due(hand: ledger.Hand) -> bool:
    """Whether the contribution after the settled one has a micro-batch for certain."""
    return hand.quotas[0] > 0 if hand.quotas else hand.granted > 0


class Allowance(msgspec.Struct, frozen=True):
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
    if group.standings[member] is not Standing.ACTIVE:
        return Allowance(micro_batches=0)
    if group.choice.turning and in_flight and phase.kind is Kind.TRAIN:
        return Allowance(micro_batches=0)
    if phase.kind is Kind.TRAIN and (not policy.floating or not group.overlap):
        quotas = phase.ledger.hands[member].quotas
        return Allowance(micro_batches=quotas[in_flight] if in_flight < len(quotas) else 0)
    working = _working(group, phase)
    if member not in working:
        return Allowance(micro_batches=0)
    sizes = [phase.sizes[m] for m in working]
    if phase.kind is Kind.EVALUATE:
        return Allowance(seconds=dealing.patience_s(pace.seated(group.evaluating, working), sizes))
    training = pace.seated(group.training, working)
    seconds = dealing.patience_s(training, sizes, group.paying)
    if group.at_most is None:
        return Allowance(seconds=seconds)
    limits = dealing.contribution_limits(training, group.at_most, len(working))
    return Allowance(samples=limits[working.index(member)], seconds=seconds)


def _momentum(group: Group, tickets: Sequence[Ticket]) -> float:
    """The momentum in force: that of the first who speaks; who takes the state over may not have it yet."""
    said = [t.momentum for t in tickets if t.flags is _NONE or not t.flags & Flag.FOLLOWING]
    return said[0] if said and said[0] >= 0.0 else group.policy.momentum


def _trained(
    group: Group,
    tickets: Sequence[Ticket],
    told: tuple[int, float] | None,
    momentum: float,
    *,
    finite: bool,
    short: bool,
) -> Group:
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
    if finite and noise.is_due(known, number):
        known = noise.contributed(known, number, samples, tickets)
    return replace(
        group,
        round=number,
        samples=samples,
        rate=rate,
        scheduled=group.scheduled + scheduled,
        noise=known,
        paying=paying,
        skipped=group.skipped + (not finite),
        skipped_in_a_row=0 if finite else group.skipped_in_a_row + 1,
        training=training,
    )


def _paying(group: Group, training: Pacing, noise_scale: float | None) -> int | None:
    """Up to how many samples a round pays, by the paces and costs of those who work."""
    if group.policy.at_most is not None or not group.overlap:
        return None
    working = _working(group, group.phase)
    if not working:
        return None
    sizes = [group.phase.sizes[member] for member in working]
    return goodput.paying(group.paying, pace.seated(training, working), sizes, group.policy.batch, noise_scale)


def _dealt(group: Group, *, spares: bool = True) -> Group:
    """Deal within the innermost phase what the workers need until the round after next."""
    phase, policy = group.phase, group.policy
    working = _working(group, phase)
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


_NAMES = {Kind.TRAIN: "batches", Kind.EVALUATE: "evaluate", Kind.END: "the end of the script"}


def compared(group: Group, tickets: Sequence[Ticket]) -> Mismatch | None:
    """Whether all workers are at the same point of the same script; the first difference, by name, if not."""
    speaking = _speaking(group, tickets)
    if not speaking:
        return None
    leader, first = speaking[0]
    for worker, ticket in speaking[1:]:
        pair = (leader, worker)
        differs = ticket.flags is not first.flags and (ticket.flags ^ first.flags) & Flag.OPENING
        if ticket.kind is not first.kind or differs:
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


def _speaking(group: Group, tickets: Sequence[Ticket]) -> list[tuple[WorkerId, Ticket]]:
    """The tickets of those who do not merely go along."""
    pairs = zip(group.roster, tickets, strict=True)
    speaking = [(worker, t) for worker, t in pairs if t.flags is _NONE or not t.flags & Flag.FOLLOWING]
    inner = [(worker, t) for worker, t in speaking if t.flags is not _NONE and t.flags & Flag.INNER]
    return inner or speaking


def _doing(ticket: Ticket) -> str:
    if ticket.kind is Kind.END:
        return "the end of the script"
    verb = "the start of " if ticket.flags & Flag.OPENING else "the middle of "
    return f"{verb}{_NAMES[ticket.kind]}"


def _compare_openings(group: Group, tickets: Sequence[Ticket]) -> Mismatch | None:
    (leader, first), *others = _speaking(group, tickets)
    for worker, ticket in others:
        if ticket.length != first.length:
            return Mismatch(
                f"dataset lengths differ: {first.length} samples on {leader} but {ticket.length} "
                f"on {worker}; give {_NAMES[first.kind]} the same dataset on every worker"
            )
        if ticket.order != first.order:
            return Mismatch(
                f"the order of the samples differs between {leader} and {worker}: "
                "make order= a function of epoch and length alone, and give every worker the same seed"
            )
        if ticket.epoch != first.epoch:
            return Mismatch(
                f"{leader} is in epoch {first.epoch} but {worker} in epoch {ticket.epoch}: "
                "run the same loop on every worker"
            )
    return None
