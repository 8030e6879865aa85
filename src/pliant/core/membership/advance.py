"""The coordinator's decisions: who takes part in a run, when eras start, and when the run is over.

Question  Given the state and an event, what is the next state, and what does the coordinator do?
Holds     One event in, one new state and a list of effects out; the time is passed in, and there are no random numbers.
          The event is applied first. Then everything that follows from state and time is judged, in a fixed order.
Source    ours; docs/protocol.md, docs/design/0007-elastic.md. The parts: ``admission`` (who may come in), ``liveness``
          (who is lost), ``processes`` (which ones are started and ended), ``eras`` (which era comes next), ``reports``
          (what members say about themselves), ``failed_formations`` (eras that cannot be formed), ``shutdown``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from msgspec.structs import replace

from pliant.core.membership import admission, eras, failed_formations, liveness, processes, reports, shutdown
from pliant.core.membership.events import (
    AgentArrived,
    AgentId,
    AgentLost,
    Arrived,
    Close,
    ConnectionLost,
    CoordinatorFailed,
    Dismiss,
    Drained,
    Effect,
    Entered,
    Event,
    Failed,
    Finished,
    Heartbeat,
    Interrupted,
    JoinRequested,
    Kill,
    Leaving,
    Note,
    OfWorker,
    PreemptionNotice,
    ProcessExited,
    Scaled,
    Stopped,
    Tick,
    Unformed,
)
from pliant.core.membership.roster import (
    NAMES_PER_TERM,
    Alive,
    Connected,
    Departing,
    Disconnected,
    EraForming,
    EraMember,
    Finishing,
    Gathering,
    Halting,
    Idle,
    Planned,
    Roster,
    Rules,
    Running,
    RunOver,
    Slot,
    SlotOutcome,
    SlotWorker,
    Steady,
    Step,
    agent_of,
    name_order,
    slot_of,
    slot_part,
    with_agent,
    with_slot,
    with_standing,
    with_worker,
    worker_of,
)
from pliant.core.membership.shutdown import QUIET_EXIT, ending, shell_status
from pliant.types import WorkerId

__all__ = ["QUIET_EXIT", "advance", "ending", "gathered", "name_order", "resumed", "shell_status"]


def gathered(rules: Rules, term: int, dead_after_s: float, now_s: float) -> Roster:
    """The state before anything happened."""
    return Roster(rules, term, now_s, dead_after_s, heard_s=now_s)


def resumed(
    rules: Rules, term: int, dead_after_s: float, now_s: float, era: int, roster: Sequence[WorkerId], settled: int
) -> Roster:
    """The state of a coordinator that replaces a lost one. ``era``, ``roster`` and ``settled`` are from the journal."""
    until_s = now_s + dead_after_s
    state = Roster(rules, term, now_s, dead_after_s, heard_s=now_s, patient_until_s=until_s, trusting_until_s=until_s)
    for name in roster:
        slot, number = slot_part(name)
        names = max(number, NAMES_PER_TERM * (term - 1))
        state = with_slot(state, Slot(slot, AgentId(""), names=names, inherited=True))
        member = EraMember("", now_s, era=era, active=True, progress_s=now_s)
        state = with_worker(state, SlotWorker(name, slot, 0, Disconnected(now_s), member, now_s))
    if era > 0:
        # No report is out of date (floor 0): members have just found this coordinator.
        state = replace(state, stage=Running(), course=Steady(era, 0), last_era=era)
    last_slot = max((processes.number_of(slot.name) for slot in state.slots), default=-1)
    return replace(state, settled=settled, last_slot=last_slot, last_agent=0 if era > 0 else -1)


def rewound(state: Roster) -> Roster:
    """The state of a coordinator that resumes a run without workers: the run goes on from its last checkpoint."""
    fresh = gathered(state.rules, state.term, state.dead_after_s, state.started_s)
    return replace(
        fresh,
        last_era=state.last_era,
        last_slot=state.last_slot,
        checkpoints=state.checkpoints,
        rewinds=state.rewinds + 1,
    )


def finishing(state: Roster, now_s: float) -> Roster:
    """The state of a coordinator whose predecessor was told that a worker finished its script."""
    return replace(state, stage=Finishing(now_s)) if isinstance(state.stage, Running) else state


def ended(state: Roster, reason: str, *, completed: bool, exit_status: int) -> Roster:
    """The state of a run that was over already: every worker that connects is told so."""
    return replace(state, stage=RunOver(reason, completed, exit_status))


def heard(state: Roster, beats: Sequence[tuple[Heartbeat, float]]) -> Roster:
    """The state after these heartbeats, in their order, each with its time.

    Nothing is judged: ``advance`` does that with the next event. All are applied in one pass, so that the cost of a
    heartbeat does not depend on the number of workers.
    """
    if not beats or isinstance(state.stage, RunOver):
        return state
    by_worker: dict[WorkerId, list[tuple[Heartbeat, float]]] = {}
    for beat, now_s in beats:
        by_worker.setdefault(beat.worker, []).append((beat, now_s))
    # What a member held in an era before the one being formed does not count: it may have been behind.
    present = state.course.start.era if isinstance(state.course, EraForming) else None
    workers: list[SlotWorker] = []
    settled = state.settled
    for worker in state.workers:
        for beat, now_s in by_worker.get(worker.name, ()):
            worker = _beaten(worker, beat, present, now_s)
            if isinstance(worker.standing, EraMember):
                # A round is an exchange: a member that has applied one holds a state that a new start would lose.
                settled = max(settled, min(beat.round, 1))
        workers.append(worker)
    return replace(state, workers=tuple(workers), settled=settled)


def advance(state: Roster, event: Event, now_s: float) -> Step:
    """The state after the event, and the effects to carry out. ``now_s`` is of any monotonic clock."""
    if isinstance(state.stage, RunOver):
        return state, _farewell(event, state.stage)
    if now_s - state.heard_s > state.dead_after_s / 2:
        # The coordinator itself was suspended: silence during that time proves nothing.
        until_s = now_s + state.dead_after_s
        state = replace(state, patient_until_s=max(state.patient_until_s, until_s))
        if state.heard_s < state.trusting_until_s:
            # It does not know all workers yet.
            state = replace(state, trusting_until_s=max(state.trusting_until_s, until_s))
    state = replace(state, heard_s=now_s)
    state, effects = _take(state, event, now_s)
    for judge in (
        _admitted,
        processes.ended,
        liveness.judged,
        eras.moved,
        shutdown.deserted,
        processes.restarted,
        shutdown.urged,
        shutdown.released,
        shutdown.settled,
    ):
        state, more = judge(state, now_s)
        effects += more
    return shutdown.noted(state, effects), effects


def _farewell(event: Event, over: RunOver) -> tuple[Effect, ...]:
    return (Dismiss(event.peer, over.reason, over.completed),) if isinstance(event, Arrived) else ()


def _take(state: Roster, event: Event, now_s: float) -> Step:
    match event:
        case Arrived():
            return admission.arrived(state, event, now_s)
        case AgentArrived():
            if now_s < state.trusting_until_s and not event.agent:
                return replace(state, held=(*state.held, event)), ()
            return admission.agent_arrived(state, event, now_s)
        case AgentLost(agent=agent, peer=peer):
            return admission.agent_cut(state, agent, peer, now_s)
        case ProcessExited():
            return processes.exited(state, event, now_s)
        case Interrupted():
            return _interrupted(state, event, now_s)
        case PreemptionNotice(agent=agent):
            return _going(state, agent, "its machine goes away", now_s)
        case Scaled(workers=workers):
            return processes.scale(state, workers, now_s) if _is_open(state) else (state, ())
        case Drained(slot=name):
            slot = slot_of(state, name)
            return processes.leave(state, slot, "drained", now_s) if slot and _is_open(state) else (state, ())
        case CoordinatorFailed(reason=reason):
            return shutdown.stop(state, reason, now_s, status=1)
        case Tick():
            return state, ()
        case Heartbeat():
            return heard(state, [(event, now_s)]), ()
        case _:
            worker = worker_of(state, event.worker)
            return _told(state, worker, event, now_s) if worker is not None else (state, ())


def _admitted(state: Roster, now_s: float) -> Step:
    """Admit the launchers that had to wait for a new coordinator."""
    effects: tuple[Effect, ...] = ()
    if now_s >= state.trusting_until_s:
        held, state = state.held, replace(state, held=())
        for event in held:
            state, more = admission.agent_arrived(state, event, now_s)
            effects += more
    return state, effects


def _told(state: Roster, worker: SlotWorker, event: OfWorker, now_s: float) -> Step:
    if isinstance(event, ConnectionLost):
        return admission.cut(state, worker, event.peer, now_s)
    worker = replace(worker, heard_s=now_s)
    state = with_worker(state, worker)
    if isinstance(event, Entered | Stopped) and not reports.is_credible(state, event.era):
        return _failed(state, worker, Failed(worker.name, f"says that it is in era {event.era}"), now_s)
    match event:
        case JoinRequested():
            return admission.offered(state, worker, event, now_s)
        case Leaving(reason=reason):
            return _leaving(state, worker, reason, now_s)
        case Stopped():
            return reports.stopped(state, worker, event, now_s)
        case Unformed():
            return failed_formations.unformed(state, worker, event, now_s)
        case Entered():
            return reports.entered(state, worker, event, now_s)
        case Failed():
            return _failed(state, worker, event, now_s)
        case Finished():
            return _finished(state, worker, event, now_s)
        case _:
            assert_never(event)


def _beaten(worker: SlotWorker, beat: Heartbeat, present: int | None, now_s: float) -> SlotWorker:
    """The worker after a heartbeat; ``present`` is the era that is being formed, if one is."""
    member = worker.standing
    if not isinstance(member, EraMember):
        return replace(worker, heard_s=now_s)
    # What it held in an era before the present one does not count: it may have been behind.
    tells = beat.active is not None and (beat.era is None or beat.era >= (present or member.era))
    member = replace(
        member,
        exchange=member.exchange if beat.exchange is None or member.stopped_s is not None else beat.exchange,
        progress=beat.progress,
        progress_s=member.progress_s if _is_where_it_was(member, beat) else now_s - beat.lasts_s,
        waiting=beat.waiting,
        ending=beat.ending,
        usual_s=beat.usual_s,
        busy=beat.busy,
        expected_s=beat.expected_s,
        pace=beat.pace,
        handoff_s=beat.handoff_s,
        active=beat.active if tells and member.stopped_s is None else member.active,
    )
    return replace(worker, heard_s=now_s, standing=member)


def _is_where_it_was(member: EraMember, beat: Heartbeat) -> bool:
    """Whether its main loop has made no progress since the last heartbeat."""
    return beat.progress == member.progress and beat.waiting == member.waiting


def _leaving(state: Roster, worker: SlotWorker, reason: str, now_s: float) -> Step:
    """A worker asks for an era without it."""
    slot = slot_of(state, worker.slot)
    if slot is None or not isinstance(state.stage, Gathering | Running):
        return state, ()
    state = with_slot(state, replace(slot, fate=SlotOutcome.LEFT))
    member = worker.standing
    if isinstance(member, Departing):
        return state, ()
    if not isinstance(member, EraMember):
        return shutdown.dismissed(state, worker, reason or "it was asked to go")
    if member.leaving is not None:
        return state, ()
    state = with_standing(state, worker, replace(member, leaving=reason, leaving_s=now_s))
    why = f" ({reason})" if reason else ""
    return state, (Note("leaving", f"{worker.name} leaves{why}", worker.name),)


def _failed(state: Roster, worker: SlotWorker, event: Failed, now_s: float) -> Step:
    """A worker cannot go on; the others can, unless the error is one that all workers have."""
    slot = slot_of(state, worker.slot)
    assert slot is not None
    peer = worker.line.peer if isinstance(worker.line, Connected) else None
    close = () if peer is None else (Close(peer),)
    state = with_slot(state, replace(slot, failure=event.reason))
    silent = replace(worker, line=Disconnected(now_s))
    state, effects = liveness.lose(state, silent, f"failed ({event.reason})", now_s, kind="failed")
    reason = event.reason if event.reason.startswith(worker.name) else f"{worker.name} failed: {event.reason}"
    if event.own:
        # The note of the slot given up says it all.
        effects = tuple(effect for effect in effects if not isinstance(effect, Note))
        now = slot_of(state, worker.slot)
        assert now is not None
        if now.fate is SlotOutcome.KEPT:
            state, more = processes.given_up(state, now, reason, now_s, status=1)
            effects += more
    elif event.fatal:
        if state.last_era > 0 and not isinstance(worker.standing, EraMember | Departing):
            # A newcomer with a wrong request does not end the run.
            state, effects = processes.given_up(state, replace(slot, failure=event.reason), reason, now_s, status=1)
        else:
            state, effects = shutdown.stop(state, reason, now_s, culprit=slot.name)
    return state, (*close, *effects)


def _finished(state: Roster, worker: SlotWorker, event: Finished, now_s: float) -> Step:
    """A worker has left ``join`` in an orderly way."""
    close = (Close(worker.line.peer),) if isinstance(worker.line, Connected) else ()
    if not isinstance(worker.standing, EraMember | Departing):
        if state.last_era == 0 and not event.left:
            reason = "left pliant.join before training began"
            return _failed(state, worker, Failed(worker.name, reason, fatal=True), now_s)
        return shutdown.gone(state, worker, SlotOutcome.LEFT if event.left else SlotOutcome.FINISHED), close
    if not event.left:
        return shutdown.finished(state, worker, now_s)
    planned = isinstance(state.course, Planned) and worker.name not in state.course.plan.roster
    # At the run's end all have handed in their last ticket: the others reach it without this one.
    spared = planned or event.over
    state = shutdown.gone(state, worker, SlotOutcome.LEFT)
    if isinstance(worker.standing, EraMember) and not spared and not isinstance(state.course, Idle | Halting):
        # No planned era is without it.
        state = replace(state, broken=f"{worker.name} left", last_loss=(f"{worker.name} left", None))
    return state, (*close, Note("left", f"{worker.name} left", worker.name))


def _interrupted(state: Roster, event: Interrupted, now_s: float) -> Step:
    agent = agent_of(state, event.agent)
    if agent is None:
        return state, ()
    if agent.owner:
        return shutdown.interrupted(state, event.signal, now_s)
    if agent.leaving:
        own = [slot for slot in state.slots if slot.agent == agent.name and isinstance(slot.process, Alive)]
        return state, tuple(Kill(slot.agent, slot.name) for slot in own)
    return _going(state, agent.name, "its launcher was interrupted", now_s)


def _going(state: Roster, name: AgentId, why: str, now_s: float) -> Step:
    """Ask all workers of a launcher to leave."""
    agent = agent_of(state, name)
    if agent is None or agent.leaving or not _is_open(state):
        return state, ()
    state = with_agent(state, replace(agent, leaving=True))
    return processes.leave_all(state, name, why, now_s)


def _is_open(state: Roster) -> bool:
    return isinstance(state.stage, Gathering | Running)
