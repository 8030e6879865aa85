"""Which era comes next.

Question  When does an era start, which workers are in it, which one is the donor of the state, and what ends it?
Holds     Era and attempt numbers are given only here, only grow, and are never used twice. There is at most one planned
          era. An unplanned era starts only when every member of the last one has stopped or is lost. Its donor is a
          member that is furthest ahead, or one exchange behind if only such a member has the user's own state. The last
          worker that holds the state may not leave while another one still fetches it.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from pliant.core.membership import failed_formations, liveness, reachability, shutdown
from pliant.core.membership.compatibility import difference
from pliant.core.membership.events import BreakEra, Effect, Note, PlanEra, SlotId, StartEra
from pliant.core.membership.processes import kept
from pliant.core.membership.roster import (
    ATTEMPTS_PER_TERM,
    COOLDOWN_S,
    Alive,
    Connected,
    Departing,
    EndedProcess,
    EraForming,
    EraMember,
    Finishing,
    Gathering,
    Halting,
    Idle,
    Planned,
    Roster,
    Running,
    Slot,
    SlotOutcome,
    SlotWorker,
    Steady,
    Step,
    Waiting,
    members_of,
    name_order,
    owner_of,
    slot_of,
    with_standing,
    worker_in,
)
from pliant.types import WorkerId

SUSPICION_S = 0.15
"""If a death caused a failed collective, it is confirmed within this time."""

RELAPSES = 2
"""A script that has failed again this often since the last checkpoint, losing everything, will fail once more."""

FRUITLESS_ERAS = 5
"""This many eras in a row without an exchange may be a series of deaths; after them comes a pause between eras."""

PAUSE_S = 0.1
PAUSE_AT_MOST_S = 5.0
"""Pause between fruitless eras, doubled every time."""

ERAS_UNKNOWN = 100
"""How many era numbers a new coordinator skips: its predecessor may have started eras that no worker entered."""

LEAVE_WAIT_S = 30.0
"""How long the last workers wait for one that is about to join before they leave and the run ends."""


def moved(state: Roster, now_s: float) -> Step:
    """Everything about eras that follows from the present state."""
    effects: tuple[Effect, ...] = ()
    for step in (failed_formations.voided, _halted, _formed, _founded, _renewed, _planned):
        if not isinstance(state.stage, Gathering | Running | Finishing):
            break
        state, more = step(state, now_s)
        effects += more
    return state, effects


def _halted(state: Roster, now_s: float) -> Step:
    """End the era if a member of it is lost, or if its members cannot reach each other."""
    course, reason = state.course, state.broken or _failure(state, now_s) or _uncertainty(state, now_s)
    state = replace(state, broken="")
    if not reason or isinstance(course, Idle | Halting):
        return state, ()
    to = tuple(worker.name for worker, _ in members_of(state))
    if isinstance(course, Planned):
        # Newcomers that have not entered an era have nothing to stop and hold no state.
        for worker, member in members_of(state):
            if member.era == 0 and member.stopped_s is None:
                outside = replace(member, stopped_s=now_s, exchange=0, active=False)
                state = with_standing(state, worker, outside)
    # The remaining members form their group while they finish their present step. Before its first era a new
    # coordinator does not know which attempt numbers were used.
    attempt = state.last_attempt + 1 if state.last_attempt and len(to) > 1 else 0
    course = Halting(state.last_era, course.floor, reason, now_s, attempt, to if attempt else ())
    state = replace(state, course=course, hearsay=False, last_attempt=max(state.last_attempt, attempt))
    return state, (BreakEra(course.era, reason, to, attempt, course.roster),) if to else ()


def _failure(state: Roster, now_s: float) -> str:
    """Why a member has stopped by itself, if no loss has explained it within ``SUSPICION_S``; empty if none has."""
    for worker, member in members_of(state):
        if member.stopped_s is not None and now_s - member.stopped_s >= SUSPICION_S:
            return f"{worker.name} could not go on with the others ({member.failed or 'it lost its coordinator'})"
    return ""


def _uncertainty(state: Roster, now_s: float) -> str:
    """Reason to break an era that began right before its coordinator died: its full roster is unknown. This waits until
    all living members have had time to reconnect."""
    if not state.hearsay or now_s < state.trusting_until_s or not isinstance(state.course, Steady):
        return ""
    return f"nobody knows who else was in era {state.last_era}"


def _formed(state: Roster, now_s: float) -> Step:
    """An era is in force when all its members are in it."""
    match state.course:
        case EraForming(start=start):
            if all(member.era >= start.era for _, member in members_of(state)):
                state = failed_formations.in_force(replace(state, course=Steady(start.era, start.era)))
        case Planned(plan=plan):
            there = {worker.name: member.era >= plan.era for worker, member in members_of(state)}
            # A member that is gone has finished in it: a lost member would have ended the era before this point.
            if all(there.get(name, True) for name in plan.roster):
                state = replace(state, course=Steady(plan.era, plan.era))
                for worker, _ in members_of(state):
                    if worker.name not in plan.roster:
                        state = with_standing(state, worker, Departing(now_s))
                state = failed_formations.in_force(state)
        case _:
            pass
    return state, ()


def _founded(state: Roster, now_s: float) -> Step:
    """Start the first era once all expected workers are ready and their terms agree."""
    owner = owner_of(state)
    if not isinstance(state.stage, Gathering) or not isinstance(state.course, Idle) or owner is None:
        return state, ()
    out = {slot.name for slot in state.slots if not reachability.eligible(state.reach, slot.name, now_s)}
    ready = [(w, w.standing) for w in state.workers if isinstance(w.standing, Waiting) and w.slot not in out]
    ready.sort(key=lambda entry: name_order(entry[0].slot))
    differs = difference([(worker.name, waiting.terms) for worker, waiting in ready])
    if differs is not None:
        return shutdown.stop(state, differs, now_s, status=1)
    expected = [
        slot
        for slot in kept(state)
        if slot.agent == owner.name
        and isinstance(slot.process, Alive)
        and slot.name not in out
        and not slot.is_left_out
    ]
    there = {worker.slot for worker, _ in ready if isinstance(worker.line, Connected)}
    if now_s < state.trusting_until_s or any(slot.name not in there for slot in expected):
        return state, ()
    chosen = [worker for worker, _ in ready if worker.slot in there][: state.rules.max_workers]
    if not chosen or len(chosen) < state.rules.min_workers:
        return state, ()
    resuming = state.rewinds > 0
    # A checkpoint contains settled exchanges: at first only the worker that reads it holds the state.
    state = replace(state, terms=ready[0][1].terms, stage=Running(), settled=1 if resuming else 0)
    return _started(state, chosen, chosen[0].name, 1 if resuming else 0, now_s, resuming=resuming)


def _renewed(state: Roster, now_s: float) -> Step:
    """Start the next era once every member has stopped."""
    course = state.course
    if not isinstance(course, Halting) or any(member.stopped_s is None for _, member in members_of(state)):
        return state, ()
    state, unreachable = failed_formations.sifted(state, now_s)
    state, effects = _renewed_with(state, course, now_s)
    return state, (*unreachable, *effects)


def _renewed_with(state: Roster, course: Halting, now_s: float) -> Step:
    """The same, with the members that can be reached."""
    present = list(members_of(state))
    active = [(worker, member) for worker, member in present if member.active]
    if not active and (state.settled > 0 or isinstance(state.stage, Finishing)):
        return _lost_all(state, now_s)
    if not present:
        # No exchange was settled yet: the next workers begin from the start.
        return replace(state, stage=Gathering(), course=Idle()), ()
    donor, exchange = _furthest(active) or (present[0][0], 0)
    if exchange <= state.started_at and now_s - course.since_s < _pause_s(state.fruitless):
        return state, ()
    few = len(present) < state.rules.min_workers
    joining, notes, state = _joiners(state, len(present), now_s, suspects=few)
    if len(present) + len(joining) < state.rules.min_workers and isinstance(state.stage, Running):
        return _too_few(state, course, len(present), notes)
    state, effects = _started(state, [*(w for w, _ in present), *joining], donor.name, exchange, now_s)
    return state, (*notes, *effects)


def _furthest(active: list[tuple[SlotWorker, EraMember]]) -> tuple[SlotWorker, int] | None:
    """The donor, whose state all go on with, and the exchanges it has settled.

    Members are at most one exchange apart. A member that lacks the user's own state has not run the user's code since
    it joined, so a member that has that state is preferred: at worst one exchange is computed again.
    """
    most = max((member.exchange for _, member in active), default=0)
    near = [(worker, member) for worker, member in active if member.exchange >= most - 1]
    if not near:
        return None
    worker, member = max(near, key=lambda each: (each[1].whole, each[1].exchange))
    return worker, member.exchange


def _pause_s(fruitless: int) -> float:
    if fruitless < FRUITLESS_ERAS:
        return 0.0
    return min(PAUSE_AT_MOST_S, PAUSE_S * 2.0 ** min(fruitless - FRUITLESS_ERAS, 10))


def _lost_all(state: Roster, now_s: float) -> Step:
    """No remaining worker holds the model's state."""
    if isinstance(state.stage, Finishing):
        effects: tuple[Effect, ...] = ()
        for worker, _ in members_of(state):
            state, more = shutdown.dismissed(state, worker, shutdown.FINISHED)
            effects += more
        return replace(state, course=Idle()), effects
    what, culprit = state.last_loss or ("all workers were lost", None)
    if state.checkpoints:
        return _rewound(state, what, culprit, now_s)
    reason = f"{what}: nobody is left who holds the model's state, so the run ends"
    return shutdown.stop(state, reason, now_s, culprit=culprit)


