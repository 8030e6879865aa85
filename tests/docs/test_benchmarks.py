"""The benchmarks' own arithmetic: schedules, counts, ratios, verdicts, tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benchmarks.clusters import CHOICES_MS, Phase, device_ms, phases, solo_sum
from benchmarks.judge import Target, judge, read_targets
from benchmarks.ratios import paired
from benchmarks.report import markdown, sheets
from benchmarks.results import Figures, Machine, Memory, Results, Run, machine, read, write
from benchmarks.systems.oracle import shares
from benchmarks.worker import Span, count

MACHINE = Machine(cores=2, memory_gb=8.0, python="3.11", torch="2.13.0", system="Linux", load_before=0.0)


def harvested(ours: float, limit: float = 1000.0, failure: str | None = None) -> Results:
    """Three repeats of a floating batch beside the limit, small model, clusters a to d."""
    runs: list[Run] = []
    for repeat in range(3):
        names = ("a", "b", "c", "d")
        runs.append(Run("limit", "small", repeat, {name: Figures(limit) for name in names}))
        found = {} if failure else {name: Figures(ours, 5.0, (0.1, 0.2)) for name in names}
        runs.append(Run("pliant_floating", "small", repeat, found, failure))
    return Results("harvest", True, MACHINE, tuple(runs))


def test_every_target_of_the_table_is_there_with_its_number() -> None:
    numbers = [(target.kind, target.at_least or target.at_most) for target in read_targets().target]
    assert numbers.count(("harvest", 0.97)) == 1
    assert numbers.count(("harvest", 0.95)) == 1
    assert numbers.count(("harvest", 0.93)) == 1
    assert numbers.count(("harvest", 0.85)) == 1
    assert numbers.count(("harvest", 0.92)) == 1
    assert numbers.count(("interval", 0.97)) == 1
    assert numbers.count(("updates", 1.0)) == 1
    assert numbers.count(("samples", 0.97)) == 2
    assert numbers.count(("samples", 1.0)) == 2
    assert numbers.count(("memory", 1.0)) == 1
    assert numbers.count(("memory", 2.0)) == 1
    assert [target.margin for target in read_targets().target if target.kind == "not_below"] == [0.02]


@pytest.mark.parametrize(("ours", "met"), [(971.0, True), (969.0, False)])
def test_harvest_is_judged_by_the_limit_of_the_same_repeat(ours: float, met: bool) -> None:
    verdicts = judge(harvested(ours), read_targets().target, frozenset({"limit", "pliant_floating", "small", *"abcd"}))
    assert [verdict.met for verdict in verdicts] == [met, True]


def test_a_failed_system_is_missed_with_its_reason_and_stays_in_the_table() -> None:
    results = harvested(0.0, failure="RuntimeError: no route")
    targets = read_targets().target
    verdicts = judge(results, targets, frozenset({"pliant_floating", "small", "a", "b", "c"}))
    assert [verdict.met for verdict in verdicts] == [False]
    assert "RuntimeError: no route" in verdicts[0].detail
    assert "failed: RuntimeError: no route" in markdown(sheets(results)[0])


def test_what_was_not_measured_is_missed() -> None:
    empty = Results("overhead", True, MACHINE)
    assert {verdict.met for verdict in judge(empty, read_targets().target)} == {False}


def test_memory_is_judged_in_copies() -> None:
    target = Target(
        benchmark="overhead", kind="memory", name="", system="memory_none", rivals=("memory_plain",), at_most=1.0
    )
    plain = Memory("memory_plain", tensor_bytes=300.0, copy_bytes=100.0)
    for extra, met in ((100.0, True), (101.0, False)):
        ours = Memory("memory_none", tensor_bytes=300.0 + extra, copy_bytes=100.0)
        results = Results("overhead", True, MACHINE, memory=(plain, ours))
        assert judge(results, (target,))[0].met is met


def test_ratios_pair_repeats_and_bound_the_mean() -> None:
    ratio = paired({0: 2.0, 1: 4.0, 2: 8.0, 5: 1.0}, {0: 1.0, 1: 2.0, 2: 4.0, 7: 9.0})
    assert ratio is not None
    assert (ratio.median, ratio.pairs) == (2.0, 3)
    assert math.isclose(ratio.low, 2.0) and math.isclose(ratio.high, 2.0)
    single = paired({0: 2.0}, {0: 1.0})
    assert single is not None and single.low == 0.0 and single.high == math.inf
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_spans_at_a_windows_edge_count_in_proportion() -> None:
    phase = Phase("a", begins_s=0.0, window_s=1.0, ends_s=2.0, seed=0)
    spans = [Span(0.5, 1.5, 16, 0.8, 1), Span(1.5, 2.5, 16, 0.8, 1), Span(2.5, 3.0, 16, 0.8, 1)]
    found = count(spans, phase)
    assert (found.samples, found.updates, found.busy_s, found.window_s) == (16.0, 1.0, 0.8, 1.0)


def test_redraws_are_the_same_everywhere_and_change_every_five_seconds() -> None:
    phase = phases([("40", 1.0, 1.0), ("d", 1.0, 99.0)], seed=3)[1]
    drawn = [device_ms(phase, 1, phase.begins_s + second) for second in range(100)]
    assert drawn == [device_ms(phase, 1, phase.begins_s + second) for second in range(100)]
    assert set(drawn) == set(CHOICES_MS)
    assert all(drawn[second] == drawn[second - second % 5] for second in range(100))


def test_solo_speeds_add_up_by_device() -> None:
    phase = phases([("b", 1.0, 1.0)], seed=0)[0]
    assert solo_sum(phase, 4, {40.0: 400.0, 80.0: 200.0, 160.0: 100.0}) == 1100.0


def test_oracle_shares_add_up_and_finish_as_early_as_whole_samples_allow() -> None:
    milliseconds = [40.0, 40.0, 80.0, 160.0]
    given = shares(64, milliseconds)
    assert sum(given) == 64 and min(given) >= 1
    latest = max(share * ms for share, ms in zip(given, milliseconds, strict=True))
    # Any faster division would give everyone less than this, and that holds fewer than 64 samples.
    assert sum(math.ceil(latest / ms) - 1 for ms in milliseconds) < 64


def test_results_survive_the_file(tmp_path: Path) -> None:
    results = Results("harvest", True, machine(), harvested(900.0).runs, (Memory("memory_plain"),))
    write(results, tmp_path / "deep" / "results.json")
    assert read(tmp_path / "deep" / "results.json") == results
