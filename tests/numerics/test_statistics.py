"""Buffers, skips, scales and precision are decisions of the group."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pliant
from pliant.tensors.buffers import ModelBuffers
from pliant.testing import Together, together


def samples(n: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(n, 6, generator=generator) * 3 + 1, torch.randint(0, 3, (n,), generator=generator))


def normed(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def group_run(model: nn.Module, body: Any, workers: int = 3, *, delay: int | str = 1, **settings: Any) -> list[Any]:
    """``body(run, model, handle)`` on every worker, each with a copy of the model; its results."""

    def script(handle: Together) -> Any:
        mine = copy.deepcopy(model)
        with handle.join(mine, sgd(mine), delay=delay, **settings) as run:
            return body(run, mine, handle)

    return together(workers, script, paces=(1.0, 0.6, 0.3, 0.3)[:workers])


def train(run: pliant.Run, model: nn.Module, record: list[torch.Tensor] | None = None, epochs: int = 1) -> None:
    for _ in run.epochs(epochs):
        for x, y in run.batches(samples(), size=8):
            if record is not None:
                record.append(x)
            run.backward(F.cross_entropy(model(x), y))
            run.step()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("delay", [0, 1])
def test_running_statistics_follow_the_reference_formula(delay: int, momentum: float | None) -> None:
    """The first layer sees the data itself, so its statistics can be computed from the tickets alone.

    Per round: every worker goes on from where it was (delay 1: corrected by merges that came late), the merge is a
    mixture by weight: mean Σ w·m / Σ w, variance Σ w·(v + m²) / Σ w − mean².
    """
    drawn: list[list[torch.Tensor]] = [[], [], []]

    def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
        train(run, model, drawn[handle.place])
        layer = model[0]
        return layer.running_mean.clone(), layer.running_var.clone(), int(layer.num_batches_tracked), handle.record

    results = group_run(normed(momentum), body, batch=24, delay=delay)
    for mean, variance, batches, _ in results[1:]:
        assert torch.equal(mean, results[0][0]) and torch.equal(variance, results[0][1])
        assert batches == results[0][2]
    expected = reference_statistics(drawn, results[0][3], momentum, delay)
    torch.testing.assert_close(results[0][0], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(results[0][1], expected[1], rtol=1e-9, atol=1e-9)


Stat = tuple[torch.Tensor, torch.Tensor, int]
"""running mean, running variance, batches"""


def reference_statistics(
    drawn: list[list[torch.Tensor]], record: Any, momentum: float | None, delay: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixture formula, written out per worker; a merge of round r reaches a worker ``delay`` contributions late."""

    def forward(stat: Stat, x: torch.Tensor) -> Stat:
        mean, variance, n = stat
        share = momentum if momentum is not None else 1.0 / (n + 1)
        return (1 - share) * mean + share * x.mean(0), (1 - share) * variance + share * x.var(0), n + 1

    def kept(before: int, now: int) -> float:
        return (1 - momentum) ** (now - before) if momentum is not None else before / now

    start = (torch.zeros(6), torch.ones(6), 0)
    local: list[Stat] = [start] * 3
    fronts = [0] * 3
    handed: list[Stat] | None = None
    weights: list[float] = []
    merged = start

    def merge() -> None:
        nonlocal merged, local
        assert handed is not None
        total = sum(weights)
        mean = sum(w * s[0] for w, s in zip(weights, handed, strict=True)) / total
        second = sum(w * (s[1] + s[0] ** 2) for w, s in zip(weights, handed, strict=True)) / total
        merged = (mean, second - mean**2, handed[0][2])
        corrected = []
        for own, before in zip(local, handed, strict=True):
            left = kept(before[2], own[2]) if own[2] > before[2] else 1.0
            n = merged[2] + own[2] - before[2]
            corrected.append((own[0] + left * (merged[0] - before[0]), own[1] + left * (merged[1] - before[1]), n))
        local = corrected

    for row in record.tickets:
        for member, ticket in enumerate(row):
            for x in drawn[member][fronts[member] : fronts[member] + ticket.micro_batches]:
                local[member] = forward(local[member], x)
            fronts[member] += ticket.micro_batches
        if delay and handed is not None:
            merge()
        handed, weights = list(local), [ticket.weight for ticket in row]
        if not delay:
            merge()
    if delay:
        merge()
    return merged[0], merged[1]


