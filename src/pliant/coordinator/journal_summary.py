"""The summary of a journal: all that a coordinator has to know of the records so far.

Question  What is the state of a run, without reading its whole journal again?
Holds     The summary is updated by one record at a time; its size does not depend on the number of rounds. Records that
          a rewind has voided count only for numbering: numbers are never used twice.
Source    ours; docs/design/0020-coordinator-at-scale.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pliant.coordinator.status import StatusTracker, TrackerState
from pliant.core.journal import records as journal
from pliant.core.journal.records import JournalPosition
from pliant.core.membership.roster import CHECKPOINTS_KEPT

VERSION = 1

BOOKMARKS = 64
"""Positions from which figures can be counted again, so that a rewind reads only a small part of a long journal."""


class Bookmark(msgspec.Struct, frozen=True):
    """A position in the journal, and the figures there."""

    place: JournalPosition
    written: int
    figures: str
    """``TrackerState``, kept as JSON because most are never read again"""


class SavedSummary(msgspec.Struct):
    """A summary in the form in which it is kept in a file."""

    place: JournalPosition
    figures: TrackerState
    written: int
    last_round: int
    era: int
    roster: list[str]
    rewinds: int
    missing: int
    finishing: bool
    checkpoints: list[tuple[str, int]]
    end: journal.EndRecord | None
    bookmarks: list[Bookmark]
    """the last bookmark before each checkpoint"""
    version: int = VERSION
    missing_why: str = ""


class JournalSummary:
    """The summary of one journal."""

    def __init__(self, job: str, term: int = 1) -> None:
        self.tally = StatusTracker(job, term)
        self.written = 0
        """number of workers' records, missing ones included; also the number of the next one"""
        self.missing = 0
        """how many of them are not in the journal"""
        self.missing_why = ""
        """why the first of them is missing"""
        self.last_round = 0
        """the highest round number that was ever written"""
        self.era = 0
        """era and roster of the last era record"""
        self.roster: list[str] = []
        self.rewinds = 0
        self.finishing = False
        """a worker has finished its script"""
        self.checkpoints: list[tuple[str, int]] = []
        """newest first: (name, number of workers' records before it)"""
        self.end: journal.EndRecord | None = None
        """the last record, if it is an ``EndRecord``"""
        self._bookmarks: list[Bookmark] = []

    def add(self, record: journal.Record, now_s: float | None) -> None:
        """Add the next valid record; without a time it does not count for speeds."""
        self.pass_over(record)
        self.tally.add(record, now_s)
        match record:
            case journal.CheckpointRecord(name=name, records=records):
                self.checkpoints = [(name, records), *self.checkpoints][:CHECKPOINTS_KEPT]
            case journal.FinishingRecord():
                self.finishing = True
            case _:
                pass

    def pass_over(self, record: journal.Record) -> None:
        """Count the next record for numbering, even if a rewind has voided it."""
        self.written, before = journal.next_number(self.written, record), self.written
        self.last_round = max(self.last_round, round_number(record))
        self.end = record if isinstance(record, journal.EndRecord) else None
        match record:
            case journal.EraRecord(era=era, roster=roster):
                self.era, self.roster = era, roster
            case journal.RewindRecord():
                self.rewinds += 1
            case journal.GapRecord(reason=reason):
                # The number of missing records may be unknown: at least one.
                self.missing += max(1, self.written - before)
                self.missing_why = self.missing_why or reason
            case _:
                pass

    def begin_term(self, job: str, term: int, now_s: float, *, rewind: bool) -> None:
        """Continue under another coordinator; ``rewind``: drop the end of a run that did not complete."""
        status = self.tally.status
        status.job, status.term = job, term
        if rewind:
            self.finishing, self.end = False, None
            status.ended, status.completed = None, False
        self.tally.resume((), now_s)

    # going back

    def bookmark(self, place: JournalPosition) -> None:
        """Add a bookmark: all records up to this position are added and on disk."""
        if self._bookmarks and self._bookmarks[-1].place == place:
            return
        figures = msgspec.json.encode(self.tally.figures()).decode()
        self._bookmarks.append(Bookmark(place, self.written, figures))
        if len(self._bookmarks) > BOOKMARKS:
            # Drop every other one, but none that a checkpoint needs.
            needed = [self._before(records) for _, records in self.checkpoints]
            self._bookmarks = [mark for i, mark in enumerate(self._bookmarks) if i % 2 == 0 or mark in needed]

    def _before(self, records: int) -> Bookmark | None:
        return next((mark for mark in reversed(self._bookmarks) if mark.written <= records), None)

    def base(self, records: int) -> JournalPosition | None:
        """The position to read the journal from, to count the figures after ``records`` records of workers."""
        mark = self._before(records)
        return mark.place if mark is not None else None

    def go_back(self, record: journal.RewindRecord, since: Iterable[journal.Record] | None) -> bool:
        """Drop everything after the checkpoint; ``since`` are the journal's records from ``base`` on.

        False: the figures cannot be counted from there, because the run has gone back in between.
        """
        mark = self._before(record.records)
        if mark is None or since is None:
            return False
        tally = StatusTracker.restored(msgspec.json.decode(mark.figures, type=TrackerState))
        number = mark.written
        for each in since:
            if number >= record.records:
                break
            if isinstance(each, journal.RewindRecord):
                return False
            if not isinstance(each, journal.FinishingRecord | journal.EndRecord):
                tally.add(each, None)
            number = journal.next_number(number, each)
        self._went_back(record.records, tally)
        return True

    def recount(self, record: journal.RewindRecord, history: Iterable[journal.Record]) -> None:
        """The same from the beginning; ``history`` are the earlier records that are still valid after the rewind."""
        tally = StatusTracker(self.tally.status.job, self.tally.status.term)
        tally.resume(history, None)
        self._bookmarks = []
        self._went_back(record.records, tally)

    def _went_back(self, records: int, tally: StatusTracker) -> None:
        tally.plan(self.tally.status.epochs, self.tally.status.samples_planned)
        self.tally = tally
        self._bookmarks = [mark for mark in self._bookmarks if mark.written <= records]
        self.checkpoints = [kept for kept in self.checkpoints if kept[1] <= records]
        self.finishing, self.end = False, None

    # keeping

    def saved(self, place: JournalPosition) -> SavedSummary:
        """The form to keep in a file, at this position."""
        needed = {mark.written: mark for _, records in self.checkpoints if (mark := self._before(records)) is not None}
        return SavedSummary(
            place,
            self.tally.figures(),
            self.written,
            self.last_round,
            self.era,
            self.roster,
            self.rewinds,
            self.missing,
            self.finishing,
            self.checkpoints,
            self.end,
            [needed[written] for written in sorted(needed)],
            missing_why=self.missing_why,
        )

    @classmethod
    def restored(cls, saved: SavedSummary, job: str, term: int) -> JournalSummary:
        """The summary from a file, for the coordinator of another term."""
        account = cls(job, term)
        account.tally = StatusTracker.restored(saved.figures)
        account.tally.status.job, account.tally.status.term = job, term
        account.written, account.last_round, account.missing = saved.written, saved.last_round, saved.missing
        account.era, account.roster, account.rewinds = saved.era, saved.roster, saved.rewinds
        account.finishing, account.checkpoints, account.end = saved.finishing, saved.checkpoints, saved.end
        account.missing_why, account._bookmarks = saved.missing_why, saved.bookmarks
        return account


def accounted(records: Iterable[tuple[journal.Record, bool]], account: JournalSummary) -> JournalSummary:
    """The summary after these records; each comes with whether it is valid."""
    for record, counts in records:
        if counts:
            account.add(record, None)
        else:
            account.pass_over(record)
    return account


def account_of(records: list[journal.Record], job: str = "job", term: int = 1) -> JournalSummary:
    """The summary of a whole journal in memory."""
    rewinds = [(place, each.records) for place, each in enumerate(records) if isinstance(each, journal.RewindRecord)]
    judged = ((record, counts) for _, record, counts in journal.judged(records, rewinds))
    return accounted(judged, JournalSummary(job, term))


def round_number(record: journal.Record) -> int:
    """The number of the round that the record is about or voids; 0 if there is no such round."""
    return int(getattr(record, "void", 0) or getattr(record, "round", 0))
