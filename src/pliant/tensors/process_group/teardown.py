"""The teardown of a group that is left, and of all groups when the process ends.

Question  Which thread waits for gloo to end, so that training does not have to?
Holds     ``dispose`` returns at once. A background thread keeps the group and the memory of its sums until gloo's
          threads are done with them, then destroys the group: no thread, descriptor or memory remains. That usually
          takes milliseconds, but gloo's timeout if a large message was being sent or connections cannot be cut. When
          the process ends, every group is left, and these threads are joined for a limited time: one that returned from
          gloo during the interpreter's shutdown would abort the process.
Source    ours; docs/design/0007-elastic.md. Facts about gloo in DESIGN.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pliant import forking
from pliant.tensors.process_group.gloo_sockets import GlooSockets

# gloo resets connections that it closes: peers would lose data of the last sum that they have not received yet.
_DELIVERY_S = 2.0
_EXIT_S = 2.0
_LOOK_S = 0.005
# An operation that is not over by then ends by gloo's timeout: no need to look often.
_SELDOM_S = 0.5


class UnderWay(Protocol):
    """Something that gloo's threads may be working on."""

    @property
    def over(self) -> bool: ...


class Leavable(Protocol):
    """A group."""

    def leave(self) -> None: ...


class Teardown:
    """A group that was left, with everything its threads may still write to."""

    def __init__(self, group: Any, wiring: GlooSockets, under_way: Sequence[UnderWay]) -> None:
        self._group: Any = group
        self._wiring = wiring
        self._under_way = under_way

    def dispose(self) -> None:
        """Cut running operations and leave the rest to a background thread; returns at once."""
        if self._under_way:
            self._wiring.cut()
        try:
            in_background(self._end, "pliant-undertaker")
        except RuntimeError:  # the interpreter is shutting down and starts no threads any more
            _never_destroy(self)

    def _end(self) -> None:
        soon_s = time.monotonic() + _DELIVERY_S
        while not all(each.over for each in self._under_way):
            time.sleep(_LOOK_S if time.monotonic() < soon_s else _SELDOM_S)
        while not self._under_way and self._wiring.unsent() and time.monotonic() < soon_s:
            time.sleep(_LOOK_S)
        self._wiring.release()
        self._group = None


def _never_destroy(owner: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


# -- the end of the process

_groups: weakref.WeakSet[Leavable] = weakref.WeakSet()
"""Groups that were formed and perhaps not left yet."""
_running: dict[threading.Thread, Callable[[], None] | None] = {}
"""Threads that may be inside gloo, each with a function that makes it end soon."""


def leave_at_exit(group: Leavable) -> None:
    """Leave the group at exit if the script has not: otherwise it would wait for its sums."""
    _settle_at_exit()
    _groups.add(group)
    forking.drop_in_children(group, _forget_group)


def in_background(body: Callable[[], None], name: str, hurry: Callable[[], None] | None = None) -> threading.Thread:
    """Run ``body`` in a thread that may be inside gloo when the process ends; ``hurry`` makes it end soon."""

    def run() -> None:
        try:
            body()
        finally:
            _running.pop(thread, None)

    _settle_at_exit()
    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = hurry
    forking.drop_in_children(thread, _forget_thread)
    try:
        thread.start()
    except RuntimeError:
        _running.pop(thread, None)
        raise
    return thread


@functools.cache
def _settle_at_exit() -> None:
    atexit.register(_settle)


def _settle() -> None:
    """Leave everything and wait for the threads, for a limited time."""
    for group in list(_groups):
        group.leave()
    for hurry in list(_running.values()):
        if hurry is not None:
            hurry()
    deadline_s = time.monotonic() + _EXIT_S
    # A thread that was hurried may start another one for the teardown of its group.
    while _running and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)


def _forget_group(group: Leavable) -> None:
    """In a forked child there are no threads of gloo, and a destructor would wait for them."""
    _never_destroy(group)
    _groups.discard(group)


def _forget_thread(thread: threading.Thread) -> None:
    _running.pop(thread, None)
