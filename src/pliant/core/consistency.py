"""Whether all workers are at the same point of the same script.

Question  Do the tickets of an exchange say the same, and what have they agreed on?
Holds     Only those have a say who do not merely go along. A difference is named with both workers and a remedy,
          before anything is decided. A planned era begins only where all tickets carry its number.
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
be under way already when a script sets another one."""

_NAMES = {Kind.TRAIN: "batches", Kind.EVALUATE: "evaluate", Kind.END: "the end of the script"}


class Mismatch(msgspec.Struct, frozen=True):
    """The workers are not doing the same thing; the run cannot go on."""

    reason: str
    """may have a place for the names of parameters: ``{parameters}``"""
    parameters: tuple[int, ...] = ()
    """by their numbers"""


def digest(group: GroupState) -> int:
    """A fingerprint of the state's counters; tickets carry it so that a divergence is seen in the next round."""
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


def compared_openings(group: GroupState, tickets: Sequence[Ticket]) -> Mismatch | None:
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
    """The bounds on the gradient's norm that scripts ask for; who takes the state over has no say."""
    said = {t.clip_norm for t in tickets if t.flags is QUIET or not t.flags & Flag.FOLLOWING}
    return {bound for bound in said if bound >= 0.0}


def compared_clip_norms(group: GroupState, tickets: Sequence[Ticket]) -> Mismatch | None:
    """Whether scripts have asked for different bounds for so long that one of them will not follow."""
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
    """Who makes the call that these tickets open; the others go along.

    In the body of a loop whose phase has ended only those make one who are in the body. The others have left the loop:
    what they open or end comes after it.
    """
    within = Flag.INNER if any(ticket.flags & Flag.INNER for ticket in tickets) else Flag.OPENING
    return tuple(bool(ticket.flags & within) for ticket in tickets)


def _speaking(group: GroupState, tickets: Sequence[Ticket]) -> list[tuple[WorkerId, Ticket]]:
    """The tickets of those who do not merely go along."""
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
    """The planned era all members are prepared for; never inside a nested phase: a round is in flight there."""
    plans = {(ticket.plan_term, ticket.plan_era) for ticket in tickets}
    if len(plans) > 1 or len(group.open) > 1:
        return None
    (plan,) = plans
    return plan if plan[1] > group.era and not _must_wait(group, tickets) else None


def _must_wait(group: GroupState, tickets: Sequence[Ticket]) -> bool:
    """Whether the state would leave with those who hold it.

    Who plans an era may not know yet of a member that takes the state over again, or believe that one has it.
    """
    waiting, held = False, False
    for standing, ticket in zip(group.standings, tickets, strict=True):
        if standing is Standing.LEAVING or ticket.flags & (Flag.LEAVING | Flag.GOING):
            continue
        # Who goes along does not have all of it yet, though it may have said that it can compute.
        follows = standing is Standing.FOLLOWING or bool(ticket.flags & Flag.FOLLOWING)
        waiting, held = waiting or follows, held or not follows
    return waiting and not held
