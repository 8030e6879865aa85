"""The exceptions that Pliant raises, in one tree.

    PliantError
    ├── UsageError       the script asks for something Pliant cannot do; the message says what to do instead
    ├── Refused          the coordinator or the group refuses this worker; the message says why
    ├── RunEnded         the run is over for a reason outside this worker (another worker was lost, Ctrl-C)
    │   └── Stopped      the same, reported by the coordinator, which shows the reason
    ├── JournalError     a journal is damaged, foreign or of another version
    ├── CheckpointError  a checkpoint cannot be written, or is damaged, foreign or of another version
    ├── Diverged         a replayed script does something else than the journal says
    ├── NonFiniteLoss    too many rounds in a row had an infinite or undefined loss
    ├── Drifted          this worker's weights are not those of the others, for the second time
    └── Unsupported      this worker's tensors are of a kind that no group can sum

    Left (a SystemExit)  this worker was asked to leave and has left; the run goes on without it

Holds     A message is one line: what is wrong, and what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class PliantError(Exception):
    """The root of all errors that Pliant raises on purpose."""

    def again(self) -> PliantError:
        """A new instance of the same error, without its traceback."""
        return type(self)(*self.args)


class UsageError(PliantError):
    """The user's script asks for something Pliant cannot do."""


class Refused(PliantError):
    """This worker does not fit the group."""


class RunEnded(PliantError):
    """The run ended for a reason outside this worker."""


class Stopped(RunEnded):
    """The coordinator says that the run is over. The coordinator also reports the reason to the user."""

    def __init__(self, reason: str, *, completed: bool = False) -> None:
        super().__init__(reason)
        self.completed = completed
        """the run has finished successfully: there is nothing left to do for this worker"""

    def again(self) -> Stopped:
        return Stopped(self.args[0], completed=self.completed)


class Left(SystemExit):
    """This worker left a run that goes on: raised in ``batches``, ``step`` and ``evaluate``, so that no later code of
    the script runs on unfinished weights. Uncaught, it ends the process with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class JournalError(PliantError):
    """A journal cannot be trusted: damaged, foreign, or of another version."""


class CheckpointError(PliantError):
    """A checkpoint cannot be written, or cannot be trusted."""


class Diverged(PliantError):
    """A replayed script does something else than the recorded run."""


class NonFiniteLoss(PliantError):
    """Too many rounds in a row were skipped for an infinite or undefined loss or gradient."""


class Drifted(PliantError):
    """This worker's weights differ from the others' again, although it had fetched theirs; the run goes on."""


class Unsupported(PliantError):
    """This worker's tensors are of a kind, or on a device, that no group can sum; the run goes on."""


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is outside Pliant."""
    if trace is None:
        return None
    rest = without_own_frames(trace.tb_next)
    if trace.tb_frame.f_globals.get("__name__", "").startswith("pliant."):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def boundary(called: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Decorator for functions that scripts call: the traceback of a ``PliantError`` ends at the script's own line."""

    @functools.wraps(called)
    def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        try:
            return called(*arguments, **named)
        except PliantError as error:
            raise error.with_traceback(without_own_frames(error.__traceback__)) from None

    return call
