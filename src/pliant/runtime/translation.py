"""Between the control channel's messages and the roster's values.

Question  Which event is a message, and how is the roster's state told in a word?
Holds     Nothing is decided here.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pliant.control import messages
from pliant.core import events, members
from pliant.core.journal import DriftLine, RoundRecord
from pliant.core.terms import Terms
from pliant.types import WorkerId

TEXT_LENGTH = 2000
"""Of a line for people: what a worker failed with may be a tensor in words."""


def last_name(slot: members.Slot) -> str:
    """The name of the slot's last worker, or of its first one to be."""
    return slot.name if slot.names <= 1 else f"{slot.name}.{slot.names}"


def word(slot: members.Slot, worker: members.Worker | None) -> str:
    """What a slot's worker is doing, in one word."""
    if worker is not None:
        match worker.line, worker.standing:
            case members.Cut(), _:
                return "lost"
            case _, members.Member(leaving=None):
                return "training"
            case _, (members.Member() | members.Departing()):
                return "leaving"
            case _, (members.Greeted() | members.Waiting()):
                return "waiting"
    if slot.fate is members.Fate.FINISHED:
        return "finished"
    if slot.fate is members.Fate.LEFT:
        return "left"
    if slot.fate is members.Fate.GIVEN_UP:
        return "failed"
    match slot.process:
        case members.Alive(greeted=False):
            return "starting"
        case members.Alive():
            return "lost"
        case members.Exited(restart_s=float()):
            return "restarting"
        case members.Ending() | members.Exited():
            return "ended"


def verdict(record: RoundRecord) -> str:
    """Why the delay is what it is, in a line."""
    named = {0: "without delay", 1: "with delay 1"}
    known = [
        f"{named[delay]} {harvest:.0%}"
        for delay, harvest in enumerate(record.harvests or ())
        if harvest is not None and delay in named
    ]
    return f"delay {record.delay} from round {record.round} on: of the workers' time is used {', '.join(known)}"


def drifted(drift: DriftLine, roster: Sequence[str]) -> list[tuple[str, str]]:
    """Whose weights differed and were healed, and that in a line; who is thrown out says so itself."""
    return [
        (
            roster[member],
            f"{roster[member]}'s weights differed from the others' after round {drift.round}: "
            f"it takes them over from {roster[drift.donor]}",
        )
        for member in drift.healed
        if max(member, drift.donor) < len(roster)
    ]


def arrival(peer: int, hello: messages.Hello) -> events.Arrived:
    """A worker introduces itself."""
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
    """A launcher introduces itself."""
    slots = tuple(events.SlotId(name) for name in enlist.slots)
    wanted = max(0, enlist.wanted)
    return events.AgentArrived(peer, events.AgentId(enlist.agent), enlist.version, slots, wanted, enlist.owner)


def terms(signature: messages.Signature) -> Terms:
    """What a worker brings."""
    parameters = tuple((name, tuple(shape), dtype) for name, shape, dtype in signature.parameters)
    return Terms(signature.version, parameters, tuple(sorted(signature.settings.items())))


def texts(workers: Iterable[WorkerId]) -> list[str]:
    """Names as they travel."""
    return [str(worker) for worker in workers]


def addressed(addresses: Mapping[WorkerId, str]) -> dict[str, str]:
    """Addresses as they travel."""
    return {str(name): address for name, address in addresses.items()}


def first_line(text: str) -> str:
    """The first line; the rest of a long message is in the worker's own output."""
    return printable(next(iter(text.strip().splitlines()), ""))


def printable(text: str) -> str:
    """What a terminal shows and does not obey, and not too much of it."""
    text = text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…"
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
