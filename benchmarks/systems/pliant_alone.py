"""Pliant with no job: one worker, one micro-batch per update, the same loop as in a group."""

from benchmarks.systems import pliant_group
from benchmarks.worker import Worker


def train(worker: Worker) -> None:
    pliant_group.train(worker, worker.plan.batch, worker.plan.batch)
