"""The run's records on their way to disk.

Question  Which records has the disk taken, which still wait, and what may be said because of it?
Holds     Workers' records are taken by number, each once and in order. What the disk does not take waits and is tried
          again, in order: nothing is missing in between. A checkpoint may be named, and workers may forget their
          records, once what leads there survives a power cut. Records that nobody has any more are said to be missing.
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
"""How often the disk is made to keep what it has taken: members have to keep a second of records more."""

LOOK_EVERY_S = 1.0
"""How often it is looked whether the journal is still where it was."""

AGAIN_AFTER_S = 2.0
"""A gap that lasts so long is asked for: whoever sends may have been told too much by a lost coordinator."""

SAVED_WAITING = 10
"""Checkpoints that wait for the records that lead to them; one worker at a time writes one."""

COMPLAINS_EVERY_S = 10.0
"""How often the user is told that the journal cannot be written."""

EARLY_BYTES = 64 << 20
"""Of journal records that wait for their predecessors; whoever sends them keeps and repeats what is not written."""


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
    """Takes records in and hands them to the disk. ``written`` of the workers a lost coordinator has written."""

    def __init__(self, journal_file: JournalSink, now_s: float, written: int = 0) -> None:
        self._journal = journal_file
        self._lines = NumberedRecords(written)
        self._durable = 0
        """records of the workers that survive a power cut: a lost coordinator may not have waited for that"""
        self._syncing = False
        self._synced_s = now_s - SYNC_EVERY_S
        self._looked_s = now_s
        self._gap_since_s: float | None = None
        self._asked = False
        self._refused = False
        """some came too early, and were too many"""
        self._unwritten: list[journal.Record] = []
        """the disk did not take them: full, or not there"""
        self._complained_s = float("-inf")
        self._saved: list[messages.Saved] = []
        """complete, but what they are of is not on disk yet"""
        self._told = 0

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
            # They are sent again when it is said from where on.
            self._refused = True
            return []
        due = self._lines.taken(first, records, size)
        if due:
            # Where it goes on nothing is missing, whatever else somebody has sent.
            self._gap_since_s, self._asked = None, False
        return due

    def gap(self, now_s: float) -> int | None:
        """For how many records those wait that have come too early, where that lasts; for the sender to begin again.

        None: there is no gap, or it was asked for.
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
        """That records are missing which nobody has sent for so long, and what follows them."""
        first, before = self._lines.first_early, self._lines.written
        since_s = now_s if self._gap_since_s is None else self._gap_since_s
        if first is None or now_s - since_s < patience_s:
            return []
        due = self._lines.pass_over(first)
        return [journal.GapRecord(before, first, "no worker has them any more"), *due]

    def save(self, saved: messages.Saved) -> None:
        """A checkpoint is complete."""
        self._saved = [*self._saved, saved][-SAVED_WAITING:]

    def forget_early(self) -> None:
        """What lost workers had still to say is void."""
        self._lines, self._saved = NumberedRecords(self._lines.written), []
        self._gap_since_s, self._asked = None, False

    # the disk

    def write(self, records: Sequence[journal.Record], now_s: float) -> Note | None:
        """Append to the journal; what there is to say about the disk."""
        self._unwritten += records
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

    def sync(self, now_s: float) -> None:
        """Have the disk keep what it has taken, now and then, or soon where a checkpoint waits for it."""
        due = now_s - self._synced_s >= SYNC_EVERY_S or any(s.records <= self.on_disk for s in self._saved)
        if due and not self._syncing and self.on_disk > self._durable:
            self._syncing, self._synced_s, count = True, now_s, self.on_disk
            self._journal.sync(lambda well: self._synced(count if well else 0))

    def sync_now(self) -> None:
        """Do not go on before the disk keeps what it has taken."""
        count = self.on_disk
        self._journal.sync(lambda well: self._synced(count if well else 0), wait=True)

    def _synced(self, count: int) -> None:
        self._durable, self._syncing = max(self._durable, count), False

    def mend(self, now_s: float) -> Note | None:
        """Look, now and then, whether somebody has removed the journal, and make it again; what is to be said."""
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
        """Behind what the disk has taken."""
        return self._journal.place

    def keep(self, content: bytes) -> None:
        """Write the state file."""
        self._journal.keep(content)

    def since(self, place: JournalPosition) -> Iterator[journal.Record]:
        """Records on disk."""
        return self._journal.since(place)

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

    def checkpoints_due(self) -> list[messages.Saved]:
        """Those that exist from here on: the disk keeps everything that leads to them. Each is given out once."""
        due = [saved for saved in self._saved if saved.records <= self._durable]
        self._saved = [saved for saved in self._saved if saved not in due]
        return due

    @property
    def is_news(self) -> bool:
        """Whether members are to be told what is on disk."""
        return self._durable > self._told

    @property
    def acknowledged(self) -> int:
        """How many records the members need not keep: they survive a power cut."""
        return self._durable

    def told(self) -> messages.Written:
        """What members are told now."""
        self._told = self._durable
        return messages.Written(self._told)
