"""The benchmarks' own arithmetic: schedules, counts, ratios, verdicts, tables."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from benchmarks.clusters import CHOICES_MS, Phase, device_ms, phases, solo_sum
from benchmarks.judge import Target, judge, read_targets
from benchmarks.ratios import paired
from benchmarks.recovery.disturbance import gaps, idle_s, longest_gap, lost_s, next_update_s, updates
from benchmarks.recovery.schedule import selection
from benchmarks.recovery.stamps import Stamps, Step, Trace, Traces, View
from benchmarks.report import markdown, sheets
from benchmarks.results import Figures, Machine, Memory, Results, Run, Trial, machine, read, write
from benchmarks.statistics import WARM_UP, Meter, added, watched
from benchmarks.systems.oracle import shares
from benchmarks.worker import Span, count
from torch import ones
from torch.nn import Parameter

from pliant.core.tuning import noise
from pliant.tensors.gradients import FlatGradients
from pliant.worker.training import Training

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
    recovery = [target for target in read_targets().target if target.benchmark == "recovery"]
    bounds = [(t.act, t.model, t.figure, t.of, t.at_most) for t in recovery if t.kind == "bounded"]
    statistics = [t for t in read_targets().target if t.benchmark == "overhead" and t.kind == "bounded"]
    assert [(t.act, t.model, t.at_most) for t in statistics] == [
        ("statistics", "small", 0.01),
        ("statistics", "large", 0.01),
    ]
    assert bounds == [
        ("kill", "small", "next_update_s", "median", 0.2),
        ("kill", "small", "next_update_s", "worst", 0.5),
        ("stop", "small", "next_update_s", "worst", 1.5),
        ("save", "small", "lost_s", "worst", 1.0),
        ("save", "small", "killed", "worst", 0.0),
        ("save", "small", "unsaved", "worst", 0.0),
        ("hang", "small", "gap_s", "worst", 6.0),
        ("hang", "small", "early_s", "worst", 0.0),
        ("join", "small", "idle_s", "median", 0.05),
        ("join", "large", "idle_s", "median", 0.25),
        ("join", "small", "contributes_s", "median", 0.5),
        ("join", "large", "contributes_s", "median", 1.5),
        ("leave", "small", "recomputed", "worst", 0.0),
        ("leave", "small", "gap_rounds", "worst", 2.0),
        ("audit", "small", "problems", "worst", 0.0),
        ("audit", "large", "problems", "worst", 0.0),
    ]
    assert [(t.rivals[0], t.at_least) for t in read_targets().target if t.kind == "faster"] == [
        ("torchft_tight", 3.0),
        ("torchrun_tight", 20.0),
    ]


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
    results = Results(
        "harvest",
        True,
        machine(),
        harvested(900.0).runs,
        (Memory("memory_plain"),),
        (Trial("pliant", "small", "kill", 0, {}),),
    )
    write(results, tmp_path / "deep" / "results.json")
    assert read(tmp_path / "deep" / "results.json") == results


def traced(*seen: tuple[float, int, int, int, int], name: str = "w1") -> Trace:
    """Micro-batches of 40 ms that end at the given moments: (end, era, progress) before and after."""
    trace = Trace(pid=1)
    for ends, era, progress, era_after, progress_after in seen:
        views = View(era, progress), View(era_after, progress_after)
        trace.steps.append(Step(name, False, ends - 0.05, ends - 0.01, ends, *views, 16))
    return trace


def test_stamps_are_read_as_they_were_written(tmp_path: Path) -> None:
    stamps, traces = Stamps(tmp_path), Traces(tmp_path)
    stamps.ready()
    step = Step("w2.3", True, 1.25, 1.5, 1.75, View(3, 640), View(4, 704), 16)
    stamps.step(step)
    (trace,) = traces.refresh().by_pid.values()
    assert trace.steps == [step] and trace.ready_s is not None and trace.name == "w2.3"
    stamps.step(step)
    assert len(traces.refresh().by_pid[trace.pid].steps) == 2
    trace.take("step w2.3 0 1.0 2.0 3.")
    assert len(trace.steps) == 2, "a line that is being written is not read"


def test_updates_are_seen_in_the_step_and_while_waiting_for_the_next_micro_batch() -> None:
    trace = traced((1.0, 1, 0, 1, 64), (1.1, 1, 64, 1, 64), (1.2, 1, 128, 1, 192))
    assert [(round(u.at_s, 2), u.view.progress) for u in updates(trace.steps)] == [(1.0, 64), (1.15, 128), (1.2, 192)]


def test_a_round_complete_before_the_kill_is_no_recovery() -> None:
    ahead = traced((1.0, 1, 0, 1, 64), (1.1, 1, 64, 1, 128), (1.3, 2, 128, 2, 128), (1.4, 2, 128, 2, 192))
    # One exchange behind: what it takes over from the one ahead is no update of the new era.
    behind = traced((1.0, 1, 0, 1, 64), (1.3, 2, 128, 2, 128), (1.5, 2, 128, 2, 192))
    found = next_update_s([ahead, behind], at_s=1.05)
    assert found is not None and math.isclose(found, 0.35)
    assert next_update_s([behind], at_s=2.0) is None


def test_a_restart_from_a_checkpoint_counts_from_its_first_step() -> None:
    before = traced((1.0, 1, 500, 1, 501))
    after = traced((8.0, 2, 480, 2, 481))
    assert next_update_s([before, after], at_s=1.5) is None
    found = next_update_s([before, after], at_s=1.5, resumes_lower=True)
    assert found is not None and math.isclose(found, 6.5)


def steady(stall_at: int, stall_s: float) -> Trace:
    """An update every 0.1 s from 0 to 5 s, all later by ``stall_s`` from one of them on."""
    times = [0.1 * number + (stall_s if number >= stall_at else 0.0) for number in range(1, 50)]
    return traced(*((at, 1, 64 * number, 1, 64 * (number + 1)) for number, at in enumerate(times)))


def test_the_longest_gap_is_told_in_seconds_and_in_usual_gaps() -> None:
    stalled, other = steady(stall_at=35, stall_s=0.2), steady(stall_at=99, stall_s=0.0)
    assert len(gaps(other, 3.0, 4.0)) in (10, 11, 12)
    gap_s, in_usual = longest_gap([other, stalled], 3.0, 4.0, usual_before_s=3.0)
    assert math.isclose(gap_s, 0.3) and math.isclose(in_usual, 3.0, rel_tol=1e-6)


def test_lost_time_is_what_goes_beyond_the_usual() -> None:
    stalled = steady(stall_at=35, stall_s=0.2)
    assert math.isclose(lost_s(stalled, 3.0, 4.5, usual_before_s=3.0), 0.2, rel_tol=1e-6)
    idle = {64 * number: 0.01 for number in range(100)} | {64 * 35: 0.15}
    assert math.isclose(idle_s(stalled, idle, 3.0, 4.5, usual_before_s=3.0), 0.14, rel_tol=1e-6)


def test_idle_time_is_compared_with_that_of_the_group_as_it_is_then() -> None:
    """Twice the idle time per round since a newcomer is in: that is not what its coming has cost."""
    trace = steady(stall_at=99, stall_s=0.0)
    idle = {64 * number: 0.02 if number >= 30 else 0.01 for number in range(100)} | {64 * 28: 0.06}
    assert math.isclose(idle_s(trace, idle, 2.55, 3.55, usual_before_s=2.55), 0.05 + 6 * 0.01, rel_tol=1e-6)
    turned = idle_s(trace, idle, 2.55, 3.55, usual_before_s=2.55, turns_s=2.95)
    assert math.isclose(turned, 0.05, rel_tol=1e-6)


def recovered(ours: list[float], theirs: list[float], failure: str | None = None) -> Results:
    trials = [Trial("pliant", "small", "kill", n, {"next_update_s": value}) for n, value in enumerate(ours)]
    trials += [Trial("torchft_tight", "small", "kill", n, {"next_update_s": value}) for n, value in enumerate(theirs)]
    if failure:
        trials.append(Trial("torchft_tight", "small", "kill", 0, failure=failure))
    return Results("recovery", True, MACHINE, trials=tuple(trials))


@pytest.mark.parametrize(
    ("ours", "theirs", "met"),
    [
        ([0.1, 0.1, 0.4], [0.6, 0.6], [True, True, True]),
        ([0.1, 0.1, 0.6], [0.6, 0.6], [True, False, True]),
        ([0.3, 0.3, 0.3], [0.6, 0.6], [False, True, False]),
    ],
)
def test_recovery_is_judged_by_median_worst_and_rival(ours: list[float], theirs: list[float], met: list[bool]) -> None:
    asked = selection(["kill", "pliant", "torchft", "small"]).asked - {"audit"}
    verdicts = judge(recovered(ours, theirs), read_targets().target, asked)
    assert [verdict.met for verdict in verdicts] == met


def test_a_rival_that_hangs_is_shown_with_its_reason() -> None:
    results = recovered([0.1], [], failure="the next step after a kill: not within 30 s")
    verdicts = judge(results, read_targets().target, frozenset({"pliant", "torchft_tight", "small", "kill"}))
    assert [verdict.met for verdict in verdicts] == [True, True, False]
    assert "not within 30 s" in verdicts[2].detail
    assert "failed: the next step after a kill" in markdown(sheets(results)[0])


def test_the_slow_link_is_measured_only_when_asked_for() -> None:
    assert "link" not in selection([]).acts
    assert selection(["link"]).acts == {"link"}
    assert "torchft_tight" in selection(["kill"]).asked and "torchft_tight" not in selection(["pliant"]).asked
    with pytest.raises(ValueError, match="unknown in --only: b"):
        selection(["b"])


def test_the_cost_of_statistics_is_their_part_of_the_rounds_after_the_warm_up() -> None:
    """Rounds of 1 s, 2 % more for statistics; before the warm-up ends they cost far more."""
    seen = {number: (1.02 * number, 0.02 * number) for number in range(WARM_UP, WARM_UP + 50)}
    seen |= dict.fromkeys(range(1, WARM_UP), (0.0, 0.0))
    share, rounds = added(seen)
    assert math.isclose(share, 0.02, abs_tol=1e-9) and rounds == 49


def test_norms_of_the_groups_sum_count_as_statistics_and_those_of_contributions_do_not() -> None:
    meter = Meter()
    buffer = FlatGradients([Parameter(ones(1 << 20))])
    with watched(meter):
        buffer.squared_norm()
        assert meter.spent_s == 0.0
        Training._average(
            cast(Training, SimpleNamespace(_clip_norm=None, _clipped=lambda norm: 1.0)), buffer, 1.0, measures=True
        )
        noise.contributed(noise.Noise(), 1, 1, [])
        assert meter.spent_s > 0.0
