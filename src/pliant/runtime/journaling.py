"""The coordinator's journal on disk.

Question  How are records appended, and how does a new coordinator go on where a lost one stopped?
Holds     Lines are written whole and unbuffered. A line torn by a crash is cut off before anything is appended.
          Workers' records are taken by number: a repetition is ignored, a gap waits.
Source    ours; docs/design/0003-journal.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from pliant.core import journal
from pliant.errors import JournalError, UsageError

FROM_WORKERS = (
    journal.EraRecord,
    journal.PolicyRecord,
    journal.PhaseRecord,
    journal.RoundRecord,
    journal.ExchangeRecord,
    journal.PhaseEndRecord,
)
"""Runs and ends are the coordinator's own to write."""


class JournalFile:
    """Appends checksummed lines."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise UsageError(
                f"{path} already holds the journal of a run; give another --dir, or move that run away"
            ) from error
        self._chain = 0

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
        reopened._file = path.open("r+b", buffering=0)
        reopened._file.truncate(len(whole))
        reopened._file.seek(len(whole))
        # ``"xxxxxxxx"}`` and the newline: the checksum of the last line is where the chain goes on.
        reopened._chain = int(lines[-1][-11:-3], 16)
        return reopened, records

    def append(self, records: list[journal.Record]) -> None:
        """Hand whole lines to the system."""
        lines: list[bytes] = []
        for record in records:
            text, self._chain = journal.line(journal.encode(record), self._chain)
            lines.append(text)
        # Unbuffered: what could not be written now must not turn up behind what comes later.
        self._file.write(b"".join(lines))

    def close(self) -> None:
        """Nothing can be appended any more."""
        self._file.close()


class Numbered:
    """Puts numbered records in order: each once, none before its predecessors."""

    def __init__(self, written: int = 0) -> None:
        self.written = written
        """how many were given out; also the number of the next one"""
        self._early: dict[int, journal.Record] = {}

    def taken(self, first: int, records: Sequence[journal.Record]) -> list[journal.Record]:
        """Those that can be written now, among these and earlier ones that had to wait."""
        for number, record in enumerate(records, start=first):
            if number >= self.written:
                self._early.setdefault(number, record)
        due: list[journal.Record] = []
        while self.written in self._early:
            due.append(self._early.pop(self.written))
            self.written += 1
        return due
