"""The order of the samples: which sample of the dataset is at a position of an epoch.

Question  How does a position become an index, without a table of the whole epoch?
Holds     The order of (seed, epoch, length) is a permutation, the same on every worker. Only the positions that are
          asked for are computed: an epoch of any length begins at once and costs a few hundred kilobytes. What the
          user's ``order`` returns is read in place and never copied. No order is made for a call that the group has
          left already.
Source    A Feistel network over two unequal halves, with cycle walking (Black and Rogaway, 2002, "Ciphers with
          arbitrary finite domains", method FE2 with addition); splitmix64's finaliser; docs/design/0019-order.md.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
from torch import Tensor

from pliant.core.group_state import FEISTEL, PERMUTATION
from pliant.errors import UsageError
from pliant.tensors.randomness import ORDER, mixed, stream

UserOrder = Callable[[int, int], Any]
"""(epoch, number of samples) -> indices in the order in which they are taken; the same on all workers"""

Indices = np.ndarray[Any, np.dtype[np.int64]]

ROUNDS, ROUNDS_OF_SHORT, SHORT = 8, 16, 256
"""Four make pairs of positions independent where the halves are large; for five samples ten are too few."""
_TABLED = 1 << 17
"""Longer halves (more than 1.7e10 samples) are mixed on demand: their tables would take 8 MB and more."""
_ALONE = 7
"""Up to this many positions plain numbers are faster than arrays."""
_CHUNK = 1 << 16
"""Indices that are processed together: half a megabyte."""
WHOLLY_COMPARED = 1 << 20
"""Up to this many indices every one is compared, whatever holds them."""
_MASK = (1 << 64) - 1


class Order(Protocol):
    """The indices of an epoch, by position."""

    @property
    def checksum(self) -> int:
        """32 bits that differ between workers with different orders."""
        ...

    def __len__(self) -> int: ...
    def at(self, positions: Sequence[int]) -> list[int]:
        """The indices at these positions."""
        ...


class AsItIs:
    """The dataset's own order."""

    def __init__(self, length: int, *, scheme: str = FEISTEL) -> None:
        self._length = length
        self._scheme = scheme

    def __len__(self) -> int:
        return self._length

    @property
    def checksum(self) -> int:
        if self._scheme == PERMUTATION:
            return _whole_checksum(range(self._length), self._length)
        return zlib.crc32(f"as it is {self._length}".encode())

    def at(self, positions: Sequence[int]) -> list[int]:
        return list(positions)


