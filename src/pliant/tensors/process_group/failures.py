"""What an error of gloo or NCCL means.

Question  Has a connection failed, or can this worker's tensors not be summed at all?
Holds     A failure of connections is one that a new group can solve. gloo and NCCL raise a plain ``RuntimeError`` in
          both cases, so refusals are recognized by their text. Unknown errors count as failed connections, because
          mistaking another worker's death for an own error would end the survivors.
Source    ours; the words are those of torch's ProcessGroupGloo and c10d, 2.6 to 2.13.
"""

from __future__ import annotations

import re

import torch

from pliant.errors import Unsupported

_REFUSED = re.compile(
    r"^ProcessGroup(Gloo|NCCL)::\w+: |Invalid scalar type|unsupported (device|layout|dtype)|[Nn]o backend type|"
    r"not (currently )?supported|not implemented|Could not run 'c10d|Input tensor data type is not"
)


def as_own(error: RuntimeError) -> Exception | None:
    """The error to raise if this worker's tensors cannot be summed; None if it is a failure of connections."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return error
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, NotImplementedError) or _REFUSED.search(first):
        return Unsupported(
            f"this worker's tensors cannot be summed with the others' ({first}): keep parameters and buffers on the "
            "CPU or on CUDA, in float32, float64, float16 or bfloat16"
        )
    return None
