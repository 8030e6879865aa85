"""How the replicated state goes over into another era.

Question  Who is on the new roster, what does each of them keep, and what is dealt anew?
Holds     Pure functions of state, roster and entries: who enters the era computes the same state as everybody else in
          it. In a planned era who stays keeps everything. In an unplanned one what was in flight is lost, what was
          accumulated stays with its owner, and the next round's number is void.
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
    """micro-batches handed in and not settled: lost with the failed sum"""
    kept: tuple[int, ...] = ()
    """micro-batches accumulated since"""
    points: tuple[Point, ...] = ()
    """where what is dropped was computed"""


def switched(group: GroupState, era: int, roster: Sequence[WorkerId]) -> GroupState:
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
        phase = replace(phase, ledger=allowance.made_up(group, phase, spares=True))
        return allowance.dealt(replace(group, open=(*group.open[:-1], phase)))
    # With an overlap the contribution in progress has to be dealt before anybody is ready: it may have gone along.
    return allowance.dealt(group) if group.overlap and not before.overlap else group


def regrouped(group: GroupState, era: int, roster: Sequence[WorkerId], entries: Sequence[Entry]) -> GroupState:
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
        # What was in flight is lost: the contribution in progress was begun under the limits of now.
        phases.append(replace(_seated(phase, places), ledger=held, resumed=True, limits=()))
    group = replace(group, open=tuple(phases))
    for depth in range(len(phases)):
        inner = replace(group, open=group.open[: depth + 1])
        # Whether anybody is left who is in its loop body, and may open an ``evaluate`` there.
        inside = zip(inner.phase.took_part, standings, strict=True)
        seen = inner.phase.seen and any(took and standing is not Standing.FOLLOWING for took, standing in inside)
        made_up = replace(inner.phase, ledger=allowance.made_up(inner, inner.phase, spares=not seen), seen=seen)
        inner = replace(inner, open=(*inner.open[:-1], made_up))
        # Where an ``evaluate`` may be opened now nobody new may begin to work.
        inner = allowance.dealt(inner, spares=not seen)
        group = replace(group, open=(*inner.open, *group.open[depth + 1 :]))
    return group


def limits(group: GroupState) -> dict[str, int | None]:
    """How far the script means to go, which it has told already when the state is another one."""
    return {"samples_limit": group.samples_limit, "updates_limit": group.updates_limit}


def restored(group: GroupState, worker: WorkerId, round_: int) -> GroupState:
    """The state of a checkpoint, with ``worker`` alone to hold it: what was dealt is in the pool again."""
    alone = regrouped(group, group.era, (worker,), (Entry(active=False),))
    return replace(alone, standings=(Standing.ACTIVE,), round=max(group.round, round_))


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
        limits=tuple(0 if place is None else phase.limits[place] for place in places) if phase.limits else (),
        ledger=replace(held, hands=hands),
    )
