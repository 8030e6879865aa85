"""How the replicated state changes when a new era begins.

Question  With another roster, which samples does each member keep, and which are dealt again?
Holds     Pure functions of state, roster and entries: every member of the new era computes the same state. In a planned
          era a member that stays keeps everything. In an unplanned one the contributions in flight are lost, the
          accumulated micro-batches stay with their worker, and the next round's number is void.
Source    ours; docs/design/0007-elastic.md, docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.core import allowance, ledger
from pliant.core.group_state import GroupState, OpenPhase, Standing
from pliant.core.tickets import Kind, Point
from pliant.core.tuning import delay, pace
from pliant.types import WorkerId


class Entry(msgspec.Struct, frozen=True):
    """What a member brings into an unplanned era, for every open phase from the outermost on."""

    active: bool
    """it holds the state that the era begins with"""
    dropped: tuple[int, ...] = ()
    """micro-batches that were handed in and not settled: lost with the failed sum"""
    kept: tuple[int, ...] = ()
    """micro-batches accumulated since then"""
    points: tuple[Point, ...] = ()
    """the weights at which the dropped ones were computed"""


def switched(group: GroupState, era: int, roster: Sequence[WorkerId]) -> GroupState:
    """The state in a planned era: members that stay keep everything, new members are followers."""
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
        # Only the user's bound is safe here. The bound by goodput changes from round to round, and a worker may already
        # have drawn more than its present value.
        bound = group.policy.at_most
        held = ledger.unbounded(phase.ledger) if group.overlap else ledger.bounded(phase.ledger, bound)
        phase = replace(phase, ledger=held)
        group = replace(group, open=(*group.open[:-1], phase))
    if any(before.phase.ledger.hands[place].queue for place in unused) and not phase.seen:
        # A member has gone without giving its samples back.
        phase = replace(phase, ledger=allowance.made_up(group, phase, spares=True))
        return allowance.dealt(replace(group, open=(*group.open[:-1], phase)))
    # With an overlap the contribution in progress must be dealt before a follower is ready: by then it may have handed
    # in an empty ticket for it.
    return allowance.dealt(group) if group.overlap and not before.overlap else group


def regrouped(group: GroupState, era: int, roster: Sequence[WorkerId], entries: Sequence[Entry]) -> GroupState:
    """The state in an unplanned era: contributions in flight are lost, accumulated micro-batches stay.

    The next round's number is void.
    """
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
        # Contributions in flight are lost, so the present limits hold for the contribution in progress.
        phases.append(replace(_seated(phase, places), ledger=held, resumed=True, limits=()))
    group = replace(group, open=tuple(phases))
    for depth in range(len(phases)):
        inner = replace(group, open=group.open[: depth + 1])
        # Whether a remaining member is in its loop body, and may open an ``evaluate`` there.
        inside = zip(inner.phase.took_part, standings, strict=True)
        seen = inner.phase.seen and any(took and standing is not Standing.FOLLOWING for took, standing in inside)
        made_up = replace(inner.phase, ledger=allowance.made_up(inner, inner.phase, spares=not seen), seen=seen)
        inner = replace(inner, open=(*inner.open[:-1], made_up))
        # If an ``evaluate`` may be opened now, no spare may begin to work.
        inner = allowance.dealt(inner, spares=not seen)
        group = replace(group, open=(*inner.open, *group.open[depth + 1 :]))
    return group


def limits(group: GroupState) -> dict[str, int | None]:
    """The limits of the script, which must survive when the state is replaced by another one."""
    return {"samples_limit": group.samples_limit, "updates_limit": group.updates_limit}


def restored(group: GroupState, worker: WorkerId, round_: int) -> GroupState:
    """The state of a checkpoint with ``worker`` as its only member: all dealt samples are in the pool again."""
    alone = regrouped(group, group.era, (worker,), (Entry(active=False),))
    return replace(alone, standings=(Standing.ACTIVE,), round=max(group.round, round_))


def _inhabited(
    phases: tuple[OpenPhase, ...], places: Sequence[int | None], standings: Sequence[Standing]
) -> tuple[OpenPhase, ...]:
    """The phases without an ``evaluate`` in a loop body that no member is in any more."""
    holders = [p for p, s in zip(places, standings, strict=True) if p is not None and s is not Standing.FOLLOWING]
    depth = len(phases)
    while depth and (depth > 1 or phases[depth - 1].inner) and not any(phases[depth - 1].present[p] for p in holders):
        depth -= 1
    return phases[:depth]


def _with_roster(
    group: GroupState,
    era: int,
    roster: Sequence[WorkerId],
    places: Sequence[int | None],
    standings: tuple[Standing, ...],
) -> GroupState:
    return replace(
        group,
        era=era,
        roster=tuple(roster),
        standings=standings,
        choice=delay.moved(group.choice),
        # Names are never reused, so the offences of workers that are gone can be dropped.
        offences=tuple((worker, count) for worker, count in group.offences if worker in roster),
        training=pace.seated(group.training, places),
        evaluating=pace.seated(group.evaluating, places),
    )


def _seated(phase: OpenPhase, places: Sequence[int | None]) -> OpenPhase:
    """The phase with its members in the order of the new roster; newcomers are not in it yet."""
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
        limits=tuple(0 if place is None else phase.limits[place] for place in places) if phase.limits else (),
        ledger=replace(held, hands=hands),
    )
