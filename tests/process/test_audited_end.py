"""What the audit finds of an end that was cut off, or written anew: one real run, whose journal is changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from running import QUICK, Launcher
from typer.testing import CliRunner

from pliant.core.journal import records as journal
from pliant.ui.cli import app

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
import torch.nn.functional as F
import pliant

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
samples = [(torch.randn(4), index % 2) for index in range(48)]
with pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=8) as run:
    for epoch in run.epochs(3):
        for x, y in run.batches(samples, size=4):
            run.backward(F.cross_entropy(model(x), y))
            run.step()
        run.evaluate(lambda batch: (0.0, len(batch[1])), samples, size=8)
"""


def audited(path: Path) -> tuple[int, str]:
    """Exit status and words of ``pliant audit``."""
    result = CliRunner().invoke(app, ["audit", str(path)])
    return result.exit_code, result.output


def write(path: Path, records: Iterable[journal.Record]) -> int:
    """A journal of these, with a chain and a closing record that fit; how many lines it has."""
    place, lines = journal.BEGINNING, []
    for record in records:
        record = journal.closing(record, place) if isinstance(record, journal.EndRecord) else record
        text, _ = journal.line(journal.encode(record), place.chain)
        place = place.after(text)
        lines.append(text)
    path.write_bytes(b"".join(lines))
    return place.lines


def without_last_epoch(records: list[journal.Record]) -> list[journal.Record]:
    """As a forger would: nothing of it is left, and the counts in the closing record are those of the rest."""
    (begin,) = [
        n
        for n, each in enumerate(records)
        if isinstance(each, journal.PhaseRecord) and each.epoch == 2 and each.task == "train"
    ]
    kept = [*records[:begin], *(each for each in records[begin:] if isinstance(each, journal.FinishingRecord))]
    rounds = [each for each in kept if isinstance(each, journal.RoundRecord)]
    end = records[-1]
    assert isinstance(end, journal.EndRecord) and len(rounds) < end.rounds
    return [*kept, msgspec.structs.replace(end, rounds=len(rounds), samples=rounds[-1].samples_total)]


def test_an_end_that_was_cut_off_or_forged(launch: Launcher) -> None:
    run = launch(QUICK + SCRIPT)
    assert run.wait() == 0, run.output
    path = run.directory / "job" / "journal.jsonl"
    state, whole = path.with_name("state.json"), path.read_bytes()
    known, lines = state.read_bytes(), whole.splitlines(keepends=True)
    records = list(journal.read(lines))
    status, said = audited(path)
    assert status == 0 and "every sample is accounted for" in said

    def found(*, state_file: bool) -> tuple[int, str]:
        state.unlink(missing_ok=True)
        if state_file:
            state.write_bytes(known)
        return audited(path)

    # Its last epoch is cut off, in the middle of a line.
    begin = next(n for n, each in enumerate(records) if isinstance(each, journal.PhaseRecord) and each.epoch == 2)
    last = max(each.round for each in records[: begin + 3] if isinstance(each, journal.RoundRecord))
    path.write_bytes(b"".join([*lines[: begin + 3], lines[begin + 3][:40]]))
    status, said = found(state_file=False)
    assert status == 3 and f"proved only up to round {last}" in said and "problem:" not in said
    ended = f"the journal ends after line {{}}, but state.json says that it had {len(lines)}: its end was cut off"
    status, said = found(state_file=True)
    assert status == 1 and f"problem: {ended.format(begin + 3)}" in said.replace("\n", "")
    # It is taken out, and everything is computed anew.
    count = write(path, without_last_epoch(records))
    assert count < len(lines)
    status, said = found(state_file=True)
    assert status == 1 and f"problem: {ended.format(count)}" in said and "accounted for" not in said
    # As many lines as there were, but others.
    forged = without_last_epoch(records)
    write(path, [*forged[:-1], *[journal.FinishingRecord("w0")] * (len(lines) - count), forged[-1]])
    status, said = found(state_file=True)
    changed = f"problem: the first {len(lines)} lines are not those that state.json was written of"
    assert status == 1 and changed in said
    # The limit that the guide names: without that file nobody can know.
    write(path, forged)
    status, said = found(state_file=False)
    assert status == 0 and "every sample is accounted for" in said
