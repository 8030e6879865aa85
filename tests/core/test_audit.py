"""An audit passes what the decision code journaled, and names everything that was tampered with: core.journal.audit."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import scenes

from pliant.core.group_state import Policy
from pliant.core.journal import records as journal
from pliant.core.journal.audit import AuditReport, audit
from pliant.core.journal.records import (
    EndRecord,
    EraRecord,
    ExchangeRecord,
    PhaseEndRecord,
    PhaseRecord,
    PolicyRecord,
    Record,
    RoundRecord,
    RunRecord,
    TicketLine,
)
from pliant.core.tickets import Flag, Kind
from pliant.errors import JournalError
from pliant.testing.steady import EarlyExit, SteadyCall, SteadyScene, played

changed = msgspec.structs.replace

SCRIPT = (
    SteadyCall(Kind.TRAIN, 103),
    SteadyCall(Kind.EVALUATE, 31),
    SteadyCall(Kind.TRAIN, 103, 1, (EarlyExit(1, 3),)),
)
SCENE = SteadyScene(Policy(16, momentum=0.9), (40.0, 20.0, 10.0), (4, 4, 4), SCRIPT)
FLOATING = SteadyScene(
    Policy(16, floating=True, momentum=0.9), (40.0, 20.0, 10.0), (4, 4, 4), SCRIPT, evaluates_every=4
)


@functools.cache
def example() -> tuple[Record, ...]:
    return tuple(played(SCENE).records)


def at(kind: type[Record], index: int) -> int:
    """Where the ``index``-th record of a kind is in the example."""
    return [number for number, record in enumerate(example()) if isinstance(record, kind)][index]


def tampered(number: int, change: Callable[..., Record]) -> list[Record]:
    records = list(example())
    records[number] = change(records[number])
    return records


def found(report: AuditReport, *texts: str) -> bool:
    """Whether one problem says all of it."""
    return any(all(text in problem for text in texts) for problem in report.problems)


def with_ticket(record: Record, member: int, **fields: object) -> Record:
    assert isinstance(record, RoundRecord | ExchangeRecord)
    tickets = list(record.tickets)
    tickets[member] = changed(tickets[member], **fields)
    return changed(record, tickets=tickets)


# What is right passes.


@settings(max_examples=40)
@given(scenes())
def test_every_journal_of_the_decision_code_passes(scene: SteadyScene) -> None:
    records = played(scene).records
    report = audit(records)
    assert report.problems == []
    assert report.summary["completed"]
    trained = [record for record in records if isinstance(record, RoundRecord)]
    assert report.summary["rounds"] == len(trained)
    assert report.summary["samples"] == sum(record.batch for record in trained)
    assert sum(report.summary["workers"].values()) == report.summary["samples"]
    assert json.loads(json.dumps(report.summary)) == report.summary


@settings(max_examples=30)
@given(scenes(), st.data())
def test_every_beginning_of_a_journal_passes_as_an_incomplete_run(scene: SteadyScene, data: st.DataObject) -> None:
    records = played(scene).records[:-1]
    kept = data.draw(st.integers(1, len(records)))
    report = audit([*records[:kept], EndRecord("w1 was lost", False)])
    assert report.problems == []
    assert not report.summary["completed"]


def test_the_summary_says_what_was_done() -> None:
    report = audit(played(FLOATING).records)
    assert report.problems == []
    summary = report.summary
    assert summary["epochs"] == 2
    assert summary["eras"] == 1
    assert summary["evaluations"] == summary["phases"] - 2 > 1
    assert summary["samples"] + summary["cut_positions"] == 206
    assert list(summary["workers"]) == ["w0", "w1", "w2"]


def test_a_skipped_round_passes_and_is_counted() -> None:
    report = audit(
        played(
            SteadyScene(Policy(8), (9.0, 5.0), (4, 4), (SteadyCall(Kind.TRAIN, 50),), spoiled=frozenset({17}))
        ).records
    )
    assert report.problems == []
    assert report.summary["skipped_rounds"] == 1


def test_an_epoch_without_room_for_a_sample_passes() -> None:
    script = (SteadyCall(Kind.TRAIN, 20), SteadyCall(Kind.TRAIN, 20, 1))
    report = audit(played(SteadyScene(Policy(8), (9.0, 5.0), (4, 4), script, samples_limit=20)).records)
    assert report.problems == []


def test_an_era_that_never_formed_a_group_is_no_problem() -> None:
    records = list(example())
    assert isinstance(records[1], EraRecord)
    again = [changed(records[1], era=2), *records[2:]]
    again = [changed(r, era=2) if isinstance(r, RoundRecord | ExchangeRecord) else r for r in again]
    report = audit([records[0], records[1], *again])
    assert report.problems == []
    assert report.summary["eras"] == 2


# What is wrong is named.


@pytest.mark.parametrize("replay", [True, False])
def test_a_dropped_round_is_named(replay: bool) -> None:
    number = at(RoundRecord, 2)
    gone = example()[number]
    assert isinstance(gone, RoundRecord)
    report = audit([*example()[:number], *example()[number + 1 :]], replay=replay)
    assert found(report, "phase 1, round 4", "follows round 2")
    start, stop = gone.tickets[0].spans[0]
    assert found(report, "phase 1: positions never used nor cut", f"{start}..")
    assert start < stop


@pytest.mark.parametrize("replay", [True, False])
def test_a_repeated_span_is_named_with_its_worker(replay: bool) -> None:
    earlier = example()[at(RoundRecord, 0)]
    assert isinstance(earlier, RoundRecord)
    span = earlier.tickets[0].spans[0]
    number = at(RoundRecord, 3)
    report = audit(tampered(number, lambda r: with_ticket(r, 1, spans=[span])), replay=replay)
    assert found(report, "phase 1, round 4: w1 repeats positions", f"{span[0]}..{span[1]}")
    assert found(report, "phase 1: positions never used nor cut")


def test_a_position_beyond_the_limit_is_named() -> None:
    report = audit(tampered(at(RoundRecord, 1), lambda r: with_ticket(r, 0, spans=[(100, 110)])), replay=False)
    assert found(report, "phase 1, round 2: w0 used positions beyond the limit 103: 103..110")


ALTERATIONS: list[tuple[str, dict[str, object], tuple[str, ...]]] = [
    ("batch", {"batch": 17}, ("batch is 17, the tickets add up to 16",)),
    ("weight", {"weight": 15.5}, ("weight is 15.5, the tickets add up to 16.0",)),
    ("loss", {"loss": 0.2}, ("loss is 0.2, the tickets give 0.1",)),
    ("total", {"samples_total": 5}, ("samples_total is 5, the rounds add up to 48",)),
    ("era", {"era": 0}, ("is of era 0 while era 1 is current",)),
    ("phase", {"phase": 7}, ("not in its phase, phase 1 is open",)),
    ("tickets", {"tickets": []}, ("has 0 tickets, the roster 3 workers",)),
    ("number", {"round": 9}, ("follows round 2",)),
]


@pytest.mark.parametrize(("fields", "texts"), [a[1:] for a in ALTERATIONS], ids=[a[0] for a in ALTERATIONS])
@pytest.mark.parametrize("replay", [True, False])
def test_an_altered_round_is_named(fields: dict[str, object], texts: tuple[str, ...], replay: bool) -> None:
    report = audit(tampered(at(RoundRecord, 2), lambda r: changed(r, **fields)), replay=replay)
    assert found(report, "round", *texts), report.problems


REPLAYED: list[tuple[str, dict[str, object], str]] = [
    ("factor", {"factor": 1.5}, "factor is 1.5, the decision code says 1.0"),
    ("applied", {"applied": False}, "applied is False, the decision code says True"),
]


@pytest.mark.parametrize(("fields", "text"), [a[1:] for a in REPLAYED], ids=[a[0] for a in REPLAYED])
def test_a_decision_the_code_would_not_make_is_named(fields: dict[str, object], text: str) -> None:
    report = audit(tampered(at(RoundRecord, 2), lambda r: changed(r, **fields)))
    assert report.problems == [f"phase 1, round 3: {text}"]


def test_shares_swapped_between_workers_cover_everything_but_are_not_what_was_dealt() -> None:
    def swap(record: Record) -> Record:
        assert isinstance(record, RoundRecord)
        first, second, *rest = record.tickets
        swapped = [changed(second, spans=second.spans), first, *rest]
        return changed(record, tickets=swapped)

    records = tampered(at(RoundRecord, 3), swap)
    assert audit(records, replay=False).problems == []
    assert found(audit(records), "phase 1, round 4", "handed in")


def test_a_wrong_measurement_shows_in_later_shares() -> None:
    report = audit(tampered(at(RoundRecord, 1), lambda r: with_ticket(r, 2, busy_s=0.01)))
    assert len(report.problems) == 1
    assert "phase 1, round" in report.problems[0]


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        ([], "positions never used nor cut"),
        ([(0, 103)], "cut positions were used: 0.."),
        ([(90, 110)], "cut 90..110 is not within 0..103"),
    ],
    ids=["nothing", "everything", "beyond"],
)
def test_a_wrong_cut_is_named(cut: list[tuple[int, int]], text: str) -> None:
    report = audit(tampered(at(PhaseEndRecord, 2), lambda r: changed(r, cut=cut)))
    assert found(report, "phase 3: ", text), report.problems
    assert found(report, "phase 3: cut", "the decision code says")


def test_a_cut_without_a_break_is_named() -> None:
    report = audit(tampered(at(PhaseEndRecord, 0), lambda r: changed(r, cut=[(5, 9)])), replay=False)
    assert found(report, "phase 1: cut 5..9 but no worker left its loop")


def test_a_wrong_result_is_named() -> None:
    report = audit(tampered(at(PhaseEndRecord, 1), lambda r: changed(r, result=0.9)))
    assert found(report, "phase 2: result is 0.9, the decision code says 0.1")


def test_a_wrong_limit_is_named() -> None:
    report = audit(tampered(at(PhaseRecord, 0), lambda r: changed(r, limit=104)))
    assert found(report, "phase 1: its limit 104 is not within its length 103")
    assert found(report, "phase 1: positions never used nor cut: 103..104")
    assert found(report, "phase 1: limit is 104, the decision code says 103")


def test_a_phase_that_never_ended_is_named_only_in_a_run_that_completed() -> None:
    without = [record for number, record in enumerate(example()) if number != at(PhaseEndRecord, 2)]
    assert found(audit(without), "phase 3 never ended in a run that completed; not used: ")
    assert audit([*without[:-1], EndRecord("Ctrl-C", False)]).problems == []


def test_repeated_positions_are_no_better_in_a_run_that_did_not_complete() -> None:
    number = at(RoundRecord, 1)
    record = example()[number]
    assert isinstance(record, RoundRecord)
    again = changed(record, round=3, samples_total=48)
    report = audit([*example()[: number + 1], again, EndRecord("Ctrl-C", False)])
    assert found(report, "phase 1, round 3: w0 repeats positions")


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([], "the journal is empty"),
        ([RunRecord("a", "1", 0.0), RunRecord("a", "1", 0.0)], "starts a second run"),
        ([EndRecord("done", True), EraRecord(1, ["w0"])], "record 2 follows the end of the run"),
        ([EraRecord(2, ["w0"]), EraRecord(2, ["w0"])], "era 2 follows era 2: era numbers only grow"),
        ([PhaseEndRecord(1, [])], "phase 1 ends but no phase is open"),
        ([EraRecord(1, ["w0"]), PhaseRecord(1, "train", 0, 9, 9, [4], [0], 0)], "opens before the policy is written"),
    ],
)
def test_a_journal_out_of_order_is_named(records: list[Record], text: str) -> None:
    assert found(audit(records), text)


@settings(max_examples=40)
@given(st.data())
def test_no_record_of_a_completed_run_can_be_left_out_or_repeated(data: st.DataObject) -> None:
    records = list(example())
    # An exchange of evaluate that nobody had anything for yet says nothing.
    silent = [n for n, record in enumerate(records) if isinstance(record, ExchangeRecord) and record.batch == 0]
    number = data.draw(st.sampled_from([n for n in range(1, len(records) - 1) if n not in silent]))
    assert audit([*records[:number], *records[number + 1 :]]).problems
    # The policy may be said twice.
    repeated = audit([*records[:number], records[number], *records[number:]]).problems
    assert repeated or isinstance(records[number], PolicyRecord)


def test_a_journal_full_of_damage_is_reported_in_bounded_space() -> None:
    records = [RoundRecord(9, 7, 3, 1, 0.0, 1.0, 0.1, None, False, 0, []) for _ in range(500)]
    report = audit([RunRecord("a", "1", 0.0), *records])
    assert len(report.problems) == 101
    assert report.problems[-1].endswith("more problems")


# On disk.


def on_disk() -> list[bytes]:
    lines, chain = [], 0
    for record in example():
        text, chain = journal.line(journal.encode(record), chain)
        lines.append(text)
    return lines


def test_the_file_as_written_passes() -> None:
    assert audit(journal.read(on_disk())).problems == []


def test_swapped_lines_and_a_truncated_file_do_not_get_past_the_reader() -> None:
    lines = on_disk()
    swapped = [*lines[:5], lines[6], lines[5], *lines[7:]]
    with pytest.raises(JournalError, match="line 6 does not fit its checksum"):
        audit(journal.read(swapped))
    with pytest.raises(JournalError, match=f"line {len(lines)} is incomplete"):
        audit(journal.read([*lines[:-1], lines[-1][:-9]]))


def test_a_file_that_lost_its_last_lines_is_an_incomplete_run() -> None:
    report = audit(journal.read(on_disk()[:-3]))
    assert report.problems == []
    assert not report.summary["completed"]
    assert report.summary["reason"] == "the journal has no end record"


def cpu_seconds(rounds: int, workers: int = 4, share: int = 8) -> float:
    """What the audit of so many rounds costs, without the replay of decisions."""
    batch = workers * share
    length = rounds * batch
    records: list[Record] = [EraRecord(1, [f"w{m}" for m in range(workers)])]
    records.append(PhaseRecord(1, "train", 0, length, length, [share] * workers, [0] * workers, 0))
    for number in range(rounds):
        starts = [number * batch + member * share for member in range(workers)]
        lines = [
            TicketLine([(s, s + share)], 1, share, 8.0, 0.1, 0.0, 0.0, 0.0, 0.8, 0.0, 1.0, int(Flag.NONE))
            for s in starts
        ]
        records.append(RoundRecord(1, number + 1, 1, batch, 32.0, 1.0, 0.1, 0.1, True, (number + 1) * batch, lines))
    start_s = time.process_time()
    report = audit([*records, PhaseEndRecord(1, []), EndRecord("done", True)], replay=False)
    assert report.problems == []
    return time.process_time() - start_s


def test_the_audit_of_a_long_journal_costs_in_proportion_to_its_length() -> None:
    """A ratio in one run: sixteen times the rounds cost about sixteen times as much, far from the square."""
    assert cpu_seconds(16_000) < 64 * cpu_seconds(1_000)


# The end is proved by the record that closes the journal.


def closed(records: list[Record], **fields: object) -> list[bytes]:
    """The journal as a coordinator writes it."""
    place, lines = journal.BEGINNING, list[bytes]()
    for record in records:
        if isinstance(record, EndRecord):
            known = audit(records[:-1], replay=False).summary
            record = changed(record, **{"rounds": known["rounds"], "samples": known["samples"], **fields})
            assert isinstance(record, EndRecord)
            record = journal.closing(record, place)
        text, _ = journal.line(journal.encode(record), place.chain)
        place = place.after(text)
        lines.append(text)
    return lines


def test_a_closed_journal_is_proved_to_its_end() -> None:
    report = audit(journal.read(closed(example())))
    assert report.problems == [] and report.end_proved and report.summary["proved"] == "to the end"


def test_what_was_not_closed_is_proved_up_to_a_round() -> None:
    lines = closed(example())
    report = audit(journal.read(lines[:-1]))
    last = max(record.round for record in example() if isinstance(record, RoundRecord))
    assert report.problems == [] and not report.end_proved
    assert report.summary["proved"].startswith(f"up to round {last}: the journal was not closed")
    old = audit(journal.read(on_disk()))
    assert old.problems == [] and not old.end_proved and "older Pliant" in old.summary["proved"]


def test_a_closing_record_of_another_journal_is_found() -> None:
    lines = closed(example())
    end = journal.decode(lines[-1])
    shorter = closed([*example()[:-4]])
    chain = journal.JournalPosition().after(shorter[-1]).chain
    moved, _ = journal.line(journal.encode(end), chain)
    with pytest.raises(JournalError, match="closes a journal of other lines"):
        list(journal.read([*shorter, moved]))
    assert found(audit(journal.read(closed(example(), rounds=1))), "the journal was closed with 1 rounds")


def test_after_a_gap_nothing_is_proved() -> None:
    number = at(RoundRecord, 2)
    gap = journal.GapRecord(number, number + 3, "lost")
    report = audit(journal.read(closed([*example()[:number], gap, *example()[number + 3 :]])))
    assert report.problems == [] and not report.end_proved and "are missing" in report.summary["proved"]
