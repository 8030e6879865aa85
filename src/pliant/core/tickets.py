"""The small record that travels beside each contribution.

Question  What does every worker learn about every other one in a round?
Holds     A ticket packs to the same number of bytes for a given model, bit for bit, so that all workers
          gather equal records and decide alike. The bitmap behind it says which parameters got a gradient
          (and which buffers changed).
Source    DESIGN: "the tickets are the log of a replicated state machine".
"""

from __future__ import annotations

import enum
import struct

import msgspec


class Kind(enum.IntEnum):
    """What a worker is doing when it hands in a ticket."""

    TRAIN = 0
    EVALUATE = 1
    END = 2
    DRAIN = 3
    """making the buffers equal at the end of a phase"""


class Flag(enum.IntFlag):
    """What a ticket can announce."""

    NONE = 0
    OPENING = 1
    """no contribution yet: the worker has just entered the phase"""
    NONFINITE = 2
    """loss or gradient is infinite or undefined: the group skips the update"""
    BREAK = 4
    """the user's loop was left early: the phase ends after this round"""
    LEAVING = 8
    """this worker draws no more; its hand goes back to the pool"""
    READY = 16
    """a follower that holds the whole state now, and whose script is in the phase: it computes from here on"""
    FOLLOWING = 32
    """this worker has nothing to say: it goes along with whatever the others do"""
    INNER = 64
    """an ``evaluate`` called in the body of a loop whose last round has just ended its phase"""
    GOING = 128
    """the planned era that the ticket names is without this worker, though it may still compute"""


QUIET = Flag.NONE
"""Most tickets announce nothing, and asking whether ``flags is QUIET`` takes a fraction of the time of masking one."""


class Point(msgspec.Struct, frozen=True):
    """Where in the weights a contribution was computed; ``pliant replay`` goes there again.

    Its first micro-batches were computed at one point. The rest, if any, at the plain weights of a later round: its
    share grew when it was due, and was made up after the update.
    """

    early: int = 0
    """micro-batches at the first point"""
    early_round: int = 0
    """the last settled round when the first of them was drawn (void numbers count)"""
    late_round: int = 0
    """the same for the last one of the rest; 0: there is no rest"""
    ahead: bool = False
    """the first point is the look-ahead from this worker's contribution before this one"""
    fresh: bool = False
    """it was handed in after the update of the last settled round, not on the way to it"""
    handed_in: bool = False

    @property
    def packed(self) -> tuple[int, int, int, int]:
        bits = self.ahead | self.fresh << 1 | self.handed_in << 2
        return self.early, self.early_round, self.late_round, bits


def point(early: int, early_round: int, late_round: int, bits: int) -> Point:
    """The inverse of ``Point.packed``; raises ``ValueError`` on what that never gives."""
    if bits > 7:
        raise ValueError(f"{bits} does not say where a contribution was computed")
    return Point(early, early_round, late_round, bool(bits & 1), bool(bits & 2), bool(bits & 4))


NOWHERE = Point()
"""of a ticket that goes along"""


Sums = tuple[tuple[str, float, float], ...]
"""name, sum and count of each mean that an ``evaluate`` measures"""


