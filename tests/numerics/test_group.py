"""A group's updates equal hand-written ones on the contributions its tickets name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pliant
from numerics import reference
from pliant.core.tickets import Kind
from pliant.core.tuning import delay
from pliant.testing import Together, together

SAMPLES = 203
AUTO = {"batch": 32, "delay": "auto"}


def dataset(seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 6, generator=generator)
    y = torch.randint(0, 3, (SAMPLES,), generator=generator)
    return TensorDataset(x, y)


def plain_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def normed_model() -> nn.Module:
    torch.manual_seed(3)
    # No bias before the normalisation: its gradient is nothing but rounding, which Adam blows up to steps of any size.
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def damped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, dampening=0.3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05, amsgrad=True)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.003)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def trained(
    make_model: Any, make_optimizer: Any, *, tokens: bool = False, epochs: int = 2, workers: int = 3, **settings: Any
) -> tuple[nn.Module, list[reference.Drawn], Any, list[dict[str, torch.Tensor]]]:
    """Train with threads; the leader's model, what everybody drew, the leader's record, everybody's state."""
    settings.setdefault("delay", 1)
    drawn = [reference.Drawn() for _ in range(workers)]
    initial = make_model()

    def script(handle: Together) -> Any:
        model = copy.deepcopy(initial)
        with handle.join(model, make_optimizer(model), **settings) as run:
            for _ in run.epochs(epochs):
                for x, y in run.batches(dataset(), size=(16, 7, 5)[handle.place % 3]):
                    # A weight that has nothing to do with the number of samples, as with tokens.
                    weight = float(1 + y.sum()) if tokens else float(len(y))
                    drawn[handle.place].micro_batches.append((x, y, weight))
                    run.backward(loss_of(model, x, y), weight=weight if tokens else None)
                    run.step()
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return model, handle.record, state

    results = together(workers, script, paces=(1.0, 0.5, 0.25)[:workers])
    return results[0][0], drawn, results[0][1], [result[2] for result in results]


def assert_equal_everywhere(states: list[dict[str, torch.Tensor]]) -> None:
    for other in states[1:]:
        for name, tensor in states[0].items():
            assert torch.equal(tensor, other[name]), name


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            p.detach(), q.detach(), rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


def counts_of(record: Any) -> list[list[int]]:
    return [[ticket.micro_batches for ticket in row] for row in record.tickets]


def phases_of(record: Any) -> list[int]:
    return [outcome.phase for outcome in record.outcomes]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_unequal_workers_without_delay_equal_one_worker(clip: float | None, tokens: bool, make_optimizer: Any) -> None:
    model, drawn, record, states = trained(
        plain_model, make_optimizer, batch=32, delay=0, clip_norm=clip, tokens=tokens
    )
    assert_equal_everywhere(states)
    expected = plain_model()
    optimizer = make_optimizer(expected)
    for parts in reference.contributions(drawn, counts_of(record)):
        sums = [reference.gradient_sum(expected, loss_of, part) for part in parts]
        total, weight = reference.added([s for s, _ in sums]), sum(w for _, w in sums)
        reference.update(expected, optimizer, total, weight, clip)
    assert_close(model, expected)


@pytest.mark.parametrize("batch", [32, pliant.Floating(reference=32)])
def test_delay_without_correction_equals_delayed_sgd(batch: Any) -> None:
    model, drawn, record, states = trained(plain_model, sgd, batch=batch, correction="none", rates="constant")
    assert_equal_everywhere(states)
    expected = plain_model()
    optimizer = sgd(expected)
    versions = [copy.deepcopy(expected)]
    start, phase = 0, 0
    for index, parts in enumerate(reference.contributions(drawn, counts_of(record))):
        if phases_of(record)[index] != phase:
            start, phase = index, phases_of(record)[index]
        # A phase begins with nothing in flight: its first two contributions see the same weights.
        seen = versions[max(start, index - 1)]
        sums = [reference.gradient_sum(seen, loss_of, part) for part in parts]
        total, weight = reference.added([s for s, _ in sums]), sum(w for _, w in sums)
        reference.update(expected, optimizer, total, weight, None)
        versions.append(copy.deepcopy(expected))
    assert_close(model, expected)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("make_optimizer", [sgd, nesterov, damped, adam, adamw])
