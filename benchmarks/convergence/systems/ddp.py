"""DistributedDataParallel with equal shares, shares by measured speed, and an oracle's shares.

Question  How does a synchronous group do, by how well it knows its workers' speeds?
Holds     Every batch is the same samples as every other system's, divided into consecutive shares. DDP averages over
          workers, so each weighs its mean by share · workers / batch: the mean over samples is exact. Small buckets, so
          that even this small model's sums begin during the backward pass. In the one step at a redraw in which two
          workers' clocks lie on either side of it, the oracle may skip or repeat a few samples.
Source    LB-BSP (Chen et al. 2020): shares by the speeds of the last rounds, measured anew every ten of them.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence.trainee import Trainee
from benchmarks.systems.oracle import shares
from benchmarks.systems.torch_group import form_group

ROUNDS = 10  # between two measurements
# Four buckets: head and last dense layer, the large dense layer, the second half of the convolutions, the first.
BUCKET_MB = 0.05

Divide = Callable[[], list[int]]


def bounds(given: list[int], index: int) -> tuple[int, int]:
    """Where this worker's share of the batch begins and ends."""
    ends = list(accumulate(given))
    return ends[index] - given[index], ends[index]


class Measured:
    """Shares by what each worker's samples took in the last ten rounds; equal ones before."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self._given = [trainee.course.share] * trainee.course.workers
        self._rounds = 0
        self._seconds = 0.0
        self._samples = 0

    def __call__(self) -> list[int]:
        if self._rounds == ROUNDS:
            mine = torch.tensor([self._seconds / self._samples], dtype=torch.float64)
            all_of_them = [torch.zeros_like(mine) for _ in self._given]
            dist.all_gather(all_of_them, mine)
            self._given = shares(self._trainee.course.batch, [float(one) for one in all_of_them])
            self._rounds, self._seconds, self._samples = 0, 0.0, 0
        return self._given

    def computed(self, samples: int) -> None:
        """The device's own time for these samples, waiting for others left out."""
        self._rounds += 1
        self._seconds += self._trainee.device.busy_s
        self._samples += samples


def train(trainee: Trainee, name: str) -> None:
    course = trainee.course
    form_group(trainee.directory, trainee.index, course.workers)
    model = DistributedDataParallel(trainee.model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)
    measured = Measured(trainee)

    def known() -> list[int]:
        return shares(course.batch, [trainee.device_ms(index) for index in range(course.workers)])

    ways: dict[str, Divide] = {
        "ddp": lambda: [course.share] * course.workers,
        "lb_bsp": measured,
        "oracle": known,
    }
    divide = ways[name]
    done = 0
    trainee.begin()
    for epoch in range(course.epochs):
        order = trainee.order(epoch)
        for first in range(0, course.images, course.batch):
            begins, ends = bounds(divide(), trainee.index)
            x, y = trainee.taken(order[first + begins : first + ends])
            trainee.optimizer.zero_grad()
            (trainee.loss(model, x, y) * (len(x) * course.workers / course.batch)).backward()
            measured.computed(len(x))
            trainee.optimizer.step()
            trainee.scheduler.step()
            done += course.batch
            if trainee.index == 0 and trainee.due(done):
                trainee.keep(done)
    trainee.end(keeper=trainee.index == 0)
