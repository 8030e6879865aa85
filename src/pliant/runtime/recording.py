"""The run's records on their way to disk.

Question  Which records has the disk taken, which still wait, and what may be said because of it?
Holds     Workers' records are taken by number, each once and in order. What the disk does not take waits and is tried
          again, in order: nothing is missing in between. A checkpoint may be named, and workers may forget their
          records, once the disk has taken what leads there.
Source    ours; docs/design/0003-journal.md, docs/design/0007-elastic.md, docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pliant.control import messages
from pliant.core import journal
from pliant.core.events import Note
from pliant.core.journal import FROM_WORKERS
from pliant.errors import JournalError
from pliant.runtime.journaling import Numbered

WRITTEN_EVERY_S = 0.2
"""How often members are told what is on disk, at most: they only have to keep what is not."""

SAVED_WAITING = 10
"""Checkpoints that wait for the records that lead to them; one worker at a time writes one."""

COMPLAINS_EVERY_S = 10.0
"""How often the user is told that the journal cannot be written."""

EARLY_BYTES = 64 << 20
"""Of journal records that wait for their predecessors; whoever sends them keeps and repeats what is not written."""


class Journal(Protocol):
    """Where records are appended: a ``JournalFile``, or a list in a simulation."""

    def append(self, records: list[journal.Record]) -> None: ...
    def records(self) -> list[journal.Record]: ...
    def close(self) -> None: ...


class Recorder:
    """Takes records in and hands them to the disk. ``records`` is what a lost coordinator has written."""

    def __init__(self, journal_file: Journal, now_s: float, records: Sequence[journal.Record] = ()) -> None:
        self.last_round = max(map(_number, records), default=0)
        """the highest number of a round that was ever written"""
        self._journal = journal_file
        self._lines = Numbered(sum(isinstance(record, FROM_WORKERS) for record in records))
        self._unwritten: list[journal.Record] = []
        """the disk did not take them: full, or not there"""
        self._complained_s = float("-inf")
        self._saved: list[messages.Saved] = []
        """complete, but what they are of is not on disk yet"""
        self._told = self._lines.written
        self._told_s = now_s

    # what workers say

    def taken(self, first: int, payloads: Sequence[bytes]) -> list[journal.Record] | str:
        """Records that are to be written now, these and earlier ones that had to wait; or why these are refused."""
        try:
            records = [journal.decode(payload) for payload in payloads]
        except JournalError as error:
            return f"sent what is {error}"
        if not all(isinstance(record, FROM_WORKERS) for record in records):
            return "sent journal records that are not its own to write"
        size = sum(map(len, payloads))
        if first > self._lines.written and self._lines.early_bytes + size > EARLY_BYTES:
            return "sent too many journal records out of order"
        return self._lines.taken(first, records, size)

    def save(self, saved: messages.Saved) -> None:
        """A checkpoint is complete."""
        self._saved = [*self._saved, saved][-SAVED_WAITING:]

    def forget_early(self) -> None:
        """What lost workers had still to say is void."""
        self._lines, self._saved = Numbered(self._lines.written), []

    # the disk

    def write(self, records: Sequence[journal.Record], now_s: float) -> Note | None:
        """Append to the journal; what there is to say about the disk."""
        self._unwritten += records
        self.last_round = max([self.last_round, *map(_number, records)])
        return self.flush(now_s)

    def flush(self, now_s: float) -> Note | None:
        """Hand to the disk what it has not taken yet. The workers keep their lines until it has."""
        if not self._unwritten:
            return None
        try:
            self._journal.append(self._unwritten)
        except OSError as error:
            if now_s - self._complained_s < COMPLAINS_EVERY_S:
                return None
            self._complained_s = now_s
            text = f"cannot write the journal: {error.strerror}; training goes on, and it is tried again"
            return Note("journal", text)
        self._unwritten = []
        if self._complained_s == float("-inf"):
            return None
        self._complained_s = float("-inf")
        return Note("journal", "the journal is written again, and nothing is missing in it")

    def close(self) -> None:
        """Nothing can be written any more."""
        self._journal.close()

    # what may be said because of it

    @property
    def known(self) -> int:
        """How many of the workers' records have come, without a gap."""
        return self._lines.written

    @property
    def on_disk(self) -> int:
        """How many of them the disk has taken."""
        return self._lines.written - sum(isinstance(record, FROM_WORKERS) for record in self._unwritten)

    @property
    def is_whole(self) -> bool:
        """Whether the disk has taken everything."""
        return not self._unwritten

    def history(self) -> list[journal.Record]:
        """The records that count, on disk or not."""
        return journal.effective([*self._journal.records(), *self._unwritten])

    def checkpoints_due(self) -> list[messages.Saved]:
        """Those that exist from here on: the disk has everything that leads to them. Each is given out once."""
        due = [saved for saved in self._saved if saved.records <= self.on_disk]
        self._saved = [saved for saved in self._saved if saved not in due]
        return due

    def is_news(self, now_s: float) -> bool:
        """Whether members are to be told what is on disk."""
        return self.on_disk > self._told and now_s - self._told_s >= WRITTEN_EVERY_S

    def acknowledged(self, now_s: float) -> messages.Written:
        """What members are told now: so much is on disk."""
        self._told, self._told_s = self.on_disk, now_s
        return messages.Written(self._told)


def _number(record: journal.Record) -> int:
    """Of the round that the record is about, or passes over."""
    return int(getattr(record, "void", 0) or getattr(record, "round", 0))
