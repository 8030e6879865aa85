"""Pliant's loop as a user writes it, with the snapshots beside it.

Holds     Only the public interface is used. The batch is fixed at the reference batch, and a worker computes its share
          of it at once, as the other systems do; the leader keeps the snapshots.
"""

import pliant
from benchmarks.convergence import course as courses
from benchmarks.convergence.trainee import Trainee

DELAYS: dict[str, int | str] = {"pliant_auto": "auto", "pliant_delay_1": 1, "pliant_delay_0": 0}


def train(trainee: Trainee, name: str) -> None:
    model, course = trainee.model, trainee.course

    def order(epoch: int, length: int) -> list[int]:
        return courses.order(course.seed, epoch, length)

    steps = delayed = 0
    with pliant.join(
        model,
        trainee.optimizer,
        batch=course.batch,
        delay=DELAYS[name],
        scheduler=trainee.scheduler,
        order=order,
    ) as run:
        trainee.index = list(run.roster).index(run.worker)
        trainee.begin()
        for _ in run.epochs(course.epochs):
            for x, y in run.batches(trainee.dataset, size=course.batch):
                run.backward(trainee.loss(model, x, y))
                run.step()
                steps, delayed = steps + 1, delayed + run.delay
                if run.is_leader and trainee.due(run.samples):
                    with run.plain_weights():
                        trainee.keep(run.samples)
        if run.is_leader:
            trainee.keep(run.samples)
        trainee.end(keeper=run.is_leader, delayed=delayed / max(steps, 1))
