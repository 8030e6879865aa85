"""How much memory the tensors of a process hold.

Question  How many bytes of tensors are alive, and how large was the process at its largest?
Holds     A storage counts once, however many tensors look into it. The dataset is left out: it is the
          same in every system.
"""

import gc
import resource
from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.worker import Worker


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each storage that these look into, by its address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def live_tensors() -> list[Tensor]:
    """All that are reachable from Python; gradients of parameters are not among them."""
    return [item for item in gc.get_objects() if issubclass(type(item), Tensor)]


def live_bytes(worker: Worker) -> int:
    """Bytes of all storages reachable from Python, the gradients and the optimizer's state included."""
    tensors = live_tensors() + [p.grad for p in worker.model.parameters() if p.grad is not None]
    found = storages(tensors)
    for tensor in worker.dataset.tensors:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(found.values())


def note_memory(worker: Worker) -> None:
    """Keep the largest figures seen; called at the same points of every system's loop."""
    with torch.no_grad():
        worker.note("tensor_bytes", live_bytes(worker))
    worker.note("resident_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    worker.note("copy_bytes", sum(p.numel() * p.element_size() for p in worker.model.parameters()))
