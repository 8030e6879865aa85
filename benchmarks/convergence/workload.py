"""What is trained: a small convolutional network on Fashion-MNIST.

Question  What do the systems learn, and how well did a snapshot of the weights learn it?
Holds     Training images and test images are the same for every system and seed; the seed draws the initial weights.
          Little arithmetic for two cores, so that the emulated devices set the pace; the layers' gradients appear one
          after another, as on a real device, so that DDP sums the first of them beside the backward pass.
Source    Fashion-MNIST (Xiao et al. 2017), from Debian's package dataset-fashion-mnist.
"""

import gzip
from functools import cache
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from benchmarks.convergence.course import LEARNING_RATE, MOMENTUM, Course
from benchmarks.workload import CLASSES, FORWARD_SHARE, Device, Staged

DATA = Path("/usr/share/datasets/fashion-mnist")
TEST_IMAGES = 4000
HEADER = {"images": 16, "labels": 8}  # bytes before the data, by kind of file
MEAN, DEVIATION = 0.286, 0.353  # of all training images


class Convolutional(Staged):
    """Three convolutions, two dense layers, a head: 174 thousand parameters, 0.7 MB of gradient."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.first = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.stages = nn.ModuleList(
            (
                nn.Conv2d(16, 32, 3, stride=2, padding=1),
                nn.Conv2d(32, 64, 3, stride=2, padding=1),
                nn.Sequential(nn.Flatten(), nn.Linear(1024, 128)),
                nn.Linear(128, 128),
            )
        )
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.paused(self.first(x), 0))
        for number, stage in enumerate(self.stages, 1):
            hidden = torch.relu(self.paused(stage(hidden), number))
        logits = self.head(hidden)
        self.device.reach(FORWARD_SHARE)
        return logits


def make_model(seed: int, device: Device) -> nn.Module:
    """The same initial weights in every process of every system of one seed."""
    torch.manual_seed(seed)
    model = Convolutional(device)
    for layer in model.modules():
        # Torch's own draw is far too small for layers followed by rectifiers: the first epoch would be a plateau.
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def make_optimizer(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)


def make_scheduler(optimizer: Optimizer, course: Course) -> LambdaLR:
    """One step per reference batch, down to nothing at the run's end: late accuracy is not buried in noise."""
    steps = course.samples // course.batch
    return LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.0))


def _read(kind: str, part: str, count: int) -> Tensor:
    file = DATA / f"{part}-{kind}-idx{3 if kind == 'images' else 1}-ubyte.gz"
    size = 28 * 28 if kind == "images" else 1
    with gzip.open(file) as packed:
        raw = packed.read(HEADER[kind] + count * size)[HEADER[kind] :]
    return torch.from_numpy(numpy.frombuffer(raw, dtype=numpy.uint8).copy())


def missing() -> str | None:
    """Why there is no data, with the remedy."""
    return None if DATA.is_dir() else f"no Fashion-MNIST at {DATA}: apt-get install dataset-fashion-mnist"


def _dataset(part: str, count: int) -> TensorDataset:
    images = (_read("images", part, count).view(-1, 1, 28, 28).float() / 255 - MEAN) / DEVIATION
    return TensorDataset(images, _read("labels", part, count).long())


def training_set(images: int) -> TensorDataset:
    """The first ``images`` ones; the file is in no particular order."""
    return _dataset("train", images)


@cache
def _test_set() -> TensorDataset:
    return _dataset("t10k", TEST_IMAGES)


@torch.no_grad()
def accuracy(weights: dict[str, Tensor]) -> float:
    """The share of test images that these weights classify rightly."""
    model = Convolutional(Device(lambda: 0.0))
    model.load_state_dict(weights)
    images, labels = _test_set().tensors
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True))
    return right / len(labels)
