"""Which workers cannot reach each other's data ports.

Question  A group could not be formed: which workers are left out, for how long, and which may be tried again?
Holds     Failures are kept as pairs of workers that could not connect. Newcomers are left out before members; among
          members, the one in most pairs, in a tie the latest; never the last one that holds the state. A worker that
          was left out is tried again at growing intervals, without other suspects, so that it delays no other newcomer.
Source    ours; docs/design/0021-formation.md. Leaving out the worker in most of the remaining pairs is the greedy
          algorithm for vertex cover.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from msgspec.structs import replace

from pliant.types import WorkerId

GATHER_S = 4.0
"""After the first report about a failed plan all others arrive within this time: a refused connection is noticed
immediately, a missing answer after 3.5 s. Nothing is delayed meanwhile: the era in force goes on."""

UNCERTAIN_S = 15.0
"""If only newcomers have failed, and do not know with whom, the members' own attempts end within this time."""

MEMBERS_AFTER = 2
"""A member is left out after this many failed formations in a row, a newcomer after the first."""

AGAIN_S = 10.0
AGAIN_AT_MOST_S = 300.0
"""Interval between two tries, doubled every time."""

Pair = tuple[WorkerId, WorkerId]
"""The first worker could not reach the second."""


class Candidate(msgspec.Struct, frozen=True):
    """A worker of the group to be formed."""

    name: WorkerId
    newcomer: bool = False
    holds: bool = False
    """it holds the whole state"""


class LeftOut(msgspec.Struct, frozen=True):
    """A slot whose worker may not be in an era before ``until_s``."""

    slot: str
    until_s: float
    times: int = 1


class FormationFailure(msgspec.Struct, frozen=True):
    """One worker's report about a formation that failed."""

    worker: WorkerId
    unreached: tuple[WorkerId, ...] = ()
    connecting: bool = True
    """false: it did not get as far as connecting, so it knows nothing about ports"""


class Reachability(msgspec.Struct, frozen=True):
    """What is known since the last era came into force."""

    era: int = 0
    """the last era whose group could not be formed"""
    since_s: float = 0.0
    roster: tuple[WorkerId, ...] = ()
    reports: tuple[FormationFailure, ...] = ()
    """about that era"""
    pairs: frozenset[Pair] = frozenset()
    failures: int = 0
    """eras in a row that could not be formed, with the same members"""
    left_out: tuple[LeftOut, ...] = ()
    plans: int = 0
    """plans in a row that were dropped although no newcomer was to blame"""
    plan_again_s: float = 0.0
    voided: int = 0
    """the last plan that was dropped"""


def reported(
    known: Reachability, era: int, roster: tuple[WorkerId, ...], report: FormationFailure, now_s: float
) -> Reachability:
    """What is known after one more worker has said that the era's group could not be formed."""
    if era != known.era:
        # If a member has gone since, that may have been the reason.
        failures = known.failures + 1 if set(known.roster) <= set(roster) else 1
        known = replace(known, era=era, since_s=now_s, roster=roster, reports=(), failures=failures)
    others = tuple(each for each in known.reports if each.worker != report.worker)
    pairs = {(report.worker, other) for other in report.unreached if other in roster and other != report.worker}
    return replace(known, reports=(*others, report), pairs=known.pairs | pairs)


def is_certain(known: Reachability, members: Collection[WorkerId]) -> bool:
    """Whether the reported plan can no longer begin: a member has abandoned it, or a worker never connected."""
    return any(report.worker in members or report.unreached or not report.connecting for report in known.reports)


def is_gathered(
    known: Reachability, members: Collection[WorkerId], everybody: Collection[WorkerId], now_s: float
) -> bool:
    """Whether no more reports about a failed plan are to be expected."""
    if {report.worker for report in known.reports} >= set(everybody):
        return True
    return now_s - known.since_s >= (GATHER_S if is_certain(known, members) else UNCERTAIN_S)


def is_evidence(known: Reachability) -> bool:
    """Whether any worker got as far as trying to connect."""
    return any(report.connecting for report in known.reports)


