"""torchft over gloo: its DistributedDataParallel, each worker a replica group of its own, equal shares.

Holds     A step that was not committed is done again with the same samples. Its sums wait within the backward pass
          whatever the buckets, so that they are as torch chooses them.
"""

from pathlib import Path

from benchmarks.convergence import course as courses
from benchmarks.convergence.trainee import Trainee
from benchmarks.systems.torchft import control, library, own_store, serve_lighthouse


def serve(directory: Path) -> None:
    course = courses.read(directory)
    serve_lighthouse(directory, course.workers, course.addresses[0])


def train(trainee: Trainee, name: str) -> None:
    torchft, course = library(), trainee.course
    store = own_store(course.addresses[trainee.index])
    manager = control(trainee.directory, trainee.model, trainee.index, course.workers, store)
    model = torchft.DistributedDataParallel(manager, trainee.model)
    optimizer = torchft.Optimizer(manager, trainee.optimizer)
    per_epoch = course.images // course.batch
    orders = [trainee.order(epoch) for epoch in range(course.epochs)]
    trainee.begin()
    while (step := manager.current_step()) < per_epoch * course.epochs:
        begins = step % per_epoch * course.batch + trainee.index * course.share
        x, y = trainee.taken(orders[step // per_epoch][begins : begins + course.share])
        optimizer.zero_grad()
        trainee.loss(model, x, y).backward()
        optimizer.step()
        if manager.current_step() == step:
            continue
        trainee.scheduler.step()
        if trainee.index == 0 and trainee.due((step + 1) * course.batch):
            trainee.keep((step + 1) * course.batch)
    trainee.end(keeper=trainee.index == 0)
