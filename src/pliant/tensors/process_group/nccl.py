"""The era's process group on CUDA devices: NCCL for gradients, gloo for tickets.

Question  How are gradients summed that are on GPUs?
Holds     The interface of ``gloo.Gloo``. Sums are started from a side stream that waits for the backward pass, so that
          the compute stream goes on. They are polled like gloo's, and the compute stream waits for them only when the
          round is settled. Tickets stay on the host.
Source    torch.distributed's ProcessGroupNCCL as documented. Written without access to a GPU: not measured, and only
          its selection is tested (docs/cuda.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pliant.errors import UsageError
from pliant.tensors.process_group.gloo import ControlStore, Gloo, KeyValue


class Nccl(Gloo):
    """The workers of an era, one CUDA device each."""

    def __init__(
        self, channel: KeyValue, *, attempt: int, place: int, members: int, address: str, device: torch.device
    ) -> None:
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        if nccl is None:
            raise UsageError("the model is on a CUDA device but this torch has no NCCL: install a CUDA build for Linux")
        super().__init__(channel, attempt=attempt, place=place, members=members, address=address)
        self._device = device
        self._nccl: Any = None
        try:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream(device)
                self._nccl = nccl(ControlStore(channel, attempt, "nccl/"), place, members, nccl.Options())
        except BaseException:
            self.leave()
            raise

    def _summing(self, sums: Sequence[Tensor], timeout: timedelta | None = None) -> list[Any]:
        """All tensors are on this worker's device; ``timeout`` is unused, because NCCL has its own."""
        self._present()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            works = [self._nccl.allreduce([tensor]) for tensor in sums]
        # The allocator must not reuse this memory while the side stream still works on it.
        for tensor in sums:
            tensor.record_stream(self._stream)
        return works

    def _spreading(self, tensor: Tensor, root: int) -> Any:
        if not tensor.is_cuda:
            return super()._spreading(tensor, root)
        self._present()
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._nccl.broadcast([tensor], options)

    def leave(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            # Aborted kernels end their operations; the teardown waits for them in the background.
            nccl.abort()
        super().leave()
