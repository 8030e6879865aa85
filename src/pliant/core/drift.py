"""Which workers' weights differ from the others'.

Question  Which worker's weights differ, and does it fetch the state again or leave the run?
Holds     Pure: all workers name the same ones from the same tickets. Only digests of the same part of the weights after
          the same round are compared. Workers with the same arithmetic must agree bit by bit, others within a tolerance
          by a sketch. The majority is right; in a tie the group with the first member of the roster is. Some member is
          always right, so the state is never lost.
Source    ours; docs/design/0013-drift.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pliant.core.tickets import Flag, Ticket
from pliant.types import WorkerId

EVERY = 32
"""Rounds between two digests. At the start there are more (rounds 1, 2, 4, 8, 16, of all weights), because most errors
of a script show from the first round on."""

PARTS = 2
"""Each digest covers one part of the weights in turn (all weights if the model is small). So a difference is seen
within 64 rounds, and a round reads 1/64 of the weights on average; an update reads and writes all of them several
times."""

FORGIVEN = 1
"""How often a worker may fetch the state again. A second difference is not an accident."""

TOLERANCE = 0.02
"""How far apart the sketches of workers that compute differently may be, relative to the norm of the weights. Rounding
moves them far less; a layer that was never made equal, or that one worker trains alone, moves them much more."""

_SILENT = Flag.FOLLOWING | Flag.LEAVING


class Drift(msgspec.Struct, frozen=True):
    """Some workers' weights differ from those that are taken to be right."""

    round: int
    """the round after which they differed"""
    digests: tuple[tuple[int, int, int], ...]
    """(member, arithmetic, digest) of all that were compared"""
    healed: tuple[int, ...]
    """members that fetch the state again"""
    expelled: tuple[int, ...]
    """members that have differed before, and must leave"""
    donor: int
    """the first member whose weights are right"""
    sketches: tuple[float, ...] = ()
    """sketches of all that were compared, if some compute differently"""

    @property
    def named(self) -> tuple[int, ...]:
        """All whose weights differ."""
        return tuple(sorted((*self.healed, *self.expelled)))


def is_due(number: int, every: int) -> bool:
    """Whether a digest is taken after round ``number``; ``every`` 0: never."""
    early = 0 < number < every and number & (number - 1) == 0
    return every > 0 and (early or number % every == 0)


def turn(number: int, every: int) -> int | None:
    """Running number of the part of the weights that the digest after round ``number`` covers; None: all weights."""
    return None if number < every else number // every


def are_unlike(tickets: Sequence[Ticket]) -> bool:
    """Whether some members compute differently from others, so that only their sketches can be compared."""
    first = tickets[0].arithmetic
    return any(ticket.arithmetic != first and not ticket.flags & _SILENT for ticket in tickets)


def judged(
    roster: Sequence[WorkerId],
    active: Iterable[int],
    tickets: Sequence[Ticket],
    offences: Mapping[WorkerId, int],
) -> Drift | None:
    """Which of the ``active`` members differ, by the digests in these tickets; None: none of them."""
    speaking = [m for m in active if tickets[m].weights_round > 0 and not tickets[m].flags & _SILENT]
    if len(speaking) < 2:
        return None
    last = max(tickets[member].weights_round for member in speaking)
    known = [member for member in speaking if tickets[member].weights_round == last]
    differing: list[int] = []
    donor = len(roster)
    for arithmetic in {tickets[member].arithmetic for member in known}:
        alike = [member for member in known if tickets[member].arithmetic == arithmetic]
        # ``Counter`` keeps the roster's order, so the first of equal counts wins.
        right, _ = Counter(tickets[member].weights for member in alike).most_common(1)[0]
        wrong = [member for member in alike if tickets[member].weights != right]
        differing += wrong
        if wrong:
            donor = min(donor, next(member for member in alike if tickets[member].weights == right))
    believed, apart = _compared([member for member in known if member not in differing], tickets)
    differing += apart
    if apart:
        donor = min(donor, believed)
    if not differing:
        return None
    return Drift(
        round=last,
        digests=tuple((member, tickets[member].arithmetic, tickets[member].weights) for member in known),
        healed=tuple(m for m in sorted(differing) if offences.get(roster[m], 0) < FORGIVEN),
        expelled=tuple(m for m in sorted(differing) if offences.get(roster[m], 0) >= FORGIVEN),
        donor=donor,
        sketches=tuple(tickets[member].sketch for member in known) if any(tickets[m].sketch for m in known) else (),
    )


def _compared(known: Sequence[int], tickets: Sequence[Ticket]) -> tuple[int, list[int]]:
    """Compare the sketches of workers that compute differently: the first member that is right, and the members whose
    sketch is too far from its."""
    known = [member for member in known if tickets[member].sketch]

    def near(member: int) -> list[int]:
        here = tickets[member].sketch
        return [other for other in known if abs(tickets[other].sketch - here) <= TOLERANCE]

    if len({tickets[member].arithmetic for member in known}) < 2:
        return 0, []
    # As with digests: the majority is right, in a tie the one that is first in the roster.
    believed = max(known, key=lambda member: (len(near(member)), -member))
    return believed, [member for member in known if member not in near(believed)]
