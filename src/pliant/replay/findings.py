"""The findings of a replay: numbers that differ from the recorded ones.

Question  How far apart are two computations of one run, and where did the difference begin?
Holds     Differences are relative. Only the first one above the tolerance, with round and worker, and the largest one
          are kept.
Source    docs/design/0012-replay.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pliant.errors import Diverged
from pliant.tensors.weights import WeightsFile

EXACT = 1e-9
"""Tolerance in float64: both computations add the same numbers, in another order."""
LOOSE = 1e-3
"""Tolerance in shorter types. A larger difference is reported, though rounding alone can reach it in a long run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that differs from the journal or from the file of weights."""

    relative: float
    what: str
    round: int
    worker: str
    here: float
    there: float

    def __str__(self) -> str:
        where = f"round {self.round}, {self.worker}: " if self.worker else f"after round {self.round}: "
        return f"{where}{self.what} is {self.here:.17g}, recorded {self.there:.17g} ({self.relative:.1e} apart)"


@dataclass
class Findings:
    """What a replay has found so far."""

    first_round: int = 1
    """the rounds before a checkpoint are not computed again"""
    rounds: int = 0
    contributions: int = 0
    dropped: int = 0
    """contributions that were lost in the run, and computed again because look-ahead points were built on them"""
    evaluations: int = 0
    exact: bool = False
    """whether everything trained is float64"""
    tolerance: float = LOOSE
    first: Difference | None = None
    """the first one above the tolerance"""
    largest: Difference | None = None
    """the largest one of the numbers in tickets and results"""
    weights: Difference | None = None
    """the largest one of the weights"""
    compared: str = ""
    """which weights those were compared with"""
    not_compared: str = ""
    """why there was nothing to compare with"""
    last_round: int = 0
    complete: bool = False
    """whether the script has come to its end"""

    def note(self, difference: Difference) -> None:
        if self.largest is None or not difference.relative <= self.largest.relative:
            self.largest = difference
        if self.first is None and not difference.relative <= self.tolerance:
            self.first = difference

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than the dtype of the weights explains."""
        apart = self.weights is not None and not self.weights.relative <= self.tolerance
        return self.first is None and not (apart and self.exact)


def of_weights(state: dict[str, Tensor], file: WeightsFile, number: int) -> Difference:
    """The largest difference between the weights in ``state`` and in ``file``, after round ``number``.

    Relative to the largest number of the tensor it is in. Raises ``Diverged`` where a tensor has another shape or type.
    """
    largest = Difference(0.0, "weights", number, "", 0.0, 0.0)
    for name in file.keys():  # noqa: SIM118 - no mapping
        there = file.get_tensor(name)
        here = state.get(name)
        if here is None or here.shape != there.shape or here.dtype != there.dtype:
            raise Diverged(
                f"the file of weights has {name} as {there.dtype} {list(there.shape)}, the script's model not"
            )
        if not there.numel():
            continue
        here, there = here.detach().cpu().to(torch.float64).reshape(-1), there.to(torch.float64).reshape(-1)
        apart = (here - there).abs().nan_to_num(nan=math.inf)
        at = int(apart.argmax())
        scale = max(float(there.abs().max()), float(here.abs().max()))
        relative = float(apart[at]) / scale if float(apart[at]) else 0.0
        if not relative <= largest.relative or largest.what == "weights":
            largest = Difference(relative, f"{name}[{at}]", number, "", float(here[at]), float(there[at]))
    return largest
