"""A newcomer asks for as much as it can keep the rounds of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pliant.core import portion_size
from pliant.core.portion_size import COPIES, SMALL_BYTES

SIZES = st.integers(1, 1 << 34)
ROUNDS = st.integers(1, 100)


@given(SIZES)
def test_two_copies_of_the_gradients_may_be_kept_and_a_little_in_any_case(gradients: int) -> None:
    bound = portion_size.portions(gradients)
    assert not bound.is_full(COPIES * gradients) and not bound.is_full(SMALL_BYTES)
    assert bound.is_full(max(COPIES * gradients, SMALL_BYTES) + 1)


@given(SIZES)
def test_while_nothing_is_known_all_of_it_may_be_asked_for(gradients: int) -> None:
    assert portion_size.portions(gradients).fits(gradients)


@given(SIZES, SIZES, ROUNDS)
def test_what_fits_can_be_kept_for_as_long_as_it_travels(gradients: int, size: int, rounds: int) -> None:
    """... twice as long, and for the round before it."""
    known = portion_size.arrived(portion_size.portions(gradients), size, rounds)
    for part in (size // 4, size // 2, size, 2 * size):
        if known.fits(part):
            travels = part / (size / rounds) if rounds > 1 else 0
            assert (travels + 1) * part <= known.at_most / 2


@given(SIZES, SIZES, ROUNDS, st.floats(0.0, 1.0))
def test_after_one_that_was_too_large_at_most_half_is_asked_for(
    gradients: int, size: int, rounds: int, part: float
) -> None:
    known = portion_size.given_up(portion_size.portions(gradients), size, rounds, part)
    assert not known.fits(size // 2 + 1)


@given(SIZES, st.lists(st.tuples(ROUNDS, st.floats(0.0, 1.0)), max_size=60))
def test_giving_up_comes_to_an_end(gradients: int, failures: list[tuple[int, float]]) -> None:
    """Every portion that fits is smaller by half: after some forty there is one tensor, which is never given up."""
    known, asked, given_up = portion_size.portions(gradients), gradients, 0
    for rounds, part in failures:
        known = portion_size.given_up(known, asked, rounds, part)
        while asked and not known.fits(asked):
            asked //= 2
        if not asked:
            break
        given_up += 1
    assert given_up <= gradients.bit_length()


def test_a_quick_line_is_trusted_again() -> None:
    slow = portion_size.given_up(portion_size.portions(1 << 30), 64 << 20, 3, 0.1)
    assert not slow.fits(33 << 20)
    quick = portion_size.arrived(slow, 1 << 20, 1)
    assert quick.fits(33 << 20) and quick.fits(64 << 20)
    assert not quick.fits(65 << 20)


@given(SIZES, st.lists(st.sampled_from(["arrived", "given up", "missed"]), max_size=20), ROUNDS, st.floats(0.0, 1.0))
def test_what_may_be_kept_never_grows(gradients: int, events: list[str], rounds: int, part: float) -> None:
    """Whatever becomes of the portions; and two rounds of a tensor, however large, always fit."""
    first = known = portion_size.portions(gradients)
    for event in events:
        if event == "arrived":
            known = portion_size.arrived(known, gradients, rounds)
        elif event == "given up":
            known = portion_size.given_up(known, gradients, rounds, part)
        else:
            known = portion_size.missed(known)
    assert known.at_most == first.at_most
    assert not known.is_full(2 * gradients)


def test_after_an_answer_of_a_round_that_was_dropped_no_round_is_dropped_again() -> None:
    known = portion_size.portions(1 << 30)
    assert known.drops
    missed = portion_size.missed(known)
    assert not missed.drops
    assert not portion_size.arrived(missed, 1 << 20, 1).drops
    assert not portion_size.given_up(missed, 1 << 20, 3, 0.5).drops
