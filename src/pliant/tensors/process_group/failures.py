"""What an error of a group's library means.

Question  Is it the others' connections that have failed, or can this worker's tensors not be summed at all?
Holds     Only what another group could mend is a failure of connections. gloo and NCCL raise plain ``RuntimeError`` for
          either, so what is refused is known by its words; anything unknown counts as a failure of connections, for to
          take a death for an error of one's own would end the survivors.
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
    """The error to be raised in place of a failure of connections; None: that is what it is."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return error
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, NotImplementedError) or _REFUSED.search(first):
        return Unsupported(
            f"this worker's tensors cannot be summed with the others' ({first}): keep parameters and buffers on the "
            "CPU or on CUDA, in float32, float64, float16 or bfloat16"
        )
    return None
