"""Who can do what after an exchange.

Question  Who has become ready, who leaves, whose weights differ, and what becomes of their hands?
Holds     Who leaves or differs draws no more: its hand is in the pool again, and a fixed batch in progress is made up
          to its size. Who does not hold the state is never taken for one who leaves with it.
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
    """Take in who has become ready or entered the phase late, give back the hands of those who leave.

    Who ``differs`` is a newcomer again: what it has computed is of no use.
    """
    standings = group.standings
    if any(ticket.flags is not QUIET and ticket.flags & _MOVING for ticket in tickets):
        standings = tuple(
            # Who does not hold the state has nothing to leave behind, and must not be taken for one who does.
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
    return group, replace(phase, ledger=allowance.made_up(group, phase, spares=not group.overlap))


def heard_in_body(group: GroupState, tickets: Sequence[Ticket]) -> list[Ticket]:
    """The tickets of an opening: in the body of a loop nobody becomes ready who is not in that body.

    Those who are may open another ``evaluate`` there, one after the other, and nobody else knows of it. Whoever merely
    goes along says again that it is ready, and is heard in the next round of the loop.
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
    """The standings with those active who hold the whole state now."""
    return tuple(
        Standing.ACTIVE if ticket.flags & Flag.READY and standing is Standing.FOLLOWING else standing
        for standing, ticket in zip(group.standings, tickets, strict=True)
    )


def _with_offences(group: GroupState, differs: Drift) -> GroupState:
    """Whoever differs does not hold the state any more, and that is remembered."""
    offences = dict(group.offences)
    standings = list(group.standings)
    for member in differs.named:
        worker = group.roster[member]
        offences[worker] = offences.get(worker, 0) + 1
        standings[member] = Standing.FOLLOWING
    return replace(group, standings=tuple(standings), offences=tuple(offences.items()))


def drifted(group: GroupState, phase: OpenPhase, tickets: Sequence[Ticket]) -> Drift | None:
    """Whose weights differ. Who merely goes along may have said already that it is ready: it is not asked."""
    if len(tickets) < 2 or all(ticket.weights_round == 0 for ticket in tickets):
        return None
    return drift.judged(group.roster, allowance.at_work(group, phase), tickets, dict(group.offences))


def deserted(group: GroupState, phase: OpenPhase) -> bool:
    """Whether an ``evaluate`` in a loop body goes on without anyone to compute it: who comes now is elsewhere."""
    body = phase.inner or len(group.open) > 1
    return body and Standing.LEAVING in group.standings and not allowance.at_work(group, phase)


def fresh(
    known: frozenset[WorkerId], before: GroupState, after: GroupState, tickets: Sequence[Ticket]
) -> frozenset[WorkerId]:
    """Members that compute from now on, or since ``known`` was told, and have added nothing yet."""
    follow = {w for w, standing in zip(before.roster, before.standings, strict=True) if standing is Standing.FOLLOWING}
    active = {w for w, standing in zip(after.roster, after.standings, strict=True) if standing is Standing.ACTIVE}
    added = {w for w, ticket in zip(before.roster, tickets, strict=True) if ticket.micro_batches}
    return frozenset((known | follow) & active - added)


def somebody_came_along(group: GroupState, tickets: Sequence[Ticket]) -> bool:
    """Whether somebody may have come to the end of a phase without having computed since it joined."""
    return any(
        standing is not Standing.LEAVING and not ticket.micro_batches
        for standing, ticket in zip(group.standings, tickets, strict=True)
    )
