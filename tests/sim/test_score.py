"""What a journal says about where contributions were computed is enough to compute them again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import pytest

from pliant.core.journal import records as journal
from pliant.core.journal.records import EraRecord, Record, RoundRecord, TicketLine
from pliant.core.journal.trace import Bodies, TracedRound, gaps, score
from pliant.errors import JournalError
from pliant.testing.scenes import drawn
from pliant.testing.simulation import Simulation

SEEDS = range(12)


@functools.cache
def history(seed: int) -> tuple[Record, ...]:
    """The journal of a run with faults of all kinds."""
    simulation = Simulation(drawn("everything", seed), seed)
    assert simulation.run().error is None
    return tuple(journal.read(bytes(simulation.host.disk.content).splitlines(keepends=True)))


def altered(records: tuple[Record, ...], change: Callable[[TicketLine], TicketLine]) -> list[Record]:
    """Every ticket changed."""
    return [
        msgspec.structs.replace(record, tickets=[change(line) for line in record.tickets])
        if isinstance(record, RoundRecord)
        else record
        for record in records
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_micro_batch_is_computed_before_it_is_due(seed: int) -> None:
    written = score(history(seed))
    assert gaps(written) == []
    computed = sum(len(s.micro_batches) for item in written.items if isinstance(item, Bodies) for s in item.stretches)
    summed = sum(
        len(part.micro_batches) for item in written.items if isinstance(item, TracedRound) for part in item.parts
    )
    assert computed >= summed > 0


def test_the_hard_cases_are_among_them() -> None:
    stretches = [
        stretch
        for seed in SEEDS
        for item in score(history(seed)).items
        if isinstance(item, Bodies)
        for stretch in item.stretches
    ]
    assert any(stretch.part.line is None for stretch in stretches), "no contribution was lost"
    assert any(s.ahead and s.part.before is not None and s.part.before.round == 0 for s in stretches), (
        "nobody went on ahead of a lost contribution"
    )
    assert any(0 < stretch.part.point.early < len(stretch.part.micro_batches) for stretch in stretches), "none has two"


def test_a_point_that_cannot_be_is_found() -> None:
    seed = next(seed for seed in SEEDS if any(isinstance(r, EraRecord) and r.entries for r in history(seed)))

    def later(line: TicketLine) -> TicketLine:
        if line.point is None:
            return line
        early, number, late, bits = line.point
        return msgspec.structs.replace(line, point=(early, number + 1000, late, bits))

    with pytest.raises(JournalError, match="computed after round"):
        score(altered(history(seed), later))


def test_an_older_journal_is_refused() -> None:
    with pytest.raises(JournalError, match="an older Pliant wrote it"):
        score(altered(history(0), lambda line: msgspec.structs.replace(line, point=None)))
