"""An exception in the dataset or the collate function: it says which sample of which worker, and is of its own type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import pliant
from pliant.testing import Together, together

BAD = 13


class Samples(Dataset[Any]):
    """Sample 13 of 40 is corrupt; ``raising`` says how."""

    def __init__(self, raising: type[Exception] = ValueError) -> None:
        self._raising = raising

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD:
            raise self._raising("corrupt image")
        return torch.full((6,), float(index))


class Whole(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), float(index))


def picky(samples: list[torch.Tensor]) -> torch.Tensor:
    if any(int(sample[0]) == BAD for sample in samples):
        raise TypeError("these do not fit")
    return torch.stack(samples)


def trained(run: pliant.Run, model: nn.Module, samples: Samples, **options: Any) -> None:
    for x in run.batches(samples, size=4, **options):
        run.backward(model(x).square().mean())
        run.step()


def joined(**settings: Any) -> tuple[nn.Module, pliant.Run]:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return model, pliant.join(model, optimizer, batch=8, order=lambda epoch, n: range(n), **settings)


def note(error: BaseException) -> str:
    (text,) = error.__notes__
    return text


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("raising", [ValueError, KeyError, FileNotFoundError, MemoryError])
def test_which_sample_it_is(raising: type[Exception], loaders: int) -> None:
    model, run = joined()
    with pytest.raises(raising, match="corrupt image") as caught, run:
        trained(run, model, Samples(raising), num_workers=loaders)
    assert note(caught.value) == f"pliant: w0 was reading position {BAD} of epoch 0, dataset index {BAD}"


@pytest.mark.parametrize("loaders", [0, 2])
def test_which_samples_could_not_be_collated(loaders: int) -> None:
    model, run = joined()
    with pytest.raises(TypeError, match="these do not fit") as caught, run:
        trained(run, model, Whole(), num_workers=loaders, collate_fn=picky)
    named = "positions 12, 13, 14, 15 of epoch 0, dataset indices 12, 13, 14, 15"
    assert note(caught.value) == f"pliant: w0 was reading {named}"


def test_it_is_named_in_evaluate_too() -> None:
    _, run = joined()
    with pytest.raises(ValueError, match="corrupt image") as caught, run:
        run.evaluate(lambda batch: (1.0, 1), Samples(), size=4)
    assert "position 13 of epoch 0" in note(caught.value)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_script_may_pass_over_it(loaders: int) -> None:
    """The loop is over then, for this worker as for all others, and the next one begins."""
    model, run = joined()
    with run:
        with pytest.raises(ValueError, match="corrupt image"):
            trained(run, model, Samples(), num_workers=loaders)
        trained(run, model, Whole(), num_workers=loaders)
        # Of the first loop the samples before the micro-batch with the bad one.
        assert run.samples == 12 + 40


def test_in_a_group_one_worker_raises_it() -> None:
    def worker(handle: Together) -> None:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with handle.join(model, optimizer, batch=8, order=lambda epoch, n: range(n)) as run:
            trained(run, model, Samples())

    with pytest.raises(ValueError, match="corrupt image") as caught:
        together(2, worker)
    assert f"position {BAD} of epoch 0, dataset index {BAD}" in note(caught.value)
