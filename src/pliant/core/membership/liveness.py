"""Which workers are lost.

Question  Which worker has stopped taking part without saying so?
Holds     A process that is known to have ended is lost immediately. A closed connection counts after half a second, or
          sooner if another member's collective failed; missing heartbeats count after ``dead_after``. A worker whose
          main loop makes no progress while others wait is left out, and killed much later (``slowness``). A lost
          worker's name is never used again. While a coordinator is new, or was suspended, silence proves nothing.
Source    ours; docs/protocol.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from pliant.core.membership import slowness
from pliant.core.membership.events import Dismiss, Effect, Kill, Note, Refuse
from pliant.core.membership.roster import (
    COOLDOWN_S,
    Alive,
    Away,
    Connected,
    Departing,
    Disconnected,
    EraMember,
    Finishing,
    Gathering,
    Roster,
    Running,
    SlotOutcome,
    SlotWorker,
    Step,
    Stopping,
    listed,
    members_of,
    slot_of,
    with_slot,
    without_worker,
)

RECONNECT_S = 0.5
"""A worker that lives finds its coordinator again within a few tenths of a second."""

ASLEEP_S = 30.0
"""A silent process may wake up and come back by itself; after this long it is killed and started again."""

PROVEN_S = 60.0
"""A slot whose worker was a member for this long is started again as quickly as the first time."""


def lose(
    state: Roster,
    worker: SlotWorker,
    what: str,
    now_s: float,
    *,
    kind: str = "lost",
    kill: bool = False,
    away: Away | None = None,
    again: bool = True,
) -> Step:
    """Take a worker off the roster.

    ``what`` completes the sentence "w2 …"; ``kind`` is the kind of the note. ``kill``: kill its process. ``away``: its
    process lives and may come back. ``again``: the worker is told that it may come back.
    """
    if isinstance(state.stage, Stopping):
        return without_worker(state, worker.name), ()
    effects: list[Effect] = []
    if isinstance(worker.line, Connected):
        effects.append(Refuse(worker.line.peer, f"{worker.name} {what}; it may come back under a new name", again))
    state = without_worker(state, worker.name)
    slot = slot_of(state, worker.slot)
    assert slot is not None
    match worker.standing:
        case EraMember(since_s=since_s):
            text = f"{worker.name} {what}"
            if now_s - since_s >= PROVEN_S:
                slot = replace(slot, cooldown_s=COOLDOWN_S, errors=())
                state = with_slot(state, slot)
            state = replace(state, broken=state.broken or text, last_loss=(text, worker.slot))
            rest = [other.name for other, _ in members_of(state)]
            returns = "; it comes back when it is done" if away is not None and away.left_out else ""
            effects.append(Note(kind, f"{text}: {listed(rest)}{returns}", worker.name, quiet=not rest))
        case Departing():
            state = with_slot(state, replace(slot, fate=SlotOutcome.LEFT))
            effects.append(Note("left", f"{worker.name} left", worker.name))
        case _:
            pass
    if kill and isinstance(slot.process, Alive):
        effects.append(Kill(slot.agent, slot.name))
    now = slot_of(state, worker.slot)
    if away is not None and now is not None:
        state = with_slot(state, replace(now, away=away))
    return state, tuple(effects)


def judged(state: Roster, now_s: float) -> Step:
    """Take the lost workers off the roster, and kill processes that stayed away too long."""
    effects: tuple[Effect, ...] = ()
    if not isinstance(state.stage, Gathering | Running | Finishing) or now_s < state.patient_until_s:
        return state, ()
    others = slowness.others(state)
    for worker in state.workers:
        match worker.line, worker.standing:
            case Disconnected(since_s=since_s), standing:
                confirmed = isinstance(standing, EraMember) and _is_witnessed(state, worker)
                confirmed = confirmed and not _is_last_holder(state, worker)
                more: tuple[Effect, ...] = ()
                if confirmed or now_s - since_s >= RECONNECT_S:
                    state, more = lose(state, worker, "was lost (its connection closed)", now_s)
            case Connected(), EraMember() as member:
                state, more = _watched(state, others, worker, member, now_s)
            case Connected(peer=peer), Departing(since_s=since_s) if now_s - since_s > state.dead_after_s:
                # It does not know that its last era is over: the others left before it could see that.
                state, more = lose(state, replace(worker, line=Disconnected(now_s)), "left", now_s)
                more += (Dismiss(peer, "its last era is over", completed=True),)
            case _:
                more = ()
        if more:
            others = slowness.others(state)
            effects += more
    for slot in state.slots:
        if slot.away is not None and now_s > slot.away.kill_s:
            state = with_slot(state, replace(slot, away=None))
            effects += (Kill(slot.agent, slot.name),) if isinstance(slot.process, Alive) else ()
    return state, effects


def _watched(
    state: Roster, others: slowness.GroupProgress, worker: SlotWorker, member: EraMember, now_s: float
) -> Step:
    if now_s - worker.heard_s > state.dead_after_s:
        what = f"was lost (no sign of life for {state.dead_after_s:g} s)"
        return lose(state, worker, what, now_s, away=Away(now_s, now_s + ASLEEP_S))
    lasts_s = now_s - member.progress_s
    match slowness.judged(state, others, member, now_s):
        case slowness.SlownessVerdict.HUNG:
            what = f"was lost (hung: no progress for {lasts_s:.0f} s while others wait)"
            return lose(state, worker, what, now_s, kind="hung", kill=True)
        case slowness.SlownessVerdict.LEFT_OUT:
            why = member.busy or f"no progress for {lasts_s:.1f} s while others wait"
            away = Away(now_s, slowness.kill_s(state, member, now_s), left_out=True, busy=member.busy)
            return lose(state, worker, f"is left out ({why})", now_s, kind="left out", away=away)
        case slowness.SlownessVerdict.GOES_ON:
            return state, ()


def _is_witnessed(state: Roster, worker: SlotWorker) -> bool:
    """Whether another member's collective failed."""
    return any(member.failed for other, member in members_of(state) if other.name != worker.name)


def _is_last_holder(state: Roster, worker: SlotWorker) -> bool:
    """Whether no other member holds the state: then the run depends on this worker, and it gets time to reconnect."""
    return not any(member.is_active for other, member in members_of(state) if other.name != worker.name)
