"""What one training run is told: cluster, seed, data, batch, length.

Question  What do all workers of a run, of whatever system, have in common?
Holds     Everything here is the same for all systems of one seed and cluster: the initial weights, the order of the
          samples in every epoch, the devices and their redraws. One epoch is a whole number of batches, so that no
          system has a short one.
Source    ours: the three kinds of cluster of the benchmark's issue, after ABS-SGD (Zhou et al. 2023).
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks.clusters import Phase, device_ms

WORKERS = 4
BATCH = 128  # the reference: what the learning rate is chosen for
LEARNING_RATE = 0.05
MOMENTUM = 0.9
STATIC, FLUCTUATING, SLOW_NETWORK = "static", "fluctuating", "slow_network"
CLUSTERS = (STATIC, FLUCTUATING, SLOW_NETWORK)
HARVESTS = {STATIC: "b", FLUCTUATING: "d"}  # the harvest's clusters with the same devices
NEARLY_EQUAL_MS = (40.0, 40.0, 50.0, 50.0)  # per 16 samples, behind slow links
COURSE = "course.json"
ENDLESS_S = 1e9


@dataclass(frozen=True, slots=True)
class Course:
    """One run's settings; ``addresses`` are the workers' own, by index."""

    cluster: str
    seed: int
    images: int
    epochs: int
    every: int  # samples between two snapshots
    addresses: tuple[str, ...] = ("127.0.0.1",) * WORKERS
    workers: int = WORKERS
    batch: int = BATCH

    @property
    def samples(self) -> int:
        """All samples of the run, each once per epoch."""
        return self.images * self.epochs

    @property
    def share(self) -> int:
        """What a group without regard to speed gives each worker per update."""
        return self.batch // self.workers


def write(directory: Path, course: Course) -> None:
    (directory / COURSE).write_bytes(msgspec.json.encode(course))


def read(directory: Path) -> Course:
    return msgspec.json.decode((directory / COURSE).read_bytes(), type=Course)


def order(seed: int, epoch: int, images: int) -> list[int]:
    """The samples of an epoch in the order in which every system takes them."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()


def milliseconds(course: Course, worker: int, now_s: float) -> float:
    """Per 16 samples on this worker's device, ``now_s`` seconds after the start."""
    if course.cluster == SLOW_NETWORK:
        return NEARLY_EQUAL_MS[worker]
    phase = Phase(HARVESTS[course.cluster], 0.0, 0.0, ENDLESS_S, course.seed)
    return device_ms(phase, worker, now_s)
