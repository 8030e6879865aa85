"""How a run ends.

Question  When is a run over, what happens to processes that do not end, and what is the run's exit status?
Holds     Every run ends exactly once, after the processes of its own launcher, unless that launcher is gone. However
          the run is stopped, every process has ended after two grace periods. The exit status is that of the script
          that failed, never that of a signal which Pliant sent.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from pliant.core.membership.events import (
    AgentId,
    Close,
    Dismiss,
    Effect,
    Ended,
    Finishes,
    Kill,
    Note,
    ReleaseAgent,
    SlotId,
    StopAll,
    Terminate,
)
from pliant.core.membership.roster import (
    Agent,
    Alive,
    Connected,
    EndedProcess,
    Ending,
    EraMember,
    Finishing,
    Gathering,
    Greeted,
    Idle,
    Planned,
    Roster,
    Running,
    RunOver,
    Slot,
    SlotOutcome,
    SlotWorker,
    Steady,
    Step,
    Stopping,
    StopStage,
    Waiting,
    agent_of,
    is_reachable,
    owner_of,
    with_agent,
    with_slot,
    without_worker,
    worker_in,
)

QUIET_EXIT = 76
"""Exit status of a worker that ended because of others; 76 is EX_PROTOCOL, which no Python program uses."""

OWNER_GONE_S = 60.0
"""How long a run without its launcher and without a connected worker waits for either."""

FINISHED = "finished"

_SIGTERM, _SIGKILL = 15, 9


def stop(state: Roster, reason: str, now_s: float, culprit: SlotId | None = None, status: int | None = None) -> Step:
    """End the run: ask connected workers to stop, and terminate the processes that are not connected.

    ``culprit``: the slot whose exit status becomes that of the run, unless ``status`` is given.
    """
    if isinstance(state.stage, Stopping | RunOver):
        return state, ()
    # A process that reported a failure or has left is about to end with an exit status of its own.
    deaf = [s for s in _alive(state) if not _is_going(state, s) and not _hears(worker_in(state, s.name))]
    if any(slot.name == culprit and not _has_gone_silent(slot) for slot in deaf):
        # It is suspended, or is a later process than the one that failed: its status says nothing about that failure.
        culprit = None
    stage = Stopping(reason, StopStage.ASKED, now_s, culprit, status)
    return replace(state, stage=stage), (StopAll(reason), *(Terminate(slot.agent, slot.name) for slot in deaf))


def interrupted(state: Roster, signal: int, now_s: float) -> Step:
    """The run's own launcher got a signal."""
    alive = _alive(state)
    if isinstance(state.stage, Stopping) and state.stage.urge >= StopStage.TERMINATED:
        # The second Ctrl-C of an impatient user.
        stage = replace(state.stage, urge=StopStage.KILLED, since_s=now_s)
        return replace(state, stage=stage), tuple(Kill(slot.agent, slot.name) for slot in alive)
    reason = "interrupted (Ctrl-C)" if signal == 2 else f"ended by signal {signal}"
    stage = Stopping(reason, StopStage.TERMINATED, now_s, status=128 + signal)
    return replace(state, stage=stage), (StopAll(reason), *(Terminate(slot.agent, slot.name) for slot in alive))


def finished(state: Roster, worker: SlotWorker, now_s: float) -> Step:
    """A member has finished its script: no newcomer is needed, and no process is started again."""
    state, effects = gone(state, worker, SlotOutcome.FINISHED), _closed(worker)
    if not isinstance(state.stage, Running):
        return state, effects
    state, effects = replace(state, stage=Finishing(now_s)), (Finishes(worker.name), *effects)
    if isinstance(state.course, Planned) and _is_in(worker, state.course.era):
        # The end was reached in the old era: the newcomers of the planned one have nothing to do.
        state = replace(state, course=Steady(state.course.era, state.course.floor))
    for other in state.workers:
        if isinstance(other.standing, Greeted | Waiting) or (isinstance(state.course, Steady) and _is_new(other)):
            state, more = dismissed(state, other, FINISHED)
            effects += more
    return state, (*effects, *(Terminate(slot.agent, slot.name) for slot in _useless(state)))


def _useless(state: Roster) -> list[Slot]:
    """Processes that are not needed at the end. One that was left out finishes its work, and then ends by itself."""
    return [
        slot
        for slot in _alive(state)
        if slot.fate is SlotOutcome.KEPT and worker_in(state, slot.name) is None and not slot.is_left_out
    ]


