"""A copy of many tensors as of one moment, made while the computation goes on.

Question  How is a large state copied without stopping the thread that trains?
Holds     The copy is made in small pieces, by a background thread and by ``finish``. A thread that is about to change
          the source calls ``finish`` first: it makes the remaining pieces itself, so it never waits for more than one
          piece. If a tensor is changed before that, the copy is unusable, and ``changed`` says so. Memory can be
          prepared in advance, because the first use of a page may take longer than ten copies of it.
Source    docs/design/0014-checkpoints.md.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pliant.tensors import allocation

_PIECE_BYTES = 8 << 20
"""Copied in about 2 ms: the longest that ``finish`` has to wait for another thread."""
_PAGE_BYTES = 4096
# Alignment of torch's own tensors: a cache line.
_ALIGN = 64


class CopyMemory:
    """Memory for the copy of a state, whose pages are touched before the copy begins."""

    def __init__(self, *states: Any) -> None:
        self._size = sum(_size_of(state) for state in states)
        self._memory: Tensor | None = None
        self._taken = 0

    def make(self) -> None:
        """Allocate the memory, and touch every page of it. Call this in a background thread."""
        touched: Any = np.empty(self._size + _ALIGN, dtype=np.uint8)
        for start in range(0, touched.size, _PIECE_BYTES):
            touched[start : start + _PIECE_BYTES : _PAGE_BYTES] = 0
        found = torch.from_numpy(touched)
        start = -found.data_ptr() % _ALIGN
        self._memory = found[start : start + self._size]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, in this memory if there is room for it."""
        size = math.prod(shape) * dtype.itemsize
        start, stop = self._taken, self._taken + size
        if self._memory is None or size == 0 or stop > self._size:
            return allocation.fresh(shape, dtype)
        self._taken += _rounded(size)
        return self._memory[start:stop].view(dtype).view(tuple(shape))


class BackgroundCopy:
    """A copy that is being made."""

    def __init__(self, room: CopyMemory | None = None) -> None:
        self._room_for = allocation.fresh if room is None else room.take
        self._pieces: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._under_way = 0
        self._error: Exception | None = None
        self.changed = False
        """a tensor was changed before its copy was complete"""

    # -- what is copied

    def of(self, value: Any) -> Any:
        """The copy of ``value``, still to be filled: nested dicts, lists and tuples of tensors and plain values."""
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.of(item) for item in value)
        return self.of_tensor(value) if isinstance(value, Tensor) else value

    def of_tensor(self, source: Any) -> Any:
        """The same for one tensor."""
        source = source.detach()
        copy = self._room(source)
        if isinstance(source, Tensor) and source.device.type == "cpu" and source.is_contiguous():
            pairs = zip(_cut(copy), _cut(source), strict=True)
            self._pieces += [self._guarded(source, lambda a=a, b=b: np.copyto(a, b)) for a, b in pairs]
        else:
            self._pieces.append(self._guarded(source, _device_copy(copy, source)))
        return copy

    def _room(self, source: Any) -> Any:
        """Memory for a copy on the host."""
        if not isinstance(source, Tensor):
            return source.clone()
        if source.is_contiguous():
            return self._room_for(source.shape, source.dtype)
        return torch.empty_like(source, device="cpu")

    def _guarded(self, source: Any, copy: Callable[[], object]) -> Callable[[], None]:
        before = _version(source)

        def piece() -> None:
            copy()
            if _version(source) != before:
                self.changed = True

        return piece

    # -- making it

    def finish(self) -> None:
        """Make all remaining pieces, and wait for one that another thread is making."""
        while (piece := self._next()) is not None:
            try:
                piece()
            except Exception as error:
                # Out of memory, say: the thread that writes the copy reports it (``check``), and training goes on.
                self._error = error
            with self._condition:
                self._under_way -= 1
                self._condition.notify_all()
        with self._condition:
            self._condition.wait_for(lambda: self._under_way == 0)
        if self._error is not None:
            self._pieces.clear()

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            if not self._pieces or self._error is not None:
                return None
            self._under_way += 1
            return self._pieces.popleft()

    def check(self) -> None:
        """Raise if a piece could not be made."""
        if self._error is not None:
            raise self._error


def _version(source: Any) -> int:
    return source._version if isinstance(source, Tensor) else 0


def _size_of(value: Any) -> int:
    """Bytes that a copy of ``value`` takes in a ``CopyMemory``."""
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size_of, value))
    return _rounded(value.nbytes) if isinstance(value, Tensor) and value.is_contiguous() else 0


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _cut(tensor: Tensor) -> list[Any]:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return [flat[start : start + _PIECE_BYTES] for start in range(0, flat.size, _PIECE_BYTES)]


def _device_copy(copy: Any, source: Any) -> Callable[[], object]:
    """A copy that runs on the CUDA stream of the caller, whichever thread makes it."""
    on_cuda = isinstance(source, Tensor) and source.device.type == "cuda"
    stream = torch.cuda.current_stream(source.device) if on_cuda else None

    def copied() -> None:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            copy.copy_(source)

    return copied
