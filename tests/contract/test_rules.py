"""What holds under every rate rule: bounds, purity, the journal, eras, and every history of the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pliant.core import consistency, regrouping, rounds
from pliant.core.consistency import Mismatch
from pliant.core.group_state import GroupState, Policy, founded
from pliant.core.journal import records as journal
from pliant.core.journal.decisions import Replay
from pliant.core.regrouping import Entry
from pliant.core.rounds import Settled
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.core.tuning import noise, rates
from pliant.core.tuning.rates import RULES, Rule
from pliant.testing.memo import remembered
from pliant.testing.scenes import drawn
from pliant.testing.simulation import Simulation
from pliant.types import WorkerId
from pliant.worker import snapshot
from pliant.worker.journal import JournalReporter

REFERENCE, LENGTH, ROUNDS = 16, 100_000, 60
ROSTER = [WorkerId("w0"), WorkerId("w1"), WorkerId("w2")]
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=str)


class Lines:
    """Keeps journal lines."""

    def __init__(self) -> None:
        self.sends_lines = False
        self.kept: list[bytes] = []

    def keep(self, lines: Sequence[bytes], first: int) -> None:
        self.kept += lines

    def send_lines_again(self) -> None: ...


class Training:
    """Three workers whose tickets are made up; the batch jumps to twelve times the reference and back."""

    def __init__(self, rule: Rule) -> None:
        self.lines = Lines()
        self.reporter = JournalReporter(self.lines)
        policy = Policy(REFERENCE, floating=True, at_most=4096, rule=rule, momentum=0.9)
        self.group = founded(policy, 1, ROSTER)
        self.measured = (0, 0.0)
        self.outcomes: list[Settled] = []
        self.reporter.era(self.group, None, sends=True)
        openings = [
            Ticket(1, 0, 0, Kind.TRAIN, Flag.OPENING, length=LENGTH, size=64, digest=consistency.digest(self.group))
            for _ in ROSTER
        ]
        opened = rounds.opened(self.group, openings)
        assert isinstance(opened, GroupState)
        self.group = opened
        self.reporter.opened(opened, openings)

    def tickets(self) -> list[Ticket]:
        group = self.group
        many = 3 if 15 <= group.round < 40 else 1
        made: list[Ticket] = []
        for member in range(len(group.roster)):
            hand = group.phase.ledger.hands[member]
            count = min(many, hand.granted)
            samples = sum(stop - start for spans in hand.queue[:count] for start, stop in spans)
            made.append(
                Ticket(
                    group.era,
                    group.round,
                    group.phases,
                    Kind.TRAIN,
                    micro_batches=count,
                    samples=samples,
                    weight=float(samples),
                    busy_s=0.001 * samples,
                    sum_s=0.01,
                    loss_sum=0.5 * samples,
                    squared_norm=1.0 + 200.0 / samples if samples else 0.0,
                    digest=consistency.digest(group),
                    # One member alone has taken the norm: a newcomer is in the first place, say.
                    measured_round=self.measured[0] if member == 1 else 0,
                    measured_norm=self.measured[1],
                )
            )
        return made

    def round(self) -> Settled:
        tickets = self.tickets()
        decision = rounds.settled(self.group, tickets)
        assert not isinstance(decision, Mismatch), decision.reason
        assert decision == rounds.settled(self.group, tickets), "the same question has two answers"
        self.group, outcome = decision
        if outcome.measures:
            self.measured = outcome.round, 1.0 + 200.0 / outcome.batch
        self.reporter.settled(self.group, outcome, tickets, 0.1 * outcome.factor)
        self.outcomes.append(outcome)
        return outcome


@every_rule
def test_factors_are_bounded_by_the_batch_and_rise_no_faster_than_the_rule(rule: Rule) -> None:
    training = Training(rule)
    for _ in range(ROUNDS):
        before = training.group
        outcome = training.round()
        after = training.group.rate
        assert after.batch is not None and math.isfinite(outcome.factor) and outcome.factor > 0.0
        k = after.batch / REFERENCE
        wanted = rates.target(rule, k, reference=REFERENCE, noise_scale=training.group.noise.scale)
        assert min(1.0, k) - 1e-12 <= wanted <= max(1.0, k) + 1e-12
        # Up to the target and no further; from above, or without a ramp, exactly to it.
        assert outcome.factor <= wanted
        if wanted <= before.rate.factor or not rule.ramps:
            assert outcome.factor == wanted
    assert max(outcome.batch for outcome in training.outcomes) >= 8 * min(o.batch for o in training.outcomes) / 3
    assert training.group.noise.scale == pytest.approx(200.0, rel=1e-6)


@every_rule
def test_two_runs_on_the_same_tickets_decide_alike(rule: Rule) -> None:
    first, second = Training(rule), Training(rule)
    for _ in range(ROUNDS):
        assert first.round() == second.round()
        assert first.group == second.group and consistency.digest(first.group) == consistency.digest(second.group)


@every_rule
def test_the_journal_leads_to_the_same_factors_and_a_changed_one_is_noticed(rule: Rule) -> None:
    training = Training(rule)
    for _ in range(ROUNDS):
        training.round()
    training.reporter.confirmed()
    records = [journal.decode(line) for line in training.lines.kept]
    replay = Replay()
    assert [text for record in records for text in replay.take(record)] == []
    assert replay.rounds == ROUNDS
    policy = next(record for record in records if isinstance(record, journal.PolicyRecord))
    assert RULES[policy.rule] == rule
    told = [number for number, r in enumerate(records) if isinstance(r, journal.RoundRecord) and r.measured]
    assert len(told) >= noise.DENSE
    # A norm that was not the one decided with: the noise scale that follows from it is another.
    changed = list(records)
    record = changed[told[8]]
    assert isinstance(record, journal.RoundRecord) and record.measured is not None
    changed[told[8]] = _with(record, measured=(record.measured[0], record.measured[1] * 1.5))
    replay = Replay()
    assert any("noise scale is" in text for record in changed for text in replay.take(record))


def _with(record: journal.RoundRecord, measured: tuple[int, float]) -> journal.RoundRecord:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return journal.RoundRecord(**{**fields, "measured": measured})


@every_rule
def test_what_was_learned_goes_on_after_eras_and_reaches_newcomers_bit_for_bit(rule: Rule) -> None:
    training = Training(rule)
    for _ in range(25):
        training.round()
    before = training.group
    joined = regrouping.switched(before, 2, [*ROSTER, WorkerId("w3")])
    entries = [Entry(True, (1,), (0,)), Entry(True, (1,), (0,)), Entry(False)]
    regrouped = regrouping.regrouped(joined, 3, [ROSTER[0], ROSTER[2], WorkerId("w4")], entries)
    for after in (joined, regrouped):
        assert (after.rate, after.noise, after.scheduled) == (before.rate, before.noise, before.scheduled)
        assert after.policy.rule == rule
    handed = snapshot.decoded(snapshot.encoded(snapshot.GroupSnapshot(regrouped, 7, 0, False), known=0), regrouped.past)
    assert handed.group == regrouped
    training.group = handed.group
    number = handed.group.round
    for _ in range(10):
        assert training.round().factor > 0.0
    # What was awaited was applied before the era ended, and is told in the new one; the void round never.
    assert training.group.noise.measured > before.noise.measured
    assert all(each.round > number for each in training.group.noise.awaited)


@every_rule
def test_a_schedule_moves_by_samples_or_by_what_they_were_worth(rule: Rule) -> None:
    training = Training(rule)
    for _ in range(ROUNDS):
        before = training.group.scheduled
        outcome = training.round()
        moved = training.group.scheduled - before
        if rule.name == "adascale":
            worth = outcome.factor**2 if rule.moments else outcome.factor
            assert moved == pytest.approx(worth * REFERENCE)
        else:
            assert training.group.scheduled == training.group.samples


@every_rule
@pytest.mark.parametrize("scene", ["kills", "turnover", "handoffs"])
def test_every_history_holds(rule: Rule, scene: str) -> None:
    """The real workers with faults in virtual time: equal states, an audit without problems, weights recomputed."""
    for seed in range(900, 903):
        made = drawn(scene, seed)
        policy = replace(made.policy, floating=True, at_most=None, delay=1, rule=rule)
        with remembered():
            assert Simulation(replace(made, policy=policy), seed).run().error is None
