"""The chaos benchmark's own arithmetic: faults, updates, pauses, intervals, tables."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.chaos.checks import within
from benchmarks.chaos.deeds import Done
from benchmarks.chaos.faults import LENGTHS, NAMES, WEIGHTS, drawn
from benchmarks.chaos.pauses import pause_s, percentile, stamps, updates
from benchmarks.chaos.schedule import kinds
from benchmarks.judge import judge, read_targets
from benchmarks.lab import figures as drawing
from benchmarks.report import markdown, sheets
from benchmarks.results import Curve, Machine, Results, Trial

MACHINE = Machine(cores=2, memory_gb=8.0, python="3.11", torch="2.13.0", system="Linux", load_before=0.0)


def test_a_seed_stands_for_its_faults() -> None:
    faults = drawn(7, 3600.0, NAMES)
    assert faults == drawn(7, 3600.0, NAMES) != drawn(8, 3600.0, NAMES)
    assert 600 < len(faults) < 850, "one about every 5 s"
    assert {fault.kind for fault in faults} == set(NAMES) == set(WEIGHTS)
    assert all(a.at_s < b.at_s for a, b in pairwise(faults))
    for fault in faults:
        low, high = LENGTHS.get(fault.kind, (0.0, 0.0))
        assert low <= fault.length <= high and 0 <= fault.pick < 1
    assert {fault.kind for fault in drawn(7, 3600.0, {"kill", "nap"})} == {"kill", "nap"}
    with pytest.raises(ValueError, match="unknown in --only: rain"):
        kinds(["kill", "rain"])


def test_an_update_counts_when_the_first_worker_has_it(tmp_path: Path) -> None:
    (tmp_path / "stamps-1").write_text("1.0 1 96 0\n2.0 1 192 0\n3.5 2 288 0\n4.0 2 3")
    (tmp_path / "stamps-2").write_text("1.1 1 96 0\n1.9 1 192 0\n3.6 2 288 0\n")
    assert updates(stamps(tmp_path)) == [(1.0, 96), (1.9, 192), (3.5, 288)]


def test_after_a_rewind_the_same_samples_are_updates_again() -> None:
    seen = [(1.0, 1, 96), (2.0, 1, 192), (3.0, 1, 288), (9.0, 2, 96), (10.0, 2, 192)]
    assert updates(seen) == [(1.0, 96), (2.0, 192), (3.0, 288), (10.0, 192)]


def test_a_pause_is_the_longest_gap_around_its_fault() -> None:
    times = [0.0, 1.0, 2.0, 5.0, 6.0, 20.0, 21.0]
    assert pause_s(Done("kill", 1.5, 0.0, "kill"), times, math.inf) == 3.0
    assert pause_s(Done("doze", 1.5, 2.0, "doze"), times, math.inf) == 14.0
    assert pause_s(Done("doze", 1.5, 2.0, "doze"), times, 4.0) == 3.0, "later ones are the next fault's"
    assert math.isnan(pause_s(Done("kill", 30.0, 0.0, "kill"), times, math.inf))
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0 and percentile([1.0, 2.0], 0.95) == 2.0


def test_accuracy_is_compared_with_what_another_undisturbed_run_would_reach() -> None:
    outside, low, high = within(97.0, [96.0, 97.0, 98.0])
    assert (
        outside == 0.0 and math.isclose(high - 97.0, 4.303 * math.sqrt(4 / 3)) and math.isclose(97.0 - low, high - 97.0)
    )
    assert within(low - 1.0, [96.0, 97.0, 98.0])[0] == pytest.approx(1.0)


def found(**changed: float) -> Results:
    clean = ("problems", "other_weights", "outside", "left_processes", "left_sockets", "left_files")
    figures = {**dict.fromkeys(clean, 0.0), "replay": 1e-12, "faults": 2.0, "accuracy": 97.2, **changed}
    trials = (
        Trial("pliant", "digits", "kill", 0, {"at_s": 3.0, "held_s": 0.0, "pause_s": 0.5}),
        Trial("pliant", "digits", "kill", 1, {"at_s": 9.0, "held_s": 0.0, "pause_s": 0.7}),
        Trial("pliant", "digits", "chaos", 1, figures),
    )
    curve = Curve("pliant", "digits", "chaos", "samples", (0.0, 10.0), (0.0, 960.0))
    return Results("chaos", True, MACHINE, trials=trials, curves=(curve,))


@pytest.mark.parametrize(("changed", "missed"), [({}, 0), ({"replay": 1e-6}, 1), ({"problems": 2.0}, 1)])
def test_the_targets_speak_about_every_check(changed: dict[str, float], missed: int) -> None:
    verdicts = judge(found(**changed), read_targets().target)
    assert len(verdicts) == 7 and sum(not verdict.met for verdict in verdicts) == missed


def test_tables_and_picture(tmp_path: Path) -> None:
    shown = "\n".join(markdown(sheet) for sheet in sheets(found()))
    assert "| SIGKILL of a worker | 2 | 0.60 | 0.70 | 0.70 |" in shown and "not run" in shown
    drawing.draw(found(), tmp_path / "chaos.svg")
    assert (tmp_path / "chaos.svg").stat().st_size > 1000
