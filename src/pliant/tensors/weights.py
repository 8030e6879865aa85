"""The model's weights as a file that loads without Pliant.

Question  Which file do ``run.save`` and the end of a run write?
Holds     A plain state dict in safetensors; shared parameters are stored once, under their first name. A file is
          written completely or not at all. A run's weights never replace later weights of the same run.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FINAL = "weights.safetensors"
"""File in the run directory with the weights at the run's end."""


def save(model: nn.Module, path: Path, *, round_: int, run: str = "", private: bool = False) -> bool:
    """Write the model's present weights, as of ``round_`` of ``run``. False: the file already has a later round of it.

    That can happen if a leader was left out during a long save, and the next leader has saved since. ``private``: only
    the owner of the file can read it, from the first byte on.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().contiguous()
    part = path.with_name(f".{path.name}.{os.getpid()}")
    metadata = {"round": str(round_), **({"run": run} if run else {})}
    try:
        if private:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        save_file(tensors, str(part), metadata=metadata)
        with _alone_in(path.parent):
            if run and _round_in(path, run) > round_:
                return False
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return True


class WeightsFile(Protocol):
    """An open file of weights, as safetensors gives it: its own declarations have no types."""

    def metadata(self) -> dict[str, str] | None: ...
    def keys(self) -> Sequence[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...


def open_weights(path: Path) -> AbstractContextManager[WeightsFile]:
    """The file's tensors, each read when it is asked for. Raises ``OSError`` or ``SafetensorError``."""
    return cast(Any, safe_open)(str(path), framework="pt")


def size_of(model: nn.Module) -> int:
    """About how many bytes ``save`` writes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def _round_in(path: Path, run: str) -> int:
    """The round of ``run`` that the file holds; -1 if there is no such file."""
    with suppress(OSError, SafetensorError, ValueError), open_weights(path) as file:
        metadata = file.metadata() or {}
        if metadata.get("run") == run:
            return int(metadata.get("round", "-1"))
    return -1


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Lock the directory, so that workers of this machine replace files one after another (if locks are supported)."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
