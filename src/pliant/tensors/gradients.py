"""Where gradients accumulate, and how they are handed in without a copy.

Question  How does a contribution become one flat buffer, while the next one already accumulates?
Holds     In a group every ``p.grad`` is a view into one of two flat buffers (per dtype), swapped at each hand-in;
          autograd adds into the view in place. A parameter's own version counter tells whether it got a gradient,
          and whether somebody else touched it. Fresh memory is slow to touch: both buffers are made in the background
          while a worker finds its group. Alone there is nothing to hand in: autograd keeps its own tensors, and costs
          what it costs in plain PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from pliant.errors import UsageError
from pliant.tensors import memory, parts

# Views start at multiples of 64 bytes (16 floats), where vector loads do not straddle cache lines.
_ALIGN = 16

_ZERO_GRAD = (
    "the gradients were cleared or replaced by the script: remove optimizer.zero_grad() "
    "(and anything else that changes p.grad; clipping is join(clip_norm=…)) from the loop; "
    "Pliant clears them after each update"
)
_OWN_BACKWARD = (
    "gradients were computed without Pliant, which does not know how many samples they stand for: "
    "replace loss.backward() by run.backward(loss)"
)


class Buffer:
    """One contribution's gradients: flat tensors, one per dtype, and a view for every parameter."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        sizes: dict[torch.dtype, int] = {}
        places: list[tuple[torch.dtype, int]] = []
        for p in parameters:
            start = sizes.get(p.dtype, 0)
            places.append((p.dtype, start))
            sizes[p.dtype] = start + -(-p.numel() // _ALIGN) * _ALIGN
        ends = [(start, start + p.numel()) for p, (_, start) in zip(parameters, places, strict=True)]
        device = parameters[0].device
        by_dtype = {dtype: memory.fresh((size,), dtype, device).zero_() for dtype, size in sizes.items()}
        self.flats = list(by_dtype.values())
        # ``.data`` gives each view a version counter of its own; slices of one tensor would share one.
        self.views = [
            by_dtype[dtype].data[start : start + p.numel()].view_as(p)
            for p, (dtype, start) in zip(parameters, places, strict=True)
        ]
        self.versions = [view._version for view in self.views]
        self.cut = parts.cut(parameters, ends)
        self.parts = [by_dtype[part.dtype][part.start : part.stop] for part in self.cut]
        """the same memory, in the order in which a backward pass completes it"""

    def squared_norm(self) -> float:
        """Of everything in the buffer, in float64 across dtypes; non-finite if any element is."""
        return sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in self.flats)

    def scale(self, factor: float) -> None:
        """Multiply all gradients in place; a factor of one costs nothing."""
        if factor != 1.0:
            for flat in self.flats:
                flat.mul_(factor)

    def scaled_norm(self, part: int, factor: float) -> float:
        """Multiply one part in place; its squared norm then."""
        if factor != 1.0:
            self.parts[part].mul_(factor)
        return float(torch.linalg.vector_norm(self.parts[part])) ** 2


class _Making:
    """Buffers on their way."""

    def __init__(self, parameters: Sequence[Parameter], count: int) -> None:
        self._parameters = parameters
        self._count = count
        self._made: list[Buffer] = []
        # Not a daemon: at its end Python would stop such a thread inside of torch, which aborts the process.
        self._thread = threading.Thread(target=self._make, name="pliant-memory")
        self._thread.start()

    def _make(self) -> None:
        for _ in range(self._count):
            self._made.append(Buffer(self._parameters))

    def result(self) -> list[Buffer]:
        """All of them; what could not be made there fails here."""
        self._thread.join()
        return [*self._made, *(Buffer(self._parameters) for _ in range(self._count - len(self._made)))]


