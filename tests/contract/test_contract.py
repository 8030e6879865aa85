"""What holds under every rate rule, correction, delay and kind of batch."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pliant
from pliant.core.tuning.rates import NAMES, Rule, target
from pliant.testing import Together, together

SAMPLES, EPOCHS, RATE, REFERENCE = 203, 2, 0.05, 32
SIZES = (16, 7, 5)
FIXED, OPEN, BOUNDED = REFERENCE, pliant.Floating(REFERENCE), pliant.Floating(REFERENCE, at_most=64)
CASES = [
    *itertools.product((1, 0), ("lookahead", "none"), (FIXED,), ("linear",)),
    *itertools.product((1, 0), ("lookahead", "none"), (OPEN, BOUNDED), NAMES),
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads of torch would fight with the threads of the group."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rule", NAMES)
@pytest.mark.parametrize("noise_scale", [None, 0.0, 3.0, 1e9, math.inf])
def test_a_rule_is_one_at_the_reference_positive_and_monotone(rule: str, noise_scale: float | None) -> None:
    def factor(k: float) -> float:
        return target(Rule(rule), k, reference=REFERENCE, noise_scale=noise_scale)

    factors = [factor(2.0**exponent) for exponent in range(-10, 11)]
    assert factor(1.0) == 1.0
    assert all(factor > 0.0 for factor in factors)
    assert factors == sorted(factors)
    # Never faster than the batch: an update on twice the samples is at most twice as long.
    assert all(after <= 2.0 * before for before, after in itertools.pairwise(factors))


def digest(tensors: Iterable[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def state_digest(optimizer: torch.optim.Optimizer) -> str:
    states: Iterable[Mapping[str, Any]] = optimizer.state_dict()["state"].values()
    return digest(value for state in states for value in state.values() if isinstance(value, Tensor))


def attributes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything by which one could tell that somebody has put his hands on them."""
    modules = list(model.modules())
    hooks = [name for name in vars(model) if name.endswith("_hooks")]
    return [
        [sorted(vars(module)) for module in modules],
        [[len(vars(module)[name]) for name in hooks] for module in modules],
        [sorted(vars(p)) for p in model.parameters()],
        [len(p._backward_hooks or ()) for p in model.parameters()],
        sorted(vars(optimizer)),
        [sorted(group) for group in optimizer.param_groups],
        [type(model), model.forward.__func__, type(optimizer), [id(p) for p in model.parameters()]],
        [id(p) for group in optimizer.param_groups for p in group["params"]],
    ]


def hooks_of(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@dataclass
class Seen:
    """What one worker's script noticed."""

    updates: dict[int, tuple[str, str, int, int, float, float]] = field(default_factory=dict)
    """round: weights, optimizer state, samples, batch, rate, progress at a True of ``step``"""
    plain: dict[int, str] = field(default_factory=dict)
    drains: list[tuple[str, str, int, float]] = field(default_factory=list)
    """weights and buffers, optimizer state, samples, progress behind each loop"""
    drawn: int = 0
    ahead: int = 0
    record: Any = None


def trained(initial: nn.Module, handle: Together, **settings: Any) -> Seen:
    """Train, and check on the way what one worker can check by itself."""
    model, seen = copy.deepcopy(initial), Seen(record=handle.record)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-3)
    untouched, places = attributes(model, optimizer), [p.data_ptr() for p in model.parameters()]
    with handle.join(model, optimizer, **settings) as run:
        assert (run.samples, run.round, run.progress, run.batch, run.rate) == (0, 0, 0.0, REFERENCE, RATE)
        assert (run.worker, run.is_leader, run.era) == (run.roster[handle.place], handle.place == 0, 1)
        for epoch in run.epochs(EPOCHS):
            for x, y in run.batches(dataset(), size=SIZES[handle.place]):
                seen.drawn += len(y)
                note_plain_weights(run, model, seen)
                run.backward(F.cross_entropy(model(x), y))
                updated = run.step()
                note_plain_weights(run, model, seen)
                assert [p.data_ptr() for p in model.parameters()] == places
                assert epoch <= run.progress <= epoch + 1
                if updated:
                    facts = (run.samples, run.batch, run.rate, run.progress)
                    seen.updates[run.round] = (digest(model.parameters()), state_digest(optimizer), *facts)
                    assert seen.updates[run.round][0] == seen.plain[run.round]
            everything = digest([*model.parameters(), *model.buffers()])
            seen.drains.append((everything, state_digest(optimizer), run.samples, run.progress))
            assert attributes(model, optimizer) == untouched
    assert attributes(model, optimizer) == untouched
    assert hooks_of(optimizer) == 0
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(p.grad is None for p in model.parameters())
    assert digest([*model.parameters(), *model.buffers()]) == seen.drains[-1][0]
    assert optimizer.param_groups[0]["lr"] == RATE
    return seen