def outsiders(known: Reachability, candidates: Sequence[Candidate], *, members_too: bool) -> list[WorkerId]:
    """The workers to leave out, so that all remaining ones can connect; ``candidates`` are in the order of joining.

    If the reports name no pair: the newcomers, or else the member that joined last.
    """
    left = list(candidates)
    out: list[WorkerId] = []
    while True:
        names = {each.name for each in left}
        pairs = {frozenset(pair) for pair in known.pairs if names.issuperset(pair)}
        if not pairs:
            break
        chosen = _busiest(left, pairs, members_too=members_too)
        if chosen is None:
            return out
        out.append(chosen.name)
        left.remove(chosen)
    if out or not is_evidence(known):
        return out
    newcomers = [each.name for each in left if each.newcomer and not _is_last_holder(each, left)]
    if newcomers or not members_too:
        return newcomers
    spare = [each for each in left[1:] if not _is_last_holder(each, left)]
    return [spare[-1].name] if spare else []


def _busiest(left: Sequence[Candidate], pairs: set[frozenset[WorkerId]], *, members_too: bool) -> Candidate | None:
    counts = {each.name: sum(each.name in pair for pair in pairs) for each in left}
    involved = [each for each in left if counts[each.name] and not _is_last_holder(each, left)]
    able = [each for each in involved if each.newcomer] or (involved if members_too else [])
    places = {each.name: place for place, each in enumerate(left)}
    return max(able, key=lambda each: (counts[each.name], places[each.name]), default=None)


def _is_last_holder(each: Candidate, left: Sequence[Candidate]) -> bool:
    return each.holds and sum(other.holds for other in left) == 1


def partners(known: Reachability, name: WorkerId) -> tuple[list[WorkerId], list[WorkerId]]:
    """The workers that could not reach it, and those that it could not reach."""
    return (
        sorted({who for who, whom in known.pairs if whom == name}),
        sorted({whom for who, whom in known.pairs if who == name}),
    )


def left_out(known: Reachability, slot: str, dead_after_s: float, now_s: float) -> tuple[Reachability, float]:
    """What is known after the slot's worker was left out, and the seconds until it is tried again."""
    times = next((each.times for each in known.left_out if each.slot == slot), 0) + 1
    again_s = interval_s(times, dead_after_s)
    rest = tuple(each for each in known.left_out if each.slot != slot)
    return replace(known, left_out=(*rest, LeftOut(slot, now_s + again_s, times))), again_s


def interval_s(times: int, dead_after_s: float) -> float:
    """The wait after ``times`` failures; shorter if ``dead_after`` is short."""
    return min(AGAIN_AT_MOST_S, min(AGAIN_S, 2 * dead_after_s) * 2.0 ** min(times - 1, 10))


def is_suspect(known: Reachability, slot: str) -> bool:
    """Whether no group could be formed with the slot's worker, and none has been since."""
    return any(each.slot == slot for each in known.left_out)


def eligible(known: Reachability, slot: str, now_s: float) -> bool:
    """Whether the slot's worker may be taken into an era now."""
    return all(now_s >= each.until_s for each in known.left_out if each.slot == slot)


def taken(known: Reachability, slots: Sequence[str], now_s: float, *, suspects: bool) -> list[str]:
    """Which waiting slots are admitted together; suspects one at a time, without others, and only if ``suspects``."""
    able = [slot for slot in slots if eligible(known, slot, now_s)]
    fresh = [slot for slot in able if not is_suspect(known, slot)]
    return fresh or (able[:1] if suspects else [])


def settled(known: Reachability, slots: Collection[str]) -> Reachability:
    """What is known after an era with these slots has come into force: they can all reach each other."""
    left = tuple(each for each in known.left_out if each.slot not in slots)
    return Reachability(era=known.era, left_out=left, voided=known.voided)


def dropped(known: Reachability, era: int, *, blamed: bool, dead_after_s: float, now_s: float) -> Reachability:
    """What is known after a plan was dropped; ``blamed``: a worker was left out, so the next plan need not wait."""
    plans = 0 if blamed else known.plans + 1
    again_s = 0.0 if blamed else interval_s(plans, dead_after_s)
    return Reachability(
        era=known.era, left_out=known.left_out, plans=plans, plan_again_s=now_s + again_s, voided=max(known.voided, era)
    )
