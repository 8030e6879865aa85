"""What is written of tickets, entries and policies is what is read back: core.journal.mapping."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace
from stored import lines, names

from pliant.core.drift import Drift
from pliant.core.group_state import PERMUTATION, GroupState, Policy, founded
from pliant.core.journal import mapping
from pliant.core.journal import records as journal
from pliant.core.journal.decisions import Replay
from pliant.core.journal.records import PhaseRecord, RoundRecord, TicketLine
from pliant.core.regrouping import Entry
from pliant.core.tickets import NOWHERE, Flag, Kind, Point, Ticket
from pliant.core.tuning import rates
from pliant.types import WorkerId

FROM_THE_STATE = {"era", "round", "phase", "kind"}
BESIDE_THE_LINES = {"size", "ahead", "epoch", "length", "order", "momentum", "clip_norm", "trained", "wanted", "sums"}
MEASURES = {"measured_round", "measured_norm", "weights_round", "weights", "arithmetic", "sketch"}
NOT_WRITTEN = {
    # Equal on all workers, or computed anew by the reader.
    "digest",
    "exchange",
    # The era's record says which plan it was.
    "plan_term",
    "plan_era",
    # Of what travels behind the ticket.
    "appendix",
    "gathers",
}

WHOLE = st.integers(0, 2**53)
REAL = st.floats(allow_nan=False, allow_infinity=False)
ANY = st.floats()
SECONDS = st.floats(-1e12, 1e12)
SPANS = st.lists(st.tuples(WHOLE, WHOLE), max_size=3)
POINTS = st.builds(Point, WHOLE, WHOLE, WHOLE, st.booleans(), st.booleans(), st.just(True))
FLAGS = st.integers(0, 255).map(Flag)
SETS = st.binary(max_size=4)
NUMBERS = {
    "micro_batches": WHOLE,
    "samples": WHOLE,
    "weight": REAL,
    "busy_s": SECONDS,
    "idle_s": SECONDS,
    "sum_s": SECONDS,
    "cost_s": SECONDS,
    "loss_sum": ANY,
    "squared_norm": ANY,
    "scale": REAL,
}
TICKETS = st.builds(
    Ticket, WHOLE, WHOLE, WHOLE, st.sampled_from(Kind), FLAGS, point=st.one_of(st.just(NOWHERE), POINTS), **NUMBERS
)


def group(members: int = 3, trained: bytes = b"") -> GroupState:
    roster = [WorkerId(f"w{member}") for member in range(members)]
    return replace(founded(Policy(24), 7, roster), round=11, phases=5, trained=trained)


def test_each_field_of_a_ticket_has_its_place_in_a_journal_or_none() -> None:
    line = [field.name for field in fields(TicketLine)]
    assert line == ["spans", *mapping.NUMBERS, "flags", "point"]
    assert set(mapping.NUMBERS) == set(NUMBERS)
    ticket = [field.name for field in fields(Ticket)]
    assert ticket[4] == "flags" and ticket[10:20] == list(mapping.NUMBERS), "both are made by position"
    named = [FROM_THE_STATE, set(line) - {"spans"}, BESIDE_THE_LINES, MEASURES, NOT_WRITTEN]
    assert sorted(name for each in named for name in each) == sorted(ticket)


@given(TICKETS, SPANS)
def test_a_ticket_is_read_as_it_was_handed_in(ticket: Ticket, spans: list[tuple[int, int]]) -> None:
    now = group()
    line = mapping.ticket_line(ticket, spans)
    record = RoundRecord(1, 1, 1, 0, 0.0, 1.0, 0.1, None, True, 0, [line])
    assert journal.decode(journal.encode(record)) == record
    read = mapping.ticket_of(line, now, ticket.kind)
    known = {name: getattr(ticket, name) for name in (*mapping.NUMBERS, "flags", "point")}
    for name in ("loss_sum", "squared_norm"):
        known[name] = known[name] if math.isfinite(known[name]) else 0.0
    assert read == Ticket(now.era, now.round, now.phases, ticket.kind, **known)
    assert type(read.flags) is Flag
    assert mapping.ticket_line(read, spans) == line


@given(st.lists(TICKETS, min_size=1, max_size=4), st.data())
def test_those_who_become_ready_are_read_with_their_sizes(tickets: list[Ticket], data: st.DataObject) -> None:
    sizes = [data.draw(st.tuples(WHOLE, WHOLE)) for _ in tickets]
    handed_in = [replace(t, size=size, ahead=ahead) for t, (size, ahead) in zip(tickets, sizes, strict=True)]
    read = mapping.with_entered(tickets, mapping.entered(handed_in))
    assert [each if each.flags & Flag.READY else None for each in read] == [
        each if each.flags & Flag.READY else None for each in handed_in
    ]


SUMS = st.lists(st.tuples(st.text(max_size=9), ANY, REAL), max_size=3).map(tuple)


@given(st.lists(st.builds(Ticket, WHOLE, WHOLE, WHOLE, st.just(Kind.EVALUATE), sums=SUMS), max_size=4))
def test_sums_are_read_where_they_are_finite(tickets: list[Ticket]) -> None:
    written = mapping.sums_of(tickets)
    if not written:
        assert not any(ticket.sums for ticket in tickets)
        return
    blank = [replace(ticket, sums=()) for ticket in tickets]
    for ticket, read in zip(tickets, mapping.with_sums(blank, written), strict=True):
        finite = tuple((name, total if math.isfinite(total) else 0.0, count) for name, total, count in ticket.sums)
        assert read == replace(ticket, sums=finite)


@given(st.lists(st.tuples(FLAGS, SETS, SETS), min_size=1, max_size=4), SETS)
def test_sets_of_parameters_are_read_for_all_who_have_a_say(
    given: list[tuple[Flag, bytes, bytes]], agreed: bytes
) -> None:
    tickets = [Ticket(1, 1, 1, Kind.TRAIN, flags, trained=own, wanted=next_) for flags, own, next_ in given]
    sets = [mapping.trained_sets(tickets, agreed, wanted=wanted) for wanted in (False, True)]
    record = RoundRecord(1, 1, 1, 0, 0.0, 1.0, 0.1, None, True, 0, [], trained=sets[0], wanted=sets[1])
    blank = [replace(ticket, trained=b"", wanted=b"") for ticket in tickets]
    for ticket, read in zip(tickets, mapping.with_sets(record, blank, agreed), strict=True):
        if not ticket.flags & Flag.FOLLOWING:
            assert read == ticket


@st.composite
def phases(draw: Any) -> tuple[PhaseRecord, GroupState]:
    """What workers that enter a phase together can have written."""
    members = draw(st.integers(1, 4))
    absent = draw(st.sets(st.integers(0, members - 1), max_size=members - 1))
    task, agreed = draw(st.sampled_from(["train", "evaluate"])), draw(SETS)
    given_sets = draw(st.lists(SETS, min_size=members, max_size=members))
    differs = task == "train" and any(given_sets[member] != agreed for member in set(range(members)) - absent)
    record = PhaseRecord(
        draw(WHOLE),
        task,
        *(draw(WHOLE) for _ in range(3)),
        draw(st.lists(WHOLE, min_size=members, max_size=members)),
        draw(st.lists(st.integers(0, 100_000), min_size=members, max_size=members)),
        draw(WHOLE),
        sorted(absent),
        sorted(draw(st.sets(st.integers(0, members - 1)))),
        draw(st.booleans()),
        [each.hex() for each in given_sets] if differs else [],
    )
    return record, group(members, agreed)


@given(phases())
def test_a_phase_is_written_again_as_it_was(given: tuple[PhaseRecord, GroupState]) -> None:
    record, now = given
    kind = mapping.kind_of(record)
    assert kind is not None
    openings = mapping.openings_of(record, now, kind)
    assert mapping.phase_record(record.phase, record.limit, openings, now.trained) == record


ENTRIES = st.builds(
    Entry, st.booleans(), *([st.lists(WHOLE, max_size=3).map(tuple)] * 2), st.lists(POINTS, max_size=3).map(tuple)
)


@given(ENTRIES)
def test_an_entry_into_an_era_is_read_as_it_was(entry: Entry) -> None:
    assert mapping.entry_of(mapping.entry_line(entry)) == entry


WHOLES = st.lists(WHOLE, max_size=3).map(tuple)
DRIFTS = st.builds(
    Drift,
    WHOLE,
    st.lists(st.tuples(WHOLE, WHOLE, WHOLE), max_size=3).map(tuple),
    WHOLES,
    WHOLES,
    WHOLE,
    st.lists(REAL, max_size=3).map(tuple),
)


@given(DRIFTS)
def test_drift_is_read_as_it_was(drift: Drift) -> None:
    assert mapping.drift_of(mapping.drift_line(drift)) == drift


POLICIES = st.builds(
    Policy,
    batch=WHOLE,
    floating=st.booleans(),
    at_most=st.one_of(st.none(), WHOLE),
    delay=st.integers(-1, 1),
    trial=WHOLE,
    rule=st.sampled_from(sorted(rates.RULES)).map(rates.RULES.__getitem__),
    momentum=REAL,
    order=st.sampled_from([PERMUTATION, "another"]),
)


@given(POLICIES)
def test_a_policy_is_read_as_it_was(policy: Policy) -> None:
    now = replace(group(), policy=policy, samples_limit=5)
    record = mapping.policy_record(now, {"seed": "0"}, "2 tensors")
    assert mapping.policy_of(record) == policy
    assert (record.samples_limit, record.updates_limit, record.settings) == (5, None, {"seed": "0"})
    assert mapping.policy_of(replace(record, rule="unheard of")) is None


@pytest.mark.parametrize("name", names())
def test_records_of_real_runs_are_written_again_as_they_were(name: str) -> None:
    replay = Replay()
    for record in journal.effective(journal.read(lines(name))):
        now = replay.group
        match record:
            case PhaseRecord():
                kind = mapping.kind_of(record)
                assert now is not None and kind is not None
                openings = mapping.openings_of(record, now, kind)
                assert mapping.phase_record(record.phase, record.limit, openings, now.trained) == record
            case RoundRecord() | journal.ExchangeRecord():
                assert now is not None
                for line in record.tickets:
                    read = mapping.ticket_of(line, now, now.phase.kind)
                    assert mapping.ticket_line(read, line.spans) == line
            case journal.EraRecord():
                written = record.entries or []
                assert [mapping.entry_line(mapping.entry_of(each)) for each in written] == written
            case journal.PolicyRecord():
                policy = mapping.policy_of(record)
                assert now is not None and policy is not None
                limits = {"samples_limit": record.samples_limit, "updates_limit": record.updates_limit}
                agreed = replace(now, policy=policy, **limits)
                assert mapping.policy_record(agreed, record.settings, record.parameters) == record
            case _:
                pass
        assert replay.take(record) == []
