"""A request for a part of the state, and the rounds that are kept until it is answered.

Question  What has the group done since the exchange that the requested tensors will be of?
Holds     Only gradients of requested parameters are kept, and their bytes are counted. Rounds up to the exchange of the
          answer are dropped as soon as that exchange is known. The last round that was dropped for lack of memory is
          remembered: an answer of an earlier exchange cannot be used.
Source    docs/design/0007-elastic.md ("Handing the state on").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pliant.tensors.gradients import FlatGradients


@dataclass(slots=True)
class KeptRound:
    """One settled round, as far as requested tensors need it."""

    exchange: int
    gradients: dict[int, Tensor]
    kept: FlatGradients | None
    """the whole buffer, if all of its gradients are needed"""
    size: int
    """bytes of gradients"""
    factor: float
    hyper: list[dict[str, Any]]
    """the hyper-parameters that the schedule had set"""
    applied: bool
    finite: bool
    scheduled: tuple[float, float]
    """the samples that the schedule had counted before and after it"""


@dataclass(slots=True)
class KeptResult:
    """A top-level ``evaluate`` that ended: a schedule may follow it."""

    exchange: int
    result: float


@dataclass(slots=True)
class PortionRequest:
    """A request that is not answered yet."""

    as_of: int
    """the tensors come as of this exchange or a later one"""
    want: list[str]
    size: int
    """bytes of gradients of one round"""
    since: list[KeptRound | KeptResult] = field(default_factory=list[KeptRound | KeptResult])
    """rounds and results after ``as_of``"""
    answer: tuple[int, Mapping[str, Any]] | None = None
    """(exchange, parts) that have arrived while the donor was ahead of this worker"""
    rounds: int = 0
    """how many were applied meanwhile"""
    dropped: int = 0
    """the last exchange whose gradients are not kept any more"""
    drained: int = 0
    """the last exchange that made the buffers equal"""

    @property
    def parameters(self) -> list[int]:
        return self._of("p")

    @property
    def constants(self) -> list[int]:
        return self._of("c")

    @property
    def buffers(self) -> list[int]:
        return self._of("b")

    def _of(self, kind: str) -> list[int]:
        return [int(name[1:]) for name in self.want if name.startswith(kind)]

    @property
    def kept_bytes(self) -> int:
        """Bytes of gradients that are kept now."""
        return sum(each.size for each in self.since if isinstance(each, KeptRound))

    def answered_as_of(self, exchange: int) -> None:
        """The answer is of this exchange: what came before is not needed."""
        self.since = [each for each in self.since if each.exchange > exchange]

    def drop_oldest(self) -> bool:
        """Drop the oldest round with gradients; False if there is none."""
        oldest = next((each for each in self.since if isinstance(each, KeptRound) and each.size), None)
        if oldest is None:
            return False
        self.dropped = oldest.exchange
        self.answered_as_of(oldest.exchange)
        return True
