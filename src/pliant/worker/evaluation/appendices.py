"""Appendices: bytes of any length that are gathered after the tickets of an exchange.

Question  How do workers gather data without a fixed size, without waiting for each other?
Holds     The tickets say how long each appendix is. When a worker has them, between two micro-batches, it begins the
          second gathering. No member starts anything else in the group before that is over, so that all make the same
          collectives in the same order. Without appendices there is no second gathering.
Source    ours; docs/design/0017-evaluate.md.
"""

from __future__ import annotations

from collections.abc import Callable

from pliant.core import tickets
from pliant.tensors.process_group.channel import Summation


class Appended:
    """An exchange with appendices, under way or over: a ``Summation`` itself."""

    def __init__(self, gather: Callable[[bytes], Summation], first: Summation, appendix: bytes) -> None:
        """``gather``: of the group; ``first``: the gathering of the tickets; ``appendix``: this worker's own."""
        self._gather = gather
        self._first = first
        self._appendix = appendix
        self._second: Summation | None = None
        self._lengths: list[int] | None = None
        self._error: RuntimeError | None = None

    @property
    def over(self) -> bool:
        """Whether everything has arrived, or the exchange has failed."""
        if self._lengths is None:
            if not self._first.over:
                return False
            self._go_on()
        return self._second is None or bool(self._second.over)

    @property
    def seconds(self) -> float:
        """The seconds that it has taken so far."""
        return self._first.seconds + (self._second.seconds if self._second is not None else 0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over, for a limited time."""
        if self._lengths is None:
            if not self._first.wait(timeout_s):
                return False
            self._go_on()
        return self._second is None or bool(self._second.wait(timeout_s))

    def tickets(self) -> list[bytes]:
        """The tickets of all members; raises the error of a failed exchange. Only once it is over."""
        if self._error is not None:
            raise self._error
        return self._first.tickets()

    def appendices(self) -> list[bytes]:
        """The appendices in the order of the roster; raises the error of a failed exchange. Only once it is over."""
        lengths = self._lengths or []
        if self._error is not None:
            raise self._error
        if self._second is None:
            return [b""] * len(lengths)
        return [data[:length] for data, length in zip(self._second.tickets(), lengths, strict=True)]

    def _go_on(self) -> None:
        """The tickets have arrived: gather the appendices, if there are any."""
        self._lengths = []
        try:
            self._lengths = [tickets.unpack(data)[0].appendix for data in self._first.tickets()]
            longest = max(self._lengths)
            if longest:
                self._second = self._gather(self._appendix.ljust(longest, b"\0"))
        except RuntimeError as error:
            self._error = error
