"""The model's buffers (running statistics and others) as one state of the whole group.

Question  What is a BatchNorm's running mean when four workers saw different samples?
Holds     Running statistics are merged like samples of one mixture, by weight: the merged mean is Σ w·m / Σ w, the
          merged variance Σ w·(v + m²) / Σ w − mean², which contains the spread of the workers' means. Other float
          buffers are averaged by weight; integer ones are the leader's. If the worker has run forward passes since it
          handed in, the merged value is decayed by (1 − momentum) for each of them, as the handed-in one was. Buffers
          are equal on all workers after every drain.
Source    ours; docs/design/0004-numerics.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pliant.tensors import allocation


@dataclass(frozen=True, slots=True)
class _Statistics:
    """The indices of a BatchNorm's buffers in the list of buffers."""

    mean: int
    variance: int
    batches: int
    momentum: float | None


class ModelBuffers:
    """The buffers of ``model`` that change during training. Bit i of a bitmap stands for buffer i.

    A buffer is merged once some worker has changed it (``grow``); constant buffers are never sent.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[Tensor] = []
        self._statistics: list[_Statistics] = []
        self._modules: list[_BatchNorm] = []
        places: dict[int, int] = {}
        for buffer in model.buffers():
            if buffer.dtype is not torch.bool and not buffer.is_complex():
                places[id(buffer)] = len(self._tensors)
                self._tensors.append(buffer)
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                assert module.running_var is not None and module.num_batches_tracked is not None
                tensors = (module.running_mean, module.running_var, module.num_batches_tracked)
                mean, variance, batches = (places[id(tensor)] for tensor in tensors)
                self._statistics.append(_Statistics(mean, variance, batches, module.momentum))
                self._modules.append(module)
        self._versions = [tensor._version for tensor in self._tensors]
        self.live = 0
        self._handed_in: list[Tensor] = []
        self._merged: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def identities(self) -> set[int]:
        """The ``id`` of each of these buffers."""
        return {id(tensor) for tensor in self._tensors}

    def changed(self) -> int:
        """The bitmap of buffers this worker has changed since it joined."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return sum(1 << index for index, (tensor, version) in enumerate(pairs) if tensor._version != version)

    def held(self) -> list[Tensor]:
        """A copy of the present values."""
        return [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def show(self, values: Sequence[Tensor]) -> None:
        """Set the buffers to these values, without counting that as a change by this worker."""
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.copy_(value)
        self._versions = [tensor._version for tensor in self._tensors]

    def merged(self) -> list[Tensor]:
        """The group's last merged values; for a buffer without one, its present value."""
        return [self._merged.get(index, tensor).detach().clone() for index, tensor in enumerate(self._tensors)]

    def training_bits(self) -> int:
        """The bitmap of running statistics that the coming forward passes will change."""
        bits = 0
        for module, statistics in zip(self._modules, self._statistics, strict=True):
            if module.training:
                bits |= 1 << statistics.mean | 1 << statistics.variance | 1 << statistics.batches
        return bits

    def grow(self, changed: int) -> bool:
        """Merge the buffers of this bitmap (of the whole group) from now on. True if any of them is new."""
        new = changed & ~self.live
        self.live |= changed
        return bool(new)

    @torch.no_grad()
    def begin(self, changing: int, *, kept: bool) -> None:
        """A loop begins: merge the buffers in ``changing`` from now on.

        ``kept``: until the first merge, the present values, which are equal everywhere, count as the group's.
        """
        new = changing & ~self.live
        self.live |= changing
        for index in self._places() if kept else ():
            if new >> index & 1:
                self._merged[index] = self._tensors[index].detach().clone()

    def begin_anew(self, live: int) -> None:
        """Merge exactly the buffers in ``live``: buffers that this worker added may be of an exchange that is void."""
        self.live = live

    def _places(self) -> list[int]:
        return [index for index in range(len(self._tensors)) if self.live >> index & 1]

    @torch.no_grad()
    def hand_in(self, weight: float, *, leader: bool) -> Tensor | None:
        """This worker's part of the merge as one float64 vector to be summed; None if no buffer is merged."""
        self._handed_in = [tensor.detach().clone() for tensor in self._tensors] if self.live else []
        if not self.live:
            return None
        parts = [tensor.to(torch.float64) for tensor in self._handed_in]
        for statistics in self._statistics:
            parts[statistics.variance] = parts[statistics.variance] + parts[statistics.mean] ** 2
        flat: list[Tensor] = []
        for index in self._places():
            part = parts[index].reshape(-1)
            if self._tensors[index].is_floating_point():
                # Without samples the worker adds zeros: 0 · inf would make the sum NaN.
                flat.append(part * weight if weight > 0 else torch.zeros_like(part))
            else:
                flat.append(part if leader else torch.zeros_like(part))
        return torch.cat(flat)

    @torch.no_grad()
    def merge(self, summed: Tensor | None, weight: float) -> None:
        """Set the buffers to the group's merged values, corrected for the forward passes since ``hand_in``."""
        if summed is None or weight <= 0:
            return
        merged = self._split(summed, weight)
        decays = self._decays()
        for index, value in merged.items():
            tensor, before = self._tensors[index], self._handed_in[index]
            decay = decays.get(index, 1.0)
            if torch.equal(tensor, before):
                tensor.copy_(value)
            elif tensor.is_floating_point():
                tensor.add_((value - before.to(torch.float64)).to(tensor.dtype), alpha=decay)
            else:
                tensor.add_(value.to(tensor.dtype) - before)
        self._merged = {index: value.to(self._tensors[index].dtype) for index, value in merged.items()}

    def _split(self, summed: Tensor, weight: float) -> dict[int, Tensor]:
        values: dict[int, Tensor] = {}
        start = 0
        for index in self._places():
            tensor = self._tensors[index]
            value = summed[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
            values[index] = value / weight if tensor.is_floating_point() else value
        for statistics in self._statistics:
            if statistics.variance in values and statistics.mean in values:
                values[statistics.variance] = values[statistics.variance] - values[statistics.mean] ** 2
        return values

    def _decays(self) -> dict[int, float]:
        """By buffer: the fraction of the handed-in value that is left in the running statistics now."""
        decays: dict[int, float] = {}
        for statistics in self._statistics:
            before = int(self._handed_in[statistics.batches])
            now = int(self._tensors[statistics.batches])
            if statistics.momentum is None:
                # A cumulative average keeps the fraction before/now of its old value.
                left = before / now if now else 1.0
            else:
                left = (1.0 - statistics.momentum) ** (now - before)
            decays[statistics.mean] = decays[statistics.variance] = left
        return decays

    def value(self, index: int) -> Tensor:
        """The buffer's present value, to be sent (the group's value while ``exchange`` has swapped them in)."""
        return allocation.copied(self._tensors[index]) if self.is_live(index) else allocation.lent(self._tensors[index])

    def nbytes(self, index: int) -> int:
        return self._tensors[index].nbytes

    def is_live(self, index: int) -> bool:
        return bool(self.live >> index & 1)

    @torch.no_grad()
    def adopt(self, values: Mapping[int, Tensor], *, merged: bool) -> None:
        """Set the buffers to the group's values; ``merged``: skip those that a merge has updated meanwhile."""
        for index, value in values.items():
            if merged and self.is_live(index):
                continue
            self._tensors[index].copy_(value)
            if self._handed_in:
                # So that the next merge sees an unchanged buffer, and replaces its value.
                self._handed_in[index] = self._tensors[index].detach().clone()
            if self.is_live(index):
                self._merged[index] = self._tensors[index].detach().clone()
        self._versions = [tensor._version for tensor in self._tensors]

    def go_alone(self, *, kept: bool) -> None:
        """There is no other worker: this worker's own values are the group's.

        ``kept``: keep a copy of the present values as the group's. A newcomer may ask for them in the middle of the
        next round, and what that round has changed so far does not count yet.
        """
        self._merged = {index: self._tensors[index].detach().clone() for index in self._places()} if kept else {}

    @torch.no_grad()
    def drain(self) -> None:
        """Set every buffer to the group's last merged value, which drops the effect of contributions that were cut."""
        for index, value in self._merged.items():
            self._tensors[index].copy_(value)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap this worker's values and the group's last merged ones in place; a second call undoes the first."""
        for index, value in self._merged.items():
            held = self._tensors[index].detach().clone()
            self._tensors[index].copy_(value)
            self._merged[index] = held
