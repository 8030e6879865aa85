"""Whether the next contribution is computed while the last one is summed.

Question  With ``delay="auto"``: which delay is in force in the coming round?
Holds     A pure function of the tickets, the same on all workers. Each delay's *harvest* is measured over some full
          rounds: samples computed, divided by those that the same workers would have computed in that time without
          waiting and without the cost of a round. Synchronous rounds are kept if they come within 3 % of the overlap,
          because their gradients are not delayed. The other delay is tried again so rarely that this costs half a
          percent at most. The last round of an overlap is summed while no worker draws, so that no contribution is
          computed at two points of the weights.
Source    ours; docs/design/0010-delay-auto.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.core.tickets import Ticket

AUTO = -1
"""Value of ``Policy.delay`` that means: decided here."""

TRIAL = 8
"""Rounds of one trial: the harvest of a single round is mostly noise."""
# The part of a trial to skip before measuring begins: the pipeline fills or empties.
_SETTLING = 0.25
# A run begins without delay for this many trials: at the beginning a delay costs most accuracy.
_FIRST = 3
# Synchronous rounds are chosen from this share of the overlap's harvest on, and given up below a slightly lower one.
_ENOUGH = 0.97
_TOO_LITTLE = 0.96
# A change is reported to the user only beyond these bounds: two delays that are nearly equal may alternate forever.
_CLEARLY_ENOUGH, _CLEARLY_TOO_LITTLE = 0.99, 0.93
# What trying the other delay may cost, in rounds lost per round …
_COST = 0.005
# … and the least and most rounds between two tries, in trials.
_LEAST, _MOST = 8, 512
# A harvest is the mean of about this many trials: a single one scatters by as much as the difference in question.
_REMEMBERED = 4


class DelayState(msgspec.Struct, frozen=True):
    """The delay in force and what is known of both."""

    delay: int = 0
    turning: bool = False
    """the overlap ends with the next round: no worker draws while it is summed"""
    rounds: int = 0
    """full rounds since the last change"""
    counted: int = 0
    """rounds that are included in ``made`` and ``possible``"""
    made: float = 0.0
    """samples computed"""
    possible: float = 0.0
    """samples that the same workers would have computed without waiting and without the rounds' cost"""
    harvests: tuple[float | None, float | None] = (None, None)
    """by delay; None: not measured yet"""
    trials: int = 0
    """number of trials in the mean of the present delay's harvest, at most ``_REMEMBERED``"""
    told: int | None = None
    """the delay last reported to the user"""


class DelayVerdict(msgspec.Struct, frozen=True):
    """A delay that is in force until something changes, and why."""

    delay: int
    harvests: tuple[float | None, float | None]


def after(
    choice: DelayState, tickets: Sequence[Ticket], *, trial: int, full: bool
) -> tuple[DelayState, DelayVerdict | None]:
    """The state after a training round, and the verdict if there is a new one to report.

    ``trial``: rounds of a trial. ``full``: the round was not cut short, and no member joined or left with it.
    """
    if choice.turning:
        return _changed(choice, 0), None
    if not full:
        return choice, None
    choice = _counted(choice, tickets, round(_SETTLING * trial))
    begins = choice.harvests == (None, None)
    if choice.counted < (_FIRST * trial if begins else trial) or choice.possible <= 0:
        return choice, None
    seen, trials = min(1.0, choice.made / choice.possible), min(choice.trials + 1, _REMEMBERED)
    known = choice.harvests[choice.delay]
    if known is not None:
        seen = known + (seen - known) / trials
    harvests = (seen, choice.harvests[1]) if choice.delay == 0 else (choice.harvests[0], seen)
    choice = replace(choice, harvests=harvests, trials=trials, counted=0, made=0.0, possible=0.0)
    delay, certain = _preferred(choice)
    verdict = None
    if certain and delay != choice.told and (choice.told is None or _is_clear(harvests, delay)):
        choice, verdict = replace(choice, told=delay), DelayVerdict(delay, harvests)
    if delay == choice.delay:
        if choice.rounds < _patience(choice, trial) or (delay == 0 and seen >= _ENOUGH):
            return choice, verdict
        delay = 1 - delay
    return (_changed(choice, 1) if delay == 1 else replace(choice, turning=True)), verdict


def moved(choice: DelayState) -> DelayState:
    """The state after a change of the roster: measure again, and try the other delay sooner."""
    return replace(choice, rounds=0, counted=0, made=0.0, possible=0.0, trials=0)


def _counted(choice: DelayState, tickets: Sequence[Ticket], settling: int) -> DelayState:
    rounds = choice.rounds + 1
    if rounds <= settling:
        return replace(choice, rounds=rounds)
    made = possible = 0.0
    for ticket in tickets:
        if ticket.samples:
            computing_s = max(ticket.busy_s - ticket.cost_s, 0.1 * ticket.busy_s, 1e-9)
            made += ticket.samples
            possible += ticket.samples / computing_s * max(ticket.busy_s + ticket.idle_s, computing_s)
    return replace(
        choice, rounds=rounds, counted=choice.counted + 1, made=choice.made + made, possible=choice.possible + possible
    )


def _preferred(choice: DelayState) -> tuple[int, bool]:
    """The better delay as far as is known, and whether that is certain."""
    synchronous, overlapped = choice.harvests
    if synchronous is not None and synchronous >= _ENOUGH:
        # A harvest is at most 1, so the overlap cannot be better by more than 3 %.
        return 0, True
    if synchronous is None or overlapped is None:
        return 1 - choice.delay, False
    enough = _ENOUGH if choice.delay == 1 else _TOO_LITTLE
    return (0 if synchronous >= enough * overlapped else 1), True


def _is_clear(harvests: tuple[float | None, float | None], delay: int) -> bool:
    """Whether a change is worth reporting: between the two bounds the delays are about equal."""
    synchronous, overlapped = harvests
    ratio = (synchronous or 0.0) / (overlapped or 1.0)
    return ratio >= _CLEARLY_ENOUGH if delay == 0 else ratio <= _CLEARLY_TOO_LITTLE


def _patience(choice: DelayState, trial: int) -> int:
    """Rounds until the other delay is tried again."""
    here, there = choice.harvests[choice.delay], choice.harvests[1 - choice.delay]
    loss = max(0.0, (here or 1.0) / max(there or 1.0, 0.01) - 1.0)
    rounds = math.ceil((1 + _SETTLING) * trial * loss / _COST)
    return min(_MOST * trial, max(_LEAST * trial, rounds))


def _changed(choice: DelayState, delay: int) -> DelayState:
    # The last measurement of this delay still counts, as one trial.
    return DelayState(delay=delay, harvests=choice.harvests, trials=1, told=choice.told)
