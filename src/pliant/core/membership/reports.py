"""What members report about themselves.

Question  What follows when a member reports that it is in an era, or has stopped? Which messages may it have missed?
Holds     A report about an era that no worker can be in is not believed. A report that was sent before the member heard
          of the present era does not count. Messages that a member may have missed are sent again.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from pliant.core.membership.eras import ERAS_UNKNOWN
from pliant.core.membership.events import AskToLeave, BreakEra, Effect, Entered, Note, Stopped, VoidPlan
from pliant.core.membership.roster import (
    EraForming,
    EraMember,
    Gathering,
    Halting,
    Idle,
    Planned,
    Roster,
    Running,
    SlotWorker,
    Steady,
    Step,
    Waiting,
    with_standing,
    worker_of,
)
from pliant.types import WorkerId

ERAS_AHEAD = 100 * ERAS_UNKNOWN
"""No worker can be this many eras ahead of what a new coordinator knows."""


def entered(state: Roster, worker: SlotWorker, event: Entered, now_s: float) -> Step:
    """A member is in an era."""
    member = worker.standing
    is_late = isinstance(member, Waiting) and isinstance(state.course, Halting)
    if isinstance(member, Waiting):
        # It entered an era that another coordinator had planned.
        member = EraMember(member.address, now_s, progress_s=now_s)
        state = with_standing(state, worker, member)
        worker = replace(worker, standing=member)
    if not isinstance(member, EraMember) or event.era <= member.era:
        return state, ()
    is_new = member.era == 0
    state = with_era_of(state, worker, event.era, event.exchange, None, now_s)
    first = state.last_era == 1
    note = Note("joined", f"{worker.name} joined", worker.name, quiet=first)
    missed = redelivered(state, worker.name) if is_late else ()
    return state, (note, *missed) if is_new else missed


def is_credible(state: Roster, era: int) -> bool:
    """Whether a worker can be in that era: a run's first coordinator has started all eras itself."""
    return era <= state.last_era or (state.term > 1 and era <= state.last_era + ERAS_AHEAD * state.term)


def with_era_of(
    state: Roster, worker: SlotWorker, era: int, exchange: int, active: bool | None, now_s: float
) -> Roster:
    """The state after a member has reported its era and exchange."""
    member = worker.standing
    if not isinstance(member, EraMember):
        return state
    member = replace(
        member,
        era=max(era, member.era),
        exchange=max(exchange, member.exchange),
        # After it has stopped, the report of stopping counts: it also covers the user's own state.
        active=member.active if active is None or member.stopped_s is not None else active,
        progress_s=now_s,
    )
    state = with_standing(state, worker, member)
    # A new coordinator may hear of eras that are not in the journal yet.
    if era > state.last_era:
        state = replace(state, last_era=era, hearsay=True)
        if isinstance(state.course, Steady):
            state = replace(state, course=replace(state.course, era=era))
        elif isinstance(state.course, Idle) and isinstance(state.stage, Gathering):
            # The lost coordinator had not written the first era to disk.
            state = replace(state, stage=Running(), course=Steady(era, 0))
    return replace(state, settled=max(state.settled, exchange))


def stopped(state: Roster, worker: SlotWorker, event: Stopped, now_s: float) -> Step:
    """A member has stopped, by itself or on request. A report from before the present era does not count."""
    member = worker.standing
    match state.course:
        case EraForming(start=start):
            lowest = start.era
        case Steady(floor=floor) | Planned(floor=floor) | Halting(floor=floor):
            lowest = floor
        case Idle():
            return state, ()
    if not isinstance(member, EraMember) or event.era < lowest or member.stopped_s is not None:
        return state, ()
    member = replace(
        member,
        stopped_s=now_s,
        exchange=event.exchange,
        active=event.active,
        whole=event.whole,
        failed=event.failed,
        progress_s=now_s,
    )
    state = replace(state, settled=max(state.settled, event.exchange), last_era=max(state.last_era, event.era))
    return with_standing(state, worker, member), ()


def redelivered(state: Roster, name: WorkerId) -> tuple[Effect, ...]:
    """Messages that the worker may have missed."""
    worker = worker_of(state, name)
    member = worker.standing if worker is not None else None
    voided = state.reach.voided
    if isinstance(member, Waiting) and voided > 0:
        return (VoidPlan(voided, (name,)),)
    if not isinstance(member, EraMember):
        return ()
    effects: tuple[Effect, ...] = ()
    match state.course:
        case Steady(era=era) if voided > era:
            effects = (VoidPlan(voided, (name,)),)
        case EraForming(start=start) if member.era < start.era:
            effects = (replace(start, to=(name,)),)
        case Planned(plan=plan) if member.era < plan.era and name in plan.to:
            effects = (replace(plan, to=(name,)),)
        case Halting(era=era, reason=reason, attempt=attempt, roster=roster) if member.stopped_s is None:
            effects = (BreakEra(era, reason, (name,), attempt, roster),)
        case _:
            pass
    return (*effects, AskToLeave(name, member.leaving or "")) if member.asked else effects
