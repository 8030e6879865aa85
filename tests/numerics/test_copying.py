"""A checkpoint is copied beside the training, and is of one moment all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from numerics.trainings import training_of
from pliant.core.group_state import Policy, founded
from pliant.tensors import background_copy
from pliant.tensors.background_copy import BackgroundCopy
from pliant.tensors.checkpoint import Manifest
from pliant.types import WorkerId
from pliant.worker import checkpoint_writer, snapshot
from pliant.worker.snapshot import GroupSnapshot
from pliant.worker.training import Training


class Disk:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def write(self, manifest: Manifest, state: Any) -> Manifest:
        self.written.append(state)
        return manifest


class Later:
    """Work in the background that is done when the test says so."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.over = False
        self.failed: str | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.failed = str(error)
        self.over = True


class Writer:
    """A worker that writes checkpoints of a model with Adam."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.training: Training = training_of(self.model, self.optimizer)
        self.disk = Disk()
        self.tasks: list[Later] = []
        self.now_s = 0.0
        self.saving = checkpoint_writer.CheckpointWriter(
            self.disk,  # type: ignore[arg-type]
            "job",
            "1",
            10.0,
            lambda: self.now_s,
            self._begin,
        )
        self.update()

    def _begin(self, work: Callable[[], object]) -> Later:
        self.tasks.append(Later(work))
        return self.tasks[-1]

    def update(self) -> None:
        self.training.catch_up({i: torch.randn_like(p) for i, p in enumerate(self.training.parameters)}, 1.0, None)

    def save(self) -> None:
        group = founded(Policy(8), 1, (WorkerId("w0"),))
        self.saving.save(self.training, {"state": {}}, GroupSnapshot(group, 3, 0, False))

    def state(self) -> list[Any]:
        """Of every parameter, now."""
        return [
            {"value": p.detach().clone(), "state": {k: v.clone() for k, v in self.optimizer.state[p].items()}}
            for p in self.training.parameters
        ]

    def look(self) -> None:
        self.saving.look(3, lambda manifest: None)


@pytest.fixture
def writer() -> Writer:
    return Writer()


def same(found: Any, expected: list[Any]) -> bool:
    return all(
        torch.equal(found[f"p{index}"]["value"], each["value"])
        and all(torch.equal(found[f"p{index}"]["state"][name], value) for name, value in each["state"].items())
        for index, each in enumerate(expected)
    )


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that have copied a piece, one for each."""
    made: list[str] = []
    copyto = background_copy.np.copyto

    def noted(*arguments: Any) -> None:
        made.append(threading.current_thread().name)
        copyto(*arguments)

    monkeypatch.setattr(background_copy.np, "copyto", noted)
    return made


def test_the_training_thread_copies_nothing_at_a_checkpoint(writer: Writer, pieces: list[str]) -> None:
    expected = writer.state()
    writer.save()
    assert not pieces
    thread = threading.Thread(target=writer.tasks[0].run, name="background")
    thread.start()
    thread.join()
    writer.update()
    assert set(pieces) == {"background"} and len(pieces) == 4 * 4, "weights, two moments and a step counter each"
    assert same(writer.disk.written[0], expected)


def test_what_is_written_is_of_one_moment_however_late_the_copy_is(writer: Writer, pieces: list[str]) -> None:
    expected = writer.state()
    writer.save()
    writer.update()
    assert set(pieces) == {threading.main_thread().name}, "the update completes the copy first"
    writer.update()
    writer.tasks[0].run()
    assert same(writer.disk.written[0], expected)


