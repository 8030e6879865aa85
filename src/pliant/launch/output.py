"""Which of the workers' output is shown, and in which form.

Question  How do several processes print to one terminal so that a user can read it?
Holds     Only whole lines are shown. A progress bar that redraws its line is shown at most once a second. A
          traceback that all workers raise is shown once. gloo's C++ messages about a lost peer are not shown: the
          coordinator reports the loss, and the log has them. Everything else is shown. The last exception of each
          worker is kept in one line.
Source    ours.
"""

from __future__ import annotations

import re

REDRAW_S = 1.0
"""How often a line that is redrawn by carriage returns is shown."""

QUIET_S = 1.0
"""A traceback is complete when its worker ends or prints nothing for this long."""

LONGEST_LINE = 1 << 16
"""Bytes after which a line without end is shown in parts."""

_TRACEBACK = "Traceback (most recent call last):"
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# ``[E1118 11:24:11.640973595 ProcessGroupGloo.cpp:67] …``, ``[/path/of/gloo/transport/tcp/pair.cc:152] ERROR …``
_TRANSPORT = re.compile(
    r"(\[rank\d+\]:)?\[[EWI]\d{4} [\d:.]+ (ProcessGroupGloo|socket)\.cpp:\d+\] "
    r"|\[\S*/gloo/\S+\.(cc|h):\d+\] (ERROR|WARN|INFO)"
)


class LineSplitter:
    """Turns chunks of bytes into lines of text."""

    def __init__(self) -> None:
        self._rest = b""
        self._drawn_s = float("-inf")

    def feed(self, chunk: bytes, now_s: float) -> list[str]:
        """The lines that ``chunk`` completes."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        lines = [_last_drawing(line) for line in whole]
        # A carriage return at the very end may be the first half of a line end.
        drawings, separator, rest = self._rest[:-1].rpartition(b"\r")
        if separator:
            self._rest = rest + self._rest[-1:]
            drawing = _last_drawing(drawings)
            if drawing and now_s - self._drawn_s >= REDRAW_S:
                self._drawn_s = now_s
                lines.append(drawing)
        if len(self._rest) > LONGEST_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[str]:
        """The remaining lines, when no more output comes."""
        rest, self._rest = self._rest, b""
        return [_last_drawing(rest)] if rest else []


def is_transports(line: str) -> bool:
    """Whether gloo or torch's store has written this line of standard error."""
    return _TRANSPORT.match(line) is not None


def _last_drawing(line: bytes) -> str:
    text = line.rstrip(b"\r").rpartition(b"\r")[2]
    return text.decode("utf-8", "replace")


class SeenTracebacks:
    """The tracebacks shown so far by any worker of a run."""

    def __init__(self) -> None:
        self._shown: list[str] = []

    def is_new(self, lines: list[str]) -> bool:
        """False if another worker's traceback begins like this one; one cut off by a signal does."""
        text = _ADDRESS.sub("0x", "\n".join(lines).rstrip())
        if any(shown.startswith(text) for shown in self._shown):
            return False
        self._shown.append(text)
        return True


class TracebackFilter:
    """Holds back one worker's tracebacks until they are complete, and drops those already seen."""

    def __init__(self, seen: SeenTracebacks) -> None:
        self._seen = seen
        self._block: list[str] = []
        self._grown_s = 0.0

    def feed(self, line: str, now_s: float) -> list[str]:
        """The lines to show now."""
        if not self._block and _TRACEBACK not in line:
            return [line]
        self._block.append(line)
        self._grown_s = now_s
        return []

    def quiet(self, now_s: float) -> list[str]:
        """The lines to show after a pause in the output."""
        return self.end() if self._block and now_s - self._grown_s >= QUIET_S else []

    def end(self) -> list[str]:
        """The remaining lines, when no more output comes."""
        block, self._block = self._block, []
        return block if block and self._seen.is_new(block) else []


class LastError:
    """The exception with which the last traceback of one worker ended: ``ValueError: boom``."""

    def __init__(self) -> None:
        self.text = ""
        self._prefix: str | None = None

    def feed(self, line: str) -> None:
        """Take one line of standard error."""
        prefix, found, _ = line.partition(_TRACEBACK)
        if found:
            # torch puts ``[rank0]: `` before each line; the tree of an exception group has no line of its own.
            self._prefix = prefix if not prefix.startswith(" ") else None
        elif self._prefix is not None and line.startswith(self._prefix):
            text = line.removeprefix(self._prefix)
            if text and not text.startswith((" ", "\t")):
                self.text, self._prefix = text.rstrip(), None
