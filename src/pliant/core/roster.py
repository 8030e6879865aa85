"""Who takes part in a run, when its era starts and when it is over.

Question  Given what happened to the workers so far, which era runs, who is refused, and why does the run end?
Holds     Era and attempt numbers are given only here, only grow, and are never used twice. An era starts
          only when all its members agree on model, settings and version. Every run ends exactly once, after
          all its processes have. Whatever stops it, no process outlives two graces.
Source    ours; docs/protocol.md. The roster is fixed in this version: losing a worker ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from pliant.core.events import (
    Admit,
    Arrived,
    Beaten,
    ConnectionLost,
    Dismiss,
    Effect,
    Ended,
    Event,
    Failed,
    Finished,
    Hindered,
    Interrupted,
    Kill,
    Note,
    Offered,
    ProcessExited,
    Refuse,
    Release,
    StartEra,
    StopAll,
    Terminate,
    Tick,
)
from pliant.core.members import (
    Alive,
    Away,
    Broken,
    Cut,
    Done,
    Exited,
    Gathering,
    Greeted,
    Member,
    Over,
    Roster,
    Running,
    Stopping,
    Training,
    Urge,
    Waiting,
)
from pliant.core.terms import difference
from pliant.types import Era, WorkerId

QUIET_EXIT = 76
"""Exit status of a worker that ended because of others; 76 is EX_PROTOCOL, which no Python program uses."""

CONFIRM_S = 1.0
"""How long a closed connection waits for the process's exit status, and the other way round. The two
arrive within milliseconds of each other; the reason given to the user is better with both."""

GRACE_S = 5.0
"""Between asking a worker to stop, terminating it and killing it."""

Step = tuple[Roster, tuple[Effect, ...]]


def gathered(workers: Sequence[WorkerId], script: str, version: str, dead_after_s: float) -> Roster:
    """The state before anything happened."""
    members = tuple(Member(worker) for worker in sorted(workers, key=name_order))
    return Roster(script=script, version=version, members=members, dead_after_s=dead_after_s)


def name_order(worker: WorkerId) -> tuple[str, int, str]:
    """Sorts w10 behind w9."""
    letters = worker.rstrip("0123456789")
    digits = worker[len(letters) :]
    return letters, int(digits or "-1"), worker


def advance(state: Roster, event: Event, now_s: float) -> Step:
    """What the event changes and what is to be done about it. Times are any monotonic clock's."""
    if isinstance(state.stage, Over):
        return state, _farewell(event, state.stage.reason)
    state, effects = _take(state, event, now_s)
    for judge in (_judged, _started, _urged, _settled):
        state, more = judge(state, now_s)
        effects += more
    return state, effects


def member_of(state: Roster, worker: WorkerId) -> Member | None:
    """None for a name that is not expected."""
    return next((member for member in state.members if member.worker == worker), None)


def _take(state: Roster, event: Event, now_s: float) -> Step:
    match event:
        case Arrived():
            return _arrived(state, event, now_s)
        case Interrupted():
            return _interrupted(state, event, now_s)
        case Hindered(reason=reason):
            stopped = isinstance(state.stage, Stopping)
            return (state, ()) if stopped else _stop(state, reason, now_s, status=1)
        case Tick():
            return state, ()
        case Offered() | Beaten() | Failed() | Finished() | ConnectionLost() | ProcessExited():
            member = member_of(state, event.worker)
            return _heard(state, member, event, now_s) if member is not None else (state, ())
        case _:
            assert_never(event)


def _heard(
    state: Roster,
    member: Member,
    event: Offered | Beaten | Failed | Finished | ConnectionLost | ProcessExited,
    now_s: float,
) -> Step:
    match event, member.link:
        case ProcessExited(status=status), _:
            if isinstance(member.process, Exited):
                return state, ()
            return _with(state, replace(member, process=Exited(status, now_s))), ()
        case Offered(terms=terms, dead_after_s=dead_after_s), Greeted(peer=peer):
            state = _with(state, replace(member, link=Waiting(peer, terms)))
            return replace(state, dead_after_s=dead_after_s or state.dead_after_s), ()
        case Beaten(round=number, progress=progress), Training(peer=peer):
            return _with(state, replace(member, link=Training(peer, now_s, number, progress))), ()
        case Finished(), Training():
            return _with(state, replace(member, link=Done())), (Release(member.worker),)
        case Finished(), Greeted() | Waiting():
            return _with(state, replace(member, link=Broken("left pliant.join before training began"))), (
                Release(member.worker),
            )
        case Failed(reason=reason), Greeted() | Waiting() | Training():
            return _with(state, replace(member, link=Broken(reason))), (Release(member.worker),)
        case ConnectionLost(), Greeted() | Waiting() | Training():
            return _with(state, replace(member, link=Cut(now_s))), ()
        case _:
            # A message that overtook its worker's end, or was sent out of turn, changes nothing.
            return state, ()


