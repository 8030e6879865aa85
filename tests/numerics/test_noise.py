"""The gradient's noise as the group's tickets tell it is what one process computes by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pliant
from pliant.core.tickets import Kind
from pliant.core.tuning import noise
from pliant.testing import Together, together

SAMPLES, REFERENCE, EPOCHS = 600, 24, 2


class Model(nn.Module):
    """Two heads; the second one is used by every third micro-batch only, and one layer by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.head(hidden) + (self.other(hidden) if both else 0.0)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long() + torch.randint(0, 2, (SAMPLES,), generator=generator))


Part = tuple[Tensor, float, int]
"""weight times gradient, weight, samples"""


def script(initial: nn.Module, tokens: bool, **settings: Any) -> Any:
    def run_script(handle: Together) -> tuple[list[Part], Any, list[float | None]]:
        model = copy.deepcopy(initial)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        computed: list[Part] = []
        scales: list[float | None] = []
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if settings.pop("scaled", False) else None
        with handle.join(model, optimizer, scaler=scaler, **settings) as run:
            for _ in run.epochs(EPOCHS):
                for x, y in run.batches(dataset(), size=(9, 5, 3)[handle.place]):
                    loss = F.cross_entropy(model(x, len(computed) % 3 == 0), y)
                    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
                    flat = [
                        torch.zeros(p.numel()) if g is None else g.flatten()
                        for p, g in zip(parameters, gradients, strict=True)
                    ]
                    weight = float(1 + y.sum()) if tokens else float(len(y))
                    computed.append((weight * torch.cat([each.double() for each in flat]), weight, len(y)))
                    run.backward(loss, weight=weight)
                    run.step()
            run.evaluate(lambda batch: (len(batch[1]), len(batch[1])), dataset(), size=50)
            scales.append(run.noise_scale)
        return computed, handle.record, scales

    return run_script


def by_hand(parts: list[list[Part]], reference: int) -> tuple[list[float], float, float, float]:
    """Each worker's |g_i|², |g|², and the weighted mean of the workers' own estimates of S and G².

    Every worker gives one by the two batch sizes, S_i = (|g_i|² − |g|²) / (1/n_i − A) with A the group's 1/B (for
    weights that are not samples: Σ p_i²/n_i), weighted by p_i (1/n_i − A).
    """
    sums = [(sum(p[0] for p in part), sum(p[1] for p in part), sum(p[2] for p in part)) for part in parts if part]
    whole = sum(weight for _, weight, _ in sums)
    mean = sum(total for total, _, _ in sums) / whole
    square = float(mean @ mean)
    own = [float((total / weight) @ (total / weight)) for total, weight, _ in sums]
    inverse = sum((weight / whole) ** 2 / count for _, weight, count in sums)
    importance = [weight / whole * (1 / count - inverse) for _, weight, count in sums]
    estimates = [(o - square) / (1 / count - inverse) for o, (_, _, count) in zip(own, sums, strict=True)]
    variance = sum(i * e for i, e in zip(importance, estimates, strict=True)) / sum(importance)
    return own, square, variance, square - variance * inverse


@pytest.mark.parametrize(
    ("delay", "tokens", "settings"),
    [
        (0, False, {}),
        (1, False, {}),
        (1, True, {}),
        (1, False, {"clip_norm": 0.05}),
        (1, False, {"scaled": True}),
        (1, False, {"floating": True, "rates": "adascale"}),
    ],
)
def test_three_unequal_workers_tell_what_one_process_computes(
    delay: int, tokens: bool, settings: dict[str, Any]
) -> None:
    given = dict(settings)
    batch = pliant.Floating(REFERENCE) if given.pop("floating", False) else REFERENCE
    results = together(
        3, lambda handle: script(Model(), tokens, batch=batch, delay=delay, **given)(handle), paces=(1.0, 0.6, 0.3)
    )
    record = results[0][1]
    trained = [pair for pair in zip(record.outcomes, record.tickets, strict=True) if pair[0].kind is Kind.TRAIN]
    fronts, mean_variance, mean_signal, weight, last = [0, 0, 0], 0.0, 0.0, 0.0, 0
    squares: dict[int, tuple[float, float, float, int, int]] = {}
    total = 0
    measured = 0
    for outcome, tickets in trained:
        parts: list[list[Part]] = []
        for member, ticket in enumerate(tickets):
            parts.append(results[member][0][fronts[member] : fronts[member] + ticket.micro_batches])
            fronts[member] += ticket.micro_batches
        own, square, variance, signal = by_hand(parts, REFERENCE) if sum(map(bool, parts)) > 1 else ([], 0.0, 0.0, 0.0)
        working = [ticket for ticket in tickets if ticket.samples]
        if own:
            assert [ticket.squared_norm for ticket in working] == pytest.approx(own, rel=1e-9)
        total += outcome.batch
        if outcome.measured is not None:
            number, told = outcome.measured
            expected, variance_then, signal_then, samples_then, batch_then = squares[number]
            assert told == pytest.approx(expected, rel=1e-9)
            # The mean that the group keeps, written down again.
            passed = samples_then - last
            added = min(passed, noise.STRIDE * batch_then) / (1000.0 * REFERENCE)
            weight = (1.0 - passed / (1000.0 * REFERENCE)) * weight
            mean_variance = (weight * mean_variance + added * variance_then) / (weight + added)
            mean_signal = (weight * mean_signal + added * signal_then) / (weight + added)
            weight, last, measured = weight + added, samples_then, measured + 1
        if outcome.measures:
            squares[outcome.round] = square, variance, signal, total, outcome.batch
    assert fronts == [len(computed) for computed, _, _ in results]
    assert measured >= noise.ENOUGH
    expected_scale = mean_variance / mean_signal if mean_signal > 0 else math.inf
    for _, _, scales in results:
        assert scales[-1] == pytest.approx(expected_scale, rel=1e-6)


def test_alone_the_noise_is_unknown() -> None:
    ((_, _, scales),) = together(1, script(Model(), False, batch=REFERENCE))
    assert scales == [None]
