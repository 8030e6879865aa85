"""Which members compute after an exchange.

Question  Which members have become ready, which leave, whose weights differ, and what becomes of their samples?
Holds     A member that leaves or whose weights differ draws no more: its samples return to the pool, and a fixed batch
          in progress is filled up again. A member without the state never counts as one that leaves with it.
Source    ours; docs/protocol.md ("Following", "Drift").
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pliant.core import allowance, drift, ledger
from pliant.core.drift import Drift
from pliant.core.group_state import GroupState, OpenPhase, Standing
from pliant.core.tickets import QUIET, Flag, Ticket
from pliant.types import WorkerId

_MOVING = Flag.LEAVING | Flag.READY


def moved(
    group: GroupState, phase: OpenPhase, tickets: Sequence[Ticket], differs: Drift | None = None
) -> tuple[GroupState, OpenPhase]:
    """Let members compute that have become ready or entered the phase late; return the samples of leavers to the pool.

    Members named by ``differs`` become followers again: what they have computed cannot be used.
    """
    standings = group.standings
    if any(ticket.flags is not QUIET and ticket.flags & _MOVING for ticket in tickets):
        standings = tuple(
            # A follower that leaves stays FOLLOWING: LEAVING means a member that holds the state.
            Standing.LEAVING if ticket.flags & Flag.LEAVING and standing is not Standing.FOLLOWING else standing
            for standing, ticket in zip(ready(group, tickets), tickets, strict=True)
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
        # A member that announced LEAVING inside a nested phase still holds samples of the outer one.
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
    # With an overlap a spare may have handed in an empty ticket for the contribution in progress already.
    return group, replace(phase, ledger=allowance.made_up(group, phase, spares=not group.overlap))


def heard_in_body(group: GroupState, tickets: Sequence[Ticket]) -> list[Ticket]:
    """The tickets of an opening, without READY from members that are outside the loop body in which it happens.

    Members in the body may open several ``evaluate`` calls there, which the others cannot know. A follower says READY
    again, and it takes effect in the next round of the loop.
    """
    if not group.open:
        return list(tickets)
    return [
        replace(ticket, flags=ticket.flags & ~Flag.READY)
        if ticket.flags is not QUIET and ticket.flags & Flag.FOLLOWING
        else ticket
        for ticket in tickets
    ]


def ready(group: GroupState, tickets: Sequence[Ticket]) -> tuple[Standing, ...]:
    """The standings, with the followers active that hold the whole state now."""
    return tuple(
        Standing.ACTIVE if ticket.flags & Flag.READY and standing is Standing.FOLLOWING else standing
        for standing, ticket in zip(group.standings, tickets, strict=True)
    )


def _with_offences(group: GroupState, differs: Drift) -> GroupState:
    """The members whose weights differ become followers, and their offence is counted."""
    offences = dict(group.offences)
    standings = list(group.standings)
    for member in differs.named:
        worker = group.roster[member]
        offences[worker] = offences.get(worker, 0) + 1
        standings[member] = Standing.FOLLOWING
    return replace(group, standings=tuple(standings), offences=tuple(offences.items()))


def drifted(group: GroupState, phase: OpenPhase, tickets: Sequence[Ticket]) -> Drift | None:
    """Whose weights differ. Members that compute no samples are not compared, even if they have said READY."""
    if len(tickets) < 2 or all(ticket.weights_round == 0 for ticket in tickets):
        return None
    return drift.judged(group.roster, allowance.at_work(group, phase), tickets, dict(group.offences))


def deserted(group: GroupState, phase: OpenPhase) -> bool:
    """Whether all members of an ``evaluate`` in a loop body have left: newcomers are elsewhere in the script."""
    body = phase.inner or len(group.open) > 1
    return body and Standing.LEAVING in group.standings and not allowance.at_work(group, phase)


def fresh(
    known: frozenset[WorkerId], before: GroupState, after: GroupState, tickets: Sequence[Ticket]
) -> frozenset[WorkerId]:
    """Active members that have not contributed anything yet: those in ``known``, and those that become active now."""
    follow = {w for w, standing in zip(before.roster, before.standings, strict=True) if standing is Standing.FOLLOWING}
    active = {w for w, standing in zip(after.roster, after.standings, strict=True) if standing is Standing.ACTIVE}
    added = {w for w, ticket in zip(before.roster, tickets, strict=True) if ticket.micro_batches}
    return frozenset((known | follow) & active - added)


def somebody_came_along(group: GroupState, tickets: Sequence[Ticket]) -> bool:
    """Whether a member may have reached the end of a phase without having computed since it joined."""
    return any(
        standing is not Standing.LEAVING and not ticket.micro_batches
        for standing, ticket in zip(group.standings, tickets, strict=True)
    )
