"""The digest of the weights: tensors.digest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pliant.tensors.digest import WeightsDigest

DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.int8: torch.int8}


def drawn(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [(torch.randn(shape, generator=generator) * 50).to(dtype) for shape in shapes]


def digests(tensors: list[Tensor], parts: int = 2) -> list[int]:
    taken = WeightsDigest(tensors, parts=parts, reduces=False)
    return [taken.of(turn) for turn in range(taken.parts)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([(1,), (7,), (3, 5), (400, 301), (90_001,), (600, 600)]), min_size=1, max_size=6),
    st.sampled_from(list(DTYPES)),
    st.integers(1, 5),
    st.data(),
)
def test_any_changed_bit_changes_the_digest_of_one_part(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, parts: int, data: st.DataObject
) -> None:
    tensors = drawn(shapes, dtype)
    taken = WeightsDigest(tensors, parts=parts, reduces=False)
    before = [taken.of(turn) for turn in range(taken.parts)]
    whole = taken.of(None)
    assert before == digests([tensor.clone() for tensor in tensors], parts)
    tensor = tensors[data.draw(st.integers(0, len(tensors) - 1))]
    numbers = tensor.view(-1).view(DTYPES[dtype])
    place = data.draw(st.integers(0, numbers.numel() - 1))
    numbers[place] ^= 1 << data.draw(st.integers(0, 8 * numbers.element_size() - 2))
    after = [taken.of(turn + taken.parts) for turn in range(taken.parts)]
    assert taken.of(None) != whole == WeightsDigest(drawn(shapes, dtype), parts=parts, reduces=False).of(None)
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


def test_large_weights_are_taken_in_parts_and_small_ones_whole() -> None:
    assert len(digests(drawn([(1000, 1000)], torch.float32), parts=2)) == 2
    assert len(digests(drawn([(100, 100)], torch.float32), parts=2)) == 1


def test_the_order_in_memory_does_not_count() -> None:
    (weights,) = drawn([(64, 8, 40, 40)], torch.float32)
    assert digests([weights]) == digests([weights.contiguous(memory_format=torch.channels_last)])


def test_weights_that_have_moved_are_found() -> None:
    parameter = torch.nn.Parameter(torch.zeros(500, 500))
    taken = WeightsDigest([parameter], parts=2, reduces=False)
    before = taken.of(0)
    parameter.data = torch.ones(500, 500)
    assert taken.of(0) != before


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_memory_at_any_place_will_do(offset: int) -> None:
    whole = torch.arange(200_003, dtype=torch.float32)
    part = whole[offset : offset + 150_000]
    assert digests([part]) == digests([part.clone()]) or offset % 2


def test_what_it_computes_with_is_told() -> None:
    weights = drawn([(4,)], torch.float32)
    threads = torch.get_num_threads()
    plain, reducing = (WeightsDigest(weights, parts=1, reduces=reduces).arithmetic for reduces in (False, True))
    try:
        torch.set_num_threads(threads + 1)
        # Only a norm depends on how many threads add it up.
        assert WeightsDigest(weights, parts=1, reduces=False).arithmetic == plain
        assert WeightsDigest(weights, parts=1, reduces=True).arithmetic != reducing
    finally:
        torch.set_num_threads(threads)


def test_a_sketch_hardly_depends_on_rounding() -> None:
    torch.manual_seed(7)
    weights = [torch.randn(300, 40), torch.randn(40)]
    rounded = [(weight.double() * (1 + 1e-6 * torch.randn_like(weight))).float() for weight in weights]
    other = [torch.randn(300, 40), torch.randn(40)]
    mine, same, foreign = (
        WeightsDigest(each, parts=1, reduces=False).sketch(None) for each in (weights, rounded, other)
    )
    assert abs(mine - same) < 1e-4 and abs(mine - foreign) > 0.02
