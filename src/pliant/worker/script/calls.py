"""Where the user's script is among the phases that the group has opened and ended.

Question  Which of the group's phases is the call that this script is in, and has the group left it already?
Holds     All workers run the same script: call number n of one is call number n of all. A worker that was away finds
          its position by counting the top-level calls it has left, and those inside the present one. Calls in the body
          of a loop whose phase has ended there (an *inner* phase) are counted from that end on.
Source    docs/design/0007-elastic.md ("Past phases").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pliant.core.group_state import FinishedPhase, GroupState
from pliant.core.tickets import Kind


class CallSamples(Protocol):
    """The samples of a call. Asked for only if the group is not past the call: making them may take long."""

    @property
    def length(self) -> int: ...

    @property
    def checksum(self) -> int:
        """A checksum of their order."""
        ...


@dataclass(frozen=True, slots=True)
class Counted:
    """Samples of which only these two numbers are known."""

    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call of ``batches`` or ``evaluate``."""

    kind: Kind
    epoch: int
    samples: CallSamples
    size: int
    ahead: int


class ScriptPosition:
    """One worker's calls, outermost first."""

    def __init__(self) -> None:
        self.stack: list[ScriptCall] = []
        """the calls that the script is in"""
        self.calls = 0
        """top-level calls that it has left"""
        self._nested = 0
        """calls inside the present top-level one that it has left"""
        self._ended_inside: int | None = None
        """calls it had made inside the present one when that one's phase ended in its body, with a ``step``"""
        self._calls_in_body = False
        """whether it has made a call since its loop's last draw: further ones come after it, whatever the group does"""

    @property
    def depth(self) -> int:
        return len(self.stack)

    @property
    def position(self) -> str:
        """Which call the innermost one is: the same words on every worker."""
        if self.depth < 2:
            return f"{self.calls}"
        if self._ended_inside is not None:
            # A worker without samples has made fewer calls in the loop; from its end on all make the same.
            return f"{self.calls}+{self._nested - self._ended_inside}"
        return f"{self.calls}.{self._nested}"

    @property
    def innermost(self) -> ScriptCall | None:
        return self.stack[-1] if self.stack else None

    @property
    def is_in_ended_loop(self) -> bool:
        """Whether the innermost call is made in the body of a loop whose phase has ended."""
        return self.depth > 1 and self._ended_inside is not None

    def enters(self, call: ScriptCall, group: GroupState) -> None:
        """The script makes a call."""
        if self.stack and group.open and not self._calls_in_body and self._ended_inside is None:
            # Earlier ones may have been opened and ended without this worker.
            self._nested = len(group.open[0].nested)
        self._calls_in_body = bool(self.stack)
        self.stack.append(call)

    def draws(self) -> None:
        """A body of its loop begins, or a function of ``on_update``."""
        self._calls_in_body = False

    def leaves(self) -> None:
        """The script has left its innermost call."""
        self.stack.pop()
        if self.stack:
            self._nested += 1
        else:
            self.calls, self._nested, self._ended_inside = self.calls + 1, 0, None

    def gives_up(self) -> None:
        """The innermost call was not entered after all."""
        self.stack.pop()

    def ended_in_body(self) -> None:
        """The phase of its loop has ended, and the script is still in the body."""
        if self.depth == 1 and self._ended_inside is None:
            self._ended_inside = self._nested

    def begins_anew(self) -> None:
        """Forget that the loop has ended: this worker goes on from another worker's state."""
        self._ended_inside = None

    # -- compared with the group

    def past(self, group: GroupState) -> FinishedPhase | None:
        """How the innermost call ended, if the group has left it."""
        nested = self.depth > 1
        if self.calls < len(group.past):
            call = group.past.call(self.calls)
            if nested and self._ended_inside is not None:
                made = self._nested - self._ended_inside
                if made < len(call.inner):
                    return call.inner[made]
                if self.calls + 1 == len(group.past):
                    return None
            return FinishedPhase(Kind.EVALUATE, call.epoch) if nested else call.past
        if nested and group.open and self._nested < len(group.open[0].nested):
            return group.open[0].nested[self._nested]
        return None

    def phase(self, group: GroupState) -> int | None:
        """The number of the phase that the innermost call is in, if the group has opened it."""
        open_ = group.open
        if self.is_in_ended_loop:
            return open_[0].number if open_ and open_[0].inner else None
        if self.depth == 0 or len(open_) < self.depth or self.calls != len(group.past) or open_[0].inner:
            return None
        return open_[self.depth - 1].number

    def is_beyond(self, group: GroupState) -> bool:
        """Whether the script has left calls that the group is still to make: the run has gone back to a checkpoint."""
        return self.calls > len(group.past)

    def is_behind(self, group: GroupState) -> bool:
        """Whether the script runs code between two calls that the group has already passed."""
        opened = bool(group.open) and not group.open[0].inner
        return not self.stack and self.calls < len(group.past) + opened

    def is_passed(self, group: GroupState) -> bool:
        """Whether the group is in a later call than the top-level one that the script is in."""
        opened = bool(group.open) and not group.open[0].inner
        return len(group.past) + opened > self.calls + 1

    def is_at(self, group: GroupState) -> bool:
        """Whether the script is where the group is."""
        return self.depth == len(group.open) and self.phase(group) is not None


def top_level_calls(group: GroupState) -> int:
    """How many top-level calls the group has left."""
    return len(group.past)
