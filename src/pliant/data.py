"""The loader: from dealt positions to collated micro-batches.

Question  How do positions become the tensors that the user's loop sees, with or without loader processes?
Holds     torch's DataLoader does the loading; its batch sampler returns the micro-batches that the worker was dealt.
          Prefetched data is dropped only if its positions were then dealt to another worker. Each sample's random
          stream is a function of (seed, epoch, position), in whichever process it is loaded.
Source    ours; docs/design/0001-data.md.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from pliant.core.ledger import MicroBatch
from pliant.errors import UsageError
from pliant.tensors.randomness import SAMPLE, seed_everything, stream
from pliant.worker.script.sample_order import Order


def checked(dataset: Any, size: Any) -> int:
    """The length of the dataset; raises ``UsageError`` if Pliant cannot use the dataset or ``size``."""
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "an IterableDataset has no positions to deal out: use a map-style Dataset (__getitem__ and __len__)"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(f"{type(dataset).__name__} is not a map-style dataset: it needs __getitem__ and __len__")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"size is {size!r}: give a positive whole number of samples per micro-batch")
    return len(dataset)


Request = tuple[int, int, list[int], list[int]]
"""(seed, epoch, positions, their indices in the dataset); without positions: a filler that keeps the pipeline open."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """The dataset or the collate function has raised an exception."""

    error: BaseException
    summary: str
    """the exception in one line"""
    positions: tuple[int, ...]
    """positions of the epoch that were being read; several if they were being collated"""
    indices: tuple[int, ...]
    """their indices in the dataset"""
    everywhere: bool
    """the error would occur on any other worker, too"""

    def where(self, epoch: int) -> str:
        """The positions and indices in words."""
        if len(self.positions) == 1:
            return f"position {self.positions[0]} of epoch {epoch}, dataset index {self.indices[0]}"
        return f"positions {_listed(self.positions)} of epoch {epoch}, dataset indices {_listed(self.indices)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_NAMED])) + (", …" if len(numbers) > _NAMED else "")


_NAMED = 8
"""Most numbers of a micro-batch that a message names."""

_OF_THIS_MACHINE = (MemoryError, ConnectionError, TimeoutError, torch.OutOfMemoryError)
_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})


def _is_everywhere(error: BaseException) -> bool:
    """Whether the error lies in the sample, and not in this machine's memory, disk or network."""
    return not isinstance(error, _OF_THIS_MACHINE) and getattr(error, "errno", None) not in _ERRNOS


class _Failed:
    """An exception in a loader process, to be raised in the script. Created where it is caught."""

    def __init__(self, error: BaseException, reading: tuple[int, int] | None) -> None:
        info = get_worker_info()
        self.wrapped = ExceptionWrapper(where=f"in DataLoader worker process {info.id if info else 0}")
        self.summary = _in_one_line(error)
        self.reading = reading
        self.everywhere = _is_everywhere(error)

    def caught(self) -> Exception:
        """The exception in the form of torch's DataLoader: of its own type, with the traceback in its text."""
        try:
            self.wrapped.reraise()
        except Exception as error:
            return error
        raise AssertionError("nothing was raised again")


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class _Samples(Dataset[Any]):
    """The user's dataset, read by requests."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.reading: tuple[int, int] | None = None
        """(position, index) of the sample that is being read"""

    def __getitems__(self, request: Request) -> Any:
        try:
            return self._read(request)
        except Exception as error:
            if get_worker_info() is None:
                raise
            return _Failed(error, self.reading)

    def _read(self, request: Request) -> Any:
        seed, epoch, positions, indices = request
        self.reading = None
        if type(self._dataset) is TensorDataset:
            # Reading rows needs no random numbers, and one indexing per tensor reads and stacks them all.
            return [tensor[indices] for tensor in self._dataset.tensors] if positions else []
        loaded: list[Any] = []
        for position, index in zip(positions, indices, strict=True):
            self.reading = position, index
            seed_everything(stream(seed, epoch, position, SAMPLE))
            loaded.append(self._dataset[index])
        self.reading = None
        return loaded


class _Collate:
    """Calls the user's collate function; a filler becomes None."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._stacked = type(dataset) is TensorDataset
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, _Failed):
            return samples
        try:
            return self._collated(samples)
        except Exception as error:
            if get_worker_info() is None:
                raise
            return _Failed(error, None)

    def _collated(self, samples: Any) -> Any:
        if not samples:
            return None
        if self._stacked:
            return samples if self._collate is None else self._collate(list(zip(*samples, strict=True)))
        return (self._collate or default_collate)(samples)


class _Deals:
    """A batch sampler that is never exhausted: it returns the next dealt micro-batch, or a filler."""

    def __init__(self) -> None:
        self.next_request: Callable[[], Request] | None = None

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if self.next_request is None:
            raise StopIteration
        return self.next_request()


