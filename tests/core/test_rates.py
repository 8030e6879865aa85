"""How the learning rate follows the batch: core.rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.core.rates import NAMES, Rate, Rule, follow, ramp_rounds, target

REFERENCE = 1000
LINEAR = Rule("linear")
MOMENTA = st.floats(0.8, 0.99)
BATCHES = st.lists(st.integers(100, 20_000), min_size=1, max_size=60)


def steady(k: float, rule: Rule = LINEAR) -> Rate:
    """Long after a change to ``k`` reference batches."""
    return Rate(target(rule, k), k * REFERENCE, 0.0, 1.0 / k)


@pytest.mark.parametrize("name", NAMES)
@given(batches=BATCHES, momentum=st.floats(0.0, 0.99))
@settings(max_examples=40)
def test_it_falls_at_once_and_never_exceeds_what_the_rule_says(name: str, batches: list[int], momentum: float) -> None:
    rate, rule = Rate(), Rule(name)
    for batch in batches:
        before, rate = rate, follow(rate, batch=batch, reference=REFERENCE, rule=rule, momentum=momentum)
        assert rate.batch is not None
        wanted = target(rule, rate.batch / REFERENCE)
        assert rate.factor <= wanted
        if wanted <= before.factor:
            assert rate.factor == wanted


@given(batches=BATCHES, momentum=MOMENTA)
@settings(max_examples=80)
def test_a_rise_is_bounded_by_the_ramp_or_harmless(batches: list[int], momentum: float) -> None:
    rate = Rate()
    for batch in batches:
        before, rate = rate, follow(rate, batch=batch, reference=REFERENCE, rule=LINEAR, momentum=momentum)
        rise = rate.factor - before.factor
        if rise > 0:
            assert rate.batch is not None
            k = rate.batch / REFERENCE
            slope = (k - before.factor) / ramp_rounds(k, before.factor, momentum)
            assert rise <= max(slope, before.step) + 1e-12 or k * rate.noise <= 1.05


@given(k=st.floats(1.25, 16.0), momentum=MOMENTA)
@settings(max_examples=150)
def test_the_noise_stays_within_five_percent_of_its_new_steady_state(k: float, momentum: float) -> None:
    batch = round(k * REFERENCE)
    k = batch / REFERENCE
    rate, carried, peak = Rate(), 1.0, 0.0
    rounds = ramp_rounds(k, 1.0, momentum)
    for _ in range(rounds + 1):
        rate = follow(rate, batch=batch, reference=REFERENCE, rule=LINEAR, momentum=momentum)
        carried = momentum**2 * carried + (1 - momentum**2) / k
        peak = max(peak, rate.factor**2 * carried / k)
    assert rate.factor == k
    assert peak <= 1.05 + 1e-9


@given(k=st.floats(1.25, 16.0), momentum=MOMENTA)
@settings(max_examples=60)
def test_behind_the_filter_the_noise_is_bounded_too_and_the_target_reached(k: float, momentum: float) -> None:
    rate, carried, peak = steady(1.0), 1.0, 0.0
    for _ in range(ramp_rounds(k, 1.0, momentum) + 200):
        rate = follow(rate, batch=round(k * REFERENCE), reference=REFERENCE, rule=LINEAR, momentum=momentum)
        assert rate.batch is not None
        now = rate.batch / REFERENCE
        carried = momentum**2 * carried + (1 - momentum**2) / now
        peak = max(peak, rate.factor**2 * carried / now)
    assert rate.factor == pytest.approx(k, rel=1e-3)
    assert peak <= 1.05 + 1e-9


@pytest.mark.parametrize(("k", "peak"), [(2, 1.81), (4, 3.4), (8, 6.7), (16, 13.2)])
def test_without_a_ramp_the_noise_would_be_what_the_paper_note_says(k: int, peak: float) -> None:
    assert k * (0.81 + 0.19 / k) == pytest.approx(peak, rel=0.02)
    assert ramp_rounds(k, 1.0, 0.9) == math.ceil((1.2 + 0.45 * math.log2(k)) / (1.0 - 0.9))


def test_without_momentum_there_is_nothing_to_ramp() -> None:
    assert follow(steady(1.0), batch=50_000, reference=REFERENCE, rule=LINEAR, momentum=0.0).factor == pytest.approx(
        5.9
    )


def test_small_fluctuations_are_followed_without_a_ramp() -> None:
    rate = steady(4.0)
    for batch in (4100, 3900, 4200, 3800, 4300) * 5:
        rate = follow(rate, batch=batch, reference=REFERENCE, rule=LINEAR, momentum=0.9)
        assert rate.batch is not None
        assert rate.factor == rate.batch / REFERENCE
