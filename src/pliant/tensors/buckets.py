"""Gradients in buckets, in the order in which a backward pass completes them.

Question  Which gradients can already be summed while the backward pass goes on?
Holds     Every parameter is in exactly one bucket, and every bucket is contiguous in memory. Buckets depend on the
          parameters alone, so they are the same on all workers. They are reported in order: each one as soon as it and
          all buckets before it are complete. If a pass adds to a gradient twice (a weight shared by checkpointed
          segments), a bucket may be reported too early; that is noticed (``twice``, ``late``), and the model's later
          contributions are summed as a whole.
Source    torch's DistributedDataParallel sums buckets in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

_AT_MOST = 4
"""Number of buckets, of about equal size. Only the last one is summed after the pass, but each one costs a collective.
With sixteen, rounds over a slow link took 153 ms instead of 158, and over loopback 147 ms instead of 142."""
_LEAST_BYTES = 32 * 1024
"""A smaller bucket takes as long as one of this size."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are adjacent in the flat buffer of their dtype: elements ``start`` to ``stop``."""

    dtype: torch.dtype
    start: int
    stop: int
    members: tuple[int, ...]


def cut(parameters: Sequence[Parameter], places: Mapping[int, tuple[int, int]]) -> list[Bucket]:
    """The buckets; ``places``: where each parameter of the layout begins and ends in the flat buffer of its dtype."""
    if any(parameters[index].device.type != "cpu" for index in places):
        # On a GPU the norm of a bucket would make the pass wait. Not measured, so gradients are summed after the pass.
        return []
    total = sum(parameters[index].numel() * parameters[index].element_size() for index in places)
    enough = max(_LEAST_BYTES, total / _AT_MOST)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in places:
        by_dtype.setdefault(parameters[index].dtype, []).append(index)
    found: list[Bucket] = []
    for dtype, indexes in by_dtype.items():
        members: list[int] = []
        size = 0
        for index in reversed(indexes):
            members.append(index)
            size += parameters[index].numel() * parameters[index].element_size()
            if size >= enough or index == indexes[0]:
                found.append(Bucket(dtype, places[members[-1]][0], places[members[0]][1], tuple(members)))
                members, size = [], 0
    return sorted(found, key=lambda part: part.members[-1], reverse=True)


@dataclass(slots=True)
class BackwardPass:
    """The buckets that one backward pass has completed so far."""

    ready: Callable[[int], None]
    waiting: list[int]
    """number of parameters that each bucket still lacks"""
    part_of: dict[int, int]
    told: int = 0
    """buckets reported so far"""
    twice: bool = False
    """a parameter got a gradient a second time"""
    late: bool = False
    """... after its bucket had been reported"""
    seen: set[int] = field(default_factory=set)

    def got(self, index: int, _: Tensor) -> None:
        """Hook: the gradient of parameter ``index`` was added to."""
        place = self.part_of[index]
        if index in self.seen:
            self.twice = True
            self.late = self.late or place < self.told
            return
        self.seen.add(index)
        self.waiting[place] -= 1
        while self.told < len(self.waiting) and not self.waiting[self.told]:
            self.told += 1
            self.ready(self.told - 1)


@contextmanager
def watched(
    parameters: Sequence[Parameter], parts: Sequence[Bucket], ready: Callable[[int], None]
) -> Iterator[BackwardPass]:
    """Call ``ready`` with the index of each bucket that the backward pass inside the ``with`` completes."""
    part_of = {index: place for place, part in enumerate(parts) for index in part.members}
    backward = BackwardPass(ready, [len(part.members) for part in parts], part_of)
    hooks = [
        parameters[index].register_post_accumulate_grad_hook(partial(backward.got, index))
        for index in part_of
        if parameters[index].requires_grad
    ]
    try:
        yield backward
    finally:
        for hook in hooks:
            hook.remove()