def _arrived(state: Roster, event: Arrived, now_s: float) -> Step:
    if isinstance(state.stage, Stopping):
        return state, (Dismiss(event.peer, state.stage.reason),)
    member = member_of(state, event.worker)
    if member is None:
        names = ", ".join(m.worker for m in state.members)
        reason = f"no worker named {event.worker} is expected here, only {names}; let `pliant run -n` start it"
        return state, (Refuse(event.peer, reason), Note(f"refused a connection: {reason}"))
    match member.link:
        case Away():
            pass
        case Done():
            reason = f"{event.worker} has already left this run; call pliant.join once per script"
            return state, (Refuse(event.peer, reason),)
        case Greeted() | Waiting() | Training() | Broken() | Cut():
            reason = f"there is already a worker named {event.worker}; call pliant.join once per process"
            return state, (Refuse(event.peer, reason),)
        case _:
            assert_never(member.link)
    if event.version != state.version:
        reason = (
            f"{event.worker} runs Pliant {event.version} but the coordinator {state.version}; "
            "install the same version for all"
        )
        state = _with(state, replace(member, link=Broken(reason)))
        return state, (Refuse(event.peer, reason),)
    return _with(state, replace(member, link=Greeted(event.peer))), (Admit(event.peer, event.worker),)


def _interrupted(state: Roster, event: Interrupted, now_s: float) -> Step:
    alive = _alive(state)
    match state.stage:
        case Stopping(urge=Urge.TERMINATED | Urge.KILLED):
            # The second Ctrl-C of an impatient user.
            stage = replace(state.stage, urge=Urge.KILLED, since_s=now_s)
            return replace(state, stage=stage), tuple(Kill(worker) for worker in alive)
        case _:
            reason = "interrupted (Ctrl-C)" if event.signal == 2 else f"ended by signal {event.signal}"
            stage = Stopping(reason, Urge.TERMINATED, now_s, status=128 + event.signal)
            state = replace(state, stage=stage)
            return state, (StopAll(reason), *(Terminate(worker) for worker in alive))


def _judged(state: Roster, now_s: float) -> Step:
    """Stop the run if a worker is lost or failed."""
    if not isinstance(state.stage, Gathering | Running):
        return state, ()
    for member in state.members:
        trouble = _trouble(state, member, now_s)
        if trouble is not None:
            reason, status = trouble
            state, effects = _stop(state, reason, now_s, culprit=member.worker, status=status)
            silent = isinstance(member.link, Training) and isinstance(member.process, Alive)
            # Who is silent or stopped would not hear anything gentler.
            return state, (*effects, Kill(member.worker)) if silent else effects
    return state, ()


def _trouble(state: Roster, member: Member, now_s: float) -> tuple[str, int | None] | None:
    """Why the run cannot go on because of this worker, and the exit status where it is not the worker's."""
    match member.link, member.process:
        case Done(), _:
            return None
        case Broken(reason=reason), _:
            return (reason if reason.startswith(member.worker) else f"{member.worker} failed: {reason}"), None
        case Away(), Exited(status=0):
            return (
                f"{state.script} never called pliant.join: {member.worker} ended without joining; "
                "wrap the training loop in `with pliant.join(model, optimizer, batch=…) as run:`"
            ), 1
        case Away(), Exited(status=status):
            return f"{member.worker} ended before it called pliant.join ({ending(status)})", None
        case Away(), Alive():
            return None
        case Cut(), Exited(status=status):
            return _gone(member.worker, status), None
        case Cut(since_s=since_s), Alive():
            confirmed = now_s - since_s >= CONFIRM_S
            return (_lost(member.worker, "its connection closed"), 1) if confirmed else None
        case ((Greeted() | Waiting() | Training()), Exited(status=status, since_s=since_s)):
            confirmed = now_s - since_s >= CONFIRM_S
            return (_gone(member.worker, status), None) if confirmed else None
        case ((Greeted() | Waiting()), Alive()):
            return None
        case Training(beat_s=beat_s), Alive():
            silent = now_s - beat_s > state.dead_after_s
            why = f"no sign of life for {state.dead_after_s:g} s"
            return (_lost(member.worker, why), 1) if silent else None


