"""What a script does with every update: once, in order, on the same weights and buffers everywhere."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import pliant
from pliant.core.tickets import Kind
from pliant.testing import Together, together

DELAYS = (0, 1, "auto")


def dataset(samples: int = 203) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def model_of(*, counts: bool = False) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(Counting(), *layers) if counts else nn.Sequential(*layers)


class Counting(nn.Module):
    """A buffer that is no running statistic: nobody knows of it before it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.sum()
        return x


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    # BatchNorm refuses to normalise one sample by itself.
    model.train(len(x) > 1)
    return F.cross_entropy(model(x), y)


def train(run: pliant.Run, model: nn.Module, samples: TensorDataset, size: int = 8) -> list[int]:
    """One loop; the updates that ``step`` told of."""
    told: list[int] = []
    for batch in run.batches(samples, size):
        run.backward(loss_of(model, batch))
        if run.step():
            told.append(run.updates)
    return told


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("delay", DELAYS)
def test_every_update_is_followed_once_with_equal_buffers(delay: Any, workers: int) -> None:
    def script(handle: Together) -> Any:
        model = model_of(counts=True)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        updates: list[pliant.Update] = []
        averages: list[list[Tensor]] = []
        told: list[int] = []
        with handle.join(model, sgd(model), batch=24, delay=delay, state={"ema": ema}) as run:

            @run.on_update
            def follow(update: pliant.Update) -> None:
                assert (update.round, update.updates, update.samples) == (run.round, run.updates, run.samples)
                assert update.grad_norm == run.grad_norm and update.rates == (run.rate,)
                ema.update_parameters(model)
                updates.append(update)
                averages.append([tensor.detach().clone() for tensor in (*ema.parameters(), *ema.buffers())])

            for _ in run.epochs(2):
                told += train(run, model, dataset())
        return updates, averages, told

    results = together(workers, script)
    updates, averages, told = results[0]
    assert [update.updates for update in updates] == list(range(1, 19))
    assert [update.ends_epoch for update in updates] == [number in (9, 18) for number in range(1, 19)]
    assert [update.samples for update in updates][8::9] == [203, 406]
    assert all(math.isfinite(update.loss) and update.grad_norm > 0 for update in updates)
    for others, theirs, _ in results[1:]:
        assert others == updates
        for here, there in zip(averages, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    # Alone ``step`` tells of all of them; with an overlap never of the last ones of an epoch.
    assert set(told) <= set(range(1, 19))
    assert workers > 1 or len(told) == 18
    assert workers == 1 or delay != 1 or not {9, 18} & set(told)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("batch", [24, 2])
def test_evaluate_after_any_update(delay: Any, batch: int) -> None:
    """With a batch of two one of three workers is a spare."""
    samples, held_out = dataset(27), dataset(31)

    def script(handle: Together) -> Any:
        model = model_of()
        results: list[tuple[int, float]] = []
        inside: list[float] = []
        with handle.join(model, sgd(model), batch=batch, delay=delay, seed=1) as run:

            def correct(part: Any) -> tuple[Tensor, int]:
                x, y = part
                return (model(x).argmax(1) == y).sum(), len(y)

            run.on_update(lambda update: results.append((update.updates, run.evaluate(correct, held_out, size=4))))
            for _ in run.epochs(2):
                for part in run.batches(samples, size=2):
                    run.backward(loss_of(model, part))
                    if run.step() and run.updates % 4 == 0:
                        inside.append(run.evaluate(correct, held_out, size=5))
                results.append((0, run.evaluate(correct, held_out, size=6)))
        return results, dict(results), inside

    results, by_update, _ = zip(*together(3, script), strict=True)
    assert results[0] == results[1] == results[2]
    updates = 2 * math.ceil(27 / batch)
    assert sorted(set(by_update[0]) - {0}) == list(range(1, updates + 1))
    assert not any(math.isnan(value) for value in by_update[0].values())
    # After the last update of an epoch the weights are those between the loops.
    assert results[0][-2][1] == results[0][-1][1]


@pytest.mark.parametrize("verb", ["step", "backward", "batches"])
def test_what_cannot_be_called_in_it_is_refused_by_name(verb: str) -> None:
    model = model_of()
    run = pliant.join(model, sgd(model), batch=8)
    calls = {
        "step": run.step,
        "backward": lambda: run.backward(torch.zeros((), requires_grad=True)),
        "batches": lambda: next(iter(run.batches(dataset(), 8))),
    }
    run.on_update(lambda update: calls[verb]())
    with pytest.raises(pliant.UsageError, match=f"{verb} was called in a function of on_update"):
        train(run, model, dataset())
    run._membership.fail(RuntimeError())
    run._calls.closed = True


@pytest.mark.parametrize("workers", [1, 2])
def test_weights_may_be_swapped_in_it_and_not_changed(workers: int) -> None:
    def swap(model: nn.Module, run: pliant.Run) -> None:
        held = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        run.evaluate(lambda part: (model(part[0]).abs().sum(), 1), dataset(9), size=3)
        model.load_state_dict(held)

    def clip(model: nn.Module, run: pliant.Run) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    def script(handle: Together, change: Any) -> None:
        model = model_of()
        with handle.join(model, sgd(model), batch=16, delay=1) as run:
            run.on_update(lambda update: change(model, run))
            train(run, model, dataset())

    together(workers, lambda handle: script(handle, swap))
    with pytest.raises(pliant.UsageError, match="register_step_post_hook"):
        together(workers, lambda handle: script(handle, clip))


@pytest.mark.parametrize("delay", [0, 1])
def test_an_evaluate_on_one_worker_only_is_refused(delay: int) -> None:
    def script(handle: Together) -> None:
        model = model_of()
        with handle.join(model, sgd(model), batch=16, delay=delay) as run:

            @run.on_update
            def follow(update: pliant.Update) -> None:
                if run.is_leader:
                    run.evaluate(lambda part: (0.0, 1), dataset(9), size=3)

            train(run, model, dataset())

    with pytest.raises(pliant.Refused, match="call batches and evaluate on every worker"):
        together(2, script)


def test_a_skipped_round_is_no_update() -> None:
    def script(handle: Together) -> Any:
        model, updates = model_of(), []
        with handle.join(model, sgd(model), batch=16, delay=0) as run:
            run.on_update(lambda update: updates.append((update.round, update.updates)))
            for number, batch in enumerate(run.batches(dataset(96), 8)):
                run.backward(loss_of(model, batch) * (math.inf if number == 1 else 1.0))
                run.step()
        return updates, run.updates, run.round

    updates, count, rounds = together(2, script)[0]
    assert rounds == 6 and count == 5
    assert updates == [(1, 1), (3, 2), (4, 3), (5, 4), (6, 5)]


@pytest.mark.parametrize("leaves", [False, True])
def test_an_exception_in_it_is_the_scripts(leaves: bool) -> None:
    """Also where the loop is being left by ``break``: Python drops what is raised there."""
    model = model_of()

    def fail(update: pliant.Update) -> None:
        if update.ends_epoch:
            raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"), pliant.join(model, sgd(model), batch=16) as run:
        run.on_update(fail)
        for batch in run.batches(dataset(), 8):
            run.backward(loss_of(model, batch))
            if leaves:
                break
            run.step()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("delay", DELAYS)
def test_training_ends_with_the_last_of_so_many_updates(delay: Any, workers: int) -> None:
    def script(handle: Together) -> Any:
        model, ends = model_of(), []
        with handle.join(model, sgd(model), batch=24, delay=delay) as run:
            run.on_update(lambda update: ends.append(update.ends_epoch))
            epochs = [epoch for epoch in run.epochs(steps=13) if train(run, model, dataset()) or True]
        return epochs, ends, run.updates, [p.detach().clone() for p in model.parameters()]

    results = together(workers, script)
    for epochs, ends, updates, weights in results:
        assert (epochs, updates) == ([0, 1], 13)
        assert [number for number, end in enumerate(ends, 1) if end] == [9, 13]
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][3], strict=True))


