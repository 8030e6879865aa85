"""What the coordinator hears about a worker's main loop.

Question  Does the main loop make progress, wait, or do something else, for how long, and what would a return cost?
Holds     Noting costs next to nothing. A step of the loop lasts from the draw of a micro-batch until the next event
          other than the arrival of its samples. Time that the script has announced as busy is no step. The usual step
          of a phase is unknown until its first one is done.
Source    docs/design/0022-slow-is-not-hung.md.
"""

from __future__ import annotations

import enum

from pliant.control.link import Position
from pliant.core.group_state import GroupState, Standing
from pliant.types import WorkerId

# The usual time of a step is a moving average: about ten steps make a new one.
_KEEP = 0.8


class LoopPoint(enum.Enum):
    """Where the main loop is."""

    ELSEWHERE = "the script's own code, or Pliant's"
    DRAWING = "a micro-batch is drawn, its samples are fetched"
    COMPUTING = "its samples are there"
    WAITING = "it can do nothing without the others"


FIRST_TIME_S = 5.0
"""Expected length of a first busy time without a given one. Later ones are expected to last as long as the last."""


class Progress:
    """One worker's account of its main loop."""

    def __init__(self) -> None:
        self._steps = 0
        self._usual_s = 0.0
        self._since_s: float | None = None
        """when the step under way began; None: there is none"""
        self._phase: int | None = None
        self._busy: list[tuple[str, float]] = []
        """what the script is busy with, and the expected seconds, innermost last"""
        self._took_s: dict[str, float] = {}
        """the seconds it took the last time"""
        self._taking_since_s: float | None = None
        self._handoff_s = 0.0

    def noted(
        self,
        me: WorkerId,
        group: GroupState,
        standing: Standing,
        now_s: float,
        *,
        holds_all: bool,
        at: LoopPoint,
        ending: bool,
    ) -> Position:
        """The position of the main loop."""
        self._count(group, standing, now_s, at)
        waiting = at is LoopPoint.WAITING
        self._time_handoff(now_s, holds_all=holds_all)
        busy, expected_s = self._busy[-1] if self._busy else ("", 0.0)
        return Position(
            era=group.era,
            exchange=group.exchange,
            round=group.round,
            active=standing is not Standing.FOLLOWING and holds_all,
            progress=self._steps,
            waiting=waiting,
            usual_s=self._usual_s,
            since_s=now_s,
            ending=ending and waiting,
            busy=busy,
            expected_s=expected_s,
            pace=_pace(group, me),
            handoff_s=self._handoff_s,
        )

    def _count(self, group: GroupState, standing: Standing, now_s: float, at: LoopPoint) -> None:
        self._steps += 1
        # Between two phases the steps of the last one are what is usual.
        phase = group.phase.number if group.open else self._phase
        if standing is not Standing.ACTIVE or phase != self._phase:
            # Before the first contribution (compilation, a longer sample) a step may take any time.
            self._usual_s, self._since_s = 0.0, None
        self._phase = phase
        if at is LoopPoint.COMPUTING:
            return
        if self._since_s is not None:
            step_s = now_s - self._since_s
            self._usual_s = step_s if self._usual_s == 0.0 else _KEEP * self._usual_s + (1 - _KEEP) * step_s
        self._since_s = now_s if at is LoopPoint.DRAWING and standing is Standing.ACTIVE else None

    def _time_handoff(self, now_s: float, *, holds_all: bool) -> None:
        if not holds_all and self._taking_since_s is None:
            self._taking_since_s = now_s
        elif holds_all and self._taking_since_s is not None:
            self._handoff_s, self._taking_since_s = now_s - self._taking_since_s, None

    def begin(self, what: str, seconds: float | None) -> None:
        """The script is busy with ``what`` from now on."""
        self._busy.append((what, self._took_s.get(what, FIRST_TIME_S) if seconds is None else seconds))
        # A step that is interrupted says nothing about the usual one.
        self._since_s = None

    def end(self, took_s: float) -> None:
        """The last busy time has ended."""
        what, _ = self._busy.pop()
        self._took_s[what] = took_s


def _pace(group: GroupState, me: WorkerId) -> float:
    """This worker's samples per second; 0: unknown."""
    if not group.training.measured or me not in group.roster:
        return 0.0
    return group.training.paces()[group.roster.index(me)]
