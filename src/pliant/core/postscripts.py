"""What a worker knows of its contribution only when its last backward pass is over.

Question  How do the others learn what was not known yet when the ticket was handed in?
Holds     A list of numbers, as long on all workers, in which each fills in places of its own (and may add to those of
          the bitmap): added up, it says everybody's to everybody. With it the tickets are what they would have been.
Source    ours; docs/design/0015-parts.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pliant.core.tickets import Flag, Ticket

_EACH = 3
"""numbers of each member: busy seconds, squared norm, whether anything is not finite"""


def nothing(members: int, bits: int) -> list[float]:
    """Of one who only goes along; ``bits``: the length of a ticket's bitmap."""
    return [0.0] * (_EACH * members + bits)


def written(
    members: int, place: int, bits: int, *, busy_s: float, squared_norm: float | None, bitmap: int
) -> list[float]:
    """Of the member at ``place``; ``squared_norm`` None: something is not finite."""
    values = nothing(members, bits)
    norm = 0.0 if squared_norm is None else squared_norm
    values[_EACH * place : _EACH * (place + 1)] = [busy_s, norm, float(squared_norm is None)]
    for index in range(bits):
        values[_EACH * members + index] = float(bitmap >> index & 1)
    return values


def read(values: Sequence[float], gathered: Sequence[Ticket]) -> tuple[list[Ticket], int]:
    """The tickets with what was added to them, and the union of the bitmaps."""
    tickets: list[Ticket] = []
    for place, ticket in enumerate(gathered):
        busy_s, squared_norm, unusable = values[_EACH * place : _EACH * (place + 1)]
        flags = ticket.flags | Flag.NONFINITE if unusable else ticket.flags
        tickets.append(replace(ticket, busy_s=busy_s, squared_norm=squared_norm, flags=flags))
    bits = values[_EACH * len(gathered) :]
    return tickets, sum(1 << index for index, count in enumerate(bits) if count)