def _rewound(state: Roster, what: str, culprit: SlotId | None, now_s: float) -> Step:
    """Go back to the last checkpoint: the next workers begin with it. The remaining processes start again."""
    slot = next((slot for slot in state.slots if slot.name == culprit), None)
    failed = slot is not None and bool(slot.failure or "".join(slot.errors[-1:]))
    relapses = state.relapses + 1 if failed and state.checkpoints[0] == state.rewound_to else 0
    if relapses >= RELAPSES:
        reason = (
            f"{what}, again and again since the last checkpoint: mend the script, and go on with pliant run --resume"
        )
        return shutdown.stop(state, reason, now_s, culprit=culprit)
    effects: tuple[Effect, ...] = ()
    for worker in state.workers:
        state, more = liveness.lose(state, worker, "has to start again, from a checkpoint", now_s, kind="rewound")
        effects += more
    text = f"{what}: nobody is left who holds the model's state; the run goes on from its last checkpoint"
    if state.checkpoints[0] != state.rewound_to:
        # There is a newer checkpoint, so the run had made progress: this was like a power cut, and no slot is to blame.
        state = replace(state, slots=tuple(_rested(slot, now_s) for slot in state.slots))
    state = replace(state, stage=Gathering(), course=Idle(), broken="", started_at=-1)
    state = replace(state, rewinds=state.rewinds + 1, rewound_to=state.checkpoints[0], relapses=relapses)
    return state, (*effects, Note("rewound", text))


