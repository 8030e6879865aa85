"""Pliant with delay 1 and no correction, its memory noted at the same points as the plain loop's."""

from benchmarks.clusters import MICRO_BATCH
from benchmarks.memory import note_memory
from benchmarks.systems import pliant_group
from benchmarks.worker import Worker


def train(worker: Worker) -> None:
    pliant_group.train(worker, worker.plan.batch, MICRO_BATCH, correction="none", watch=note_memory)
