"""Exact numbers instead of tensors.

Question  How is a wrong, lost or doubled gradient noticed at once, without rounding and without torch's cost?
Holds     Values are integers modulo a prime. Addition, division by a weight and multiplication by a float's exact ratio
          are exact and always take the same time, so results can be compared for equality. An error in a sum goes
          unnoticed with probability 2⁻⁶¹. The methods are those of tensors that the worker calls.
Source    ours.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pliant import bitmaps
from pliant.bitmaps import bitmap, common

PRIME = (1 << 61) - 1
POISON = 0x5EED5EED5EED5EED % PRIME
"""left in the memory of an exchange that did not complete"""
PARAMETERS = 3
PARTS = ((0,), (1, 2))
"""the buckets: indices of the parameters that are summed together"""
ALL = bitmap(range(PARAMETERS), PARAMETERS)


members_of = functools.lru_cache(bitmaps.members)


@functools.lru_cache(maxsize=4096)
def exact(value: float) -> int:
    """A float as a number modulo the prime: numerator divided by denominator of its exact ratio."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * pow(denominator, -1, PRIME) % PRIME


@functools.lru_cache(maxsize=65536)
def gradient(epoch: int, position: int) -> tuple[int, ...]:
    """The gradient of one sample for each parameter. The last parameter gets one from every fifth sample only."""
    values = [zlib.crc32(b"%d %d %d" % (epoch, position, index)) + 1 for index in range(PARAMETERS)]
    if position % 5:
        values[-1] = 0
    return tuple(values)


class Number:
    """A parameter, or a copy of one."""

    __slots__ = ("__weakref__", "grad", "nbytes", "requires_grad", "value")
    shape = ()
    dtype = device = "number"

    def __init__(self, value: int, nbytes: int = 8) -> None:
        self.value = value
        self.nbytes = nbytes
        """the size in bytes that it claims"""
        self.grad: Number | None = None
        self.requires_grad = True

    def requires_grad_(self, requires: bool) -> None:
        self.requires_grad = requires

    def detach(self) -> Number:
        return self

    def is_contiguous(self) -> bool:
        """False: there is no memory that could be copied as a whole."""
        return False

    def cpu(self) -> Number:
        return self

    def clone(self) -> Number:
        return Number(self.value)

    def copy_(self, other: Number) -> None:
        self.value = other.value


class Flat:
    """A flat buffer, which is summed in place."""

    __slots__ = ("values",)

    def __init__(self, values: list[int]) -> None:
        self.values = values


class _NumberView:
    """One parameter's part of a buffer."""

    __slots__ = ("_flat", "_index")

    def __init__(self, flat: Flat, index: int) -> None:
        self._flat, self._index = flat, index

    @property
    def value(self) -> int:
        return self._flat.values[self._index]

    def add(self, value: int) -> None:
        self._flat.values[self._index] += value

    def clone(self) -> Number:
        return Number(self.value)


class VirtualBuffer:
    """One contribution's gradients: ``tensors.gradients.FlatGradients``."""

    def __init__(self, members: bytes = ALL) -> None:
        self.members = members
        laid_out = [[index for index in part if index in members_of(members)] for part in PARTS]
        self.flats = self.parts = [Flat([0] * len(part)) for part in laid_out if part]
        self.views: list[_NumberView | None] = [None] * PARAMETERS
        for flat, part in zip(self.flats, (part for part in laid_out if part), strict=True):
            for place, index in enumerate(part):
                self.views[index] = _NumberView(flat, place)
        self.loose: dict[int, int] = {}
        self.trained: bytes | None = None
        self.present = 0

    def add(self, index: int, value: int) -> None:
        """A gradient of one parameter."""
        view = self.views[index]
        if view is None:
            self.loose[index] = self.loose.get(index, 0) + value
        else:
            view.add(value)

    def leave_out(self, indices: Sequence[int]) -> None:
        for view in (self.views[index] for index in indices):
            if view is not None:
                view.add(-view.value)

    def laid_out_for(self, members: bytes) -> VirtualBuffer:
        """The same gradients in another layout."""
        if members == self.members:
            self.loose = {}
            return self
        other = VirtualBuffer(members)
        other.trained, other.present = self.trained, 0
        for index, view in enumerate(other.views):
            own = self.views[index]
            if view is not None and self.present >> index & 1:
                view.add(own.value if own is not None else self.loose[index])
                other.present |= 1 << index
        return other

    def squared_norm(self) -> float:
        """A number that depends on all values, so that a member which sums something else is noticed."""
        return sum(self.scaled_norm(part, 1.0) for part in range(len(self.parts)))

    def scaled_norm(self, part: int, factor: float) -> float:
        """The same for one bucket."""
        return 0.5 + sum(self.parts[part].values) % 1009 / 1009.0

    def scale(self, factor: float) -> None:
        if factor != 1.0:
            by = exact(factor)
            for flat in self.flats:
                flat.values = [value * by % PRIME for value in flat.values]

    def clear(self) -> None:
        for flat in self.flats:
            flat.values = [0] * len(flat.values)
        self.present = 0