def dismissed(state: Roster, worker: SlotWorker, reason: str) -> Step:
    """Tell a worker that it is not needed any more; it exits with status 0."""
    peer = worker.line.peer if isinstance(worker.line, Connected) else None
    effects = () if peer is None else (Dismiss(peer, reason, completed=True),)
    return without_worker(state, worker.name), effects


def gone(state: Roster, worker: SlotWorker, fate: SlotOutcome) -> Roster:
    """The state after a worker has left in an orderly way."""
    slot = next(slot for slot in state.slots if slot.name == worker.slot)
    return with_slot(without_worker(state, worker.name), replace(slot, fate=fate))


def _closed(worker: SlotWorker) -> tuple[Effect, ...]:
    return (Close(worker.line.peer),) if isinstance(worker.line, Connected) else ()


def _is_in(worker: SlotWorker, era: int) -> bool:
    return isinstance(worker.standing, EraMember) and worker.standing.era <= era


def _is_new(worker: SlotWorker) -> bool:
    return isinstance(worker.standing, EraMember) and worker.standing.era == 0


# judged after every event


def deserted(state: Roster, now_s: float) -> Step:
    """Stop a run that no worker can join any more."""
    if not isinstance(state.stage, Gathering | Running):
        return state, ()
    if any(isinstance(worker.line, Connected) for worker in state.workers):
        return state, ()
    if owner_away_s(state, now_s) >= OWNER_GONE_S:
        came = owner_of(state) is not None
        reason = "the launcher is gone, and all workers with it" if came else "no launcher came to this coordinator"
        return stop(state, reason, now_s, status=1)
    if not state.slots or state.workers or any(may_come(state, slot, now_s) for slot in state.slots):
        return state, ()
    if all(slot.fate is SlotOutcome.LEFT for slot in state.slots):
        return stop(state, "all workers have left", now_s, status=0)
    culprit = next((slot.name for slot in reversed(state.slots) if slot.fate is SlotOutcome.GIVEN_UP), None)
    return stop(state, state.verdict or "no worker is left", now_s, culprit=culprit)


def may_come(state: Roster, slot: Slot, now_s: float) -> bool:
    """Whether the slot has a process that may still connect, or will have one."""
    return _may_come(state, slot, agent_of(state, slot.agent), now_s)


def living(state: Roster, now_s: float) -> int:
    """How many slots have a process that may still connect, or will have one."""
    agents = {agent.name: agent for agent in state.agents}
    return sum(_may_come(state, slot, agents.get(slot.agent), now_s) for slot in state.slots)


def _may_come(state: Roster, slot: Slot, agent: Agent | None, now_s: float) -> bool:
    if slot.fate is not SlotOutcome.KEPT:
        return not isinstance(slot.process, EndedProcess)
    if agent is None:
        return now_s < state.trusting_until_s
    away = agent.peer is None and now_s - agent.gone_s >= OWNER_GONE_S
    return not away and (not isinstance(slot.process, EndedProcess) or slot.process.restart_s is not None)


def owner_away_s(state: Roster, now_s: float) -> float:
    """For how long the run's own launcher has not been connected."""
    owner = owner_of(state)
    if owner is None:
        return now_s - state.started_s
    return 0.0 if owner.peer is not None else now_s - owner.gone_s


def urged(state: Roster, now_s: float) -> Step:
    """After each grace period, go from asking to SIGTERM, and from SIGTERM to SIGKILL."""
    grace_s = state.rules.grace_s
    match state.stage:
        case Stopping(urge=StopStage.ASKED, since_s=since_s) if now_s - since_s >= grace_s:
            stage = replace(state.stage, urge=StopStage.TERMINATED, since_s=now_s)
            effects = tuple(Terminate(slot.agent, slot.name) for slot in _alive(state))
        case Stopping(urge=StopStage.TERMINATED, since_s=since_s) if now_s - since_s >= grace_s:
            stage = replace(state.stage, urge=StopStage.KILLED, since_s=now_s)
            effects = tuple(Kill(slot.agent, slot.name) for slot in _alive(state))
        case Finishing(since_s=since_s, urged=False) if now_s - since_s >= grace_s:
            stage = replace(state.stage, urged=True)
            effects = tuple(Kill(slot.agent, slot.name) for slot in _useless(state))
        case _:
            return state, ()
    return replace(state, stage=stage), effects


