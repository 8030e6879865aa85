"""What the benchmarks hold of long saves, hangs, pauses, long epochs and newcomers: their arithmetic and verdicts."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import coordinating, limits
from benchmarks.judge import judge, read_targets
from benchmarks.recovery import absences, orders, schedule
from benchmarks.recovery.disturbance import held_up_s, pace
from benchmarks.recovery.schedule import selection
from benchmarks.recovery.stamps import Stamps, Step, Trace, Traces, View
from benchmarks.report import markdown, sheets
from benchmarks.results import Machine, Results, Trial, read
from benchmarks.workload import Device, make_model
from safetensors.torch import save_file

from pliant.core import portion_size

MACHINE = Machine(cores=2, memory_gb=8.0, python="3.11", torch="2.13.0", system="Linux", load_before=0.0)

BOUNDS = [
    ("recovery", "small", "save", "lost_s", 1.0, "worst"),
    ("recovery", "small", "save", "killed", 0.0, "worst"),
    ("recovery", "small", "save", "unsaved", 0.0, "worst"),
    ("recovery", "small", "hang", "gap_s", 6.0, "worst"),
    ("recovery", "small", "hang", "early_s", 0.0, "worst"),
    ("checkpoints", "large", "checkpoints", "pause_ratio", 1.0, "worst"),
    ("coordinator", "1000 workers", "heartbeats", "cpu_share", 0.2, "worst"),
    ("coordinator", "8 workers", "succession", "resident_mb", 200.0, "worst"),
    ("coordinator", "8 workers", "succession", "serves_s", 1.0, "worst"),
    ("limits", "1e9 samples", "epoch", "begins_ms", 10.0, "median"),
    ("limits", "1e9 samples", "epoch", "grown_mb", 10.0, "worst"),
    ("limits", "large", "newcomer", "copies", 2.001, "worst"),
]


def judged(benchmark: str, model: str, act: str, figure: str, values: list[float | None]) -> tuple[bool, str]:
    """The verdict on the one target of this figure, of so many repeats; None: that one failed."""
    trials = tuple(
        Trial("pliant", model, act, repeat, {} if value is None else {figure: value}, None if value else "it hung")
        if value is None
        else Trial("pliant", model, act, repeat, {figure: value})
        for repeat, value in enumerate(values)
    )
    wanted = [
        t for t in read_targets().target if (t.benchmark, t.model, t.act, t.figure) == (benchmark, model, act, figure)
    ]
    (verdict,) = judge(
        Results(benchmark, True, MACHINE, trials=trials), tuple(wanted), frozenset({"pliant", model, act})
    )
    return verdict.met, verdict.detail


@pytest.mark.parametrize(("benchmark", "model", "act", "figure", "bound", "of"), BOUNDS)
def test_each_limit_is_judged(benchmark: str, model: str, act: str, figure: str, bound: float, of: str) -> None:
    """At the limit it is met, a little above it is missed; one repeat of three decides unless the median does."""
    above = bound + 0.01
    assert judged(benchmark, model, act, figure, [bound - 0.001, bound, bound])[0]
    assert judged(benchmark, model, act, figure, [0.0, above, 0.0])[0] is (of == "median")
    assert not judged(benchmark, model, act, figure, [above, above, 0.0])[0]
    met, detail = judged(benchmark, model, act, figure, [0.0, None])
    assert not met and "it hung" in detail
    assert judged(benchmark, model, act, figure, []) == (False, "pliant: not measured")


def test_what_is_asked_for_is_what_targets_speak_of() -> None:
    assert {"save", "hang"} <= selection([]).acts and {"save", "small"} <= selection(["save"]).asked
    with pytest.raises(ValueError, match="unknown in --only: era"):
        limits.selection(["era"])


# -- what is lost


def at(*updates: tuple[float, int], samples: int = 16) -> Trace:
    """A process that saw an update at each of these moments, in these eras."""
    trace = Trace(pid=1)
    for number, (ends_s, era) in enumerate(updates):
        before, after = View(era, 64 * number), View(era, 64 * (number + 1))
        trace.steps.append(Step("w1", False, ends_s - 0.05, ends_s - 0.01, ends_s, before, after, samples))
    return trace


def steady(begins_s: float, count: int, gap_s: float, era: int) -> list[tuple[float, int]]:
    return [(begins_s + gap_s * number, era) for number in range(count)]


def test_lost_is_what_an_update_took_beyond_the_usual() -> None:
    before, after = steady(0.0, 20, 0.1, 1), steady(2.4, 20, 0.1, 1)
    assert math.isclose(held_up_s(at(*before, *after), 1.0, 4.0), 0.4, rel_tol=1e-6)
    assert held_up_s(at(*before, *after), 2.5, 4.0) == 0.0, "outside of the window"
    assert held_up_s(at(*before, *steady(2.05, 20, 0.1, 1)), 0.0, 9.0) == 0.0, "as any two rounds differ"


def test_the_longer_rounds_of_a_smaller_group_are_no_loss() -> None:
    """From 0.1 s to 0.25 s per round; 0.5 s were lost between the two, and 0.4 s while the smaller group went on."""
    smaller = [*steady(2.5, 20, 0.25, 2), *steady(7.9, 20, 0.25, 2)]
    trace = at(*steady(0.0, 20, 0.1, 1), *smaller, *steady(13.0, 20, 0.1, 3))
    assert math.isclose(held_up_s(trace, 1.9, 7.0), 0.5, rel_tol=1e-6)
    assert math.isclose(held_up_s(trace, 1.9, 9.0), 0.9, rel_tol=1e-6)


def test_an_era_of_a_few_updates_says_nothing_about_what_is_usual() -> None:
    """A change that needs two eras: what the first of them took is lost."""
    trace = at(*steady(0.0, 20, 0.1, 1), (2.5, 2), (3.3, 2), *steady(3.9, 20, 0.1, 3))
    assert math.isclose(held_up_s(trace, 1.0, 6.0), 0.5 + 0.7 + 0.5, rel_tol=1e-6)
    assert held_up_s(at((1.0, 1)), 0.0, 9.0) == 0.0


def test_pace_counts_samples_by_when_they_were_computed() -> None:
    trace = at(*steady(0.1, 20, 0.1, 1))
    assert math.isclose(pace([trace, trace], 0.0, 1.0), 2 * 160.0)


# -- how a worker is sent away


def test_an_order_is_for_one_process_and_taken_once(tmp_path: Path) -> None:
    orders.give(tmp_path, os.getpid() + 1, orders.Order("hang"))
    assert orders.taken(tmp_path) is None
    orders.give(tmp_path, os.getpid(), orders.Order("save", 1.5))
    assert orders.taken(tmp_path) == orders.Order("save", 1.5)
    assert orders.taken(tmp_path) is None


def test_absences_are_read_as_they_were_written(tmp_path: Path) -> None:
    stamps, traces = Stamps(tmp_path), Traces(tmp_path)
    stamps.away(17)
    (trace,) = traces.refresh().by_pid.values()
    (absence,) = trace.absences
    assert absence.round == 17 and absence.ends_s is None
    stamps.back()
    traces.refresh()
    assert absence.ends_s is not None and absence.ends_s >= absence.begins_s
    stamps.away(18)
    traces.refresh()
    assert [each.round for each in trace.absences] == [17, 18] and trace.absences[1].ends_s is None
    stamps.back()
    traces.refresh()
    assert trace.absences[1].ends_s is not None


def test_a_save_is_whole_and_of_its_round(tmp_path: Path) -> None:
    file, tensors = tmp_path / "saved", make_model("small", Device(lambda: 0.0)).state_dict()
    assert not absences.is_saved(file, "small", 5), "there is none"
    save_file(tensors, file, metadata={"round": "5"})
    assert absences.is_saved(file, "small", 5)
    assert not absences.is_saved(file, "small", 4)
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert not absences.is_saved(file, "small", 5), "cut off"
    save_file(dict(list(tensors.items())[1:]), file, metadata={"round": "5"})
    assert not absences.is_saved(file, "small", 5), "a tensor is missing"
    save_file({**tensors, "head.bias": torch.full((10,), math.nan)}, file, metadata={"round": "5"})
    assert not absences.is_saved(file, "small", 5)


# -- what is written, and when


def test_what_is_measured_is_kept_after_every_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "recovery.json"
    seen: list[int] = []

    def parts(plan: Any, chosen: Any, done: Any) -> list[Any]:
        def part() -> None:
            for repeat in range(3):
                done(Trial("pliant", "small", "save", repeat, {"lost_s": 0.1}))
                seen.append(len(read(file).trials))

        return [("a part", part)]

    monkeypatch.setattr(schedule, "_parts", parts)
    arguments = argparse.Namespace(json=file, quick=True, only=["save"])
    results, _ = command.MEASURES["recovery"](arguments, lambda line: None)
    assert seen == [1, 2, 3] and read(file) == results


def test_every_repeat_of_checkpoints_has_its_column() -> None:
    names = ("rounds", "checkpoints", "copy_ms", "cpu", "main", "copies", "round_ms", "state_mb", "pause_ms")
    figures = dict.fromkeys(names, 1.0)
    pauses = [{"longest_pause_ms": 6.0, "micro_batch_ms": 10.0}, {"longest_pause_ms": 12.0, "micro_batch_ms": 10.0}]
    trials = tuple(Trial("pliant", "large", "checkpoints", n, {**figures, **each}) for n, each in enumerate(pauses))
    (sheet,) = sheets(Results("checkpoints", True, MACHINE, trials=trials))
    assert "| longest pause ÷ a micro-batch | 0.60 | 1.20 |" in markdown(sheet)
    assert sheet.columns == ("", "repeat 0", "repeat 1")


def test_the_acts_of_absent_workers_have_their_tables() -> None:
    save = {"lost_s": 0.5, "killed": 0.0}
    trials = (
        Trial("pliant", "small", "save", 0, save),
        Trial("pliant", "small", "hang", 0, failure="the end of a hung process: not within 45 s"),
    )
    shown = "\n".join(markdown(sheet) for sheet in sheets(Results("recovery", True, MACHINE, trials=trials)))
    assert "| Pliant | small | 1 | 0.500, 0.500 |" in shown
    assert "failed: the end of a hung process" in shown


# -- the limits themselves


def test_a_coordinator_is_measured_without_what_it_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process torch alone takes more than a coordinator may."""
    said: list[str] = []
    trial = coordinating.succeed(1000, said.append)
    assert trial.failure is None and trial.figures["rounds"] == 1000.0
    assert 0.0 < trial.figures["resident_mb"] < 200.0
    monkeypatch.setattr(sys, "executable", "false")
    assert coordinating.succeed(1000, said.append).failure == "status 1"


@pytest.fixture
def small_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MODEL", "small")
    monkeypatch.setattr(portion_size, "SMALL_BYTES", 0)


@pytest.mark.usefixtures("small_newcomer")
@pytest.mark.parametrize("rounds", [3, 15])
def test_a_newcomer_is_measured_by_its_tensors(rounds: int) -> None:
    found = limits.joined(rounds)
    assert 1.0 < found["copies"] <= 2.01
    assert found["rounds"] + found["waits"] >= rounds


@pytest.mark.usefixtures("small_newcomer")
def test_one_that_keeps_everything_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portion_size.Portions, "is_full", lambda self, kept: False)
    monkeypatch.setattr(portion_size.Portions, "fits", lambda self, size: True)
    found = limits.joined(8)
    assert found["copies"] > 6.0
    assert not judged("limits", "large", "newcomer", "copies", [found["copies"]])[0]


def test_epochs_of_a_billion_begin() -> None:
    (found,) = limits.begun(1)
    assert found["begins_ms"] > 0.0 and found["short_ms"] > 0.0
    trial = Trial("pliant", "1e9 samples", "epoch", 0, found)
    (sheet,) = sheets(Results("limits", True, MACHINE, trials=(trial,)))
    assert len(sheet.rows) == 1
