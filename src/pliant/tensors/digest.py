"""A digest of the weights, one part at a time.

Question  How do two workers find out that their weights differ, without sending them?
Holds     The bits of the tensors are added as integers, column by column, modulo 2⁶⁴. So any order of adding gives the
          same sums, on a GPU too, and a change of any single word changes one of them. The checksum of those sums is
          the digest. Only a few kilobytes leave the device.
Source    ours; docs/design/0013-drift.md.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_COLUMNS = 512
_LEAST_BYTES = 1 << 20
"""Least size of a part: computing its digest takes about as long as the calls themselves."""
_SMALL_BYTES = 1 << 18
"""Below this size the bytes themselves are checksummed: calling the sums would take longer than they save."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsDigest:
    """Digests of ``tensors``, which change in place."""

    def __init__(self, tensors: Sequence[Tensor], *, parts: int, reduces: bool) -> None:
        """``parts``: number of parts, at most; ``reduces``: see ``_arithmetic``."""
        self._tensors = tensors = list(tensors)
        total = sum(tensor.nbytes for tensor in tensors)
        self.parts = max(1, min(parts, total // _LEAST_BYTES))
        self._pieces = [
            [_Piece(tensors[index], start, stop) for index, start, stop in part]
            for part in _divided(tensors, self.parts)
        ]
        self.arithmetic = _arithmetic(tensors, reduces=reduces)
        """checksum of the torch version and devices that this worker computes with"""

    def note_reduction(self) -> None:
        """From now on updates depend on a norm, too: see ``_arithmetic``."""
        self.arithmetic = _arithmetic(self._tensors, reduces=True)

    def whole(self) -> tuple[int, ...]:
        """The digests of all parts."""
        return tuple(self.of(turn) for turn in range(self.parts))

    @torch.no_grad()
    def of(self, turn: int | None) -> int:
        """The digest of one part of the present tensors: part ``turn`` modulo the number of parts; None: of all."""
        digest = 0
        away: list[Tensor] = []
        parts = self._pieces if turn is None else [self._pieces[turn % self.parts]]
        for piece in itertools.chain.from_iterable(parts):
            numbers = piece.numbers()
            if not isinstance(numbers, Tensor):
                digest = zlib.crc32(numbers, digest)
            elif numbers.device.type == "cpu":
                digest = zlib.crc32(_sums(numbers).numpy().data, digest)
            else:
                away.append(_sums(numbers))
        # One copy to the host, and one wait, for all sums.
        return zlib.crc32(torch.cat(away).cpu().numpy().data, digest) if away else digest

    @torch.no_grad()
    def sketch(self, turn: int | None) -> float:
        """A number for the same part that hardly depends on rounding, but changes with the weights.

        It is the sum of all elements with alternating signs, divided by their norm. If weights differ by a fraction of
        their norm, it differs by about that fraction, for any size.
        """
        leans = squares = 0.0
        parts = self._pieces if turn is None else [self._pieces[turn % self.parts]]
        for piece in itertools.chain.from_iterable(parts):
            values = piece.values().to(torch.float64)
            leans += float(values[::2].sum() - values[1::2].sum())
            squares += float(values.square().sum())
        return leans / squares**0.5 if squares > 0 else 0.0


class _Piece:
    """Some elements of a tensor, as integers or (if few and in main memory) as bytes."""

    def __init__(self, tensor: Tensor, start: int, stop: int) -> None:
        self._tensor, self._start, self._stop = tensor, start, stop
        self._at: int | None = None
        self._view: Tensor | memoryview | None = None

    def values(self) -> Tensor:
        """Its elements."""
        return _flat(self._tensor)[self._start : self._stop]

    def numbers(self) -> Tensor | memoryview:
        """Its present memory. The view is kept: making one takes longer than reading a small tensor."""
        if self._view is not None and self._at == self._tensor.data_ptr():
            return self._view
        flat = _flat(self._tensor)
        view = _whole(flat[self._start : self._stop])
        if view.device.type == "cpu" and view.nbytes < _SMALL_BYTES:
            view = view.numpy().data
        if flat.data_ptr() == self._tensor.data_ptr():
            # Otherwise ``flat`` is a copy, because the tensor is not contiguous.
            self._at, self._view = flat.data_ptr(), view
        return view


def _divided(tensors: Sequence[Tensor], parts: int) -> list[list[tuple[int, int, int]]]:
    """For each part its pieces (tensor, first element, last element + 1): about equal bytes, all elements, in order."""
    divided: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    share = -(-sum(tensor.nbytes for tensor in tensors) // parts)
    room, part = share, 0
    for index, tensor in enumerate(tensors):
        start, elements = 0, tensor.numel()
        while start < elements:
            if room <= 0 and part < parts - 1:
                room, part = share, part + 1
            taken = elements - start
            if part < parts - 1:
                # A multiple of eight, so that smaller numbers can be read as 64-bit ones.
                taken = min(taken, max(8, room // tensor.element_size() // 8 * 8))
            divided[part].append((index, start, start + taken))
            start += taken
            room -= taken * tensor.element_size()
    return divided


def _flat(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    if detached.is_complex():
        detached = torch.view_as_real(detached)
    return detached.reshape(-1)


def _whole(piece: Tensor) -> Tensor:
    """The bits as integers."""
    size = piece.element_size()
    numbers = piece.view(_WHOLE[size])
    if size < 8 and (piece.storage_offset() * size) % 8 == 0 and piece.numel() * size % 8 == 0:
        # The same bits as fewer, wider numbers: ten times as fast as widening each number.
        numbers = numbers.view(torch.int64)
    return numbers


def _sums(numbers: Tensor) -> Tensor:
    """The sum of each column, for the numbers in rows of ``_COLUMNS``; then the numbers of an incomplete row."""
    rows = numbers.numel() // _COLUMNS
    whole = rows * _COLUMNS
    rest = numbers[whole:].to(torch.int64)
    if not rows:
        return rest
    return torch.cat([numbers[:whole].view(rows, _COLUMNS).sum(dim=0, dtype=torch.int64), rest])


def _arithmetic(tensors: Sequence[Tensor], *, reduces: bool) -> int:
    """Checksum of what the bits of an update depend on besides its inputs.

    ``reduces``: the update computes a norm (clipping), and the order of its additions depends on the number of threads.
    """
    devices = {tensor.device for tensor in tensors}
    named = [
        torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        for device in sorted(devices, key=str)
    ]
    threads = torch.get_num_threads() if reduces else 0
    return zlib.crc32(f"{torch.__version__} {' '.join(named)} {threads}".encode())
