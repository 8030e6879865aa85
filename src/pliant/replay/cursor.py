"""A position in a trace.

Question  Which item comes next, and which micro-batch does the script's loop body compute now?
Holds     Items are taken one after another, each once. Segments that were laid out are drawn before the next item.
Source    docs/design/0012-replay.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from pliant.core.journal.trace import (
    Bodies,
    Item,
    Opened,
    PhaseEnded,
    Segment,
    Trace,
    TracedContribution,
    TracedExchange,
    TraceStart,
)
from pliant.core.ledger import MicroBatch
from pliant.errors import UsageError

# How many micro-batches the loader may read in advance.
_AHEAD = 64


class TraceCursor:
    """Follows the script through the items."""

    def __init__(self, items: list[Item]) -> None:
        self._items = items
        self._cursor = 0
        self._waiting: list[Segment] = []
        """segments that are laid out and have not begun"""
        self._stretch: Segment | None = None
        """the segment that the script is in; its remaining micro-batches are in ``_left``"""
        self._left: list[MicroBatch] = []
        self.part: TracedContribution | None = None
        """the contribution whose micro-batch was drawn last"""
        self.computed = True
        """whether ``backward`` was called for that micro-batch, or none was drawn"""

    # -- items

    def rest(self) -> Iterator[Item]:
        """The items from here on; each one counts as taken when it is yielded."""
        return self.up_to(len(self._items))

    def up_to(self, place: int) -> Iterator[Item]:
        """The items before index ``place``, in the same way."""
        while self._cursor < place:
            self._cursor += 1
            yield self._items[self._cursor - 1]

    def to_come(self) -> Iterator[Item]:
        """The items from here on, without taking them."""
        return itertools.islice(self._items, self._cursor, None)

    # -- loop bodies

    def lay_out(self, stretches: Iterable[Segment]) -> None:
        """Set the segments that are to be computed next."""
        self._waiting = [stretch for stretch in stretches if stretch.micro_batches]

    @property
    def is_laid_out(self) -> bool:
        """Whether there are segments that have not begun."""
        return bool(self._waiting)

    @property
    def is_under_way(self) -> bool:
        """Whether a micro-batch is left to be drawn before the next item."""
        return bool(self._left or self._waiting)

    def begun(self) -> Segment | None:
        """Begin the next segment and return it; None inside one."""
        if self._left:
            return None
        self._stretch = self._waiting.pop(0)
        self._left = list(self._stretch.micro_batches)
        return self._stretch

    def drawn(self) -> MicroBatch:
        """Take the next micro-batch of the segment."""
        assert self._stretch is not None
        self.part, self.computed = self._stretch.part, False
        return self._left.pop(0)

    def leave_body(self) -> bool:
        """Note that the script's loop body has run; returns whether it was the last one of its segment."""
        self.computed = True
        if self._left or self._stretch is None:
            return False
        self._stretch = self.part = None
        return True

    def upcoming(self, phase: int) -> tuple[MicroBatch, ...]:
        """The micro-batches that will be drawn next in the innermost call, which is that of ``phase``."""
        found = list(self._left)
        for stretch in self._waiting:
            found += stretch.micro_batches
        nested = 0
        for item in self.to_come():
            if len(found) >= _AHEAD or (isinstance(item, PhaseEnded) and item.record.phase == phase):
                break
            match item:
                case Opened():
                    nested += 1
                case PhaseEnded():
                    nested -= 1
                case Bodies() if not nested:
                    found += [mb for stretch in item.stretches for mb in stretch.micro_batches]
                case TracedExchange() if not nested:
                    found += [mb for part in item.parts for mb in part.micro_batches]
                case _:
                    pass
        return tuple(found[:_AHEAD])


def start_before(score: Trace, since: int, there: Collection[str]) -> TraceStart:
    """The last checkpoint up to round ``since`` that a replay can start from; ``there``: names that still exist."""
    for start in reversed(score.starts):
        if start.checkpoint.round <= since and start.checkpoint.name in there:
            return start
    possible = ", ".join(str(s.checkpoint.round) for s in score.starts if s.checkpoint.name in there)
    raise UsageError(
        f"there is no checkpoint up to round {since} to start from. The journal names {score.checkpoints}; in "
        f"{score.checkpoints - len(score.starts)} of them something was under way that was computed before (with "
        "delay 1 it always is, but in an epoch's first round), and of the others there are now those of rounds: "
        f"{possible or 'none'}"
    )