def test_epochs_takes_one_end() -> None:
    model = model_of()
    with pliant.join(model, sgd(model), batch=8) as run, pytest.raises(pliant.UsageError, match="steps=N"):
        next(run.epochs(3, steps=4))


def test_the_norm_is_that_of_plain_pytorch_and_the_bound_may_be_set() -> None:
    samples = dataset(64)
    model = model_of()
    plain, norms = copy.deepcopy(model), []
    optimizer = sgd(plain)
    bounds = [None, None, 0.5, 0.5, None, None, None, None]
    for number, start in enumerate(range(0, 64, 8)):
        loss_of(plain, samples[start : start + 8]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), bounds[number] or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    found: list[float] = []
    with pliant.join(model, sgd(model), batch=8, order=lambda epoch, n: range(n)) as run:

        @run.on_update
        def follow(update: pliant.Update) -> None:
            found.append(update.grad_norm)
            if update.updates in (2, 4):
                run.clip_norm = 0.5 if update.updates == 2 else None
                assert run.clip_norm == (0.5 if update.updates == 2 else None)

        train(run, model, samples)
    assert found == pytest.approx(norms, rel=1e-6)
    assert run.grad_norm == found[-1]
    for here, there in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(here, there, atol=1e-7)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_group_follows_a_bound_that_is_set(delay: int) -> None:
    def script(handle: Together) -> Any:
        model = model_of()
        with handle.join(model, sgd(model), batch=24, delay=delay) as run:

            @run.on_update
            def follow(update: pliant.Update) -> None:
                if update.updates == 3:
                    run.clip_norm = 0.01

            train(run, model, dataset())
        return [outcome.clip_norm for outcome in handle.record.outcomes], list(model.parameters())

    (bounds, weights), (_, others) = together(2, script)
    assert bounds[:3] == [None] * 3 and bounds[-1] == 0.01
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("batch", [2, 24], ids=["with a spare", "all compute"])
def test_a_bound_may_be_set_between_two_loops(delay: int, batch: int) -> None:
    def script(handle: Together) -> Any:
        model = model_of()
        with handle.join(model, sgd(model), batch=batch, delay=delay) as run:
            for epoch in run.epochs(3):
                if epoch:
                    run.clip_norm = 0.5 / epoch
                train(run, model, dataset(48))
        return [outcome.clip_norm for outcome in handle.record.outcomes if outcome.kind is Kind.TRAIN]

    for bounds in together(3, script):
        rounds = len(bounds) // 3
        assert set(bounds[:rounds]) == {None} and bounds[-1] == 0.25
        assert set(bounds[rounds + 2 : 2 * rounds]) <= {0.5} and len(set(bounds)) == 3


