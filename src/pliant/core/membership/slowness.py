"""Which workers are left out for being slow, and which count as hung.

Question  A process is alive, but its main loop makes no progress and others wait for it: when do they go on without it,
          and when is it killed?
Holds     A worker is left out only while another one that holds the state really waits for it, and only if the others
          would lose more by waiting than the worker loses by fetching the state again. It is not left out before its
          first contribution of a phase, unless its script has said that it is busy; nor while a waiting worker is
          behind it, because then its last update would be made a second time. A worker is killed only after
          ``hung_after``, never while its script says that it is busy, and never as the last one that holds the state.
Source    ours; docs/design/0022-slow-is-not-hung.md. Waiting as long again as one has waited already is at most twice
          as bad as knowing the future (ski rental; Karlin et al. 1988).
"""

from __future__ import annotations

import enum
import math

import msgspec

from pliant.core.membership.roster import Connected, EraMember, Roster, members_of

SLOW_STEPS = 10
"""A main loop that takes this many times its usual step while others wait is slow."""

REGROUP_S = 0.15
"""Cost of a new era for the others: forming a group, and computing again what was in flight."""

BUSY_S = REGROUP_S
"""The others wait this long for a busy worker before they go on without it: as long as the new era will cost them."""

HANDOFF_S = 1.0
"""How long a worker takes to fetch the state, until it has been measured."""


class SlownessVerdict(enum.Enum):
    """What happens to a member."""

    GOES_ON = "goes on"
    LEFT_OUT = "left out"
    HUNG = "hung"


class GroupProgress(msgspec.Struct, frozen=True):
    """Figures about all members together, computed once for all judgements."""

    members: int
    exchange: float
    """least number of exchanges settled by a waiting member; infinite: no member waits"""
    since_s: float
    """since when a member has been waiting"""
    computing_since_s: float
    """since when a member has been waiting that could compute meanwhile (one at the end of its script could not)"""
    waiting_pace: float
    """pace of all waiting members that could compute, together"""
    pace: float
    """pace of all members together"""
    usual_pace: float
    """pace assumed for a member that was not measured"""
    handoff_s: float
    """the longest handoff measured; 0: not measured yet"""


def others(state: Roster) -> GroupProgress:
    """The figures about the members. A member without the state does not count as waiting."""
    present = list(members_of(state))
    known = [member.pace for _, member in present if member.pace > 0]
    usual = math.fsum(known) / len(known) if known else 1.0
    waiting = [
        (member, _since_s(member))
        for worker, member in present
        if member.is_active and _is_idle(member) and isinstance(worker.line, Connected)
    ]
    computing = [(member, since_s) for member, since_s in waiting if not member.ending]
    return GroupProgress(
        members=len(present),
        exchange=min((member.exchange for member, _ in waiting), default=math.inf),
        since_s=min((since_s for _, since_s in waiting), default=math.inf),
        computing_since_s=min((since_s for _, since_s in computing), default=math.inf),
        waiting_pace=math.fsum(member.pace or usual for member, _ in computing),
        pace=math.fsum(member.pace or usual for _, member in present),
        usual_pace=usual,
        handoff_s=max((member.handoff_s for _, member in present), default=0.0),
    )


def _is_idle(member: EraMember) -> bool:
    return member.waiting or member.stopped_s is not None


def _since_s(member: EraMember) -> float:
    return member.progress_s if member.stopped_s is None else member.stopped_s


def judged(state: Roster, all_: GroupProgress, member: EraMember, now_s: float) -> SlownessVerdict:
    """What happens to this member now."""
    if _is_idle(member) or all_.exchange == math.inf or all_.exchange < member.exchange:
        return SlownessVerdict.GOES_ON
    lasts_s = now_s - member.progress_s
    if not member.busy and min(lasts_s, now_s - all_.since_s) > state.hung_after_s:
        return SlownessVerdict.HUNG
    waited_s = now_s - all_.computing_since_s
    if not member.busy:
        # A slow worker that gets on is waited for, however long its share takes it.
        waited_s = min(waited_s, lasts_s)
    if waited_s <= _patience_s(state, member) or all_.members <= state.rules.min_workers:
        # Second condition: without it there would be fewer workers than --min-workers.
        return SlownessVerdict.GOES_ON
    return SlownessVerdict.LEFT_OUT if _pays(all_, member, lasts_s) else SlownessVerdict.GOES_ON


def kill_s(state: Roster, member: EraMember, now_s: float) -> float:
    """When the process of a member that is left out now is killed if it has not come back."""
    if member.busy:
        return math.inf
    return max(now_s, member.progress_s + state.hung_after_s)


def _patience_s(state: Roster, member: EraMember) -> float:
    if member.busy:
        return BUSY_S
    if member.usual_s <= 0:
        return math.inf
    return max(state.dead_after_s, SLOW_STEPS * member.usual_s)


def _pays(all_: GroupProgress, member: EraMember, lasts_s: float) -> bool:
    """Whether waiting would cost the others more than a new era and the handoff back to the slow worker cost."""
    pace = member.pace or all_.usual_pace
    # Estimate of the remaining wait: as long again as it has lasted, or what is left of the expected time.
    wait_s = max(lasts_s, member.expected_s - lasts_s)
    handoff_s = member.handoff_s or all_.handoff_s or HANDOFF_S
    return all_.waiting_pace * wait_s > pace * handoff_s + (all_.pace - pace) * REGROUP_S
