"""What must hold in every history.

Question  Did anything happen that must never happen, and did everything happen that must?
Holds     Checked with every settled exchange: numbers only grow; nothing of an era is settled after ``stopped``;
          workers that settle the same exchange of the same era hold exactly the same state, tickets and weights.
          Checked with every journaled line: eras and rounds only grow, and the line holds what the members settled.
          Checked at the end: the audit, the weights recomputed from the journal, the user's state.
Source    Invariants 1 to 6 of DESIGN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pliant.core.drift import Drift
from pliant.core.group_state import GroupState, Standing
from pliant.core.journal import records as journal
from pliant.core.journal import trace
from pliant.core.journal.audit import audit
from pliant.core.journal.decisions import Replay
from pliant.core.portion_size import COPIES, SMALL_BYTES
from pliant.core.regrouping import Entry
from pliant.core.rounds import Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.testing.clock import World
from pliant.testing.exact import PARAMETERS
from pliant.testing.link import VirtualLink
from pliant.testing.training import VirtualTraining
from pliant.types import WorkerId
from pliant.worker.journal import JournalReporter, LineSink


class Violation(AssertionError):
    """An invariant does not hold."""


_SILENT = Flag.FOLLOWING | Flag.LEAVING

ENDLESS = 20_000
"""Exchanges in one history: a hundred times as many as in the longest one."""


class Checker:
    """Checks all workers and the journal of one world."""

    def __init__(self, world: World, *, reference: int) -> None:
        self.world = world
        self.settled_s = 0.0
        """time of the last settled exchange"""
        self.exchanges = 0
        self.start = 0
        """initial value of the weights"""
        self.over = False
        """a worker has come to the end of the run"""
        self.holders: dict[str, tuple[int, int]] = {}
        """workers that hold the whole state → (era, exchange)"""
        self.fell_behind: Callable[[], None] = lambda: None
        """called when a worker holds the state no more"""
        self.lost = False
        """at some time no worker that held the state was able to go on"""
        self.forsaken = False
        """the last worker that held the state left as agreed, after those that were to go on had been lost"""
        self.relieved: set[str] = set()
        """who holds the state, and others have begun an era without it"""
        self.checkpoints = 0
        """number of checkpoints in the journal"""
        self.tainted = False
        """changed weights may have been taken for the right ones: weights may differ from those of the journal"""
        self.state_lost = False
        """the last worker that had the user's state is gone"""
        self._updates: dict[tuple[int, int], tuple[str, object]] = {}
        """(era, round) → the first worker that followed its update, with its weights and buffers"""
        self._leaders: dict[tuple[int, str], str] = {}
        """(round, where) → the worker that has led"""
        self._leavers: set[str] = set()
        """others held the state when it was agreed that these leave"""
        self._flipped: set[str] = set()
        """workers whose weights were changed"""
        self._changed: set[str] = set()
        """those of them that have not taken over the others' weights since"""
        self._healing: dict[str, tuple[int, int]] = {}
        """workers that were named → (era, exchange) of that; until they hold the state again"""
        self._judged: set[tuple[int, int]] = set()
        """(era, round) of tickets that have named a worker"""
        self._flipped_round = 0
        """round in which weights were changed last"""
        self._differ: int | None = None
        """the round since which weights are known to differ"""
        self._silent: frozenset[str] = frozenset()
        """workers that followed in the last round of a loop, or leave: their weights are not compared"""
        self._reference = reference
        self._last: dict[str, tuple[int, int, int]] = {}
        self._states: dict[tuple[int, int], tuple[str, GroupState]] = {}
        self._weights: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
        self._tickets: dict[tuple[int, int], Sequence[Ticket]] = {}
        self._ends: list[tuple[str, tuple[int, ...], dict[str, Any], GroupState]] = []
        self._dead = 0
        """so many of the first entries died before their scripts went on; the last to die comes first"""
        self._records: list[journal.Record] = []
        self._journaled = 0
        self._era = self._round = 0

    def require(self, holds: bool, text: str) -> None:
        """Raise ``Violation`` if the condition is false."""
        if not holds:
            raise Violation(text)

    # -- workers

    def led(self, name: str, round_: int, where: str) -> None:
        """A script has seen an update at ``where`` and leads there: it alone prints and writes for this update.

        If a leader leaves in an ``evaluate`` in between, another one leads from then on.
        """
        first = self._leaders.setdefault((round_, where), name)
        self.require(first == name, f"{first} and {name} both lead at round {round_}, {where}")

    def passed(self, link: VirtualLink, group: GroupState, training: VirtualTraining, what: str) -> None:
        """A worker has settled an exchange, or entered an era."""
        name, at = link.worker, (group.era, group.exchange)
        self.settled_s = self.world.now_s
        self.exchanges += 1
        self.require(self.exchanges < ENDLESS, "exchanges follow each other, and nothing comes of it")
        self.world.note(
            what, name, group.era, group.exchange, group.round, "".join(str(int(s)) for s in group.standings)
        )
        self.require(group.era > link.stopped_era, f"{name} settles {at} after it has stopped in {link.stopped_era}")
        era, exchange, number = self._last.get(name, (0, 0, 0))
        # A worker without the state follows those that hold it, even back.
        grown = group.era >= era and (
            name not in self.holders or (group.exchange >= exchange and group.round >= number)
        )
        self.require(grown, f"{name}: from {(era, exchange, number)} to {(*at, group.round)}")
        self._last[name] = (*at, group.round)
        if at not in self._states:
            self._only_those_who_compute_hold(group)
        other, state = self._states.setdefault(at, (name, group))
        if state is not group and state != group:
            raise Violation(f"{name} and {other} disagree about the state after {at}: {_difference(state, group)}")
        standing = group.standings[group.roster.index(link.worker)]  # type: ignore[arg-type]
        self.relieved = (self.relieved | {other for other, (era, _) in self.holders.items() if era < group.era}) - {
            str(worker) for worker in group.roster
        }
        whole = training.held in (None, (1 << len(training.parameters)) - 1)
        if standing is Standing.FOLLOWING or not whole:
            if self.holders.pop(name, None) is not None:
                self.fell_behind()
            return
        self.holders[name] = at
        if standing is Standing.LEAVING and len(self.holders) > 1:
            self._leavers.add(name)
        if training.held is not None:
            # The user's state has not arrived yet.
            return
        if self._healing.get(name, at) < at:
            del self._healing[name]
        if group.exchange == 1:
            numbers: Any = training.parameters
            self.start = numbers[0].value
        self._compare(name, standing, group, training.plain_values())

    def _only_those_who_compute_hold(self, group: GroupState) -> None:
        """Nothing is dealt to members that do not compute, or whose scripts are not in the phase."""
        for phase in group.open:
            members = zip(group.roster, group.standings, phase.present, phase.ledger.hands, strict=True)
            for worker, standing, present, hand in members:
                computes = standing is Standing.ACTIVE and present
                self.require(
                    computes or not hand.queue, f"{worker} holds samples of phase {phase.number}: {standing!r}"
                )

    def kept(self, name: str, kept_bytes: int, training: VirtualTraining) -> None:
        """A newcomer keeps gradients of past rounds: at most ``COPIES`` times those of one round, or a small amount."""
        most = max(COPIES * sum(p.nbytes for p in training.parameters), SMALL_BYTES)
        self.require(kept_bytes <= most, f"{name} keeps {kept_bytes} bytes of gradients, and {most} are too many")

    def _compare(self, name: str, standing: Standing, group: GroupState, weights: tuple[int, ...]) -> None:
        """All weights are the same, except until a worker whose weights were changed is named."""
        at = (group.era, group.exchange)
        if self._flipped and standing is Standing.LEAVING:
            return
        known = self._weights.setdefault(at, {})
        known[name] = weights
        active = {str(w) for w, s in zip(group.roster, group.standings, strict=True) if s is Standing.ACTIVE}
        if len(set(known.values())) == 1:
            self._differ = None if known.keys() >= active else self._differ
            return
        self.require(bool(self._flipped), f"{name} and {next(iter(known))} have different weights after {at}")
        self._differ = group.round if self._differ is None else self._differ
        speaking = active - self._silent
        if known.keys() >= speaking and len({known[each] for each in speaking}) <= 1:
            # Only a spare's differ: it adds nothing to the sums. Once it does, it is named within the same time.
            self._differ = max(self._differ, group.round)
        self.require(
            group.round - self._differ <= _patience(group),
            f"weights differ since round {self._differ}, and nobody was named until {at}",
        )

    def struck(self, name: str, group: GroupState) -> None:
        """The weights of a worker were changed on purpose."""
        self._flipped.add(name)
        self._changed.add(name)
        self._flipped_round = group.round
        members = zip(group.roster, group.standings, strict=True)
        others = {str(w) for w, standing in members if standing is Standing.ACTIVE} - {name, *self._healing}
        # No other worker is left to compare with, or to take the right weights from.
        self.tainted = self.tainted or not others

    def _named(self, group: GroupState, differs: Drift) -> None:
        """The tickets have shown that the weights of some workers differ."""
        if (group.era, group.round) in self._judged:
            return
        self._judged.add((group.era, group.round))
        self._differ = None
        named = {str(group.roster[member]) for member in differs.named}
        self.world.note("named", ",".join(sorted(named)), len(differs.expelled))
        self.require(bool(self._flipped), f"{sorted(named)} are said to differ, and nobody's weights were changed")
        # The first of two is believed, right or wrong; then no worker may have the weights of the journal any more.
        believed = {str(group.roster[member]) for member, _, _ in differs.digests} - named
        self.tainted = self.tainted or not believed.isdisjoint(self._changed)
        self.require(self.tainted or named <= self._flipped, f"{sorted(named - self._flipped)} are named wrongly")
        self._changed -= named
        self._healing |= dict.fromkeys(named, (group.era, group.exchange))

    def settled(self, group: GroupState, outcome: Settled, handed_in: Sequence[Ticket]) -> None:
        """An exchange was settled with these tickets."""
        if outcome.kind is not Kind.TRAIN:
            return
        members = zip(group.roster, handed_in, strict=True)
        self._silent = frozenset(str(worker) for worker, ticket in members if ticket.flags & _SILENT)
        if outcome.drift is not None:
            self._named(group, outcome.drift)
        elif self._differ is not None and _tell_a_difference(handed_in):
            # No worker is judged where a phase or an era ends, and followers never are: a later digest shows it again.
            judged = not outcome.ended and outcome.plan is None and _tell_a_difference(_speaking(handed_in))
            self._differ = self._differ if judged else max(self._differ, group.round)
        bound = group.policy.at_most
        self.require(
            bound is None or outcome.batch <= bound, f"a round of {outcome.batch} samples, at most {bound} may be"
        )
        self._tickets[group.era, outcome.round] = handed_in

    def ended(self, name: str, training: VirtualTraining, state: dict[str, Any], group: GroupState) -> None:
        """A worker has come to the end of its script, with the results of the group."""
        self.over = True
        if self._flipped and group.standings[group.roster.index(WorkerId(name))] is Standing.LEAVING:
            # A leaver's weights are not compared, and it does not take over the right ones.
            return
        self._ends.append((name, training.plain_values(), dict(state), group))

    def updated(self, name: str, training: VirtualTraining, group: GroupState) -> None:
        """A script follows the last update: weights and buffers are equal on all workers of the era there.

        Lost workers and other eras do not count: buffers may have been made equal since.
        """
        number = group.round
        shown = (training.plain_values(), training.buffers.held_values())
        first, there = self._updates.setdefault((group.era, number), (name, shown))
        if shown != there and not self._flipped and not self.tainted:
            raise Violation(f"after round {number} {name} has {shown}, but {first} had {there}")

    def unheard(self, name: str) -> None:
        """The coordinator will never hear of this end: it does not count."""
        self._ends = [end for end in self._ends if end[0] != name]
        self.over = bool(self._ends)

    def departed(self, name: str) -> None:
        """A worker has said that it leaves: it is no holder of the state for the others any more.

        The last holder counts until its process ends.
        """
        if self.holders.keys() - {name}:
            self.holders.pop(name, None)
        elif name in self._leavers | self.relieved:
            self.forsaken = True

    def died(self, name: str) -> None:
        """A worker died. If it was at its end, its script has not gone on, and the run may go on without it."""
        # What it did for a round that was lost with all workers is done again.
        self._leaders = {at: leader for at, leader in self._leaders.items() if leader != name}
        dead = [end for end in self._ends if end[0] == name]
        self._ends = [*dead, *(end for end in self._ends if end[0] != name)]
        self._dead += len(dead)

    # -- the journal

    def journaled(self, content: bytearray) -> None:
        """Check the records that have been written since the last call."""
        lines = bytes(content[self._journaled :]).splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n") and b',"crc":"' in line:
                self._journaled += len(line)
                self._take(journal.decode(line[: line.rindex(b',"crc":"')] + b"}"))

    def _take(self, record: journal.Record) -> None:
        self._records.append(record)
        match record:
            case journal.EraRecord(era=era, void=void):
                self.require(era > self._era, f"the journal has era {era} after era {self._era}")
                self._era = era
                if void:
                    self.require(void == self._round + 1, f"era {era} voids round {void} after round {self._round}")
                    self._round = void
            case journal.RoundRecord(era=era, round=number):
                self.require(number > self._round, f"the journal has round {number} after round {self._round}")
                self._round = number
                tickets = self._tickets.get((era, number))
                self.require(tickets is not None, f"round {number} of era {era} is journaled, and nobody settled it")
                ours = [(t.samples, t.weight, t.loss_sum, int(t.flags)) for t in tickets or ()]
                theirs = [(t.samples, t.weight, t.loss_sum, t.flags) for t in record.tickets]
                self.require(ours == theirs, f"round {number} of era {era} is journaled with other tickets")
            case journal.CheckpointRecord():
                self.checkpoints += 1
            case journal.RewindRecord(round=number):
                self._round = max(self._round, number)
            case _:
                pass

    # -- the end

    def conclude(self, *, completed: bool) -> None:
        """Check the end of the run."""
        report = audit(self._records, replay=False)
        self.require(not report.problems, "audit: " + "; ".join(report.problems[:3]))
        try:
            # This compares its decisions with those of the decision code, as an audit does.
            gaps = trace.gaps(trace.score(self._records))
        except journal.JournalError as error:
            raise Violation(f"audit: {error}") from error
        self.require(not gaps, "replay: " + "; ".join(gaps[:3]))
        if not completed:
            return
        if not self._ends and self._flipped and self.over:
            return
        self.require(bool(self._ends), "the run completed, but no worker came to its end")
        ends = self._ends[self._dead :] or self._ends[:1]
        name, weights, _, last = ends[0]
        # A difference in the last rounds is not noticed any more.
        late = bool(self._flipped) and last.round - (self._differ or self._flipped_round) <= _patience(last)
        state: dict[str, Any] = {}
        for other, theirs, their_state, _ in ends:
            self.require(late or theirs == weights, f"{other} and {name} end with different weights")
            state = state or their_state
            self.require(
                not their_state or their_state == state,
                f"{other} ends with {their_state}, {name} with {state}",
            )
        again = self._recomputed()
        if self.tainted or late:
            return
        self.require(again.plain_values() == weights, f"the journal's rounds do not lead to the weights of {name}")

    def _recomputed(self) -> VirtualTraining:
        """The training of one process that makes the journaled updates."""
        training = VirtualTraining(reference=self._reference, buffers=0, start=self.start)
        epochs: dict[int, int] = {}
        scheduled = 0.0
        decisions = Replay()
        for record in journal.effective(self._records):
            decisions.take(record)
            if isinstance(record, journal.PhaseRecord):
                epochs[record.phase] = record.epoch
            elif isinstance(record, journal.RoundRecord):
                for line in record.tickets:
                    positions = [p for start, stop in line.spans for p in range(start, stop)]
                    training.gradients.add(epochs[record.phase], positions)
                filled = training.gradients.filling
                assert decisions.outcome is not None
                training.apply(_Applied(record, decisions.outcome.touched), filled, filled.present)
                told = record.scheduled_total
                before, scheduled = scheduled, float(record.samples_total) if told is None else told
                training.advance_schedule(before, scheduled)
        return training


