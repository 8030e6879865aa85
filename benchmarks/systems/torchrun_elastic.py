"""DistributedDataParallel under torchrun: any change restarts every worker from the last checkpoint.

Question  When does each worker make a step, while one of them is killed?
Holds     The usual script: group over gloo from torchrun's environment, DDP, a checkpoint by the first worker every
          second, read at the start. Its restarts are counted by torchrun and are the eras here.
"""

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.clusters import MICRO_BATCH
from benchmarks.recovery import options as recovery_options
from benchmarks.recovery.stamps import Stamps, Step, View
from benchmarks.worker import Worker

CHECKPOINT_S = 1.0
TIGHT_S = 2.0  # of collectives; above the time that four restarted workers need to meet


def train(worker: Worker) -> None:
    stamps = Stamps(worker.directory)
    stamps.ready()
    tight = recovery_options.read(worker.directory).tight
    chosen: dict[str, Any] = {"timeout": timedelta(seconds=TIGHT_S)} if tight else {}
    dist.init_process_group("gloo", **chosen)
    worker.index = dist.get_rank()
    era = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = DistributedDataParallel(worker.model, gradient_as_bucket_view=True)
    steps, saved_s = _resumed(worker), time.monotonic()
    for x, y in worker.batches(lambda: MICRO_BATCH):
        begins, before = time.monotonic(), View(era, steps)
        worker.optimizer.zero_grad()
        worker.loss(model, x, y).backward()
        computed = time.monotonic()
        worker.optimizer.step()
        steps += 1
        name = f"rank_{worker.index}"
        stamps.step(Step(name, False, begins, computed, time.monotonic(), before, View(era, steps), len(x)))
        if worker.index == 0 and time.monotonic() - saved_s > CHECKPOINT_S:
            _save(worker, steps)
            saved_s = time.monotonic()


def _save(worker: Worker, steps: int) -> None:
    partial = worker.directory / "checkpoint.partial"
    torch.save(
        {"model": worker.model.state_dict(), "optimizer": worker.optimizer.state_dict(), "steps": steps}, partial
    )
    partial.rename(worker.directory / "checkpoint")


def _resumed(worker: Worker) -> int:
    """The checkpoint's step; 0 at the first start."""
    path = worker.directory / "checkpoint"
    if not path.exists():
        return 0
    found = torch.load(path)
    worker.model.load_state_dict(found["model"])
    worker.optimizer.load_state_dict(found["optimizer"])
    return int(found["steps"])
