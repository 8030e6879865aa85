"""Which parameters are trained, as a decision of the group.

Question  When a script freezes or unfreezes a layer, from which round on does that count, and for which gradients?
Holds     A set is a bitmap over all parameters that exist at ``join``, equal bit for bit on all workers. All workers
          know the layout of a round before they add to its sum: with an overlap it is the set agreed on before; without
          one it is the set that all scripts train now, if they agree. An update changes only parameters that every
          contribution was computed for. Workers that disagree longer than scripts can be apart are reported by name.
Source    ours; docs/design/0018-trained-set.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.bitmaps import common, members
from pliant.core.consistency import Mismatch
from pliant.core.group_state import GroupState
from pliant.core.tickets import QUIET, Flag, Ticket

PATIENCE = 2
"""Rounds after the first disagreement in which the other workers may still make the same change."""


class Decision(msgspec.Struct, frozen=True):
    """The parameters in the layout of a round's sum, and those that its update changes."""

    layout: bytes
    touched: bytes


def layout(group: GroupState, tickets: Sequence[Ticket]) -> bytes:
    """The parameters in the layout of this round's gradients; ``group`` is the state before it.

    A worker that trains the agreed set hands in without waiting for the other tickets: if one does, that set is used.
    """
    if group.overlap:
        return group.trained
    said = {ticket.wanted for ticket in tickets if _speaks(ticket)}
    return said.pop() if len(said) == 1 else group.trained


def decide(group: GroupState, tickets: Sequence[Ticket]) -> tuple[GroupState, Decision] | Mismatch:
    """The state after a training round, with its layout and the parameters that its update changes."""
    laid_out = layout(group, tickets)
    touched = laid_out
    for ticket in tickets:
        if ticket.micro_batches:
            touched = common(touched, ticket.trained)
    after = _following(group, tickets, voters(group, tickets))
    return after if isinstance(after, Mismatch) else (after, Decision(laid_out, touched))


def opened(group: GroupState, tickets: Sequence[Ticket]) -> GroupState | Mismatch:
    """The same at the start of a loop over batches: no round is in flight, so a common set takes effect immediately."""
    speaking = [member for member, ticket in enumerate(tickets) if _speaks(ticket)]
    if not group.trained and len({tickets[member].wanted for member in speaking}) > 1:
        return _refusal(group, tickets, speaking)
    return _following(group, tickets, speaking)


def voters(group: GroupState, tickets: Sequence[Ticket]) -> list[int]:
    """Members whose scripts have run all code of this loop so far. Members that begin to compute adopt their set."""
    speaking = [member for member, ticket in enumerate(tickets) if _speaks(ticket)]
    settled = [member for member in speaking if group.phase.took_part[member]]
    return settled or speaking


def _following(group: GroupState, tickets: Sequence[Ticket], voters: Sequence[int]) -> GroupState | Mismatch:
    said = {tickets[member].wanted for member in voters}
    if not said:
        return group
    if len(said) == 1:
        (agreed,) = said
        return group if agreed == group.trained and not group.unlike else replace(group, trained=agreed, unlike=0)
    if group.unlike >= PATIENCE:
        return _refusal(group, tickets, voters)
    return replace(group, unlike=group.unlike + 1)


def _speaks(ticket: Ticket) -> bool:
    return ticket.flags is QUIET or not ticket.flags & Flag.FOLLOWING


def _refusal(group: GroupState, tickets: Sequence[Ticket], voters: Sequence[int]) -> Mismatch:
    """A mismatch that names two workers with different sets and the indices of the parameters."""
    first, theirs = voters[0], tickets[voters[0]].wanted
    other = next(member for member in voters if tickets[member].wanted != theirs)
    only = set(members(theirs)) ^ set(members(tickets[other].wanted))
    trains, freezes = (first, other) if only & set(members(theirs)) else (other, first)
    reason = _REASON.format(trains=group.roster[trains], freezes=group.roster[freezes])
    return Mismatch(reason, tuple(sorted(only)))


_REASON = (
    "{trains} trains {{parameters}} and {freezes} does not: freeze, unfreeze and add_param_group must happen on every "
    "worker at the same update (not under is_leader)"
)
