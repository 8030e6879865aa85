"""The convergence benchmark's own arithmetic: shares, schedules, curves, verdicts, tables, the picture."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.convergence import plot, tables
from benchmarks.convergence.course import CLUSTERS, Course, milliseconds, order
from benchmarks.convergence.curve import final, seconds_to, smoothed
from benchmarks.convergence.network import rate_mbit
from benchmarks.convergence.running import commands
from benchmarks.convergence.schedule import FULL, QUICK, selection
from benchmarks.convergence.schedule import order as systems_of
from benchmarks.convergence.systems.ddp import bounds
from benchmarks.convergence.systems.names import SYSTEMS
from benchmarks.convergence.verdicts import Best, best_rival
from benchmarks.judge import judge, read_targets
from benchmarks.report import facts, markdown, sheets
from benchmarks.results import Machine, Results, Training, read, write
from benchmarks.systems.oracle import shares

MACHINE = Machine(cores=2, memory_gb=8.0, python="3.11", torch="2.13.0", system="Linux", load_before=0.0)
ASKED = frozenset({*SYSTEMS, *CLUSTERS})


def course(cluster: str = "static", seed: int = 0) -> Course:
    return Course(cluster, seed, images=1024, epochs=2, every=256)


def curve(system: str, slowness: float, seed: int = 0, cluster: str = "static", best: float = 0.9) -> Training:
    """Accuracy rises evenly to ``best`` in ten snapshots, one per ``slowness`` seconds."""
    numbers = range(1, 11)
    return Training(
        system,
        cluster,
        seed,
        tuple(128 * number for number in numbers),
        tuple(slowness * number for number in numbers),
        tuple(best * number / 10 for number in numbers),
    )


def results(times: dict[str, float], *more: Training) -> Results:
    """Every cluster and three seeds, each seed a little slower for everybody."""
    found = [
        curve(system, slowness * (1 + seed / 10), seed, cluster)
        for system, slowness in times.items()
        for cluster in CLUSTERS
        for seed in range(3)
    ]
    return Results("convergence", True, MACHINE, trainings=(*found, *more), target_accuracy=0.5)


GOOD = {
    "pliant_auto": 1.0,
    "pliant_delay_1": 1.0,
    "pliant_delay_0": 1.02,
    "lb_bsp": 1.4,
    "oracle": 1.0,
    "ddp": 2.5,
    "local_sgd": 2.4,
    "torchft": 2.6,
}


def test_measured_shares_follow_the_speeds_and_cover_the_batch_once() -> None:
    given = shares(128, [2.5, 2.5, 5.0, 10.0])
    assert sum(given) == 128 and given[0] in (46, 47) and given[3] in (11, 12)
    ranges = [bounds(given, index) for index in range(4)]
    assert [position for begins, ends in ranges for position in range(begins, ends)] == list(range(128))


def test_redraws_depend_on_seed_and_time_alone() -> None:
    moments = [0.0, 4.9, 5.1, 12.0, 33.3]
    drawn = [
        [milliseconds(course("fluctuating", seed), worker, at) for at in moments]
        for seed in (0, 1)
        for worker in range(4)
    ]
    again = [
        [milliseconds(course("fluctuating", seed), worker, at) for at in moments]
        for seed in (0, 1)
        for worker in range(4)
    ]
    assert drawn == again and {ms for row in drawn for ms in row} == {40.0, 80.0, 160.0}
    assert all(row[0] == row[1] for row in drawn), "nothing changes within five seconds"
    assert drawn[:4] != drawn[4:], "another seed draws other devices"
    assert [milliseconds(course("static"), worker, 7.0) for worker in range(4)] == [40.0, 40.0, 80.0, 160.0]


def test_every_epoch_holds_every_sample_once_in_an_order_of_its_own() -> None:
    first, second = order(3, 0, 1024), order(3, 1, 1024)
    assert sorted(first) == sorted(second) == list(range(1024)) and first != second
    assert first == order(3, 0, 1024) and first != order(4, 0, 1024)


@pytest.mark.parametrize("schedule", [FULL, QUICK])
def test_runs_are_whole_batches_and_end_with_a_snapshot(schedule: object) -> None:
    assert isinstance(schedule, type(FULL))
    assert schedule.images % 128 == 0 and schedule.images * schedule.epochs % schedule.every == 0


def test_one_lucky_snapshot_reaches_no_target() -> None:
    assert smoothed([0.1, 0.9, 0.2, 0.3, 0.8]) == [0.1, 0.2, 0.3, 0.3, 0.3]
    lucky = replace(curve("ddp", 1.0), accuracy=(0.1, 0.2, 0.9, 0.3, 0.4, 0.4, 0.4, 0.5, 0.6, 0.7))
    assert seconds_to(lucky, 0.85) is None
    found = seconds_to(lucky, 0.45)
    assert found is not None and math.isclose(found, 7.5)
    assert final(lucky) == pytest.approx(0.6)
    assert final(Training("ddp", "static", 0, failure="lost")) is None


def test_the_time_to_target_lies_between_two_snapshots() -> None:
    found = seconds_to(curve("ddp", 2.0), 0.585)
    assert found is not None and math.isclose(found, 13.0)
    assert seconds_to(curve("ddp", 2.0), 0.95) is None


def test_the_links_carry_a_ring_sum_in_the_time_asked_for() -> None:
    assert rate_mbit(gradient_bytes=1_000_000, sum_s=0.126, workers=4) == 100


def test_the_best_rival_is_the_soonest_by_pairs_of_seeds() -> None:
    found = best_rival(results(GOOD), "pliant_auto", ("ddp", "lb_bsp"), "static")
    assert isinstance(found, Best) and found.rival == "lb_bsp"
    assert math.isclose(found.ratio.median, 1.4) and math.isclose(found.ratio.low, 1.4, rel_tol=1e-6)
    never = curve("local_sgd", 1.0, seed=0, best=0.4)
    only = replace(results({"pliant_auto": 1.0, "lb_bsp": 1.2}, never))
    found = best_rival(only, "pliant_auto", ("lb_bsp", "local_sgd", "torchft"), "static")
    assert isinstance(found, Best) and found.rival == "lb_bsp" and found.left_out == ("torchft",)


def test_all_targets_are_met_and_each_can_be_missed() -> None:
    targets = read_targets().target
    assert [one.met for one in judge(results(GOOD), targets, ASKED)] == [True, True, True, True]
    assert [one.met for one in judge(results({**GOOD, "lb_bsp": 1.25}), targets, ASKED)] == [False, True, True, True]
    assert [one.met for one in judge(results({**GOOD, "lb_bsp": 0.9}), targets, ASKED)] == [False, False, True, True]
    assert [one.met for one in judge(results({**GOOD, "oracle": 0.96}), targets, ASKED)] == [True, True, False, True]
    assert [one.met for one in judge(results({**GOOD, "pliant_delay_0": 0.95}), targets, ASKED)][3] is False


def test_what_failed_or_never_got_there_misses_the_target_with_its_reason() -> None:
    targets = read_targets().target
    lost = results(GOOD, Training("ddp", "static", 3, failure="RuntimeError: no route"))
    verdicts = judge(lost, targets, ASKED)
    assert [one.met for one in verdicts] == [False, False, True, True]
    assert "static: ddp failed: RuntimeError: no route" in verdicts[0].detail
    assert "failed: RuntimeError: no route" in markdown(sheets(lost)[0])
    never = judge(results(GOOD, curve("pliant_auto", 1.0, seed=7, best=0.4)), targets, ASKED)
    assert not any(one.met for one in never) and "never reached the target with seed 7" in never[0].detail
    assert not any(one.met for one in judge(Results("convergence", True, MACHINE), targets))


def test_tables_and_picture_come_from_the_file(tmp_path: Path) -> None:
    file, picture = tmp_path / "convergence.json", tmp_path / "convergence.svg"
    write(results(GOOD), file)
    found = read(file)
    assert found == results(GOOD)
    shown = [markdown(sheet) for sheet in sheets(found)]
    assert '| Pliant, `delay="auto"` | 5.6 6.1 6.7 |' in shown[0]
    assert "| best rival | 1.40 [1.40, 1.40] lb_bsp |" in shown[1]
    assert "90.00" not in shown[2] and "81.00 (81.00–81.00)" in shown[2]
    assert "3 repeats" in facts(found)
    pytest.importorskip("matplotlib")
    plot.write(found, picture)
    assert picture.read_text().count("<svg") == 1 and "slow network" in picture.read_text()


def test_only_narrows_down_and_quick_leaves_out_what_cannot_win() -> None:
    assert selection(["static", "ddp"]) == replace(selection([]), systems=("ddp",), clusters=("static",))
    with pytest.raises(ValueError, match="unknown in --only: b"):
        selection(["b"])
    assert systems_of(selection([]), "static", 0, FULL) == list(SYSTEMS)
    assert systems_of(selection(["oracle", "lb_bsp"]), "static", 1, FULL) == ["oracle", "lb_bsp"]
    assert systems_of(selection(["oracle", "lb_bsp"]), "static", 2, FULL) == ["lb_bsp", "oracle"]
    assert "ddp" not in systems_of(selection([]), "static", 0, QUICK)
    assert "local_sgd" in systems_of(selection([]), "slow_network", 0, QUICK)
    assert ["ddp" in systems_of(selection([]), "static", seed, FULL) for seed in (0, 1)] == [True, False]


def test_every_system_has_its_names_and_its_processes(tmp_path: Path) -> None:
    assert set(tables.NAMES) == set(plot.LABELS) == set(SYSTEMS)
    counts = {name: len(commands(system, course(), tmp_path, None)) for name, system in SYSTEMS.items()}
    assert counts["pliant_auto"] == 1 and counts["ddp"] == 4 and counts["torchft"] == 5
