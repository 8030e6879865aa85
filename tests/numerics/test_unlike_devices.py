"""Workers that compute otherwise than others (another processor, a GPU among CPUs) have their weights compared, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from pliant.core.tickets import Kind
from pliant.errors import Drifted
from pliant.testing import Together, together

ROUNDS = 40
"""Every worker is compared in rounds 1, 2, 4, 8, 16 and 32."""


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(96, 6, generator=generator), torch.randint(0, 3, (96,), generator=generator))


def trained(workers: int, other: int, change: float, delay: int, handles: list[Together] | None = None) -> None:
    """A group in which the worker ``other`` is of another kind, and adds ``change`` to a layer with each update."""

    def script(handle: Together) -> Any:
        torch.manual_seed(4)
        first = nn.Linear(6, 8)
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if handles is not None:
            handles.append(handle)
        with handle.join(model, optimizer, batch=24, delay=delay) as run:
            if handle.place == other:
                run._worker.training.fingerprint.arithmetic += 1

                def apart(*_: Any) -> None:
                    with torch.no_grad():
                        first.weight[:, ::2] += change

                optimizer.register_step_post_hook(apart)
            for _ in run.epochs(steps=ROUNDS):
                for x, y in run.batches(samples(), 4):
                    run.backward(F.cross_entropy(model(x), y))
                    run.step()

    together(workers, script)


# Of three the others are right, of two the first.
@pytest.mark.parametrize(("workers", "other"), [(3, 0), (3, 2), (2, 1)])
@pytest.mark.parametrize("delay", [0, 1])
def test_one_of_its_kind_that_drifts_is_named(workers: int, other: int, delay: int) -> None:
    with pytest.raises(Drifted, match=f"^w{other}'s weights differ from the others' after round"):
        trained(workers, other, 0.02, delay)


@pytest.mark.parametrize("delay", [0, 1])
def test_rounding_is_no_drift(delay: int) -> None:
    handles: list[Together] = []
    trained(3, 1, 1e-7, delay, handles)
    settled = [outcome for outcome in handles[0].record.outcomes if outcome.kind is Kind.TRAIN]
    assert len(settled) >= ROUNDS and not any(outcome.drift for outcome in settled)
    assert len({ticket.arithmetic for ticket in handles[0].record.tickets[-1]}) == 2
