"""Local SGD: eight steps on one's own, then the parameters are averaged (torch's own averager)."""

from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks.clusters import MICRO_BATCH
from benchmarks.systems.torch_group import form_group
from benchmarks.worker import Worker

PERIOD = 8


def train(worker: Worker) -> None:
    form_group(worker.directory, worker.index, worker.plan.workers)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    for number, (x, y) in enumerate(worker.batches(lambda: MICRO_BATCH)):
        worker.optimizer.zero_grad()
        worker.loss(worker.model, x, y).backward()
        worker.optimizer.step()
        averager.average_parameters(worker.model.parameters())
        worker.finished(len(x), updated=number % PERIOD == 0)
