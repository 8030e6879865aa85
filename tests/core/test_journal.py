"""What is written is what is read, and no damage goes unnoticed: core.journal.records."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.core.group_state import Policy
from pliant.core.journal import records as journal
from pliant.core.journal.records import EndRecord, Record, RoundRecord, RunRecord, TicketLine
from pliant.core.tickets import Kind
from pliant.errors import JournalError
from pliant.testing.steady import SteadyCall, SteadyScene, played


def written(records: list[Record]) -> list[bytes]:
    lines: list[bytes] = []
    chain = 0
    for record in records:
        text, chain = journal.line(journal.encode(record), chain)
        lines.append(text)
    return lines


@functools.cache
def example() -> tuple[bytes, ...]:
    scene = SteadyScene(Policy(8), (10.0, 5.0), (4, 4), (SteadyCall(Kind.TRAIN, 21), SteadyCall(Kind.EVALUATE, 9)))
    return tuple(written(played(scene).records))


REAL = st.floats(allow_nan=False, allow_infinity=False)
SECONDS = st.floats(-1e12, 1e12)
TICKET_LINES = st.builds(
    TicketLine,
    spans=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=3),
    micro_batches=st.integers(0, 2**40),
    samples=st.integers(0, 2**40),
    weight=REAL,
    busy_s=SECONDS,
    idle_s=SECONDS,
    sum_s=SECONDS,
    cost_s=SECONDS,
    loss_sum=REAL,
    squared_norm=REAL,
    scale=REAL,
    flags=st.integers(0, 7),
)
ROUNDS = st.builds(
    RoundRecord,
    era=st.integers(1, 9),
    round=st.integers(1, 2**40),
    phase=st.integers(1, 2**20),
    batch=st.integers(0, 2**40),
    weight=REAL,
    factor=REAL,
    rate=REAL,
    loss=st.one_of(st.none(), REAL),
    applied=st.booleans(),
    samples_total=st.integers(0, 2**50),
    tickets=st.lists(TICKET_LINES, max_size=3),
)


@settings(max_examples=60)
@given(st.text(max_size=20), st.lists(ROUNDS, max_size=4))
def test_records_read_back_bit_for_bit(job: str, rounds: list[RoundRecord]) -> None:
    records: list[Record] = [RunRecord(job, "1", 0.1), *rounds, EndRecord("done", True)]
    assert list(journal.read(written(records))) == records


@settings(max_examples=150)
@given(st.data())
def test_any_changed_byte_is_found_in_its_line(data: st.DataObject) -> None:
    lines = list(example())
    number = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[number]) - 1))
    damaged = bytearray(lines[number])
    damaged[at] ^= data.draw(st.integers(1, 255))
    lines[number] = bytes(damaged)
    with pytest.raises(JournalError, match=rf"line {number + 1} "):
        list(journal.read(lines))


def test_any_dropped_line_but_the_last_is_found() -> None:
    for number in range(len(example()) - 1):
        with pytest.raises(JournalError):
            list(journal.read([*example()[:number], *example()[number + 1 :]]))


def test_any_swapped_or_repeated_line_is_found() -> None:
    lines = example()
    for number in range(len(lines) - 1):
        swapped = [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]]
        with pytest.raises(JournalError):
            list(journal.read(swapped))
        with pytest.raises(JournalError):
            list(journal.read([*lines[: number + 1], *lines[number:]]))


def test_a_line_cut_off_anywhere_is_named() -> None:
    *before, last = example()
    for kept in range(1, len(last)):
        with pytest.raises(JournalError, match=f"line {len(before) + 1} is incomplete"):
            list(journal.read([*before, last[:kept]]))


@pytest.mark.parametrize(
    "records", [[RunRecord("job", "1", 0.0, version=99)], [EndRecord("done", True)]], ids=["version", "foreign"]
)
def test_another_version_or_a_foreign_file_is_refused(records: list[Record]) -> None:
    with pytest.raises(JournalError, match="not a version 1 journal"):
        list(journal.read(written(records)))


def test_a_line_that_is_no_record_is_refused() -> None:
    text, _ = journal.line(b'{"kind":"song"}', 0)
    with pytest.raises(JournalError, match="not a journal record"):
        list(journal.read([text]))
