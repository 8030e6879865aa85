"""Conversion between the messages of the control channel and the events and effects of the roster.

Question  Which event does a message become, which message an effect, and which word describes a worker's state?
Holds     Nothing is decided here.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import assert_never

from pliant.control import messages
from pliant.coordinator.status import MadeCall
from pliant.core.journal.records import DriftLine, RoundRecord
from pliant.core.membership import events
from pliant.core.membership import roster as members
from pliant.core.membership.compatibility import Terms
from pliant.types import WorkerId

TEXT_LENGTH = 2000
"""Longest line for people: a worker's error may contain a printed tensor."""

_BUSY_LETTERS = 100

LEAST_DEAD_AFTER_S = 0.1
"""Least ``dead_after`` that is accepted: below it every worker would be lost immediately."""


def last_name(slot: members.Slot) -> str:
    """The name of the slot's last worker, or of its first one if there was none yet."""
    return slot.name if slot.names <= 1 else f"{slot.name}.{slot.names}"


def word(slot: members.Slot, worker: members.SlotWorker | None, *, unreachable: bool = False) -> str:
    """The state of a slot's worker, in one word; ``unreachable``: no group can be formed with it."""
    if worker is not None:
        match worker.line, worker.standing:
            case members.Disconnected(), _:
                return "lost"
            case _, members.EraMember(leaving=None):
                return "unreachable" if unreachable else "training"
            case _, (members.EraMember() | members.Departing()):
                return "leaving"
            case _, (members.Greeted() | members.Waiting()):
                return "unreachable" if unreachable else "waiting"
    if slot.fate is members.SlotOutcome.FINISHED:
        return "finished"
    if slot.fate is members.SlotOutcome.LEFT:
        return "left"
    if slot.fate is members.SlotOutcome.GIVEN_UP:
        return "failed"
    match slot.process:
        case members.Alive(greeted=False):
            return "starting"
        case members.Alive() if slot.away is not None and slot.is_left_out:
            return f"busy: {slot.away.busy}" if slot.away.busy else "left out"
        case members.Alive():
            return "lost"
        case members.EndedProcess(restart_s=float()):
            return "restarting"
        case members.Ending() | members.EndedProcess():
            return "ended"


def verdict(record: RoundRecord) -> str:
    """One line about a decision on the delay, with the measured harvests."""
    named = {0: "without delay", 1: "with delay 1"}
    known = [
        f"{named[delay]} {harvest:.0%}"
        for delay, harvest in enumerate(record.harvests or ())
        if harvest is not None and delay in named
    ]
    return f"delay {record.delay} from round {record.round} on: of the workers' time is used {', '.join(known)}"


def drifted(drift: DriftLine, roster: Sequence[str]) -> list[tuple[str, str]]:
    """(worker, one line) for each worker that fetches the state again; an expelled one reports that itself."""
    return [
        (
            roster[member],
            f"{roster[member]}'s weights differed from the others' after round {drift.round}: "
            f"it takes them over from {roster[drift.donor]}",
        )
        for member in drift.healed
        if max(member, drift.donor) < len(roster)
    ]


def event(worker: WorkerId, message: messages.FromWorker, calls: Sequence[MadeCall]) -> events.OfWorker:
    """The event for a member's message; ``calls`` are those that the group has made."""
    match message:
        case messages.Ready():
            return _offer(worker, message, calls)
        case messages.Leaving(reason=reason):
            return events.Leaving(worker, first_line(reason))
        case messages.Stopped(era=era, exchange=exchange, active=active, failed=failed, whole=whole):
            return events.Stopped(worker, era, exchange, active, first_line(failed), whole)
        case messages.Unformed(era=era, unreached=unreached, connecting=connecting):
            return events.Unformed(worker, era, tuple(WorkerId(name) for name in unreached), connecting)
        case messages.Entered(era=era, exchange=exchange):
            return events.Entered(worker, era, exchange)
        case messages.Failed(reason=reason, fatal=fatal, own=own):
            return events.Failed(worker, first_line(reason) or "no reason given", fatal, own)
        case messages.Finished(left=left, over=over):
            return events.Finished(worker, left, over)
        case (
            messages.Hello() | messages.Put() | messages.Lines() | messages.Plan() | messages.Saved() | messages.Beat()
        ):
            raise AssertionError("not an event of the roster")
        case _:
            assert_never(message)


