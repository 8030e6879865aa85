"""Which processes are started, restarted and asked to leave.

Question  What follows from the end of a process, and which workers leave when there shall be fewer?
Holds     A process that was not finished is started again after a cooldown; one that left on purpose is not. An error
          that a restart cannot fix ends the run if no era has begun, and otherwise only that slot. A script that fails
          on all workers before any of them has joined ends the run immediately.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from pliant.core.membership import liveness, shutdown
from pliant.core.membership.events import AgentId, AskToLeave, Effect, Note, ProcessExited, SlotId, Start, Terminate
from pliant.core.membership.roster import (
    COOLDOWN_S,
    MOST_SLOTS,
    MOST_SLOTS_EVER,
    Alive,
    Connected,
    EndedProcess,
    Ending,
    EraMember,
    Finishing,
    Gathering,
    Roster,
    Running,
    Slot,
    SlotOutcome,
    Step,
    Stopping,
    StopStage,
    is_reachable,
    owner_of,
    slot_of,
    with_slot,
    with_slots,
    with_standing,
    worker_in,
)
from pliant.core.membership.shutdown import QUIET_EXIT, ending

COOLDOWN_AT_MOST_S = 30.0

LAST_WORDS_S = 0.25
"""A process that ended with status 0 has said goodbye; its last messages may arrive up to this long after its exit."""

UNJOINED_TIMES = 2
"""A slot is given up after this many processes in a row that failed before ``join``: one may be an accident."""


def exited(state: Roster, event: ProcessExited, now_s: float) -> Step:
    """Note the end of a process."""
    slot = slot_of(state, event.slot)
    if slot is None and room(state) == 0:
        return state, ()
    if slot is None:
        # A new coordinator is told of a slot without a process, which never had a member.
        state = replace(state, last_slot=max(state.last_slot, number_of(event.slot)))
        slot = Slot(event.slot, event.agent, inherited=True)
    if not isinstance(slot.process, Alive) or slot.agent != event.agent:
        return state, ()
    if event.pid and event.pid == slot.pid:
        # The same exit, reported again after a reconnection: the order to start the slot again was lost.
        return with_slot(state, replace(slot, process=EndedProcess(event.status, now_s + slot.cooldown_s))), ()
    process = Ending(event.status, now_s, slot.process.greeted, event.error)
    return with_slot(state, replace(slot, process=process, pid=event.pid)), ()


def ended(state: Roster, now_s: float) -> Step:
    """Judge the processes that have just ended."""
    effects: tuple[Effect, ...] = ()
    for slot in state.slots:
        process = slot.process
        if not isinstance(process, Ending):
            continue
        worker = worker_in(state, slot.name)
        speaking = worker is not None and isinstance(worker.line, Connected)
        if speaking and process.status == 0 and now_s - process.since_s < LAST_WORDS_S and _is_open(state):
            continue
        if worker is not None and slot.inherited and process.status == 0 and isinstance(state.stage, Finishing):
            # The lost coordinator knew that the run was finishing, perhaps from this worker.
            state = shutdown.gone(state, worker, SlotOutcome.FINISHED)
        elif worker is not None:
            state, more = liveness.lose(state, worker, _gone(process), now_s, again=False)
            effects += more
        current = slot_of(state, slot.name)
        assert current is not None
        state, more = _judged(state, current, process, now_s)
        effects += more
    return state, effects


def _gone(process: Ending) -> str:
    if process.error:
        return f"failed ({process.error})"
    if process.status < 0 or process.status == QUIET_EXIT:
        return f"was lost ({ending(process.status) if process.status < 0 else 'its connection closed'})"
    return f"ended in the middle of the run ({ending(process.status)})"


def _judged(state: Roster, slot: Slot, process: Ending, now_s: float) -> Step:
    """Decide whether the slot is restarted, given up, or ends the run."""
    error = slot.failure or process.error
    slot = replace(slot, process=EndedProcess(process.status), failure="")
    if slot.fate is not SlotOutcome.KEPT or not isinstance(state.stage, Gathering | Running):
        return with_slot(state, slot), ()
    if slot.inherited and process.status == 0:
        # It left in an orderly way while there was no coordinator to tell.
        return with_slot(state, replace(slot, fate=SlotOutcome.LEFT)), ()
    if not process.greeted and not slot.inherited and process.status >= 0:
        return _unjoined(state, slot, process, now_s)
    if not error and process.status > 0 and process.status != QUIET_EXIT:
        error = ending(process.status)
    slot = replace(slot, errors=(*slot.errors, error)[-2:], unjoined=0)
    state = with_slot(state, slot)
    if _is_hopeless(state):
        reason = f"{slot.name} failed twice in a row, and so did all others: {error}"
        if len(state.slots) == 1:
            reason = f"{slot.name} failed twice in a row: {error}"
        return shutdown.stop(state, reason, now_s, culprit=slot.name)
    return with_slot(state, _cooling(slot, now_s)), ()


def _unjoined(state: Roster, slot: Slot, process: Ending, now_s: float) -> Step:
    status = process.status
    if status == 0:
        text = (
            f"{state.rules.script} never called pliant.join: {slot.name} ended without joining; "
            "wrap the training loop in `with pliant.join(model, optimizer, batch=…) as run:`"
        )
        return given_up(state, slot, text, now_s, status=1)
    text = f"{slot.name} ended before it called pliant.join ({ending(status)})"
    slot = replace(slot, unjoined=slot.unjoined + 1)
    state = with_slot(state, slot)
    if slot.unjoined >= UNJOINED_TIMES:
        return given_up(state, slot, text, now_s)
    nobody = not any(other.names or other.inherited for other in state.slots)
    if nobody and all(other.unjoined for other in state.slots if other.fate is SlotOutcome.KEPT):
        # One failure may be an accident; a failure of all of them is in the script.
        others = ", and so did all others" if len(state.slots) > 1 else ""
        error = f": {process.error}" if process.error else ""
        return shutdown.stop(state, f"{text}{others}{error}", now_s, culprit=slot.name)
    again = "it is started again, unless all others end so too" if nobody else "it is started again"
    return with_slot(state, _cooling(slot, now_s)), (Note("ended", f"{text}; {again}", slot.name),)


def given_up(state: Roster, slot: Slot, text: str, now_s: float, status: int | None = None) -> Step:
    """Give up a slot that no restart helps: before the first era the run ends, later it goes on without the slot."""
    slot = replace(slot, fate=SlotOutcome.GIVEN_UP)
    state = replace(with_slot(state, slot), verdict=text)
    owner = owner_of(state)
    if state.last_era == 0 and (owner is None or owner.name == slot.agent):
        return shutdown.stop(state, text, now_s, culprit=slot.name, status=status)
    return state, (Note("given up", f"{text}; the run goes on without {slot.name}", slot.name),)


def _is_hopeless(state: Roster) -> bool:
    """Whether every slot has failed in the same way twice in a row."""
    kept = [slot for slot in state.slots if slot.fate is SlotOutcome.KEPT and is_reachable(state, slot)]
    return all(len(s.errors) == 2 and s.errors[0] == s.errors[1] and s.errors[0] != "" for s in kept)


def _cooling(slot: Slot, now_s: float) -> Slot:
    process = slot.process
    assert isinstance(process, EndedProcess)
    longer_s = min(COOLDOWN_AT_MOST_S, 2 * slot.cooldown_s)
    return replace(slot, process=replace(process, restart_s=now_s + slot.cooldown_s), cooldown_s=longer_s)


def restarted(state: Roster, now_s: float) -> Step:
    """Restart the slots whose cooldown is over."""
    effects: tuple[Effect, ...] = ()
    if not isinstance(state.stage, Gathering | Running):
        return state, ()
    for slot in state.slots:
        match slot.process:
            case EndedProcess(restart_s=float(restart_s)) if now_s >= restart_s and is_reachable(state, slot):
                state = with_slot(
                    state, replace(slot, process=Alive(), restarts=slot.restarts + 1, urged=StopStage.ASKED)
                )
                note = Note("restarted", f"{slot.name} is started again", slot.name, quiet=True)
                effects += (Start(slot.agent, slot.name), note)
            case _:
                pass
    return state, effects


def _is_open(state: Roster) -> bool:
    return not isinstance(state.stage, Stopping)


# going on purpose


def leave(state: Roster, slot: Slot, why: str, now_s: float) -> Step:
    """Ask the slot's worker to leave in an orderly way, and do not restart the slot."""
    slot = replace(slot, fate=SlotOutcome.LEFT if slot.fate is SlotOutcome.KEPT else slot.fate)
    if isinstance(slot.process, EndedProcess):
        slot = replace(slot, process=replace(slot.process, restart_s=None))
    state = with_slot(state, slot)
    worker = worker_in(state, slot.name)
    if worker is None:
        return state, (Terminate(slot.agent, slot.name),) if isinstance(slot.process, Alive) else ()
    if not isinstance(worker.standing, EraMember):
        return shutdown.dismissed(state, worker, why)
    if worker.standing.leaving is None:
        member = replace(worker.standing, leaving=why, leaving_s=now_s, asked=True)
        state = with_standing(state, worker, member)
        return state, (AskToLeave(worker.name, why), Note("leaving", f"{worker.name} leaves ({why})", worker.name))
    return state, ()


