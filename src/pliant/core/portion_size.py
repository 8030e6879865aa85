"""How much of the state a newcomer asks for at a time.

Question  How large may a portion be, if the gradients of all rounds that pass during its transfer must be kept?
Holds     Sizes are in bytes of gradients. A portion of g bytes that takes r rounds to transfer costs r·g bytes of kept
          gradients. The transfer rate is measured, and g is chosen so that this cost stays within half of the memory
          bound. A portion that proves too large is abandoned, and the next one is at most half of it. One tensor cannot
          be divided (optimizers update whole parameters), so it may always be requested. The memory bound never grows:
          it has room for two rounds of one tensor, and beyond that the newcomer waits.
Source    docs/design/0007-elastic.md ("Handing the state on").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

COPIES = 2
"""Memory bound for kept gradients, in copies of all gradients."""
SMALL_BYTES = 64 << 20
"""Least memory bound: with smaller models memory is not a concern."""

MOST = 0.5
"""Part of a portion: once this much has arrived, waiting for the rest is quicker than asking again."""


@dataclass(frozen=True, slots=True)
class Portions:
    """How much a newcomer may keep, and what it has measured about the connection to its donor."""

    at_most: int
    """bytes of gradients that may be kept"""
    largest: float = math.inf
    """largest portion to request, in bytes of gradients"""
    per_round: float = math.inf
    """bytes of gradients whose tensors arrive during one round; infinite: not known"""
    drops: bool = True
    """whether kept rounds may be dropped before it is known that the answer contains them"""

    def fits(self, size: int) -> bool:
        """Whether a portion with ``size`` bytes of gradients can be expected to arrive in time.

        One round is added to the transfer time: the donor copies the portion in it.
        """
        return size <= self.largest and (size / self.per_round + 1.0) * size <= self.at_most / 2

    def is_full(self, kept: int) -> bool:
        """Whether ``kept`` bytes are more than may be kept."""
        return kept > self.at_most


def portions(gradients: int) -> Portions:
    """The initial value for a model with ``gradients`` bytes of gradients."""
    return Portions(max(COPIES * gradients, SMALL_BYTES))


def arrived(before: Portions, size: int, rounds: int) -> Portions:
    """The value after a portion has arrived while ``rounds`` rounds were kept."""
    # A transfer within one round shows that the connection is fast, but not how fast.
    per_round = math.inf if rounds <= 1 else max(1.0, size / rounds)
    return replace(before, largest=max(1.0, 2.0 * before.largest), per_round=per_round)


def given_up(before: Portions, size: int, rounds: int, part: float) -> Portions:
    """The value after a portion of which only ``part`` had arrived when no more rounds could be kept."""
    return replace(before, largest=size / 2, per_round=max(1.0, size * part / max(1, rounds)))


def missed(before: Portions) -> Portions:
    """The value after a tensor arrived as of a round that was no longer kept: rounds are not dropped early again."""
    return replace(before, drops=False)
