"""Flat gradient buffers: where gradients accumulate, and how they are handed in without a copy.

Question  How does a contribution become one flat buffer while the next one already accumulates?
Holds     In a group every ``p.grad`` is a view into one of two flat buffers (per dtype), which are swapped at each
          hand-in; autograd adds into the view in place. The version counter of a view tells whether the parameter got a
          gradient, and whether the script changed it. The first touch of memory is slow, so both buffers are made in
          the background while a worker joins its group. A worker alone hands nothing in: autograd keeps its own
          tensors, as in plain PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from pliant.bitmaps import bitmap, common
from pliant.bitmaps import members as members_of
from pliant.errors import UsageError
from pliant.tensors import allocation, buckets, layout

_ZERO_GRAD = (
    "the gradients were cleared or replaced by the script: remove optimizer.zero_grad() "
    "(and anything else that changes p.grad; clipping is join(clip_norm=…)) from the loop; "
    "Pliant clears them after each update"
)
_OWN_BACKWARD = (
    "gradients were computed without Pliant, which does not know how many samples they stand for: "
    "replace loss.backward() by run.backward(loss)"
)


class FlatGradients:
    """One contribution's gradients: flat tensors, one per dtype, and a view for every parameter in the layout."""

    def __init__(self, parameters: Sequence[Parameter], members: bytes | None = None) -> None:
        """``members``: the parameters in the layout, as a bitmap (``core.trained_set``); None: all of them."""
        self.members = bitmap(range(len(parameters)), len(parameters)) if members is None else members
        sizes, places = layout.placed(parameters, self.members)
        device = parameters[0].device
        by_dtype = {dtype: allocation.fresh((size,), dtype, device).zero_() for dtype, size in sizes.items()}
        self.flats = list(by_dtype.values())
        self.views: list[Tensor | None] = [None] * len(parameters)
        """by parameter; None: it is not in the layout"""
        for index, (start, _) in places.items():
            self.views[index] = layout.view(by_dtype[parameters[index].dtype], start, parameters[index])
        self.versions = self.seen()
        self.loose: dict[int, Tensor | None] = {}
        """gradients of parameters that are trained but not in the layout yet (just unfrozen), by parameter"""
        self.trained: bytes | None = None
        """the parameters that were trained in every pass of this contribution; None: there was no pass yet"""
        self.cut = buckets.cut(parameters, places)
        self.parts = [by_dtype[part.dtype][part.start : part.stop] for part in self.cut]
        """the same memory as buckets, in the order in which a backward pass completes them"""

    def seen(self) -> list[int]:
        """The version of every view; -1 for a parameter without a view."""
        return [-1 if view is None else view._version for view in self.views]

    def present(self) -> int:
        """The bitmap of parameters that got a gradient."""
        now = zip(self.seen(), self.versions, strict=True)
        got = sum(1 << index for index, (version, before) in enumerate(now) if version != before)
        return got | sum(1 << index for index, gradient in self.loose.items() if gradient is not None)

    def clear(self) -> None:
        """Empty the buffer."""
        for flat in self.flats:
            flat.zero_()
        self.loose, self.trained = {}, None

    def leave_out(self, indices: Sequence[int]) -> None:
        """Set the gradients of these parameters to zero: the update is without them."""
        for index in indices:
            view = self.views[index]
            if view is not None:
                view.zero_()

    @torch.no_grad()
    def laid_out_for(self, parameters: Sequence[Parameter], members: bytes) -> FlatGradients:
        """The same gradients in another layout; gradients of parameters outside the layout are dropped."""
        if members == self.members:
            self.loose = {}
            return self
        other, present = FlatGradients(parameters, members), self.present()
        other.trained = self.trained
        for index, view in enumerate(other.views):
            own = self.views[index] if self.views[index] is not None else self.loose.get(index)
            # The copy also increments the version counter, which marks the parameter as having a gradient.
            if view is not None and own is not None and present >> index & 1:
                view.copy_(own)
        return other

    def squared_norm(self) -> float:
        """The squared norm of all gradients, in float64 across dtypes; not finite if any element is not."""
        return sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in self.flats)

    def scale(self, factor: float) -> None:
        """Multiply all gradients in place; a factor of one costs nothing.

        Those outside of the layout, too: they may be laid out later (``laid_out_for``).
        """
        if factor != 1.0:
            for flat in self.flats:
                flat.mul_(factor)
            for gradient in self.loose.values():
                if gradient is not None:
                    # ``.data`` has a version counter of its own: the script has not changed the gradient.
                    gradient.data.mul_(factor)

    def scaled_norm(self, part: int, factor: float) -> float:
        """Multiply one bucket in place and return its squared norm afterwards."""
        if factor != 1.0:
            self.parts[part].mul_(factor)
        return float(torch.linalg.vector_norm(self.parts[part])) ** 2


