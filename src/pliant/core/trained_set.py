"""Which parameters are trained, as a decision of the group.

Question  When a script freezes or unfreezes a layer, from which round on does that count, and for which gradients?
Holds     A set is a bitmap over all parameters that exist at ``join``, equal bit for bit on all workers. A round is
          summed in a layout that all workers know before they add anything to it: with an overlap the set agreed on
          before it; without one the set that all scripts train by now, if that is the same. An update touches only what
          every contribution was computed for. Workers that disagree for longer than scripts can be apart are refused,
          by name.
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
"""Rounds after the first one that differs in which the others may still follow."""


class Decision(msgspec.Struct, frozen=True):
    """What a round is summed in, and what its update touches."""

    layout: bytes
    touched: bytes


def layout(group: GroupState, tickets: Sequence[Ticket]) -> bytes:
    """What the gradients of this round are laid out for; ``group`` is the state before it.

    Who trains what was agreed on hands in at once, without knowing the others' tickets: one such is enough.
    """
    if group.overlap:
        return group.trained
    said = {ticket.wanted for ticket in tickets if _speaks(ticket)}
    return said.pop() if len(said) == 1 else group.trained


def decide(group: GroupState, tickets: Sequence[Ticket]) -> tuple[GroupState, Decision] | Mismatch:
    """The sets after a round of training, and which parameters its update touches."""
    laid_out = layout(group, tickets)
    touched = laid_out
    for ticket in tickets:
        if ticket.micro_batches:
            touched = common(touched, ticket.trained)
    after = _following(group, tickets, voters(group, tickets))
    return after if isinstance(after, Mismatch) else (after, Decision(laid_out, touched))


def opened(group: GroupState, tickets: Sequence[Ticket]) -> GroupState | Mismatch:
    """The same where a loop over batches begins: nothing is in flight, so what all carry counts at once."""
    speaking = [member for member, ticket in enumerate(tickets) if _speaks(ticket)]
    if not group.trained and len({tickets[member].wanted for member in speaking}) > 1:
        return _refusal(group, tickets, speaking)
    return _following(group, tickets, speaking)


def voters(group: GroupState, tickets: Sequence[Ticket]) -> list[int]:
    """Members whose scripts have run all code of this loop so far: who begins to compute follows what they train."""
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
    """Who trains what others do not, with the parameters by their numbers."""
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
