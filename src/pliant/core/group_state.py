"""The replicated state: what every worker knows of the group.

Question  What do all workers hold alike, so that each can decide for itself what all decide?
Holds     Frozen values, equal on all workers after the same tickets. Nothing here changes one: an exchange does
          (``rounds``), and a change of the roster (``regrouping``).
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
    """with the latter: rounds for which a delay is tried"""
    rule: rates.Rule = rates.LINEAR
    momentum: float = 0.0
    watched: int = drift.EVERY
    """rounds from one digest of the weights to the next; 0: none is taken"""
    order: str = PERMUTATION
    """how the samples of an epoch are ordered: what journals and checkpoints mean that do not say"""


class Standing(enum.IntEnum):
    """What a member of the roster can do now."""

    FOLLOWING = 0
    """does not hold the whole state yet: weight 0, no deals"""
    ACTIVE = 1
    LEAVING = 2
    """draws no more; gone with the next planned era"""


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
    """who has handed in a sample in this phase"""
    present: tuple[bool, ...]
    """whose script has made this call; the others go along without samples"""
    seen: bool = False
    """the last round was seen: an ``evaluate`` may be opened before the round in flight is settled"""
    resumed: bool = False
    """an unplanned era has begun since the last round: some may settle the next one outside of ``step``"""
    inner: bool = False
    """see ``FinishedPhase``"""
    nested: tuple[FinishedPhase, ...] = ()
    """finished phases inside this one, in their order"""
    limits: tuple[int, ...] = ()
    """bounded open batch: what each member may hand in to the contribution that was begun before the last round was
    settled (``drawing.kept_limits``); empty: what it may hand in to one that is begun now"""
    total: float = 0.0
    count: float = 0.0
    sums: Sums = ()
    """where several means are measured: the sum and the count of each so far"""


class GroupState(msgspec.Struct, frozen=True):
    """The replicated state: equal on all workers after the same tickets."""

    policy: Policy
    era: int
    roster: tuple[WorkerId, ...]
    standings: tuple[Standing, ...]
    exchange: int = 0
    """exchanges settled so far, of any kind"""
    round: int = 0
    """the number of the last settled round; void numbers are passed over"""
    phases: int = 0
    """phases opened so far"""
    samples: int = 0
    """samples of settled training rounds"""
    samples_limit: int | None = None
    updates: int = 0
    """updates of the weights so far: rounds that were neither skipped nor void, and had any weight"""
    updates_limit: int | None = None
    """training ends with this many"""
    rate: rates.Rate = msgspec.field(default_factory=rates.Rate)
    choice: overlap.DelayState = msgspec.field(default_factory=overlap.DelayState)
    """which delay is in force, where that is decided from round to round"""
    scheduled: float = 0.0
    """samples by which the schedule has moved on: those of ``samples``, under AdaScale what they were worth"""
    noise: noise.Noise = msgspec.field(default_factory=noise.Noise)
    paying: int | None = None
    """up to how many samples a round of an open batch pays, where the user sets no bound; None: any, or not known"""
    skipped: int = 0
    skipped_in_a_row: int = 0
    clip_norm: float | None = None
    """the bound on the gradient's norm that the scripts have set since ``join``; 0: none; None: as agreed there"""
    clip_disputed: int = 0
    """rounds in a row whose tickets asked for different ones"""
    training: Pacing = msgspec.field(default_factory=lambda: pace.unmeasured(1))
    evaluating: Pacing = msgspec.field(default_factory=lambda: pace.unmeasured(1))
    open: tuple[OpenPhase, ...] = ()
    """innermost last: an ``evaluate`` may be called inside a ``batches`` loop"""
    past: FinishedCalls = NONE
    """finished top-level calls, in their order"""
    given_up: tuple[OpenPhase, ...] = ()
    """phases that the last unplanned era has ended: nobody was left in them, and nobody else would have come"""
    offences: tuple[tuple[WorkerId, int], ...] = ()
    """members whose weights have differed from the others', and how often"""
    trained: bytes = b""
    """the parameters that the next round's gradients are laid out for (``core.trained_set``); empty: none agreed on
    yet"""
    unlike: int = 0
    """rounds in a row in which the workers did not train the same ones"""
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
        """What is in force in a training phase of a group."""
        return self.choice.delay if self.policy.delay == overlap.AUTO else self.policy.delay

    def overlaps(self, kind: Kind) -> bool:
        """The same for a phase of another kind."""
        return len(self.roster) > 1 and (self.delay == 1 or kind is Kind.EVALUATE)

    @property
    def at_most(self) -> int | None:
        """How many samples a round of an open batch may have.

        Where more than so many stop paying, rounds end by then (``drawing.allowance``); up to twice as many a round
        may take in, lest a fast worker waits for a slow one.
        """
        if self.policy.at_most is not None or self.paying is None:
            return self.policy.at_most
        return 2 * self.paying

    @property
    def efficiency(self) -> float | None:
        """What a sample is worth beside one in a round of the reference batch; None while unknown."""
        scale = self.noise.scale
        if scale is None:
            return None
        return goodput.efficiency(self.rate.batch or self.policy.batch, self.policy.batch, scale)


def founded(policy: Policy, era: int, roster: Sequence[WorkerId]) -> GroupState:
    """The state at the first era's start."""
    blank = pace.unmeasured(len(roster))
    standings = (Standing.ACTIVE,) * len(roster)
    return GroupState(policy, era, tuple(roster), standings, training=blank, evaluating=blank)
