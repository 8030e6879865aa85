"""The coordinator's journal on disk.

Question  How are records appended, and how does a new coordinator continue the journal of a lost one?
Holds     Lines are written completely and unbuffered. A line torn by a crash is removed before anything is appended.
          With the state file next to the journal, only what was written since then is read; without it, the whole
          journal, line by line. Workers' records are numbered: repetitions are ignored, and after a gap they wait.
Source    ours; docs/design/0003-journal.md, docs/design/0007-elastic.md, docs/design/0020-coordinator-at-scale.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pliant.coordinator.journal_summary import JournalSummary, SavedSummary, accounted
from pliant.coordinator.state_file import STATE, StateFile, Storage, decoded
from pliant.core.journal import records as journal
from pliant.core.journal.records import BEGINNING, JournalPosition
from pliant.errors import JournalError, UsageError

_TAIL = 11
"""Bytes at the end of a line that hold its checksum."""

Run = Callable[[Callable[[], None]], None]
"""Runs an operation that waits for the disk: in place, or in a thread."""


def at_once(work: Callable[[], None]) -> None:
    """Run it in place."""
    work()


class JournalFile:
    """Appends checksummed lines to a journal."""

    def __init__(self, path: Path, *, state: Storage | None = None, run: Run = at_once) -> None:
        try:
            self._file: BinaryIO = path.open("x+b", buffering=0)
        except FileExistsError as error:
            raise UsageError(
                f"{path} already holds the journal of a run; give another --dir, or move that run away"
            ) from error
        self._path, self._state, self._run = path, state or StateFile(path.with_name(STATE)), run
        self.place = BEGINNING
        """the position after the last written line"""
        self.was_read = 0
        """bytes that were read when it was opened"""
        self.mended: Callable[[], None] = lambda: None
        """called after a lost directory was restored, to restore other files in it"""

    @classmethod
    def reopened(
        cls, path: Path, *, ended: bool = False, state: Storage | None = None, run: Run = at_once
    ) -> tuple[JournalFile, JournalSummary]:
        """Open the journal of a lost coordinator, without a torn last line; returns its summary, too.

        ``ended``: the run may be over already.
        """
        reopened = cls.__new__(cls)
        reopened._path, reopened._state, reopened._run = path, state or StateFile(path.with_name(STATE)), run
        reopened.place, reopened.was_read = BEGINNING, 0
        reopened.mended = lambda: None
        account = reopened._accounted()
        if reopened.place.lines == 0:
            raise JournalError(f"{path} is empty: there is nothing to resume")
        if account.end is not None and not ended:
            raise UsageError(f"the run in {path.parent} is over; start a new one")
        reopened._file = path.open("r+b", buffering=0)
        reopened._file.truncate(reopened.place.size)
        reopened._file.seek(reopened.place.size)
        return reopened, account

    @classmethod
    def looked_at(cls, path: Path) -> JournalSummary:
        """The summary of a journal that another process may be writing."""
        looking = cls.__new__(cls)
        looking._path, looking._state = path, StateFile(path.with_name(STATE))
        looking.place, looking.was_read = BEGINNING, 0
        return looking._accounted()

    def _accounted(self) -> JournalSummary:
        """The journal's summary: from the state file and the records after it, or from all records."""
        try:
            with self._path.open("rb", buffering=1 << 20) as file:
                saved = decoded(self._state.read())
                if saved is None or not _fits(saved, file):
                    file.seek(0)
                    rewinds = journal.rewinds_in(whole_lines(file))
                    judged = ((record, counts) for _, record, counts in journal.judged(self._read(file), rewinds))
                    return accounted(judged, JournalSummary(""))
                account = JournalSummary.restored(saved, "", 1)
                self.place = saved.place
                for record in self._read(file):
                    if isinstance(record, journal.RewindRecord):
                        go_back(account, record, self.since)
                    account.add(record, None)
                return account
        except OSError as error:
            raise UsageError(f"no journal at {self._path}: {error.strerror}; give the directory of a run") from error

    def _read(self, file: BinaryIO) -> Iterator[journal.Record]:
        """The records after ``self.place``, which advances with them."""
        file.seek(self.place.size)
        for place, record in journal.placed(whole_lines(file), self.place):
            self.was_read += place.size - self.place.size
            self.place = place
            yield record

    def append(self, records: list[journal.Record]) -> None:
        """Write whole lines: all of them, or none if the disk cannot take them (``OSError``)."""
        lines: list[bytes] = []
        place = self.place
        for record in records:
            if isinstance(record, journal.EndRecord):
                record = journal.closing(record, place)
            text, _ = journal.line(journal.encode(record), place.chain)
            place = place.after(text)
            lines.append(text)
        # Unbuffered: data that could not be written now must not appear after later lines.
        left = memoryview(b"".join(lines))
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            # A torn line would make the next coordinator drop all lines after it.
            self._file.truncate(self.place.size)
            self._file.seek(self.place.size)
            raise
        self.place = place

    def since(self, place: JournalPosition) -> Iterator[journal.Record]:
        """The written records from ``place`` on."""
        with self._path.open("rb", buffering=1 << 20) as file:
            file.seek(place.size)
            yield from (record for _, record in journal.placed(whole_lines(file), place))

    def sync(self, done: Callable[[bool], None], *, wait: bool = False) -> None:
        """Sync the file to the disk itself; ``done`` is called with the success, perhaps in another thread."""

        def work() -> None:
            try:
                os.fdatasync(self._file.fileno())
            except OSError:
                done(False)
            else:
                done(True)

        (at_once if wait else self._run)(work)

    def keep(self, content: bytes) -> None:
        """Sync the journal, then write the state file. A failure is ignored: the next one is written soon."""

        def work() -> None:
            with contextlib.suppress(OSError):
                os.fdatasync(self._file.fileno())
                self._state.write(content)

        self._run(work)

    def mend(self) -> bool:
        """Restore the file if it was removed; returns whether it was. Raises ``OSError`` if it cannot be restored."""
        if self._path.exists():
            return False
        self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{self._path.name}.new")
        # A removed file can be read as long as it is open.
        file = fresh.open("w+b", buffering=0)
        try:
            self._file.seek(0)
            shutil.copyfileobj(self._file, file)
            if file.tell() != self.place.size:
                raise OSError(errno.EIO, "what was removed cannot be read any more")
            os.fsync(file.fileno())
            fresh.replace(self._path)
        except OSError:
            file.close()
            self._file.seek(self.place.size)
            raise
        old, self._file = self._file, file
        self._run(old.close)
        self.mended()
        return True

    def close(self) -> None:
        """Close the file."""
        # After the disk operations that still wait.
        self._run(self._file.close)


