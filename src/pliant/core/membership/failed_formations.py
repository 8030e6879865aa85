"""What follows when a process group cannot be formed.

Question  The group of a planned or new era cannot be formed: what happens to the era, and to the unreachable workers?
Holds     A plan whose group cannot be formed is dropped, and the era in force goes on. A plan is dropped only when it
          can no longer begin: a member that has abandoned it never puts its number into a ticket. A worker that is left
          out is not lost: a newcomer waits under its name, a member comes back as a newcomer in the same process.
Source    ours; docs/design/0021-formation.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pliant.core.membership import reachability, shutdown
from pliant.core.membership.events import Effect, Note, Refuse, Unformed, VoidPlan
from pliant.core.membership.reachability import Candidate, FormationFailure
from pliant.core.membership.roster import (
    Connected,
    EraForming,
    EraMember,
    Halting,
    Planned,
    Roster,
    Running,
    SlotOutcome,
    SlotWorker,
    Steady,
    Step,
    Waiting,
    members_of,
    slot_of,
    with_standing,
    without_worker,
    worker_of,
)
from pliant.types import WorkerId


def unformed(state: Roster, worker: SlotWorker, event: Unformed, now_s: float) -> Step:
    """A worker could not form the group of the last era that was announced."""
    match state.course:
        case Planned(plan=plan):
            era, roster = plan.era, plan.roster
        case EraForming(start=start):
            era, roster = start.era, start.roster
        case Halting(era=era) if era == state.reach.era:
            roster = state.reach.roster
        case _:
            return state, ()
    if event.era != era or worker.name not in roster:
        return state, ()
    report = FormationFailure(worker.name, event.unreached, event.connecting)
    return replace(state, reach=reachability.reported(state.reach, era, roster, report, now_s)), ()


def voided(state: Roster, now_s: float) -> Step:
    """Drop a plan that can no longer begin, and go on in the era in force."""
    course, known = state.course, state.reach
    if not isinstance(course, Planned) or known.era != course.plan.era or not known.reports or state.broken:
        return state, ()
    present = list(members_of(state))
    if any(member.era >= course.plan.era or member.stopped_s is not None for _, member in present):
        # The planned era has begun, or the era in force is over: there is no plan to drop.
        return state, ()
    members = {worker.name for worker, member in present if member.era > 0}
    if not reachability.is_gathered(known, members, course.plan.roster, now_s):
        return state, ()
    candidates = [
        Candidate(worker.name, newcomer=member.era == 0)
        for worker, member in present
        if worker.name in course.plan.roster
    ]
    out = reachability.outsiders(known, candidates, members_too=False)
    state = replace(state, course=Steady(course.era, course.floor))
    effects: tuple[Effect, ...] = (VoidPlan(course.plan.era, course.plan.to),)
    for worker, member in present:
        if member.era == 0:
            state, more = _waiting_again(state, worker, member, now_s, blamed=worker.name in out)
            effects += more
    if not out:
        effects += (Note("unformed", _text(state, course.plan.era), quiet=known.plans > 0),)
    after = reachability.dropped(
        state.reach, course.plan.era, blamed=bool(out), dead_after_s=state.dead_after_s, now_s=now_s
    )
    return replace(state, reach=after), effects


def sifted(state: Roster, now_s: float) -> Step:
    """All have stopped after an era whose group could not be formed: leave out the workers that prevent one."""
    course, known = state.course, state.reach
    present = list(members_of(state))
    names = {worker.name for worker, _ in present}
    if not isinstance(course, Halting) or known.era != course.era or not names.issuperset(known.roster):
        # If a member was lost, that may have been the reason.
        return state, ()
    candidates = [
        Candidate(worker.name, newcomer=member.era == 0 and state.settled > 0, holds=bool(member.active))
        for worker, member in present
    ]
    members_too = known.failures >= reachability.MEMBERS_AFTER
    effects: tuple[Effect, ...] = ()
    for name in reachability.outsiders(known, candidates, members_too=members_too):
        worker = worker_of(state, name)
        assert worker is not None
        member = worker.standing
        assert isinstance(member, EraMember)
        if member.era == 0:
            state, more = _waiting_again(state, worker, member, now_s, blamed=True)
        else:
            state, more = _sent_back(state, worker, member, now_s)
        effects += more
    return state, effects


def _waiting_again(state: Roster, worker: SlotWorker, member: EraMember, now_s: float, *, blamed: bool) -> Step:
    """A newcomer's planned era was dropped: it waits for another one."""
    slot = slot_of(state, worker.slot)
    terms = member.terms or state.terms
    if slot is None or slot.fate is not SlotOutcome.KEPT or member.leaving is not None:
        return shutdown.dismissed(state, worker, "it was asked to go")
    if terms is None:
        return _sent_back(state, worker, member, now_s) if blamed else (state, ())
    state = with_standing(state, worker, Waiting(terms, member.address))
    return _left_out(state, worker, member, now_s) if blamed else (state, ())


