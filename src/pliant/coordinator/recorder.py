"""Journal records between the workers and the disk.

Question  Which records are on disk, which still wait, and what may members be told because of it?
Holds     Workers' records are numbered; each is written once and in order. Records that could not be written wait and
          are tried again in order, so none is missing in between. A checkpoint may be named, and workers may forget
          their records, once all records up to there survive a power cut. Records that no worker has any more are
          journaled as missing.
Source    ours; docs/design/0003-journal.md, docs/design/0014-checkpoints.md,
          docs/design/0020-coordinator-at-scale.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pliant.control import messages
from pliant.coordinator.journal import NumberedRecords
from pliant.core.journal import records as journal
from pliant.core.journal.records import FROM_WORKERS, JournalPosition
from pliant.core.membership.events import Note
from pliant.errors import JournalError

SYNC_EVERY_S = 1.0
"""Interval of fdatasync: members must keep the records of this time."""

LOOK_EVERY_S = 1.0
"""How often to check that the journal file still exists."""

AGAIN_AFTER_S = 2.0
"""After this long the members are asked for missing records: a lost coordinator may have acknowledged too many."""

SAVED_WAITING = 10
"""Most checkpoints that wait for the records before them; only one worker at a time writes a checkpoint."""

COMPLAINS_EVERY_S = 10.0
"""How often the user is told that the journal cannot be written."""

EARLY_BYTES = 64 << 20
"""Most bytes of records that wait for their predecessors; workers keep and resend records that are not written."""


class JournalSink(Protocol):
    """Where records are appended: a ``JournalFile``, or a list in a simulation."""

    @property
    def place(self) -> JournalPosition: ...
    def append(self, records: list[journal.Record]) -> None: ...
    def since(self, place: JournalPosition) -> Iterator[journal.Record]: ...
    def sync(self, done: Callable[[bool], None], *, wait: bool = False) -> None: ...
    def keep(self, content: bytes) -> None: ...
    def mend(self) -> bool: ...
    def close(self) -> None: ...


class Recorder:
    """Receives records and writes them. ``written``: how many records of workers a lost coordinator has written."""

    def __init__(self, journal_file: JournalSink, now_s: float, written: int = 0) -> None:
        self._journal = journal_file
        self._lines = NumberedRecords(written)
        self._durable = 0
        """workers' records that survive a power cut; 0 at first, because a lost coordinator may not have synced"""
        self._syncing = False
        self._synced_s = now_s - SYNC_EVERY_S
        self._looked_s = now_s
        self._gap_since_s: float | None = None
        self._asked = False
        self._refused = False
        """too many records came before their predecessors, and were dropped"""
        self._unwritten: list[journal.Record] = []
        """records that could not be written: the disk is full, or not there"""
        self._complained_s = float("-inf")
        self._saved: list[messages.Saved] = []
        """complete checkpoints; the records before them are not on disk yet"""
        self._told = 0

    # records of workers

    def taken(self, first: int, payloads: Sequence[bytes]) -> list[journal.Record] | str:
        """The records to write now, these and earlier ones that had to wait; or why these are refused.

        ``first``: the number of the first one.
        """
        try:
            records = [journal.decode(payload) for payload in payloads]
        except JournalError as error:
            return f"sent what is {error}"
        if not all(isinstance(record, FROM_WORKERS) for record in records):
            return "sent journal records that are not its own to write"
        size = sum(map(len, payloads))
        if first > self._lines.written and self._lines.early_bytes + size > EARLY_BYTES:
            # They are sent again when the sender is told from which number on.
            self._refused = True
            return []
        due = self._lines.taken(first, records, size)
        if due:
            # Records could be written, so the gap is closed.
            self._gap_since_s, self._asked = None, False
        return due

    def gap(self, now_s: float) -> int | None:
        """The number from which on members should send records again, if a gap has lasted long enough.

        None: there is no gap, or the members were already asked.
        """
        if self._lines.first_early is None:
            self._gap_since_s, self._asked = None, False
            refused, self._refused = self._refused, False
            return self._lines.written if refused else None
        if self._gap_since_s is None:
            self._gap_since_s = now_s
        if self._asked or now_s - self._gap_since_s < AGAIN_AFTER_S:
            return None
        self._asked = True
        return self._lines.written

    def missing(self, now_s: float, patience_s: float) -> list[journal.Record]:
        """If a gap has lasted ``patience_s``: a ``GapRecord`` for the missing records, and the records after them."""
        first, before = self._lines.first_early, self._lines.written
        since_s = now_s if self._gap_since_s is None else self._gap_since_s
        if first is None or now_s - since_s < patience_s:
            return []
        due = self._lines.pass_over(first)
        return [journal.GapRecord(before, first, "no worker has them any more"), *due]

    def save(self, saved: messages.Saved) -> None:
        """Note a complete checkpoint."""
        self._saved = [*self._saved, saved][-SAVED_WAITING:]

    def forget_early(self) -> None:
        """Drop waiting records and checkpoints of lost workers: they are void."""
        self._lines, self._saved = NumberedRecords(self._lines.written), []
        self._gap_since_s, self._asked = None, False

    # the disk

    def write(self, records: Sequence[journal.Record], now_s: float) -> Note | None:
        """Append to the journal; returns a note about the disk, if there is one."""
        self._unwritten += records
        return self.flush(now_s)

    def flush(self, now_s: float) -> Note | None:
        """Write the records that wait. The workers keep theirs until then."""
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

    def sync(self, now_s: float) -> None:
        """Start an fdatasync every ``SYNC_EVERY_S``, or sooner if a checkpoint waits for it."""
        due = now_s - self._synced_s >= SYNC_EVERY_S or any(s.records <= self.on_disk for s in self._saved)
        if due and not self._syncing and self.on_disk > self._durable:
            self._syncing, self._synced_s, count = True, now_s, self.on_disk
            self._journal.sync(lambda well: self._synced(count if well else 0))

    def sync_now(self) -> None:
        """Sync the journal and wait for it."""
        count = self.on_disk
        self._journal.sync(lambda well: self._synced(count if well else 0), wait=True)

    def _synced(self, count: int) -> None:
        self._durable, self._syncing = max(self._durable, count), False

    def mend(self, now_s: float) -> Note | None:
        """Check every ``LOOK_EVERY_S`` whether the journal was removed, and restore it; returns a note for the user."""
        if now_s - self._looked_s < LOOK_EVERY_S:
            return None
        self._looked_s = now_s
        try:
            if not self._journal.mend():
                return None
        except OSError as error:
            if now_s - self._complained_s < COMPLAINS_EVERY_S:
                return None
            self._complained_s = now_s
            return Note("journal", f"the run directory was lost, and cannot be made again: {error.strerror}")
        return Note("journal", "the run directory was lost; it is made again, and nothing is missing in the journal")

    @property
    def place(self) -> JournalPosition:
        """The position after the last written record."""
        return self._journal.place

    def keep(self, content: bytes) -> None:
        """Write the state file."""
        self._journal.keep(content)

    def since(self, place: JournalPosition) -> Iterator[journal.Record]:
        """The records on disk from ``place`` on."""
        return self._journal.since(place)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    # what members may be told

    @property
    def known(self) -> int:
        """How many of the workers' records have arrived without a gap."""
        return self._lines.written

    @property
    def on_disk(self) -> int:
        """How many of them are written."""
        return self._lines.written - sum(isinstance(record, FROM_WORKERS) for record in self._unwritten)

    @property
    def is_whole(self) -> bool:
        """Whether all records are written."""
        return not self._unwritten

    def checkpoints_due(self) -> list[messages.Saved]:
        """Checkpoints that now exist, because all records before them survive a power cut. Each is returned once."""
        due = [saved for saved in self._saved if saved.records <= self._durable]
        self._saved = [saved for saved in self._saved if saved not in due]
        return due

    @property
    def is_news(self) -> bool:
        """Whether members should be told that more records are safe."""
        return self._durable > self._told

    @property
    def acknowledged(self) -> int:
        """How many records the members need not keep: they survive a power cut."""
        return self._durable

    def told(self) -> messages.Written:
        """The message to the members about the records that are safe."""
        self._told = self._durable
        return messages.Written(self._told)
