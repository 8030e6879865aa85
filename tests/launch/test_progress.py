"""What is known of a run, and shown of it: pliant.coordinator.status, pliant.ui.progress."""

from __future__ import annotations

import io
import re

import msgspec
import pytest

from pliant.coordinator.status import StatusTracker
from pliant.core.journal import records as journal
from pliant.ui import progress


def round_record(number: int, samples: list[int], applied: bool = True) -> journal.RoundRecord:
    flags = 0 if applied else journal.NONFINITE
    tickets = [journal.TicketLine([], 1, n, float(n), 0.5, 0.1, 0.0, 0.0, 0.0, 0.0, 1.0, flags) for n in samples]
    batch = sum(samples)
    return journal.RoundRecord(1, number, 1, batch, batch, 1.0, 0.1, 0.25, applied, batch * number, tickets)


def test_the_status_follows_the_journal() -> None:
    tally = StatusTracker("job")
    tally.plan(4, None)
    tally.add(journal.EraRecord(1, ["w0", "w1", "w2"]), 0.0)
    tally.add(journal.PhaseRecord(1, "train", 1, 80, 80, [4, 4, 4], [1, 1, 1], 0), 0.0)
    for number in range(1, 5):
        tally.add(round_record(number, [6, 4, 0], applied=number != 2), number / 2)
    tally.tick(2.0)
    status = tally.status
    assert (status.samples_total, status.epoch_done, status.skipped, status.spares) == (40, 40, 1, 1)
    assert status.samples_per_s == pytest.approx(20.0)
    assert [worker.pace for worker in status.workers] == pytest.approx([12.0, 8.0, 0.0])
    # 1.5 of 4 epochs took 2 s.
    assert status.eta_s == pytest.approx(2.0 * 2.5 / 1.5)
    tally.add(journal.PhaseEndRecord(2, [], 0.75), 2.0)
    tally.tick(60.0)
    assert status.samples_per_s == 0.0 and status.result == 0.75
    assert re.search(r"epoch 2/4 50% · .* · batch 10 · rate 0\.1 · loss 0\.2500 · ", progress.line(status))
    assert "1 spare" in progress.line(status) and "1 skipped" in progress.line(status)
    told = msgspec.structs.replace(round_record(5, [6, 4, 0]), measured=(3, 0.5), noise_scale=1234.5)
    tally.add(told, 60.0)
    tally.add(round_record(6, [6, 4, 0]), 60.0)
    assert "batch 10 · noise 1,234 · rate" in progress.line(status)


def test_an_evaluation_that_is_over_is_not_shown() -> None:
    tally = StatusTracker("job")
    evaluation = journal.PhaseRecord(2, "evaluate", 0, 80, 80, [4], [1], 0)
    tally.add(journal.EraRecord(1, ["w0"]), 0.0)
    tally.add(journal.PhaseRecord(1, "train", 0, 80, 80, [4], [1], 0), 0.0)
    for over in ("train", ""):
        tally.add(msgspec.structs.replace(evaluation, inner=over == "train"), 1.0)
        assert tally.status.is_evaluating and " · evaluating · " in progress.line(tally.status)
        tally.add(journal.PhaseEndRecord(2, [], 0.75), 2.0)
        assert tally.status.task == over and "evaluating" not in progress.line(tally.status)
        if over:
            tally.add(journal.PhaseEndRecord(1, [], None), 2.0)
    assert tally.status.results == 2


def test_who_is_in_the_journal_alone_is_not_on_its_way() -> None:
    tally = StatusTracker("job")
    phase = journal.PhaseRecord(1, "train", 0, 80, 80, [4, 4], [1, 1], 0)
    tally.resume([journal.EraRecord(1, ["w0", "w1"]), phase, round_record(1, [6, 4])], 0.0)
    tally.describe("w1", "w1", "training", 0)
    assert {worker.name: worker.state for worker in tally.status.workers} == {"w0": "ended", "w1": "training"}


def test_a_log_gets_plain_lines() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = progress.Terminal(out, err)
    tally = StatusTracker("job")
    tally.add(journal.EraRecord(1, ["w0"]), 0.0)
    tally.add(journal.PhaseRecord(1, "train", 0, 8, 8, [4], [1], 0), 0.0)
    screen.progress(tally.status)
    tally.add(round_record(1, [4]), 0.1)
    for _ in range(3):
        screen.progress(tally.status)
    screen.output("w0", "[bold]hello[/bold]", "stdout")
    assert out.getvalue() == "[w0] [bold]hello[/bold]\n"
    assert err.getvalue().count("\n") == 1 and err.getvalue().startswith("pliant: epoch 1 50%")
