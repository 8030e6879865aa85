"""Tickets of a fixed length from a member whose memory, or whose network, cannot be trusted.

Question  Is what a worker gathers either a ticket or refused?
Holds     ``unpack`` gives a ticket that packs to the same bytes, or raises ``ValueError``. Only members of a group
          reach it, and always with the length that was agreed on.
Source    ours; docs/reliability.md.
"""

from random import Random

from benchmarks.fuzz.mutation import bent
from benchmarks.fuzz.surface import Volley
from pliant.core.tickets import Flag, Kind, Ticket, pack, unpack

BITS = 21
_TICKETS = [
    pack(Ticket(1, 2, 3, Kind.TRAIN, Flag.NONE, 1, 96, 7, 8, 2, 3, 24, 24.0, 0.1, 0.2, 0.3, 0.4, 2.4, 1.5), 5, BITS),
    pack(Ticket(9, 0, 1, Kind.EVALUATE, Flag.OPENING | Flag.READY, digest=2**64 - 1), 0, BITS),
    pack(Ticket(2**62, 2**40, 2, Kind.DRAIN, Flag.LEAVING, loss_sum=float("inf"), momentum=0.9), 2**BITS - 1, BITS),
]
_BYTES = len(_TICKETS[0])
_HEAD_BYTES = _BYTES - (BITS + 7) // 8


class TicketSurface:
    """Bytes against a worker's reading of its peers."""

    name = "ticket"

    def fire(self, chance: Random) -> Volley:
        """A few tickets, mostly of the right length."""
        volley = Volley()
        for _ in range(32):
            data = bent(chance, chance.choice(_TICKETS), _TICKETS)
            if chance.random() < 0.9:
                data = data[:_BYTES].ljust(_BYTES, b"\x00")
            try:
                ticket, bitmap = unpack(data)
            except ValueError:
                volley.count(accepted=False)
                continue
            sets = len(ticket.trained + ticket.wanted)
            again = pack(ticket, bitmap, 8 * (len(data) - _HEAD_BYTES - sets))
            if again != data:
                raise AssertionError(f"{data.hex()} is read as {ticket}")
            volley.count(accepted=True)
        return volley

    def close(self) -> None: ...
