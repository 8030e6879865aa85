"""The order of an epoch: a permutation that looks like any other, made position by position."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import Dataset

import pliant
from pliant.core.finished_calls import calls_of
from pliant.core.group_state import FEISTEL, PERMUTATION, FinishedPhase, Policy, founded
from pliant.core.tickets import Kind
from pliant.errors import CheckpointError, UsageError
from pliant.tensors.checkpoint import Manifest
from pliant.types import WorkerId
from pliant.worker import checkpoint_writer
from pliant.worker.script import sample_order
from pliant.worker.script.sample_order import AsItIs, Given, Ordering, Permutation, Shuffled, epoch_order
from pliant.worker.snapshot import GroupSnapshot

BILLION = 10**9


def test_each_sample_once_whatever_the_length() -> None:
    for length in range(4097):
        # Several seeds and epochs for each length of a half, and the first ones more often.
        for seed, epoch in [(length % 5, length % 3), *((s, e) for s in range(3) for e in range(3) if length < 70)]:
            found = Shuffled(seed, epoch, length).indices(np.arange(length))
            assert (np.bincount(found, minlength=length) == 1).all() and len(found) == length


@pytest.mark.parametrize("length", [1, 2, 3, 17, 1000, BILLION, 10**12, 2**53])
def test_one_by_one_as_many_at_once(length: int) -> None:
    order = Shuffled(5, 1, length)
    positions = sorted({0, length - 1, length // 2, length // 3, *range(min(length, 40))})
    assert [order[position] for position in positions] == order.at(positions)
    assert all(0 <= index < length for index in order.at(positions))
    with pytest.raises(IndexError):
        order[length]


@pytest.mark.parametrize("length", [BILLION, 2**30 + 1, 31623**2, 10**12])
def test_long_epochs_repeat_nothing(length: int) -> None:
    order = Shuffled(1, 2, length)
    generator = np.random.default_rng(0)
    positions = np.unique(np.concatenate([np.arange(100_000), generator.integers(0, length, 100_000)]))
    found = order.indices(positions)
    assert len(np.unique(found)) == len(positions)
    assert found.min() >= 0 and found.max() < length


def test_tables_are_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tabled = Shuffled(3, 4, 10_007)
    monkeypatch.setattr(sample_order, "_TABLED", 0)
    assert Shuffled(3, 4, 10_007).at(range(10_007)) == tabled.at(range(10_007))


def chi_square(counts: np.ndarray[Any, Any]) -> float:
    """As a number of standard deviations from its mean."""
    expected = counts.sum() / counts.size
    square, freedom = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    return float((square - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("length", [5, 8, 12])
def test_short_epochs_are_uniform(length: int) -> None:
    """Each pair of indices comes at each pair of positions equally often."""
    orders = np.asarray([Shuffled(seed, epoch, length).at(range(length)) for seed in range(10) for epoch in range(60)])
    apart = [(first, second) for first, second in itertools.permutations(range(length), 2)]
    worst = 0.0
    for first, second in [(0, 1), (0, length - 1), (length // 2, 1)]:
        codes = orders[:, first] * length + orders[:, second]
        counts = np.bincount(codes, minlength=length * length)
        worst = max(worst, chi_square(counts[[a * length + b for a, b in apart]]))
    assert worst < 4.5


@pytest.mark.parametrize("length", [1000, 65_537, BILLION])
def test_pairs_of_positions_are_independent(length: int) -> None:
    """Of neighbours, and of positions that share a half of the network: in 16 × 16 cells of where their indices lie."""
    order = Shuffled(11, 0, length)
    high = math.isqrt(length - 1) + 1
    low = -(-length // high)
    stop = min(length, 60_000)
    for shift in (1, low, high, length // 2):
        first = np.arange(min(stop, length - shift))
        cells = [np.asarray(order.at((first + by).tolist()), dtype=np.float64) * 16 // length for by in (0, shift)]
        counts = np.bincount((cells[0] * 16 + cells[1]).astype(np.int64), minlength=256)
        # Without repetition the cells are, if anything, more even than by chance.
        assert chi_square(counts) < 4.5, shift


def test_epochs_seeds_and_lengths_have_nothing_in_common() -> None:
    length, positions = BILLION, range(50_000)
    orders = [(0, 0, length), (0, 1, length), (0, 2, length), (1, 0, length), (2, 0, length), (0, 0, length + 1)]
    found = np.asarray([Shuffled(*each).at(positions) for each in orders], dtype=np.float64)
    apart = np.abs(np.corrcoef(np.vstack([found, np.asarray(positions)])) - np.eye(len(orders) + 1))
    assert apart.max() < 5 / math.sqrt(len(positions))
    shifted = np.corrcoef(found[0][1:], found[0][:-1])[0, 1]
    assert abs(shifted) < 5 / math.sqrt(len(positions))
    assert len({Shuffled(*each).checksum for each in orders}) == len(orders)


class Billion(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return BILLION

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1), torch.zeros(1)


def test_a_billion_samples_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real loop: no more memory than for a few tables, and no position is computed but those drawn."""
    made: list[Shuffled] = []

    class Watched(Shuffled):
        def __init__(self, *values: int) -> None:
            super().__init__(*values)
            made.append(self)

    monkeypatch.setattr(sample_order, "Shuffled", Watched)
    model = nn.Linear(1, 1)
    with pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=32, delay=0) as run:
        for _ in run.epochs(2):
            tracemalloc.start()
            for number, (x, _) in enumerate(run.batches(Billion(), size=32)):
                if number == 0:
                    peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                    assert peak <= 10 << 20
                run.backward(model(x).mean())
                run.step()
                if number == 2:
                    break
        # A break ends with the round in which it comes; the evaluation goes over the dataset as it is.
        assert run.samples <= 2 * 5 * 32
    assert [len(order) for order in made] == [BILLION, BILLION]
    assert sum(order.computed for order in made) <= 2 * 5 * 32