def _sent_back(state: Roster, worker: SlotWorker, member: EraMember, now_s: float) -> Step:
    """A member is left out. It must come back as a newcomer, because it misses the rounds in between."""
    state, effects = _left_out(state, worker, member, now_s)
    if isinstance(worker.line, Connected):
        reason = f"{worker.name} cannot be reached by the others; it may come back under a new name"
        effects += (Refuse(worker.line.peer, reason, again=True),)
    return without_worker(state, worker.name), effects


def _left_out(state: Roster, worker: SlotWorker, member: EraMember, now_s: float) -> Step:
    first = not reachability.is_suspect(state.reach, worker.slot)
    known, again_s = reachability.left_out(state.reach, worker.slot, state.dead_after_s, now_s)
    host = member.address.rpartition(":")[0] or "its host"
    text = (
        f"{_trouble(state, worker.name, host)}: it is left out and tried again in {again_s:.3g} s; "
        f"open all TCP ports between the hosts, or let it go with `pliant drain {worker.slot}`"
    )
    return replace(state, reach=known), (Note("unreachable", text, worker.name, quiet=not first),)


def _trouble(state: Roster, name: WorkerId, host: str) -> str:
    by, whom = reachability.partners(state.reach, name)
    if by:
        return f"{name} on {host} cannot be reached on its data port by {', '.join(by)}"
    if whom:
        return f"{name} on {host} cannot reach the data port of {', '.join(whom)}"
    return f"no group can be formed with {name} on {host}"


def _text(state: Roster, era: int) -> str:
    pairs = sorted(state.reach.pairs)
    why = "; ".join(f"{who} cannot reach the data port of {whom}" for who, whom in pairs[:3])
    again_s = reachability.interval_s(state.reach.plans + 1, state.dead_after_s)
    return (
        f"the group of era {era} could not be formed{f' ({why})' if why else ''}: it is tried again in {again_s:.3g} s"
    )


def joinable(state: Roster, ready: Sequence[SlotWorker], now_s: float, *, suspects: bool) -> list[SlotWorker]:
    """Which of the waiting workers may be in the next era."""
    slots = reachability.taken(state.reach, [worker.slot for worker in ready], now_s, suspects=suspects)
    return [worker for worker in ready if worker.slot in slots]


def is_unreachable(state: Roster, worker: SlotWorker) -> bool:
    """Whether no group could be formed with this worker so far, even if another attempt is running."""
    is_in = isinstance(worker.standing, EraMember) and worker.standing.era > 0
    return not is_in and isinstance(state.stage, Running) and reachability.is_suspect(state.reach, worker.slot)


def in_force(state: Roster) -> Roster:
    """The state after an era has come into force."""
    return replace(state, reach=reachability.settled(state.reach, {worker.slot for worker, _ in members_of(state)}))
