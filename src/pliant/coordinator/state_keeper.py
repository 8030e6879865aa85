"""When the coordinator writes its state file.

Question  How often is the summary of the journal written, so that a new coordinator has little to read?
Holds     Often enough for its reader, in time and in bytes, and never for more than one part in a hundred of the time.
          Nothing is written while the journal on disk is behind.
Source    ours; docs/design/0020-coordinator-at-scale.md.
"""

from __future__ import annotations

from collections.abc import Callable

from pliant.coordinator import state_file
from pliant.coordinator.journal_summary import JournalSummary
from pliant.coordinator.recorder import Recorder

KEEP_EVERY_S = 5.0
"""How often the state file is written: a new coordinator has to read the journal from there on."""

KEEP_BYTES = 1 << 20
"""The state file is also written when the journal has grown by about this much."""

KEEP_SHARE = 100.0
"""It is written at most every this many times the duration of writing: a script may have made 100,000 calls."""


class StateKeeper:
    """Writes the state file."""

    def __init__(self, recorder: Recorder, account: JournalSummary, clock: Callable[[], float], now_s: float) -> None:
        self._recorder = recorder
        self._account = account
        self._clock = clock
        self._kept_s, self._keeping_s = now_s - KEEP_EVERY_S, 0.0
        """when it was last written, and how long that took"""
        self._kept_size = 0
        """size of the journal then"""

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to write it again."""
        since_s = now_s - self._kept_s
        grown = self._recorder.place.size - self._kept_size
        return since_s >= KEEP_SHARE * self._keeping_s and (since_s >= KEEP_EVERY_S or grown >= KEEP_BYTES)

    def keep(self, now_s: float) -> None:
        """Write it, if the journal on disk is complete."""
        if not self._recorder.is_whole:
            return
        began_s = self._clock()
        place = self._recorder.place
        self._account.bookmark(place)
        self._recorder.keep(state_file.encoded(self._account.saved(place)))
        self._kept_s, self._kept_size, self._keeping_s = now_s, place.size, self._clock() - began_s