class VirtualGradients:
    """``tensors.gradients.Gradients``: two buffers that are swapped at each hand-in."""

    def __init__(self, parameters: Sequence[Number], look: Callable[[], bytes]) -> None:
        self.parameters = parameters
        self.orderly = True
        self.late = False
        self.optimized: Sequence[int] = range(PARAMETERS)
        self._look = look
        self._members = look()
        self._spare: VirtualBuffer | None = None
        self._filling: VirtualBuffer | None = VirtualBuffer(self._members)

    @property
    def filling(self) -> VirtualBuffer | None:
        return self._filling

    def parts(self, members: bytes) -> int:
        return sum(any(index in members_of(members) for index in part) for part in PARTS)

    @property
    def trained(self) -> bytes | None:
        return None if self._filling is None else self._filling.trained

    def check(self) -> None:
        """Nothing to check: no script touches them."""

    def lay_out(self, members: bytes) -> None:
        if members and self._filling is not None:
            self._members = members
            self._filling = self._filling.laid_out_for(members)

    def present(self) -> int:
        assert self._filling is not None
        return self._filling.present

    def hand_in(self, *, overlap: bool, returning: bool) -> VirtualBuffer | None:
        filled = self._filling
        if filled is not None and overlap:
            self._filling, self._spare = self._spare, None
            if self._filling is not None and self._filling.members != self._members:
                self._filling = VirtualBuffer(self._members)
            if self._filling is None and not returning:
                self._filling = VirtualBuffer(self._members)
        return filled

    def expose(self, filled: VirtualBuffer | None, present: int) -> None:
        assert filled is not None
        for index in self.optimized:
            view = filled.views[index]
            self.parameters[index].grad = Number(view.value) if view is not None and present >> index & 1 else None

    def take_back(self, filled: VirtualBuffer | None) -> None:
        assert filled is not None
        if filled.members != self._members:
            if self._filling is filled:
                self._filling = None
            filled = VirtualBuffer(self._members)
        filled.clear()
        if self._filling is None or self._filling is filled:
            self._filling = filled
        else:
            self._spare = filled

    def lose(self, filled: VirtualBuffer | None) -> None:
        if filled is not None and (self._filling is None or self._filling is filled):
            spare, self._spare = self._spare, None
            fits = spare is not None and spare.members == self._members
            self._filling = spare if fits else VirtualBuffer(self._members)

    def discard(self) -> None:
        if self._filling is not None:
            self._filling.clear()

    def add(self, epoch: int, positions: Sequence[int], ready: Callable[[int], None] = lambda _: None) -> None:
        """Add gradients as ``backward`` does; ``ready`` is called with each bucket that is complete."""
        filling = self._filling
        assert filling is not None, "a gradient is computed while both buffers are away"
        now = self._look()
        filling.trained = now if filling.trained is None else common(filling.trained, now)
        told = 0
        for part in PARTS:
            for index in part:
                for position in positions if index in members_of(now) else ():
                    value = gradient(epoch, position)[index]
                    if value:
                        filling.add(index, value)
                        filling.present |= 1 << index
            if any(filling.views[index] is not None for index in part):
                ready(told)
                told += 1

    def written(self, values: Sequence[float]) -> Flat:
        return Flat(list(values))  # type: ignore[arg-type]

    def read(self, summed: Flat) -> list[float]:
        return list(summed.values)


