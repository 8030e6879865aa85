"""Random streams that do not depend on which worker computes which sample.

Question  From which random stream do a sample's augmentation and a micro-batch's dropout draw?
Holds     A sample's stream is a function of (seed, epoch, position), a micro-batch's of (seed, epoch, first
          position): the same for every worker and loader process.
"""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = (1 << 64) - 1


def stream(seed: int, epoch: int, position: int, purpose: int) -> int:
    """64 well-mixed bits for one stream (splitmix64's finaliser over the four numbers)."""
    state = 0
    for number in (seed, epoch, position, purpose):
        state = mixed((state ^ number) + 0x9E3779B97F4A7C15 & _MASK)
    return state


def mixed(state: int) -> int:
    """A permutation of 64 bits in which every bit depends on every other (splitmix64's finaliser)."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31


SAMPLE, MICRO_BATCH, ORDER = 1, 2, 3
"""Purposes of a stream."""


def seed_everything(bits: int) -> None:
    """Seed random, NumPy's global generator and torch's default ones."""
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    # torch.manual_seed also visits all accelerator backends, which takes a hundred times as long.
    torch.default_generator.manual_seed(bits)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(bits)
