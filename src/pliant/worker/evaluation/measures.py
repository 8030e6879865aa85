"""What a user's ``measure`` returns, and what ``evaluate`` makes of it.

Question  Which sums, counts and outputs does the answer for one micro-batch hold?
Holds     (sum, count) makes one mean, a dict of such pairs several. The names are the same for every micro-batch.
          Anything else is refused in one line that says what to return.
Source    ours; docs/design/0017-evaluate.md, docs/guide/evaluation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pliant.core import evaluation
from pliant.core.group_state import FinishedPhase
from pliant.core.tickets import Sums
from pliant.errors import UsageError
from pliant.types import is_mapping
from pliant.worker.evaluation import predictions


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one micro-batch."""

    total: float
    count: float
    sums: Sums = ()
    output: bytes | None = None


class Unknown(float):
    """The result of a call that ended without this worker: NaN, also under every name."""

    def __new__(cls) -> Unknown:
        return super().__new__(cls, math.nan)

    def __getitem__(self, name: str) -> float:
        return math.nan


def result_of(past: FinishedPhase | None) -> float | dict[str, float]:
    """What ``evaluate`` returns: the mean, or all means by name; NaN for an undefined one."""
    if past is not None and past.results is not None:
        return {name: math.nan if mean is None else mean for name, mean in past.results.items()}
    return Unknown() if past is None or past.result is None else past.result


class Measure:
    """The user's function during one call of ``evaluate``."""

    def __init__(self, measure: Callable[[Any], Any], *, gather: bool) -> None:
        self._measure = measure
        self._gather = gather
        self._names: tuple[str, ...] | None = None

    def of(self, micro_batch: Any, samples: int) -> Measured:
        """What it returns for a micro-batch of ``samples`` samples."""
        answer = self._measure(micro_batch)
        if self._gather:
            return Measured(0.0, 0.0, output=predictions.encoded(answer, samples))
        if not is_mapping(answer):
            self._keep(())
            return Measured(*_pair(answer, "evaluate's measure returned"))
        names = tuple(answer)
        self._keep(_checked(names))
        pairs = {name: _pair(answer[name], f"evaluate's measure returned for {name!r}") for name in names}
        return Measured(*pairs[evaluation.leading(names)], tuple((name, *pairs[name]) for name in names))

    def _keep(self, names: tuple[str, ...]) -> None:
        if self._names is not None and names != self._names:
            raise UsageError(
                f"evaluate's measure returned {_said(names)} for one micro-batch and {_said(self._names)} for another: "
                "return the same names every time, in the same order"
            )
        self._names = names


def _checked(names: tuple[Any, ...]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= evaluation.MAX_NAME_LENGTH:
            raise UsageError(
                f"evaluate's measure returned a dict with the key {name!r}: "
                f"name each mean by a string of at most {evaluation.MAX_NAME_LENGTH} characters"
            )
    if not 0 < len(names) <= evaluation.MAX_NAMES:
        raise UsageError(
            f"evaluate's measure returned a dict of {len(names)} means: return 1 to {evaluation.MAX_NAMES}, "
            "or gather=True for values of each sample"
        )
    return names


def _pair(answer: Any, who: str) -> tuple[float, float]:
    try:
        total, count = (float(value) for value in answer)
    except (TypeError, ValueError):
        raise UsageError(
            f"{who} a {type(answer).__name__}: return (sum, count), two numbers, or a dict of such pairs; "
            "for the outputs of each sample give evaluate gather=True"
        ) from None
    if not (count >= 0 and math.isfinite(count)):
        raise UsageError(f"{who} count={count}: return (sum, count), count 0 or more")
    return total, count


def _said(names: tuple[str, ...]) -> str:
    return f"{{{', '.join(names)}}}" if names else "(sum, count)"
