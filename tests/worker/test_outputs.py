"""What an evaluation has gathered, and what is missing of it: worker.evaluation.outputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pliant.core.evaluation import Appendix
from pliant.worker.evaluation.outputs import Outputs, missing


@given(st.sets(st.integers(0, 30)), st.integers(1, 31), st.integers(1, 5))
def test_what_is_missing_is_every_position_that_is_not_there(found: set[int], length: int, size: int) -> None:
    there = [((position, position + 1),) for position in found if position < length]
    lacking = missing(there, length, size)
    positions = [p for micro_batch in lacking for start, stop in micro_batch for p in range(start, stop)]
    assert positions == [position for position in range(length) if position not in found]
    assert all(stop - start <= size for ((start, stop),) in lacking)


def test_outputs_of_one_phase_are_kept_until_they_are_asked_for() -> None:
    held = Outputs()
    held.add(3, [[((0, 2),), ((4, 6),)], [((2, 4),)]], [Appendix(outputs=(b"a",)), Appendix()])
    held.add(3, [[((4, 6),)], [((2, 4),)]], [Appendix(), Appendix(outputs=(b"b",))])
    assert held.taken(3) == [(((0, 2),), b"a"), (((2, 4),), b"b")]
    assert held.taken(3) == []
    held.add(4, [[((0, 2),)]], [Appendix(outputs=(b"c",))])
    held.add(5, [[((0, 2),)]], [Appendix(outputs=(b"d",))])
    assert held.taken(4) == []
