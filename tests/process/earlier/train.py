"""The script of the runs beside it, by a Pliant whose epochs were permutations drawn as a whole."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pliant

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
generator = torch.Generator().manual_seed(5)
x = torch.randn(70, 4, generator=generator)
train_set = TensorDataset(x[:50], (x[:50, 0] > x[:50, 1]).long())
test_set = TensorDataset(x[50:], (x[50:, 0] > x[50:, 1]).long())
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def hits(batch: list[Tensor]) -> tuple[Tensor, int]:
    return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])


def given(epoch: int, n: int) -> list[int]:
    """Some samples come twice."""
    return [(7 * k + epoch) % n for k in range(n + 6)]


with pliant.join(model, optimizer, batch=10, delay=1, seed=17, order=given if "given" in sys.argv else None) as run:
    for _ in run.epochs(3):
        for inputs, targets in run.batches(train_set, size=3):
            run.backward(F.cross_entropy(model(inputs), targets))
            run.step()
        run.evaluate(hits, test_set, size=4)