class Gradients:
    """The gradients of ``parameters`` over the rounds of a run. Bit i of a bitmap stands for parameter i."""

    def __init__(self, parameters: Sequence[Parameter], *, grouped: bool, overlaps: bool = True) -> None:
        """``overlaps``: a contribution may accumulate while another one is in flight."""
        self.parameters = list(parameters)
        self._spare: Buffer | None = None
        self._filling: Buffer | None = None
        self._versions: list[int] = []
        self._left_over = self._loose_versions()
        """without a group: what the last update, or the script before its first round, has left in ``p.grad``"""
        self._making = _Making(self.parameters, 2 if overlaps else 1) if grouped else None
        self.orderly: bool | None = None
        """whether a backward pass adds to each gradient once; None: not known yet"""
        self.late = False
        """in the last pass a gradient was added to after its part was told of"""
        self._parts = 0

    def _begin(self) -> None:
        """Before the first use."""
        if self._making is not None:
            self._filling, *spare = self._making.result()
            self._spare, self._making = (spare[0] if spare else None), None
            self._parts = len(self._filling.parts)
            self._attach()

    def _attach(self) -> None:
        """Point every ``p.grad`` at the buffer to be filled."""
        if self._filling is None:
            self._versions, self._left_over = [], self._loose_versions()
            return
        self._show()
        self._filling.versions = [view._version for view in self._filling.views]
        self._versions = list(self._filling.versions)

    def _show(self) -> None:
        assert self._filling is not None
        for p, view in zip(self.parameters, self._filling.views, strict=True):
            p.grad = view

    def check(self) -> None:
        """Raise if the script has cleared, replaced or changed gradients since the last ``backward``."""
        self._begin()
        if self._filling is None:
            if not self._versions:
                now = self._loose_versions()
                if any(version not in (-1, left) for version, left in zip(now, self._left_over, strict=True)):
                    spoilt = any(p.grad is not None and bool(p.grad.any()) for p in self.parameters)
                    raise UsageError(_OWN_BACKWARD if spoilt else _ZERO_GRAD)
                # As late as a plain loop clears them: freed earlier, their memory is cut up by other tensors.
                for p in self.parameters:
                    p.grad = None
                self._left_over = [-1] * len(now)
            elif self._versions != self._loose_versions():
                raise UsageError(_ZERO_GRAD)
            return
        for p, view, version in zip(self.parameters, self._filling.views, self._versions, strict=True):
            if p.grad is not view:
                raise UsageError(_ZERO_GRAD)
            if view._version != version:
                untouched = self._versions == self._filling.versions
                raise UsageError(_OWN_BACKWARD if untouched and bool(view.any()) else _ZERO_GRAD)

    def accumulated(self) -> None:
        """A ``backward`` has just run: remember how the gradients look."""
        if self._filling is None:
            self._versions = self._loose_versions()
        else:
            self._versions = [view._version for view in self._filling.views]

    def _loose_versions(self) -> list[int]:
        return [-1 if p.grad is None else p.grad._version for p in self.parameters]

    def present(self) -> int:
        """The bitmap of parameters that got a gradient in this contribution."""
        if self._filling is None:
            got = (bool(self._versions) and p.grad is not None for p in self.parameters)
        else:
            pairs = zip(self._filling.views, self._filling.versions, strict=True)
            got = (view._version != version for view, version in pairs)
        return sum(1 << index for index, present in enumerate(got) if present)

    # -- in parts

    @property
    def parts(self) -> int:
        """How many a contribution can be summed in; below 2: only as a whole."""
        self._begin()
        return self._parts

    @contextmanager
    def watched(self, ready: Callable[[int], None]) -> Iterator[None]:
        """Tell ``ready`` of each part that the backward pass in here completes."""
        filling = self.filling
        assert filling is not None
        with parts.watched(self.parameters, filling.cut, ready) as backward:
            yield
        self.late = backward.late
        self.orderly = self.orderly is not False and not backward.twice

    def written(self, values: Sequence[float]) -> Tensor:
        """Numbers that are to be summed beside the gradients."""
        return torch.tensor(values, dtype=torch.float64)

    def read(self, summed: Tensor) -> list[float]:
        """What they have become."""
        return summed.tolist()

    @property
    def filling(self) -> Buffer | None:
        """The buffer of the contribution in progress; None where there is no group."""
        self._begin()
        return self._filling

    def hand_in(self, *, overlap: bool, returning: bool) -> Buffer | None:
        """Give the filled buffer to the summation; with an overlap, fill the other one from now on.

        ``returning``: the other one is still to be applied and comes by ``take_back``.
        """
        self._begin()
        filled = self._filling
        if filled is not None and overlap:
            self._filling, self._spare = self._spare, None
            if self._filling is None and not returning:
                self._filling = Buffer(self.parameters)
            if self._filling is not None:
                self._attach()
        return filled

    def expose(self, filled: Buffer | None, present: int) -> None:
        """Make ``p.grad`` what the optimizer shall see: the reduced gradient, None where nobody had any."""
        for index, p in enumerate(self.parameters):
            if not present >> index & 1:
                p.grad = None
            elif filled is not None:
                p.grad = filled.views[index]

    def take_back(self, filled: Buffer | None) -> None:
        """The update (or the skip) is done with ``filled``: clear it; it is filled next, or kept as the spare one."""
        if filled is None:
            self._attach()
            return
        for flat in filled.flats:
            flat.zero_()
        if self._filling is None or self._filling is filled:
            self._filling = filled
            self._attach()
            return
        self._spare = filled
        self._show()

    def lose(self, filled: Buffer | None) -> None:
        """``filled`` is somebody else's from now on (a summation that has failed may still be writing to it)."""
        if filled is not None and (self._filling is None or self._filling is filled):
            self._filling = self._spare or Buffer(self.parameters)
            self._spare = None
            self._attach()
        elif filled is not None:
            self._show()

    def fill(self, buffer: Buffer, *, begun: bool) -> None:
        """Accumulate in ``buffer`` from now on; ``begun``: it has a part of the contribution already."""
        self._begin()
        self._filling = buffer
        if begun:
            self._show()
            self._versions = [view._version for view in buffer.views]
        else:
            self._attach()

    def discard(self) -> None:
        """Forget the contribution in progress (a ``break`` cut it off)."""
        if self._making is not None:
            return
        if self._filling is not None:
            for flat in self._filling.flats:
                flat.zero_()
        self._attach()
