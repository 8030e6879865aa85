"""DistributedDataParallel with shares set by an oracle that knows every worker's present speed.

Question  How well does a synchronous group do if nothing has to be measured?
Holds     The batch is everybody's; its division makes the slowest worker's time as short as whole samples
          allow. DDP averages over workers, so each weighs its mean by share · workers / batch: the mean
          over samples is exact. In the one step at a redraw in which two workers' clocks lie on
          either side of it, the shares may add up to slightly more or less than it.
Source    LB-BSP (Chen et al. 2020), with the truth in place of its prediction.
"""

import heapq
from collections.abc import Sequence

from benchmarks.systems.torch_group import wrapped
from benchmarks.worker import Worker


def shares(batch: int, milliseconds: Sequence[float]) -> list[int]:
    """Whole shares, at least one each, that finish earliest: each sample goes to who is done first with it."""
    given = [1] * len(milliseconds)
    ends = [(2 * ms, index) for index, ms in enumerate(milliseconds)]
    heapq.heapify(ends)
    for _ in range(batch - len(milliseconds)):
        _, index = ends[0]
        given[index] += 1
        heapq.heapreplace(ends, ((given[index] + 1) * milliseconds[index], index))
    return given


def train(worker: Worker) -> None:
    model = wrapped(worker)
    batch = worker.plan.batch
    workers = worker.plan.workers

    def share() -> int:
        speeds = [worker.device_ms(index) for index in range(workers)]
        return shares(batch, speeds)[worker.index]

    for x, y in worker.batches(share):
        worker.optimizer.zero_grad()
        loss = worker.loss(model, x, y)
        (loss * (len(x) * workers / batch)).backward()
        worker.optimizer.step()
        worker.finished(len(x), updated=True)
