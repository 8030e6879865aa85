"""Pliant with a fixed batch, the same as the oracle's, shared out by measured pace."""

from benchmarks.systems import pliant_group
from benchmarks.worker import Worker, micro_batch


def train(worker: Worker) -> None:
    pliant_group.train(worker, worker.plan.batch, micro_batch(worker.plan))
