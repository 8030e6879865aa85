"""The coordinator's journal on disk.

Question  How are records appended, and how does a new coordinator go on where a lost one stopped?
Holds     Lines are written whole and unbuffered. A line torn by a crash is cut off before anything is appended. Beside
          it lies the state file: with it only what was written since is read. Without one the whole journal is, line by
          line. Workers' records are taken by number: a repetition is ignored, a gap waits.
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
"""Bytes of a line's end in which its checksum is."""

Run = Callable[[Callable[[], None]], None]
"""Does some work that waits for the disk: at once, or in a thread."""


def at_once(work: Callable[[], None]) -> None:
    """Do it here."""
    work()


class JournalFile:
    """Appends checksummed lines."""

    def __init__(self, path: Path, *, state: Storage | None = None, run: Run = at_once) -> None:
        try:
            self._file: BinaryIO = path.open("x+b", buffering=0)
        except FileExistsError as error:
            raise UsageError(
                f"{path} already holds the journal of a run; give another --dir, or move that run away"
            ) from error
        self._path, self._state, self._run = path, state or StateFile(path.with_name(STATE)), run
        self.place = BEGINNING
        """behind what is written"""
        self.was_read = 0
        """bytes of it that were read to begin"""
        self.mended: Callable[[], None] = lambda: None
        """what else is to be made again with the directory"""

    @classmethod
    def reopened(
        cls, path: Path, *, ended: bool = False, state: Storage | None = None, run: Run = at_once
    ) -> tuple[JournalFile, JournalSummary]:
        """The journal of a lost coordinator, without a torn last line, and what it comes to.

        ``ended``: also that of a run which is over.
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
        """What a journal comes to, that somebody else may be writing."""
        looking = cls.__new__(cls)
        looking._path, looking._state = path, StateFile(path.with_name(STATE))
        looking.place, looking.was_read = BEGINNING, 0
        return looking._accounted()

    def _accounted(self) -> JournalSummary:
        """What the journal comes to: from the state file on, or from the beginning."""
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
        """The records behind the present place, which moves along."""
        file.seek(self.place.size)
        for place, record in journal.placed(whole_lines(file), self.place):
            self.was_read += place.size - self.place.size
            self.place = place
            yield record

    def append(self, records: list[journal.Record]) -> None:
        """Hand whole lines to the system: all of them, or none where it cannot take them (``OSError``)."""
        lines: list[bytes] = []
        place = self.place
        for record in records:
            if isinstance(record, journal.EndRecord):
                record = journal.closing(record, place)
            text, _ = journal.line(journal.encode(record), place.chain)
            place = place.after(text)
            lines.append(text)
        # Unbuffered: what could not be written now must not turn up behind what comes later.
        left = memoryview(b"".join(lines))
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            # A torn line would make the next coordinator forget what comes after it.
            self._file.truncate(self.place.size)
            self._file.seek(self.place.size)
            raise
        self.place = place

    def since(self, place: JournalPosition) -> Iterator[journal.Record]:
        """The records from a place on, as far as they are written."""
        with self._path.open("rb", buffering=1 << 20) as file:
            file.seek(place.size)
            yield from (record for _, record in journal.placed(whole_lines(file), place))

    def sync(self, done: Callable[[bool], None], *, wait: bool = False) -> None:
        """Have what is written put on the disk itself; ``done`` hears whether it is, perhaps in another thread."""

        def work() -> None:
            try:
                os.fdatasync(self._file.fileno())
            except OSError:
                done(False)
            else:
                done(True)

        (at_once if wait else self._run)(work)

    def keep(self, content: bytes) -> None:
        """Write the state file, once the journal is on the disk itself. It is tried again soon, should it fail."""

        def work() -> None:
            with contextlib.suppress(OSError):
                os.fdatasync(self._file.fileno())
                self._state.write(content)

        self._run(work)

    def mend(self) -> bool:
        """Make the file again, whole, where somebody has removed it; whether that was so. ``OSError``: it cannot be."""
        if self._path.exists():
            return False
        self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{self._path.name}.new")
        # What was removed can be read as long as it is open.
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
        """Nothing can be appended any more."""
        # Behind what still waits for the disk.
        self._run(self._file.close)


def _fits(saved: SavedSummary, file: BinaryIO) -> bool:
    """Whether the state is of this journal: the line before its place has the checksum that it names."""
    place = saved.place
    if place.size < _TAIL or file.seek(0, os.SEEK_END) < place.size:
        return False
    file.seek(place.size - _TAIL)
    return file.read(_TAIL) == b'%08x"}\n' % place.chain


def go_back(
    account: JournalSummary, record: journal.RewindRecord, since: Callable[[JournalPosition], Iterator[journal.Record]]
) -> None:
    """Take from the account what came after the checkpoint."""
    base = account.base(record.records)
    if base is not None and account.go_back(record, since(base)):
        return
    # Twice from the beginning: the first time to know where it has gone back before.
    rewinds = [(n, each.records) for n, each in enumerate(since(BEGINNING)) if isinstance(each, journal.RewindRecord)]
    every = 1 << 62
    judged = journal.judged(since(BEGINNING), [*rewinds, (every, record.records)])
    account.recount(record, (each for number, each, counts in judged if counts and number < record.records))


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Without a last one that was torn by a crash."""
    return (line for line in file if line.endswith(b"\n"))


def history(path: Path) -> Iterator[journal.Record]:
    """The records of a journal that count, one after another, without a last line that was torn."""
    with path.open("rb") as lines:
        rewinds = journal.rewinds_in(lines)
        lines.seek(0)
        for _, record in journal.counting(journal.read(whole_lines(lines)), rewinds):
            yield record


class NumberedRecords:
    """Puts numbered records in order: each once, none before its predecessors."""

    def __init__(self, written: int = 0) -> None:
        self.written = written
        """how many were given out; also the number of the next one"""
        self.early_bytes = 0
        """of the messages whose records wait for their predecessors, as told"""
        self._early: dict[int, journal.Record] = {}

    @property
    def first_early(self) -> int | None:
        """The number of the first one that waits."""
        return min(self._early, default=None)

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

    def pass_over(self, upto: int) -> list[journal.Record]:
        """Those before this number do not come any more; what can be written now."""
        self.written = max(self.written, upto)
        return self.taken(self.written, [])
