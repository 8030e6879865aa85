"""Workers are killed, leave and join while the decisions go on: core.rounds, core.regrouping, and the journal.

The real coordinator and the real workers in virtual time, under faults that hypothesis draws. Beside what is asked here
the simulator asks in every history that all who settle an exchange reach the same state, that numbers only grow, and
that only those who compute hold samples (``testing.invariants``).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scenes import policies

from pliant.core.group_state import Policy
from pliant.core.journal import records as journal
from pliant.core.journal.audit import AuditReport, audit
from pliant.core.journal.records import (
    EntryLine,
    EraRecord,
    ExchangeRecord,
    PhaseEndRecord,
    PhaseRecord,
    Record,
    RoundRecord,
)
from pliant.core.tickets import Flag
from pliant.testing.faults import Fault
from pliant.testing.simulation import Scene, Simulation

EXAMPLES = 50

PACES = st.sampled_from([0.001, 0.002, 0.004, 0.008, 0.02])


@functools.cache
def history(scene: Scene, seed: int = 0) -> tuple[Record, ...]:
    """The journal of a run."""
    simulation = Simulation(scene, seed)
    outcome = simulation.run()
    assert outcome.error is None
    return tuple(journal.read(bytes(simulation.host.disk.content).splitlines(keepends=True)))


@st.composite
def elastic_scenes(draw: st.DrawFn, *, fixed: bool = False) -> Scene:
    """Workers of any number and speed that are killed, leave and join at any moment; some of them break."""
    workers = draw(st.integers(1, 4))
    each = {"min_size": 5, "max_size": 5}
    breaks = draw(st.sampled_from([0.0, 0.0, 0.01]))
    policy = draw(policies(workers))
    if policy.at_most is not None:
        # Who is left alone makes updates of the reference batch.
        policy = replace(policy, at_most=max(policy.at_most, policy.batch))
    when = st.one_of(st.floats(0.1, 0.6), st.floats(0.1, 1.5))
    faults = st.builds(
        Fault, st.sampled_from(["kill", "leave", "join", "join"]), when, st.just(""), whom=st.integers(0, 4)
    )
    return Scene(
        "elastic",
        replace(policy, floating=False, at_most=None) if fixed else policy,
        workers,
        paces=tuple(draw(st.lists(PACES, **each))),
        sizes=tuple(draw(st.lists(st.integers(1, 32), **each))),
        epochs=draw(st.integers(1, 2)),
        length=draw(st.integers(1, 150)),
        # Who breaks does not see every update: the scripts would call it at different rounds.
        nested=0 if breaks else draw(st.sampled_from([0, 0, 1, 3])),
        breaks=breaks,
        sum_s=draw(st.sampled_from([0.001, 0.01, 0.05])),
        faults=tuple(draw(st.lists(faults, min_size=1, max_size=5))),
        may_fail=True,
    )


def spent(records: tuple[Record, ...]) -> dict[int, list[int]]:
    """Positions used or cut, with repetitions, by phase."""
    found: dict[int, list[int]] = {}
    for record in records:
        spans: list[tuple[int, int]] = []
        if isinstance(record, RoundRecord | ExchangeRecord):
            spans = [span for ticket in record.tickets for span in ticket.spans]
        elif isinstance(record, PhaseEndRecord):
            spans = record.cut
        else:
            continue
        found.setdefault(record.phase, []).extend(p for start, stop in spans for p in range(start, stop))
    return found


@settings(max_examples=EXAMPLES)
@given(elastic_scenes(), st.integers(0, 99))
def test_every_position_is_spent_once_whoever_comes_and_goes(scene: Scene, seed: int) -> None:
    records = history(scene, seed)
    positions = spent(records)
    lengths = {record.phase: record.limit or record.length for record in records if isinstance(record, PhaseRecord)}
    assert all(max(Counter(used).values(), default=1) == 1 for used in positions.values())
    for record in records:
        # Where all are lost at once the last phase has no end.
        if isinstance(record, PhaseEndRecord):
            assert sorted(positions[record.phase]) == list(range(lengths[record.phase]))


@settings(max_examples=EXAMPLES // 2)
@given(elastic_scenes(), st.integers(0, 99))
def test_the_journal_passes_the_audit(scene: Scene, seed: int) -> None:
    records = history(scene, seed)
    report = audit(records)
    assert report.problems == []
    eras = [record for record in records if isinstance(record, EraRecord)]
    assert report.summary["eras"] == len(eras)
    assert report.summary["void_rounds"] == sum(era.entries is not None for era in eras)
    assert sum(report.summary["workers"].values()) == report.summary["samples"]


@settings(max_examples=EXAMPLES // 2)
@given(elastic_scenes(fixed=True), st.integers(0, 99))
def test_a_fixed_batch_is_full_but_at_the_end_or_when_somebody_goes(scene: Scene, seed: int) -> None:
    # What is in progress was made up after somebody went: not for a single sample, nor by spares.
    thinned = regrouped = False
    for record, following in itertools.pairwise(history(scene, seed)):
        if isinstance(record, EraRecord):
            thinned, regrouped = thinned or record.entries is not None, regrouped or record.entries is not None
        elif isinstance(record, RoundRecord):
            leaving = any(line.flags & Flag.LEAVING for line in record.tickets)
            lacking = scene.policy.batch - record.batch
            if lacking > 0:
                last = isinstance(following, PhaseEndRecord)
                assert last or leaving or (thinned and (lacking == 1 or record.batch == 0))
            else:
                # Survivors keep what they had begun, some of one round, some of the next.
                assert lacking == 0 or regrouped
            thinned, regrouped = leaving, False


PAIR = Scene("pair", Policy(16), 2, (0.01, 0.02, 0.01), (4, 4, 4), epochs=1, length=403, tested=False)


def eras_of(records: Iterable[Record]) -> list[EraRecord]:
    return [record for record in records if isinstance(record, EraRecord)]


def test_a_newcomer_gets_a_share_as_soon_as_it_is_ready() -> None:
    records = history(replace(PAIR, faults=(Fault("join", at_s=0.5),)))
    report = audit(records)
    assert report.problems == []
    assert report.summary["eras"] == 2
    (newcomer,) = set(eras_of(records)[1].roster) - set(eras_of(records)[0].roster)
    assert report.summary["workers"][newcomer] > 80
    joined = [record for record in records if isinstance(record, RoundRecord) and record.entered]
    assert joined[0].entered == [(2, 4, 0)]


def test_the_last_one_goes_on_alone() -> None:
    records = history(replace(PAIR, faults=(Fault("kill", at_s=0.9),)))
    report = audit(records)
    assert report.problems == []
    first, second, *_ = eras_of(records)
    assert report.summary["void_rounds"] == 1
    assert set(second.roster) < set(first.roster) and len(second.roster) == 1
    assert second.void not in [record.round for record in records if isinstance(record, RoundRecord)]


def test_who_leaves_hands_in_what_it_has_and_the_rest_goes_to_the_others() -> None:
    records = history(replace(PAIR, faults=(Fault("leave", at_s=0.9, whom=1),)))
    report = audit(records)
    assert report.problems == []
    assert (report.summary["eras"], report.summary["void_rounds"]) == (2, 0)
    first, second = eras_of(records)
    assert set(second.roster) < set(first.roster)
    last = max(record.era for record in records if isinstance(record, RoundRecord))
    assert last == second.era, "the others go on"


def elastic() -> list[Record]:
    """Somebody joins, somebody dies."""
    faults = (Fault("join", at_s=0.3), Fault("kill", at_s=1.4, whom=1))
    return list(history(replace(PAIR, faults=faults)))


def tampered(**fields: object) -> AuditReport:
    """The unplanned era of the journal, altered."""
    records = elastic()
    (number,) = [n for n, record in enumerate(records) if isinstance(record, EraRecord) and record.entries is not None]
    records[number] = msgspec.structs.replace(records[number], **fields)
    return audit(records)


def said(report: AuditReport, text: str) -> bool:
    return any(text in problem for problem in report.problems)


def test_an_unplanned_era_is_proven() -> None:
    report = audit(elastic())
    assert report.problems == []
    # The last one is with who was started again.
    assert [era.entries is not None for era in eras_of(elastic())] == [False, False, True, False]
    assert (report.summary["eras"], report.summary["void_rounds"]) == (4, 1)
    assert list(report.summary["workers"]) == ["w0", "w1", "w2", "w1.2"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"era": 2}, "era 2 follows era 2: era numbers only grow"),
        ({"void": 0}, "era 3: round 0 is void, round"),
        ({"entries": None, "void": 0}, "rounds are numbered one by one"),
        ({"entries": None}, "is void although nobody was lost"),
        ({"entries": []}, "era 3: nobody in it holds the state"),
        ({"roster": ["w0", "w0"]}, "era 3: w0 is on its roster more than once"),
        ({"roster": ["w0", "w9"]}, "era 3: w9 holds the state but was not in era 2"),
        ({"roster": ["w0"]}, "era 3: has 2 entries, its roster 1 workers"),
        ({"entries": [EntryLine(True, [9], [9]), EntryLine(True, [0], [0])]}, "micro-batches in phase 1,"),
        ({"entries": [EntryLine(True, [], []), EntryLine(True, [0], [0])]}, "w0 enters for 0 phases, 1 are open"),
    ],
)
def test_an_altered_era_is_named(fields: dict[str, object], text: str) -> None:
    report = tampered(**fields)
    assert said(report, text), report.problems


def test_what_was_kept_shows_in_later_deals() -> None:
    lost = [EntryLine(True, [0], [0]), EntryLine(True, [0], [0])]
    assert said(tampered(entries=lost), "the decision code says") or said(tampered(entries=lost), "handed in")


def test_who_only_goes_along_hands_in_nothing() -> None:
    records = elastic()
    for number, record in enumerate(records):
        if isinstance(record, RoundRecord) and any(line.flags & Flag.FOLLOWING for line in record.tickets):
            lines = [msgspec.structs.replace(line, flags=int(Flag.FOLLOWING)) for line in record.tickets]
            records[number] = msgspec.structs.replace(record, tickets=lines)
            break
    assert said(audit(records, replay=False), "samples although it only goes along")


def test_a_round_does_not_carry_a_void_number() -> None:
    records = elastic()
    (number,) = [n for n, record in enumerate(records) if isinstance(record, EraRecord) and record.entries is not None]
    after = next(n for n in range(number, len(records)) if isinstance(records[n], RoundRecord))
    era, record = records[number], records[after]
    assert isinstance(era, EraRecord) and isinstance(record, RoundRecord)
    records[after] = msgspec.structs.replace(record, round=era.void)
    for replay in (True, False):
        assert said(audit(records, replay=replay), f"round {era.void}: follows round {era.void}")
