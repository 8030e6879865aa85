"""The plain loop, with its memory noted after the backward pass and after the update."""

from benchmarks.clusters import MICRO_BATCH
from benchmarks.memory import note_memory
from benchmarks.worker import Worker


def train(worker: Worker) -> None:
    for x, y in worker.batches(lambda: MICRO_BATCH):
        worker.optimizer.zero_grad()
        worker.loss(worker.model, x, y).backward()
        note_memory(worker)
        worker.optimizer.step()
        note_memory(worker)
        worker.finished(len(x), updated=True)
