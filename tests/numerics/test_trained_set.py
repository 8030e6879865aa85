"""What is trained may change between any two updates: equal to plain PyTorch without a delay, equal on all with one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pliant
from pliant.testing import Together, together
from pliant.worker.script.sample_order import epoch_order

torch.manual_seed(5)
X, Y = torch.randn(96, 6, dtype=torch.float64), torch.randint(0, 3, (96,))
DATA = TensorDataset(X, Y)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
BATCH = 24
Act = Callable[[nn.Module, torch.optim.Optimizer], None]


def freeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for p in model[0].parameters():
        p.requires_grad_(False)


def freeze_and_clear(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for p in model[0].parameters():
        p.requires_grad_(False)
        p.grad = None


def unfreeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[2].requires_grad_(True)


def add_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})


def swap(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[2].requires_grad_(True)
    model[0].requires_grad_(False)


ACTS: dict[str, Act] = {
    "freeze": freeze,
    "freeze and clear": freeze_and_clear,
    "unfreeze": unfreeze,
    "add_param_group": add_group,
    "swap": swap,
}


def made(act: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = copy.deepcopy(MODEL)
    parameters = list(model.parameters())
    if act in ("unfreeze", "swap"):
        model[2].requires_grad_(False)
    if act == "add_param_group":
        parameters = [*model[0].parameters(), *model[4].parameters()]
    if optimizer == "adamw":
        return model, torch.optim.AdamW(parameters, lr=0.01)
    return model, torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def trained(
    act: str, workers: int, delay: int, *, after: int | None, optimizer: str = "sgd", **settings: Any
) -> list[tuple[nn.Module, Any, int]]:
    """Four epochs; the act comes at the start of the third, or at the first update after round ``after``."""

    def script(handle: Together) -> tuple[nn.Module, Any, int]:
        model, own = made(act, optimizer)
        at = 0
        with handle.join(model, own, batch=BATCH, delay=delay, **settings) as run:
            for epoch in run.epochs(4):
                if after is None and epoch == 2:
                    ACTS[act](model, own)
                    at = run.round
                for x, y in run.batches(DATA, size=4):
                    run.backward(F.cross_entropy(model(x), y))
                    if run.step() and after is not None and not at and run.round >= after:
                        ACTS[act](model, own)
                        at = run.round
        return model, handle.record, at

    return together(workers, script)


def plain(act: str, record: Any, at: int, optimizer: str, clip: float | None = None) -> nn.Module:
    """The loop without Pliant, over the same samples."""
    model, own = made(act, optimizer)
    for number, outcome in enumerate(record.outcomes, start=1):
        if number == at + 1:
            ACTS[act](model, own)
        indices = epoch_order(None, 0, outcome.phase - 1, len(DATA))
        chosen = indices.at([p for spans in outcome.spans for start, stop in spans for p in range(start, stop)])
        own.zero_grad()
        F.cross_entropy(model(X[chosen]), Y[chosen]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for group in own.param_groups for p in group["params"]], clip)
        own.step()
    return model


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("after", [None, 5])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_without_a_delay_it_is_as_in_plain_pytorch(act: str, workers: int, after: int | None) -> None:
    for optimizer in ("sgd", "adamw"):
        results = trained(act, workers, 0, after=after, optimizer=optimizer)
        model, record, at = results[0]
        assert at and all(apart(model, other) == 0.0 for other, _, _ in results)
        assert apart(model, plain(act, record, at, optimizer)) < 1e-12


def test_clipping_counts_what_is_trained() -> None:
    results = trained("freeze", 2, 0, after=5, clip_norm=0.05)
    model, record, at = results[0]
    assert apart(model, plain("freeze", record, at, "sgd", clip=0.05)) < 1e-9


@pytest.mark.parametrize("after", [None, 5])
@pytest.mark.parametrize("act", ACTS)
def test_with_a_delay_all_workers_do_the_same(act: str, after: int | None) -> None:
    for correction in ("lookahead", "none"):
        results = trained(act, 3, 1, after=after, correction=correction)
        model, record, at = results[0]
        assert at and all(apart(model, other) == 0.0 for other, _, _ in results)
        layouts = [outcome.layout for outcome in record.outcomes]
        first = next(number for number, outcome in enumerate(record.outcomes, start=1) if outcome.layout != layouts[0])
        # At an epoch's start it counts at once; in mid-epoch one round is in flight, and the next one says so.
        assert first == at + 1 if after is None else at + 2 <= first <= at + 3
        touched = [outcome.touched for outcome in record.outcomes]
        # What is frozen drops out with the first round that says so, what is unfrozen comes in with the one after it.
        between = act == "swap" and after is not None
        assert len([key for key, _ in itertools.groupby(touched)]) == len(set(touched)) == 2 + between


def test_a_frozen_layer_keeps_its_weights() -> None:
    held: list[Tensor] = []

    def script(handle: Together) -> nn.Module:
        model, own = made("freeze", "adamw")
        with handle.join(model, own, batch=BATCH, delay=1) as run:
            for epoch in run.epochs(3):
                if epoch == 1:
                    freeze(model, own)
                    if handle.place == 0:
                        held.append(next(model.parameters()).detach().clone())
                for x, y in run.batches(DATA, size=4):
                    run.backward(F.cross_entropy(model(x), y))
                    run.step()
        return model

    for model in together(2, script):
        assert torch.equal(next(model.parameters()), held[0])


def test_one_worker_that_freezes_alone_is_named() -> None:
    def script(handle: Together) -> None:
        model, own = made("freeze", "sgd")
        with handle.join(model, own, batch=BATCH, delay=0) as run:
            for _ in run.epochs(4):
                for x, y in run.batches(DATA, size=4):
                    run.backward(F.cross_entropy(model(x), y))
                    if run.step() and run.round >= 2 and run.is_leader:
                        freeze(model, own)

    with pytest.raises(pliant.Refused, match=r"w1 trains 0\.weight, 0\.bias and w0 does not: .* under is_leader"):
        together(2, script)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_worker_that_is_a_round_late_is_waited_for(delay: int) -> None:
    """Its loop body comes to the line one micro-batch later than the others'."""

    def script(handle: Together) -> tuple[nn.Module, Any]:
        model, own = made("freeze", "sgd")
        at = 5 + handle.place
        with handle.join(model, own, batch=BATCH, delay=delay) as run:
            for _ in run.epochs(3):
                for x, y in run.batches(DATA, size=4):
                    run.backward(F.cross_entropy(model(x), y))
                    if run.step() and run.round >= at:
                        freeze(model, own)
        return model, handle.record

    (model, record), (other, _) = together(2, script)
    assert apart(model, other) == 0.0
    mixed = [
        o for o, tickets in zip(record.outcomes, record.tickets, strict=True) if len({t.trained for t in tickets}) > 1
    ]
    assert mixed and all(outcome.touched != outcome.layout for outcome in mixed)


