"""Gradients in parts, in the order in which a backward pass completes them.

Question  Which of the gradients can already be summed while the backward pass goes on?
Holds     Every parameter is in exactly one part, every part is one stretch of memory. The parts depend on the
          parameters alone, so all workers have the same. They are told of in their order, each as soon as all of it and
          of those before it is there. A model that adds to a gradient twice in one pass (a weight shared by segments
          that are computed again) is not told of early: its parts are not complete when they seem to be.
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
"""So many of equal size: what remains when the pass is over is the last one, and each costs a collective. Sixteen were
tried: rounds over a slow link took 153 ms in place of 158, those over loopback 147 in place of 142."""
_LEAST_BYTES = 32 * 1024
"""A smaller one costs as much as this one."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some parameters that lie side by side in the flat buffer of their dtype: elements ``start`` to ``stop``."""

    dtype: torch.dtype
    start: int
    stop: int
    members: tuple[int, ...]


def cut(parameters: Sequence[Parameter], places: Mapping[int, tuple[int, int]]) -> list[Bucket]:
    """The parts; ``places``: where each parameter that is laid out begins and ends in the flat buffer of its dtype."""
    if any(parameters[index].device.type != "cpu" for index in places):
        # There the norm of a part would hold up the pass. Unmeasured, so as it was: summed after the pass.
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
    """What one backward pass has completed so far."""

    ready: Callable[[int], None]
    waiting: list[int]
    """parameters that each part still lacks"""
    part_of: dict[int, int]
    told: int = 0
    twice: bool = False
    """a parameter got a gradient again"""
    late: bool = False
    """and this one's part had been told of"""
    seen: set[int] = field(default_factory=set)

    def got(self, index: int, _: Tensor) -> None:
        """A parameter's gradient was added to."""
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
    """Tell ``ready`` of each part that the backward pass in here completes."""
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
