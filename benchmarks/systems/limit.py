"""The physical limit: the very same workers side by side, each training on its own.

Question  How many samples/s do these processes reach on this machine if nobody communicates?
Holds     One optimizer step per micro-batch. A set of one worker gives the solo speeds.
"""

from benchmarks.clusters import MICRO_BATCH
from benchmarks.worker import Worker


def train(worker: Worker) -> None:
    for x, y in worker.batches(lambda: MICRO_BATCH):
        worker.optimizer.zero_grad()
        worker.loss(worker.model, x, y).backward()
        worker.optimizer.step()
        worker.finished(len(x), updated=True)
