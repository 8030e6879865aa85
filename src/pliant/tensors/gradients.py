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

from pliant.bitmaps import bitmap, common
from pliant.bitmaps import members as members_of
from pliant.errors import UsageError
from pliant.tensors import allocation, buckets

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


class FlatGradients:
    """One contribution's gradients: flat tensors, one per dtype, and a view for every parameter that is laid out."""

    def __init__(self, parameters: Sequence[Parameter], members: bytes | None = None) -> None:
        """``members``: the set of parameters that are laid out (``core.trained_set``); None: all of them."""
        self.members = bitmap(range(len(parameters)), len(parameters)) if members is None else members
        sizes, places = _placed(parameters, self.members)
        device = parameters[0].device
        by_dtype = {dtype: allocation.fresh((size,), dtype, device).zero_() for dtype, size in sizes.items()}
        self.flats = list(by_dtype.values())
        self.views: list[Tensor | None] = [None] * len(parameters)
        """by parameter; None: it is not laid out"""
        for index, (start, _) in places.items():
            self.views[index] = _view(by_dtype[parameters[index].dtype], start, parameters[index])
        self.versions = self.seen()
        self.loose: dict[int, Tensor | None] = {}
        """gradients of parameters that are trained and not laid out (unfrozen a moment ago), by parameter"""
        self.trained: bytes | None = None
        """the parameters that every pass of this contribution was for; None: there was no pass yet"""
        self.cut = buckets.cut(parameters, places)
        self.parts = [by_dtype[part.dtype][part.start : part.stop] for part in self.cut]
        """the same memory, in the order in which a backward pass completes it"""

    def seen(self) -> list[int]:
        """The version of every view; -1 where there is none."""
        return [-1 if view is None else view._version for view in self.views]

    def present(self) -> int:
        """The bitmap of parameters that got a gradient."""
        now = zip(self.seen(), self.versions, strict=True)
        got = sum(1 << index for index, (version, before) in enumerate(now) if version != before)
        return got | sum(1 << index for index, gradient in self.loose.items() if gradient is not None)

    def clear(self) -> None:
        """Nothing is in it."""
        for flat in self.flats:
            flat.zero_()
        self.loose, self.trained = {}, None

    def leave_out(self, indices: Sequence[int]) -> None:
        """These have no part in the update."""
        for index in indices:
            view = self.views[index]
            if view is not None:
                view.zero_()

    @torch.no_grad()
    def laid_out_for(self, parameters: Sequence[Parameter], members: bytes) -> FlatGradients:
        """The same gradients in another layout; what that has no room for is dropped."""
        if members == self.members:
            self.loose = {}
            return self
        other, present = FlatGradients(parameters, members), self.present()
        other.trained = self.trained
        for index, view in enumerate(other.views):
            own = self.views[index] if self.views[index] is not None else self.loose.get(index)
            # The copy also moves the version counter, which tells that there is a gradient.
            if view is not None and own is not None and present >> index & 1:
                view.copy_(own)
        return other

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


