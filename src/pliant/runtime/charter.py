"""What a coordinator begins with.

Question  What is fixed for a run before it starts, and what does a lost coordinator's journal leave to the next one?
Holds     A pure function of the charter, the records and the clock. What is written was settled: nobody begins anew.
Source    ours; docs/design/0007-elastic.md, docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pliant.core import journal, members, roster
from pliant.core.events import Ended
from pliant.types import WorkerId


@dataclass(frozen=True, slots=True)
class Charter:
    """What is fixed for a run before it starts. ``workers`` is how many its launcher begins with."""

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
        """What the decisions depend on."""
        return members.Rules(self.script, self.version, self.min_workers, self.max_workers, self.grace_s)

    def record(self, started_unix_s: float) -> journal.RunRecord:
        """The journal's first one."""
        return journal.RunRecord(
            self.job, self.version, started_unix_s, script=self.script_digest, arguments=self.arguments_digest
        )


@dataclass(frozen=True, slots=True)
class Legacy:
    """What a lost coordinator leaves."""

    state: members.Roster
    history: Sequence[journal.Record]
    """its records that count"""
    end: Ended | None = None
    """it died while it said goodbye"""


def inherited(
    charter: Charter, records: Sequence[journal.Record], term: int, now_s: float, *, rewind: bool = False
) -> Legacy:
    """What ``records`` leave to the coordinator of this term; ``rewind``: nobody else is left either."""
    history = journal.effective(records)
    if rewind:
        # That it ended, not well, is over.
        over = journal.FinishingRecord | journal.EndRecord
        history = [record for record in history if not isinstance(record, over)]
    last = next((record for record in reversed(records) if isinstance(record, journal.EraRecord)), None)
    names = [WorkerId(name) for name in last.roster] if last is not None else []
    era = last.era if last is not None else 0
    # What is written was settled: nobody may begin anew.
    rounds = sum(isinstance(record, journal.RoundRecord) for record in history)
    settled = max(rounds, int(any(isinstance(record, journal.FROM_WORKERS) for record in records)))
    state = roster.resumed(charter.rules, term, charter.dead_after_s, now_s, era, names, settled)
    rewinds = sum(isinstance(record, journal.RewindRecord) for record in records)
    state = replace(state, checkpoints=checkpoints(history), rewinds=rewinds)
    if rewind:
        return Legacy(roster.rewound(state), history)
    match records[-1]:
        case journal.EndRecord(reason=reason, completed=completed, exit_status=status):
            state = roster.ended(state, reason, completed=completed, exit_status=status)
            return Legacy(state, history, Ended(reason, completed, status))
        case _:
            finishing = any(isinstance(record, journal.FinishingRecord) for record in history)
            return Legacy(roster.finishing(state, now_s) if finishing else state, history)


def checkpoints(history: Sequence[journal.Record]) -> tuple[str, ...]:
    """The names of those that exist, newest first."""
    names = [record.name for record in reversed(history) if isinstance(record, journal.CheckpointRecord)]
    return tuple(names[: members.CHECKPOINTS_KEPT])
