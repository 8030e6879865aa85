"""Which parameters are trained, as a decision of the group.

Question  When a script freezes or unfreezes a layer, from which round on does that count, and for which gradients?
Holds     A set is a bitmap over all parameters that exist at ``join``, equal bit for bit on all workers. A round is
          summed in a layout that all workers know before they add anything to it: with an overlap the set agreed on
          before it; without one the set that all its tickets carry, if they carry the same. An update touches only what
          every contribution was computed for. Workers that disagree for longer than scripts can be apart are refused,
          by name.
Source    ours; docs/design/0018-trained-set.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.bitmaps import common, members
from pliant.core.agreement import Mismatch
from pliant.core.group import Group
from pliant.core.tickets import QUIET, Flag, Ticket
from pliant.types import WorkerId

PATIENCE = 2
"""Rounds after the first one that differs in which the others may still follow."""


class Decision(msgspec.Struct, frozen=True):
    """What a round is summed in, and what its update touches."""

    layout: bytes
    touched: bytes


def layout(group: Group, tickets: Sequence[Ticket]) -> bytes:
    """What the gradients of this round are laid out for; ``group`` is the state before it."""
    if group.overlap:
        return group.trained
    agreed = _agreed(tickets)
    return group.trained if agreed is None else agreed


def decide(group: Group, tickets: Sequence[Ticket]) -> tuple[Group, Decision] | Mismatch:
    """The sets after a round of training, and which parameters its update touches."""
    laid_out = layout(group, tickets)
    touched = laid_out
    for ticket in tickets:
        if ticket.micro_batches:
            touched = common(touched, ticket.trained)
    after = _following(group, tickets)
    return after if isinstance(after, Mismatch) else (after, Decision(laid_out, touched))


def opened(group: Group, tickets: Sequence[Ticket]) -> Group | Mismatch:
    """The same where a loop over batches begins: nothing is in flight, so what all carry counts at once."""
    if not group.trained:
        agreed = _agreed(tickets)
        if agreed is None:
            return _refusal(group, tickets)
        return replace(group, trained=agreed)
    return _following(group, tickets)


def _following(group: Group, tickets: Sequence[Ticket]) -> Group | Mismatch:
    agreed = _agreed(tickets)
    if agreed == group.trained and not group.unlike:
        return group
    if agreed is not None:
        return replace(group, trained=agreed, unlike=0)
    if not any(_speaks(ticket) for ticket in tickets):
        return group
    return _refusal(group, tickets) if group.unlike >= PATIENCE else replace(group, unlike=group.unlike + 1)


def _speaks(ticket: Ticket) -> bool:
    return ticket.flags is QUIET or not ticket.flags & Flag.FOLLOWING


def _agreed(tickets: Sequence[Ticket]) -> bytes | None:
    """The set that all carry who have a say; None: they differ, or nobody has one."""
    said = {ticket.trained for ticket in tickets if _speaks(ticket)}
    return said.pop() if len(said) == 1 else None


def _refusal(group: Group, tickets: Sequence[Ticket]) -> Mismatch:
    """Who trains what others do not, with the parameters by their numbers."""
    speaking = [(worker, t) for worker, t in zip(group.roster, tickets, strict=True) if _speaks(t)]
    first, theirs = speaking[0][0], speaking[0][1].trained
    other, others = next(((w, t.trained) for w, t in speaking if t.trained != theirs), (first, theirs))
    only = set(members(theirs)) ^ set(members(others))
    trains, freezes = (first, other) if only & set(members(theirs)) else (other, first)
    return Mismatch(_REASON.format(trains=WorkerId(trains), freezes=WorkerId(freezes)), tuple(sorted(only)))


_REASON = (
    "{trains} trains {{parameters}} and {freezes} does not: freeze, unfreeze and add_param_group must happen on every "
    "worker at the same update (not under is_leader)"
)