class _Applied:
    """A journaled round, as ``Training.apply`` needs it."""

    finite = True

    def __init__(self, record: journal.RoundRecord, touched: bytes) -> None:
        self.touched = touched
        self.applied, self.weight, self.factor = record.applied, record.weight, record.factor
        self.round, self.clip_norm = record.round, record.clip_norm


def _patience(group: GroupState) -> int:
    """Rounds within which a difference is noticed: every part has been digested, and the tickets have carried it."""
    return group.policy.watched * PARAMETERS + 10


def _speaking(handed_in: Sequence[Ticket]) -> list[Ticket]:
    return [ticket for ticket in handed_in if not ticket.flags & _SILENT]


def _tell_a_difference(handed_in: Sequence[Ticket]) -> bool:
    """Whether the newest digests in the tickets differ."""
    last = max((ticket.weights_round for ticket in handed_in), default=0)
    return len({ticket.weights for ticket in handed_in if last and ticket.weights_round == last}) > 1


def _difference(one: GroupState, other: GroupState) -> str:
    """The first field in which two states differ."""
    for name in GroupState.__struct_fields__:
        if getattr(one, name) != getattr(other, name):
            return f"{name} is {getattr(one, name)!r:.300} and {getattr(other, name)!r:.300}"
    return "nothing"


