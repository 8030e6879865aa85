"""What users and monitors can read about a run.

Question  What is the run's status, and which notable events were there?
Holds     Figures come from the journal (``StatusTracker``) and the roster; nothing is decided here. Notes contain only
          printable characters; the last ones are kept.
Source    ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from pliant.coordinator import convert
from pliant.coordinator.journal_summary import JournalSummary
from pliant.coordinator.status import Status, StatusTracker
from pliant.core.journal import records as journal
from pliant.core.membership import failed_formations, roster
from pliant.core.membership.events import Note
from pliant.types import WorkerId

EVENTS_KEPT = 1000

CHANGES_KEPT = 1000
"""Most changes of workers that are journaled with an era."""

CHANGE_LENGTH = 200
"""Most characters of a change's text in the journal."""


class RunEvent(msgspec.Struct, frozen=True):
    """One notable event of a run, for people and programs."""

    unix_s: float
    kind: str
    worker: str
    text: str


class StatusBoard:
    """The status kept by the coordinator. ``unix_offset_s``, added to the coordinator's clock, gives the Unix time."""

    def __init__(self, account: JournalSummary, unix_offset_s: float) -> None:
        self._account = account
        self._unix_offset_s = unix_offset_s
        self._happenings: deque[RunEvent] = deque(maxlen=EVENTS_KEPT)
        self._changes: deque[journal.ChangeLine] = deque(maxlen=CHANGES_KEPT)
        """changes of workers since the last era"""

    @property
    def tally(self) -> StatusTracker:
        """The journal's figures."""
        return self._account.tally

    @property
    def current(self) -> Status:
        """The same object until the run goes back to a checkpoint."""
        return self.tally.status

    def add(self, record: journal.Record, now_s: float) -> list[Note]:
        """Add one journal record; returns what is notable about it."""
        self._account.add(record, now_s)
        if not isinstance(record, journal.RoundRecord):
            return []
        notes: list[Note] = []
        if record.delay is not None:
            notes.append(Note("delay", convert.verdict(record)))
        if record.drift is not None:
            drifted = convert.drifted(record.drift, self.tally.roster)
            notes += [Note("drift", text, WorkerId(worker)) for worker, text in drifted]
        return notes

    def describe(self, state: roster.Roster) -> None:
        """Update the status of slots and eras from the roster."""
        status = self.current
        present = {worker.slot: worker for worker in reversed(state.workers)}
        for slot in state.slots:
            worker = present.get(slot.name)
            name = worker.name if worker is not None else convert.last_name(slot)
            unreachable = worker is not None and failed_formations.is_unreachable(state, worker)
            word = convert.word(slot, worker, unreachable=unreachable)
            self.tally.describe(slot.name, name, word, slot.restarts)
        match state.course:
            case roster.Steady(era=era) | roster.Planned(era=era):
                status.era = max(status.era, era)
            case _:
                pass
        status.restarts = sum(slot.restarts for slot in state.slots)

    def note(self, note: Note, now_s: float) -> str:
        """Keep a notable event; returns its text in printable form."""
        text = convert.printable(note.text)
        unix_s = now_s + self._unix_offset_s
        self._happenings.append(RunEvent(unix_s, note.kind, note.worker, text))
        if note.worker:
            self._changes.append(journal.ChangeLine(unix_s, note.kind, note.worker, text[:CHANGE_LENGTH]))
        return text

    def dated(self, record: journal.Record, now_s: float) -> journal.Record:
        """The record to write: an era record gets its time, and the changes of workers before it."""
        if not isinstance(record, journal.EraRecord):
            return record
        changes = list(self._changes)
        self._changes.clear()
        return msgspec.structs.replace(record, unix_s=now_s + self._unix_offset_s, changes=changes)

    # queries

    def status(self) -> bytes:
        """The run's status as JSON."""
        return msgspec.json.encode(self.current)

    def happenings(self) -> bytes:
        """The last notable events as a JSON list, one per line, newest last."""
        return b"[" + b",\n ".join(msgspec.json.encode(happening) for happening in self._happenings) + b"]\n"

    def figures(self) -> Mapping[str, float]:
        """The run's numbers for the metrics endpoint."""
        status = self.current
        known = {"batch": status.batch, "rate": status.rate, "loss": status.loss}
        return {
            "samples": status.samples_total,
            "rounds": status.rounds,
            "eras": status.eras,
            "restarts": status.restarts,
            "era": status.era,
            "term": status.term,
            "workers": sum(worker.state == "training" for worker in status.workers),
            **{name: value for name, value in known.items() if value is not None},
        }
