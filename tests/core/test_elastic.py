"""Workers are killed, leave and join while the decisions go on: core.rounds and core.regrouping, and the journal."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from driver import Call, Change, Play, Scene, played
from hypothesis import given, settings
from msgspec.structs import replace
from scenes import elastic_scenes

from pliant.core.group_state import Policy, Standing
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
from pliant.core.tickets import Flag, Kind

EXAMPLES = 40


def spent(play: Play) -> dict[int, list[int]]:
    """Positions used or cut, with repetitions, by phase."""
    found: dict[int, list[int]] = {}
    for record in play.records:
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
@given(elastic_scenes())
def test_every_position_is_spent_once_whoever_comes_and_goes(scene: Scene) -> None:
    play = played(scene)
    positions = spent(play)
    for record in play.records:
        if isinstance(record, PhaseRecord):
            assert sorted(positions[record.phase]) == list(range(record.limit or record.length))


@settings(max_examples=EXAMPLES)
@given(elastic_scenes(breaks=True))
def test_the_journal_passes_the_audit(scene: Scene) -> None:
    play = played(scene)
    report = audit(play.records)
    assert report.problems == []
    eras = [record for record in play.records if isinstance(record, EraRecord)]
    assert report.summary["eras"] == len(eras)
    assert report.summary["void_rounds"] == sum(era.entries is not None for era in eras)
    assert sum(report.summary["workers"].values()) == report.summary["samples"]


@settings(max_examples=EXAMPLES // 2)
@given(elastic_scenes(breaks=True))
def test_all_workers_reach_the_same_states(scene: Scene) -> None:
    play = played(scene, replicates=True)
    reached: dict[tuple[int, int], object] = {}
    for worker in play.workers:
        for state in worker.states:
            assert reached.setdefault((state.era, state.exchange), state) == state
        numbers = [(state.era, state.exchange, state.round) for state in worker.states]
        for earlier, later in itertools.pairwise(numbers):
            assert all(a <= b for a, b in zip(earlier, later, strict=True))
            assert earlier[:2] < later[:2]


@settings(max_examples=EXAMPLES)
@given(elastic_scenes())
def test_only_active_workers_hold_anything(scene: Scene) -> None:
    for worker in played(scene).workers:
        for state in worker.states:
            for phase in state.open:
                for standing, present, hand in zip(state.standings, phase.present, phase.ledger.hands, strict=True):
                    assert not hand.queue or (standing is Standing.ACTIVE and present)


@settings(max_examples=EXAMPLES)
@given(elastic_scenes())
def test_a_fixed_batch_is_full_but_at_the_end_or_when_somebody_goes(scene: Scene) -> None:
    if scene.policy.floating:
        return
    play = played(scene)
    # What is in progress was made up after somebody went: not for a single sample, nor by spares.
    thinned = regrouped = False
    for record, following in itertools.pairwise(play.records):
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


PAIR = Scene(Policy(16), (100.0, 50.0), (4, 4), (Call(Kind.TRAIN, 403),))


def test_a_newcomer_gets_a_share_as_soon_as_it_is_ready() -> None:
    scene = replace(PAIR, speeds=(100.0, 50.0, 100.0), sizes=(4, 4, 4), happens=(Change(0.5, "join", 2),))
    play = played(scene)
    report = audit(play.records)
    assert report.problems == []
    assert report.summary["eras"] == 2
    assert report.summary["workers"]["w2"] > 80
    joined = [record for record in play.records if isinstance(record, RoundRecord) and record.entered]
    assert joined[0].entered == [(2, 4, 0)]


def test_the_last_one_goes_on_alone() -> None:
    play = played(replace(PAIR, happens=(Change(0.7, "kill", 0),)))
    report = audit(play.records)
    assert report.problems == []
    assert (report.summary["eras"], report.summary["void_rounds"]) == (2, 1)
    eras = [record for record in play.records if isinstance(record, EraRecord)]
    assert eras[1].roster == ["w1"]
    assert eras[1].void not in [record.round for record in play.records if isinstance(record, RoundRecord)]


def test_who_leaves_hands_in_what_it_has_and_the_rest_goes_to_the_others() -> None:
    play = played(replace(PAIR, happens=(Change(0.7, "leave", 1),)))
    report = audit(play.records)
    assert report.problems == []
    assert (report.summary["eras"], report.summary["void_rounds"]) == (2, 0)
    assert not play.workers[1].group.over


def elastic() -> list[Record]:
    """Somebody joins, somebody dies."""
    happens = (Change(0.3, "join", 2), Change(1.4, "kill", 1))
    return played(replace(PAIR, speeds=(100.0, 50.0, 80.0), sizes=(4, 4, 4), happens=happens)).records


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
    assert (report.summary["eras"], report.summary["void_rounds"]) == (3, 1)
    assert list(report.summary["workers"]) == ["w0", "w1", "w2"]


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
