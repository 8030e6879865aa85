"""What the tickets' scalars say about the gradient's noise: core.tuning.noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.core.tickets import Kind, Ticket
from pliant.core.tuning import noise
from pliant.core.tuning.noise import Contributed, Noise

REFERENCE = 64
SHARES = st.lists(st.integers(1, 200), min_size=2, max_size=6)


def ticket(samples: int, squared_norm: float, weight: float | None = None) -> Ticket:
    weight = float(samples) if weight is None else weight
    return Ticket(1, 1, 1, Kind.TRAIN, samples=samples, weight=weight, squared_norm=squared_norm)


def after_rounds(rounds: Sequence[tuple[Sequence[Ticket], float]]) -> Noise:
    """The statistics after rounds of tickets, each with the squared norm of its mean gradient."""
    known, samples = Noise(), 0
    for number, (tickets, square) in enumerate(rounds, start=1):
        samples += sum(each.samples for each in tickets)
        known = noise.contributed(known, number, samples, tickets)
        known = noise.measured(known, number, square, REFERENCE)
    return known


def squared(vector: Sequence[float]) -> float:
    return math.fsum(value * value for value in vector)


@given(SHARES, st.floats(0.01, 1e6))
def test_identical_gradients_have_no_noise(shares: list[int], square: float) -> None:
    known = after_rounds([([ticket(n, square) for n in shares], square)] * noise.ENOUGH)
    assert known.variance <= 1e-12 * square * max(shares)
    assert known.signal == pytest.approx(square)
    assert known.scale == pytest.approx(0.0, abs=1e-9)


@given(SHARES, st.floats(0.01, 1e3), st.floats(0.0, 1e3))
def test_norms_as_expected_give_back_signal_and_noise(shares: list[int], variance: float, signal: float) -> None:
    """|g_i|² = G² + S/n_i and |g|² = G² + S/B, as they are on the average, whatever the shares."""
    tickets = [ticket(n, signal + variance / n) for n in shares]
    known = after_rounds([(tickets, signal + variance / sum(shares))] * noise.ENOUGH)
    assert known.variance == pytest.approx(variance, rel=1e-6, abs=1e-9 * signal * max(shares))
    assert known.signal == pytest.approx(signal, rel=1e-6, abs=1e-6 * variance)


@given(SHARES, st.data())
def test_weights_that_are_no_samples_are_taken_into_account(shares: list[int], data: st.DataObject) -> None:
    tokens = [n * data.draw(st.floats(0.5, 20.0)) for n in shares]
    whole = math.fsum(tokens)
    square = 2.0 + 30.0 * math.fsum((t / whole) ** 2 / n for t, n in zip(tokens, shares, strict=True))
    tickets = [ticket(n, 2.0 + 30.0 / n, t) for n, t in zip(shares, tokens, strict=True)]
    known = after_rounds([(tickets, square)] * noise.ENOUGH)
    assert known.variance == pytest.approx(30.0, rel=1e-6)
    assert known.signal == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("shares", [(16, 16, 16, 16), (96, 96, 48, 16), (100, 1), (7, 31, 2)])
def test_the_estimate_is_unbiased_for_unequal_shares(shares: tuple[int, ...]) -> None:
    """Gradients drawn around a known mean with a known covariance; the error is that of the mean of many rounds."""
    chance = random.Random(f"noise {shares}")
    dimensions, true, deviation = 20, 0.2, 1.5
    variances: list[float] = []
    signals: list[float] = []
    for _ in range(4000):
        means = [[true + deviation / math.sqrt(n) * chance.gauss(0.0, 1.0) for _ in range(dimensions)] for n in shares]
        group = [
            math.fsum(n * mean[axis] for n, mean in zip(shares, means, strict=True)) / sum(shares)
            for axis in range(dimensions)
        ]
        tickets = [ticket(n, squared(mean)) for n, mean in zip(shares, means, strict=True)]
        known = after_rounds([(tickets, squared(group))])
        variances.append(known.variance)
        signals.append(known.signal)
    for found, expected in (
        (variances, dimensions * deviation**2),
        (signals, dimensions * true**2),
    ):
        mean = math.fsum(found) / len(found)
        error = math.sqrt(math.fsum((value - mean) ** 2 for value in found)) / len(found)
        assert abs(mean - expected) < 4.0 * error
        assert error < 0.05 * expected


def test_equal_shares_give_adascales_own_estimate() -> None:
    norms, square, workers, each = [3.0, 5.0, 2.5, 4.0], 2.2, 4, 16
    known = after_rounds([([ticket(each, norm) for norm in norms], square)])
    sigma = (sum(norms) - workers * square) / (workers - 1)
    assert known.variance / each == pytest.approx(sigma)
    assert known.signal == pytest.approx(square - sigma / workers)


def test_one_contributor_spares_and_weightless_parts_teach_nothing() -> None:
    for tickets in ([ticket(8, 1.0)], [ticket(8, 1.0), ticket(0, 0.0)], [ticket(8, 1.0), ticket(8, 9.0, 0.0)]):
        assert noise.contributed(Noise(), 1, 8, tickets) == Noise()


def test_a_norm_is_taken_from_the_first_who_has_one_for_a_round_that_is_awaited() -> None:
    known = noise.contributed(Noise(), 7, 32, [ticket(16, 1.0), ticket(16, 2.0)])

    def saying(number: int, norm: float) -> Ticket:
        return Ticket(1, 8, 1, Kind.TRAIN, measured_round=number, measured_norm=norm)

    assert noise.told(known, [saying(0, 0.0), saying(0, 0.0)]) is None
    assert noise.told(known, [saying(6, 1.0), saying(8, 1.0)]) is None
    assert noise.told(known, [saying(7, math.inf), saying(7, math.nan)]) is None
    assert noise.told(known, [saying(0, 0.0), saying(7, 1.25), saying(7, 1.26)]) == (7, 1.25)
    assert noise.told(Noise(), [saying(0, 0.0)]) is None


def test_a_round_whose_norm_never_comes_is_forgotten() -> None:
    known = Noise()
    for number in range(1, 20):
        known = noise.contributed(known, number, 32 * number, [ticket(16, 1.0), ticket(16, 2.0)])
    assert [each.round for each in known.awaited] == [16, 17, 18, 19]
    known = noise.measured(known, 18, 1.0, REFERENCE)
    assert [each.round for each in known.awaited] == [19] and known.measured == 1


@given(st.floats(0.1, 10.0), st.integers(50, 400))
@settings(max_examples=40)
def test_means_begin_unbiased_and_forget_what_is_long_past(value: float, rounds: int) -> None:
    def steady(signal: float, count: int) -> list[tuple[list[Ticket], float]]:
        return [([ticket(64, signal), ticket(64, signal)], signal)] * count

    assert after_rounds(steady(value, rounds)).signal == pytest.approx(value)
    # Two reference batches per round: after a thousand of those rounds little more than a tenth is left of the past.
    assert after_rounds([*steady(value, rounds), *steady(0.0, 1000)]).signal <= 0.14 * value


def test_measured_often_at_first_and_seldom_later() -> None:
    assert all(noise.is_due(Noise(measured=noise.DENSE - 1), number) for number in range(1, 20))
    due = [number for number in range(1, 33) if noise.is_due(Noise(measured=noise.DENSE), number)]
    assert due == [8, 16, 24, 32]


def test_the_scale_is_unknown_nothing_or_without_bound_where_it_must_be() -> None:
    assert Noise(variance=2.0, signal=1.0, measured=noise.ENOUGH - 1).scale is None
    assert Noise(variance=0.0, signal=0.0, measured=noise.ENOUGH).scale == 0.0
    assert Noise(variance=2.0, signal=-0.1, measured=noise.ENOUGH).scale == math.inf
    assert Noise(variance=2.0, signal=0.5, measured=noise.ENOUGH).scale == 4.0


def test_an_estimate_after_a_long_silence_does_not_drown_the_next_ones() -> None:
    silent = Contributed(round=1, batch=64, samples=10**9, square=3.0, between=0.01, within=0.01)
    known = noise.measured(Noise(awaited=(silent,)), 1, 1.0, REFERENCE)
    assert known.weight == pytest.approx(noise.STRIDE / noise.MEMORY)
