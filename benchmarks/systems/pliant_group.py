"""Pliant's loop as a user writes it, with the meter beside it.

Question  How much of the workers' time does Pliant turn into training?
Holds     Only the public interface is used. A sample counts on the worker that computed it when
          ``step`` returns; the engine's accounting puts each into exactly one update.
"""

from collections.abc import Callable

import pliant
from benchmarks.worker import Worker

EPOCHS = 1_000_000


def unwatched(worker: Worker) -> None:
    """Nothing is looked at between the calls."""


def train(
    worker: Worker,
    batch: int | pliant.Floating,
    size: int,
    *,
    correction: str = "lookahead",
    watch: Callable[[Worker], None] = unwatched,
) -> None:
    """Train until the runner has all counts; then one worker's ``break`` ends the phase for all."""
    model = worker.model
    with pliant.join(model, worker.optimizer, batch=batch, delay=1, correction=correction) as run:
        worker.index = list(run.roster).index(run.worker)
        for _ in run.epochs(EPOCHS):
            for x, y in run.batches(worker.dataset, size=size):
                run.backward(worker.loss(model, x, y))
                watch(worker)
                updated = run.step()
                watch(worker)
                worker.finished(len(x), updated=updated)
                if worker.stopped:
                    break
            if worker.stopped:
                break
