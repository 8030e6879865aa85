"""Local SGD: eight steps on one's own, then the parameters are averaged (torch's own averager).

Holds     A local step has the equal share of the reference batch, so that all workers together make one reference batch
          per step; the linear rule then gives the reference learning rate (scaled by workers × local batch, as Lin et
          al. 2020 have it). Scaling by the local batch alone would move the average a quarter as far per sample.
          Snapshots are taken right after an averaging; one more of them ends the run.
"""

import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from benchmarks.convergence.trainee import Trainee
from benchmarks.systems.local_sgd import PERIOD
from benchmarks.systems.torch_group import form_group


def train(trainee: Trainee, name: str) -> None:
    course, model = trainee.course, trainee.model
    form_group(trainee.directory, trainee.index, course.workers)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    keeper = trainee.index == 0
    done = 0
    trainee.begin()
    for epoch in range(course.epochs):
        order = trainee.order(epoch)
        for first in range(0, course.images, course.batch):
            begins = first + trainee.index * course.share
            x, y = trainee.taken(order[begins : begins + course.share])
            trainee.optimizer.zero_grad()
            trainee.loss(model, x, y).backward()
            trainee.optimizer.step()
            trainee.scheduler.step()
            averager.average_parameters(model.parameters())
            averaged = done // course.batch % PERIOD == 0
            done += course.batch
            if keeper and averaged and trainee.due(done):
                trainee.keep(done)
    assert dist.group.WORLD is not None
    average_parameters(model.parameters(), dist.group.WORLD)
    if keeper:
        trainee.keep(done)
    trainee.end(keeper=keeper)
