"""Whether all workers are at the same point of the same script.

Question  Do the tickets of an exchange agree, and which planned era have all workers agreed on?
Holds     Followers and spares have no vote. A difference is reported with both workers and a remedy, before anything
          is decided. A planned era begins only if all tickets carry its number.
Source    ours; docs/protocol.md ("Phases, break, refusals", "Planned change").
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

from pliant.core.group_state import GroupState, Standing
from pliant.core.tickets import QUIET, Flag, Kind, Ticket
from pliant.types import WorkerId

MAX_DISPUTED = 3
"""Rounds in a row for which scripts may ask for different bounds on the gradient's norm: with an overlap a ticket may
already be handed in when a script sets another bound."""

_NAMES = {Kind.TRAIN: "batches", Kind.EVALUATE: "evaluate", Kind.END: "the end of the script"}


class Mismatch(msgspec.Struct, frozen=True):
    """The workers are not doing the same thing; the run cannot go on."""

    reason: str
    """may contain ``{parameters}``, to be replaced by the names of ``parameters``"""
    parameters: tuple[int, ...] = ()
    """indices of parameters"""


def digest(group: GroupState) -> int:
    """A checksum of the state's counters; tickets carry it so that a divergence is seen in the next round."""
    cursor = group.phase.ledger.cursor if group.open else -1
    limit = -1 if group.samples_limit is None else group.samples_limit
    updates_limit = -1 if group.updates_limit is None else group.updates_limit
    clip_norm = -1.0 if group.clip_norm is None else group.clip_norm
    counters = (group.era, group.round, group.phases, group.samples, cursor, limit, group.delay)
    updates = (group.updates, updates_limit)
    measures = (group.rate.factor, group.scheduled, group.noise.variance, group.noise.signal, clip_norm)
    packed = struct.pack("<qqqqqqqqqddddd", *counters, *updates, *measures)
    return zlib.crc32(packed + bytes(group.standings) + group.trained)


def compared(group: GroupState, tickets: Sequence[Ticket]) -> Mismatch | None:
    """The first difference between workers that are not at the same point of the same script; None if all are."""
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


def compared_openings(group: GroupState, tickets: Sequence[Ticket]) -> Mismatch | None:
    """The first difference in length, order or epoch between the calls that workers open; None if there is none."""
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


def clip_norm_wanted(tickets: Sequence[Ticket]) -> set[float]:
    """The bounds on the gradient's norm that scripts ask for; followers have no vote."""
    said = {t.clip_norm for t in tickets if t.flags is QUIET or not t.flags & Flag.FOLLOWING}
    return {bound for bound in said if bound >= 0.0}


def compared_clip_norms(group: GroupState, tickets: Sequence[Ticket]) -> Mismatch | None:
    """A mismatch if scripts have asked for different bounds for more than ``MAX_DISPUTED`` rounds."""
    if group.clip_disputed < MAX_DISPUTED or len(clip_norm_wanted(tickets)) < 2:
        return None
    speaking = [(worker, t) for worker, t in _speaking(group, tickets) if t.clip_norm >= 0.0]
    leader, first = speaking[0]
    worker, other = next((w, t) for w, t in speaking if t.clip_norm != first.clip_norm)
    return Mismatch(
        f"{leader} has set run.clip_norm to {first.clip_norm or None} and {worker} to {other.clip_norm or None}: "
        "set it on every worker, to a value that is the same on all of them"
    )


def opening(tickets: Sequence[Ticket]) -> tuple[bool, ...]:
    """Which members make the call that these tickets open; the others take part without samples.

    After a phase has ended, its loop body may still open an ``evaluate``. Then only the members in that body make the
    call. The others have left the loop: the call they make comes after it.
    """
    within = Flag.INNER if any(ticket.flags & Flag.INNER for ticket in tickets) else Flag.OPENING
    return tuple(bool(ticket.flags & within) for ticket in tickets)


def _speaking(group: GroupState, tickets: Sequence[Ticket]) -> list[tuple[WorkerId, Ticket]]:
    """The members with a vote, and their tickets."""
    pairs = zip(group.roster, tickets, strict=True)
    speaking = [(worker, t) for worker, t in pairs if t.flags is QUIET or not t.flags & Flag.FOLLOWING]
    inner = [(worker, t) for worker, t in speaking if t.flags is not QUIET and t.flags & Flag.INNER]
    return inner or speaking


def _doing(ticket: Ticket) -> str:
    if ticket.kind is Kind.END:
        return "the end of the script"
    verb = "the start of " if ticket.flags & Flag.OPENING else "the middle of "
    return f"{verb}{_NAMES[ticket.kind]}"


def agreed_plan(group: GroupState, tickets: Sequence[Ticket]) -> tuple[int, int] | None:
    """(term, era) of the planned era that all members are prepared for. Never inside a nested phase: a round of the
    outer phase is in flight there."""
    plans = {(ticket.plan_term, ticket.plan_era) for ticket in tickets}
    if len(plans) > 1 or len(group.open) > 1:
        return None
    (plan,) = plans
    return plan if plan[1] > group.era and not _must_wait(group, tickets) else None


def _must_wait(group: GroupState, tickets: Sequence[Ticket]) -> bool:
    """Whether the planned era would lose the state, because only leaving members hold all of it.

    The coordinator that planned the era may not know yet that a member has to fetch the state again.
    """
    waiting, held = False, False
    for standing, ticket in zip(group.standings, tickets, strict=True):
        if standing is Standing.LEAVING or ticket.flags & (Flag.LEAVING | Flag.GOING):
            continue
        # A member without a vote does not have all of the state yet, even if it has said READY.
        follows = standing is Standing.FOLLOWING or bool(ticket.flags & Flag.FOLLOWING)
        waiting, held = waiting or follows, held or not follows
    return waiting and not held