def _rested(slot: Slot, now_s: float) -> Slot:
    """The slot with its cooldown reset, so that it is started again soon."""
    process = slot.process
    if isinstance(process, EndedProcess) and process.restart_s is not None:
        process = replace(process, restart_s=min(process.restart_s, now_s + COOLDOWN_S))
    return replace(slot, process=process, cooldown_s=COOLDOWN_S)


def _too_few(state: Roster, course: Halting, present: int, notes: tuple[Effect, ...]) -> Step:
    if course.noted:
        return state, notes
    wanted = state.rules.min_workers
    text = f"{present} of at least {wanted} workers (--min-workers) are there: the run waits for more"
    return replace(state, course=replace(course, noted=True)), (*notes, Note("waiting", text))


def _started(
    state: Roster,
    chosen: list[SlotWorker],
    donor: WorkerId,
    exchange: int,
    now_s: float,
    *,
    resuming: bool = False,
) -> Step:
    """Tell all ``chosen`` workers to enter the next era; ``resuming``: the donor reads the state from a checkpoint."""
    names = tuple(worker.name for worker in chosen)
    founding = state.settled == 0
    for worker in chosen:
        member = worker.standing
        if isinstance(member, EraMember):
            level = founding or (
                member.active and member.exchange == exchange and (member.whole or worker.name == donor)
            )
            # A member that has to fetch the state counts as active only when it reports that it holds it.
            member = replace(member, stopped_s=None, failed="", whole=True, active=bool(level), progress_s=now_s)
        elif isinstance(member, Waiting):
            # In the first era all members receive the leader's state before they begin.
            active = founding or (resuming and worker.name == donor)
            member = EraMember(member.address, now_s, active=active, progress_s=now_s, terms=member.terms)
        state = with_standing(state, replace(worker, heard_s=now_s), member)
    state = _in_order(state, names)
    era, attempt = _numbers(state)
    if isinstance(state.course, Halting) and state.course.attempt and state.course.roster == names:
        attempt = state.course.attempt
    checkpoints = state.checkpoints if resuming else ()
    start = StartEra(era, attempt, names, donor, exchange, _addresses(state, names), names, checkpoints)
    state = replace(
        state,
        last_era=start.era,
        last_attempt=max(state.last_attempt, attempt),
        fruitless=0 if exchange > state.started_at else state.fruitless + 1,
        started_at=exchange,
        course=EraForming(start, getattr(state.course, "floor", 0)),
    )
    text = f"era {start.era}: {', '.join(names)}"
    return state, (start, Note("era", text, quiet=True))


