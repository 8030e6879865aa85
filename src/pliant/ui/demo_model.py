"""The demo's model and data: a small CNN on scikit-learn's digits.

Question  Which data, model and optimizer do Pliant and DDP share, so that only the sharing of work differs?
Holds     The same split and the same initial weights in every process. One thread per worker: the emulation of a slower
          device counts the CPU time of the thread that trains.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset, random_split

TRAINED_ON = 1500
TESTED_ON = 297


def options() -> argparse.ArgumentParser:
    """The options that the demo passes to its training scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="samples per micro-batch")
    parser.add_argument("--results", required=True, help="where the data is, and each worker leaves its figures")
    parser.add_argument("--more", type=int, default=0, help="at most so many epochs after the measured ones")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--victim", default="", help="the worker that dies in the first of those")
    return parser


def digits(directory: Path) -> list[Subset[tuple[Tensor, ...]]]:
    """Images to train on and images to test with, 8 × 8 pixels each, from the file that the demo wrote."""
    with np.load(directory / "digits.npz") as file:
        pixels = torch.as_tensor(file["images"], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        whole = TensorDataset(pixels, torch.as_tensor(file["labels"], dtype=torch.int64))
    return random_split(whole, [TRAINED_ON, TESTED_ON], torch.Generator().manual_seed(0))


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, 4 ms of CPU per micro-batch of 16 here, and its optimizer; the same weights in every process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # Without BatchNorm: DDP would broadcast its statistics before every forward pass, which is one more wait.
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 4 * 4, 10)),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def correct(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """(number of correctly classified images, number of images)."""
    images, labels = batch
    return (model(images).argmax(1) == labels).sum(), len(labels)