def _fits(saved: SavedSummary, file: BinaryIO) -> bool:
    """Whether the state file belongs to this journal: the line before its position has the recorded checksum."""
    place = saved.place
    if place.size < _TAIL or file.seek(0, os.SEEK_END) < place.size:
        return False
    file.seek(place.size - _TAIL)
    return file.read(_TAIL) == b'%08x"}\n' % place.chain


def go_back(
    account: JournalSummary, record: journal.RewindRecord, since: Callable[[JournalPosition], Iterator[journal.Record]]
) -> None:
    """Remove from the summary what came after the checkpoint."""
    base = account.base(record.records)
    if base is not None and account.go_back(record, since(base)):
        return
    # Two passes from the beginning: the first one finds the earlier rewinds.
    rewinds = [(n, each.records) for n, each in enumerate(since(BEGINNING)) if isinstance(each, journal.RewindRecord)]
    every = 1 << 62
    judged = journal.judged(since(BEGINNING), [*rewinds, (every, record.records)])
    account.recount(record, (each for number, each, counts in judged if counts and number < record.records))


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a journal, without a last line that was torn by a crash."""
    return (line for line in file if line.endswith(b"\n"))


def history(path: Path) -> Iterator[journal.Record]:
    """The records of a journal that no rewind has voided, without a torn last line."""
    with path.open("rb") as lines:
        rewinds = journal.rewinds_in(lines)
        lines.seek(0)
        for _, record in journal.counting(journal.read(whole_lines(lines)), rewinds):
            yield record


class NumberedRecords:
    """Puts numbered records in order: each once, and none before its predecessors."""

    def __init__(self, written: int = 0) -> None:
        self.written = written
        """how many records were released; also the number of the next one"""
        self.early_bytes = 0
        """bytes of the messages whose records wait for their predecessors"""
        self._early: dict[int, journal.Record] = {}

    @property
    def first_early(self) -> int | None:
        """The number of the first record that waits."""
        return min(self._early, default=None)

    def taken(self, first: int, records: Sequence[journal.Record], size: int = 0) -> list[journal.Record]:
        """The records that can be written now, among these (``size`` bytes) and earlier ones that had to wait."""
        for number, record in enumerate(records, start=first):
            if number >= self.written:
                self._early.setdefault(number, record)
        due: list[journal.Record] = []
        while self.written in self._early:
            due.append(self._early.pop(self.written))
            self.written += 1
        self.early_bytes = self.early_bytes + size if self._early else 0
        return due

    def pass_over(self, upto: int) -> list[journal.Record]:
        """Give up waiting for records before number ``upto``; returns those that can be written now."""
        self.written = max(self.written, upto)
        return self.taken(self.written, [])