class _Making:
    """Buffers that are being made in the background."""

    def __init__(self, parameters: Sequence[Parameter], members: bytes | None, count: int) -> None:
        self._parameters = parameters
        self._members = members
        self._count = count
        self._made: list[FlatGradients] = []
        # Not a daemon: at exit Python would stop a daemon thread inside torch, which aborts the process.
        self._thread = threading.Thread(target=self._make, name="pliant-memory")
        self._thread.start()

    def _make(self) -> None:
        for _ in range(self._count):
            self._made.append(FlatGradients(self._parameters, self._members))

    def result(self) -> list[FlatGradients]:
        """All buffers. Those that could not be made in the background are made here, and raise here."""
        self._thread.join()
        missing = self._count - len(self._made)
        return [*self._made, *(FlatGradients(self._parameters, self._members) for _ in range(missing))]


class Gradients:
    """The gradients of ``parameters`` over the rounds of a run. Bit i of a bitmap stands for parameter i."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        *,
        grouped: bool,
        overlaps: bool = True,
        members: bytes | None = None,
    ) -> None:
        """``grouped``: gradients will be summed with other workers. ``overlaps``: a contribution may accumulate while
        another one is in flight. ``members``: the parameters in the layout, as a bitmap; None: all."""
        self.parameters = list(parameters)
        self.optimized: Sequence[int] = range(len(self.parameters))
        """the parameters that the optimizer holds; without a group only their gradients are checked and cleared"""
        everything = bitmap(range(len(self.parameters)), len(self.parameters))
        self._members = everything if members is None else members
        """the layout of contributions"""
        self._spare: FlatGradients | None = None
        self._filling: FlatGradients | None = None
        self._versions: list[int] = []
        self._frozen: set[int] = set()
        """in the layout, but frozen by the script now: ``p.grad`` may be None"""
        self._alone: bytes | None = None
        """without a group: the parameters that were trained in every pass of the contribution"""
        self._computed: dict[int, int] = {}
        """without a group: versions of the gradients after the last pass, by parameter; empty: there was no pass"""
        self._left_over = self._loose_versions()
        """without a group: versions of the gradients that the last update, or the script before it, left behind"""
        self._making = _Making(self.parameters, self._members, 2 if overlaps else 1) if grouped else None
        self.orderly: bool | None = None
        """whether a backward pass adds to each gradient once; None: not known yet"""
        self.late = False
        """in the last pass a gradient was added to after its bucket was reported as complete"""

    def _begin(self) -> None:
        """Take the buffers from the background before the first use."""
        if self._making is not None:
            self._filling, *spare = self._making.result()
            self._spare, self._making = (spare[0] if spare else None), None
            self._attach()

    def _new(self) -> FlatGradients:
        return FlatGradients(self.parameters, self._members)

    def _attach(self) -> None:
        """Point every ``p.grad`` at the buffer to be filled."""
        if self._filling is None:
            self._computed, self._left_over, self._alone = {}, self._loose_versions(), None
            return
        self._filling.loose, self._filling.trained = {}, None
        self._show()
        self._filling.versions = self._filling.seen()
        self._versions = list(self._filling.versions)

    def _show(self) -> None:
        assert self._filling is not None
        for index, (p, view) in enumerate(zip(self.parameters, self._filling.views, strict=True)):
            if view is not None:
                p.grad = view
            elif index in self._filling.loose:
                p.grad = self._filling.loose[index]

    # -- what the script may not do

    def check(self) -> None:
        """Raise if the script has cleared, replaced or changed gradients since the last ``backward``."""
        self._begin()
        if self._filling is None:
            self._check_alone()
            return
        filling = self._filling
        for index, (view, version) in enumerate(zip(filling.views, self._versions, strict=True)):
            p = self.parameters[index]
            if view is None:
                if index in filling.loose and (p.grad is not filling.loose[index] or _version(p.grad) != version):
                    raise UsageError(_ZERO_GRAD)
                continue
            if not p.requires_grad:
                # A script that freezes a layer may also clear its gradients.
                self._frozen.add(index)
                continue
            if p.grad is not view:
                if index not in self._frozen or p.grad is not None:
                    raise UsageError(_ZERO_GRAD)
                p.grad = view
            if view._version != version:
                untouched = self._versions == filling.versions
                raise UsageError(_OWN_BACKWARD if untouched and bool(view.any()) else _ZERO_GRAD)
            self._frozen.discard(index)

    def _check_alone(self) -> None:
        now = self._loose_versions()
        if self._computed:
            if any(now.get(index, version) != version for index, version in self._computed.items()):
                raise UsageError(_ZERO_GRAD)
            return
        # Gradients that a new parameter group already has are not part of a contribution.
        if any(version not in (-1, self._left_over.get(index, version)) for index, version in now.items()):
            gradients = [self.parameters[index].grad for index in now]
            own = any(gradient is not None and bool(gradient.any()) for gradient in gradients)
            raise UsageError(_OWN_BACKWARD if own else _ZERO_GRAD)
        # Cleared as late as in a plain loop: freed earlier, their memory would be fragmented by other tensors.
        for index in self.optimized:
            self.parameters[index].grad = None
        self._left_over = dict.fromkeys(now, -1)

    # -- a backward pass

    def admit(self, now: bytes) -> None:
        """The coming backward pass trains these parameters (a bitmap)."""
        filling = self.filling
        if filling is None:
            self._alone = now if self._alone is None else common(self._alone, now)
            return
        filling.trained = now if filling.trained is None else common(filling.trained, now)
        if now != filling.members:
            for index in members_of(now):
                if filling.views[index] is None and index not in filling.loose:
                    # A gradient from before the parameter was trained is not part of a contribution.
                    self.parameters[index].grad = None
                    filling.loose[index] = None

    def accumulated(self) -> None:
        """A ``backward`` has just run: remember the versions of the gradients."""
        filling = self._filling
        if filling is None:
            self._computed = self._loose_versions()
            return
        self._versions = filling.seen()
        for index in filling.loose:
            gradient = filling.loose[index] = self.parameters[index].grad
            self._versions[index] = _version(gradient)

    @property
    def trained(self) -> bytes | None:
        """The parameters trained in every pass of the contribution in progress; None: there was no pass."""
        return self._alone if self._filling is None else self._filling.trained

    def _loose_versions(self) -> dict[int, int]:
        return {index: _version(self.parameters[index].grad) for index in self.optimized}

    def present(self) -> int:
        """The bitmap of parameters that got a gradient in this contribution."""
        if self._filling is not None:
            return self._filling.present()
        got = (index for index in self.optimized if self._computed and self.parameters[index].grad is not None)
        return sum(1 << index for index in got)

    # -- in buckets

    def parts(self, members: bytes) -> int:
        """Number of buckets of a contribution with this layout; below 2: it can only be summed as a whole."""
        self._begin()
        if self._filling is None:
            return 0
        if not members or members == self._filling.members:
            return len(self._filling.parts)
        return len(buckets.cut(self.parameters, layout.placed(self.parameters, members)[1]))

    @contextmanager
    def watched(self, ready: Callable[[int], None]) -> Iterator[None]:
        """Call ``ready`` with the index of each bucket that the backward pass inside the ``with`` completes."""
        filling = self.filling
        assert filling is not None
        with buckets.watched(self.parameters, filling.cut, ready) as backward:
            yield
        self.late = backward.late
        self.orderly = self.orderly is not False and not backward.twice

    def written(self, values: Sequence[float]) -> Tensor:
        """A tensor of numbers that are summed along with the gradients."""
        return torch.tensor(values, dtype=torch.float64)

    def read(self, summed: Tensor) -> list[float]:
        """The numbers in such a tensor after the sum."""
        return summed.tolist()

    # -- handing in

    @property
    def filling(self) -> FlatGradients | None:
        """The buffer of the contribution in progress; None without a group."""
        self._begin()
        return self._filling

    def lay_out(self, members: bytes) -> None:
        """Use the layout ``members`` from now on, also for the contribution in progress."""
        filling = self.filling
        if not members or filling is None:
            return
        self._members = members
        if filling.members != members or filling.loose:
            self.check()
            self._filling = filling.laid_out_for(self.parameters, members)
            self._release(filling)
            self._show()
            self._versions = self._filling.seen()

    def _release(self, filling: FlatGradients) -> None:
        """Clear ``p.grad`` of parameters that are no longer in the layout."""
        assert self._filling is not None
        for index in {*members_of(filling.members), *filling.loose} - set(members_of(self._filling.members)):
            self.parameters[index].grad = None

    def hand_in(self, *, overlap: bool, returning: bool) -> FlatGradients | None:
        """Give the filled buffer to the summation; with an overlap, fill the other one from now on.

        ``returning``: the other one is still to be applied, and comes back by ``take_back``.
        """
        self._begin()
        filled = self._filling
        if filled is not None and overlap:
            self._filling, self._spare = self._spare, None
            if self._filling is not None and self._filling.members != self._members:
                self._filling = self._new()
            if self._filling is None and not returning:
                self._filling = self._new()
            if self._filling is not None:
                self._attach()
        return filled

    def expose(self, filled: FlatGradients | None, present: int) -> None:
        """Set every ``p.grad`` for the optimizer: the reduced gradient, or None if no worker had one."""
        for index in self.optimized:
            p = self.parameters[index]
            if not present >> index & 1:
                p.grad = None
            elif filled is not None:
                p.grad = filled.views[index]

    def take_back(self, filled: FlatGradients | None) -> None:
        """The update (or the skip) is done with ``filled``: clear it; fill it next, or keep it as the spare buffer."""
        if filled is None:
            self._attach()
            return
        if filled.members != self._members:
            if self._filling is filled:
                self._filling = None
            for index in set(members_of(filled.members)) - set(members_of(self._members)):
                self.parameters[index].grad = None
            filled = self._new()
        filled.clear()
        if self._filling is None or self._filling is filled:
            self._filling = filled
            self._attach()
            return
        self._spare = filled
        self._show()

    def lose(self, filled: FlatGradients | None) -> None:
        """Do not use ``filled`` any more: a summation that has failed may still be writing to it."""
        if filled is not None and (self._filling is None or self._filling is filled):
            spare, self._spare = self._spare, None
            self._filling = spare if spare is not None and spare.members == self._members else self._new()
            self._attach()
        elif filled is not None:
            self._show()

    def fill(self, buffer: FlatGradients, *, begun: bool) -> None:
        """Accumulate in ``buffer`` from now on; ``begun``: it already holds a part of the contribution."""
        self._begin()
        self._filling = buffer
        if begun:
            self._show()
            self._versions = buffer.seen()
            for index, gradient in buffer.loose.items():
                self._versions[index] = _version(gradient)
        else:
            self._attach()

    def discard(self) -> None:
        """Drop the contribution in progress (after a ``break``, or after a pass that raised)."""
        if self._making is not None:
            return
        if self._filling is not None:
            for index in self._filling.loose:
                self.parameters[index].grad = None
            self._filling.clear()
        self._attach()


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
