"""The demo's baseline: the same training by torch's DistributedDataParallel, with equal shares.

Question  How fast is DDP on the same unequal workers?
Holds     The device is emulated as by ``pliant run --pace``: after each micro-batch a sleep in proportion to its
          thread CPU time. In the last micro-batch of a step the sleep comes before the gradients are sent, where a
          slower device would be late. Waiting is the time from then until the sum is there. No ``annotations``
          import here: DDP inspects the types of its hook.
Source    torch.nn.parallel.DistributedDataParallel; gloo over loopback.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pliant.ui.demo_model import TESTED_ON, correct, digits, network, options

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
GIVE_UP = timedelta(seconds=60)
"""Far above any wait of the demo; without it a lost process would block the others for half an hour."""


class Device:
    """An emulated device, with the time that the worker spent waiting for others."""

    def __init__(self, pace: float) -> None:
        self.waited_s = 0.0
        self._slowdown = 1.0 / pace - 1.0
        self._started_cpu_s = 0.0
        self._sent_s: float | None = None

    def start(self) -> None:
        """A micro-batch begins."""
        self._started_cpu_s = time.thread_time()

    def slow_down(self) -> None:
        """A micro-batch is computed: sleep until the emulated device would be done."""
        time.sleep(self._slowdown * (time.thread_time() - self._started_cpu_s))

    def send(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A DDP communication hook, called when the gradients are there; the model fits into one bucket."""
        self.slow_down()
        self._sent_s = time.perf_counter()
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)

    def arrived(self) -> None:
        """The sum is there."""
        if self._sent_s is not None:
            self.waited_s += time.perf_counter() - self._sent_s
            self._sent_s = None


def train_step(model: DistributedDataParallel, device: Device, batch: list[Tensor], size: int) -> float:
    """Accumulate this worker's share in micro-batches; returns its mean loss."""
    share, total = len(batch[0]), 0.0
    parts = list(zip(batch[0].split(size), batch[1].split(size), strict=True))
    for number, (images, labels) in enumerate(parts, start=1):
        device.start()
        model.require_backward_grad_sync = number == len(parts)  # what model.no_sync() sets
        loss = F.cross_entropy(model(images), labels, reduction="sum") / share
        loss.backward()
        if number < len(parts):
            device.slow_down()
        device.arrived()
        total += loss.item()
    return total


def main() -> None:
    """Train as one of the processes."""
    parser = options()
    parser.add_argument("--pace", type=float, required=True)
    parser.add_argument("--place", type=int, required=True)
    wanted = parser.parse_args()
    results = Path(wanted.results)
    # gloo reads this: only the loopback address is used.
    os.putenv("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{results}/rendezvous",
        rank=wanted.place,
        world_size=wanted.workers,
        timeout=GIVE_UP,
    )
    train_set, test_set = digits(results)
    model, optimizer = network()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    device = Device(wanted.pace)
    wrapped.register_comm_hook(None, device.send)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, wanted.workers, wanted.place)
    loader = DataLoader(train_set, wanted.batch // wanted.workers, sampler=sampler)
    trained_s = 0.0
    for epoch in range(wanted.epochs):
        sampler.set_epoch(epoch)
        dist.barrier()
        start_s, done = time.perf_counter(), 0
        for batch in loader:
            optimizer.zero_grad()
            loss = train_step(wrapped, device, batch, wanted.size)
            optimizer.step()
            done += len(batch[0]) * wanted.workers
            if wanted.place == 0:
                elapsed_s = trained_s + time.perf_counter() - start_s
                speed = (epoch * len(train_set) + done) / elapsed_s
                _leave(
                    results / "ddp.json", epoch=epoch, done=done, length=len(train_set), samples_per_s=speed, loss=loss
                )
        trained_s += time.perf_counter() - start_s
    with torch.no_grad():
        told, of = correct(model.eval(), next(iter(DataLoader(test_set, TESTED_ON))))
    samples = wanted.epochs * sampler.num_samples
    _leave(
        results / f"ddp-{wanted.place}.json",
        trained_s=trained_s,
        waited_s=device.waited_s,
        samples=samples,
        accuracy=int(told) / of,
    )
    dist.destroy_process_group()


def _leave(path: Path, **figures: float) -> None:
    """Write figures so that a reader never sees half of them."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(figures))
    partial.replace(path)


if __name__ == "__main__":
    main()
