"""How the learning rate follows the batch: core.tuning.rates."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.core.tuning import rates
from pliant.core.tuning.rates import NAMES, RULES, Rate, Rule, follow, gain, ramp_rounds, target
from pliant.errors import UsageError

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


SCALES = st.one_of(st.none(), st.just(0.0), st.just(math.inf), st.floats(1e-3, 1e9))


@given(k=st.floats(1.0, 1e4), noise_scale=SCALES)
def test_the_gain_lies_between_one_and_the_batch(k: float, noise_scale: float | None) -> None:
    assert 1.0 <= gain(k, REFERENCE, noise_scale) <= k
    assert gain(1.0 / k, REFERENCE, noise_scale) == 1.0 / k
    assert gain(1.0, REFERENCE, noise_scale) == 1.0


@given(k=st.floats(1.0, 1e3))
def test_identical_gradients_gain_nothing_and_noise_alone_gains_the_whole_batch(k: float) -> None:
    assert gain(k, REFERENCE, 0.0) == pytest.approx(1.0)
    assert gain(k, REFERENCE, math.inf) == k
    assert gain(k, REFERENCE, 1e15) == pytest.approx(k)
    assert gain(k, REFERENCE, None) == 1.0


@given(workers=st.integers(2, 64), variance=st.floats(1e-6, 1e6), signal=st.floats(0.0, 1e6))
def test_with_a_reference_batch_per_worker_the_gain_is_adascales(workers: int, variance: float, signal: float) -> None:
    """r = (σ² + m²) / (σ²/S + m²) for S workers with a reference batch each: σ² is the variance of one of them."""
    expected = (variance + signal) / (variance / workers + signal)
    noise_scale = variance * REFERENCE / signal if signal > 0 else math.inf
    assert gain(float(workers), REFERENCE, noise_scale) == pytest.approx(expected, rel=1e-9)


@given(noise_scale=st.floats(1.0, 1e7), k=st.floats(1.0, 500.0), more=st.floats(1.0, 4.0))
def test_the_gain_grows_with_the_batch_and_with_the_noise(noise_scale: float, k: float, more: float) -> None:
    assert gain(k * more, REFERENCE, noise_scale) >= gain(k, REFERENCE, noise_scale) * (1 - 1e-12)
    assert gain(k, REFERENCE, noise_scale * more) >= gain(k, REFERENCE, noise_scale) * (1 - 1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=str)
@given(momentum=st.floats(0.0, 0.99), noise_scale=SCALES)
@settings(max_examples=25)
def test_at_the_reference_batch_nothing_changes(rule: Rule, momentum: float, noise_scale: float | None) -> None:
    rate = Rate()
    for _ in range(30):
        rate = follow(rate, batch=REFERENCE, reference=REFERENCE, rule=rule, momentum=momentum, noise_scale=noise_scale)
        assert rate.factor == 1.0


@pytest.mark.parametrize("name", NAMES)
@given(k=st.floats(1.25, 16.0), momentum=MOMENTA, noise_scale=SCALES)
@settings(max_examples=25)
def test_a_ramp_is_monotone_and_arrives(name: str, k: float, momentum: float, noise_scale: float | None) -> None:
    rule, rate = Rule(name), steady(1.0)
    for _ in range(ramp_rounds(k, 1.0, momentum) + 200):
        before = rate
        rate = follow(
            rate, batch=round(k * REFERENCE), reference=REFERENCE, rule=rule, momentum=momentum, noise_scale=noise_scale
        )
        assert rate.factor * (1 + 1e-12) >= before.factor
    assert rate.batch is not None
    wanted = target(rule, rate.batch / REFERENCE, reference=REFERENCE, noise_scale=noise_scale)
    assert rate.factor == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name", ["linear", "sqrt", "adascale"])
@given(first=st.floats(2.0, 8.0), second=st.floats(1.1, 4.0), momentum=MOMENTA, after=st.integers(1, 40))
@settings(max_examples=40)
def test_a_second_change_starts_from_the_factor_of_the_moment(
    name: str, first: float, second: float, momentum: float, after: int
) -> None:
    rule, rate, peak = Rule(name), steady(1.0), 0.0
    for number in range(after + ramp_rounds(first * second, 1.0, momentum) + 200):
        k = first if number < after else first * second
        before = rate
        rate = follow(
            rate, batch=round(k * REFERENCE), reference=REFERENCE, rule=rule, momentum=momentum, noise_scale=5000.0
        )
        assert before.factor <= rate.factor * (1 + 1e-12)
        assert rate.batch is not None
        now = rate.batch / REFERENCE
        wanted = target(rule, now, reference=REFERENCE, noise_scale=5000.0)
        # Of the update's variance γ²U, beside what it is in the new steady state.
        peak = max(peak, rate.factor**2 * rate.noise * now / wanted**2)
    assert peak <= 1.05 + 1e-9
    assert rate.factor == pytest.approx(target(rule, now, reference=REFERENCE, noise_scale=5000.0), rel=1e-3)


@given(batches=BATCHES, momentum=st.floats(0.0, 0.99), noise_scale=SCALES)
@settings(max_examples=40)
def test_at_once_is_always_at_its_target(batches: list[int], momentum: float, noise_scale: float | None) -> None:
    for name in NAMES:
        rate, rule = Rate(), rates.at_once(name)
        for batch in batches:
            rate = follow(rate, batch=batch, reference=REFERENCE, rule=rule, momentum=momentum, noise_scale=noise_scale)
            assert rate.batch is not None
            k = rate.batch / REFERENCE
            assert rate.factor == target(rule, k, reference=REFERENCE, noise_scale=noise_scale)


def test_rules_are_put_together_and_told_apart_by_their_text() -> None:
    assert rates.ramped(rates.at_once(rates.sqrt(moments=True))) == rates.sqrt(moments=True)
    assert rates.ramped("linear") == rates.linear() == rates.of("linear")
    assert sorted(RULES) == sorted({*RULES, "at_once(sqrt(moments=True))", "adascale"})
    assert all(str(rule) == text == repr(rule) and rates.of(rule) == rule for text, rule in RULES.items())
    assert len({hash(rule) for rule in RULES.values()}) == len(RULES) == 12


@pytest.mark.parametrize(
    "wrong", ["cubic", "at_once(linear)", None, 3, rates.linear, Rule("cubic"), Rule("linear", True)]
)
def test_what_is_no_rule_is_refused_in_one_line(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"rates is .*: choose one of 'constant', 'linear', 'sqrt', 'adascale', or"):
        rates.of(wrong)


@given(st.floats(0.0, 0.9999), st.floats(0.0, 0.9999), st.floats(0.05, 40.0))
def test_moments_stay_moments_and_are_the_schedules_at_one(first: float, second: float, factor: float) -> None:
    betas, epsilon = rates.moments((first, second), 1e-8, factor)
    for beta, before in zip(betas, (first, second), strict=True):
        assert 0.0 <= beta < 1.0
        assert beta == 0.0 or 1.0 - beta == pytest.approx(factor**2 * (1.0 - before))
    assert epsilon == pytest.approx(1e-8 / factor)
    same, epsilon = rates.moments((first, second), 1e-8, 1.0)
    assert same == pytest.approx((first, second)) and epsilon == 1e-8


@given(st.floats(0.0, 0.99), st.lists(st.tuples(st.floats(0.01, 10.0), st.floats(-1.0, 1.0)), min_size=1, max_size=60))
def test_both_forms_of_momentum_are_the_same(momentum: float, steps: list[tuple[float, float]]) -> None:
    """PyTorch's u ← μu + g, w ← w − ηu under a changing η is the paper's v ← μ(η_t/η_{t−1})v + ηg, w ← w − v."""
    weight = buffer = corrected = velocity = 0.0
    before = steps[0][0]
    for rate, gradient in steps:
        buffer = momentum * buffer + gradient
        weight -= rate * buffer
        velocity = momentum * (rate / before) * velocity + rate * gradient
        corrected -= velocity
        before = rate
    assert corrected == pytest.approx(weight, rel=1e-9, abs=1e-9)


def test_a_schedule_counts_samples_and_with_adascale_what_they_were_worth() -> None:
    rate = Rate(factor=3.0, batch=4000.0)
    for name in ("constant", "linear", "sqrt"):
        assert rates.progress(Rule(name), rate, batch=4100, reference=1000, short=False) == 4100.0
    assert rates.progress(Rule("adascale"), rate, batch=4100, reference=1000, short=False) == 3000.0
    assert rates.progress(Rule("adascale"), rate, batch=500, reference=1000, short=True) == 500.0


@given(st.floats(0.25, 64.0), st.floats(0.0, 1e7))
def test_for_adam_the_rate_grows_with_the_root_of_the_gain_and_the_schedule_with_all_of_it(
    k: float, scale: float
) -> None:
    gain = rates.gain(k, REFERENCE, scale)
    factor = rates.target(rates.adascale(moments=True), k, reference=REFERENCE, noise_scale=scale)
    assert factor**2 == pytest.approx(gain)
    worth = rates.progress(rates.adascale(moments=True), Rate(factor), batch=4096, reference=REFERENCE, short=False)
    assert worth == pytest.approx(gain * REFERENCE)
    assert factor <= max(1.0, rates.target(rates.sqrt(moments=True), k)) + 1e-12


def test_what_adascale_learns_is_ramped_too() -> None:
    """Eight reference batches for long, then the noise becomes known."""
    rate = Rate(1.0, 8.0 * REFERENCE, 0.0, 1.0 / 8.0)
    wanted = gain(8.0, REFERENCE, 1e5)
    factors = [rate.factor]
    for _ in range(ramp_rounds(wanted, 1.0, 0.9)):
        rate = follow(
            rate, batch=8 * REFERENCE, reference=REFERENCE, rule=Rule("adascale"), momentum=0.9, noise_scale=1e5
        )
        factors.append(rate.factor)
    rises = [after - before for before, after in itertools.pairwise(factors)]
    assert factors[-1] == wanted > 7.0
    assert max(rises) <= 2.0 * (wanted - 1.0) / len(rises)
