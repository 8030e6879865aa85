"""What a coordinator starts with.

Question  What is fixed for a run before it starts, and what does a new coordinator take from a lost one's journal?
Holds     A pure function of the run's specification, its journal and the clock. Journaled exchanges were settled, so no
          worker may start the training from the beginning.
Source    ours; docs/design/0007-elastic.md, docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from pliant.coordinator.journal_summary import JournalSummary
from pliant.core.journal import records as journal
from pliant.core.membership import advance
from pliant.core.membership import roster as members
from pliant.core.membership.events import Ended
from pliant.types import WorkerId


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Settings that are fixed before a run starts. ``workers`` is how many its launcher starts."""

    job: str
    script: str
    version: str
    workers: int = 1
    dead_after_s: float = members.DEAD_AFTER_S
    min_workers: int = 1
    max_workers: int | None = None
    grace_s: float = members.GRACE_S
    script_digest: str = ""
    arguments_digest: str = ""

    @property
    def rules(self) -> members.Rules:
        """The part that the decisions depend on."""
        return members.Rules(self.script, self.version, self.min_workers, self.max_workers, self.grace_s)

    def record(self, started_unix_s: float) -> journal.RunRecord:
        """The journal's first record."""
        return journal.RunRecord(
            self.job, self.version, started_unix_s, script=self.script_digest, arguments=self.arguments_digest
        )


@dataclass(frozen=True, slots=True)
class Recovered:
    """What is recovered from a lost coordinator's journal."""

    state: members.Roster
    end: Ended | None = None
    """set if the run was over already"""


def inherited(charter: RunSpec, account: JournalSummary, term: int, now_s: float, *, rewind: bool = False) -> Recovered:
    """What the coordinator of this term takes from a journal; ``rewind``: all workers are lost, too."""
    names = [WorkerId(name) for name in account.roster]
    # Journaled exchanges were settled: no worker may start from the beginning.
    settled = max(account.tally.status.rounds, min(account.written, 1))
    state = advance.resumed(charter.rules, term, charter.dead_after_s, now_s, account.era, names, settled)
    state = replace(state, checkpoints=checkpoints(account), rewinds=account.rewinds)
    if rewind:
        return Recovered(advance.rewound(state))
    end = account.end
    if end is not None:
        state = advance.ended(state, end.reason, completed=end.completed, exit_status=end.exit_status)
        return Recovered(state, Ended(end.reason, end.completed, end.exit_status))
    return Recovered(advance.finishing(state, now_s) if account.finishing else state)


def checkpoints(account: JournalSummary) -> tuple[str, ...]:
    """The names of the existing checkpoints, newest first."""
    return tuple(name for name, _ in account.checkpoints)
