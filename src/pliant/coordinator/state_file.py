"""The file in which a coordinator keeps its summary of the journal.

Question  How does a coordinator that replaces a lost one start without reading days of journal?
Holds     The file is replaced as a whole. A file that is damaged, of another version or of another journal counts as
          missing. It never contains more than the journal on disk, which is synced first.
Source    ours; docs/design/0020-coordinator-at-scale.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import msgspec

from pliant.coordinator.journal_summary import VERSION, SavedSummary
from pliant.core.journal import records as journal
from pliant.errors import JournalError

STATE = "state.json"


class Storage(Protocol):
    """Where the content is stored."""

    def read(self) -> bytes: ...
    def write(self, content: bytes) -> None: ...


class StateFile:
    """A file in the run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        """The content; empty if there is no file."""
        try:
            return self._path.read_bytes()
        except OSError:
            return b""

    def write(self, content: bytes) -> None:
        """Replace the file atomically: after a crash either the old or the new one is there."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


def encoded(saved: SavedSummary) -> bytes:
    """One line with its checksum, as in the journal."""
    return journal.line(msgspec.json.encode(saved), 0)[0]


def decoded(content: bytes) -> SavedSummary | None:
    """The summary in ``content``; None if it is empty, damaged or of another version."""
    try:
        saved = msgspec.json.decode(journal.unsealed(content, 0), type=SavedSummary)
    except (ValueError, RecursionError, JournalError):
        return None
    return saved if saved.version == VERSION else None
