"""The coordinator's journal on disk.

Question  How are records appended, and how does a new coordinator go on where a lost one stopped?
Holds     Lines are written whole and unbuffered. A line torn by a crash is cut off before anything is appended.
          Workers' records are taken by number: a repetition is ignored, a gap waits.
Source    ours; docs/design/0003-journal.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pliant.core import journal
from pliant.errors import JournalError, UsageError


class JournalFile:
    """Appends checksummed lines."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise UsageError(
                f"{path} already holds the journal of a run; give another --dir, or move that run away"
            ) from error
        self._path = path
        self._chain = self._size = 0

    @classmethod
    def reopened(cls, path: Path, *, ended: bool = False) -> tuple[JournalFile, list[journal.Record]]:
        """The journal of a lost coordinator, without a torn last line, and what is in it.

        ``ended``: also that of a run which is over.
        """
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UsageError(f"no journal at {path}: {error.strerror}; give the directory of a run") from error
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        records = list(journal.read(lines))
        if not records:
            raise JournalError(f"{path} is empty: there is nothing to resume")
        if isinstance(records[-1], journal.EndRecord) and not ended:
            raise UsageError(f"the run in {path.parent} is over; start a new one")
        reopened = cls.__new__(cls)
        reopened._path, reopened._size = path, len(whole)
        reopened._file = path.open("r+b", buffering=0)
        reopened._file.truncate(len(whole))
        reopened._file.seek(len(whole))
        # ``"xxxxxxxx"}`` and the newline: the checksum of the last line is where the chain goes on.
        reopened._chain = int(lines[-1][-11:-3], 16)
        return reopened, records

    def append(self, records: list[journal.Record]) -> None:
        """Hand whole lines to the system: all of them, or none where it cannot take them (``OSError``)."""
        lines: list[bytes] = []
        chain = self._chain
        for record in records:
            text, chain = journal.line(journal.encode(record), chain)
            lines.append(text)
        content = b"".join(lines)
        # Unbuffered: what could not be written now must not turn up behind what comes later.
        left = memoryview(content)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            # A torn line would make the next coordinator forget what comes after it.
            self._file.truncate(self._size)
            self._file.seek(self._size)
            raise
        self._chain, self._size = chain, self._size + len(content)

    def records(self) -> list[journal.Record]:
        """What was written so far."""
        return list(journal.read(self._path.read_bytes()[: self._size].splitlines(keepends=True)))

    def close(self) -> None:
        """Nothing can be appended any more."""
        self._file.close()


def history(path: Path) -> Iterator[journal.Record]:
    """The records of a journal that count, one after another; all at once only where the run has gone back."""
    with path.open("rb") as lines:
        rewound = any(b'"kind":"rewind"' in line for line in lines)
        lines.seek(0)
        records = journal.read(lines)
        yield from journal.effective(records) if rewound else records


class Numbered:
    """Puts numbered records in order: each once, none before its predecessors."""

    def __init__(self, written: int = 0) -> None:
        self.written = written
        """how many were given out; also the number of the next one"""
        self.early_bytes = 0
        """of the messages whose records wait for their predecessors, as told"""
        self._early: dict[int, journal.Record] = {}

    def taken(self, first: int, records: Sequence[journal.Record], size: int = 0) -> list[journal.Record]:
        """Those that can be written now, among these (of so many bytes) and earlier ones that had to wait."""
        for number, record in enumerate(records, start=first):
            if number >= self.written:
                self._early.setdefault(number, record)
        due: list[journal.Record] = []
        while self.written in self._early:
            due.append(self._early.pop(self.written))
            self.written += 1
        self.early_bytes = self.early_bytes + size if self._early else 0
        return due
