"""Large tensors whose memory is fast to touch for the first time.

Question  How are large buffers allocated so that their first use does not delay a round?
Holds     On the host, large memory is requested in huge pages if the system has them (numpy does this): the first
          touch of 88 MB took 10 ms instead of 47. All other tensors are allocated by torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# From this size on numpy requests huge pages.
_LARGE_BYTES = 4 << 20
# Alignment of torch's own tensors: a cache line.
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
    """The tensor itself if it is large and on the host, otherwise a copy. For tensors that are not expected to change.

    A later reader must compare ``_version`` to detect a change.
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