class Ticket(msgspec.Struct, frozen=True):
    """One worker's part of one round. Times are seconds, ``pace`` follows from samples and ``busy_s``."""

    era: int
    round: int
    phase: int
    kind: Kind
    flags: Flag = Flag.NONE
    epoch: int = 0
    length: int = 0
    """samples in the dataset of this phase"""
    order: int = 0
    """checksum of the order in which its samples are taken"""
    size: int = 1
    """largest micro-batch of this worker"""
    ahead: int = 0
    """micro-batches its loader wants to know in advance"""
    micro_batches: int = 0
    samples: int = 0
    weight: float = 0.0
    """the mean's denominator: samples or tokens; in ``evaluate`` the count"""
    busy_s: float = 0.0
    """time spent on this contribution, waiting excluded"""
    idle_s: float = 0.0
    sum_s: float = 0.0
    """how long the worker's last summation took from hand-in to completion"""
    cost_s: float = 0.0
    """what settling, applying and looking ahead took in its last round"""
    loss_sum: float = 0.0
    """weight times loss, summed; in ``evaluate`` the sum"""
    squared_norm: float = 0.0
    """of the contribution's mean gradient"""
    scale: float = 1.0
    digest: int = 0
    """of the replicated state this worker holds"""
    exchange: int = 0
    """exchanges this worker has settled"""
    plan_term: int = 0
    plan_era: int = 0
    """the planned era (and its coordinator's term) that this worker is prepared for; 0: none"""
    momentum: float = -1.0
    """in force now, as a scheduler may move it; -1: as agreed"""
    measured_round: int = 0
    """the last round the norm of whose mean gradient this worker has taken; 0: none"""
    measured_norm: float = 0.0
    """that norm, squared, before clipping"""
    weights_round: int = 0
    """the last round after which this worker has taken a digest of a part of its weights; 0: none"""
    weights: int = 0
    """that digest"""
    arithmetic: int = 0
    """what it computes with, as a checksum: only workers with the same one must have the same bits"""
    sketch: float = 0.0
    """of that part of its weights, where somebody computes otherwise: a number that rounding hardly moves; 0: none"""
    appendix: int = 0
    """bytes that this worker has to say behind its ticket (``measures.Appendix``)"""
    clip_norm: float = -1.0
    """the bound on the gradient's norm that the script has set; 0: none is wanted; -1: it has set nothing"""
    point: Point = NOWHERE
    trained: bytes = b""
    """the parameters that its contribution was computed for (``core.trained_set``)"""
    wanted: bytes = b""
    """those that its script trains now"""
    sums: Sums = ()
    """as its appendix says, where that has been read; not packed"""
    gathers: bool = False
    """likewise: whether it gathers outputs"""


_FIELDS = struct.Struct("<qqqBBqqqqqqqddddddddQqqqdqdqQQdqdqqqBII")


def packed_size(bits: int, sets: int = 0) -> int:
    """Bytes of a ticket whose bitmap has ``bits`` bits, with sets of so many bytes together."""
    return _FIELDS.size + (bits + 7) // 8 + sets


def pack(ticket: Ticket, bitmap: int, bits: int) -> bytes:
    """The ticket and its bitmap as bytes; ``unpack`` gives both back exactly."""
    head = _FIELDS.pack(
        ticket.era,
        ticket.round,
        ticket.phase,
        ticket.kind,
        ticket.flags,
        ticket.epoch,
        ticket.length,
        ticket.order,
        ticket.size,
        ticket.ahead,
        ticket.micro_batches,
        ticket.samples,
        ticket.weight,
        ticket.busy_s,
        ticket.idle_s,
        ticket.sum_s,
        ticket.cost_s,
        ticket.loss_sum,
        ticket.squared_norm,
        ticket.scale,
        ticket.digest,
        ticket.exchange,
        ticket.plan_term,
        ticket.plan_era,
        ticket.momentum,
        ticket.measured_round,
        ticket.measured_norm,
        ticket.weights_round,
        ticket.weights,
        ticket.arithmetic,
        ticket.sketch,
        ticket.appendix,
        ticket.clip_norm,
        *ticket.point.packed,
        len(ticket.trained),
        len(ticket.wanted),
    )
    return head + bitmap.to_bytes((bits + 7) // 8, "little") + ticket.trained + ticket.wanted


def unpack(data: bytes) -> tuple[Ticket, int]:
    """The inverse of ``pack``; raises ``ValueError`` on what no worker packs."""
    if len(data) < _FIELDS.size:
        raise ValueError(f"{len(data)} bytes are no ticket")
    era, number, phase, kind, flags, *rest, first, second = _FIELDS.unpack_from(data)
    end, middle = len(data) - first - second, len(data) - second
    if end < _FIELDS.size:
        raise ValueError(f"a ticket of {len(data)} bytes has no room for sets of {first} and {second}")
    where, sets = point(*rest[-4:]), {"trained": data[end:middle], "wanted": data[middle:]}
    ticket = Ticket(era, number, phase, Kind(kind), Flag(flags), *rest[:-4], point=where, **sets)
    return ticket, int.from_bytes(data[_FIELDS.size : end], "little")
