"""How the rivals that use torch.distributed form their group: gloo over loopback."""

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.worker import Worker


def form_group(directory: Path, index: int, workers: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=index,
        world_size=workers,
        timeout=timedelta(seconds=60),
    )


def wrapped(worker: Worker) -> DistributedDataParallel:
    """DDP at its best here: no copy between gradients and buckets, buckets as torch chooses them."""
    form_group(worker.directory, worker.index, worker.plan.workers)
    return DistributedDataParallel(worker.model, gradient_as_bucket_view=True)
