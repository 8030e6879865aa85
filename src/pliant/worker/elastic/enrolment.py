"""This worker's word to the coordinator, and the coordinator's to it.

Question  What does a worker tell the coordinator of itself, and what becomes of it where there is none?
Holds     A worker asks for a place with the first call that the group has not left; under a name that was taken off
          the roster it comes back as a newcomer. Once it is asked to leave it says so to each coordinator, and has a
          limited time. ``Solo`` answers the same questions for a script without a coordinator: one era for ever.
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
    """Say why and go. A user's exception goes on its way; its traceback is Python's to show."""
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
    """another era may come, with other workers"""

    def __init__(
        self,
        place: Rendezvous,
        come_back: Callable[[], Rendezvous],
        overdue: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        """``come_back``: another place, under another name."""
        self.place = place
        self.enlisted = False
        """it has asked for a place in an era"""
        self.leaving = False
        """it was asked to go"""
        self._leaving_for = ""
        self._come_back = come_back
        self._overdue = overdue
        """called once this worker is asked to go: sees to it that it does not take for ever; the answer calls it off"""
        self._in_time: Callable[[], None] | None = None
        self.loop = Progress()
        """what the coordinator hears about the main loop"""

    @property
    def link(self) -> CoordinatorLink:
        """The line to the coordinator; another one after a return."""
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
        """Ask to become a member, from this call on; None: before the first one."""
        self.enlisted = True
        self.place.enlist(call)

    def come_back(self) -> None:
        """Back under a new name, as a newcomer."""
        self.place.close()
        self.place = self._come_back()
        self.enlisted = False

    # -- between micro-batches

    def look(self, era: int) -> None:
        """Is the era over, or is this worker asked to go?"""
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
        """Note how far the main loop is; the link's thread tells it."""
        self.link.position = self.loop.noted(
            self.place.me, group, standing, now_s, holds_all=holds_all, at=at, ending=ending
        )

    def tell_position(self) -> None:
        """Tell that at once."""
        self.link.tell_position()

    def plan(self, epochs: int | None, samples: int | None) -> None:
        """Tell how far the script means to go."""
        self.link.plan(epochs, samples)

    # -- checkpoints

    def saved(self, name: str, records: int, round_: int, names: Callable[[], Sequence[str]]) -> None:
        """A checkpoint is written; ``names``: all that are there, oldest first."""
        self.link.saved(name, records, round_)

    @property
    def checkpoints(self) -> Sequence[str]:
        """Those that count, newest first."""
        return self.link.mailbox.named

    # -- going

    def leave(self, reason: str) -> None:
        """Ask for an era without this worker. Safe in a signal handler."""
        if not self.leaving:
            self.leaving, self._leaving_for = True, reason
            self.link.leaving(reason)
            self._in_time = self._overdue()

    def leave_again(self) -> None:
        """Where it was said to a coordinator that did not hear it, or under a name that is gone."""
        if self.leaving:
            self.link.leaving(self._leaving_for)

    def send_lines_again(self) -> None:
        """Whoever sends the journal's last lines may not get to it, and nobody keeps them any longer."""
        self.link.send_lines_again()

    def finish(self, *, left: bool, over: bool = False) -> None:
        """Go in good order. Raises ``RunEnded`` at the script's end where nobody knows of it, and it may come again."""
        self.link.finish(left=left, over=over)
        if not left and self.link.mailbox.evicted is not None:
            raise RunEnded(self.link.mailbox.evicted)

    def depart(self, error: BaseException) -> None:
        """Go because of an error; ends the process where it is one of Pliant's own."""
        depart(self.link, error)

    def fail(self, reason: str) -> None:
        """End the whole run: all others would meet the same in their turn."""
        self.link.fail(reason, shown=True, fatal=True)

    def close(self) -> None:
        """No era is waited for any more."""
        if self._in_time is not None:
            # It has gone; what the script does afterwards takes as long as it takes.
            self._in_time()
        self.place.close()


class Solo:
    """No coordinator: nothing to tell, and one era for ever. It stands for the way into another era, too."""

    has_eras = False
    enlisted = True
    leaving = False
    left_out = False

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        """``ended`` is called at the end of the script."""
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
        """As a coordinator would: the last ones count."""
        self.checkpoints = [earlier for earlier in reversed(names()) if earlier <= name][:CHECKPOINTS_KEPT]

    def leave(self, reason: str) -> None: ...

    def send_lines_again(self) -> None: ...

    def finish(self, *, left: bool, over: bool = False) -> None:
        if not left:
            self.ended()

    def depart(self, error: BaseException) -> None: ...

    def fail(self, reason: str) -> None: ...

    def close(self) -> None: ...

    # -- the way into another era

    def found(self) -> NoReturn:
        raise AssertionError("only a coordinator founds a group")

    def become_member(self, call: ScriptCall) -> FinishedPhase | None:
        """It is one from the start."""

    def switch(self, plan: tuple[int, int], *, closed: bool = False) -> NoReturn:
        raise AssertionError("only a coordinator plans an era")

    def go_on(self, trouble: EraBroken | Evicted) -> NoReturn:
        """There is no other era."""
        raise RunEnded(str(trouble))