# -- what the user's order returns


class Lazy:
    """Indexable, with a length, and nothing else."""

    def __init__(self, length: int, scale: int = 1) -> None:
        self.length, self.scale, self.read = length, scale, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        self.read += 1
        return position * self.scale % self.length


INDICES = [4, 0, 3, 3, 1]
KINDS: dict[str, Any] = {
    "list": INDICES,
    "tuple": tuple(INDICES),
    "int64": np.asarray(INDICES),
    "uint8": np.asarray(INDICES, dtype=np.uint8),
    "strided": np.repeat(np.asarray(INDICES), 2)[::2],
    "tensor": torch.tensor(INDICES),
    "int32 tensor": torch.tensor(INDICES, dtype=torch.int32),
    "numpy's numbers": list(np.asarray(INDICES)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_sequence(kind: str) -> None:
    order = Given(KINDS[kind], 0, 5)
    assert len(order) == 5 and order.at([0, 4, 2]) == [4, 1, 3] and order.at([3]) == [3]
    assert order.checksum == Given(INDICES, 0, 5).checksum


def test_a_given_order_is_not_copied() -> None:
    array = np.arange(2_000_000, dtype=np.int32)
    long, tensor = Given(array, 0, len(array)), Given(torch.from_numpy(array), 0, len(array))
    tracemalloc.start()
    checksum = long.checksum
    assert tensor.checksum == checksum
    assert tracemalloc.get_traced_memory()[1] <= 4 << 20, "in chunks"
    tracemalloc.stop()
    other = array.copy()
    other[1_234_567] = 0
    assert Given(other, 0, len(array)).checksum != checksum

    lazy = Lazy(BILLION)
    order = Given(lazy, 0, BILLION)
    assert order.checksum != Given(Lazy(BILLION, 3), 0, BILLION).checksum
    assert order.checksum != Given(Lazy(BILLION - 1), 0, BILLION).checksum
    assert order.checksum == Given(range(BILLION), 0, BILLION).checksum
    assert lazy.read == 1 << 16
    assert order.at([5, BILLION - 1]) == [5, BILLION - 1]


WRONG: list[Any] = [
    [5],
    [-1],
    [[0]],
    [0.5],
    ["a"],
    np.zeros((1, 1), dtype=np.int64),
    np.zeros(2),
    torch.zeros(2),
    3,
    {0: 1},
]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_an_order_of_something_else(wrong: Any) -> None:
    with pytest.raises(UsageError, match="must return indices from 0 to 4"):
        _ = Given(wrong, 0, 5).checksum


def test_a_wrong_index_that_was_not_compared_is_refused_where_it_is_drawn() -> None:
    order = Given(range(2_000_000), 0, 1_999_999)
    with pytest.raises(UsageError, match="from 0 to 1999998"):
        order.at([1_999_999])


def test_made_when_it_is_asked_for() -> None:
    made: list[str] = []

    def make(scheme: str) -> Any:
        made.append(scheme)
        return AsItIs(3)

    ordering = Ordering(make, lambda: FEISTEL)
    assert not made
    assert ordering.length == 3 and ordering.checksum == AsItIs(3).checksum and made == [FEISTEL]


def test_no_order_is_asked_for_where_the_group_is_past_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def order(epoch: int, n: int) -> range:
        asked.append(epoch)
        return range(n)

    model = nn.Linear(1, 1)
    with pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=2, order=order) as run:
        for epoch in run.epochs(2):
            with monkeypatch.context() as patch:
                if epoch == 0:
                    patch.setattr(run._worker, "open", lambda call: FinishedPhase(Kind.TRAIN, 0))
                for x in run.batches([torch.zeros(1)] * 4, size=2):
                    run.backward(model(x).mean())
                    run.step()
    assert asked == [1] and run.samples == 4


def test_a_checkpoint_of_the_time_before_orders_had_names() -> None:
    """It goes on with its own order, and with the calls that its group had as a list."""
    w0 = WorkerId("w0")
    past = [
        FinishedPhase(Kind.TRAIN, 0),
        FinishedPhase(Kind.EVALUATE, 0, 0.5, inner=True),
        FinishedPhase(Kind.EVALUATE, 0, None, results={"a": 1.0}),
    ]
    group = replace(founded(Policy(8), 3, [w0]), past=calls_of(past), trained=b"\x01\xff")
    handed = GroupSnapshot(group, 9, 1 << 70, False)
    written = json.loads(msgspec.json.encode(handed.packed(known=0)))
    assert checkpoint_writer._handed(manifest(written)) == handed
    written["group"]["past"] = json.loads(msgspec.json.encode(past))
    del written["group"]["policy"]["order"], written["calls"], written["known"]
    found = checkpoint_writer._handed(manifest(written))
    assert found == handed and found.group.policy.order == PERMUTATION
    written["group"]["past"] = [7]
    with pytest.raises(CheckpointError, match="of another version of Pliant"):
        checkpoint_writer._handed(manifest(written))


def manifest(written: Any) -> Manifest:
    return Manifest("job", "name", "0.1.0", 9, 0, 0, json.dumps(written))


def test_the_earlier_order_is_kept() -> None:
    """By their values: journals of that time are replayed with it."""
    order = epoch_order(None, 17, 1, 10, PERMUTATION)
    assert isinstance(order, Permutation) and order.at(range(10)) == EARLIER and order.checksum == EARLIER_CHECKSUM
    assert AsItIs(10, scheme=PERMUTATION).checksum == AS_IT_IS_CHECKSUM
    with pytest.raises(UsageError, match="an order \\(sorted\\) that this Pliant does not know"):
        epoch_order(None, 0, 0, 4, "sorted")


EARLIER = [4, 7, 8, 3, 1, 5, 2, 6, 0, 9]
EARLIER_CHECKSUM = 1402796705
AS_IT_IS_CHECKSUM = 1585833124