def taken_apart(change: Callable[[Any, torch.optim.Optimizer], None], workers: int) -> None:
    def script(handle: Together) -> None:
        model, own = made("freeze", "sgd")
        with handle.join(model, own, batch=BATCH, delay=0) as run:
            for _ in run.epochs(2):
                for x, y in run.batches(DATA, size=4):
                    run.backward(F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y))
                    if run.step() and run.round == 2:
                        change(model, own)

    together(workers, script)


def replace_head(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model[4] = nn.Linear(8, 3).double()


def remove_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.clear()


def add_foreign(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replace_head, r"4\.weight was replaced or added after join"),
        (remove_group, "taken out of the optimizer: freeze it instead"),
        (add_foreign, "was not there at join: make all layers before join"),
        (lambda model, _: model.float(), "was float64 on cpu at join and is float32"),
    ],
)
def test_a_model_that_is_taken_apart_is_refused(change: Any, says: str, workers: int) -> None:
    with pytest.raises(pliant.UsageError, match=says):
        taken_apart(change, workers)


# -- what else the optimizer sees


@pytest.mark.parametrize("delay", [0, 1])
def test_parameters_outside_the_model_are_equal_from_the_start(delay: int) -> None:
    def script(handle: Together) -> tuple[Any, ...]:
        model = copy.deepcopy(MODEL)
        torch.manual_seed(handle.place)
        temperature = nn.Parameter(torch.tensor(1.0 + handle.place, dtype=torch.float64))
        own = torch.optim.SGD([*model.parameters(), temperature], lr=0.05)
        start: list[float] = []
        with handle.join(model, own, batch=BATCH, delay=delay) as run:
            for _ in run.epochs(2):
                for x, y in run.batches(DATA, size=4):
                    start.append(temperature.item())
                    run.backward(F.cross_entropy(model(x) * temperature, y))
                    run.step()
        return start[0], temperature.item()

    first, second = together(2, script)
    assert first == second and first[0] == 1.0 != first[1]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("fused", [True, False])
