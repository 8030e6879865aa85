"""The buffer of journal lines that a worker keeps.

Question  Which lines may not be on disk yet, and which of them are sent now?
Holds     Lines are numbered without a gap and kept until the coordinator has them on disk. They are sent in order, in
          frames of bounded size. After a lost connection, or if another worker was the sender before, sending starts
          again with the first line that is not on disk.
Source    ours; docs/protocol.md, docs/design/0003-journal.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from pliant.control.mailbox import Mailbox
from pliant.control.messages import Lines

FRAME_BYTES = 1 << 20
"""Journal records are put into frames of about this size; the server closes on one above 16 MiB."""


class LineBuffer:
    """Thread-safe: used by the main loop and by the sending thread. The mailbox knows how many lines are on disk."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._lines: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._first = 0
        """the number of the first line that is kept"""
        self._sent = 0
        """the number of the first line that is not sent"""

    def keep(self, lines: Iterable[bytes], first: int) -> None:
        """Keep these, numbered from ``first``."""
        with self._lock:
            if self._first + len(self._lines) != first:
                # This worker has missed some, and the others have them; what it had before, too.
                self._lines.clear()
            if not self._lines:
                self._first = first
                self._sent = max(self._sent, first)
            self._lines.extend(lines)

    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None:
        """Keep lines that come right before those that are kept."""
        end = first + len(lines)
        with self._lock:
            if not lines or self._mailbox.written >= end or (self._lines and self._first != end):
                return
            self._lines.extendleft(reversed(lines))
            self._first = first

    def unwritten(self) -> list[bytes]:
        """The lines that may not be on disk yet."""
        with self._lock:
            self._forget_written()
            return list(self._lines)

    def unsent(self, *, sends: bool) -> list[Lines]:
        """Forget what is on disk; what is to be sent now, in frames of bounded size: nothing but by who ``sends``."""
        with self._lock:
            self._forget_written()
            if not sends:
                return []
            start = max(self._sent, self._first)
            waiting = list(self._lines)[start - self._first :]
        frames: list[Lines] = []
        size = 0
        for number, line in enumerate(waiting, start=start):
            if not frames or size + len(line) > FRAME_BYTES:
                frames.append(Lines(first=number, records=[]))
                size = 0
            frames[-1].records.append(line)
            size += len(line)
        return frames

    def sent(self, frame: Lines) -> None:
        """It has left this worker."""
        self._sent = frame.first + len(frame.records)

    def begin_again(self, written: int) -> None:
        """Send once more what is not among the ``written`` lines on disk."""
        self._sent = max(written, self._first)

    def _forget_written(self) -> None:
        while self._lines and self._first < self._mailbox.written:
            self._lines.popleft()
            self._first += 1
