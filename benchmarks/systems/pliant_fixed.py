"""Pliant with a fixed batch of 64, the same as the oracle's, shared out by measured pace."""

from benchmarks.clusters import MICRO_BATCH
from benchmarks.systems import pliant_group
from benchmarks.worker import Worker, equal_share


def train(worker: Worker) -> None:
    pliant_group.train(worker, worker.plan.batch, max(equal_share(worker.plan), MICRO_BATCH))
