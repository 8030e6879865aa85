"""Memory that is quick to touch is memory like any other."""

import pytest
import torch

from pliant.tensors import memory
from pliant.tensors.gradients import Gradients

SHAPES = [(3, 5), (1 << 20, 2), (0,), ()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_fresh_tensors_have_the_shape_and_the_alignment_of_others(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fresh = memory.fresh(shape, dtype)
    assert fresh.shape == shape
    assert fresh.dtype is dtype
    assert fresh.is_contiguous()
    assert fresh.data_ptr() % 64 == 0
    assert torch.equal(fresh.zero_(), torch.zeros(shape, dtype=dtype))


def test_a_copy_is_equal_and_its_own() -> None:
    for source in (torch.randn(1500, 1000), torch.randn(8, 4).t(), torch.tensor(3.0), torch.arange(5)):
        copy = memory.copied(source)
        assert torch.equal(copy, source)
        before = copy.clone()
        source.zero_()
        assert torch.equal(copy, before)


def test_a_copy_of_a_parameter_has_no_history() -> None:
    assert not memory.copied(torch.nn.Parameter(torch.ones(2, 3))).requires_grad


def test_buffers_are_made_in_the_background_and_attached_at_the_first_use() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4, dtype=torch.float64))]
    gradients = Gradients(parameters, grouped=True)
    gradients.check()
    assert all(p.grad is not None and not p.grad.any() for p in parameters)
    first = gradients.filling
    assert gradients.hand_in(overlap=True, returning=False) is first
    assert gradients.filling is not first