def released(state: Roster, now_s: float) -> Step:
    """Release launchers that joined the run and have no process left to run."""
    effects: tuple[Effect, ...] = ()
    if not isinstance(state.stage, Gathering | Running):
        return state, ()
    by_agent: dict[AgentId, list[Slot]] = {}
    for slot in state.slots:
        by_agent.setdefault(slot.agent, []).append(slot)
    for agent in state.agents:
        own = by_agent.get(agent.name, [])
        ended = all(isinstance(s.process, EndedProcess) and s.process.restart_s is None for s in own)
        if agent.owner or agent.released or agent.peer is None or not own or not ended:
            continue
        failed = any(slot.fate is SlotOutcome.GIVEN_UP for slot in own)
        reason = state.verdict if failed and state.verdict else "its workers have left; the run goes on"
        state = with_agent(state, replace(agent, released=True))
        effects += (ReleaseAgent(agent.name, reason, exit_status=1 if failed else 0),)
    return state, effects


def settled(state: Roster, now_s: float) -> Step:
    """End the run when all processes that count have ended and all their messages have arrived."""
    match state.stage:
        case Stopping():
            counts = [s for s in state.slots if _is_owners(state, s.agent) or is_reachable(state, s)]
            done = not any(isinstance(slot.process, Alive) for slot in counts)
        case Finishing():
            # Processes of other launchers do not count, except one that was left out and still works.
            counts = [
                slot
                for slot in state.slots
                if _is_owners(state, slot.agent) or (slot.is_left_out and is_reachable(state, slot))
            ]
            done = not state.workers and all(isinstance(slot.process, EndedProcess) for slot in counts)
        case Gathering() | Running() | RunOver():
            return state, ()
    connected = any(isinstance(worker.line, Connected) for worker in state.workers)
    abandoned = owner_away_s(state, now_s) >= 2 * state.rules.grace_s and not connected
    if not done and not abandoned:
        return state, ()
    over = _conclusion(state)
    state = replace(state, stage=over, course=Idle(), workers=())
    return state, (Note("ended", over.reason, quiet=True), Ended(over.reason, over.completed, over.exit_status))


def noted(state: Roster, effects: tuple[Effect, ...]) -> Roster:
    """The state with the signals among ``effects`` noted in their slots."""
    for effect in effects:
        if isinstance(effect, Terminate | Kill):
            urge = StopStage.KILLED if isinstance(effect, Kill) else StopStage.TERMINATED
            slot = next((slot for slot in state.slots if slot.name == effect.slot), None)
            if slot is not None and slot.urged < urge:
                state = with_slot(state, replace(slot, urged=urge))
    return state


def _own_statuses(state: Roster) -> dict[SlotId, int]:
    """The exit statuses of processes, except those that Pliant's own signals ended."""
    found: dict[SlotId, int] = {}
    for slot in state.slots:
        if isinstance(slot.process, EndedProcess | Ending):
            status = slot.process.status
            terminated = status == -_SIGTERM and slot.urged >= StopStage.TERMINATED
            killed = status == -_SIGKILL and slot.urged >= StopStage.KILLED
            if not terminated and not killed:
                found[slot.name] = status
    return found


def _conclusion(state: Roster) -> RunOver:
    statuses = _own_statuses(state)
    if isinstance(state.stage, Stopping):
        stage = state.stage
        status = stage.status
        if status is None:
            status = statuses.get(stage.culprit) if stage.culprit is not None else None
            # A worker that failed but exits with status 0 or QUIET_EXIT must not make the whole run look successful.
            status = 1 if status in (None, 0, QUIET_EXIT) else status
        return RunOver(stage.reason, completed=False, exit_status=shell_status(status))
    for slot in state.slots:
        status = statuses.get(slot.name, 0)
        if slot.fate is SlotOutcome.FINISHED and status != 0:
            reason = f"{slot.name} failed after the training had ended ({ending(status)})"
            return RunOver(reason, completed=True, exit_status=shell_status(status))
    return RunOver(FINISHED, completed=True, exit_status=0)


def ending(status: int) -> str:
    """A wait status in words."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def shell_status(status: int) -> int:
    """The exit status that a shell reports for a wait status."""
    return 128 - status if status < 0 else status


def _alive(state: Roster) -> list[Slot]:
    return [slot for slot in state.slots if isinstance(slot.process, Alive)]


def _has_gone_silent(slot: Slot) -> bool:
    """Whether the slot still has the process that was a worker a moment ago, and that is not suspended."""
    return isinstance(slot.process, Alive) and slot.process.greeted and slot.away is None


def _is_going(state: Roster, slot: Slot) -> bool:
    return bool(slot.failure) or (slot.fate is not SlotOutcome.KEPT and worker_in(state, slot.name) is None)


def _hears(worker: SlotWorker | None) -> bool:
    return worker is not None and isinstance(worker.line, Connected)


def _is_owners(state: Roster, agent: AgentId) -> bool:
    owner = owner_of(state)
    return owner is not None and owner.name == agent
