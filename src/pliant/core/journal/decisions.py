"""The decision code, run again on the tickets that a journal holds.

Question  Do the journaled tickets lead to the journaled decisions?
Holds     Exactly the functions that the workers ran: those of ``core.rounds`` and ``core.regrouping``.
          After the first difference nothing more is compared, for every later state would differ.
Source    Invariant 5 of DESIGN; docs/design/0003-journal.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pliant.core import dealing, evaluation, regrouping, rounds
from pliant.core.consistency import Mismatch
from pliant.core.group_state import GroupState, Policy, Standing, founded
from pliant.core.journal import mapping
from pliant.core.journal.records import (
    CheckpointRecord,
    EndRecord,
    EraRecord,
    ExchangeRecord,
    FinishingRecord,
    GapRecord,
    PhaseEndRecord,
    PhaseRecord,
    PolicyRecord,
    Record,
    RewindRecord,
    RoundRecord,
    RunRecord,
)
from pliant.core.regrouping import Entry
from pliant.core.rounds import Settled
from pliant.core.tickets import Flag
from pliant.types import Span, WorkerId

# Longer lists of spans are shortened in a message.
_MOST_SPANS = 5


class Replay:
    """The decision code, run again on the journaled tickets."""

    def __init__(self) -> None:
        self.rounds = 0
        """rounds and exchanges that were decided again"""
        self.outcome: Settled | None = None
        """of the last of them"""
        self._group: GroupState | None = None
        self._agreed = False
        """the policy is known"""
        self._ended: Settled | None = None
        """the outcome whose phase end is the next record"""
        self._lacking = False
        """the contributions in progress were made up after somebody went: a crumb may be missing, or all of it"""
        self._regrouped = False
        """what survivors kept, of one contribution or the next, may be more than a batch"""
        self._departed = 0
        """rounds that may lack what somebody has gone with: the contribution in progress and the one dealt after it"""
        self._resumed = False
        """after an unplanned era, or from a checkpoint, no script may be in the phase yet: rounds may be empty"""
        self._lost = False

    @property
    def group(self) -> GroupState | None:
        """The state after the records so far."""
        return self._group

    def take(self, record: Record) -> list[str]:
        """What differs between the record and the decision code's answer; nothing after the first difference."""
        if self._lost:
            return []
        try:
            problems = self._taken(record)
        except (ArithmeticError, ValueError, LookupError, AssertionError) as error:
            # No run has such numbers: it would have failed on them, too.
            problems = [f"a {type(record).__name__} on which the decision code fails: {type(error).__name__}: {error}"]
        self._lost = self._lost or bool(problems)
        return problems

    def _taken(self, record: Record) -> list[str]:
        match record:
            case RoundRecord() | ExchangeRecord():
                return self._settle(record)
            case PhaseRecord():
                return self._open(record)
            case PhaseEndRecord():
                return self._end(record)
            case PolicyRecord():
                return self._agree(record)
            case EraRecord():
                return self._change(record)
            case RewindRecord():
                return self._rewind(record)
            case RunRecord() | CheckpointRecord() | FinishingRecord() | GapRecord() | EndRecord():
                return []

    def _change(self, record: EraRecord) -> list[str]:
        """The roster is the coordinator's decision, what follows from it is not."""
        where, group = f"era {record.era}", self._group
        roster = [WorkerId(worker) for worker in record.roster]
        if not roster or len(set(roster)) < len(roster):
            # The audit says so; no decision can be made for such a roster.
            self._lost = True
        elif self._ended is not None:
            return [f"{where}: begins where the end of phase {self._ended.phase} is due"]
        elif group is None or (group.exchange == 0 and record.entries is None):
            # An era in which nothing was settled is followed by a new beginning.
            if record.entries is not None:
                return [f"{where}: has entries, but there was no era to come from"]
            self._group = founded(_UNKNOWN, record.era, roster)
        elif record.entries is None:
            with_samples = any(
                hand.queue
                for phase in group.open
                for worker, hand in zip(group.roster, phase.ledger.hands, strict=True)
                if worker not in roster
            )
            self._departed = (2 if group.overlap else 1) if with_samples else 0
            self._group = regrouping.switched(group, record.era, roster)
        else:
            entries = [mapping.entry_of(each) for each in record.entries]
            problem = _impossible(group, roster, entries)
            if problem is not None:
                return [f"{where}: {problem}"]
            self._group = regrouping.regrouped(group, record.era, roster, entries)
            self._lacking = self._regrouped = self._resumed = True
            if record.void != self._group.round:
                return [f"{where}: round {record.void} is void, the decision code says {self._group.round}"]
        return []

    def _rewind(self, record: RewindRecord) -> list[str]:
        """A worker has read the state that the records before this one lead to."""
        group = self._group
        if group is None or group.exchange == 0 or self._ended is not None:
            return [f"the run goes back to checkpoint {record.name}, but there was no state to be written then"]
        self._group = regrouping.restored(group, WorkerId(record.worker), record.round)
        self._resumed = True
        return []

    def _agree(self, record: PolicyRecord) -> list[str]:
        if self._group is None:
            return ["the policy is written before the first era"]
        policy = mapping.policy_of(record)
        if policy is None:
            return [f"the policy's rule is {record.rule!r}, which this Pliant does not know"]
        if self._group.open and policy != self._group.policy:
            return [f"the policy changes inside phase {self._group.phase.number}"]
        self._agreed = True
        limits = {"samples_limit": record.samples_limit, "updates_limit": record.updates_limit}
        self._group = replace(self._group, policy=policy, **limits)
        return []

    def _open(self, record: PhaseRecord) -> list[str]:
        group, where = self._group, f"phase {record.phase}"
        if group is None or not self._agreed:
            return [f"{where}: opens before the policy is written"]
        if self._ended is not None:
            return [f"{where}: opens where the end of phase {self._ended.phase} is due"]
        if not len(record.sizes) == len(record.ahead) == len(group.roster):
            return [f"{where}: its sizes are not those of {len(group.roster)} workers"]
        kind = mapping.kind_of(record)
        if kind is None or min(record.sizes, default=0) < 1:
            return [f"{where}: {record.task!r} with sizes {record.sizes} is no phase"]
        strangers = {*record.absent, *record.ready} - set(range(len(group.roster)))
        if strangers or len(record.absent) >= len(group.roster):
            return [f"{where}: absent are {record.absent}, ready {record.ready} of {len(group.roster)} workers"]
        after = rounds.opened(group, mapping.openings_of(record, group, kind))
        if isinstance(after, Mismatch):
            return [f"{where}: {after.reason}"]
        self._group = after
        limit = after.phase.ledger.limit if after.open and after.phase.number == after.phases else 0
        return [] if record.limit == limit else [f"{where}: limit is {record.limit}, the decision code says {limit}"]

    def _settle(self, record: RoundRecord | ExchangeRecord) -> list[str]:
        group = self._group
        where = f"phase {record.phase}, " + (f"round {record.round}" if isinstance(record, RoundRecord) else "exchange")
        if group is None or not group.open:
            return [f"{where}: the decision code has no open phase"]
        if self._ended is not None:
            return [f"{where}: follows the last round of phase {self._ended.phase}"]
        phase = group.phase
        if phase.number != record.phase or len(record.tickets) != len(group.roster):
            return [f"{where}: the decision code expects phase {phase.number} and {len(group.roster)} tickets"]
        tickets = [mapping.ticket_of(line, group, phase.kind) for line in record.tickets]
        for member, size, _ in record.entered:
            if not 0 <= member < len(tickets) or not tickets[member].flags & Flag.READY or size < 1:
                return [f"{where}: member {member} cannot enter with micro-batches of {size}"]
        tickets = mapping.with_entered(tickets, record.entered)
        if isinstance(record, RoundRecord):
            tickets = mapping.with_sets(record, mapping.with_measures(record, tickets), group.trained)
        elif record.sums:
            if len(record.sums) != len(tickets):
                return [f"{where}: sums of {len(record.sums)} workers, {len(tickets)} handed in"]
            tickets = mapping.with_sums(tickets, record.sums)
        for worker, hand, ticket in zip(group.roster, phase.ledger.hands, tickets, strict=True):
            if not 0 <= ticket.micro_batches <= hand.granted:
                return [f"{where}: {worker} drew {ticket.micro_batches} micro-batches, {hand.granted} were granted"]
            if hand.quotas and ticket.micro_batches != hand.quotas[0] and not ticket.flags & _SHORT:
                return [f"{where}: {worker} handed in {ticket.micro_batches} micro-batches of {hand.quotas[0]}"]
        decision = rounds.settled(group, tickets)
        if isinstance(decision, Mismatch):
            return [f"{where}: {decision.reason}"]
        self._group, outcome = decision
        self.outcome = outcome
        self.rounds += 1
        if outcome.ended:
            self._ended = outcome
        problems = _differences(record, outcome)
        if isinstance(record, RoundRecord):
            problems += _measures(record, self._group)
            if not group.policy.floating and not outcome.ended and record.batch != group.policy.batch:
                problems += self._short(record, group)
            # Whoever leaves, and who takes the state over again, gives its hand back.
            self._lacking = Standing.LEAVING in self._group.standings or outcome.drift is not None
            self._regrouped = False
            self._departed = max(0, self._departed - 1)
            self._resumed = self._resumed and record.batch == 0
        return [f"{where}: {text}" for text in problems]

    def _short(self, record: RoundRecord, group: GroupState) -> list[str]:
        """A round of a fixed batch that is not full, in mid-epoch."""
        lacking = group.policy.batch - record.batch
        # A crumb that a leaver has given back is left for the round after, at the end of an epoch too.
        crumb = group.phase.ledger.remaining - record.batch < dealing.LEAST
        if self._resumed and record.batch == 0:
            return []
        if self._lacking and (0 < lacking < dealing.LEAST or record.batch == 0 or crumb):
            return []
        if (self._regrouped and lacking < 0) or (self._departed and lacking > 0):
            return []
        if _may_be_small(group, record) and lacking > 0:
            return []
        return [f"batch is {record.batch} of the fixed {group.policy.batch} in mid-epoch"]

    def _end(self, record: PhaseEndRecord) -> list[str]:
        outcome, self._ended = self._ended, None
        where = f"phase {record.phase}"
        if outcome is None:
            # A phase without a position to use ends as soon as it opens.
            group = self._group
            if group and group.phases == record.phase and all(phase.number != record.phase for phase in group.open):
                return []
            return [f"{where}: ended, but the decision code goes on"]
        problems: list[str] = []
        if tuple(record.cut) != outcome.cut:
            problems.append(f"{where}: cut {named(record.cut)}, the decision code says {named(outcome.cut)}")
        # A result that is not finite is journaled as none.
        if record.result is not None and record.result != outcome.result:
            problems.append(f"{where}: result is {record.result!r}, the decision code says {outcome.result!r}")
        problems += [f"{where}: {text}" for text in evaluation.differences(record.results, outcome.results)]
        return problems


