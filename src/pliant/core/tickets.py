"""The small record that each worker hands in with its contribution.

Question  What does every worker learn about every other one in a round?
Holds     For a given model all tickets pack to the same number of bytes, and unpack without loss. So all workers
          gather the same records and reach the same decisions. The bitmap after a ticket says which parameters got a
          gradient (and which buffers changed).
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
    """it makes the buffers equal at the end of a phase"""


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
    """this worker draws no more; its positions go back to the pool"""
    READY = 16
    """a follower now holds the whole state and its script is in the phase: it computes from here on"""
    FOLLOWING = 32
    """this worker takes part without a vote: it does what the tickets of the others decide"""
    INNER = 64
    """an ``evaluate`` called in the body of a loop whose last round has just ended its phase"""
    GOING = 128
    """the planned era that the ticket names is without this worker; until then it may still compute"""


QUIET = Flag.NONE
"""Most tickets announce nothing. ``flags is QUIET`` is several times as fast as masking a flag."""


class Point(msgspec.Struct, frozen=True):
    """At which weights a contribution was computed; ``pliant replay`` computes it there again.

    The first micro-batches were computed at one point. If the worker's share grew when the contribution was due, the
    remaining ones were computed after the update, at the plain weights of a later round.
    """

    early: int = 0
    """micro-batches at the first point"""
    early_round: int = 0
    """the last settled round when the first of them was drawn (void numbers count)"""
    late_round: int = 0
    """the last settled round when the last of the remaining micro-batches was drawn; 0: there are none"""
    ahead: bool = False
    """the first point is the look-ahead from this worker's previous contribution"""
    fresh: bool = False
    """it was handed in after the update of the last settled round, not before it"""
    handed_in: bool = False

    @property
    def packed(self) -> tuple[int, int, int, int]:
        """The point as four numbers; the last one holds the three flags as bits."""
        bits = self.ahead | self.fresh << 1 | self.handed_in << 2
        return self.early, self.early_round, self.late_round, bits


def point(early: int, early_round: int, late_round: int, bits: int) -> Point:
    """The inverse of ``Point.packed``; raises ``ValueError`` on bits that it never returns."""
    if bits > 7:
        raise ValueError(f"{bits} does not say where a contribution was computed")
    return Point(early, early_round, late_round, bool(bits & 1), bool(bits & 2), bool(bits & 4))


NOWHERE = Point()
"""The point in a ticket that carries no contribution."""


Sums = tuple[tuple[str, float, float], ...]
"""name, sum and count of each mean that an ``evaluate`` measures"""


class Ticket(msgspec.Struct, frozen=True):
    """One worker's part of one round. Times are in seconds; the pace is ``samples`` / ``busy_s``."""

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
    """how long settling, applying and looking ahead took in its last round"""
    loss_sum: float = 0.0
    """weight times loss, summed; in ``evaluate`` the sum"""
    squared_norm: float = 0.0
    """squared norm of the contribution's mean gradient"""
    scale: float = 1.0
    """loss scale of mixed precision"""
    digest: int = 0
    """digest of the replicated state that this worker holds (``consistency.digest``)"""
    exchange: int = 0
    """exchanges this worker has settled"""
    plan_term: int = 0
    plan_era: int = 0
    """the planned era (and its coordinator's term) that this worker is prepared for; 0: it is prepared for no era"""
    momentum: float = -1.0
    """momentum in force now (a scheduler may change it); -1: the one agreed at ``join``"""
    measured_round: int = 0
    """last round whose mean-gradient norm was measured here; 0: not measured yet"""
    measured_norm: float = 0.0
    """the square of that norm, before clipping"""
    weights_round: int = 0
    """last round after which this worker took a digest of a part of its weights; 0: it has taken no digest yet"""
    weights: int = 0
    """that digest"""
    arithmetic: int = 0
    """checksum of the hardware and software it computes with: only workers with equal ones must have equal bits"""
    sketch: float = 0.0
    """sketch of that part of the weights, a number that rounding hardly changes; taken if some workers compute
    differently; 0: not taken"""
    appendix: int = 0
    """bytes of the appendix after this ticket (``evaluation.Appendix``)"""
    clip_norm: float = -1.0
    """the bound on the gradient's norm that the script has set; 0: no clipping; -1: the script has set nothing"""
    point: Point = NOWHERE
    trained: bytes = b""
    """the parameters that its contribution was computed for (``core.trained_set``)"""
    wanted: bytes = b""
    """the parameters that its script trains now"""
    sums: Sums = ()
    """taken from its appendix, once that has been read; not packed"""
    gathers: bool = False
    """taken from its appendix: whether it gathers outputs; not packed"""


_FIELDS = struct.Struct("<qqqBBqqqqqqqddddddddQqqqdqdqQQdqdqqqBII")


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
    """The inverse of ``pack``; raises ``ValueError`` on bytes that ``pack`` never returns."""
    if len(data) < _FIELDS.size:
        raise ValueError(f"{len(data)} bytes are no ticket")
    era, number, phase, kind, flags, *rest, first, second = _FIELDS.unpack_from(data)
    end, middle = len(data) - first - second, len(data) - second
    if end < _FIELDS.size:
        raise ValueError(f"a ticket of {len(data)} bytes has no room for sets of {first} and {second}")
    where, sets = point(*rest[-4:]), {"trained": data[end:middle], "wanted": data[middle:]}
    ticket = Ticket(era, number, phase, Kind(kind), Flag(flags), *rest[:-4], point=where, **sets)
    return ticket, int.from_bytes(data[_FIELDS.size : end], "little")
