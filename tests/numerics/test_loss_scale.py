"""The loss scale moves between rounds, and gradients do not notice: worker.script.loss_scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from numerics.trainings import training_of
from pliant.core.rounds import Settled
from pliant.core.tickets import Kind
from pliant.testing import Together, together


def settled(**changes: Any) -> Settled:
    fields: dict[str, Any] = {"applied": True, "weight": 8.0, "factor": 1.0, "finite": True, **changes}
    return Settled(phase=1, kind=Kind.TRAIN, round=1, batch=8, loss=1.0, spans=(), seen=True, ended=False, **fields)


def test_a_contribution_that_was_begun_at_another_scale_is_divided_by_one() -> None:
    """Its share has grown, so that it is not handed in before the round in flight is applied."""
    model = nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    training = training_of(model, torch.optim.SGD(model.parameters(), lr=0.0), scaler=scaler)
    x = torch.randn(8, 3)
    for moved, outcome in ((2.0, settled()), (1.0, settled(applied=False, finite=False))):
        training.backward(model(x).square().mean(), 8.0)
        assert training.unscale() is not None
        flying = training.gradients.hand_in(overlap=True, returning=False)
        training.backward(model(x[:4]).square().mean(), 4.0)
        training.apply(outcome, flying, 0b11)
        assert training.scale == scaler.get_scale() == 256.0 * moved
        training.backward(model(x[4:]).square().mean(), 4.0)
        training.unscale()
        assert training.gradients.filling is not None
        got = training.gradients.filling.views[0].clone()
        training.gradients.discard()
        expected = torch.autograd.grad(model(x).square().mean(), model.weight)[0]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    training.close()


def test_a_layer_that_is_not_in_the_layout_yet_is_divided_by_one_scale_too() -> None:
    """It was unfrozen, and the group's agreement to that comes with the round whose update moves the scale."""
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    training = training_of(model, torch.optim.SGD(model.parameters(), lr=0.0), scaler=scaler)
    x = torch.randn(8, 3)
    training.backward(model(x).square().mean(), 8.0)
    assert training.unscale() is not None
    flying = training.gradients.hand_in(overlap=True, returning=False)
    model[0].requires_grad_(True)
    training.backward(model(x[:4]).square().mean(), 4.0)
    training.apply(settled(), flying, 0b1100)
    assert training.scale == 512.0
    training.backward(model(x[4:]).square().mean(), 4.0)
    training.gradients.lay_out(training.look())
    training.unscale()
    assert training.gradients.filling is not None
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for view, gradient in zip(training.gradients.filling.views, expected, strict=True):
        torch.testing.assert_close(view, gradient, rtol=1e-12, atol=1e-12)
    training.close()


def test_a_round_without_any_weight_says_nothing_about_the_scale() -> None:
    samples = [(torch.randn(6), 0) for _ in range(48)]

    def script(handle: Together) -> Any:
        model = nn.Linear(6, 3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
        with handle.join(model, torch.optim.SGD(model.parameters(), lr=0.01), batch=8, scaler=scaler) as run:
            for _ in run.epochs(1):
                for x, y in run.batches(samples, size=4):
                    # Nothing but padding, here and there.
                    run.backward(F.cross_entropy(model(x), y), weight=0.0 if run.round in (1, 2) else len(x))
                    run.step()
        return scaler.get_scale(), {outcome.applied for outcome in handle.record.outcomes}

    assert together(2, script) == [(256.0, {True, False})] * 2


def test_everybody_begins_with_the_leaders_scale() -> None:
    def script(handle: Together) -> Any:
        model = nn.Linear(6, 3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + handle.place), growth_interval=100)
        with handle.join(model, torch.optim.SGD(model.parameters(), lr=0.01), batch=8, scaler=scaler) as run:
            for _ in run.epochs(1):
                for x, y in run.batches([(torch.randn(6), 0)] * 16, size=4):
                    run.backward(F.cross_entropy(model(x), y))
                    run.step()
        return scaler.state_dict()["scale"], {t.scale for row in handle.record.tickets for t in row}

    assert together(2, script) == [(256.0, {256.0})] * 2
