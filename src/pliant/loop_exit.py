"""How a script leaves a loop over batches.

Question  The iterator of ``run.batches`` is closed early: did the script leave its loop, or does an exception pass?
Holds     Python closes a dropped iterator in the same way in both cases. What differs is the instruction at which the
          caller's frame stands: ``break`` and ``return`` drop the iterator by an instruction of their own, and an
          exception drops it at whatever raised. An interpreter in which a trial does not show that is not trusted.
Source    CPython's compiler (``compiler_unwind_fblock``); docs/design/0024-break.md. Needs nothing but the standard
          library: the tests run it by every interpreter there is.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import platform
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

_DROPS = frozenset(dis.opmap[name] for name in ("POP_TOP", "POP_ITER") if name in dis.opmap)
"""what drops the iterator of a ``for`` loop that is left: POP_TOP up to Python 3.13, POP_ITER from 3.14 on"""


def drops_iterator(code: CodeType, at: int) -> bool:
    """Whether the instruction at byte offset ``at`` drops an iterator, as ``break`` and ``return`` do."""
    instructions = code.co_code
    return 0 <= at < len(instructions) and instructions[at] in _DROPS


def left_by_break(frame: FrameType) -> bool:
    """Whether the loop in ``frame``, whose iterator is being closed, is left by ``break`` or ``return``.

    False where an exception leaves it, where something else than the loop holds the iterator, and in an interpreter in
    which it cannot be told, which is said once.
    """
    if not can_tell():
        _say_so()
        return False
    return drops_iterator(frame.f_code, frame.f_lasti)


@functools.cache
def can_tell() -> bool:
    """Whether ``drops_iterator`` tells the ways out of a loop apart in this interpreter: tried out once."""
    return (_tried(_break), _tried(_return), _tried(_raise)) == ([True], [True], [False])


@functools.cache
def _say_so() -> None:
    print(
        f"pliant: on {platform.python_implementation()} {platform.python_version()} it cannot be told how a loop over "
        "run.batches(…) is left: after a `break` the loop is ended for all by the next call of run.batches, "
        "run.evaluate or run.close, so call one before you use the weights",
        file=sys.stderr,
        flush=True,
    )


# -- the trial


class _Passing(Exception):
    """Leaves a loop."""


Loop = Callable[[], Iterator[None]]


def _tried(leave: Callable[[Loop], object]) -> list[bool]:
    """What ``drops_iterator`` says when a loop is left in this way; nothing if its iterator is not closed at once."""
    said: list[bool] = []

    def loop() -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            frame = sys._getframe(1)
            said.append(drops_iterator(frame.f_code, frame.f_lasti))
            raise

    with contextlib.suppress(_Passing):
        leave(loop)
    return said


def _break(loop: Loop) -> None:
    for _ in loop():
        break


def _return(loop: Loop) -> int:
    for _ in loop():
        return len(__name__)
    return 0


def _raise(loop: Loop) -> None:
    for _ in loop():
        raise _Passing
