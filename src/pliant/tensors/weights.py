"""The model's weights as a file that loads without Pliant.

Question  What does ``run.save`` write, and what does a run leave behind?
Holds     A plain state dict in safetensors; shared parameters are stored once, under their first name. A file is whole
          or not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

FINAL = "weights.safetensors"
"""in a run's directory: the weights at its end"""


def save(model: nn.Module, path: Path, metadata: Mapping[str, str] | None = None, *, private: bool = False) -> None:
    """Write what the model holds now; ``private``: only the owner can read it, from the first byte on."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().contiguous()
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if private:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        save_file(tensors, str(part), metadata=dict(metadata) if metadata else None)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