def _placed(
    parameters: Sequence[Parameter], members: bytes
) -> tuple[dict[torch.dtype, int], dict[int, tuple[int, int]]]:
    """How long the flat buffers of a layout are, and where each parameter lies in that of its dtype."""
    sizes: dict[torch.dtype, int] = {}
    places: dict[int, tuple[int, int]] = {}
    for index in members_of(members):
        p = parameters[index]
        start = sizes.get(p.dtype, 0)
        places[index] = start, start + p.numel()
        sizes[p.dtype] = start + -(-p.numel() // _ALIGN) * _ALIGN
    return sizes, places


def _view(flat: Tensor, start: int, p: Parameter) -> Tensor:
    """Room for a parameter's gradient, with the strides of the parameter: fused optimizers walk both by memory."""
    # ``.data`` gives each view a version counter of its own; slices of one tensor would share one.
    own = flat.data
    if _is_dense(p):
        # Counted from the beginning of the memory, and a large buffer does not begin there.
        return own.as_strided(p.size(), p.stride(), own.storage_offset() + start)
    return own[start : start + p.numel()].view_as(p)


def _is_dense(p: Tensor) -> bool:
    """Whether its elements lie side by side in memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Making:
    """Buffers on their way."""

    def __init__(self, parameters: Sequence[Parameter], members: bytes | None, count: int) -> None:
        self._parameters = parameters
        self._members = members
        self._count = count
        self._made: list[FlatGradients] = []
        # Not a daemon: at its end Python would stop such a thread inside of torch, which aborts the process.
        self._thread = threading.Thread(target=self._make, name="pliant-memory")
        self._thread.start()

    def _make(self) -> None:
        for _ in range(self._count):
            self._made.append(FlatGradients(self._parameters, self._members))

    def result(self) -> list[FlatGradients]:
        """All of them; what could not be made there fails here."""
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
        """``overlaps``: a contribution may accumulate while another one is in flight; ``members``: what is trained."""
        self.parameters = list(parameters)
        self.optimized: Sequence[int] = range(len(self.parameters))
        """what the optimizer holds; without a group its gradients are looked after, and no others"""
        everything = bitmap(range(len(self.parameters)), len(self.parameters))
        self._members = everything if members is None else members
        """what contributions are laid out for"""
        self._spare: FlatGradients | None = None
        self._filling: FlatGradients | None = None
        self._versions: list[int] = []
        self._frozen: set[int] = set()
        """laid out, and without a gradient for as long as the script has it frozen"""
        self._alone: bytes | None = None
        """without a group: the parameters that every pass of the contribution was for"""
        self._computed: dict[int, int] = {}
        """without a group: how the gradients looked after the last pass, by parameter; empty: there was none"""
        self._left_over = self._loose_versions()
        """without a group: what the last update, or the script before its first round, has left in ``p.grad``"""
        self._making = _Making(self.parameters, self._members, 2 if overlaps else 1) if grouped else None
        self.orderly: bool | None = None
        """whether a backward pass adds to each gradient once; None: not known yet"""
        self.late = False
        """in the last pass a gradient was added to after its part was told of"""

    def _begin(self) -> None:
        """Before the first use."""
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
                # Whoever freezes a layer may clear its gradients, too.
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
        # What a new parameter group brings along is nobody's contribution.
        if any(version not in (-1, self._left_over.get(index, version)) for index, version in now.items()):
            gradients = [self.parameters[index].grad for index in now]
            own = any(gradient is not None and bool(gradient.any()) for gradient in gradients)
            raise UsageError(_OWN_BACKWARD if own else _ZERO_GRAD)
        # As late as a plain loop clears them: freed earlier, their memory is cut up by other tensors.
        for index in self.optimized:
            self.parameters[index].grad = None
        self._left_over = dict.fromkeys(now, -1)

    # -- a backward pass

    def admit(self, now: bytes) -> None:
        """The coming pass is for these parameters."""
        filling = self.filling
        if filling is None:
            self._alone = now if self._alone is None else common(self._alone, now)
            return
        filling.trained = now if filling.trained is None else common(filling.trained, now)
        if now != filling.members:
            for index in members_of(now):
                if filling.views[index] is None and index not in filling.loose:
                    # What it had before it was trained is nobody's contribution.
                    self.parameters[index].grad = None
                    filling.loose[index] = None

    def accumulated(self) -> None:
        """A ``backward`` has just run: remember how the gradients look."""
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
        """The parameters that every pass of the contribution in progress was for; None: there was no pass."""
        return self._alone if self._filling is None else self._filling.trained

    def _loose_versions(self) -> dict[int, int]:
        return {index: _version(self.parameters[index].grad) for index in self.optimized}

    def present(self) -> int:
        """The bitmap of parameters that got a gradient in this contribution."""
        if self._filling is not None:
            return self._filling.present()
        got = (index for index in self.optimized if self._computed and self.parameters[index].grad is not None)
        return sum(1 << index for index in got)

    # -- in parts

    def parts(self, members: bytes) -> int:
        """How many a contribution of this layout can be summed in; below 2: only as a whole."""
        self._begin()
        if self._filling is None:
            return 0
        if not members or members == self._filling.members:
            return len(self._filling.parts)
        return len(buckets.cut(self.parameters, _placed(self.parameters, members)[1]))

    @contextmanager
    def watched(self, ready: Callable[[int], None]) -> Iterator[None]:
        """Tell ``ready`` of each part that the backward pass in here completes."""
        filling = self.filling
        assert filling is not None
        with buckets.watched(self.parameters, filling.cut, ready) as backward:
            yield
        self.late = backward.late
        self.orderly = self.orderly is not False and not backward.twice

    def written(self, values: Sequence[float]) -> Tensor:
        """Numbers that are to be summed beside the gradients."""
        return torch.tensor(values, dtype=torch.float64)

    def read(self, summed: Tensor) -> list[float]:
        """What they have become."""
        return summed.tolist()

    # -- handing in

    @property
    def filling(self) -> FlatGradients | None:
        """The buffer of the contribution in progress; None where there is no group."""
        self._begin()
        return self._filling

    def lay_out(self, members: bytes) -> None:
        """Contributions are of these parameters from now on, the one in progress too."""
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
        """Parameters that are laid out no more have no gradient."""
        assert self._filling is not None
        for index in {*members_of(filling.members), *filling.loose} - set(members_of(self._filling.members)):
            self.parameters[index].grad = None

    def hand_in(self, *, overlap: bool, returning: bool) -> FlatGradients | None:
        """Give the filled buffer to the summation; with an overlap, fill the other one from now on.

        ``returning``: the other one is still to be applied and comes by ``take_back``.
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
        """Make ``p.grad`` what the optimizer shall see: the reduced gradient, None where nobody had any."""
        for index in self.optimized:
            p = self.parameters[index]
            if not present >> index & 1:
                p.grad = None
            elif filled is not None:
                p.grad = filled.views[index]

    def take_back(self, filled: FlatGradients | None) -> None:
        """The update (or the skip) is done with ``filled``: clear it; it is filled next, or kept as the spare one."""
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
        """``filled`` is somebody else's from now on (a summation that has failed may still be writing to it)."""
        if filled is not None and (self._filling is None or self._filling is filled):
            spare, self._spare = self._spare, None
            self._filling = spare if spare is not None and spare.members == self._members else self._new()
            self._attach()
        elif filled is not None:
            self._show()

    def fill(self, buffer: FlatGradients, *, begun: bool) -> None:
        """Accumulate in ``buffer`` from now on; ``begun``: it has a part of the contribution already."""
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
        """Forget the contribution in progress (a ``break`` cut it off, or a pass has failed)."""
        if self._making is not None:
            return
        if self._filling is not None:
            for index in self._filling.loose:
                self.parameters[index].grad = None
            self._filling.clear()
        self._attach()


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
