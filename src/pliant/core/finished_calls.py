"""The calls of ``batches`` and ``evaluate`` that the group has finished.

Question  What is the result of call number n, for a newcomer whose script makes it later? There may be 100 000 calls.
Holds     An immutable value: adding a call returns another one, and both share all but a few blocks. Adding and looking
          up take the same time for any number of calls. Over the network it is a list of the calls from some number on.
Source    Persistent vectors (Bagwell, 2000, "Ideal hash trees", as in Clojure); docs/design/0019-order.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from pliant.core.tickets import Kind

WIDTH = 32
"""Calls in a block, and blocks in a larger block: adding a call copies at most this many references per level."""


class FinishedPhase(msgspec.Struct, frozen=True):
    """A finished phase: the result of the same call in a newcomer's script."""

    kind: Kind
    epoch: int
    result: float | None = None
    inner: bool = False
    """called in the body of the loop before it, whose phase had ended: a newcomer does not make this call"""
    results: dict[str, float | None] | None = None
    """if ``evaluate`` measures several means: each by its name, None for one that is undefined"""


class FinishedCall(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A finished top-level call, in the form in which it is sent."""

    kind: Kind
    epoch: int
    result: float | None = None
    results: dict[str, float | None] | None = None
    inner: tuple[FinishedPhase, ...] = ()
    """phases that were opened in the last body of its loop, after it had ended"""

    @property
    def past(self) -> FinishedPhase:
        return FinishedPhase(self.kind, self.epoch, self.result, results=self.results)


class FinishedCalls(msgspec.Struct, frozen=True):
    """The finished top-level calls, in their order."""

    count: int = 0
    last: tuple[FinishedCall, ...] = ()
    """the last calls, at most ``WIDTH``"""
    blocks: tuple[tuple[Any, ...], ...] = ()
    """earlier calls by level, smallest blocks first: blocks of calls, blocks of blocks, and so on"""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> FinishedPhase:
        return self.call(number).past

    def call(self, number: int) -> FinishedCall:
        """Call ``number``; a negative one counts from the end."""
        left = number + self.count if number < 0 else number
        if not 0 <= left < self.count:
            raise IndexError(f"call {number} of {self.count}")
        for level in range(len(self.blocks), 0, -1):
            held = len(self.blocks[level - 1]) * WIDTH**level
            if left < held:
                node: Any = self.blocks[level - 1]
                for below in range(level, -1, -1):
                    node = node[left // WIDTH**below % WIDTH]
                return node
            left -= held
        return self.last[left]

    @property
    def epoch(self) -> int:
        """The epoch of the last call; -1 if there are no calls. Epoch numbers only grow."""
        return self.call(-1).epoch if self.count else -1

    @property
    def ended_inside(self) -> bool:
        """Whether the phase that ended last was opened in a loop body after the loop's own phase had ended."""
        return self.count > 0 and bool(self.call(-1).inner)

    def since(self, number: int) -> list[FinishedCall]:
        """The calls from ``number`` on."""
        return [self.call(each) for each in range(number, self.count)]

    def added(self, past: FinishedPhase) -> FinishedCalls:
        """The calls with one more; an inner phase belongs to the call before it."""
        if not past.inner:
            return self.joined([FinishedCall(past.kind, past.epoch, past.result, past.results)])
        if not self.count:
            return self
        call = self.call(-1)
        return self.up_to(self.count - 1).joined([replace(call, inner=(*call.inner, past))])

    def joined(self, calls: Iterable[FinishedCall]) -> FinishedCalls:
        """The calls with these added."""
        count, last, blocks = self.count, list(self.last), list(self.blocks)
        for call in calls:
            if len(last) == WIDTH:
                _carry(blocks, tuple(last))
                last = []
            count += 1
            last.append(call)
        return FinishedCalls(count, tuple(last), tuple(blocks))

    def up_to(self, number: int) -> FinishedCalls:
        """The calls before ``number``."""
        if number >= self.count - len(self.last):
            return replace(self, count=min(number, self.count), last=self.last[: number - self.count + len(self.last)])
        return FinishedCalls().joined(self.call(each) for each in range(number))


def _carry(blocks: list[tuple[Any, ...]], full: tuple[Any, ...]) -> None:
    """Add a full block to the others of its size; ``WIDTH`` blocks become one block of the next size."""
    for level, others in enumerate(blocks):
        if len(others) + 1 < WIDTH:
            blocks[level] = (*others, full)
            return
        blocks[level], full = (), (*others, full)
    blocks.append((full,))


NONE = FinishedCalls()


def calls_of(pasts: Sequence[FinishedPhase]) -> FinishedCalls:
    """The calls of a list of phases, in which inner phases follow their call."""
    calls = NONE
    for past in pasts:
        calls = calls.added(past)
    return calls
