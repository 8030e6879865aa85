"""Pliant with a floating batch: a round holds what the workers computed while the last one was summed."""

import pliant
from benchmarks.systems import pliant_group
from benchmarks.worker import Worker, micro_batch

# Far above what a round gathers here: the bound is there for the learning rate, not for the speed.
AT_MOST = 4096


def train(worker: Worker) -> None:
    batch = pliant.Floating(reference=worker.plan.batch, at_most=AT_MOST)
    pliant_group.train(worker, batch, micro_batch(worker.plan))
