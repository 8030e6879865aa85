"""Who is left out for being slow, and who counts as hung.

Question  A process is alive, but its main loop does not get on and others wait for it: when do they go on without it,
          and when is it killed?
Holds     A worker is left out only while another one that holds the state really waits for it, and only where the
          others would lose more by waiting than it loses by taking the state over again. Nobody is left out before its
          first contribution of a phase, unless its script has said that it is busy; nor while somebody who waits is
          behind it, for then the update it has made would be made a second time. A worker is killed only after
          ``hung_after``, never while its script says that it is busy, and never as the last one that holds the state.
Source    ours; docs/design/0022-slow-is-not-hung.md. Waiting as long again as one has waited already is at most twice
          as bad as knowing the future (ski rental; Karlin et al. 1988).
"""

from __future__ import annotations

import enum
import math

from pliant.core.members import Connected, Member, Roster, Worker, members_of

SLOW_STEPS = 10
"""A main loop that takes so many times its usual step while others wait is slow."""

BUSY_S = 0.25
"""For a worker that is busy others have waited so long before they go on without it: a new era takes about as long."""

REGROUP_S = 0.15
"""What a new era costs the others: forming a group, and computing once more what was in flight."""

HANDOFF_S = 1.0
"""How long a worker takes to take the state over, until it has been measured."""


class Verdict(enum.Enum):
    """What is to be done about a member."""

    GOES_ON = "goes on"
    LEFT_OUT = "left out"
    HUNG = "hung"


def judged(state: Roster, worker: Worker, member: Member, now_s: float) -> Verdict:
    """What is to be done about this member now."""
    if member.waiting or member.stopped_s is not None:
        return Verdict.GOES_ON
    waiting = _waiting_for(state, worker, member, now_s)
    if not waiting:
        return Verdict.GOES_ON
    lasts_s, waited_s = now_s - member.progress_s, max(waited_s for _, waited_s in waiting)
    if not member.busy and min(lasts_s, waited_s) > state.hung_after_s:
        return Verdict.HUNG
    computing = [(other, other_s) for other, other_s in waiting if not other.ending]
    if not computing or max(other_s for _, other_s in computing) <= _patience_s(state, member):
        return Verdict.GOES_ON
    if len(list(members_of(state))) <= state.rules.min_workers:
        # The others could not go on without it.
        return Verdict.GOES_ON
    return Verdict.LEFT_OUT if _pays(state, member, [other for other, _ in computing], lasts_s) else Verdict.GOES_ON


def kill_s(state: Roster, member: Member, now_s: float) -> float:
    """When the process of a member that is left out now is killed, if it has not come back by then."""
    if member.busy:
        return math.inf
    return max(now_s, member.progress_s + state.hung_after_s)


def _waiting_for(state: Roster, worker: Worker, member: Member, now_s: float) -> list[tuple[Member, float]]:
    """Who holds the state and waits while this member is at something else, and for how long; none if one is behind."""
    found: list[tuple[Member, float]] = []
    for other, its in members_of(state):
        if other.name == worker.name or not its.is_active or not isinstance(other.line, Connected):
            continue
        since_s = its.stopped_s if its.stopped_s is not None else its.progress_s if its.waiting else None
        if since_s is None:
            continue
        if its.exchange < member.exchange:
            return []
        found.append((its, now_s - since_s))
    return found


def _patience_s(state: Roster, member: Member) -> float:
    if member.busy:
        return BUSY_S
    if member.usual_s <= 0:
        return math.inf
    return max(state.dead_after_s, SLOW_STEPS * member.usual_s)


def _pays(state: Roster, member: Member, waiting: list[Member], lasts_s: float) -> bool:
    """Whether those who wait would lose more than a new era and the state's way back to the slow one cost."""
    others = [its for _, its in members_of(state) if its is not member]
    known = [its.pace for its in (member, *others) if its.pace > 0]
    usual = math.fsum(known) / len(known) if known else 1.0

    def pace(*whose: Member) -> float:
        return math.fsum(its.pace or usual for its in whose)

    # Nothing is known of what is to come but this: it has lasted so long, or it takes so long as a rule.
    wait_s = max(lasts_s, member.expected_s - lasts_s)
    handoff_s = member.handoff_s or max((its.handoff_s for its in others), default=0.0) or HANDOFF_S
    return pace(*waiting) * wait_s > pace(member) * handoff_s + pace(*others) * REGROUP_S