def note_plain_weights(run: pliant.Run, model: nn.Module, seen: Seen) -> None:
    """The plain weights of a round are the same at any moment, and looking at them changes nothing."""
    held = digest([*model.parameters(), *model.buffers()])
    with run.plain_weights():
        plain = digest(model.parameters())
        seen.ahead += digest([*model.parameters(), *model.buffers()]) != held
    assert digest([*model.parameters(), *model.buffers()]) == held
    assert seen.plain.setdefault(run.round, plain) == plain


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


@pytest.mark.parametrize(("delay", "correction", "batch", "rule"), CASES)
def test_the_contract(delay: int, correction: str, batch: Any, rule: str) -> None:
    torch.manual_seed(3)
    initial = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 3))

    def script(handle: Together) -> Seen:
        return trained(initial, handle, batch=batch, delay=delay, correction=correction, rates=rule)

    workers: list[Seen] = together(3, script, paces=(1.0, 0.5, 0.25))
    first = workers[0]
    assert sum(seen.drawn for seen in workers) == EPOCHS * SAMPLES
    assert any(seen.updates for seen in workers)
    for seen in workers:
        assert seen.drains == first.drains
        for number in seen.updates.keys() & first.updates.keys():
            assert seen.updates[number] == first.updates[number]
        for number in seen.plain.keys() & first.plain.keys():
            assert seen.plain[number] == first.plain[number]
        check_facts(seen, rule if isinstance(batch, pliant.Floating) else "constant")
    if delay == 0 or correction == "none":
        assert not any(seen.ahead for seen in workers)
    else:
        assert any(seen.ahead for seen in workers)


def check_facts(seen: Seen, rule: str) -> None:
    """What ``run`` said at each update is what the group settled."""
    outcomes, total = seen.record.outcomes, 0
    assert [outcome.round for outcome in outcomes] == list(range(1, len(outcomes) + 1))
    for outcome, rate in zip(outcomes, seen.record.rates, strict=True):
        epoch, _ = divmod(total, SAMPLES)
        total += outcome.batch
        assert rate == pytest.approx(RATE * outcome.factor)
        if rule == "constant":
            assert outcome.factor == 1.0
        if outcome.round in seen.updates:
            progress = epoch + (total - epoch * SAMPLES) / SAMPLES
            assert seen.updates[outcome.round][2:] == (total, outcome.batch, rate, pytest.approx(progress))
    assert [drain[2:] for drain in seen.drains] == [(SAMPLES, 1.0), (2 * SAMPLES, 2.0)]


def test_statistics_are_merged_at_every_drain() -> None:
    torch.manual_seed(3)
    initial = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    for delay, batch in itertools.product((1, 0), (FIXED, OPEN)):

        def script(handle: Together, delay: int = delay, batch: Any = batch) -> Seen:
            return trained(initial, handle, batch=batch, delay=delay)

        workers = together(3, script, paces=(1.0, 0.5, 0.25))
        assert all(seen.drains == workers[0].drains for seen in workers)


class Average:
    """An object with a state, as users bring them."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def test_everybody_takes_over_the_leaders_state() -> None:
    # Made one after another here: torch's generator belongs to the process, not to a thread.
    models = [nn.Linear(6, 3) for _ in range(3)]
    expected = digest(models[0].parameters())
    assert digest(models[1].parameters()) != expected

    def script(handle: Together) -> tuple[Any, ...]:
        model, average = models[handle.place], Average(float(handle.place + 7))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (handle.place + 1))
        with handle.join(model, optimizer, batch=4, state={"average": average, "best": handle.place}) as run:
            assert run.state["average"] is average
            return digest(model.parameters()), average.value, run.state["best"], optimizer.param_groups[0]["lr"]

    assert set(together(3, script)) == {(expected, 7.0, 0, 0.1)}