class Observer(JournalReporter):
    """The real journal reporter, observed by a checker."""

    kept_bytes: Callable[[], int] = staticmethod(lambda: 0)
    """bytes of gradients that a newcomer keeps"""

    def __init__(self, link: VirtualLink, checker: Checker, training: VirtualTraining) -> None:
        super().__init__(link)
        self._seen = link
        self._checker = checker
        self._training = training

    def moved(self, link: LineSink) -> None:
        super().moved(link)
        assert isinstance(link, VirtualLink)
        self._seen = link

    def opened(self, group: GroupState, openings: list[Ticket]) -> None:
        super().opened(group, openings)
        self._checker.passed(self._seen, group, self._training, "opened")

    def settled(self, group: GroupState, outcome: Settled, handed_in: list[Ticket], rate: float) -> None:
        self._checker.settled(group, outcome, handed_in)
        super().settled(group, outcome, handed_in, rate)
        self._checker.kept(self._seen.worker, self.kept_bytes(), self._training)
        self._checker.passed(self._seen, group, self._training, "settled")

    def era(self, group: GroupState, entries: Sequence[Entry] | None, *, sends: bool) -> None:
        super().era(group, entries, sends=sends)
        if group.exchange > 0:
            self._checker.passed(self._seen, group, self._training, "entered")
