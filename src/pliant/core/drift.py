"""Whose weights are not those of the others.

Question  Which worker's weights differ, and what becomes of it?
Holds     Pure: all workers name the same ones from the same tickets. Only digests of the same part of the weights after
          the same round are compared, bit by bit among workers that compute alike, by a sketch with a tolerance among
          others. The majority is right; where it is a
          tie, whoever of the tied stands first in the roster. Somebody is always believed, so the state is never lost.
Source    ours; docs/design/0013-drift.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pliant.core.tickets import Flag, Ticket
from pliant.types import WorkerId

EVERY = 32
"""Rounds from one digest to the next. At the start there are more (rounds 1, 2, 4, 8, 16, of all weights): what a
script gets wrong, it mostly gets wrong from the first round on."""

PARTS = 2
"""A digest is of one part of the weights (of all of them where they are few), the next one of the next part. So a
difference is seen within 64 rounds, and a round reads 1/64 of the weights on average, where its update reads and writes
all of them several times."""

FORGIVEN = 1
"""How often a worker takes the state over again. A second difference is no accident."""

TOLERANCE = 0.02
"""By how much sketches of workers that compute differently may differ: rounding moves weights by far less of their
norm, a layer that was never made equal, or that one worker trains alone, by much more."""

_SILENT = Flag.FOLLOWING | Flag.LEAVING


class Drift(msgspec.Struct, frozen=True):
    """Some workers' weights differ from those that are believed."""

    round: int
    """after which they differed"""
    digests: tuple[tuple[int, int, int], ...]
    """(member, arithmetic, digest) of all that were compared"""
    healed: tuple[int, ...]
    """members that take the state over again"""
    expelled: tuple[int, ...]
    """members for which it is not the first time"""
    donor: int
    """the first member that is believed"""
    sketches: tuple[float, ...] = ()
    """of those that were compared, where they compute differently"""

    @property
    def named(self) -> tuple[int, ...]:
        """All whose weights differ."""
        return tuple(sorted((*self.healed, *self.expelled)))


def is_due(number: int, every: int) -> bool:
    """Whether a digest is taken after round ``number``; ``every`` 0: never."""
    early = 0 < number < every and number & (number - 1) == 0
    return every > 0 and (early or number % every == 0)


def turn(number: int, every: int) -> int | None:
    """Which part of the weights it is of, counted on and on; None: of all of them."""
    return None if number < every else number // every


def are_unlike(tickets: Sequence[Ticket]) -> bool:
    """Whether some of those who speak compute otherwise than others: their digests say nothing, sketches do."""
    first = tickets[0].arithmetic
    return any(ticket.arithmetic != first and not ticket.flags & _SILENT for ticket in tickets)


def judged(
    roster: Sequence[WorkerId],
    active: Iterable[int],
    tickets: Sequence[Ticket],
    offences: Mapping[WorkerId, int],
) -> Drift | None:
    """Who of the ``active`` members differs, by the digests that these tickets bring."""
    speaking = [m for m in active if tickets[m].weights_round > 0 and not tickets[m].flags & _SILENT]
    if len(speaking) < 2:
        return None
    last = max(tickets[member].weights_round for member in speaking)
    known = [member for member in speaking if tickets[member].weights_round == last]
    differing: list[int] = []
    donor = len(roster)
    for arithmetic in {tickets[member].arithmetic for member in known}:
        alike = [member for member in known if tickets[member].arithmetic == arithmetic]
        # Counted in the roster's order; of equal counts the first one is the answer.
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
    """Of workers that compute differently: the first one that is believed, and whose sketch is apart from its."""
    known = [member for member in known if tickets[member].sketch]

    def near(member: int) -> list[int]:
        here = tickets[member].sketch
        return [other for other in known if abs(tickets[other].sketch - here) <= TOLERANCE]

    if len({tickets[member].arithmetic for member in known}) < 2:
        return 0, []
    # As with digests: the majority, and of equal ones whoever stands first in the roster.
    believed = max(known, key=lambda member: (len(near(member)), -member))
    return believed, [member for member in known if member not in near(believed)]
