"""Alone and without delay, Pliant makes the updates of the plain PyTorch loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import pliant
from pliant.worker.script.sample_order import Shuffled


def dataset(samples: int, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def in_order(samples: TensorDataset, epoch: int) -> Subset[Any]:
    """The same samples as the epoch of a run with seed 0 sees them."""
    return Subset(samples, list(Shuffled(0, epoch, len(samples))))


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, samples: TensorDataset, batch: int, clip: float | None
) -> None:
    for epoch in range(2):
        for x, y in DataLoader(in_order(samples, epoch), batch_size=batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def pliant_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, samples: Any, size: int, **settings: Any
) -> list[bool]:
    updates = []
    with pliant.join(model, optimizer, **settings) as run:
        for _ in run.epochs(2):
            for x, y in run.batches(samples, size=size):
                run.backward(F.cross_entropy(model(x), y))
                updates.append(run.step())
    return updates


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_bit_for_bit_where_the_micro_batch_is_the_batch(make_optimizer: Any, delay: int) -> None:
    samples = dataset(256, torch.float32)
    mine, plain = model_of(torch.float32), model_of(torch.float32)
    updates = pliant_loop(mine, make_optimizer(mine), samples, 32, batch=32, delay=delay)
    plain_loop(plain, make_optimizer(plain), samples, 32, None)
    assert all(updates)
    for (name, ours), theirs in zip(mine.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_accumulated_micro_batches_equal_the_whole_batch(make_optimizer: Any, clip: float | None) -> None:
    samples = dataset(203, torch.float64)

    def make_model() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    mine, plain = make_model(), make_model()
    updates = pliant_loop(mine, make_optimizer(mine), samples, 7, batch=30, clip_norm=clip)
    plain_loop(plain, make_optimizer(plain), samples, 30, clip)
    assert sum(updates) == 14
    for (name, ours), theirs in zip(mine.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def test_schedulers_count_samples() -> None:
    samples = dataset(256, torch.float64)
    mine, plain = model_of(torch.float64), model_of(torch.float64)
    optimizer = sgd(mine)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=17)
    pliant_loop(mine, optimizer, samples, 32, batch=32, scheduler=scheduler)
    reference = sgd(plain)
    schedule = torch.optim.lr_scheduler.OneCycleLR(reference, max_lr=0.2, total_steps=17)
    for epoch in range(2):
        for x, y in DataLoader(in_order(samples, epoch), batch_size=32):
            reference.zero_grad()
            F.cross_entropy(plain(x), y).backward()
            reference.step()
            schedule.step()
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


def test_a_schedule_by_epochs() -> None:
    model = model_of(torch.float64)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    pliant_loop(model, optimizer, dataset(100, torch.float64), 10, batch=50, scheduler=scheduler, schedule_by="epoch")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)


class Odd(nn.Module):
    """Frozen, shared, and conditionally used parameters in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.frozen = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        self.used += 1
        if self.used % 3 == 0:
            x = self.sometimes(x)
        return self.last(x)


def odd_optimizer(model: Odd) -> torch.optim.Optimizer:
    rest = [p for name, p in model.named_parameters() if not name.startswith("last")]
    return torch.optim.SGD(
        [{"params": rest}, {"params": model.last.parameters(), "lr": 0.01}], lr=0.1, momentum=0.9, weight_decay=0.01
    )


def test_frozen_shared_and_unused_parameters() -> None:
    samples = dataset(96, torch.float64)
    torch.manual_seed(1)
    mine = Odd()
    plain = copy.deepcopy(mine)
    pliant_loop(mine, odd_optimizer(mine), samples, 16, batch=16)
    plain_loop(plain, odd_optimizer(plain), samples, 16, None)
    for (name, ours), theirs in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs[1], rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def test_samples_and_the_end_inside_an_epoch() -> None:
    model = model_of(torch.float64)
    seen = 0
    with pliant.join(model, sgd(model), batch=10) as run:
        for _ in run.epochs(samples=250):
            for x, y in run.batches(dataset(100, torch.float64), size=5):
                seen += len(y)
                run.backward(F.cross_entropy(model(x), y))
                run.step()
        assert (run.samples, run.round, seen) == (250, 25, 250)


def test_break_ends_the_phase_with_plain_weights_and_goes_on() -> None:
    model = model_of(torch.float64)
    with pliant.join(model, sgd(model), batch=20) as run:
        for epoch in run.epochs(2):
            for index, (x, y) in enumerate(run.batches(dataset(100, torch.float64), size=5)):
                run.backward(F.cross_entropy(model(x), y))
                run.step()
                if epoch == 0 and index == 9:
                    break
        assert run.samples == 150


class Noisy(Dataset[Any]):
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import random

        import numpy as np

        noise = torch.randn(6) + random.random() + float(np.random.random())
        return noise, torch.tensor(index % 3)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_samples_noise_depends_on_its_position_alone(loaders: int) -> None:
    seen: list[dict[float, int]] = []
    for size in (4, 7):
        model = model_of(torch.float64)
        noise: dict[float, int] = {}
        with pliant.join(model, sgd(model), batch=20) as run:
            for _ in run.epochs(1):
                for x, y in run.batches(Noisy(), size=size, num_workers=loaders):
                    for value, label in zip(x[:, 0].tolist(), y.tolist(), strict=True):
                        noise[value] = label
                    run.backward(F.cross_entropy(model(x), y))
                    run.step()
        seen.append(noise)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 40


def test_dropout_depends_on_the_micro_batch_alone() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        result = []
        with pliant.join(model, sgd(model), batch=20) as run:
            for _ in run.epochs(1):
                for x, y in run.batches(dataset(100, torch.float64), size=10):
                    loss = F.cross_entropy(model(x), y)
                    result.append(float(loss.detach()))
                    run.backward(loss)
                    run.step()
                    torch.rand(3)
        return result

    assert losses() == losses()


def test_a_users_order() -> None:
    model = model_of(torch.float64)
    samples = TensorDataset(torch.randn(10, 6), torch.arange(10) % 3, torch.arange(10))
    seen: list[int] = []

    def order(epoch: int, n: int) -> list[int]:
        return [n - 1 - i for i in range(n)] + [0, 0]

    with pliant.join(model, sgd(model), batch=4, order=order) as run:
        for _ in run.epochs(1):
            for x, y, index in run.batches(samples, size=4):
                seen += index.tolist()
                run.backward(F.cross_entropy(model(x), y))
                run.step()
    assert seen == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0]


def test_evaluate_is_a_mean_in_eval_mode() -> None:
    model = model_of(torch.float64)
    samples = dataset(101, torch.float64)
    model[1].eval()

    def count(batch: Any) -> tuple[torch.Tensor, int]:
        assert not model.training and not torch.is_grad_enabled()
        return (batch[1] == 1).sum(), len(batch[1])

    with pliant.join(model, sgd(model), batch=20) as run:
        result = run.evaluate(count, samples, size=7)
        assert run.round == 0
    assert result == pytest.approx(float((samples.tensors[1] == 1).double().mean()))
    assert model.training and not model[1].training


def test_save_loads_without_pliant(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = model_of(torch.float32)
    with pliant.join(model, sgd(model), batch=20) as run:
        run.save(tmp_path / "model.safetensors")
    twin = model_of(torch.float32)
    twin.load_state_dict(load_file(tmp_path / "model.safetensors"))
