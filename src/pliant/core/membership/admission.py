"""Which workers and launchers are admitted.

Question  Which worker or launcher does a new connection speak for, under which name, or is it refused?
Holds     Names are given only here and never twice. A worker that reconnects keeps its name and its index; one whose
          name is gone may come back as a newcomer; one that differs from the run is refused in one line, and the run
          goes on. Every arrival is answered.
Source    ours; docs/protocol.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from pliant.core.membership import liveness, shutdown
from pliant.core.membership.compatibility import difference, length_difference
from pliant.core.membership.events import (
    Admit,
    AgentArrived,
    AgentId,
    Arrived,
    Close,
    Dismiss,
    Effect,
    Enroll,
    JoinRequested,
    Note,
    Refuse,
)
from pliant.core.membership.processes import given_up, number_of, room, with_new_slots
from pliant.core.membership.reports import is_credible, redelivered, with_era_of
from pliant.core.membership.roster import (
    MOST_SLOTS,
    NAMES_PER_TERM,
    Agent,
    Alive,
    Connected,
    Disconnected,
    Ending,
    EraMember,
    Finishing,
    Greeted,
    Roster,
    RunOver,
    Slot,
    SlotOutcome,
    SlotWorker,
    Step,
    Stopping,
    Waiting,
    agent_of,
    owner_of,
    slot_of,
    slot_part,
    with_agent,
    with_slot,
    with_worker,
    without_worker,
    worker_in,
    worker_of,
)
from pliant.types import WorkerId

RUN = WorkerId("the run")
"""Stands for the members in a message about a difference."""


def arrived(state: Roster, event: Arrived, now_s: float) -> Step:
    """A worker's connection introduces itself."""
    match state.stage:
        case Stopping(reason=reason):
            return state, (Dismiss(event.peer, reason),)
        case RunOver(reason=reason, completed=completed):
            return state, (Dismiss(event.peer, reason, completed),)
        case _:
            pass
    trusting = now_s < state.trusting_until_s
    slot = slot_of(state, event.slot)
    if slot is None and trusting and room(state) > 0:
        # Its launcher has not found the new coordinator yet.
        slot = _known_slot(state, Slot(event.slot, AgentId("")))
        state = _with_old_slot(state, slot)
    if slot is None:
        names = ", ".join(slot.name for slot in state.slots) or "none"
        reason = f"no worker is expected in slot {event.slot}, only {names}; let `pliant run` start it"
        return state, (Refuse(event.peer, reason), Note("refused", f"refused a connection: {reason}"))
    if event.version != state.rules.version:
        reason = (
            f"{event.slot} runs Pliant {event.version} but the coordinator {state.rules.version}; "
            "install the same version for all"
        )
        return turned_away(state, slot, event.peer, reason, now_s)
    if event.worker:
        return _gone_on(state, slot, event, now_s, trusting)
    return _newcomer(state, slot, event, now_s)


def turned_away(state: Roster, slot: Slot, peer: int, reason: str, now_s: float) -> Step:
    """Refuse a worker that no restart can fix. Before the first era this ends the run."""
    state, effects = given_up(state, slot, reason, now_s, status=1)
    return state, (Refuse(peer, reason), *effects)


def _newcomer(state: Roster, slot: Slot, event: Arrived, now_s: float) -> Step:
    if isinstance(state.stage, Finishing):
        return state, (Dismiss(event.peer, shutdown.FINISHED, completed=True),)
    reason = _objection(state, slot)
    if reason is not None:
        return state, (Refuse(event.peer, reason),)
    effects: tuple[Effect, ...] = ()
    present = worker_in(state, slot.name)
    if present is not None:
        # Its connection is closed, or is an old one of the same process: the new one replaces it.
        state, effects = liveness.lose(state, present, "was lost (it came back as a newcomer)", now_s)
    slot = slot_of(state, slot.name) or slot
    number = slot.names + 1
    name = WorkerId(slot.name if number == 1 else f"{slot.name}.{number}")
    slot = replace(slot, names=number, process=Alive(greeted=True), inherited=False, away=None)
    worker = SlotWorker(name, slot.name, event.pid, Connected(event.peer), Greeted(), now_s)
    state = with_worker(with_slot(state, slot), worker)
    return state, (*effects, Admit(event.peer, name, running=state.last_era > 0))


