"""Large tensors whose memory is quick to touch for the first time.

Question  How long does it hold a round up that somebody takes a copy of the weights?
Holds     On the host, large memory is asked for in huge pages where the system has them (numpy does so): the first
          touch of 88 MB took 10 ms in place of 47 here. Everything else is torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# From here on numpy asks for huge pages.
_LARGE_BYTES = 4 << 20
# Where torch's own tensors begin: at a cache line.
_ALIGN = 64


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE_BYTES or not dtype.is_floating_point or (device is not None and device.type != "cpu"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = torch.from_numpy(np.empty(size + _ALIGN, dtype=np.uint8))
    start = -memory.data_ptr() % _ALIGN
    return memory[start : start + size].view(dtype).view(tuple(shape))


def lent(tensor: Tensor) -> Tensor:
    """The tensor itself where it is large and on the host, else a copy: for what nobody is expected to change.

    Whoever reads it later compares its ``_version``, which tells when somebody has changed it after all.
    """
    source = tensor.detach()
    if source.device.type == "cpu" and source.is_contiguous() and source.nbytes >= _LARGE_BYTES:
        return source
    return source.cpu().clone()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def copied(tensor: Tensor) -> Tensor:
    """A copy on the host."""
    source = tensor.detach()
    if not source.is_contiguous() or source.layout is not torch.strided:
        return source.cpu().clone()
    return fresh(source.shape, source.dtype).copy_(source)