def _numbers(state: Roster) -> tuple[int, int]:
    last = state.last_era
    if state.term > 1 and state.last_attempt == 0:
        # Its predecessors may have started eras that were never journaled.
        last = max(last + ERAS_UNKNOWN, ERAS_UNKNOWN * (state.term - 1))
    return last + 1, max(state.last_attempt, state.term * ATTEMPTS_PER_TERM) + 1


def _addresses(state: Roster, names: tuple[WorkerId, ...]) -> tuple[tuple[WorkerId, str], ...]:
    return tuple((worker.name, member.address) for worker, member in members_of(state) if worker.name in names)


def _in_order(state: Roster, names: tuple[WorkerId, ...]) -> Roster:
    """The state with members in the order of the roster, before all others."""
    by_name = {worker.name: worker for worker in state.workers}
    rest = tuple(worker for worker in state.workers if worker.name not in names)
    return replace(state, workers=(*(by_name[name] for name in names), *rest))


# plans


def _planned(state: Roster, now_s: float) -> Step:
    """Plan an era if members want to leave or newcomers want to join."""
    course, present = state.course, list(members_of(state))
    unsettled = any(not isinstance(w.line, Connected) or m.stopped_s is not None for w, m in present)
    if not isinstance(course, Steady) or not isinstance(state.stage, Running) or unsettled or not present:
        return state, ()
    if now_s < max(state.trusting_until_s, state.reach.plan_again_s):
        return state, ()
    leaving = [worker for worker, member in present if member.leaving is not None]
    staying = [worker for worker, member in present if member.leaving is None]
    joining, notes, state = _joiners(state, len(staying), now_s, suspects=True)
    if not leaving and not joining:
        return state, notes
    if not staying and not joining:
        return _all_leave(state, present, now_s)
    if not _may_go(state, staying, joining):
        # They stay until other workers can replace them.
        staying, leaving = [worker for worker, _ in present], []
    if not leaving and not joining:
        return state, notes
    for worker in joining:
        assert isinstance(worker.standing, Waiting)
        waiting = worker.standing
        member = EraMember(waiting.address, now_s, active=False, progress_s=now_s, terms=waiting.terms)
        state = with_standing(state, replace(worker, heard_s=now_s), member)
    roster = (*(worker.name for worker in staying), *(worker.name for worker in joining))
    to = (*(worker.name for worker, _ in present), *(worker.name for worker in joining))
    state = _in_order(state, to)
    donor = _donor(staying)
    plan = PlanEra(*_numbers(state), roster, donor, _addresses(state, to), to)
    state = replace(state, last_era=plan.era, last_attempt=plan.attempt, course=Planned(course.era, course.floor, plan))
    return state, (*notes, plan, Note("plan", f"era {plan.era} is planned: {', '.join(roster)}", quiet=True))