def leave_all(state: Roster, agent: AgentId, why: str, now_s: float) -> Step:
    """Ask all workers of a launcher to leave."""
    effects: tuple[Effect, ...] = ()
    for slot in state.slots:
        if slot.agent == agent:
            state, more = leave(state, slot, why, now_s)
            effects += more
    return state, effects


def scale_refusal(state: Roster, workers: int) -> str | None:
    """Why the run cannot have this number of workers; None if it can."""
    rules = state.rules
    if workers < 1:
        return f"a run cannot go on with {workers} workers; give at least 1, or end it with Ctrl-C"
    if not isinstance(state.stage, Gathering | Running):
        return "the run is about to end: it takes no more changes"
    if workers < rules.min_workers:
        return f"{workers} workers are fewer than --min-workers {rules.min_workers}"
    if rules.max_workers is not None and workers > rules.max_workers:
        return f"{workers} workers are more than --max-workers {rules.max_workers}"
    owner = owner_of(state)
    if workers - len(kept(state)) > room(state):
        return f"{workers} workers are more than a run can have, {MOST_SLOTS}"
    if workers > len(kept(state)) and (owner is None or owner.peer is None):
        return "the run's launcher is not connected, so nobody can start workers; try again, or join with `--join`"
    return None


def scale(state: Roster, workers: int, now_s: float) -> Step:
    """Add or remove slots until there are ``workers``."""
    present = kept(state)
    owner = owner_of(state)
    effects: tuple[Effect, ...] = (Note("scaled", f"{workers} workers are wanted", quiet=True),)
    if workers >= len(present) and owner is not None:
        state, added = with_new_slots(state, owner.name, workers - len(present))
        return state, (*effects, *(Start(owner.name, slot) for slot in added))
    for slot in sorted(present, key=lambda slot: _going_order(state, slot))[: len(present) - workers]:
        state, more = leave(state, slot, "fewer workers are wanted", now_s)
        effects += more
    return state, effects