def _objection(state: Roster, slot: Slot) -> str | None:
    """Why no newcomer can come from this slot; None: one can."""
    present = worker_in(state, slot.name)
    if slot.fate in (SlotOutcome.FINISHED, SlotOutcome.LEFT):
        return f"{slot.name} has already left this run; call pliant.join once per script"
    if slot.fate is SlotOutcome.GIVEN_UP:
        return f"{slot.name} was given up: {state.verdict}"
    if not isinstance(slot.process, Alive):
        return f"the process of {slot.name} has ended; let `pliant run` start its successor"
    if present is not None and isinstance(present.line, Connected):
        return f"there is already a worker in slot {slot.name}; call pliant.join once per process"
    return None


def _gone_on(state: Roster, slot: Slot, event: Arrived, now_s: float, trusting: bool) -> Step:
    """A worker reconnects after it lost its connection or its coordinator."""
    worker = worker_of(state, event.worker)
    finishing = isinstance(state.stage, Finishing)
    # When the run is finishing, only a member is believed.
    if worker is None and trusting and not (finishing and event.era == 0) and _is_credible(state, slot, event):
        worker = _taken_at_its_word(event, now_s)
        before = worker_in(state, slot.name)
        if before is not None:
            state = without_worker(state, before.name)
        _, number = slot_part(event.worker)
        slot = replace(slot, names=max(slot.names, number))
        state = with_slot(state, slot)
    if worker is None and finishing:
        return state, (Dismiss(event.peer, shutdown.FINISHED, completed=True),)
    foreign = worker is None or worker.slot != event.slot or not is_credible(state, event.era)
    if worker is None or foreign or not isinstance(slot.process, Alive):
        reason = f"{event.worker} is no longer on the roster; it may come back under a new name"
        return state, (Refuse(event.peer, reason, again=True),)
    old = (Close(worker.line.peer),) if isinstance(worker.line, Connected) and worker.line.peer != event.peer else ()
    if event.terms is not None and state.terms is None and event.era > 0:
        state = replace(state, terms=event.terms)
    standing = worker.standing
    if isinstance(standing, EraMember):
        standing = replace(standing, address=event.address or standing.address)
    worker = replace(worker, pid=event.pid, line=Connected(event.peer), heard_s=now_s, standing=standing)
    state = with_slot(with_worker(state, worker), replace(slot, process=Alive(greeted=True), inherited=False))
    state = with_era_of(state, worker, event.era, event.exchange, event.active, now_s)
    admit = Admit(event.peer, worker.name, running=state.last_era > 0)
    return state, (*old, admit, *redelivered(state, worker.name))


def _succeeds(slot: Slot, present: SlotWorker, event: Arrived) -> bool:
    """Whether it succeeds ``present``, a worker known only from the journal, in an era that was not journaled."""
    era = present.standing.era if isinstance(present.standing, EraMember) else 0
    later = slot_part(event.worker)[1] > slot_part(present.name)[1] and event.era > era
    return later and slot.inherited and not isinstance(present.line, Connected)


def _is_credible(state: Roster, slot: Slot, event: Arrived) -> bool:
    """Whether a new coordinator may believe it, because nothing it knows contradicts."""
    present = worker_in(state, slot.name)
    known = present is not None and not _succeeds(slot, present, event)
    if known or event.worker in state.ghosts or slot_part(event.worker)[0] != slot.name:
        return False
    era = getattr(state.course, "era", 0)
    return event.era == 0 or event.era >= era


def _taken_at_its_word(event: Arrived, now_s: float) -> SlotWorker:
    standing = (
        EraMember(event.address, now_s, era=event.era, exchange=event.exchange, active=event.active, progress_s=now_s)
        if event.era > 0
        else Greeted()
    )
    return SlotWorker(event.worker, event.slot, event.pid, Connected(event.peer), standing, now_s)