def _donor(staying: list[SlotWorker]) -> WorkerId:
    """The first staying member that is known, or else assumed, to hold the state."""
    standings = [(worker.name, worker.standing) for worker in staying if isinstance(worker.standing, EraMember)]
    known = [name for name, member in standings if member.active]
    believed = [name for name, member in standings if member.is_active]
    return next(iter((*known, *believed)), staying[0].name)


def _may_go(state: Roster, staying: list[SlotWorker], joining: list[SlotWorker]) -> bool:
    """Whether the leavers can be spared: a staying member holds the state, and enough workers remain."""
    held = any(isinstance(worker.standing, EraMember) and worker.standing.is_active for worker in staying)
    return held and len(staying) + len(joining) >= state.rules.min_workers


def _all_leave(state: Roster, present: list[tuple[SlotWorker, EraMember]], now_s: float) -> Step:
    """All members want to leave: the run ends, unless another worker is about to join."""
    waited = all(now_s - member.leaving_s >= LEAVE_WAIT_S for _, member in present)
    if not waited and any(_is_coming(state, slot, now_s) for slot in kept(state)):
        return state, ()
    here = {worker.slot for worker, _ in present}
    if any(slot.name not in here for slot in kept(state)):
        # Other slots were lost, and their workers do not come back.
        return shutdown.stop(state, "no worker is left", now_s, status=1)
    on_purpose = all(member.asked for _, member in present)
    return shutdown.stop(state, "all workers have left", now_s, status=0 if on_purpose else 1)


def _is_coming(state: Roster, slot: Slot, now_s: float) -> bool:
    worker = worker_in(state, slot.name)
    if worker is None:
        return shutdown.may_come(state, slot, now_s)
    return not isinstance(worker.standing, EraMember)


def _joiners(
    state: Roster, members: int, now_s: float, *, suspects: bool
) -> tuple[list[SlotWorker], tuple[Effect, ...], Roster]:
    """Which waiting workers can join ``members`` members. The user is told once about each one that has to wait."""
    if not isinstance(state.stage, Running):
        return [], (), state
    ready = [
        worker
        for worker in state.workers
        if isinstance(worker.standing, Waiting)
        and isinstance(worker.line, Connected)
        and now_s - worker.heard_s <= state.dead_after_s
        and _is_kept(state, worker)
    ]
    ready = failed_formations.joinable(state, ready, now_s, suspects=suspects)
    most = state.rules.max_workers
    room = len(ready) if most is None else max(0, most - members)
    notes: tuple[Effect, ...] = ()
    for worker in ready[room:]:
        waiting = worker.standing
        if isinstance(waiting, Waiting) and not waiting.noted:
            state = with_standing(state, worker, replace(waiting, noted=True))
            text = f"{worker.name} waits for a place: the run has --max-workers {most} workers"
            notes += (Note("waiting", text, worker.name),)
    return ready[:room], notes, state


def _is_kept(state: Roster, worker: SlotWorker) -> bool:
    slot = slot_of(state, worker.slot)
    return slot is not None and slot.fate is SlotOutcome.KEPT
