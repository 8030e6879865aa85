"""Several sums become several means; what a contribution says behind its ticket counts if its samples do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pliant.core import consistency, evaluation, rounds
from pliant.core.consistency import Mismatch
from pliant.core.evaluation import Appendix
from pliant.core.group_state import GroupState, Policy, founded
from pliant.core.tickets import Flag, Kind, Ticket, pack, unpack
from pliant.types import WorkerId

ROSTER = (WorkerId("w0"), WorkerId("w1"))


def evaluating(length: int = 8) -> GroupState:
    start = founded(Policy(8), 1, ROSTER)
    opening = Ticket(1, 0, 0, Kind.EVALUATE, Flag.OPENING, length=length, size=2, digest=consistency.digest(start))
    group = rounds.opened(start, [opening, opening])
    assert isinstance(group, GroupState)
    return group


def handed_in(group: GroupState, *sums: tuple[tuple[str, float, float], ...]) -> list[Ticket]:
    digest = consistency.digest(group)
    return [
        Ticket(1, 0, group.phases, Kind.EVALUATE, digest=digest, micro_batches=1, samples=2, weight=2.0, sums=each)
        for each in sums
    ]


def test_means_are_of_all_exchanges_and_by_name() -> None:
    group = evaluating()
    for _ in range(2):
        one, two = (("loss", 3.0, 2.0), ("hits", 1.0, 4.0)), (("loss", 5.0, 2.0), ("hits", 0.0, 4.0))
        decision = rounds.settled(group, handed_in(group, one, two))
        assert not isinstance(decision, Mismatch)
        group, outcome = decision
    assert outcome.ended and outcome.results == {"loss": 2.0, "hits": 0.125}
    assert group.past[-1].results == outcome.results


def test_names_that_differ_are_refused_with_both_workers() -> None:
    group = evaluating()
    decision = rounds.settled(group, handed_in(group, (("loss", 3.0, 2.0),), (("hits", 1.0, 4.0),)))
    assert isinstance(decision, Mismatch)
    assert "{hits} on w1, and {loss} on w0: return the same names" in decision.reason
    decision = rounds.settled(group, handed_in(group, (("loss", 3.0, 2.0),), ()))
    assert isinstance(decision, Mismatch) and "no dict on w1" in decision.reason
    settled = rounds.settled(group, handed_in(group, (("loss", 3.0, 2.0),), (("loss", 3.0, 2.0),)))
    assert not isinstance(settled, Mismatch)
    decision = rounds.settled(settled[0], handed_in(settled[0], (("hits", 3.0, 2.0),), (("hits", 3.0, 2.0),)))
    assert isinstance(decision, Mismatch) and "{loss} before" in decision.reason


def test_who_has_computed_nothing_need_not_know_the_names() -> None:
    group = evaluating()
    one, idle = handed_in(group, (("loss", 3.0, 2.0),), ())
    idle = replace(idle, micro_batches=0, samples=0, weight=0.0)
    assert not isinstance(rounds.settled(group, [one, idle]), Mismatch)


def test_gathering_on_one_worker_only_is_refused() -> None:
    group = evaluating()
    tickets = evaluation.read(handed_in(group, (), ()), [Appendix(outputs=(b"x",)), Appendix()])
    decision = rounds.settled(group, tickets)
    assert isinstance(decision, Mismatch) and "w0 and w1" in decision.reason and "gather=" in decision.reason


@given(
    st.lists(st.tuples(st.text(max_size=8), st.floats(), st.floats()), max_size=3),
    st.none() | st.lists(st.binary(max_size=20), max_size=3),
)
def test_an_appendix_comes_back_as_it_was(sums: list[tuple[str, float, float]], outputs: list[bytes] | None) -> None:
    appendix = Appendix(tuple(sums), None if outputs is None else tuple(outputs))
    assert repr(evaluation.unpacked(evaluation.packed(appendix))) == repr(appendix)


def test_nothing_to_say_takes_no_bytes() -> None:
    assert evaluation.packed(Appendix()) == b"" and evaluation.unpacked(b"") == Appendix()
    ticket = Ticket(1, 2, 3, Kind.EVALUATE, appendix=77)
    packed = pack(ticket, 5, 8)
    assert len(packed) == len(pack(replace(ticket, appendix=0), 5, 8)) and unpack(packed) == (ticket, 5)


def test_a_mean_without_a_count_or_a_finite_sum_is_none() -> None:
    assert evaluation.means(()) is None
    assert evaluation.means((("a", 1.0, 0.0), ("b", math.inf, 2.0), ("c", 1.0, 2.0))) == {
        "a": None,
        "b": None,
        "c": 0.5,
    }
    added = evaluation.added((("a", math.inf, 1.0),), [Ticket(1, 0, 1, Kind.EVALUATE, sums=(("a", -math.inf, 1.0),))])
    assert math.isnan(added[0][1]) and added[0][2] == 2.0


@pytest.mark.parametrize(("names", "leads"), [(("hits", "loss"), "loss"), (("hits", "other"), "hits")])
def test_the_loss_or_the_first_stands_for_all(names: tuple[str, ...], leads: str) -> None:
    assert evaluation.leading(names) == leads


def test_a_journal_that_says_another_mean_is_found() -> None:
    assert not evaluation.differences({}, None)
    assert not evaluation.differences({"a": None, "b": 1.0}, {"a": 2.0, "b": 1.0})
    assert "result b is 1.0" in evaluation.differences({"a": None, "b": 1.0}, {"a": 2.0, "b": 2.0})[0]
    assert "results are of a, not nothing" in evaluation.differences({"a": 1.0}, None)[0]
