"""Which workers cannot reach each other's data ports.

Question  No group could be formed: who is left out, for how long, and who may be tried again?
Holds     Everything is kept by pairs: who could not reach whom. Newcomers are left out before members, and of members
          the one that is in most of these pairs, in a tie the latest comer; never the last one that holds the state.
          Who was left out is tried again at growing intervals, by itself, so that it holds nobody else up.
Source    ours; docs/design/0021-formation.md. Leaving out the busiest end of the remaining pairs is the greedy
          algorithm for vertex cover.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from msgspec.structs import replace

from pliant.types import WorkerId

GATHER_S = 4.0
"""After the first word about a failed plan the others' arrive within this time: who is refused knows it at once, who
gets no answer gives up after three and a half seconds. Nothing waits for it: the era in force goes on."""

UNCERTAIN_S = 15.0
"""Where only newcomers have failed, and cannot say with whom, the members' own attempts end within this time."""

MEMBERS_AFTER = 2
"""So many formations in a row may fail before a member is left out; a newcomer is after the first."""

AGAIN_S = 10.0
AGAIN_AT_MOST_S = 300.0
"""Between two tries, doubled every time."""

Pair = tuple[WorkerId, WorkerId]
"""who could not reach whom"""


class Candidate(msgspec.Struct, frozen=True):
    """One of those with whom a group is to be formed."""

    name: WorkerId
    newcomer: bool = False
    holds: bool = False
    """the whole state"""


class LeftOut(msgspec.Struct, frozen=True):
    """A slot whose worker is not taken into an era before ``until_s``."""

    slot: str
    until_s: float
    times: int = 1


class FormationFailure(msgspec.Struct, frozen=True):
    """What one worker has said about a formation that failed."""

    worker: WorkerId
    unreached: tuple[WorkerId, ...] = ()
    connecting: bool = True
    """false: it did not come to that, so it knows nothing about anybody's ports"""


class Reachability(msgspec.Struct, frozen=True):
    """What is known since the last era in force."""

    era: int = 0
    """the last one whose group could not be formed"""
    since_s: float = 0.0
    roster: tuple[WorkerId, ...] = ()
    reports: tuple[FormationFailure, ...] = ()
    """about that era"""
    pairs: frozenset[Pair] = frozenset()
    failures: int = 0
    """eras in a row that could not be formed, with the same members"""
    left_out: tuple[LeftOut, ...] = ()
    plans: int = 0
    """plans in a row that came to nothing though no newcomer was to blame"""
    plan_again_s: float = 0.0
    voided: int = 0
    """the last plan that was dropped"""


def reported(
    known: Reachability, era: int, roster: tuple[WorkerId, ...], report: FormationFailure, now_s: float
) -> Reachability:
    """What is known after one more worker has said that the era's group could not be formed."""
    if era != known.era:
        # Where somebody has gone since, that may have been the reason.
        failures = known.failures + 1 if set(known.roster) <= set(roster) else 1
        known = replace(known, era=era, since_s=now_s, roster=roster, reports=(), failures=failures)
    others = tuple(each for each in known.reports if each.worker != report.worker)
    pairs = {(report.worker, other) for other in report.unreached if other in roster and other != report.worker}
    return replace(known, reports=(*others, report), pairs=known.pairs | pairs)


def is_certain(known: Reachability, members: Collection[WorkerId]) -> bool:
    """Whether the reported plan cannot come about any more: a member has given it up, or somebody never connected."""
    return any(report.worker in members or report.unreached or not report.connecting for report in known.reports)


def is_gathered(
    known: Reachability, members: Collection[WorkerId], everybody: Collection[WorkerId], now_s: float
) -> bool:
    """Whether all is known about a failed plan that will be."""
    if {report.worker for report in known.reports} >= set(everybody):
        return True
    return now_s - known.since_s >= (GATHER_S if is_certain(known, members) else UNCERTAIN_S)


def is_evidence(known: Reachability) -> bool:
    """Whether anybody has come as far as trying to connect."""
    return any(report.connecting for report in known.reports)


def outsiders(known: Reachability, candidates: Sequence[Candidate], *, members_too: bool) -> list[WorkerId]:
    """Who is left out, so that no pair remains that cannot be connected; ``candidates`` in the order of their coming.

    Where nobody is named: the newcomers, or else the member that came last.
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
    """Who could not reach it, and whom it could not reach."""
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
    """How long it is waited after so many failures; short where silence counts for much."""
    return min(AGAIN_AT_MOST_S, min(AGAIN_S, 2 * dead_after_s) * 2.0 ** min(times - 1, 10))


def is_suspect(known: Reachability, slot: str) -> bool:
    """Whether no group could be formed with the slot's worker, and none has been since."""
    return any(each.slot == slot for each in known.left_out)


def eligible(known: Reachability, slot: str, now_s: float) -> bool:
    """Whether the slot's worker may be taken into an era now."""
    return all(now_s >= each.until_s for each in known.left_out if each.slot == slot)


def taken(known: Reachability, slots: Sequence[str], now_s: float, *, suspects: bool) -> list[str]:
    """Which of those who wait are taken in together: suspects by themselves, one at a time, and only where allowed."""
    able = [slot for slot in slots if eligible(known, slot, now_s)]
    fresh = [slot for slot in able if not is_suspect(known, slot)]
    return fresh or (able[:1] if suspects else [])


def settled(known: Reachability, slots: Collection[str]) -> Reachability:
    """What is known after an era with these slots has come into force: they can all reach each other."""
    left = tuple(each for each in known.left_out if each.slot not in slots)
    return Reachability(era=known.era, left_out=left, voided=known.voided)


def dropped(known: Reachability, era: int, *, blamed: bool, dead_after_s: float, now_s: float) -> Reachability:
    """What is known after a plan was dropped; ``blamed``: somebody was left out, so the next may come at once."""
    plans = 0 if blamed else known.plans + 1
    again_s = 0.0 if blamed else interval_s(plans, dead_after_s)
    return Reachability(
        era=known.era, left_out=known.left_out, plans=plans, plan_again_s=now_s + again_s, voided=max(known.voided, era)
    )
