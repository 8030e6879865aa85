"""DistributedDataParallel with equal shares, one forward and backward pass per update."""

from benchmarks.systems.torch_group import wrapped
from benchmarks.worker import Worker, equal_share


def train(worker: Worker) -> None:
    model = wrapped(worker)
    for x, y in worker.batches(lambda: equal_share(worker.plan)):
        worker.optimizer.zero_grad()
        worker.loss(model, x, y).backward()
        worker.optimizer.step()
        worker.finished(len(x), updated=True)
