"""What a group of virtual workers does with the decisions of core.rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver import Break, Call, Play, Scene, played
from hypothesis import given, settings
from scenes import scenes

from pliant.core import rounds
from pliant.core.journal import ExchangeRecord, PhaseEndRecord, PhaseRecord, RoundRecord
from pliant.core.rounds import Mismatch, Policy
from pliant.core.tickets import Flag, Kind, Ticket
from pliant.types import WorkerId


def phases(play: Play) -> dict[int, PhaseRecord]:
    return {record.phase: record for record in play.records if isinstance(record, PhaseRecord)}


def settlements(play: Play) -> list[RoundRecord | ExchangeRecord]:
    return [record for record in play.records if isinstance(record, RoundRecord | ExchangeRecord)]


def positions(play: Play, phase: int) -> tuple[list[int], list[int]]:
    """Positions used and cut in a phase, with repetitions."""
    used: list[int] = []
    cut: list[int] = []
    for record in play.records:
        if isinstance(record, RoundRecord | ExchangeRecord) and record.phase == phase:
            used += [p for ticket in record.tickets for start, stop in ticket.spans for p in range(start, stop)]
        if isinstance(record, PhaseEndRecord) and record.phase == phase:
            cut += [p for start, stop in record.cut for p in range(start, stop)]
    return used, cut


@settings(max_examples=250)
@given(scenes())
def test_every_position_once_or_cut_whatever_happens(scene: Scene) -> None:
    play = played(scene)
    ended = {record.phase for record in play.records if isinstance(record, PhaseEndRecord)}
    assert ended == set(phases(play))
    for number, phase in phases(play).items():
        used, cut = positions(play, number)
        wanted = phase.limit or len(cut)
        assert sorted(used + cut) == list(range(wanted))
        assert not cut or phase.limit == 0 or any(call.breaks for call in scene.script)


@settings(max_examples=150)
@given(scenes())
def test_all_workers_reach_the_same_states(scene: Scene) -> None:
    leader, *others = played(scene, replicates=True).workers
    for worker in others:
        assert worker.states == leader.states
        assert worker.group == leader.group


@settings(max_examples=250)
@given(scenes())
def test_a_round_that_is_seen_finds_everyone_who_takes_part_in_its_step(scene: Scene) -> None:
    play = played(scene)
    for outcomes in zip(*(worker.outcomes for worker in play.workers), strict=True):
        outcome, took_part, _ = outcomes[0]
        if outcome.seen:
            left = {b.member for call in scene.script for b in call.breaks}
            for member, (_, _, where) in enumerate(outcomes):
                # A worker on its way out settles the round before its break after its step: nobody can know yet.
                assert where == "step" or not took_part[member] or (where == "abandon" and member in left)


@settings(max_examples=100)
@given(scenes())
def test_a_round_that_carries_a_break_ends_the_phase_and_is_not_seen(scene: Scene) -> None:
    play = played(scene)
    for record, (outcome, _, _) in zip(settlements(play), play.workers[0].outcomes, strict=True):
        if any(ticket.flags & Flag.BREAK for ticket in record.tickets):
            assert outcome.ended
            assert not outcome.seen


@settings(max_examples=150)
@given(scenes())
def test_rounds_count_what_they_were_handed(scene: Scene) -> None:
    total = 0
    limit = scene.samples_limit
    for record in played(scene).records:
        if isinstance(record, RoundRecord):
            total += record.batch
            assert record.samples_total == total
            assert limit is None or total <= limit
            spoiled = any(ticket.flags & Flag.NONFINITE for ticket in record.tickets)
            assert record.applied == (not spoiled and record.weight > 0)
