"""The loss scale is a function of the rounds alone: core.tuning.loss_scale."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pliant.core.tuning.loss_scale import Scale, after


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_it_backs_off_on_every_bad_round_and_grows_after_each_interval_of_good_ones(
    history: list[bool], interval: int
) -> None:
    scale, expected, good = Scale(1024.0, 2.0, 0.5, interval), 1024.0, 0
    for finite in history:
        scale = after(scale, finite=finite)
        good = good + 1 if finite else 0
        if not finite:
            expected *= 0.5
        elif good == interval:
            expected, good = expected * 2.0, 0
        assert scale.scale == expected
        assert scale.finite_rounds == good


def test_it_stays_within_float32() -> None:
    scale = Scale(2.0**127, 2.0, 0.5, 1)
    assert after(scale, finite=True) == scale