@pytest.mark.parametrize("make_model", [plain_model, normed_model])
def test_lookahead_equals_a_step_on_the_workers_own_gradient(
    make_model: Any, make_optimizer: Any, clip: float | None
) -> None:
    model, drawn, record, states = trained(
        make_model, make_optimizer, batch=pliant.Floating(reference=32), clip_norm=clip, rates="constant"
    )
    assert_equal_everywhere(states)
    expected = make_model()
    optimizer = make_optimizer(expected)
    points = [expected] * 3
    phases = phases_of(record)
    for index, parts in enumerate(reference.contributions(drawn, counts_of(record))):
        if index == 0 or phases[index] != phases[index - 1]:
            points = [copy.deepcopy(expected)] * 3
        sums = [reference.gradient_sum(point, loss_of, part) for point, part in zip(points, parts, strict=True)]
        # After handing in, each worker goes where its own mean gradient leads; one that had none, where momentum does.
        zeros = [torch.zeros_like(p) for p in expected.parameters()]
        own = [(s, w) if w else (zeros, 1.0) for s, w in sums]
        points = [reference.ahead(expected, optimizer, s, w, clip) for s, w in own]
        total, weight = reference.added([s for s, w in sums if w]), sum(w for _, w in sums)
        reference.update(expected, optimizer, total, weight, clip)
    assert_close(model, expected)


def test_another_optimizer_repeats_the_last_displacement() -> None:
    model, drawn, record, states = trained(plain_model, rmsprop, batch=32)
    assert_equal_everywhere(states)
    expected = plain_model()
    optimizer = rmsprop(expected)
    before = copy.deepcopy(expected)
    phases = phases_of(record)
    point = expected
    for index, parts in enumerate(reference.contributions(drawn, counts_of(record))):
        begins = index == 0 or phases[index] != phases[index - 1]
        if begins:
            point = copy.deepcopy(expected)
        sums = [reference.gradient_sum(point, loss_of, part) for part in parts]
        point = copy.deepcopy(expected)
        if not begins:
            with torch.no_grad():
                for p, now, then in zip(point.parameters(), expected.parameters(), before.parameters(), strict=True):
                    p.copy_(now + (now - then))
        before = copy.deepcopy(expected)
        total, weight = reference.added([s for s, w in sums if w]), sum(w for _, w in sums)
        reference.update(expected, optimizer, total, weight, None)
    assert_close(model, expected)


def test_every_position_once_per_epoch() -> None:
    for settings in ({"batch": 32}, {"batch": pliant.Floating(32)}, {"batch": 500}, {"batch": 32, "delay": 0}, AUTO):
        _, _, record, _ = trained(plain_model, sgd, workers=3, **settings)
        for phase in {outcome.phase for outcome in record.outcomes}:
            spans = [s for o in record.outcomes if o.phase == phase for member in o.spans for s in member]
            positions = sorted(p for start, stop in spans for p in range(start, stop))
            assert positions == list(range(SAMPLES))
        assert {outcome.kind for outcome in record.outcomes} == {Kind.TRAIN}


@pytest.mark.parametrize("batch", [24, pliant.Floating(24, at_most=36)])
def test_a_delay_that_changes_keeps_the_weights_equal(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the figures say, the other delay is better: it changes every other round."""
    decided, seen = delay.after, set[tuple[int, int]]()

    def noted(choice: Any, *arguments: Any, **settings: Any) -> Any:
        after, verdict = decided(choice, *arguments, **{**settings, "trial": 1})
        seen.add((choice.delay, after.delay))
        return after, verdict

    monkeypatch.setattr(delay, "_FIRST", 1)
    monkeypatch.setattr(delay, "_preferred", lambda choice: (1 - choice.delay, True))
    monkeypatch.setattr(delay, "after", noted)
    _, _, record, states = trained(normed_model, sgd, batch=batch, delay="auto", epochs=4)
    assert_equal_everywhere(states)
    assert (0, 1) in seen and (1, 0) in seen
    for phase in {outcome.phase for outcome in record.outcomes}:
        spans = [s for o in record.outcomes if o.phase == phase for member in o.spans for s in member]
        assert sorted(p for start, stop in spans for p in range(start, stop)) == list(range(SAMPLES))


def test_fixed_batches_are_exact() -> None:
    _, _, record, _ = trained(plain_model, sgd, batch=32)
    batches = [outcome.batch for outcome in record.outcomes]
    assert batches == ([32] * 6 + [11]) * 2
