"""What must hold in every history.

Question  Did anything happen that must never happen, and did everything happen that must?
Holds     Checked with every settled exchange: numbers only grow; nothing of an era is settled after ``stopped``; who
          settles the same exchange of the same era holds the same state, tickets and weights, exactly. Checked with
          every journaled line: eras and rounds only grow, and it says what the members settled. Checked at the end:
          the audit, the weights recomputed from the journal, the user's state.
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
from pliant.testing.exact import PARAMETERS, VirtualTraining
from pliant.testing.link import VirtualLink
from pliant.types import WorkerId
from pliant.worker.journal import JournalReporter


class Violation(AssertionError):
    """An invariant does not hold."""


_SILENT = Flag.FOLLOWING | Flag.LEAVING

ENDLESS = 20_000
"""exchanges in one history: a hundred times as many as the longest has"""


class Checker:
    """Watches all workers and the journal of one world."""

    def __init__(self, world: World, *, reference: int, buffers: int) -> None:
        self.world = world
        self.settled_s = 0.0
        """when an exchange was settled last"""
        self.exchanges = 0
        self.start = 0
        """the weights that the run began with"""
        self.over = False
        """some worker has concluded the run"""
        self.holders: dict[str, tuple[int, int]] = {}
        """worker → (era, exchange) of who holds the whole state"""
        self.fell_behind: Callable[[], None] = lambda: None
        """called when one that held the state does not hold it any more"""
        self.lost = False
        """at some time nobody who held the state could do anything with it"""
        self.checkpoints = 0
        """that the journal names"""
        self.tainted = False
        """a worker whose weights had been changed may have been believed: they are not those of the journal"""
        self.state_lost = False
        """the user's state has gone with the last worker that had it"""
        self._updates: dict[tuple[int, int], tuple[str, object]] = {}
        """by era and round: who followed its update first, and with which weights and buffers"""
        self._leaders: dict[tuple[int, str], str] = {}
        """by round: who has printed and written for it"""
        self._flipped: set[str] = set()
        """whose weights were changed"""
        self._changed: set[str] = set()
        """those of them who have not taken the others' over since"""
        self._healing: dict[str, tuple[int, int]] = {}
        """who was named, (era, exchange) of that, until it holds the state again"""
        self._judged: set[tuple[int, int]] = set()
        """(era, round) whose tickets have named somebody"""
        self._flipped_round = 0
        """when, the last time"""
        self._differ: int | None = None
        """since which round weights are known to differ"""
        self._silent: frozenset[str] = frozenset()
        """who only went along with the last round of a loop, or leaves: it is not judged"""
        self._reference, self._buffers = reference, buffers
        self._last: dict[str, tuple[int, int, int]] = {}
        self._states: dict[tuple[int, int], tuple[str, GroupState]] = {}
        self._weights: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
        self._tickets: dict[tuple[int, int], Sequence[Ticket]] = {}
        self._ends: list[tuple[str, tuple[int, ...], dict[str, Any], GroupState]] = []
        self._dead = 0
        """so many of them, the first ones, died before their scripts went on; the last to die comes first"""
        self._records: list[journal.Record] = []
        self._journaled = 0
        self._era = self._round = 0

    def require(self, holds: bool, text: str) -> None:
        """Raise if it does not hold."""
        if not holds:
            raise Violation(text)

    # -- workers

    def led(self, name: str, round_: int, where: str) -> None:
        """A script has seen an update ``where`` it looks for one, and is the one that prints and writes for it there.

        A leader that leaves in an ``evaluate`` in between is followed by another one in what comes after it.
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
        # Who does not hold the state goes where those go who do.
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
        whole = training.held in (None, (1 << len(training.parameters)) - 1)
        if standing is Standing.FOLLOWING or not whole:
            if self.holders.pop(name, None) is not None:
                self.fell_behind()
            return
        self.holders[name] = at
        if training.held is not None:
            # The user's own state is still on its way.
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
        """A newcomer keeps gradients of past rounds: at most twice as much as one round has, or little."""
        most = max(COPIES * sum(p.nbytes for p in training.parameters), SMALL_BYTES)
        self.require(kept_bytes <= most, f"{name} keeps {kept_bytes} bytes of gradients, and {most} are too many")

    def _compare(self, name: str, standing: Standing, group: GroupState, weights: tuple[int, ...]) -> None:
        """Weights are the same, but for the rounds until a worker is named whose own were changed."""
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
            # A spare's: it adds nothing to the sums, and is named within the same time once it does.
            self._differ = max(self._differ, group.round)
        self.require(
            group.round - self._differ <= _patience(group),
            f"weights differ since round {self._differ}, and nobody was named until {at}",
        )

    def struck(self, name: str, group: GroupState) -> None:
        """Somebody's weights were changed."""
        self._flipped.add(name)
        self._changed.add(name)
        self._flipped_round = group.round
        members = zip(group.roster, group.standings, strict=True)
        others = {str(w) for w, standing in members if standing is Standing.ACTIVE} - {name, *self._healing}
        # Nobody is left to compare with, or to take the right weights over from.
        self.tainted = self.tainted or not others

    def _named(self, group: GroupState, differs: Drift) -> None:
        """Some workers' weights are said to differ."""
        if (group.era, group.round) in self._judged:
            return
        self._judged.add((group.era, group.round))
        self._differ = None
        named = {str(group.roster[member]) for member in differs.named}
        self.world.note("named", ",".join(sorted(named)), len(differs.expelled))
        self.require(bool(self._flipped), f"{sorted(named)} are said to differ, and nobody's weights were changed")
        # Who is first of two is believed, changed or not; then nobody has the weights of the journal any more.
        believed = {str(group.roster[member]) for member, _, _ in differs.digests} - named
        self.tainted = self.tainted or not believed.isdisjoint(self._changed)
        self.require(self.tainted or named <= self._flipped, f"{sorted(named - self._flipped)} are named wrongly")
        self._changed -= named
        self._healing |= dict.fromkeys(named, (group.era, group.exchange))

    def settled(self, group: GroupState, outcome: Settled, handed_in: Sequence[Ticket]) -> None:
        """The tickets of an exchange."""
        if outcome.kind is not Kind.TRAIN:
            return
        members = zip(group.roster, handed_in, strict=True)
        self._silent = frozenset(str(worker) for worker, ticket in members if ticket.flags & _SILENT)
        if outcome.drift is not None:
            self._named(group, outcome.drift)
        elif self._differ is not None and _tell_a_difference(handed_in):
            # Nobody is judged where a phase or an era ends, nor who only goes along: a later digest tells it again.
            judged = not outcome.ended and outcome.plan is None and _tell_a_difference(_speaking(handed_in))
            self._differ = self._differ if judged else max(self._differ, group.round)
        bound = group.policy.at_most
        self.require(
            bound is None or outcome.batch <= bound, f"a round of {outcome.batch} samples, at most {bound} may be"
        )
        self._tickets[group.era, outcome.round] = handed_in

    def ended(self, name: str, training: VirtualTraining, state: dict[str, Any], group: GroupState) -> None:
        """A worker has come to the end of its script with everybody's results."""
        self.over = True
        if self._flipped and group.standings[group.roster.index(WorkerId(name))] is Standing.LEAVING:
            # Who leaves has no say in whose weights are right, and is not healed.
            return
        self._ends.append((name, training.plain_values(), dict(state), group))

    def updated(self, name: str, training: VirtualTraining, group: GroupState) -> None:
        """A script follows the last update: it has the weights and buffers of all others there.

        Not of those that are lost, or of another era: buffers may have been made equal anew.
        """
        number = group.round
        shown = (training.plain_values(), training.buffers.held_values())
        first, there = self._updates.setdefault((group.era, number), (name, shown))
        if shown != there and not self._flipped and not self.tainted:
            raise Violation(f"after round {number} {name} has {shown}, but {first} had {there}")

    def unheard(self, name: str) -> None:
        """Nobody will know of that end: the script does not go on."""
        self._ends = [end for end in self._ends if end[0] != name]
        self.over = bool(self._ends)

    def departed(self, name: str) -> None:
        """It has said that it leaves, and does not come back for those who go on: they hold the state, or nobody does.

        The last one that holds it is not let go: until its process ends it counts.
        """
        if self.holders.keys() - {name}:
            self.holders.pop(name, None)

    def died(self, name: str) -> None:
        """While it said goodbye, if it had come to its end: the script has not gone on, and the run may."""
        # What it did for a round that was lost with everybody is done again.
        self._leaders = {at: leader for at, leader in self._leaders.items() if leader != name}
        dead = [end for end in self._ends if end[0] == name]
        self._ends = [*dead, *(end for end in self._ends if end[0] != name)]
        self._dead += len(dead)

    # -- the journal

    def journaled(self, content: bytearray) -> None:
        """More may be on disk."""
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
        """The run is over."""
        report = audit(self._records, replay=False)
        self.require(not report.problems, "audit: " + "; ".join(report.problems[:3]))
        try:
            # Its decisions are compared with those of the decision code on the way, as in an audit.
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
        # A difference of the last rounds is not seen any more.
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
        """One process that makes the journaled updates."""
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
    """A journaled round as ``Training.apply`` reads it."""

    finite = True

    def __init__(self, record: journal.RoundRecord, touched: bytes) -> None:
        self.touched = touched
        self.applied, self.weight, self.factor = record.applied, record.weight, record.factor
        self.round, self.clip_norm = record.round, record.clip_norm


