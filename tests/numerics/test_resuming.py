"""A script alone goes on from its last checkpoint as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pliant
from pliant.core.membership.roster import CHECKPOINTS_KEPT
from pliant.errors import CheckpointError
from pliant.worker import checkpoint_writer


class Crash(Exception):
    """The process is gone."""


class AtOnce:
    """Work in the background that is done at once."""

    failed: str | None = None
    over = True

    def __init__(self, work: Any) -> None:
        try:
            work()
        except CheckpointError as error:
            self.failed = str(error)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer.CheckpointWriter.__init__, "__defaults__", (AtOnce,))


def trained(
    directory: Path | None, crash_after: int | None = None, told: list[str] | None = None, **settings: Any
) -> tuple[dict[str, Any], Any]:
    """Four epochs; what ``run.state`` and the model are at the end. The leader tells the loss of every epoch."""
    torch.manual_seed(0)
    inputs = torch.randn(90, 5, dtype=torch.float64)
    samples = [(inputs[i], inputs[i].sum()[None]) for i in range(90)]
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=30)
    average = nn.Linear(1, 1)
    drawn = 0
    state: dict[str, Any] = {"updates": 0, "epochs": 0, "average": average}
    with pliant.join(
        model,
        optimizer,
        batch=16,
        scheduler=scheduler,
        state=state,
        checkpoint=directory,
        checkpoint_every=1e-9,
        **settings,
    ) as run:
        for _ in run.epochs(4):
            for x, y in run.batches(samples, size=6):
                drawn += 1
                if drawn == crash_after:
                    raise Crash
                run.backward(nn.functional.mse_loss(model(x), y))
                if run.step():
                    run.state["updates"] += 1
                    average.weight.data += 1.0
            run.evaluate(lambda batch: (float(model(batch[0]).sum()), len(batch[0])), samples, size=30)
            state["epochs"] += 1
            if run.is_leader and told is not None:
                told.append(f"{run.loss:.9f}")
        assert run.state is state
        facts = run.state["updates"], run.state["epochs"], run.samples, scheduler.last_epoch
        return {"facts": facts, "average": float(average.weight.detach())}, {
            name: value.clone() for name, value in model.state_dict().items()
        }


@pytest.mark.parametrize("crashes", [(1,), (2, 3), (17,), (20, 25, 12), (40, 1, 30)])
def test_as_if_it_had_never_stopped(tmp_path: Path, crashes: tuple[int, ...]) -> None:
    once: list[str] = []
    told: list[str] = []
    expected, weights = trained(None, told=once)
    for crash_after in crashes:
        with pytest.raises(Crash):
            trained(tmp_path, crash_after, told)
    facts, found = trained(tmp_path, told=told)
    assert facts["facts"] == expected["facts"]
    assert told == once and len(once) == 4
    assert all(torch.equal(weights[name], found[name]) for name in weights)


def test_a_run_that_came_to_its_end_is_not_gone_on_with(tmp_path: Path) -> None:
    first, weights = trained(tmp_path)
    assert len(list((tmp_path / "alone").glob("*/manifest.json"))) == CHECKPOINTS_KEPT
    second, again = trained(tmp_path)
    assert first == second and all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_damaged_one_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, weights = trained(None)
    with pytest.raises(Crash):
        trained(tmp_path, 20)
    newest = max((tmp_path / "alone").glob("*/state.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-9])
    facts, found = trained(tmp_path)
    assert "is cut off; going on from the one before it" in capsys.readouterr().err
    assert facts["facts"] == expected["facts"]
    assert all(torch.equal(weights[name], found[name]) for name in weights)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        trained(tmp_path, 20, delay=1)
    with pytest.raises(CheckpointError, match="is of a run with other settings of join"):
        trained(tmp_path, 20, delay=0)


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, weights = trained(None)
    (tmp_path / "alone").write_text("in the way")
    _, found = trained(tmp_path)
    assert "Not a directory; training goes on, and it is tried again" in capsys.readouterr().err
    assert all(torch.equal(weights[name], found[name]) for name in weights)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpoint": 3}, "checkpoint is 3: give a directory"),
        ({"checkpoint": ""}, "checkpoint is ''"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0: give seconds"),
        ({"checkpoint_every": float("nan")}, "checkpoint_every is nan"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(pliant.UsageError, match=said):
        pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4, **settings)
