"""Who is dealt what: core.dealing, alone and in groups of virtual workers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scenes import scenes

from pliant.core import allowance, consistency, dealing, ledger, regrouping, rounds
from pliant.core.group_state import GroupState, OpenPhase, Policy, Standing, founded
from pliant.core.journal.records import PhaseEndRecord, PhaseRecord, RoundRecord
from pliant.core.ledger import samples_of
from pliant.core.shares import shares
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.core.tuning import delay
from pliant.core.tuning.pace import Pace, Pacing
from pliant.testing.steady import SteadyScene, played
from pliant.types import WorkerId


@st.composite
def groups(draw: st.DrawFn) -> tuple[Pacing, list[int], list[int]]:
    """Paces, micro-batch sizes and look-ahead of a few workers."""
    members = draw(st.integers(1, 6))
    each = {"min_size": members, "max_size": members}
    paces = draw(st.lists(st.sampled_from([0.0, 1.0, 7.5, 20.0, 33.0, 160.0]), **each))
    round_s = draw(st.sampled_from([0.05, 0.4, 3.0]))
    pacing = Pacing(tuple(Pace(pace, 1.0) for pace in paces), round_s, draw(st.sampled_from([0.0, 0.01, 1.0])))
    sizes = draw(st.lists(st.integers(1, 32), **each))
    return pacing, sizes, draw(st.lists(st.sampled_from([0, 2, 8]), **each))


@settings(max_examples=80)
@given(groups(), st.integers(1, 128), st.integers(0, 600), st.sampled_from([1, 2]))
def test_a_fixed_batch_is_promised_exactly_round_by_round(
    group: tuple[Pacing, list[int], list[int]], batch: int, limit: int, contributions: int
) -> None:
    pacing, sizes, ahead = group
    dealt = dealing.fixed(ledger.opened(limit, len(sizes)), pacing, batch, sizes, ahead, contributions)
    promised = [len(hand.quotas) for hand in dealt.hands]
    assert len(set(promised)) == 1
    assert promised[0] >= min(contributions, -(-limit // batch))
    at = [0] * len(sizes)
    for number in range(promised[0]):
        share: list[int] = []
        for member, hand in enumerate(dealt.hands):
            quota = hand.quotas[number]
            micro_batches = [samples_of(mb) for mb in hand.queue[at[member] : at[member] + quota]]
            at[member] += quota
            share.append(sum(micro_batches))
            assert max(micro_batches, default=0) <= sizes[member]
            alone = sizes[member] <= 2 or share[member] == 1
            assert min(micro_batches, default=2) > 1 or alone
        left = limit - number * batch
        assert sum(share) == min(batch, left)
        if left >= batch:
            least = 1 if batch < 2 * len(sizes) else 2
            assert tuple(share) == shares(batch, pacing.paces(), least)
            assert min(share) >= min(1, batch // len(sizes))
        else:
            assert 1 not in share or left == 1
    assert [hand.granted for hand in dealt.hands] == at == [sum(hand.quotas) for hand in dealt.hands]


@settings(max_examples=80)
@given(groups(), st.integers(1, 2000), st.one_of(st.none(), st.integers(1, 200)))
def test_an_open_batch_leaves_nobody_without_work_while_there_is_plenty(
    group: tuple[Pacing, list[int], list[int]], limit: int, at_most: int | None
) -> None:
    pacing, sizes, ahead = group
    dealt = dealing.floating(ledger.opened(limit, len(sizes)), pacing, at_most, sizes, ahead)
    cut = dealing.micro_batch_sizes(pacing, at_most, sizes)
    working = len(sizes) if at_most is None else min(len(sizes), at_most)
    assert sum(hand.granted for hand in dealt.hands) > 0
    for member, hand in enumerate(dealt.hands):
        assert max((samples_of(mb) for mb in hand.queue), default=0) <= cut[member] <= sizes[member]
        if member >= working:
            assert not hand.queue
        # Its part of everything is a micro-batch or more, at any pace in the group.
        elif limit * min(pacing.paces()) / sum(pacing.paces()) >= 2 * cut[member] and at_most is None:
            assert hand.granted > 0
        singles = sum(samples_of(mb) == 1 for mb in hand.queue)
        assert singles == 0 or cut[member] <= 2 or limit < 2 * working


@settings(max_examples=50)
@given(groups(), st.integers(1, 2000), st.integers(1, 300))
def test_limits_of_contributions_add_up_to_the_bound(
    group: tuple[Pacing, list[int], list[int]], limit: int, at_most: int
) -> None:
    pacing, sizes, _ = group
    limits = dealing.contribution_limits(pacing, at_most, len(sizes))
    assert sum(limits) <= at_most
    cut = dealing.micro_batch_sizes(pacing, at_most, sizes)
    working = min(len(sizes), at_most)
    assert all(size <= bound for size, bound in zip(cut[:working], limits[:working], strict=True))
    assert limits[working:] == (0,) * (len(sizes) - working)


@settings(max_examples=80)
@given(groups(), st.integers(1, 300), st.data())
def test_who_holds_a_larger_micro_batch_may_hand_it_in(
    group: tuple[Pacing, list[int], list[int]], at_most: int, data: st.DataObject
) -> None:
    """It was dealt when there were fewer workers."""
    pacing, sizes, _ = group
    working = min(len(sizes), at_most)
    largest = data.draw(st.lists(st.integers(0, at_most), min_size=len(sizes), max_size=len(sizes)))
    plain = dealing.contribution_limits(pacing, at_most, len(sizes))
    limits = dealing.contribution_limits(pacing, at_most, len(sizes), largest)
    assert dealing.contribution_limits(pacing, at_most, len(sizes), [0] * len(sizes)) == plain
    assert all(held <= limit for held, limit in zip(largest[:working], limits[:working], strict=True))
    assert limits[working:] == (0,) * (len(sizes) - working)
    least = max(1, at_most // (2 * len(sizes)))
    needed = sum(max(least, held) for held in largest[:working])
    assert sum(limits) == max(needed, at_most), "what is left is shared out"
    kept = dealing.within(limits, at_most)
    assert sum(kept) <= at_most
    assert kept == limits if needed <= at_most else kept[limits.index(max(limits))] == max(limits)
    assert all(one in (0, limit) for one, limit in zip(kept, limits, strict=True))


NAMES = tuple(WorkerId(f"w{member}") for member in range(4))


def bounded(at_most: int, *hands: tuple[int, ...], working: int | None = None, samples: int = 400) -> GroupState:
    """A group in a loop with a bounded open batch: the micro-batches that each member holds; the last ones follow."""
    working = len(hands) if working is None else working
    group = founded(Policy(8, floating=True, at_most=at_most, delay=1), 1, NAMES[: len(hands)])
    held = ledger.opened(samples, len(hands))
    for member, micro_batches in enumerate(hands):
        if micro_batches:
            held = ledger.grant(ledger.deal(held, member, micro_batches), member, len(micro_batches))
    here = tuple(member < working for member in range(len(hands)))
    sizes = (at_most,) * len(hands)
    phase = OpenPhase(1, Kind.TRAIN, 0, samples, sizes, (0,) * len(hands), held, here, here)
    standings = tuple(Standing.ACTIVE if each else Standing.FOLLOWING for each in here)
    return replace(group, standings=standings, open=(phase,), phases=1, exchange=1, round=1)


def settled(group: GroupState, drawn: tuple[int, ...], ready: int | None = None) -> GroupState:
    """After a round to which each member has handed in so many micro-batches; ``ready``: who computes from now on."""
    tickets: list[Ticket] = []
    for member, count in enumerate(drawn):
        samples = sum(map(samples_of, group.phase.ledger.hands[member].queue[:count]))
        flags = Flag.FOLLOWING if group.standings[member] is Standing.FOLLOWING else Flag.NONE
        flags |= Flag.READY if member == ready else Flag.NONE
        tickets.append(
            Ticket(
                1,
                group.round,
                group.phases,
                Kind.TRAIN,
                flags,
                size=group.phase.sizes[member],
                micro_batches=count,
                samples=samples,
                weight=float(samples),
                busy_s=0.01,
                digest=consistency.digest(group),
                exchange=group.exchange,
            )
        )
    decision = rounds.settled(group, tickets)
    assert isinstance(decision, tuple)
    return decision[0]


def test_a_contribution_keeps_the_limits_it_was_begun_with_though_somebody_joins() -> None:
    """The others may have drawn up to the bound already when the newcomer is ready, in the middle of the next round."""
    before = bounded(12, (3,) * 6, (3,) * 6, (), working=2)
    begun = [allowance.allowance(before, member, 1).samples for member in range(2)]
    assert begun == [6, 6]
    joined = settled(before, (1, 1, 0), ready=2)
    assert joined.standings[2] is Standing.ACTIVE and joined.phase.present[2]
    assert joined.phase.limits == allowance.sample_limits(before) == (6, 6, 0)
    # What was begun beside the round that has just been settled.
    assert [allowance.allowance(joined, member, 0).samples for member in range(2)] == begun
    assert allowance.allowance(joined, 2, 0).micro_batches == 0, "it has no part in that one"
    # What is begun beside that: the bound is shared by three.
    fresh = [allowance.allowance(joined, member, 1).samples for member in range(3)]
    assert fresh == list(allowance.sample_limits(joined)) and sum(each or 0 for each in fresh) == 12
    assert all(fresh), "the newcomer is one of them"
    after = settled(joined, (1, 1, 0))
    assert after.phase.limits == allowance.sample_limits(joined) != joined.phase.limits
    assert [allowance.allowance(after, member, 0).samples for member in range(3)] == fresh


def test_limits_are_kept_only_of_a_bound_that_the_user_has_set_and_where_something_may_be_drawn() -> None:
    before = bounded(12, (3,) * 6, (3,) * 6)
    assert allowance.kept_limits(before, before.phase) == allowance.sample_limits(before) == (6, 6)
    nothing = bounded(12, (), ())
    assert allowance.sample_limits(nothing) == (6, 6)
    assert allowance.kept_limits(before, nothing.phase) == (), "nobody can have drawn anything"
    pays = replace(before, policy=replace(before.policy, at_most=None), paying=6)
    assert allowance.sample_limits(pays) == (6, 6)
    assert allowance.kept_limits(pays, pays.phase) == (), "what pays changes from round to round"


def test_micro_batches_of_a_time_with_fewer_workers_count_for_those_who_hold_them() -> None:
    # Dealt to one alone: half of the bound at a time. With two a quarter each would be the least.
    assert allowance.sample_limits(bounded(12, (6, 6), (3, 3))) == (8, 4)
    assert allowance.sample_limits(bounded(12, (3, 3), (3, 3))) == (6, 6)
    # What is not granted does not count: it is taken back, and dealt again.
    group = bounded(12, (3, 3), (3, 3))
    held = ledger.deal(group.phase.ledger, 0, (6,))
    phase = replace(group.phase, ledger=held)
    assert allowance.sample_limits(replace(group, open=(phase,))) == (6, 6)


def test_limits_never_add_up_to_more_than_the_bound_that_the_user_has_set() -> None:
    """Three join one that was alone: its micro-batch of two leaves room for two of them."""
    group = bounded(4, (1,), (1,), (2, 2), (1,))
    assert allowance.sample_limits(group) == (1, 1, 2, 0)
    assert allowance.allowance(group, 3, 1).micro_batches == 0
    assert allowance.sample_limits(bounded(4, (1,), (1,), (1,), (1,))) == (1, 1, 1, 1)


@settings(max_examples=40)
@given(scenes())
def test_a_group_never_exceeds_the_bound_of_an_open_batch(scene: SteadyScene) -> None:
    at_most = 1 + scene.policy.batch // 2
    scene = replace(scene, policy=Policy(scene.policy.batch, floating=True, at_most=at_most))
    for record in played(scene).records:
        if isinstance(record, RoundRecord) and len(scene.speeds) > 1:
            assert record.batch <= at_most


@settings(max_examples=40)
@given(scenes(), st.integers(1, 3))
def test_nor_does_it_while_it_tries_the_other_delay(scene: SteadyScene, times: int) -> None:
    """What was dealt for open rounds is not all taken into the first one without an overlap."""
    policy = Policy(scene.policy.batch, floating=True, at_most=times * scene.policy.batch, delay=delay.AUTO, trial=1)
    for record in played(replace(scene, policy=policy)).records:
        if isinstance(record, RoundRecord):
            assert record.batch <= times * scene.policy.batch


@pytest.mark.parametrize(("at_most", "quota", "free"), [(None, 3, 0), (8, 2, 4)])
def test_who_is_left_alone_may_hand_in_all_that_it_may_have_drawn(at_most: int | None, quota: int, free: int) -> None:
    """Also where more was drawn than pays by now: the bound of what pays changes from round to round."""
    names = WorkerId("w0"), WorkerId("w1")
    group = founded(Policy(8, floating=True, at_most=at_most, delay=1), 1, names)
    here = (True, True)
    held = ledger.grant(ledger.deal(ledger.opened(12, 2), 0, (4, 4, 4)), 0, 3)
    phase = OpenPhase(1, Kind.TRAIN, 0, 12, (4, 4), (0, 0), held, here, here)
    alone = regrouping.switched(replace(group, open=(phase,), phases=1, paying=2, exchange=3), 2, names[:1])
    assert alone.phase.ledger.hands[0].quotas == (quota,)
    assert alone.phase.ledger.free == free


@settings(max_examples=40)
@given(scenes())
def test_every_round_of_a_fixed_batch_but_the_last_is_full(scene: SteadyScene) -> None:
    scene = replace(scene, policy=replace(scene.policy, floating=False, at_most=None))
    records = played(scene).records
    limits = {record.phase: record.limit for record in records if isinstance(record, PhaseRecord)}
    used = dict.fromkeys(limits, 0)
    for record, after in itertools.pairwise(records):
        if isinstance(record, RoundRecord):
            used[record.phase] += record.batch
            if isinstance(after, PhaseEndRecord):
                broken = any(ticket.flags & Flag.BREAK for ticket in record.tickets)
                left = limits[record.phase] % scene.policy.batch or scene.policy.batch
                assert record.batch == left or broken
            else:
                assert record.batch == scene.policy.batch
                if scene.policy.batch >= len(scene.speeds):
                    assert min(ticket.samples for ticket in record.tickets) >= 1
