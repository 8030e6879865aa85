"""Where the gradient of each parameter lies in flat buffers.

Question  How large is the buffer of each dtype, where does each parameter's gradient begin, and with which strides?
Holds     Parameters lie in their order, one buffer for each dtype. A view has the strides of its parameter, and a
          version counter of its own.
Source    ours; docs/design/0005-exchange.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from pliant.bitmaps import members as members_of

# Views start at multiples of 64 bytes (16 floats), where vector loads do not straddle cache lines.
_ALIGN = 16


def placed(
    parameters: Sequence[Parameter], members: bytes
) -> tuple[dict[torch.dtype, int], dict[int, tuple[int, int]]]:
    """The sizes of a layout's flat buffers, and where each parameter lies in the buffer of its dtype.

    ``members``: the parameters in the layout, as a bitmap.
    """
    sizes: dict[torch.dtype, int] = {}
    places: dict[int, tuple[int, int]] = {}
    for index in members_of(members):
        p = parameters[index]
        start = sizes.get(p.dtype, 0)
        places[index] = start, start + p.numel()
        sizes[p.dtype] = start + -(-p.numel() // _ALIGN) * _ALIGN
    return sizes, places


def view(flat: Tensor, start: int, p: Parameter) -> Tensor:
    """Room for a parameter's gradient, with the strides of the parameter: fused optimizers walk both by memory."""
    # ``.data`` gives each view a version counter of its own; slices of one tensor would share one.
    own = flat.data
    if is_dense(p):
        # ``as_strided`` counts from the start of the storage, and a large buffer begins later (``allocation.fresh``).
        return own.as_strided(p.size(), p.stride(), own.storage_offset() + start)
    return own[start : start + p.numel()].view_as(p)


def is_dense(p: Tensor) -> bool:
    """Whether its elements lie without gaps in memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