def test_scripts_that_set_different_bounds_are_refused() -> None:
    def script(handle: Together) -> None:
        model = model_of()
        with handle.join(model, sgd(model), batch=24, delay=0) as run:
            run.clip_norm = 1.0 + handle.place
            train(run, model, dataset())

    with pytest.raises(pliant.Refused, match=r"w0 has set run.clip_norm to 1.0 and w1 to 2.0"):
        together(2, script)


@pytest.mark.parametrize("bound", [0, -1.0, "1", True])
def test_a_bound_that_is_none_is_refused(bound: Any) -> None:
    model = model_of()
    with pliant.join(model, sgd(model), batch=8) as run, pytest.raises(pliant.UsageError, match="clip_norm is"):
        run.clip_norm = bound


def test_the_norm_is_taken_from_when_it_is_asked_for() -> None:
    model, norms = model_of(), []
    with pliant.join(model, sgd(model), batch=8) as run:
        for batch in run.batches(dataset(32), 8):
            run.backward(loss_of(model, batch))
            run.step()
            norms.append(run.grad_norm)
    assert math.isnan(norms[0]) and all(norm > 0 for norm in norms[1:])


def test_first_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLIANT_WORKER", raising=False)
    assert pliant.is_first()
    monkeypatch.setenv("PLIANT_WORKER", "w0")
    assert pliant.is_first()
    monkeypatch.setenv("PLIANT_WORKER", "w1")
    assert not pliant.is_first()