def _patience(group: GroupState) -> int:
    """Rounds within which a difference is seen: every part has had its turn, and the tickets have told."""
    return group.policy.watched * PARAMETERS + 10


def _speaking(handed_in: Sequence[Ticket]) -> list[Ticket]:
    return [ticket for ticket in handed_in if not ticket.flags & _SILENT]


def _tell_a_difference(handed_in: Sequence[Ticket]) -> bool:
    """Whether the newest digests that tickets carry are not all the same."""
    last = max((ticket.weights_round for ticket in handed_in), default=0)
    return len({ticket.weights for ticket in handed_in if last and ticket.weights_round == last}) > 1


def _difference(one: GroupState, other: GroupState) -> str:
    """The first field in which two states differ."""
    for name in GroupState.__struct_fields__:
        if getattr(one, name) != getattr(other, name):
            return f"{name} is {getattr(one, name)!r:.300} and {getattr(other, name)!r:.300}"
    return "nothing"


class Observer(JournalReporter):
    """The real witness, with a checker looking over its shoulder."""

    kept_bytes: Callable[[], int] = staticmethod(lambda: 0)
    """of gradients, by a newcomer"""

    def __init__(self, link: VirtualLink, checker: Checker, training: VirtualTraining) -> None:
        super().__init__(link)
        self._seen = link
        self._checker = checker
        self._training = training

    def moved(self, link: Any) -> None:
        super().moved(link)
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
