"""What a worker has accumulated since it last handed in.

Question  What will its next ticket say?
Holds     The loss is summed on its own device and read once, at hand-in: no micro-batch waits for a transfer.
"""

from __future__ import annotations

from torch import Tensor

from pliant.core.evaluation import Appendix
from pliant.core.tickets import Point, Sums


class Contribution:
    """Running sums; times are seconds of the worker's clock."""

    __slots__ = (
        "_ahead",
        "_early",
        "_early_round",
        "_late_round",
        "_loss",
        "_outputs",
        "_pending",
        "_sums",
        "cpu_start_s",
        "idle_s",
        "micro_batches",
        "samples",
        "start_s",
        "weight",
    )

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.idle_s = 0.0
        self.cpu_start_s = 0.0
        self.micro_batches = 0
        self.samples = 0
        self.weight = 0.0
        self._loss: Tensor | float = 0.0
        self._pending = 0
        self._early = self._early_round = self._late_round = 0
        self._ahead = False
        self._sums: dict[str, tuple[float, float]] = {}
        self._outputs: list[bytes] | None = None

    def draw(self, samples: int, cpu_s: float, settled: int = 0, *, ahead: bool = False) -> None:
        """A micro-batch is given to the user's loop. It counts as spent even if the loop skips it.

        ``settled``: the last settled round; ``ahead``: the model is at the look-ahead point.
        """
        if not self.micro_batches:
            self._early_round, self._ahead = settled, ahead
        # Only an update leaves a look-ahead point, whichever round numbers are void meanwhile.
        if ahead if self._ahead else settled == self._early_round:
            self._early += 1
        else:
            self._late_round = settled
        self.micro_batches += 1
        self.samples += samples
        self.cpu_start_s = cpu_s
        self._pending = samples

    def undraw(self) -> None:
        """The loop was left between the draw and ``backward``: take the micro-batch back."""
        if self._pending:
            self.micro_batches -= 1
            self.samples -= self._pending
            self._pending = 0

    def add(self, weight: float, loss_sum: Tensor | float) -> None:
        self.weight += weight
        self._pending = 0
        self._loss = self._loss + loss_sum

    def append(self, sums: Sums, output: bytes | None) -> None:
        """Add the further means and the outputs that ``evaluate`` has of a drawn micro-batch."""
        for name, total, count in sums:
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + count
        if output is not None:
            self._outputs = [*(self._outputs or ()), output]

    def appendix(self) -> Appendix:
        """What does not fit into its ticket."""
        sums = tuple((name, total, count) for name, (total, count) in self._sums.items())
        return Appendix(sums, None if self._outputs is None else tuple(self._outputs))

    def leave_out(self) -> None:
        """A backward pass has failed: the samples are spent, and nothing that was computed counts."""
        self.weight, self._loss, self._pending = 0.0, 0.0, 0

    def point(self, *, fresh: bool) -> Point:
        """At which weights it was computed; ``fresh``: it is handed in after the last settled round's update."""
        early = min(self._early, self.micro_batches)
        late_round = self._late_round if early < self.micro_batches else 0
        return Point(early, self._early_round, late_round, self._ahead, fresh, handed_in=True)

    def loss_total(self) -> float:
        return float(self._loss)
