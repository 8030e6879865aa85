"""``python -m benchmarks.lab.member SEED DIRECTORY``: a worker of a real elastic run on the lab's data and model.

Holds     Initial weights, order of samples, optimizer and schedule of a seed are those of the lab. Whoever comes to
          the end writes what it reached.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import pliant
from benchmarks.lab import data, models, traces
from benchmarks.lab.elastic import MODEL, RATES, SAMPLES
from benchmarks.lab.trainer import Plan, optimizer_of, orders, scheduled

MICRO_BATCH = 32
DEVICE_S = 0.04  # of a micro-batch: what is there to compute would be over before a newcomer has come
EPOCHS = SAMPLES // data.TRAINED


def plan(rounds: tuple[tuple[int, ...], ...]) -> Plan:
    """The lab's plan for rounds of these shares."""
    return Plan(
        model=MODEL, optimizer="sgd", rate=RATES["sgd"], rounds=rounds, reference=traces.REFERENCE, rule="linear"
    )


def main() -> None:
    seed, directory = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    ready = models.prepared(MODEL, data.images())
    model = models.build(MODEL, [seed])
    shared = plan(((SAMPLES,),))
    optimizer = optimizer_of(shared, list(model.parameters()))
    scheduler = LambdaLR(optimizer, lambda step: scheduled(shared, step * shared.reference) / shared.rate)
    length = len(ready.inputs)
    order = orders([seed], length, SAMPLES)[0].view(EPOCHS, length).tolist()
    (directory / f"pid-{os.getpid()}").touch()
    with pliant.join(
        model,
        optimizer,
        batch=pliant.Floating(traces.REFERENCE, at_most=traces.REFERENCE * traces.MOST),
        rates=shared.rule,
        delay=1,
        scheduler=scheduler,
        order=lambda epoch, n: order[epoch],
    ) as run:
        for _ in run.epochs(EPOCHS):
            for inputs, targets in run.batches(TensorDataset(ready.inputs, ready.targets), size=MICRO_BATCH):
                time.sleep(DEVICE_S)
                run.backward(model.losses(inputs[None], targets[None]).mean())
                run.step()
    right, loss = model.judged(ready.held_inputs, ready.held_targets)
    reached = json.dumps({"accuracy": float(right[0]) * 100, "loss": float(loss[0])})
    (directory / f"reached-{os.getpid()}.json").write_text(reached)


if __name__ == "__main__":
    main()