def test_other_buffers_are_averaged_and_whole_numbers_the_leaders() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("level", torch.zeros(2))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mask", torch.full((3,), -math.inf))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.level += x.mean()
            self.steps += 1
            return self.linear(x)

    def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
        train(run, model, epochs=2)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    torch.manual_seed(0)
    results = group_run(Counting(), body, batch=24)
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name
    assert torch.equal(results[0]["mask"], torch.full((3,), -math.inf))
    assert results[0]["level"].abs().sum() > 0


@pytest.mark.parametrize("batch", [24, pliant.Floating(24)])
def test_a_non_finite_loss_is_skipped_by_the_group(batch: Any) -> None:
    def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
        for _ in run.epochs(1):
            for index, (x, y) in enumerate(run.batches(samples(), size=8)):
                loss = F.cross_entropy(model(x), y)
                if handle.place == 1 and index == 1:
                    loss = loss * math.nan
                run.backward(loss)
                run.step()
        return {name: value.clone() for name, value in model.state_dict().items()}, handle.record

    results = group_run(normed(), body, batch=batch)
    for state, record in results:
        assert [o.applied for o in record.outcomes].count(False) == 1
        assert sum(o.batch for o in record.outcomes) == 96
        for name, value in results[0][0].items():
            assert torch.isfinite(value).all(), name
            assert torch.equal(value, state[name]), name


def test_twenty_skips_in_a_row_end_the_run() -> None:
    def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
        for _ in run.epochs(30):
            for x, y in run.batches(samples(), size=8):
                run.backward(F.cross_entropy(model(x), y) * math.inf)
                run.step()

    with pytest.raises(pliant.NonFiniteLoss, match="lower the learning rate"):
        group_run(normed(), body, batch=24)


@pytest.mark.parametrize("workers", [1, 3])
def test_grad_scaler_moves_alike_and_changes_nothing_else(workers: int) -> None:
    base = nn.Sequential(nn.Linear(6, 3))

    def script_of(scaled: bool) -> Any:
        def script(handle: Together) -> Any:
            model = copy.deepcopy(base)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if scaled else None
            losses = 0
            with handle.join(model, sgd(model), batch=24, delay=0, scaler=scaler) as run:
                for _ in run.epochs(2):
                    for x, y in run.batches(samples(), size=24):
                        run.backward(F.cross_entropy(model(x), y))
                        losses += run.step()
                state = {name: value.clone() for name, value in model.state_dict().items()}
            return state, scaler.get_scale() if scaler else 1.0, [t.scale for row in handle.record.tickets for t in row]

        return script

    plain = together(workers, script_of(False))
    scaled = together(workers, script_of(True))
    # Eight rounds, a growth every two: 2⁴.
    assert {scale for _, scale, _ in scaled} == {1024.0 * 16}
    assert scaled[0][2][:workers] == [1024.0] * workers
    if workers == 1:
        for name, value in plain[0][0].items():
            torch.testing.assert_close(value, scaled[0][0][name], rtol=1e-12, atol=1e-12)


