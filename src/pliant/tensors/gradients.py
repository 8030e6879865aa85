"""Where gradients accumulate, and how they are handed in without a copy.

Question  How does a contribution become one flat buffer, while the next one already accumulates?
Holds     In a group every ``p.grad`` is a view into one of two flat buffers (per dtype), swapped at each hand-in;
          autograd adds into the view in place. A parameter's own version counter tells whether it got a gradient,
          and whether somebody else touched it. Alone there is nothing to hand in: autograd keeps its own
          tensors, and costs what it costs in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from pliant.errors import UsageError

# Views start at multiples of 64 bytes (16 floats), where vector loads do not straddle cache lines.
_ALIGN = 16

_ZERO_GRAD = (
    "the gradients were cleared or replaced by the script: remove optimizer.zero_grad() "
    "(and anything else that sets p.grad) from the loop; Pliant clears them after each update"
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
        device = parameters[0].device
        by_dtype = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self.flats = list(by_dtype.values())
        # ``.data`` gives each view a version counter of its own; slices of one tensor would share one.
        self.views = [
            by_dtype[dtype].data[start : start + p.numel()].view_as(p)
            for p, (dtype, start) in zip(parameters, places, strict=True)
        ]
        self.versions = [view._version for view in self.views]

    def squared_norm(self) -> float:
        """Of everything in the buffer, in float64 across dtypes; non-finite if any element is."""
        return sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in self.flats)

    def scale(self, factor: float) -> None:
        """Multiply all gradients in place; a factor of one costs nothing."""
        if factor != 1.0:
            for flat in self.flats:
                flat.mul_(factor)


class Gradients:
    """The gradients of ``parameters`` over the rounds of a run. Bit i of a bitmap stands for parameter i."""

    def __init__(self, parameters: Sequence[Parameter], *, grouped: bool) -> None:
        self.parameters = list(parameters)
        self._spare: Buffer | None = None
        self._filling = Buffer(self.parameters) if grouped else None
        self._attach()

    def _attach(self) -> None:
        """Point every ``p.grad`` at the buffer to be filled."""
        if self._filling is None:
            self._versions: list[int] = []
            return
        for p, view in zip(self.parameters, self._filling.views, strict=True):
            p.grad = view
        self._filling.versions = [view._version for view in self._filling.views]
        self._versions = list(self._filling.versions)

    def check(self) -> None:
        """Raise if the script has cleared, replaced or changed gradients since the last ``backward``."""
        if self._filling is None:
            if not self._versions:
                # As late as a plain loop clears them: freed earlier, their memory is cut up by other tensors.
                for p in self.parameters:
                    p.grad = None
            elif self._versions != self._loose_versions():
                raise UsageError(_ZERO_GRAD)
            return
        for p, view, version in zip(self.parameters, self._filling.views, self._versions, strict=True):
            if p.grad is not view or view._version != version:
                raise UsageError(_ZERO_GRAD)

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

    @property
    def filling(self) -> Buffer | None:
        """The buffer of the contribution in progress; None where there is no group."""
        return self._filling

    def hand_in(self, *, overlap: bool, returning: bool) -> Buffer | None:
        """Give the filled buffer to the summation; with an overlap, fill the other one from now on.

        ``returning``: the other one is still to be applied and comes by ``take_back``.
        """
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
        for p, view in zip(self.parameters, self._filling.views, strict=True):
            p.grad = view

    def lose(self, filled: Buffer | None) -> None:
        """The summation of ``filled`` has failed, and may still be writing to it: it is never used again."""
        if filled is not None and (self._filling is None or self._filling is filled):
            self._filling = self._spare or Buffer(self.parameters)
            self._spare = None
            self._attach()

    def discard(self) -> None:
        """Forget the contribution in progress (a ``break`` cut it off)."""
        if self._filling is not None:
            for flat in self._filling.flats:
                flat.zero_()
        self._attach()
