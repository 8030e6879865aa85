"""What a worker tells its coordinator, and what it asks.

Question  What does a worker report to the coordinator, and what does the loop use if there is none?
Holds     A worker asks for a place in an era with the first call that the group has not left. After it was taken off
          the roster it comes back under a new name, as a newcomer. Once it was asked to leave, it tells every
          coordinator so, and has limited time. ``Solo`` has the same methods for a script without a coordinator: one
          era for ever.
Source    docs/design/0007-elastic.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from pliant.control.messages import Call
from pliant.core.group_state import FinishedPhase, GroupState, Standing
from pliant.core.membership.roster import CHECKPOINTS_KEPT
from pliant.core.membership.shutdown import QUIET_EXIT
from pliant.core.tickets import Kind
from pliant.errors import Drifted, Left, PliantError, RunEnded, Stopped, Unsupported
from pliant.worker.elastic.rendezvous import CoordinatorLink, EraBroken, Evicted, Rendezvous
from pliant.worker.progress import LoopPoint, Progress
from pliant.worker.script.calls import ScriptCall


def depart(link: CoordinatorLink, error: BaseException) -> None:
    """Report an error and leave. A user's exception is raised further; Python shows its traceback."""
    if isinstance(error, Left):
        return
    if isinstance(error, RunEnded):
        completed = isinstance(error, Stopped) and error.completed
        raise SystemExit(0 if completed else QUIET_EXIT) from None
    if isinstance(error, PliantError):
        own = isinstance(error, Drifted | Unsupported)
        link.fail(str(error), shown=False, fatal=not own, own=own)
        raise SystemExit(1) from None
    if isinstance(error, SystemExit) and not error.code:
        link.fail("the script called sys.exit before the end of the with block", shown=False)
        return
    link.fail(f"{type(error).__name__}: {error}", shown=True)


