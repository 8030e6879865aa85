"""Journals of real runs are read, written and judged as before; see ``stored``."""

from __future__ import annotations

import pytest
from stored import lines, names, verdict, verdicts

from pliant.core.journal import records as journal
from pliant.core.journal.trace import score


def test_there_are_some_and_each_has_been_judged() -> None:
    assert len(names()) >= 10
    assert sorted(verdicts()) == names()


@pytest.mark.parametrize("name", names())
def test_what_is_read_is_written_again_byte_by_byte(name: str) -> None:
    chain, written = 0, []
    for record in journal.read(lines(name)):
        line, chain = journal.line(journal.encode(record), chain)
        written.append(line)
    assert written == lines(name)


@pytest.mark.parametrize("name", names())
def test_the_audit_finds_what_it_found(name: str) -> None:
    assert verdict(name) == verdicts()[name]
    assert verdict(name)["problems"] == []


@pytest.mark.parametrize("name", names())
def test_it_can_be_computed_again(name: str) -> None:
    """Every contribution is found that a replay computes."""
    records = list(journal.read(lines(name)))
    rounds = [each for each in journal.effective(records) if isinstance(each, journal.RoundRecord)]
    parts = [part for item in score(records).items for part in getattr(item, "parts", ())]
    assert sum(part.round > 0 for part in parts) >= len(rounds)