class Shuffled:
    """The permutation of (seed, epoch, length)."""

    def __init__(self, seed: int, epoch: int, length: int) -> None:
        self._length = length
        self.checksum = zlib.crc32(f"{FEISTEL} {seed} {epoch} {length}".encode())
        high = math.isqrt(max(length - 1, 0)) + 1
        # The domain has fewer than ``high`` numbers too many: walks are rare.
        self._sizes = high, max(1, -(-length // high))
        rounds = ROUNDS if length >= SHORT else ROUNDS_OF_SHORT
        bits = stream(seed, epoch, length, ORDER)
        self._keys = [stream(bits, number, 0, ORDER) for number in range(rounds)]
        self._tables: list[Indices] = []
        if high <= _TABLED:
            for number, key in enumerate(self._keys):
                size, other = self._sizes[number % 2], self._sizes[1 - number % 2]
                self._tables.append(_round(key, np.arange(other), size))
        self.computed = 0
        """positions asked for so far"""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._length:
            raise IndexError(position)
        return self.at([position])[0]

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._length, _CHUNK):
            yield from self.at(range(start, min(start + _CHUNK, self._length)))

    def at(self, positions: Sequence[int]) -> list[int]:
        self.computed += len(positions)
        if len(positions) <= _ALONE:
            return [self._walked(position) for position in positions]
        return self.indices(np.asarray(positions, dtype=np.int64)).tolist()

    def indices(self, positions: Indices) -> Indices:
        """The same, for many."""
        found = self._permuted(positions)
        while (found >= self._length).any():
            beyond = found >= self._length
            found[beyond] = self._permuted(found[beyond])
        return found

    def _permuted(self, numbers: Indices) -> Indices:
        """Of the domain, many at once."""
        low_size = self._sizes[1]
        halves = [*np.divmod(numbers, low_size)]
        for number, key in enumerate(self._keys):
            turn, other = number % 2, 1 - number % 2
            size = self._sizes[turn]
            if self._tables:
                added = self._tables[number].take(halves[other])
            else:
                added = _round(key, halves[other], size)
            added += halves[turn]
            halves[turn] = np.remainder(added, size, out=added)
        high, low = halves
        high *= low_size
        high += low
        return high

    def _walked(self, number: int) -> int:
        """The same for one number, up to the first that is a position."""
        while True:
            halves = [*divmod(number, self._sizes[1])]
            for turn, key in enumerate(self._keys):
                at, other = turn % 2, halves[1 - turn % 2]
                size = self._sizes[at]
                if self._tables:
                    added = self._tables[turn].item(other)
                else:
                    added = (mixed(key + other & _MASK) >> 32) * size >> 32
                halves[at] = (halves[at] + added) % size
            number = halves[0] * self._sizes[1] + halves[1]
            if number < self._length:
                return number


def _round(key: int, values: Indices, size: int) -> Indices:
    """A number below ``size`` for each value: the round function."""
    state = values.astype(np.uint64)
    state += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    state >>= np.uint64(32)
    state *= np.uint64(size)
    state >>= np.uint64(32)
    return state.astype(np.int64)


class Given:
    """What the user's ``order`` has returned for an epoch, read in place.

    Workers compare the length and the indices: all of them in an array or a tensor, and in any sequence of up to 2²⁰;
    of a longer list, range or lazy sequence those at 65,536 positions spread over it, the ends included. An index that
    no sample has is refused when it is compared, or else when it is drawn.
    """

    def __init__(self, indices: Any, epoch: int, samples: int, *, scheme: str = FEISTEL) -> None:
        self._name = f"order(epoch={epoch}, n={samples})"
        self._samples = samples
        is_sequence = hasattr(indices, "__len__") and hasattr(indices, "__getitem__")
        if not is_sequence or isinstance(indices, Mapping | str | bytes):
            raise UsageError(f"{self._name} returned {_described(indices)}: {self._remedy}")
        if _is_array(indices) and (indices.ndim != 1 or (len(indices) and not _whole(indices))):
            raise UsageError(f"{self._name} returned {_described(indices)}: {self._remedy}")
        self._indices: Any = indices
        self._array = _is_array(indices)
        self._wholly = self._array or len(indices) <= WHOLLY_COMPARED or scheme == PERMUTATION
        self._checksum: int | None = None

    @property
    def _remedy(self) -> str:
        return f"it must return indices from 0 to {self._samples - 1}, as a list, a range, an array or a sequence"

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def checksum(self) -> int:
        if self._checksum is None:
            length = len(self._indices)
            if self._wholly:
                self._checksum = _whole_checksum(self, length)
            else:
                spread = [place * (length - 1) // (_CHUNK - 1) for place in range(_CHUNK)]
                self._checksum = zlib.crc32(self._checked(spread).tobytes(), length & 0xFFFFFFFF)
        return self._checksum

    def at(self, positions: Sequence[int]) -> list[int]:
        return self._checked(positions).tolist()

    def chunk(self, start: int, stop: int) -> Indices:
        """The indices at successive positions."""
        return self._checked(range(start, stop))

    def _checked(self, positions: Sequence[int]) -> Indices:
        found = self._read(positions)
        if len(found) and (found.min() < 0 or found.max() >= self._samples):
            raise UsageError(f"{self._name} has an index from {found.min()} to {found.max()}: {self._remedy}")
        return found

    def _read(self, positions: Sequence[int]) -> Indices:
        indices = self._indices
        if self._array:
            # A slice is no copy.
            successive = isinstance(positions, range)
            read = indices[positions.start : positions.stop] if successive else indices[list(positions)]
            return np.asarray(read.detach().cpu() if isinstance(read, Tensor) else read).astype(np.int64, copy=False)
        try:
            return np.asarray([operator.index(indices[position]) for position in positions], dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise UsageError(f"{self._name} has something else than indices in it ({error}): {self._remedy}") from None


def _is_array(indices: object) -> TypeGuard[np.ndarray[Any, Any] | Tensor]:
    return isinstance(indices, np.ndarray | Tensor)


def _whole(indices: Any) -> bool:
    if isinstance(indices, Tensor):
        return not (indices.is_floating_point() or indices.is_complex() or indices.dtype.itemsize == 0)
    return indices.dtype.kind in "iu"


def _described(indices: Any) -> str:
    if _is_array(indices):
        return f"an array of {indices.dtype} and shape {tuple(indices.shape)}"
    return f"a {type(indices).__name__}"


class Permutation:
    """The order of runs whose journal names no other: a table, made as a whole."""

    def __init__(self, seed: int, epoch: int, length: int) -> None:
        self._table = np.random.default_rng(stream(seed, epoch, length, ORDER)).permutation(length)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def checksum(self) -> int:
        return _whole_checksum(self._table, len(self._table))

    def at(self, positions: Sequence[int]) -> list[int]:
        return self._table[list(positions)].tolist()


def _whole_checksum(indices: Any, length: int) -> int:
    """Of all indices as 64-bit numbers, a chunk at a time."""
    checksum = 0
    for start in range(0, length, _CHUNK):
        stop = min(start + _CHUNK, length)
        chunk = indices.chunk(start, stop) if isinstance(indices, Given) else np.asarray(indices[start:stop])
        checksum = zlib.crc32(np.ascontiguousarray(chunk, dtype=np.int64).tobytes(), checksum)
    return checksum


def epoch_order(order: UserOrder | None, seed: int, epoch: int, length: int, scheme: str = FEISTEL) -> Order:
    """The indices of a loop over batches: a permutation of the seed's, or what the user's ``order`` says."""
    if order is not None:
        return Given(order(epoch, length), epoch, length, scheme=scheme)
    if scheme == PERMUTATION:
        return Permutation(seed, epoch, length)
    if scheme != FEISTEL:
        raise UsageError(
            f"this run takes its samples in an order ({scheme}) that this Pliant does not know: "
            "use the version that began it"
        )
    return Shuffled(seed, epoch, length)


class Ordering:
    """The order of one call, made when it is first asked for, by the scheme that the group has then."""

    def __init__(self, make: Callable[[str], Order], scheme: Callable[[], str]) -> None:
        self._make = make
        self._scheme = scheme
        self._made: tuple[str, Order] | None = None

    @property
    def made(self) -> Order:
        """The order itself."""
        scheme = self._scheme()
        if self._made is None or self._made[0] != scheme:
            self._made = scheme, self._make(scheme)
        return self._made[1]

    @property
    def length(self) -> int:
        return len(self.made)

    @property
    def checksum(self) -> int:
        return self.made.checksum
