"""The smallest script: two spirals that a small network tells apart.

python examples/minimal.py    or, with four workers:    pliant run -n 4 examples/minimal.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pliant

torch.manual_seed(0)
torch.set_num_threads(1)  # a second thread gains nothing here
turns, label = 4 * torch.rand(4000, 1) + 0.5, torch.arange(4000) % 2
angle = 2.5 * turns + torch.pi * label.unsqueeze(1)
spirals = TensorDataset(torch.cat([turns * angle.cos(), turns * angle.sin()], 1) + 0.1 * torch.randn(4000, 2), label)
train_set, test_set = torch.utils.data.random_split(spirals, [3600, 400])

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with pliant.join(model, optimizer, batch=64) as run:
    for epoch in run.epochs(6):
        for x, y in run.batches(train_set, size=16):
            run.backward(F.cross_entropy(model(x), y))
            run.step()
        accuracy = run.evaluate(lambda b: ((model(b[0]).argmax(1) == b[1]).sum(), len(b[1])), test_set, size=100)
        if run.is_leader:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}")
