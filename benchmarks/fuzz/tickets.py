"""Tickets of a fixed length from a member whose memory, or whose network, cannot be trusted.

Question  Is what a worker gathers either a ticket or refused?
Holds     ``unpack`` gives a ticket that packs to the same bytes, or raises ``ValueError``. Only members of a group
          reach it, and always with the length that was agreed on.
Source    ours; docs/reliability.md.
"""

from random import Random

from benchmarks.fuzz.mutation import bent
from benchmarks.fuzz.surface import Volley
from pliant.core.tickets import Flag, Kind, Ticket, pack, packed_size, unpack

BITS = 21
_TICKETS = [
    pack(Ticket(1, 2, 3, Kind.TRAIN, Flag.NONE, 1, 96, 7, 8, 2, 3, 24, 24.0, 0.1, 0.2, 0.3, 0.4, 2.4, 1.5), 5, BITS),
    pack(Ticket(9, 0, 1, Kind.EVALUATE, Flag.OPENING | Flag.READY, digest=2**64 - 1), 0, BITS),
    pack(Ticket(2**62, 2**40, 2, Kind.DRAIN, Flag.LEAVING, loss_sum=float("inf"), momentum=0.9), 2**BITS - 1, BITS),
]


class TicketSurface:
    """Bytes against a worker's reading of its peers."""

    name = "ticket"

    def fire(self, chance: Random) -> Volley:
        """A few tickets, mostly of the right length."""
        volley = Volley()
        size = packed_size(BITS)
        for _ in range(32):
            data = bent(chance, chance.choice(_TICKETS), _TICKETS)
            if chance.random() < 0.9:
                data = data[:size].ljust(size, b"\x00")
            try:
                ticket, bitmap = unpack(data)
            except ValueError:
                volley.count(accepted=False)
                continue
            again = pack(ticket, bitmap, 8 * (len(data) - packed_size(0, len(ticket.trained + ticket.wanted))))
            if again != data:
                raise AssertionError(f"{data.hex()} is read as {ticket}")
            volley.count(accepted=True)
        return volley

    def close(self) -> None: ...
