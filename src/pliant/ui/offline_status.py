"""Status and events of a run whose coordinator does not answer any more.

Question  How did a run end, and which events were there, as far as its journal shows?
Holds     Everything is read from the run directory. Era records have a time, and the changes of workers before them;
          for other events the journal has no time.
Source    ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from pliant.coordinator.journal import JournalFile, history
from pliant.core.journal import records as journal


def told(question: str, directory: Path) -> bytes | None:
    """The answer to ``/status`` or ``/events`` as JSON; None if there is no journal."""
    path = directory / journal.JOURNAL
    if not path.is_file():
        return None
    if question == "/events":
        return msgspec.json.encode(list(_happenings(path)))
    account = JournalFile.looked_at(path)
    status = account.tally.status
    status.job = directory.resolve().name
    status.ended = status.ended or "its coordinator does not answer, and the journal was not closed"
    for row in status.workers:
        row.state = "ended"
    return msgspec.json.encode(status)


def _happenings(path: Path) -> Iterator[dict[str, object]]:
    roster: list[str] = []
    for record in history(path):
        match record:
            case journal.RunRecord(started_unix_s=unix_s):
                yield _happening("started", "the run began", unix_s=unix_s)
            case journal.EraRecord(era=era, roster=names):
                yield from _changes(record, roster)
                yield _happening("era", f"era {era}: {', '.join(names)}", unix_s=record.unix_s)
                roster = names
            case journal.PhaseEndRecord(result=float(result)):
                yield _happening("result", f"evaluate: {result:g}")
            case journal.CheckpointRecord(name=name, round=number):
                yield _happening("checkpoint", f"checkpoint {name} after round {number}")
            case journal.RewindRecord(name=name):
                yield _happening("rewound", f"going on from checkpoint {name}")
            case journal.GapRecord(reason=reason):
                yield _happening("journal", f"records are missing here: {reason}")
            case journal.FinishingRecord(worker=worker):
                yield _happening("finishing", f"{worker} has finished", worker)
            case journal.EndRecord(reason=reason):
                yield _happening("ended", reason)
            case _:
                pass


def _changes(record: journal.EraRecord, roster: list[str]) -> Iterator[dict[str, object]]:
    """The changes of workers before this era; those without a journaled reason follow from the rosters."""
    for change in record.changes:
        yield _happening(change.kind, change.text, change.worker, change.unix_s)
    told = {change.worker for change in record.changes}
    for name in record.roster:
        if name not in roster and roster and name not in told:
            yield _happening("joined", f"{name} joined", name)
    for name in roster:
        if name not in record.roster and name not in told:
            yield _happening("left", f"{name} left or was lost", name)


def _happening(kind: str, text: str, worker: str = "", unix_s: float = 0.0) -> dict[str, object]:
    return {"unix_s": unix_s, "kind": kind, "worker": worker, "text": text}
