"""How much of the state a newcomer asks for at a time.

Question  How large may a portion be, so that the rounds that pass while it travels can be kept in little memory?
Holds     Sizes are those of the gradients. A portion of g bytes that travels for r rounds costs r·g bytes of kept
          gradients; what arrives per round is measured, so g is chosen such that this stays within half of what may be
          kept. A portion that proves too large is given up, and the next one is at most half of it. One tensor cannot
          be divided (optimizers update whole parameters): it is always small enough to be asked for. What may be kept
          never grows: two rounds of one tensor fit, and beyond that the newcomer waits.
Source    docs/design/0007-elastic.md ("Handing the state on").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

COPIES = 2
"""of all gradients: what may be kept"""
SMALL_BYTES = 64 << 20
"""may be kept in any case: models that are smaller than this need not be careful"""

MOST = 0.5
"""of a portion: once this is here it is quicker to wait for the rest than to ask again"""


@dataclass(frozen=True, slots=True)
class Portions:
    """What a newcomer may keep, and what it has learnt about its line to the donor."""

    at_most: int
    """bytes of gradients that may be kept"""
    largest: float = math.inf
    """gradients of the largest portion to ask for"""
    per_round: float = math.inf
    """how much of a portion, in bytes of gradients, arrives during one round; infinite: not known"""
    drops: bool = True
    """whether rounds may be dropped before it is known that the answer contains them"""

    def fits(self, size: int) -> bool:
        """Whether a portion with ``size`` bytes of gradients can be expected to arrive in time.

        One round more than it travels: that in which the donor copies it.
        """
        return size <= self.largest and (size / self.per_round + 1.0) * size <= self.at_most / 2

    def is_full(self, kept: int) -> bool:
        """Whether that is more than may be kept."""
        return kept > self.at_most


def portions(gradients: int) -> Portions:
    """Of a model with so many bytes of gradients."""
    return Portions(max(COPIES * gradients, SMALL_BYTES))


def arrived(before: Portions, size: int, rounds: int) -> Portions:
    """After a portion that has arrived while ``rounds`` rounds were kept."""
    # What arrives within a round says that the line is quick, but not how quick.
    per_round = math.inf if rounds <= 1 else max(1.0, size / rounds)
    return replace(before, largest=max(1.0, 2.0 * before.largest), per_round=per_round)


def given_up(before: Portions, size: int, rounds: int, part: float) -> Portions:
    """After a portion of which only ``part`` had arrived when no more rounds could be kept."""
    return replace(before, largest=size / 2, per_round=max(1.0, size * part / max(1, rounds)))


def missed(before: Portions) -> Portions:
    """After one tensor that came as of a round that was not kept any more: no round is dropped for it again."""
    return replace(before, drops=False)