def offered(state: Roster, worker: SlotWorker, event: JoinRequested, now_s: float) -> Step:
    """A worker asks to be in the next era."""
    if not isinstance(worker.standing, Greeted | Waiting) or not isinstance(worker.line, Connected):
        return state, ()
    slot = slot_of(state, worker.slot)
    assert slot is not None
    differs: str | None = None
    if state.terms is not None and state.last_era > 0:
        differs = difference([(RUN, state.terms), (worker.name, event.terms)])
        differs = differs or length_difference(RUN, event.recorded, worker.name, event.length)
    if differs is not None:
        state = without_worker(state, worker.name)
        return turned_away(state, slot, worker.line.peer, differs, now_s)
    state = replace(
        state,
        dead_after_s=event.dead_after_s or state.dead_after_s,
        hung_after_s=event.hung_after_s or state.hung_after_s,
    )
    if isinstance(worker.standing, Waiting):
        waiting = replace(worker.standing, terms=event.terms, address=event.address)
        return with_worker(state, replace(worker, standing=waiting)), ()
    # After all that were ready before: workers are admitted in this order.
    rest = tuple(other for other in state.workers if other.name != worker.name)
    ready = replace(worker, standing=Waiting(event.terms, event.address))
    return replace(state, workers=(*rest, ready)), ()


# Launchers


def agent_arrived(state: Roster, event: AgentArrived, now_s: float) -> Step:
    """A launcher's connection introduces itself."""
    if event.version != state.rules.version:
        reason = f"this launcher is Pliant {event.version}, the run {state.rules.version}; install the same version"
        return state, (Refuse(event.peer, reason),)
    known = agent_of(state, event.agent) if event.agent else None
    owner = owner_of(state)
    if known is None and isinstance(state.stage, Stopping | Finishing) and not event.owner:
        return state, (Refuse(event.peer, "the run is about to end; there is nothing left to join"),)
    if known is None and event.owner and owner is not None:
        return state, (Refuse(event.peer, "this run has its launcher; add workers with `pliant run --join`"),)
    if len(event.slots) + event.wanted > room(state) + sum(slot_of(state, name) is not None for name in event.slots):
        return state, (Refuse(event.peer, f"a run has at most {MOST_SLOTS} workers; ask for fewer"),)
    if known is not None:
        name = known.name
    elif event.agent:
        name = event.agent
    else:
        name = AgentId(f"a{state.last_agent + 1}")
    state = replace(state, last_agent=max(state.last_agent, _agent_number(name)))
    old = known.peer if known is not None and known.peer != event.peer else None
    effects: tuple[Effect, ...] = (Close(old),) if old is not None else ()
    state = with_agent(
        state, replace(known, peer=event.peer, released=False) if known else Agent(name, event.owner, event.peer)
    )
    state = _with_slots_of(state, name, event, now_s)
    if not event.agent:
        state, _ = with_new_slots(state, name, event.wanted)
    own = tuple(slot.name for slot in state.slots if slot.agent == name)
    return state, (*effects, Enroll(event.peer, name, own))


def _with_slots_of(state: Roster, agent: AgentId, event: AgentArrived, now_s: float) -> Roster:
    """The state with the slots that a launcher reports, and without those that it no longer has."""
    for name in event.slots:
        slot = slot_of(state, name)
        if slot is None:
            state = _with_old_slot(state, _known_slot(state, Slot(name, agent)))
        elif not slot.agent:
            state = with_slot(state, replace(slot, agent=agent))
    for slot in state.slots:
        missing = slot.agent == agent and slot.name not in event.slots
        if missing and event.agent and isinstance(slot.process, Alive):
            # The launcher was never told to start this process, or does not know how it ended.
            process = Ending(shutdown.QUIET_EXIT, now_s, greeted=True, error="")
            state = with_slot(state, replace(slot, process=process))
    return state


def _known_slot(state: Roster, slot: Slot) -> Slot:
    """A slot that an earlier coordinator named."""
    return replace(slot, names=max(slot.names, NAMES_PER_TERM * (state.term - 1)), inherited=True)


def _with_old_slot(state: Roster, slot: Slot) -> Roster:
    return replace(with_slot(state, slot), last_slot=max(state.last_slot, number_of(slot.name)))


def _agent_number(agent: str) -> int:
    return int(agent[1:]) if agent[:1] == "a" and agent[1:].isdecimal() else -1


def cut(state: Roster, worker: SlotWorker, peer: int, now_s: float) -> Step:
    """A worker's connection is closed."""
    if worker.line != Connected(peer):
        return state, ()
    return with_worker(state, replace(worker, line=Disconnected(now_s))), ()


def agent_cut(state: Roster, name: AgentId, peer: int, now_s: float) -> Step:
    """A launcher's connection is closed; it may come back."""
    agent = agent_of(state, name)
    if agent is None or agent.peer != peer:
        return state, ()
    return with_agent(state, replace(agent, peer=None, gone_s=now_s)), ()