def test_a_scaled_overflow_is_skipped_and_backs_off() -> None:
    def script(handle: Together) -> Any:
        model = nn.Linear(6, 3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with handle.join(model, sgd(model), batch=24, scaler=scaler) as run:
            for _ in run.epochs(1):
                for index, (x, y) in enumerate(run.batches(samples(), size=8)):
                    loss = F.cross_entropy(model(x), y)
                    if handle.place == 0 and index == 0:
                        # The gradient overflows, the loss does not.
                        loss = loss + Overflow.apply(model.bias)
                    run.backward(loss)
                    run.step()
        return scaler.get_scale(), [o.applied for o in handle.record.outcomes]

    results = together(2, script)
    assert all(scale == 2.0 for scale, _ in results)
    assert all(applied.count(False) == 1 for _, applied in results)


class Overflow(torch.autograd.Function):
    """Zero forward, infinite backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.full(ctx.shape, math.inf)


def test_bfloat16_autocast_trains() -> None:
    base = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).float()

    def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
        losses = []
        for _ in run.epochs(6):
            for x, _ in run.batches(samples(), size=8):
                target = (x[:, 0] > 1).long()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x.float()), target)
                run.backward(loss)
                run.step()
            losses.append(run.loss)
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    results = group_run(base, body, batch=24)
    losses, state = results[0]
    assert losses[-1] < losses[0] * 0.8
    for _, other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in state.items())


def test_step_is_true_on_all_workers_for_the_same_rounds_and_shows_plain_weights() -> None:
    for settings in ({"batch": 24}, {"batch": pliant.Floating(24)}, {"batch": 24, "delay": 0}):

        def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
            seen = []
            for _ in run.epochs(3):
                for x, y in run.batches(samples(), size=8):
                    run.backward(F.cross_entropy(model(x), y))
                    if run.step():
                        seen.append((run.round, float(model[1].weight.detach().abs().sum())))
            return seen

        results = group_run(normed(), body, **settings)
        assert results[0] == results[1] == results[2]
        assert len(results[0]) >= (6 if isinstance(settings["batch"], int) else 1)


def test_plain_weights_are_equal_at_any_moment_of_the_same_round() -> None:
    def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
        versions: dict[int, float] = {}
        moved = False
        for _ in run.epochs(2):
            for x, y in run.batches(samples(), size=8):
                here = float(model[1].weight.detach().sum())
                with run.plain_weights():
                    plain = float(model[1].weight.detach().sum())
                    assert versions.setdefault(run.round, plain) == plain
                assert float(model[1].weight.detach().sum()) == here
                moved = moved or here != plain
                run.backward(F.cross_entropy(model(x), y))
                run.step()
        assert moved
        return versions

    results = group_run(normed(), body, batch=24)
    for other in results[1:]:
        for number in results[0].keys() & other.keys():
            assert results[0][number] == other[number]


def test_evaluate_in_mid_epoch_and_after() -> None:
    def correct(model: nn.Module) -> Any:
        def measure(batch: Any) -> tuple[torch.Tensor, int]:
            x, y = batch
            return (model(x).argmax(1) == y).sum(), len(y)

        return measure

    def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
        results = []
        for _ in run.epochs(2):
            for x, y in run.batches(samples(), size=4):
                run.backward(F.cross_entropy(model(x), y))
                if run.step() and run.round % 2 == 1:
                    results.append((run.round, run.evaluate(correct(model), samples(41), size=5)))
            results.append((run.round, run.evaluate(correct(model), samples(41), size=5)))
        return results

    results = group_run(normed(), body, batch=24)
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 3


def test_break_on_one_worker_ends_the_phase_for_all_with_equal_weights() -> None:
    def body(run: pliant.Run, model: nn.Module, handle: Together) -> Any:
        sums = []
        for epoch in run.epochs(2):
            for x, y in run.batches(samples(), size=4):
                run.backward(F.cross_entropy(model(x), y))
                run.step()
                if handle.place == 2 and epoch == 0 and run.round == 1:
                    break
            sums.append((run.round, float(sum(value.double().sum() for value in model.state_dict().values()))))
        return sums, handle.record.outcomes

    results = group_run(normed(), body, batch=24)
    assert results[0][0] == results[1][0] == results[2][0]
    first = [o for o in results[0][1] if o.phase == 1]
    cut = sum(stop - start for start, stop in first[-1].cut)
    assert cut > 0 and cut + sum(o.batch for o in first) == 96


def test_users_state_is_the_leaders() -> None:
    def script(handle: Together) -> Any:
        model = nn.Linear(6, 3)
        twin = nn.Linear(2, 2)
        nn.init.constant_(twin.weight, handle.place)
        with handle.join(model, sgd(model), batch=24, state={"best": handle.place + 0.5, "ema": twin}) as run:
            return (
                run.state["best"],
                float(twin.weight.detach().sum()),
                float(model.weight.detach().sum()),
                run.state["ema"] is twin,
            )

    results = together(3, script)
    assert results[0] == results[1] == results[2]
    assert results[0][:2] == (0.5, 0.0) and results[0][3]


@pytest.mark.parametrize("kept", [False, True])
def test_who_is_left_alone_shows_its_own_statistics(kept: bool) -> None:
    """The last merged ones grow old when there is nobody to merge with. ``kept``: those of the last round, in a job."""
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3)
    buffers = ModelBuffers(model)
    buffers.grow(0b111)
    model(torch.randn(4, 3))
    buffers.merge(buffers.hand_in(4.0, leader=True), 4.0)
    model(torch.randn(4, 3) + 1.0)
    own = [value.clone() for value in model.buffers()]
    buffers.exchange()
    assert not torch.equal(own[0], model.running_mean), "the group's are shown"
    buffers.exchange()
    buffers.go_alone(kept=kept)
    buffers.exchange()
    assert all(torch.equal(mine, shown) for mine, shown in zip(own, model.buffers(), strict=True))
    buffers.exchange()
    model(torch.randn(4, 3) - 1.0)
    now = [value.clone() for value in model.buffers()]
    buffers.exchange()
    expected = own if kept else now
    assert all(torch.equal(mine, shown) for mine, shown in zip(expected, model.buffers(), strict=True))
