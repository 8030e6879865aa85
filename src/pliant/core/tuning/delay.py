"""Whether the next contribution is computed while the last one is summed.

Question  With ``delay="auto"``: which delay is in force in the coming round?
Holds     A pure function of the tickets, the same on all workers. What each delay makes of the workers is measured,
          not guessed: its *harvest* over some full rounds, samples over what the same workers would have computed in
          that time without waiting or paying for the round. Synchronous rounds are kept where they come within 3 % of
          the overlap, because their gradients are not delayed. The other one is tried again so seldom that trying
          costs half a percent at most. An overlap is ended by a round beside which nobody draws, so that no
          contribution is computed at two points of the weights.
Source    ours; docs/design/0010-delay-auto.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pliant.core.tickets import Ticket

AUTO = -1
"""as ``Policy.delay``: decided here"""

TRIAL = 8
"""Rounds whose harvest is taken together: that of a single one is mostly scatter."""
# Of those, the part that is waited before measuring begins: the pipeline fills or empties.
_SETTLING = 0.25
# Trials' lengths with which a run begins, without delay: the beginning is where a delay costs accuracy.
_FIRST = 3
# Synchronous rounds are good enough from this share of the other's harvest on; going back takes a little more.
_ENOUGH = 0.97
_TOO_LITTLE = 0.96
# The user hears of another delay beyond these: two that are nearly alike may take turns for ever.
_CLEARLY_ENOUGH, _CLEARLY_TOO_LITTLE = 0.99, 0.93
# What trying the other delay may cost, in rounds lost per round …
_COST = 0.005
# … and at least and at most so many trials' lengths lie between two of them.
_LEAST, _MOST = 8, 512
# A harvest is the mean of about so many trials: one alone may scatter by as much as is in question.
_REMEMBERED = 4


class DelayState(msgspec.Struct, frozen=True):
    """The delay in force and what is known of both."""

    delay: int = 0
    turning: bool = False
    """the overlap ends with the next round: nobody draws beside it"""
    rounds: int = 0
    """full rounds since the change"""
    counted: int = 0
    """those of them that are in the two sums"""
    made: float = 0.0
    """samples"""
    possible: float = 0.0
    """samples that the same workers would have computed without waiting and without the rounds' cost"""
    harvests: tuple[float | None, float | None] = (None, None)
    """by delay, None: not measured yet"""
    trials: int = 0
    """that the harvest in force is the mean of, as far as it is remembered"""
    told: int | None = None
    """the delay that the user knows of"""


class DelayVerdict(msgspec.Struct, frozen=True):
    """A delay that is in force until something changes, and why."""

    delay: int
    harvests: tuple[float | None, float | None]


def after(
    choice: DelayState, tickets: Sequence[Ticket], *, trial: int, full: bool
) -> tuple[DelayState, DelayVerdict | None]:
    """The choice after a training round; ``full``: it was no short one, and nobody came or went with it."""
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
    """The roster has changed: measure anew, and try the other delay sooner."""
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
        # No overlap can harvest more than everything.
        return 0, True
    if synchronous is None or overlapped is None:
        return 1 - choice.delay, False
    enough = _ENOUGH if choice.delay == 1 else _TOO_LITTLE
    return (0 if synchronous >= enough * overlapped else 1), True


def _is_clear(harvests: tuple[float | None, float | None], delay: int) -> bool:
    """Whether a change is worth a word: between the two bounds the delays are about as good as each other."""
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
    # What was measured the last time still counts, as one trial.
    return DelayState(delay=delay, harvests=choice.harvests, trials=1, told=choice.told)
