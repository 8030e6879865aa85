"""What the benchmark of the passes over all parameters counts, and its verdicts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import sweeping
from benchmarks.judge import judge, read_targets
from benchmarks.report import markdown, sheets
from benchmarks.results import Machine, Results, Trial, read
from benchmarks.streams import MovedBytes

from pliant.tensors import passes

MACHINE = Machine(cores=2, memory_gb=8.0, python="3.11", torch="2.13.0", system="Linux", load_before=0.0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "ROWS", 300)


@pytest.mark.parametrize(("rule", "expected"), [("sgd", (6, 5, 8)), ("adamw", (8, 6, 10))])
def test_a_sweep_touches_each_memory_once(rule: str, expected: tuple[int, ...]) -> None:
    """The sum, the state and the weights read, state and weights written, the sum cleared; and so on."""
    tables = sweeping.Tables(rule, fused=False)
    assert tuple(tables.swept(do) for do in (tables.update, tables.ahead, tables.both)) == expected


@pytest.mark.parametrize(
    ("do", "moves"),
    [
        (lambda a, b: a.zero_(), 1),
        (lambda a, b: a.copy_(b), 2),
        (lambda a, b: a.add_(b), 3),
        (lambda a, b: a.mul_(2.0), 2),
        (lambda a, b: a + b, 3),
        (lambda a, b: torch.mul(a, b, out=b), 3),
        (lambda a, b: a.view(-1)[3:].detach(), 0),
        (lambda a, b: torch._foreach_add_([a, b], 1.0), 4),
        (lambda a, b: torch._foreach_zero_([a, b]), 2),
    ],
)
def test_what_torchs_operators_move_is_counted(do: Any, moves: int) -> None:
    a, b = torch.ones(40), torch.ones(40)
    with MovedBytes() as counted:
        do(a, b)
    assert counted.bytes == moves * a.nbytes


def test_torchs_fused_step_is_counted_as_one_pass() -> None:
    """Scaling reads and writes, the step reads three and writes two, clearing writes."""
    (way,) = (way for way in sweeping.ways("sgd") if way.system == "torch_fused")
    assert way.streams == 8.0


def test_every_way_is_measured_and_judged(tmp_path: Path) -> None:
    file = tmp_path / "sweeps.json"
    arguments = argparse.Namespace(only=["sgd"], quick=True, json=file)
    said: list[str] = []
    results, asked = command._swept(arguments, said.append)
    assert read(file).trials == results.trials
    acts = [(trial.system, trial.act) for trial in results.trials if trial.repeat == 0]
    assert len(acts) == len(set(acts)) == len(said) + (passes._sweep is None) * len(sweeping.ACTS)
    (sheet,) = sheets(results)
    assert len(sheet.rows) == len(acts)
    verdicts = judge(results, read_targets().target, asked)
    assert {verdict.name.split(":")[0] for verdict in verdicts} == {"SGD with momentum"}


def test_without_the_extension_the_targets_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_sweep", None)
    monkeypatch.setattr(passes, "_kernel", lambda method, dtype: None)
    trials = sweeping.measure(1, frozenset({"adamw"}), lambda _: None, lambda _: None)
    results = Results("sweeps", True, MACHINE, trials=tuple(trials))
    (sheet,) = sheets(results)
    assert "the extension is not built" in markdown(sheet)
    assert not any(
        verdict.met for verdict in judge(results, read_targets().target, frozenset({"pliant", "adamw", "both"}))
    )


@pytest.mark.parametrize(("figure", "bound"), [("beside_torch", 1.0), ("streams", 8.0)])
def test_the_bounds_are_judged(figure: str, bound: float) -> None:
    for value, met in ((bound, True), (bound + 0.01, False)):
        figures = {"beside_torch": 0.5, "streams": 8.0, figure: value}
        results = Results("sweeps", True, MACHINE, trials=(Trial("pliant", "sgd", "both", 0, figures),))
        verdicts = judge(results, read_targets().target, frozenset({"pliant", "sgd", "both"}))
        assert all(verdict.met for verdict in verdicts) is met


def test_only_rules_that_there_are() -> None:
    with pytest.raises(ValueError, match="unknown in --only: adam"):
        sweeping.selection(["adam"])
