"""The look-ahead point is where the optimizer's own step would go."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from pliant.tensors.lookahead import LookAhead

DECOUPLED = "decoupled_weight_decay"


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("told", [True, False], ids=["its groups say so", "as on torch 2.6"])
def test_weight_decay_is_decoupled_as_in_the_optimizers_own_step(kind: type[Adam], told: bool) -> None:
    """Before torch 2.7 the groups of Adam and AdamW do not say whether it is."""
    torch.manual_seed(1)
    model = nn.Linear(7, 5).double()
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.3)
    model(torch.randn(4, 7).double()).square().mean().backward()
    optimizer.step()
    gradients = [torch.randn_like(p) for p in model.parameters()]
    stepped, stepping = copy.deepcopy((model, optimizer))
    for p, gradient in zip(stepped.parameters(), gradients, strict=True):
        p.grad = gradient * 0.25
    stepping.step()

    for group in optimizer.param_groups if not told else ():
        group.pop(DECOUPLED, None)
    plain = [p.detach().clone() for p in model.parameters()]
    lookahead = LookAhead(optimizer, list(model.parameters()))
    lookahead.park(gradients, 0b11, 0.25)
    lookahead.go([{"lr": group["lr"]} for group in optimizer.param_groups])
    for p, expected in zip(model.parameters(), stepped.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-12, atol=1e-12)
    lookahead.back()
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), plain, strict=True))
