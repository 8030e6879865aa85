"""DistributedDataParallel with equal shares, synchronised only at every fourth micro-batch."""

from contextlib import nullcontext

from benchmarks.systems.torch_group import wrapped
from benchmarks.worker import Worker, equal_share

FOLD = 4


def train(worker: Worker) -> None:
    model = wrapped(worker)
    for number, (x, y) in enumerate(worker.batches(lambda: equal_share(worker.plan) // FOLD), 1):
        due = number % FOLD == 0
        with nullcontext() if due else model.no_sync():
            (worker.loss(model, x, y) / FOLD).backward()
        if due:
            worker.optimizer.step()
            worker.optimizer.zero_grad()
        worker.finished(len(x), updated=due)