@pytest.mark.parametrize("move", ["go", "exchange"])
def test_at_the_look_ahead_point_the_plain_weights_are_copied(move: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = Training(
        model,
        optimizer,
        reference=8,
        grouped=True,
        correction="lookahead",
        clip_norm=None,
        scheduler=None,
        schedule_by="batch",
        scaler=None,
    )
    plain = [p.detach().clone() for p in training.parameters]
    training.backward(model(torch.ones(1, 3)).sum(), 1.0)
    training.park(1.0, 1.0, 0b11)
    if move == "go":
        training.look_ahead(1.0)
    copy = BackgroundCopy()
    found = snapshot.copy_parameters(training, copy)
    if move == "exchange":
        training.look_ahead(1.0)
        with training.plain():
            pass
    assert training.ahead
    assert any(not torch.equal(p, value) for p, value in zip(training.parameters, plain, strict=True))
    training.finish_copy()
    copy.finish()
    assert all(torch.equal(found[f"p{index}"]["value"], value) for index, value in enumerate(plain))
    assert not copy.changed
    training.close()


def test_a_script_that_changes_weights_meanwhile_spoils_it_once(writer: Writer) -> None:
    writer.save()
    with torch.no_grad():
        writer.model[0].weight.mul_(0.5)  # type: ignore[operator, union-attr]
    writer.tasks[0].run()
    assert not writer.disk.written
    assert "the script has changed weights" in str(writer.tasks[0].failed)
    writer.look()
    expected = writer.state()
    writer.save()
    with torch.no_grad():
        writer.model[0].weight.mul_(0.5)  # type: ignore[operator, union-attr]
    writer.tasks[1].run()
    assert same(writer.disk.written[0], expected), "from then on they are copied before the script goes on"


def test_the_next_one_is_due_some_time_after_the_last_was_written(writer: Writer) -> None:
    writer.now_s = 10.0
    assert writer.saving.is_due
    writer.save()
    writer.now_s = 100.0
    assert not writer.saving.is_due
    writer.tasks[0].run()
    writer.look()
    assert not writer.saving.is_due
    writer.now_s = 109.9
    assert not writer.saving.is_due
    writer.now_s = 110.1
    assert writer.saving.is_due


def test_a_copy_that_does_not_fit_fails_the_checkpoint_alone(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("no room")

    writer.save()
    with monkeypatch.context() as patch:
        patch.setattr(background_copy.np, "copyto", full)
        writer.update()
    writer.tasks[0].run()
    assert not writer.disk.written and "no room" in str(writer.tasks[0].failed)


def test_the_memory_is_made_ready_before_the_copy_begins(writer: Writer, pieces: list[str]) -> None:
    assert not writer.saving.prepare(writer.training)
    assert not writer.saving.prepare(writer.training) and len(writer.tasks) == 1, "asked for once"
    writer.tasks[0].run()
    assert writer.saving.prepare(writer.training) and not pieces
    expected = writer.state()
    writer.save()
    writer.update()
    writer.tasks[1].run()
    written = writer.disk.written[0]
    assert same(written, expected)
    copies = [value for p in ("p0", "p1", "p2", "p3") for value in (written[p]["value"], *written[p]["state"].values())]
    assert len({each.untyped_storage().data_ptr() for each in copies}) == 1, "all in the memory that was ready"
    assert not writer.saving.prepare(writer.training), "the next one has its own"


def test_what_has_come_since_is_copied_elsewhere() -> None:
    sources = [torch.rand(5), torch.rand(3, 2), torch.rand(2000)]
    room = background_copy.CopyMemory(sources[:2])
    room.make()
    copy = BackgroundCopy(room)
    found = copy.of(sources)
    copy.finish()
    assert all(torch.equal(a, b) for a, b in zip(found, sources, strict=True))
    starts = [each.untyped_storage().data_ptr() for each in found]
    assert starts[0] == starts[1] != starts[2]
    assert all(each.data_ptr() % 64 == 0 for each in found[:2])


def test_no_memory_for_a_copy_is_said_and_tried_again(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    writer.now_s = 10.0
    writer.saving.prepare(writer.training)
    with monkeypatch.context() as patch:
        patch.setattr(background_copy.np, "empty", full)
        writer.tasks[0].run()
    writer.look()
    assert "no memory for a checkpoint (no room); training goes on" in capsys.readouterr().err
    assert not writer.saving.is_due
    writer.now_s += 2.1
    assert writer.saving.is_due and not writer.saving.prepare(writer.training) and len(writer.tasks) == 2


def test_two_threads_share_a_large_tensor(pieces: list[str]) -> None:
    source = torch.arange(6 * background_copy._PIECE_BYTES // 4, dtype=torch.float32)
    copy = BackgroundCopy()
    found = copy.of_tensor(source)
    other = threading.Thread(target=copy.finish, name="background")
    other.start()
    copy.finish()
    assert torch.equal(found, source), "complete when either returns"
    other.join()
    assert len(pieces) == 6


@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
@pytest.mark.parametrize("ready", [False, True])
def test_every_kind_of_tensor_is_copied(kind: torch.dtype, shape: tuple[int, ...], ready: bool) -> None:
    sources = [(torch.rand(shape) * 3).to(kind), (torch.rand(*shape, 4, 2) * 3).to(kind).transpose(-1, -2)]
    room = background_copy.CopyMemory(sources)
    if ready:
        room.make()
    copy = BackgroundCopy(room if ready else None)
    found = copy.of({"nested": [sources, ("text", 1)]})
    copy.finish()
    assert found["nested"][1] == ("text", 1)
    assert all(torch.equal(a, b) for a, b in zip(found["nested"][0], sources, strict=True))
