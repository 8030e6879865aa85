"""``pliant audit``: what a journal proves, and up to which point.

Question  Is every sample accounted for, and can records be missing at the end?
Holds     A journal proves its own end by its closing record. If the run's state file is next to it, the journal must
          also contain all lines that the state file was written after: a truncated or rewritten end is detected.
Source    ours; docs/design/0020-coordinator-at-scale.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from pliant.coordinator.journal import whole_lines
from pliant.coordinator.state_file import STATE, StateFile, decoded
from pliant.core.journal import records as journal
from pliant.core.journal.audit import AuditReport, audit
from pliant.core.journal.records import JournalPosition

PROVED, WRONG, OPEN = 0, 1, 3
"""Exit statuses; 2 is that of a wrong command line."""


class _Reading:
    """Reads the valid records, and notes where the journal contradicts its state file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = decoded(StateFile(path.with_name(STATE)).read())
        self._kept = kept.place if kept is not None else None
        self._place = journal.BEGINNING
        self.problems: list[str] = []

    def records(self) -> Iterator[journal.Record]:
        with self._path.open("rb") as file:
            rewinds = journal.rewinds_in(file)
            file.seek(0)
            for _, record in journal.counting(self._read(whole_lines(file)), rewinds):
                yield record
        if self._kept is not None and self._place.lines < self._kept.lines:
            self.problems.append(
                f"the journal ends after line {self._place.lines}, but {STATE} says that it had {self._kept.lines}: "
                "its end was cut off"
            )

    def _read(self, lines: Iterator[bytes]) -> Iterator[journal.Record]:
        for place, record in journal.placed(lines):
            self._place = place
            if self._kept is not None and place.lines == self._kept.lines:
                self._compare(place, self._kept)
            yield record

    def _compare(self, place: JournalPosition, kept: JournalPosition) -> None:
        if place.digest != kept.digest:
            self.problems.append(
                f"the first {place.lines} lines are not those that {STATE} was written of: the journal was changed"
            )


def audited(path: Path, *, quick: bool) -> AuditReport:
    """The findings of ``core.journal.audit``, and contradictions to the state file."""
    reading = _Reading(path)
    report = audit(reading.records(), replay=not quick)
    return replace(report, problems=[*report.problems, *reading.problems])


def text(report: AuditReport) -> list[str]:
    """The report in lines."""
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in report.summary.items()]
    lines += [f"problem: {problem}" for problem in report.problems]
    if report.problems:
        return [*lines, f"{len(report.problems)} problems"]
    if report.end_proved and report.summary["completed"]:
        return [*lines, "every sample is accounted for"]
    if report.end_proved:
        return [*lines, "every sample that the journal knows of is accounted for; the run did not complete"]
    return [*lines, f"no problem, but proved only {report.summary['proved']}"]


def status(report: AuditReport) -> int:
    """The exit status."""
    if report.problems:
        return WRONG
    return PROVED if report.end_proved else OPEN
