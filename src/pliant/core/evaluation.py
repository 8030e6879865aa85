"""What ``evaluate`` measures in addition to one sum and one count.

Question  How do several sums become several means, with each sample counted once?
Holds     A contribution's sums and outputs travel in an *appendix* to its ticket, in the same exchange: they count
          if and only if its samples do. All workers measure the same names, and every worker adds up the same numbers
          in the same order. The leading name is ``loss`` if there is one, else the first.
Source    ours; docs/design/0017-evaluate.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from pliant.core.consistency import Mismatch
from pliant.core.tickets import Sums, Ticket
from pliant.types import WorkerId

MAX_NAMES = 100
"""Means in one ``evaluate``: they are journaled with every exchange."""
MAX_NAME_LENGTH = 100
"""The same limit as for all names in the journal."""


class Appendix(msgspec.Struct, frozen=True, array_like=True):
    """What a contribution to an ``evaluate`` sends in addition to its ticket."""

    sums: Sums = ()
    outputs: tuple[bytes, ...] | None = None
    """the encoded outputs of each of its micro-batches; None: outputs are not gathered"""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Appendix)


def packed(appendix: Appendix) -> bytes:
    """The appendix as bytes; empty if there is nothing to send."""
    return _encoder.encode(appendix) if appendix.sums or appendix.outputs is not None else b""


def unpacked(data: bytes) -> Appendix:
    """The inverse of ``packed``; raises ``ValueError`` on bytes that ``packed`` never returns."""
    return _decoder.decode(data) if data else Appendix()


def read(tickets: Sequence[Ticket], appendices: Sequence[Appendix]) -> list[Ticket]:
    """The tickets with the contents of their appendices."""
    return [
        replace(ticket, sums=appendix.sums, gathers=appendix.outputs is not None)
        if appendix.sums or appendix.outputs is not None
        else ticket
        for ticket, appendix in zip(tickets, appendices, strict=True)
    ]


def leading(names: Sequence[str]) -> str:
    """The name whose mean is the single result in the journal, and the one a scheduler is given."""
    return "loss" if "loss" in names else names[0]


def compared(known: Sums, roster: Sequence[WorkerId], tickets: Sequence[Ticket]) -> Mismatch | None:
    """A mismatch if contributions measure different names, or names other than the phase's so far (``known``)."""
    computed = [(worker, ticket) for worker, ticket in zip(roster, tickets, strict=True) if ticket.micro_batches]
    if not computed:
        return None
    leader, first = computed[0]
    names = _names(known) if known else _names(first.sums)
    for worker, ticket in computed:
        if _names(ticket.sums) != names:
            return Mismatch(
                f"evaluate's measure returned {_said(ticket.sums)} on {worker}, and {_said(known or first.sums)} "
                f"{'before' if known else f'on {leader}'}: return the same names for every micro-batch on all workers"
            )
        if ticket.gathers != first.gathers:
            return Mismatch(
                f"evaluate gathers outputs on one of {leader} and {worker} only: give gather= the same value on all"
            )
    return None


def added(sums: Sums, tickets: Sequence[Ticket]) -> Sums:
    """The sums of a phase after an exchange."""
    found = [ticket.sums for ticket in tickets if ticket.sums]
    if not found:
        return sums
    before = {name: (total, count) for name, total, count in sums}
    return tuple(
        (
            name,
            _added(before.get(name, (0.0, 0.0))[0], [each[place][1] for each in found]),
            _added(before.get(name, (0.0, 0.0))[1], [each[place][2] for each in found]),
        )
        for place, (name, _, _) in enumerate(found[0])
    )


def _added(before: float, values: Sequence[float]) -> float:
    # fsum raises on inf - inf; a plain sum in the order of the roster is also the same on all workers.
    return before + (math.fsum(values) if all(map(math.isfinite, values)) else sum(values))


def means(sums: Sums) -> dict[str, float | None] | None:
    """The means by name, None for one that is undefined. None instead of a dict if there are no names."""
    if not sums:
        return None
    return {name: _finite(total / count) if count else None for name, total, count in sums}


def differences(recorded: Mapping[str, float | None], decided: Mapping[str, float | None] | None) -> list[str]:
    """Where a journal's results differ from those of the decision code. A result that is not finite is journaled as
    None, and not compared."""
    decided = decided or {}
    if list(recorded) != list(decided):
        return [f"results are of {', '.join(recorded) or 'nothing'}, not {', '.join(decided) or 'nothing'}"]
    return [
        f"result {name} is {mean!r}, the decision code says {decided[name]!r}"
        for name, mean in recorded.items()
        if mean is not None and mean != decided[name]
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _names(sums: Sums) -> tuple[str, ...]:
    return tuple(name for name, _, _ in sums)


def _said(sums: Sums) -> str:
    return f"{{{', '.join(_names(sums))}}}" if sums else "no dict"