class Loader:
    """One torch DataLoader over one dataset, used by all phases that read the dataset."""

    def __init__(self, dataset: Any, *, collate_fn: Callable[[list[Any]], Any] | None, options: dict[str, Any]) -> None:
        self._deals = _Deals()
        workers = int(options.get("num_workers", 0))
        self.ahead = workers * int(options.get("prefetch_factor") or 2)
        """micro-batches in the pipeline at any time"""
        self._samples = _Samples(dataset)
        self._loader: DataLoader[Any] = DataLoader(
            self._samples,
            batch_sampler=self._deals,  # type: ignore[arg-type]
            collate_fn=_Collate(dataset, collate_fn),
            **options,
        )

    def pass_over(
        self,
        order: Order,
        seed: int,
        epoch: int,
        upcoming: Callable[[], Sequence[MicroBatch]],
    ) -> PhaseReader:
        """A reader for one phase. ``upcoming`` returns the micro-batches to prefetch."""
        return PhaseReader(self._loader, self._samples, self._deals, order, seed, epoch, upcoming)


def _positions(micro_batch: MicroBatch) -> list[int]:
    return [p for start, stop in micro_batch for p in range(start, stop)]


class PhaseReader:
    """Reads the data of one phase: ``fetch`` returns the collated samples of a micro-batch."""

    def __init__(
        self,
        loader: DataLoader[Any],
        samples: _Samples,
        deals: _Deals,
        order: Order,
        seed: int,
        epoch: int,
        upcoming: Callable[[], Sequence[MicroBatch]],
    ) -> None:
        self._order, self._seed, self._epoch = order, seed, epoch
        self._upcoming = upcoming
        self._wanted: MicroBatch | None = None
        self._sent: deque[MicroBatch | None] = deque()
        self._outstanding: set[MicroBatch] = set()
        self._loaded: dict[MicroBatch, Any] = {}
        deals.next_request = self._request
        self._deals = deals
        self._loader = loader
        self._samples = samples
        self._iterator: Iterator[Any] | None = None
        self.bad: BadSample | None = None
        """the samples that could not be read, with the exception that ``fetch`` has raised"""

    def fetch(self, micro_batch: MicroBatch) -> Any:
        """The collated samples of a micro-batch, prefetched if it was known in time."""
        if micro_batch not in self._loaded:
            self._wanted = micro_batch
            if self._iterator is None:
                self._iterator = iter(self._loader)
            while micro_batch not in self._loaded:
                data = self._next(self._iterator, micro_batch)
                arrived = self._sent.popleft()
                if arrived is not None:
                    self._outstanding.discard(arrived)
                    self._loaded[arrived] = data
        self._wanted = None
        loaded = self._loaded.pop(micro_batch)
        if isinstance(loaded, _Failed):
            # Raised only when the micro-batch is asked for: it might have been dealt to another worker.
            error = loaded.caught()
            self.bad = self._bad(error, loaded.summary, micro_batch, loaded.reading, everywhere=loaded.everywhere)
            raise error
        return loaded

    def _next(self, iterator: Iterator[Any], micro_batch: MicroBatch) -> Any:
        try:
            return next(iterator)
        except Exception as error:
            # With loader processes this is an error of the processes: one was killed, or took too long.
            if self._loader.num_workers == 0:
                everywhere = _is_everywhere(error)
                self.bad = self._bad(
                    error, _in_one_line(error), micro_batch, self._samples.reading, everywhere=everywhere
                )
            raise

    def _bad(
        self,
        error: BaseException,
        summary: str,
        micro_batch: MicroBatch,
        reading: tuple[int, int] | None,
        *,
        everywhere: bool,
    ) -> BadSample:
        positions = _positions(micro_batch)
        indices = self._order.at(positions)
        if reading is not None:
            positions, indices = [reading[0]], [reading[1]]
        return BadSample(error, summary, tuple(positions), tuple(indices), everywhere)

    def _request(self) -> Request:
        """The next request for the loader."""
        wanted = () if self._wanted is None else (self._wanted,)
        for micro_batch in (*wanted, *self._upcoming()):
            if micro_batch not in self._outstanding and micro_batch not in self._loaded:
                self._sent.append(micro_batch)
                self._outstanding.add(micro_batch)
                positions = _positions(micro_batch)
                return self._seed, self._epoch, positions, self._order.at(positions)
        self._sent.append(None)
        return self._seed, self._epoch, [], []

    def close(self) -> None:
        """Drop prefetched data; loader processes end unless they are persistent."""
        self._deals.next_request = None
        self._iterator = None
        self._loaded.clear()