class Enrolment:
    """One worker's dealings with the coordinator."""

    has_eras = True
    """another era may follow, with other workers"""

    def __init__(
        self,
        place: Rendezvous,
        come_back: Callable[[], Rendezvous],
        overdue: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        """``come_back``: connects again, under another name."""
        self.place = place
        self.enlisted = False
        """it has asked for a place in an era"""
        self.leaving = False
        """it was asked to go"""
        self._leaving_for = ""
        self._come_back = come_back
        self._overdue = overdue
        """called when this worker is asked to leave: limits the time for it, and returns what calls that off"""
        self._in_time: Callable[[], None] | None = None
        self.loop = Progress()
        """what is reported about the main loop"""

    @property
    def link(self) -> CoordinatorLink:
        """The connection to the coordinator; another one after ``come_back``."""
        return self.place.link

    @property
    def rewinds(self) -> int:
        """How often the run had gone back to a checkpoint when this worker came."""
        return self.link.mailbox.welcome.rewinds

    @property
    def is_running(self) -> bool:
        """Whether the run had begun when this worker came."""
        return self.link.mailbox.welcome.running

    # -- becoming a member

    def past_call(self, index: int) -> FinishedPhase | None:
        """How the script's call number ``index`` ended, as far as the coordinator knew when this worker came."""
        past = self.link.mailbox.welcome.past
        if index >= len(past):
            return None
        found = past[index]
        return FinishedPhase(Kind[found.task.upper()], found.epoch, found.result, results=found.results)

    def enlist(self, call: Call | None) -> None:
        """Ask to become a member, from this call on; None: from the start of the run."""
        self.enlisted = True
        self.place.enlist(call)

    def come_back(self) -> None:
        """Return under a new name, as a newcomer."""
        self.place.close()
        self.place = self._come_back()
        self.enlisted = False

    # -- between micro-batches

    def look(self, era: int) -> None:
        """Raise if the era is over; begin to leave if this worker is asked to."""
        self.place.look(era)
        if not self.leaving and self.place.asked_to_leave:
            self.leave("asked by the coordinator")

    def prepared(self, era: int) -> tuple[int, int]:
        """(term, era) of the planned era that this worker could switch to now; zeros if there is none."""
        return self.place.prepared(era)

    @property
    def left_out(self) -> bool:
        """Whether the planned era goes on without this worker."""
        return self.place.left_out

    def progress(
        self, group: GroupState, standing: Standing, now_s: float, at: LoopPoint, *, holds_all: bool, ending: bool
    ) -> None:
        """Note the position of the main loop; the link's thread sends it."""
        self.link.position = self.loop.noted(
            self.place.me, group, standing, now_s, holds_all=holds_all, at=at, ending=ending
        )

    def tell_position(self) -> None:
        """Send the noted position at once."""
        self.link.tell_position()

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Report how long the script means to train."""
        self.link.plan(epochs, samples)

    # -- checkpoints

    def saved(self, name: str, records: int, round_: int, names: Callable[[], Sequence[str]]) -> None:
        """Report a checkpoint that is written; ``names``: all that there are, oldest first."""
        self.link.saved(name, records, round_)

    @property
    def checkpoints(self) -> Sequence[str]:
        """The checkpoints that count, newest first."""
        return self.link.mailbox.named

    # -- going

    def leave(self, reason: str) -> None:
        """Ask for an era without this worker. Safe in a signal handler."""
        if not self.leaving:
            self.leaving, self._leaving_for = True, reason
            self.link.leaving(reason)
            self._in_time = self._overdue()

    def leave_again(self) -> None:
        """Repeat it: it was said to a coordinator that is gone, or under the old name."""
        if self.leaving:
            self.link.leaving(self._leaving_for)

    def send_lines_again(self) -> None:
        """Send the last journal lines: the worker whose task it is may not, and none keeps them any longer.

        A worker that was taken off the roster and is in no era since has none to send: the others may have decided
        otherwise than its last lines say.
        """
        if self.enlisted:
            self.link.send_lines_again()

    def finish(self, *, left: bool, over: bool = False) -> None:
        """Say goodbye. At the script's end, raises ``RunEnded`` if this worker was evicted: the others do not know of
        this end, and begin anew.
        """
        self.link.finish(left=left, over=over)
        if not left and self.link.mailbox.evicted is not None:
            raise RunEnded(self.link.mailbox.evicted)

    def depart(self, error: BaseException) -> None:
        """Leave because of an error; ends the process if it is one of Pliant's own."""
        depart(self.link, error)

    def fail(self, reason: str) -> None:
        """End the whole run: all other workers would meet the same error."""
        self.link.fail(reason, shown=True, fatal=True)

    def close(self) -> None:
        """Wait for no further era."""
        if self._in_time is not None:
            # This worker has left; the script may take any time for what it does afterwards.
            self._in_time()
        self.place.close()


class Solo:
    """Without a coordinator: nothing to report, and one era for ever. Also stands in for ``EraTransition``."""

    has_eras = False
    enlisted = True
    leaving = False
    left_out = False

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        """``ended``: called at the end of the script."""
        self.ended = ended
        self.loop = Progress()
        self.checkpoints: Sequence[str] = ()

    def look(self, era: int) -> None: ...

    def prepared(self, era: int) -> tuple[int, int]:
        return 0, 0

    def progress(
        self, group: GroupState, standing: Standing, now_s: float, at: LoopPoint, *, holds_all: bool, ending: bool
    ) -> None: ...

    def tell_position(self) -> None: ...

    def plan(self, epochs: int | None, samples: int | None) -> None: ...

    def saved(self, name: str, records: int, round_: int, names: Callable[[], Sequence[str]]) -> None:
        """Count the last ones, as a coordinator would."""
        self.checkpoints = [earlier for earlier in reversed(names()) if earlier <= name][:CHECKPOINTS_KEPT]

    def leave(self, reason: str) -> None: ...

    def send_lines_again(self) -> None: ...

    def finish(self, *, left: bool, over: bool = False) -> None:
        if not left:
            self.ended()

    def depart(self, error: BaseException) -> None: ...

    def fail(self, reason: str) -> None: ...

    def close(self) -> None: ...

    # -- in place of ``EraTransition``

    def found(self) -> NoReturn:
        raise AssertionError("only a coordinator founds a group")

    def become_member(self, call: ScriptCall) -> FinishedPhase | None:
        """It is a member from the start."""

    def switch(self, plan: tuple[int, int], *, closed: bool = False) -> NoReturn:
        raise AssertionError("only a coordinator plans an era")

    def go_on(self, trouble: EraBroken | Evicted) -> NoReturn:
        """There is no other era."""
        raise RunEnded(str(trouble))
