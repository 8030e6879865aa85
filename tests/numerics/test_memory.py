"""Memory that is quick to touch is memory like any other."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from pliant.tensors import allocation
from pliant.tensors.gradients import FlatGradients, Gradients
from pliant.testing import Together, together

SHAPES = [(3, 5), (1 << 20, 2), (0,), ()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_fresh_tensors_have_the_shape_and_the_alignment_of_others(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fresh = allocation.fresh(shape, dtype)
    assert fresh.shape == shape
    assert fresh.dtype is dtype
    assert fresh.is_contiguous()
    assert fresh.data_ptr() % 64 == 0
    assert torch.equal(fresh.zero_(), torch.zeros(shape, dtype=dtype))


def test_a_copy_is_equal_and_its_own() -> None:
    for source in (torch.randn(1500, 1000), torch.randn(8, 4).t(), torch.tensor(3.0), torch.arange(5)):
        copy = allocation.copied(source)
        assert torch.equal(copy, source)
        before = copy.clone()
        source.zero_()
        assert torch.equal(copy, before)


def test_a_copy_of_a_parameter_has_no_history() -> None:
    assert not allocation.copied(torch.nn.Parameter(torch.ones(2, 3))).requires_grad


def test_buffers_are_made_in_the_background_and_attached_at_the_first_use() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4, dtype=torch.float64))]
    gradients = Gradients(parameters, grouped=True)
    gradients.check()
    assert all(p.grad is not None and not p.grad.any() for p in parameters)
    first = gradients.filling
    assert gradients.hand_in(overlap=True, returning=False) is first
    assert gradients.filling is not first


@pytest.mark.parametrize("offset", [0, 12])
def test_views_lie_in_what_is_summed_wherever_its_memory_begins(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """A large buffer begins at the next cache line of its memory, some numbers behind the beginning."""

    def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        return torch.empty(shape[0] + offset, dtype=dtype, device=device)[offset:]

    monkeypatch.setattr(allocation, "fresh", fresh)
    square = torch.nn.Parameter(torch.ones(3, 5, 4, 4).to(memory_format=torch.channels_last))
    buffer = FlatGradients([torch.nn.Parameter(torch.ones(7)), square, torch.nn.Parameter(torch.ones(4, 2))])
    (flat,) = buffer.flats
    for number, view in enumerate(buffer.views, 1):
        assert view is not None
        view.fill_(number)
    assert [int((flat == number).sum()) for number in (1, 2, 3)] == [7, 240, 8]
    flat.zero_()
    assert not any(view is not None and view.any() for view in buffer.views)


@pytest.mark.parametrize("fused", [False, True])
def test_a_large_model_is_trained_as_by_plain_pytorch(fused: bool) -> None:
    """Large enough for memory in huge pages."""
    torch.manual_seed(3)
    first = torch.nn.Sequential(torch.nn.Linear(1100, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 2))
    data = TensorDataset(torch.randn(16, 1100), torch.randint(0, 2, (16,)))

    def train(run: Together) -> list[torch.Tensor]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
        with run.join(model, optimizer, batch=8, delay=0) as group:
            for _ in group.epochs(2):
                for x, y in group.batches(data, size=4):
                    group.backward(F.cross_entropy(model(x), y))
                    group.step()
        return [p.detach().clone() for p in model.parameters()]

    (alone,) = together(1, train)
    one, other = together(2, train)
    for mine, his, theirs in zip(one, other, alone, strict=True):
        assert torch.equal(mine, his)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
