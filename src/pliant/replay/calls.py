"""The calls of a replayed script.

Question  In which calls of ``batches`` and ``evaluate`` is the script, and what has come of them?
Holds     A call is over when the journal says that its phase has ended. The result of an ``evaluate`` is the run's;
          what the replay has added up itself is compared with it.
Source    docs/design/0012-replay.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pliant.core.group_state import FinishedPhase
from pliant.core.journal.records import PhaseEndRecord
from pliant.core.ledger import MicroBatch
from pliant.core.tickets import Kind, Sums
from pliant.replay.compare import Comparison


@dataclass(slots=True)
class ReplayedCall:
    """A call of ``batches`` or ``evaluate`` that the script is in."""

    kind: Kind
    phase: int
    result: float | None = None
    over: bool = False
    results: dict[str, float | None] | None = None
    total: float = 0.0
    count: float = 0.0
    sums: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    outputs: list[tuple[MicroBatch, bytes]] = field(default_factory=list[tuple[MicroBatch, bytes]])

    def measured(self, sums: Sums) -> None:
        """Add what an ``evaluate`` has measured on a micro-batch, by name."""
        for name, total, count in sums:
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = before[0] + total, before[1] + count

    def end(self, record: PhaseEndRecord) -> None:
        """The run's phase ended like this."""
        self.over, self.result, self.results = True, record.result, record.results or None

    @property
    def finished(self) -> FinishedPhase:
        """How it ended, as the script is told."""
        return FinishedPhase(self.kind, 0, self.result, results=self.results)

    def compare(self, comparison: Comparison, record: PhaseEndRecord, number: int) -> None:
        """Compare the means of an ``evaluate`` with those of the run; ``number``: of the last round."""
        if record.result is not None and self.count:
            comparison.result(self.total / self.count, record.result, number)
        for name, mean in record.results.items():
            total, count = self.sums.get(name, (0.0, 0.0))
            if mean is not None:
                comparison.result(total / count if count else math.nan, mean, number, name)
