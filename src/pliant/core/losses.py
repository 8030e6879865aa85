"""Who is lost.

Question  Which worker does not take part any more, without having said so?
Holds     A process that is known to have ended is lost at once; a closed connection needs a second witness or half a
          second; silence needs ``dead_after``. A main loop that stands still counts as hung only while others wait
          for it. A lost worker's name never comes back. Within the patience of a new coordinator, or of one that was
          itself asleep, absence proves nothing.
Source    ours; docs/protocol.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from pliant.core.events import Dismiss, Effect, Kill, Note, Refuse
from pliant.core.members import (
    COOLDOWN_S,
    Alive,
    Connected,
    Cut,
    Departing,
    Fate,
    Finishing,
    Gathering,
    Member,
    Roster,
    Running,
    Step,
    Stopping,
    Worker,
    listed,
    members_of,
    slot_of,
    with_slot,
    without_worker,
)

RECONNECT_S = 0.5
"""A worker that lives finds its coordinator again within a few tenths of a second."""

HUNG_STEPS = 10
"""A main loop that takes so many times its usual step while others wait is hung."""

ASLEEP_S = 30.0
"""A process that was silent may wake up and come back by itself; after this long it is ended and started again."""

PROVEN_S = 60.0
"""A slot whose worker was a member for this long is started again as quickly as the first time."""


def lose(
    state: Roster,
    worker: Worker,
    what: str,
    now_s: float,
    *,
    kind: str = "lost",
    kill: bool = False,
    asleep: bool = False,
    again: bool = True,
) -> Step:
    """Take a worker off the roster; ``what`` completes "w2 …"."""
    if isinstance(state.stage, Stopping):
        return without_worker(state, worker.name), ()
    effects: list[Effect] = []
    if isinstance(worker.line, Connected):
        effects.append(Refuse(worker.line.peer, f"{worker.name} {what}; it may come back under a new name", again))
    state = without_worker(state, worker.name)
    slot = slot_of(state, worker.slot)
    assert slot is not None
    match worker.standing:
        case Member(since_s=since_s):
            text = f"{worker.name} {what}"
            if now_s - since_s >= PROVEN_S:
                slot = replace(slot, cooldown_s=COOLDOWN_S, errors=())
                state = with_slot(state, slot)
            state = replace(state, broken=state.broken or text, last_loss=(text, worker.slot))
            rest = [other.name for other, _ in members_of(state)]
            effects.append(Note(kind, f"{text}: {listed(rest)}", worker.name, quiet=not rest))
        case Departing():
            state = with_slot(state, replace(slot, fate=Fate.LEFT))
            effects.append(Note("left", f"{worker.name} left", worker.name))
        case _:
            pass
    if kill and isinstance(slot.process, Alive):
        effects.append(Kill(slot.agent, slot.name))
    now = slot_of(state, worker.slot)
    if asleep and now is not None:
        state = with_slot(state, replace(now, asleep_s=now_s))
    return state, tuple(effects)


def judged(state: Roster, now_s: float) -> Step:
    """Take off the roster whoever is lost."""
    effects: tuple[Effect, ...] = ()
    if not isinstance(state.stage, Gathering | Running | Finishing) or now_s < state.patient_until_s:
        return state, ()
    for worker in state.workers:
        match worker.line, worker.standing:
            case Cut(since_s=since_s), standing:
                confirmed = isinstance(standing, Member) and _is_witnessed(state, worker)
                more: tuple[Effect, ...] = ()
                if confirmed or now_s - since_s >= RECONNECT_S:
                    state, more = lose(state, worker, "was lost (its connection closed)", now_s)
            case Connected(), Member() as member:
                state, more = _watched(state, worker, member, now_s)
            case Connected(peer=peer), Departing(since_s=since_s) if now_s - since_s > state.dead_after_s:
                # It has not heard that its last era is over: the others went before it could see that.
                state, more = lose(state, replace(worker, line=Cut(now_s)), "left", now_s)
                more += (Dismiss(peer, "its last era is over", completed=True),)
            case _:
                more = ()
        effects += more
    for slot in state.slots:
        if slot.asleep_s is not None and now_s - slot.asleep_s > ASLEEP_S:
            state = with_slot(state, replace(slot, asleep_s=None))
            effects += (Kill(slot.agent, slot.name),) if isinstance(slot.process, Alive) else ()
    return state, effects


def _watched(state: Roster, worker: Worker, member: Member, now_s: float) -> Step:
    if now_s - worker.heard_s > state.dead_after_s:
        what = f"was lost (no sign of life for {state.dead_after_s:g} s)"
        return lose(state, worker, what, now_s, asleep=True)
    patience_s = max(state.dead_after_s, HUNG_STEPS * member.usual_s)
    busy = member.usual_s > 0 and not member.waiting and member.stopped_s is None
    if busy and now_s - member.progress_s > patience_s and _is_awaited(state, worker):
        what = f"was lost (no progress for {patience_s:g} s while others wait)"
        return lose(state, worker, what, now_s, kind="hung", kill=True)
    return state, ()


def _is_witnessed(state: Roster, worker: Worker) -> bool:
    """Whether another member's collective failed."""
    return any(member.failed for other, member in members_of(state) if other.name != worker.name)


def _is_awaited(state: Roster, worker: Worker) -> bool:
    return any(
        member.waiting or member.stopped_s is not None
        for other, member in members_of(state)
        if other.name != worker.name
    )
