"""What a worker has accumulated since it last handed in.

Question  What will its next ticket say?
Holds     The loss is added up on its own device and read once, at hand-in: no micro-batch waits for a transfer.
"""

from __future__ import annotations

from torch import Tensor


class Contribution:
    """Running sums; times are seconds of the worker's clock."""

    __slots__ = (
        "_loss",
        "_pending",
        "closed",
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

    def draw(self, samples: int, cpu_s: float) -> None:
        """A micro-batch is given to the user's loop. It counts as spent even if the loop passes over it."""
        self.micro_batches += 1
        self.samples += samples
        self.cpu_start_s = cpu_s
        self._pending = samples

    def undraw(self) -> None:
        """The loop was left between the draw and ``backward``: that micro-batch was not reached."""
        if self._pending:
            self.micro_batches -= 1
            self.samples -= self._pending
            self._pending = 0

    def add(self, weight: float, loss_sum: Tensor | float) -> None:
        self.weight += weight
        self._pending = 0
        self._loss = self._loss + loss_sum

    def loss_total(self) -> float:
        return float(self._loss)
