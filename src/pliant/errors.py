"""What Pliant raises, in one tree.

    PliantError
    ├── UsageError       the script asks for something Pliant cannot do; the message says what to do instead
    ├── Refused          the coordinator or the group will not take this worker; the message says why
    ├── RunEnded         the run is over for a reason outside this worker (another worker was lost, Ctrl-C)
    ├── JournalError     a journal is damaged, foreign or of another version
    └── NonFiniteLoss    too many rounds in a row had an infinite or undefined loss

Holds     A message is one line: what is wrong, and what to do.
"""

from __future__ import annotations


class PliantError(Exception):
    """The root of all errors that Pliant raises on purpose."""


class UsageError(PliantError):
    """The user's script asks for something Pliant cannot do."""


class Refused(PliantError):
    """This worker does not fit the group."""


class RunEnded(PliantError):
    """The run ended for a reason outside this worker."""


class JournalError(PliantError):
    """A journal cannot be trusted: damaged, foreign, or of another version."""


class NonFiniteLoss(PliantError):
    """Too many rounds in a row were skipped for an infinite or undefined loss or gradient."""
