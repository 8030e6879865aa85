"""The outputs that an ``evaluate`` has gathered.

Question  Which outputs of the settled exchanges does this worker hold?
Holds     It holds those of exchanges that it has settled itself, each micro-batch once. Outputs that were handed in and
          lost, or settled before this worker came or while it was away, are missing: a worker that needs them computes
          them again.
Source    ours; docs/design/0017-evaluate.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pliant.core.evaluation import Appendix
from pliant.core.ledger import MicroBatch
from pliant.types import Span


class Outputs:
    """The outputs of one phase at a time, as bytes."""

    def __init__(self) -> None:
        self._phase = 0
        self._found: list[tuple[MicroBatch, bytes]] = []

    def add(self, phase: int, drawn: Iterable[Sequence[MicroBatch]], appendices: Iterable[Appendix]) -> None:
        """An exchange of ``phase`` is settled; ``drawn``: what each member may have drawn, the handed-in ones first."""
        if phase != self._phase:
            self._phase, self._found = phase, []
        for queue, appendix in zip(drawn, appendices, strict=True):
            self._found += zip(queue, appendix.outputs or (), strict=False)

    def forget(self) -> None:
        self._phase, self._found = 0, []

    def taken(self, phase: int) -> list[tuple[MicroBatch, bytes]]:
        """The outputs of ``phase``; they are not kept here any longer."""
        found = self._found if phase == self._phase else []
        self.forget()
        return found


def missing(found: Iterable[MicroBatch], length: int, size: int) -> list[MicroBatch]:
    """The positions below ``length`` that are not in ``found``, in micro-batches of ``size`` at most."""
    lacking: list[Span] = []
    end = 0
    for start, stop in sorted(span for micro_batch in found for span in micro_batch):
        if start > end:
            lacking.append((end, start))
        end = max(end, stop)
    if end < length:
        lacking.append((end, length))
    return [((at, min(at + size, stop)),) for start, stop in lacking for at in range(start, stop, size)]