class VirtualBuffers:
    """``tensors.buffers.ModelBuffers`` with one running statistic, or none."""

    def __init__(self, count: int) -> None:
        self._own = [0] * count
        self._handed_in: list[int] = []
        self._merged: dict[int, int] = {}
        self._changed = False
        self.live = 0

    def __len__(self) -> int:
        return len(self._own)

    def forward(self, positions: Sequence[int]) -> None:
        """Change the statistic, as a forward pass does."""
        if self._own:
            self._own[0] = (self._own[0] * 7 + sum(positions) + 1) % PRIME
            self._changed = True

    def changed(self) -> int:
        return int(self._changed)

    def training_bits(self) -> int:
        return 0

    def grow(self, changed: int) -> bool:
        new = changed & ~self.live
        self.live |= changed
        return bool(new)

    def begin(self, changing: int, *, kept: bool) -> None:
        assert not changing, "it has no running statistics"

    def begin_anew(self, live: int) -> None:
        self.live = live

    def hand_in(self, weight: float, *, leader: bool) -> Flat | None:
        self._handed_in = list(self._own) if self.live else []
        return Flat([self._own[0] * exact(weight) % PRIME]) if self.live else None

    def merge(self, summed: Flat | None, weight: float) -> None:
        if summed is None or weight <= 0:
            return
        value = summed.values[0] * pow(exact(weight), -1, PRIME) % PRIME
        self._own[0] = (self._own[0] + value - self._handed_in[0]) % PRIME
        self._merged = {0: value}

    def value(self, index: int) -> Number:
        return Number(self._own[index])

    def nbytes(self, index: int) -> int:
        return 8

    def held_values(self) -> tuple[int, ...]:
        """The present values of the model's buffers."""
        return tuple(self._own)

    def is_live(self, index: int) -> bool:
        return bool(self.live >> index & 1)

    def adopt(self, values: Mapping[int, Number], *, merged: bool) -> None:
        for index, number in values.items():
            if merged and self.is_live(index):
                continue
            self._own[index] = number.value
            if self._handed_in:
                self._handed_in[index] = number.value
            if self.is_live(index):
                self._merged[index] = number.value
        self._changed = False

    def go_alone(self, *, kept: bool) -> None:
        self._merged = dict(enumerate(self._own)) if kept and self.live else {}

    def drain(self) -> None:
        for index, value in self._merged.items():
            self._own[index] = value

    def exchange(self) -> None:
        for index, value in self._merged.items():
            self._merged[index], self._own[index] = self._own[index], value


class VirtualLookAhead:
    """``tensors.lookahead.LookAhead``: moves the weights, and returns exactly."""

    def __init__(self, parameters: Sequence[Number]) -> None:
        self._parameters = parameters
        self._plain: list[int] = []
        self.due = False
        self.away = False

    def park(self, gradients: Any, present: int, scale: float, members: Any = None) -> None:
        self.due = True

    def go(self, hyper: Any) -> None:
        assert not self.away, "looked ahead twice"
        self.due, self.away = False, True
        self._plain = [p.value for p in self._parameters]
        for p in self._parameters:
            p.value = (p.value + POISON) % PRIME

    def back(self) -> None:
        self.due = False
        if self.away:
            self.away = False
            for p, plain in zip(self._parameters, self._plain, strict=True):
                p.value = plain

    def plain(self, index: int) -> Number:
        return Number(self._plain[index])

    def exchange(self) -> None:
        held = [p.value for p in self._parameters]
        for p, plain in zip(self._parameters, self._plain, strict=True):
            p.value = plain
        self._plain = held


class VirtualWeightsDigest:
    """``tensors.digest.WeightsDigest``, of one parameter at a time."""

    arithmetic = 1

    def __init__(self, parameters: Sequence[Number]) -> None:
        self._parameters = parameters
        self.parts = len(parameters)

    def note_reduction(self) -> None:
        """Nothing to note: sums of integers do not depend on their order."""

    def whole(self) -> tuple[int, ...]:
        return tuple(self.of(turn) for turn in range(self.parts))

    def of(self, turn: int | None) -> int:
        read = self._parameters if turn is None else [self._parameters[turn % self.parts]]
        return zlib.crc32(b" ".join(b"%d" % p.value for p in read))
