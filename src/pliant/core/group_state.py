"""The replicated state: what every worker knows about the group.

Question  Which state does every worker hold, so that all of them reach the same decisions without asking each other?
Holds     Frozen values, equal on all workers after the same tickets. This module only defines them: an exchange
          (``rounds``) or a change of the roster (``regrouping``) computes the next ones.
Source    ours; docs/protocol.md ("One round, step by step").
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from pliant.core import drift
from pliant.core.finished_calls import NONE, FinishedCalls, FinishedPhase
from pliant.core.ledger import Ledger
from pliant.core.tickets import Kind, Sums
from pliant.core.tuning import delay as overlap
from pliant.core.tuning import goodput, noise, pace, rates
from pliant.core.tuning.pace import Pacing
from pliant.types import WorkerId

PERMUTATION, FEISTEL = "permutation", "feistel"
"""how the order of an epoch's samples comes from the seed (``worker.script.sample_order``)"""


class Policy(msgspec.Struct, frozen=True):
    """The settings that decisions depend on; the same on all workers."""

    batch: int
    floating: bool = False
    at_most: int | None = None
    delay: int = 1
    """1, 0 or ``overlap.AUTO``"""
    trial: int = overlap.TRIAL
    """with ``overlap.AUTO``: rounds for which a delay is tried"""
    rule: rates.Rule = rates.LINEAR
    momentum: float = 0.0
    watched: int = drift.EVERY
    """rounds between two digests of the weights; 0: no digests"""
    order: str = PERMUTATION
    """how the samples of an epoch are ordered; the default is what journals and checkpoints without this field mean"""


class Standing(enum.IntEnum):
    """Whether a member of the roster computes now."""

    FOLLOWING = 0
    """does not hold the whole state yet: weight 0, no deals"""
    ACTIVE = 1
    LEAVING = 2
    """draws no more samples; the next planned era is without it"""


class OpenPhase(msgspec.Struct, frozen=True):
    """A call of ``batches`` or ``evaluate`` that has not ended."""

    number: int
    kind: Kind
    epoch: int
    length: int
    sizes: tuple[int, ...]
    ahead: tuple[int, ...]
    ledger: Ledger
    took_part: tuple[bool, ...]
    """per member: it has handed in a sample in this phase"""
    present: tuple[bool, ...]
    """per member: its script has made this call; the others take part without samples"""
    seen: bool = False
    """every working member was inside ``step`` at the last round, so scripts may open an ``evaluate`` before the round
    in flight is settled"""
    resumed: bool = False
    """an unplanned era has begun, or the delay has changed, since the last round: some workers may settle the next one
    outside of ``step``"""
    inner: bool = False
    """see ``FinishedPhase``"""
    nested: tuple[FinishedPhase, ...] = ()
    """finished phases inside this one, in their order"""
    limits: tuple[int, ...] = ()
    """bounded open batch: samples that each member may hand in with the contribution it began before the last round was
    settled (``allowance.kept_limits``); empty: the limits of a contribution begun now apply"""
    total: float = 0.0
    count: float = 0.0
    sums: Sums = ()
    """if ``evaluate`` measures several means: the sum and the count of each so far"""


class GroupState(msgspec.Struct, frozen=True):
    """The replicated state: equal on all workers after the same tickets."""

    policy: Policy
    era: int
    roster: tuple[WorkerId, ...]
    standings: tuple[Standing, ...]
    exchange: int = 0
    """exchanges settled so far, of any kind"""
    round: int = 0
    """the number of the last settled round; void numbers are skipped"""
    phases: int = 0
    """phases opened so far"""
    samples: int = 0
    """samples of settled training rounds"""
    samples_limit: int | None = None
    updates: int = 0
    """updates of the weights so far: rounds that were neither skipped nor void and had a weight above 0"""
    updates_limit: int | None = None
    """training ends after this many updates"""
    rate: rates.Rate = msgspec.field(default_factory=rates.Rate)
    choice: overlap.DelayState = msgspec.field(default_factory=overlap.DelayState)
    """with ``delay="auto"``: the delay in force, and what has been measured"""
    scheduled: float = 0.0
    """samples by which the schedule has advanced: equal to ``samples``, except under AdaScale, which counts each round
    by its gain"""
    noise: noise.Noise = msgspec.field(default_factory=noise.Noise)
    paying: int | None = None
    """open batch without a bound by the user: the largest round that still raises goodput; None: not known, or any"""
    skipped: int = 0
    skipped_in_a_row: int = 0
    clip_norm: float | None = None
    """the bound on the gradient's norm that the scripts have set since ``join``; 0: no clipping; None: the bound given
    to ``join`` holds"""
    clip_disputed: int = 0
    """rounds in a row whose tickets asked for different bounds"""
    training: Pacing = msgspec.field(default_factory=lambda: pace.unmeasured(1))
    evaluating: Pacing = msgspec.field(default_factory=lambda: pace.unmeasured(1))
    open: tuple[OpenPhase, ...] = ()
    """innermost last: an ``evaluate`` may be called inside a ``batches`` loop"""
    past: FinishedCalls = NONE
    """finished top-level calls, in their order"""
    given_up: tuple[OpenPhase, ...] = ()
    """phases that the last unplanned era ended, because no remaining member was inside them"""
    offences: tuple[tuple[WorkerId, int], ...] = ()
    """members whose weights have differed from the others', and how often"""
    trained: bytes = b""
    """the parameters in the layout of the next round's gradients (``core.trained_set``); empty: not agreed yet"""
    unlike: int = 0
    """rounds in a row in which the workers trained different parameters"""
    over: bool = False
    """all scripts have reached their end"""

    @property
    def phase(self) -> OpenPhase:
        return self.open[-1]

    @property
    def overlap(self) -> bool:
        """Whether the next contribution is computed while the last one is summed."""
        return self.overlaps(self.phase.kind) if self.open else self.overlaps(Kind.TRAIN)

    @property
    def delay(self) -> int:
        """The delay in force in training phases, for a roster of more than one worker."""
        return self.choice.delay if self.policy.delay == overlap.AUTO else self.policy.delay

    def overlaps(self, kind: Kind) -> bool:
        """Whether a phase of this kind overlaps computing and summing."""
        return len(self.roster) > 1 and (self.delay == 1 or kind is Kind.EVALUATE)

    @property
    def at_most(self) -> int | None:
        """How many samples a round of an open batch may have; None: any number.

        Without a bound by the user it is twice the size that still pays. Rounds aim at that size
        (``allowance.allowance``); the factor of two keeps a fast worker from waiting for a slow one.
        """
        if self.policy.at_most is not None or self.paying is None:
            return self.policy.at_most
        return 2 * self.paying

    @property
    def efficiency(self) -> float | None:
        """Statistical efficiency of a sample relative to one in a round of the reference batch; None while unknown."""
        scale = self.noise.scale
        if scale is None:
            return None
        return goodput.efficiency(self.rate.batch or self.policy.batch, self.policy.batch, scale)


def founded(policy: Policy, era: int, roster: Sequence[WorkerId]) -> GroupState:
    """The state at the first era's start."""
    blank = pace.unmeasured(len(roster))
    standings = (Standing.ACTIVE,) * len(roster)
    return GroupState(policy, era, tuple(roster), standings, training=blank, evaluating=blank)