# Who breaks off or leaves hands in what it has.
_SHORT = Flag.BREAK | Flag.LEAVING
# Stands in until the policy is written, with the first phase.
_UNKNOWN = Policy(batch=1)


def _impossible(group: GroupState, roster: Sequence[WorkerId], entries: Sequence[Entry]) -> str | None:
    """Why nobody can have entered an unplanned era like this, if so."""
    if len(entries) != len(roster):
        return f"{len(entries)} entries of {len(roster)} workers"
    for worker, entry in zip(roster, entries, strict=True):
        if not entry.active:
            continue
        if worker not in group.roster:
            return f"{worker} was not there before and cannot hold the state"
        if not len(entry.dropped) == len(entry.kept) == len(group.open):
            return f"{worker} enters for {len(entry.kept)} phases, {len(group.open)} are open"
        member = group.roster.index(worker)
        for phase, dropped, kept in zip(group.open, entry.dropped, entry.kept, strict=True):
            granted = phase.ledger.hands[member].granted
            if min(dropped, kept) < 0 or dropped + kept > granted:
                return f"{worker} drew {dropped} + {kept} micro-batches in phase {phase.number}, {granted} were granted"
    return None


def _may_be_small(group: GroupState, record: RoundRecord) -> bool:
    """Whether a round of a fixed batch may have less than that in mid-epoch: somebody stops, or nobody can compute."""
    hands = group.phase.ledger.hands
    if any(line.flags & Flag.LEAVING.value and hand.queue for hand, line in zip(hands, record.tickets, strict=True)):
        return True
    return Standing.ACTIVE not in group.standings


