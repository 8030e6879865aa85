"""What a worker knows about its contribution only after its last backward pass.

Question  Buckets are handed in during the last backward pass. How do the others learn what was not known at its start?
Holds     A list of numbers of the same length on all workers. Each worker fills in its own entries (and adds to those
          of the bitmap), so that an all-reduce gives every worker all entries. Tickets completed with them equal those
          of a contribution handed in after the backward pass.
Source    ours; docs/design/0015-parts.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pliant.core.tickets import Flag, Ticket

_EACH = 3
"""numbers per member: busy seconds, squared norm, whether loss or gradient is not finite"""


def nothing(members: int, bits: int) -> list[float]:
    """The list of a member without a contribution; ``bits``: the length of a ticket's bitmap."""
    return [0.0] * (_EACH * members + bits)


def written(
    members: int, place: int, bits: int, *, busy_s: float, squared_norm: float | None, bitmap: int
) -> list[float]:
    """The list of the member at index ``place``; ``squared_norm`` None: loss or gradient is not finite."""
    values = nothing(members, bits)
    norm = 0.0 if squared_norm is None else squared_norm
    values[_EACH * place : _EACH * (place + 1)] = [busy_s, norm, float(squared_norm is None)]
    for index in range(bits):
        values[_EACH * members + index] = float(bitmap >> index & 1)
    return values


def read(values: Sequence[float], gathered: Sequence[Ticket]) -> tuple[list[Ticket], int]:
    """The tickets completed with ``values``, the sum of all lists, and the union of the bitmaps."""
    tickets: list[Ticket] = []
    for place, ticket in enumerate(gathered):
        busy_s, squared_norm, unusable = values[_EACH * place : _EACH * (place + 1)]
        flags = ticket.flags | Flag.NONFINITE if unusable else ticket.flags
        tickets.append(replace(ticket, busy_s=busy_s, squared_norm=squared_norm, flags=flags))
    bits = values[_EACH * len(gathered) :]
    return tickets, sum(1 << index for index, count in enumerate(bits) if count)