def kept(state: Roster) -> list[Slot]:
    """Slots that have a process, or will have one again."""
    return [
        slot
        for slot in state.slots
        if slot.fate is SlotOutcome.KEPT
        and not (isinstance(slot.process, EndedProcess) and slot.process.restart_s is None)
    ]


def with_new_slots(state: Roster, agent: AgentId, count: int) -> tuple[Roster, tuple[SlotId, ...]]:
    """The state with ``count`` more slots, and their names."""
    names = tuple(SlotId(f"w{state.last_slot + 1 + index}") for index in range(count))
    state = with_slots(state, tuple(Slot(name, agent, cooldown_s=COOLDOWN_S) for name in names))
    return replace(state, last_slot=state.last_slot + count), names


def room(state: Roster) -> int:
    """How many more slots the run can have."""
    living = shutdown.living(state, state.heard_s)
    return max(0, min(MOST_SLOTS - living, MOST_SLOTS_EVER - len(state.slots)))


def _going_order(state: Roster, slot: Slot) -> tuple[int, int]:
    """Sort key of leaving: workers that are not members yet first, then the latest members; the leader last."""
    order = [worker.slot for worker in state.workers]
    worker = worker_in(state, slot.name)
    if worker is None:
        return 0, -number_of(slot.name)
    return (2 if isinstance(worker.standing, EraMember) else 1), -order.index(slot.name)


def drain_refusal(state: Roster, name: str) -> tuple[SlotId | None, str]:
    """The slot of the worker to drain, and why it cannot be drained (empty if it can). Slot None: unknown worker."""
    found = next((w.slot for w in state.workers if name in (w.name, w.slot)), None)
    slot = slot_of(state, found if found is not None else SlotId(name))
    if slot is None or (slot.fate is not SlotOutcome.KEPT and found is None):
        names = ", ".join(worker.name for worker in state.workers) or "none"
        return None, f"there is no worker {name}; the workers are {names}"
    if not isinstance(state.stage, Gathering | Running):
        return slot.name, "the run is about to end: it takes no more changes"
    left = len([s for s in kept(state) if s.name != slot.name])
    if 0 < left < state.rules.min_workers:
        return slot.name, f"without {name} there would be fewer workers than --min-workers {state.rules.min_workers}"
    return slot.name, ""


def number_of(slot: str) -> int:
    """The number in a slot's name; -1 if the name has another form."""
    return int(slot[1:]) if slot[:1] == "w" and slot[1:].isdecimal() else -1