def _differences(record: RoundRecord | ExchangeRecord, outcome: Settled) -> list[str]:
    """Where the journal and the decision code disagree about a round."""
    problems: list[str] = []
    for member, (line, spans) in enumerate(zip(record.tickets, outcome.spans, strict=True)):
        if tuple(line.spans) != spans:
            problems.append(f"member {member} has {named(line.spans)}, the decision code says {named(spans)}")
    if record.batch != outcome.batch:
        problems.append(f"batch is {record.batch}, the decision code says {outcome.batch}")
    if isinstance(record, RoundRecord):
        if record.round != outcome.round:
            problems.append(f"the decision code says round {outcome.round}")
        if record.factor != outcome.factor:
            problems.append(f"factor is {record.factor!r}, the decision code says {outcome.factor!r}")
        delay = outcome.verdict.delay if outcome.verdict else None
        if record.delay != delay:
            problems.append(f"delay is {record.delay}, the decision code says {delay}")
        if record.measured != outcome.measured:
            problems.append(f"the norm {record.measured} is taken in, the decision code says {outcome.measured}")
        theirs, ours = record.drift and mapping.drift_of(record.drift), outcome.drift
        if theirs != ours:
            problems.append(f"drift is {theirs}, the decision code says {ours}")
        if record.applied != outcome.applied:
            problems.append(f"applied is {record.applied}, the decision code says {outcome.applied}")
    return problems


def _measures(record: RoundRecord, group: GroupState) -> list[str]:
    """Where they disagree about what was learned so far."""
    problems: list[str] = []
    if record.noise_scale is not None and record.noise_scale != group.noise.scale:
        problems.append(f"noise scale is {record.noise_scale!r}, the decision code says {group.noise.scale!r}")
    scheduled = float(record.samples_total) if record.scheduled_total is None else record.scheduled_total
    if scheduled != group.scheduled:
        problems.append(f"the schedule is at {scheduled!r} samples, the decision code says {group.scheduled!r}")
    return problems


def named(spans: Sequence[Span]) -> str:
    """Spans as text: ``0..4, 9..12``, the stop excluded."""
    named = ", ".join(f"{start}..{stop}" for start, stop in spans[:_MOST_SPANS])
    return f"{named}, … ({len(spans)} spans)" if len(spans) > _MOST_SPANS else named or "none"
