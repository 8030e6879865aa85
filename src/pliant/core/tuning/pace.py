"""How fast each worker is, measured by its tickets.

Question  How many samples per second does each worker compute, and how long does a round take?
Holds     Pure functions of the tickets, the same on all workers: sums are exactly rounded, because the result of
          Python's ``sum`` of floats depends on its version. Waiting never counts as slowness.
Source    ours; docs/design/0002-rounds.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.core.tickets import Ticket

# Each round halves the weight of the older ones: a device that slows down is followed within two or three
# rounds, and a single noisy round moves a share by half of its error.
_KEEP = 0.5
# A change of pace by more than this factor is not noise (throttled or shared device): the new value replaces the old.
_ANOTHER_DEVICE = 1.4
# Factor on a slow worker's busy time after an exchange in which it was dealt nothing.
_FORGIVING = 0.8


class Pace(msgspec.Struct, frozen=True):
    """Decaying sums of one worker's samples and busy seconds; their ratio is its pace."""

    samples: float = 0.0
    busy_s: float = 0.0

    @property
    def samples_per_s(self) -> float | None:
        """None before the first contribution."""
        return self.samples / self.busy_s if self.busy_s > 0 and self.samples > 0 else None


class Pacing(msgspec.Struct, frozen=True):
    """What the group knows about its speed in one kind of phase."""

    members: tuple[Pace, ...]
    round_s: float = 0.0
    """how long a round takes the worker that takes longest"""
    sum_s: float = 0.0
    """how long a summation takes once the last worker has handed in"""
    cost_s: float = 0.0
    """time that a round costs every worker in addition to computing: update, look-ahead, hand-in"""

    def paces(self) -> tuple[float, ...]:
        """Samples per second of each worker; an unmeasured one counts as the mean of the others."""
        paces = [m.samples_per_s for m in self.members]
        known = [pace for pace in paces if pace is not None]
        mean = math.fsum(known) / len(known) if known else 1.0
        return tuple([pace or mean for pace in paces])

    @property
    def measured(self) -> bool:
        """Whether the pace of any worker is known."""
        return any(m.samples_per_s is not None for m in self.members)


def unmeasured(members: int) -> Pacing:
    """The pacing before any worker has been measured."""
    return Pacing(members=(Pace(),) * members)


def seated(pacing: Pacing, places: Sequence[int | None]) -> Pacing:
    """The same figures for another order or a subset of members; None in ``places`` stands for a new member."""
    if len(places) == len(pacing.members) and all(place == index for index, place in enumerate(places)):
        return pacing
    return replace(pacing, members=tuple(Pace() if place is None else pacing.members[place] for place in places))


def measure(pacing: Pacing, tickets: Sequence[Ticket]) -> Pacing:
    """The pacing after one more round."""
    members = tuple([_measured(old, ticket) for old, ticket in zip(pacing.members, tickets, strict=True)])
    working = [ticket for ticket in tickets if ticket.samples > 0]
    if not working:
        return pacing
    round_s = max([ticket.busy_s + ticket.idle_s for ticket in working])
    # The last worker to hand in waits only for the summation; all others also wait for that worker.
    sum_s = min([ticket.sum_s for ticket in tickets])
    cost_s = math.fsum(ticket.cost_s for ticket in tickets) / len(tickets)
    return Pacing(
        members,
        round_s=_follow(pacing.round_s, round_s),
        sum_s=_follow(pacing.sum_s, sum_s),
        cost_s=_follow(pacing.cost_s, cost_s),
    )


def forgiven(pacing: Pacing, tickets: Sequence[Ticket]) -> Pacing:
    """Raise the pace of slow members that were dealt no samples a little, up to the mean.

    Otherwise one bad measurement (a short ``evaluate`` in which it had to wait) would leave a worker without samples
    forever.
    """
    paces = pacing.paces()
    mean = math.fsum(paces) / len(paces)
    members = tuple(
        Pace(member.samples, max(_FORGIVING * member.busy_s, member.samples / mean))
        if ticket.samples == 0 and (member.samples_per_s or mean) < mean
        else member
        for member, ticket in zip(pacing.members, tickets, strict=True)
    )
    return pacing if members == pacing.members else replace(pacing, members=members)


def _measured(old: Pace, ticket: Ticket) -> Pace:
    if ticket.samples == 0 or ticket.busy_s <= 0:
        return old
    new = Pace(float(ticket.samples), ticket.busy_s)
    before, after = old.samples_per_s, new.samples_per_s
    if before is not None and after is not None:
        change = after / before
        if 1 / _ANOTHER_DEVICE < change < _ANOTHER_DEVICE:
            return Pace(_KEEP * old.samples + new.samples, _KEEP * old.busy_s + new.busy_s)
    return new


def _follow(old: float, new: float) -> float:
    return new if old == 0.0 else _KEEP * old + (1.0 - _KEEP) * new