def beat(worker: WorkerId, m: messages.Beat) -> events.Heartbeat:
    """A heartbeat. Times come from the worker unchecked: negative, infinite and NaN values count as 0."""
    lasts_s, expected_s, pace, handoff_s = (
        value if 0.0 <= value < math.inf else 0.0 for value in (m.lasts_s, m.expected_s, m.pace, m.handoff_s)
    )
    return events.Heartbeat(
        worker,
        m.round,
        m.progress,
        m.waiting,
        m.usual_s,
        m.active,
        m.era,
        m.exchange,
        lasts_s,
        m.ending,
        first_line(m.busy)[:_BUSY_LETTERS],
        expected_s,
        pace,
        handoff_s,
    )


def _seconds(ready: messages.Ready, name: str, least_s: float) -> float | None:
    """A setting of the script in seconds; None if it is missing, not a number or below ``least_s``."""
    try:
        given_s = float(ready.signature.settings[name])
    except (KeyError, ValueError):
        return None
    return given_s if given_s >= least_s else None


def _offer(worker: WorkerId, ready: messages.Ready, calls: Sequence[MadeCall]) -> events.JoinRequested:
    length: int | None = None
    recorded: int | None = None
    call = ready.call
    # If the tasks differ, the group reports it when the call is made.
    if call is not None and 0 <= call.place < len(calls) and calls[call.place].task == call.task:
        length, recorded = call.length, calls[call.place].length
    dead_after_s = _seconds(ready, "dead_after", LEAST_DEAD_AFTER_S)
    hung_after_s = _seconds(ready, "hung_after", LEAST_DEAD_AFTER_S)
    return events.JoinRequested(
        worker, terms(ready.signature), ready.address, dead_after_s, hung_after_s, length, recorded
    )


def arrival(peer: int, hello: messages.Hello) -> events.Arrived:
    """The event for a worker's ``Hello``."""
    return events.Arrived(
        peer,
        events.SlotId(hello.slot),
        WorkerId(hello.worker),
        hello.version,
        hello.pid,
        hello.era,
        hello.exchange,
        hello.active,
        terms(hello.signature) if hello.signature is not None else None,
        hello.address,
    )


def enlistment(peer: int, enlist: messages.Enlist) -> events.AgentArrived:
    """The event for a launcher's ``Enlist``."""
    slots = tuple(events.SlotId(name) for name in enlist.slots)
    wanted = max(0, enlist.wanted)
    return events.AgentArrived(peer, events.AgentId(enlist.agent), enlist.version, slots, wanted, enlist.owner)


def agent_event(
    agent: events.AgentId, message: messages.Exited | messages.Interrupted | messages.Noticed
) -> events.Event:
    """The event for a message of a launcher that has introduced itself."""
    match message:
        case messages.Exited(slot=slot, pid=pid, status=status, error=error):
            return events.ProcessExited(agent, events.SlotId(slot), pid, status, first_line(error))
        case messages.Interrupted(signal=signal):
            return events.Interrupted(agent, signal)
        case messages.Noticed():
            return events.PreemptionNotice(agent)


def terms(signature: messages.Signature) -> Terms:
    """The terms in a worker's signature."""
    parameters = tuple((name, tuple(shape), dtype) for name, shape, dtype in signature.parameters)
    settings = tuple(sorted(signature.settings.items()))
    return Terms(signature.version, parameters, settings, signature.torch, signature.python, signature.device)


def started(effect: events.StartEra, term: int, written: int, last_round: int) -> messages.EraStart:
    """The message that starts an era; ``written`` records and rounds up to ``last_round`` are known."""
    return messages.EraStart(
        term,
        effect.era,
        effect.attempt,
        _texts(effect.roster),
        effect.donor,
        effect.exchange,
        _addressed(effect.addresses),
        written,
        list(effect.checkpoints),
        last_round,
    )


def planned(effect: events.PlanEra, term: int) -> messages.EraPlan:
    """The message that plans an era."""
    names, addresses = _texts(effect.roster), _addressed(effect.addresses)
    return messages.EraPlan(term, effect.era, effect.attempt, names, effect.donor, addresses)


def broken(effect: events.BreakEra, term: int) -> messages.Broken:
    """The message that ends the present era."""
    return messages.Broken(term, effect.era, effect.reason, effect.attempt, _texts(effect.roster))


def _texts(workers: Iterable[WorkerId]) -> list[str]:
    """Names in the form in which they are sent."""
    return [str(worker) for worker in workers]


def _addressed(addresses: Iterable[tuple[WorkerId, str]]) -> dict[str, str]:
    """Addresses in the form in which they are sent."""
    return {str(name): address for name, address in addresses}


def first_line(text: str) -> str:
    """The first line; the rest of a long message is in the worker's own output."""
    return printable(next(iter(text.strip().splitlines()), ""))


def printable(text: str) -> str:
    """The text without control characters, and cut to ``TEXT_LENGTH``."""
    text = text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…"
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