def test_channels_last_with_a_fused_optimizer(delay: int, fused: bool) -> None:
    torch.manual_seed(9)
    start = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3, groups=1), nn.Flatten(), nn.Linear(64, 3))
    images = torch.randn(48, 3, 8, 8)
    data = TensorDataset(images, torch.randint(0, 3, (48,)))

    def script(handle: Together) -> tuple[nn.Module, Any]:
        model: Any = copy.deepcopy(start).to(memory_format=torch.channels_last)
        own = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        with handle.join(model, own, batch=24, delay=delay) as run:
            for _ in run.epochs(1):
                for x, y in run.batches(data, size=6):
                    run.backward(F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y))
                    for p in model.parameters():
                        assert p.grad is not None and p.grad.stride() == p.stride()
                    run.step()
        return model, handle.record

    (model, record), (other, _) = together(2, script)
    assert apart(model, other) == 0.0
    if delay:
        return
    expected = copy.deepcopy(start)
    own = torch.optim.AdamW(expected.parameters(), lr=0.01)
    for outcome in record.outcomes:
        indices = epoch_order(None, 0, 0, 48)
        chosen = indices.at([p for spans in outcome.spans for begin, stop in spans for p in range(begin, stop)])
        own.zero_grad()
        F.cross_entropy(expected(images[chosen]), data.tensors[1][chosen]).backward()
        own.step()
    assert apart(model, expected) < 1e-4


# -- a pass that fails


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, refuses: bool) -> Tensor:
        ctx.refuses = refuses
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.refuses:
            raise torch.OutOfMemoryError("not enough")
        return grads[0], None


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_pass_that_fails_costs_that_workers_part_of_one_update(workers: int, delay: int, number: int) -> None:
    def script(handle: Together) -> tuple[nn.Module, Any, int]:
        model: Any = copy.deepcopy(MODEL)
        own = torch.optim.SGD(model.parameters(), lr=0.05)
        drawn = failed = 0
        with handle.join(model, own, batch=BATCH, delay=delay) as run:
            for _ in run.epochs(2):
                for x, y in run.batches(DATA, size=4):
                    fails = handle.place == 0 and drawn == number
                    drawn += 1
                    hidden = Refusing.apply(model[0](x), fails)
                    try:
                        run.backward(F.cross_entropy(model[1:](hidden), y))
                    except torch.OutOfMemoryError:
                        failed += 1
                        continue
                    run.step()
        return model, handle.record, failed

    results = together(workers, script)
    model, record, failed = results[0]
    assert failed == 1
    assert all(apart(model, other) == 0.0 for other, _, _ in results)
    assert sum(outcome.batch for outcome in record.outcomes) == 2 * len(DATA)
    spoilt = [o for o in record.outcomes if o.weight < o.batch or not o.applied]
    assert len(spoilt) == 1
