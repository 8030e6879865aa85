"""Pliant's loop as a user writes it, with a stamp per micro-batch.

Question  When does each worker see an update, while others come, go and are away?
Holds     Only the public interface is used. The group's progress is ``run.samples``: it grows with every update and
          with nothing else. The loop ends for all when the runner leaves a file called ``stop``.
"""

import threading
import time
from pathlib import Path

import torch

import pliant
from benchmarks.clusters import MICRO_BATCH
from benchmarks.recovery import options as recovery_options
from benchmarks.recovery import orders
from benchmarks.recovery.stamps import Stamps, Step, View
from benchmarks.worker import Worker

EPOCHS = 1_000_000


def train(worker: Worker) -> None:
    options = recovery_options.read(worker.directory)
    model, stop = worker.model, worker.directory / "stop"
    if options.frozen_mb:
        # Weights that are handed on but never summed, as of a model of which only a part is trained.
        model.register_buffer("frozen", torch.ones(options.frozen_mb * 2**18))
    stamps = Stamps(worker.directory)
    stamps.ready()
    with pliant.join(
        model,
        worker.optimizer,
        batch=worker.plan.batch,
        delay=1,
        dead_after=options.dead_after_s,
        hung_after=options.hung_after_s,
    ) as run:
        for _ in run.epochs(EPOCHS):
            for x, y in run.batches(worker.dataset, size=MICRO_BATCH):
                begins, before = time.monotonic(), View(run.era, run.samples)
                run.backward(worker.loss(model, x, y))
                computed = time.monotonic()
                updated = run.step()
                ends, after = time.monotonic(), View(run.era, run.samples)
                stamps.step(Step(run.worker, run.is_leader, begins, computed, ends, before, after, len(x)))
                if updated:
                    _obey(run, worker.directory, stamps)
                if stop.exists():
                    break
            if stop.exists():
                break


def _obey(run: pliant.Run, directory: Path, stamps: Stamps) -> None:
    """Do what the runner wants of this worker: between two updates, where users save and log."""
    order = orders.taken(directory)
    if order is None:
        return
    stamps.away(run.round)
    if order.what == "hang":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    with run.busy("saving"):
        # A slow disk, or an upload; how long it will take nobody has told.
        time.sleep(order.seconds)
        run.save(directory / orders.SAVED)
    stamps.back()
