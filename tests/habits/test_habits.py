"""Drawn training scripts end as plain PyTorch does, with the same state on all workers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings

from habits.kept import KEPT
from pliant.core import rounds
from pliant.tensors import lookahead, weights
from pliant.testing.habits import Event, Habits, command, packed, strategies, threads, unpacked
from pliant.testing.habits.reference import ScriptMismatch
from pliant.testing.habits.script import Diary, Gathered
from pliant.testing.habits.shrinking import shrunk
from pliant.worker.evaluation import predictions
from pliant.worker.training import Training

# Threads share the filters of warnings: a group that skips its first round advances the schedule before an update.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch would fight with the threads of the group."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(habits: Habits, directory: Path) -> None:
    try:
        threads.checked(habits, directory)
    except Exception as error:
        error.add_note(f"{habits}\n{command.again(habits)} --shrink")
        raise


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("habits")


@settings(max_examples=200, phases=[Phase.generate])
@given(strategies.habits())
def test_drawn_scripts(directory: Path, habits: Habits) -> None:
    check(habits, directory)


@pytest.mark.parametrize("habits", KEPT, ids=packed)
def test_scripts_that_failed_once(directory: Path, habits: Habits) -> None:
    check(habits, directory)


@given(strategies.habits())
def test_a_script_is_its_json(habits: Habits) -> None:
    assert unpacked(packed(habits)) == habits


GROUP = Habits(optimizer="adam", epochs=2, sizes=(4, 2, 3), delay=1)


def test_a_wrong_gradient_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    average = Training._average
    monkeypatch.setattr(
        Training, "_average", lambda self, summed, mean, **options: average(self, summed, mean * 1.01, **options)
    )
    with pytest.raises(ScriptMismatch, match="off plain PyTorch"):
        threads.checked(Habits(sizes=(4, 2)), directory)


def test_a_wrong_look_ahead_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "_peek_adam", lambda *arguments: None)
    with pytest.raises(ScriptMismatch, match="off plain PyTorch"):
        threads.checked(GROUP, directory)


def test_other_weights_on_one_worker_are_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last update, where no digest of the weights is compared any more."""
    optimize, lock, made = Training._optimize, threading.Lock(), list[Training]()

    def spoilt(self: Training, factor: float) -> None:
        optimize(self, factor)
        with lock:
            made.append(self)
        if self is made[0] and made.count(self) == 3:
            with torch.no_grad():
                self.parameters[0].mul_(1 + 1e-12)

    monkeypatch.setattr(Training, "_optimize", spoilt)
    with pytest.raises(ScriptMismatch, match="differs between"):
        threads.checked(Habits(samples=24, batch=8, sizes=(4, 2)), directory)


def test_the_plainest_failing_script_is_found() -> None:
    large = Habits(
        model="cnn",
        norm=True,
        optimizer="adamw",
        sizes=(4, 2, 3),
        paces=(1.0, 0.5, 1.0),
        delay=1,
        events=(Event(2, "save"), Event(3, "inf", 2)),
    )
    assert shrunk(large, lambda plainer: plainer.model == "cnn" and plainer.does("inf")) == Habits(
        model="cnn", events=(Event(3, "inf"),)
    )


CLIPPED = Habits(
    sizes=(4, 2), epochs=2, delay=1, clip=0.05, inside=True, events=(Event(2, "clip off"), Event(4, "clip"))
)


def test_a_bound_that_the_look_ahead_does_not_follow_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads.checked(CLIPPED, directory)
    monkeypatch.setattr(Training, "follow_clip_norm", lambda self, bound: None)
    with pytest.raises(ScriptMismatch, match="off plain PyTorch"):
        threads.checked(CLIPPED, directory)


def test_a_bound_too_early_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_clip_norm", lambda group, tickets: (0.5, 0))
    with pytest.raises(ScriptMismatch, match=r"round 1 is clipped to 0\.5, it should be None"):
        threads.checked(CLIPPED, directory)


def test_other_weights_in_a_file_are_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Habits(optimizer="adam", sizes=(4, 2), delay=1, events=(Event(2, "slow save"),))
    threads.checked(script, directory)

    def spoilt(model: Any, path: Path, **options: Any) -> bool:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.middle.weight[0, 0] += 1e-3
        return save(other, path, **options)

    save = weights.save
    monkeypatch.setattr(weights, "save", spoilt)
    with pytest.raises(ScriptMismatch, match=r"middle\.weight saved after round"):
        threads.checked(script, directory)


def test_outputs_in_another_order_are_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Habits(sizes=(4, 2), inside=True, events=(Event(1, "gather everywhere"),))
    threads.checked(script, directory)
    in_order = predictions.in_order
    monkeypatch.setattr(predictions, "in_order", lambda found, length: in_order(found, length)[::-1])
    with pytest.raises(AssertionError, match="the outputs gathered are those of samples"):
        threads.checked(script, directory)


def test_outputs_are_compared_with_those_of_the_same_call() -> None:
    outputs = torch.rand(4, 3, dtype=torch.float64)
    # In other micro-batches, say.
    calls = [outputs, outputs * (1 + 1e-15)]
    first, second = (Diary(gathered=[Gathered(5, event, list(each)) for event, each in enumerate(calls)]) for _ in "ab")
    second.gathered.pop()
    threads.compare_gathered(1, second, first)
    second.gathered[0] = Gathered(5, 0, list(calls[1]))
    with pytest.raises(ScriptMismatch, match="gathered other outputs after round 5"):
        threads.compare_gathered(1, second, first)


def test_an_update_too_many_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Habits(sizes=(4, 2), steps=4)
    threads.checked(script, directory)
    monkeypatch.setattr(rounds, "_is_enough", lambda group: group.updates >= 5)
    with pytest.raises(ScriptMismatch, match="5 updates were made, the script asks for 4"):
        threads.checked(script, directory)
