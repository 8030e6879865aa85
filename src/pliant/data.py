"""From dealt positions to collated micro-batches.

Question  How do positions become the tensors that the user's loop sees, in loader processes or without?
Holds     torch's DataLoader does the loading; its sampler is fed with what the worker has been dealt. What was
          prefetched and then dealt to somebody else is dropped, nothing else. Each sample's random stream is a function
          of (seed, epoch, position), wherever it is loaded.
Source    ours; docs/design/0001-data.md.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from pliant.core.ledger import MicroBatch
from pliant.errors import UsageError
from pliant.tensors.randomness import ORDER, SAMPLE, seed_everything, stream

Order = Callable[[int, int], Sequence[int]]
"""(epoch, number of samples) -> indices in the order in which they are taken; the same on all workers"""


def checked(dataset: Any, size: Any) -> int:
    """The length of a dataset that Pliant can deal out."""
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "an IterableDataset has no positions to deal out: use a map-style Dataset (__getitem__ and __len__)"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(f"{type(dataset).__name__} is not a map-style dataset: it needs __getitem__ and __len__")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"size is {size!r}: give a positive whole number of samples per micro-batch")
    return len(dataset)


def epoch_order(order: Order | None, seed: int, epoch: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The dataset's indices by position: a permutation of the seed's, or what the user's ``order`` says."""
    if order is None:
        return np.random.default_rng(stream(seed, epoch, length, ORDER)).permutation(length)
    indices = np.asarray(order(epoch, length), dtype=np.int64)
    if indices.ndim != 1 or (len(indices) and (indices.min() < 0 or indices.max() >= length)):
        raise UsageError(f"order(epoch={epoch}, n={length}) must return indices from 0 to {length - 1}")
    return indices


def order_checksum(indices: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    return zlib.crc32(np.ascontiguousarray(indices).tobytes())


Request = tuple[int, int, list[int], list[int]]
"""seed, epoch, positions, their indices in the dataset; no positions: a filler that keeps the pipeline open"""


class _Samples(Dataset[Any]):
    """The user's dataset, read by requests."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, request: Request) -> Any:
        seed, epoch, positions, indices = request
        if type(self._dataset) is TensorDataset:
            # Rows of tensors draw no random numbers, and one indexing per tensor reads and stacks them all.
            return [tensor[indices] for tensor in self._dataset.tensors] if positions else []
        loaded: list[Any] = []
        for position, index in zip(positions, indices, strict=True):
            seed_everything(stream(seed, epoch, position, SAMPLE))
            loaded.append(self._dataset[index])
        return loaded


class _Collate:
    """The user's collate function; a filler becomes None."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._stacked = type(dataset) is TensorDataset
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        if not samples:
            return None
        if self._stacked:
            return samples if self._collate is None else self._collate(list(zip(*samples, strict=True)))
        return (self._collate or default_collate)(samples)


class _Deals:
    """A batch sampler that is never exhausted: the next dealt micro-batch, or a filler."""

    def __init__(self) -> None:
        self.next_request: Callable[[], Request] | None = None

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if self.next_request is None:
            raise StopIteration
        return self.next_request()


class Loader:
    """One torch DataLoader over one dataset, reused over the phases that read it."""

    def __init__(self, dataset: Any, *, collate_fn: Callable[[list[Any]], Any] | None, options: dict[str, Any]) -> None:
        self._deals = _Deals()
        workers = int(options.get("num_workers", 0))
        self.ahead = workers * int(options.get("prefetch_factor") or 2)
        """micro-batches in the pipeline at any time"""
        self._loader: DataLoader[Any] = DataLoader(
            _Samples(dataset),
            batch_sampler=self._deals,  # type: ignore[arg-type]
            collate_fn=_Collate(dataset, collate_fn),
            **options,
        )

    def pass_over(
        self,
        indices: np.ndarray[Any, np.dtype[np.int64]],
        seed: int,
        epoch: int,
        upcoming: Callable[[], Sequence[MicroBatch]],
    ) -> Pass:
        """One phase's reading."""
        return Pass(self._loader, self._deals, indices, seed, epoch, upcoming)


class Pass:
    """The reading of one phase: micro-batches in, collated data out."""

    def __init__(
        self,
        loader: DataLoader[Any],
        deals: _Deals,
        indices: np.ndarray[Any, np.dtype[np.int64]],
        seed: int,
        epoch: int,
        upcoming: Callable[[], Sequence[MicroBatch]],
    ) -> None:
        self._indices, self._seed, self._epoch = indices, seed, epoch
        self._upcoming = upcoming
        self._wanted: MicroBatch | None = None
        self._sent: deque[MicroBatch | None] = deque()
        self._outstanding: set[MicroBatch] = set()
        self._loaded: dict[MicroBatch, Any] = {}
        deals.next_request = self._request
        self._deals = deals
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def fetch(self, micro_batch: MicroBatch) -> Any:
        """The collated samples of a micro-batch, prefetched if it was known in time."""
        if micro_batch not in self._loaded:
            self._wanted = micro_batch
            if self._iterator is None:
                self._iterator = iter(self._loader)
            while micro_batch not in self._loaded:
                data = next(self._iterator)
                arrived = self._sent.popleft()
                if arrived is not None:
                    self._outstanding.discard(arrived)
                    self._loaded[arrived] = data
        self._wanted = None
        return self._loaded.pop(micro_batch)

    def _request(self) -> Request:
        """What the loader shall read next."""
        wanted = () if self._wanted is None else (self._wanted,)
        for micro_batch in (*wanted, *self._upcoming()):
            if micro_batch not in self._outstanding and micro_batch not in self._loaded:
                self._sent.append(micro_batch)
                self._outstanding.add(micro_batch)
                positions = [p for start, stop in micro_batch for p in range(start, stop)]
                return self._seed, self._epoch, positions, self._indices[positions].tolist()
        self._sent.append(None)
        return self._seed, self._epoch, [], []

    def close(self) -> None:
        """Forget what was prefetched; loader processes end unless they are persistent."""
        self._deals.next_request = None
        self._iterator = None
        self._loaded.clear()