def _gone(worker: WorkerId, status: int) -> str:
    if status < 0:
        return _lost(worker, ending(status))
    if status == QUIET_EXIT:
        return _lost(worker, "its connection closed")
    return (
        f"{worker} ended in the middle of the run ({ending(status)}); "
        "let the script reach the end of its `with pliant.join(…)` block"
    )


def _lost(worker: WorkerId, why: str) -> str:
    return f"{worker} was lost ({why}): the roster is fixed, so the run ends; its last output is in logs/{worker}.log"


def ending(status: int) -> str:
    """A wait status in words."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def _started(state: Roster, now_s: float) -> Step:
    """Start the first era once everybody is ready and agrees."""
    if not isinstance(state.stage, Gathering):
        return state, ()
    ready = [(m.worker, m.link) for m in state.members]
    offers = [(worker, link) for worker, link in ready if isinstance(link, Waiting)]
    differs = difference([(worker, link.terms) for worker, link in offers])
    if differs is not None:
        return _stop(state, differs, now_s, status=1)
    if len(offers) < len(state.members):
        return state, ()
    era, attempt = Era(state.last_era + 1), state.last_attempt + 1
    members = tuple(
        replace(member, link=Training(link.peer, now_s))
        for member, (_, link) in zip(state.members, offers, strict=True)
    )
    roster = tuple(member.worker for member in members)
    state = replace(state, members=members, stage=Running(era, attempt), last_era=era, last_attempt=attempt)
    return state, (StartEra(era, attempt, roster),)


def _stop(state: Roster, reason: str, now_s: float, culprit: WorkerId | None = None, status: int | None = None) -> Step:
    """Ask the connected to stop; the others cannot hear, so they are terminated."""
    deaf = [
        member.worker for member in state.members if isinstance(member.process, Alive) and isinstance(member.link, Away)
    ]
    stage = Stopping(reason, Urge.ASKED, now_s, culprit, status)
    return replace(state, stage=stage), (StopAll(reason), *(Terminate(worker) for worker in deaf))


def _urged(state: Roster, now_s: float) -> Step:
    """Become firmer with every grace that passes."""
    match state.stage:
        case Stopping(urge=Urge.ASKED, since_s=since_s) if now_s - since_s >= GRACE_S:
            stage = replace(state.stage, urge=Urge.TERMINATED, since_s=now_s)
            return replace(state, stage=stage), tuple(Terminate(worker) for worker in _alive(state))
        case Stopping(urge=Urge.TERMINATED, since_s=since_s) if now_s - since_s >= GRACE_S:
            stage = replace(state.stage, urge=Urge.KILLED, since_s=now_s)
            return replace(state, stage=stage), tuple(Kill(worker) for worker in _alive(state))
        case _:
            return state, ()


def _settled(state: Roster, now_s: float) -> Step:
    """End the run when all processes have ended and nothing they said is still on the way."""
    for member in state.members:
        match member.process, member.link:
            case Alive(), _:
                return state, ()
            case Exited(since_s=since_s), Greeted() | Waiting() | Training():
                if now_s - since_s < CONFIRM_S:
                    return state, ()
            case Exited(), Away() | Done() | Broken() | Cut():
                pass
    over = _conclusion(state)
    return replace(state, stage=over), (Ended(over.reason, over.completed, over.exit_status),)


def _conclusion(state: Roster) -> Over:
    statuses = {m.worker: m.process.status for m in state.members if isinstance(m.process, Exited)}
    if isinstance(state.stage, Stopping):
        stage = state.stage
        status = stage.status
        if status is None and stage.culprit is not None:
            status = statuses.get(stage.culprit)
        # A worker that failed and still exits 0 or quietly must not make the whole run look well.
        status = 1 if status in (None, 0, QUIET_EXIT) else status
        return Over(stage.reason, completed=False, exit_status=shell_status(status))
    for worker, status in statuses.items():
        if status != 0:
            reason = f"{worker} failed after the training had ended ({ending(status)})"
            return Over(reason, completed=True, exit_status=shell_status(status))
    return Over("finished", completed=True, exit_status=0)


def shell_status(status: int) -> int:
    """What a shell would report for a wait status."""
    return 128 - status if status < 0 else status


def _farewell(event: Event, reason: str) -> tuple[Effect, ...]:
    return (Dismiss(event.peer, reason),) if isinstance(event, Arrived) else ()


def _alive(state: Roster) -> list[WorkerId]:
    return [member.worker for member in state.members if isinstance(member.process, Alive)]


def _with(state: Roster, member: Member) -> Roster:
    members = tuple(member if m.worker == member.worker else m for m in state.members)
    return replace(state, members=members)
