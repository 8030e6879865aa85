"""How the learning rate follows the batch.

Question  By which factor is the schedule's rate multiplied in this round?
Holds     A fixed batch always has factor 1. A rising factor is ramped, because the momentum buffer still
          carries the noise of the old batch; a falling one takes effect in the same round. The ramp works for the
          target of any rule; a target lies between 1 and the batch in units of the reference batch.
Source    Dynamic mini-batch SGD (Lin et al. 2019, eq. 6) for the ramp; its length from the noise recursion
          U ← μ²U + (1−μ²)/k (PAPERS §1, ours); sqrt rule for Adam and its moments (Malladi et al. 2022);
          AdaScale's gain (Johnson et al. 2020) in the form for unequal shares (ours). docs/design/0008-rates.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from pliant.errors import UsageError

# The open batch fluctuates from round to round by about one micro-batch of every worker. A filter with a memory of ten
# rounds removes that, and still follows a change of roster within the length of the ramp.
_EMA_KEEP = 0.9

# A rise that leaves the noise of an update below this multiple of its new steady state needs no ramp.
_EXCESS = 1.05

NAMES = ("constant", "linear", "sqrt", "adascale")


class Rule(msgspec.Struct, frozen=True):
    """How the learning rate follows the batch; created by the functions of this module.

    ``str(rule)`` is its name in the journal.
    """

    name: str
    moments: bool = False
    """Adam's betas and epsilon follow the batch, too"""
    ramps: bool = True
    """a rise is spread over several rounds"""

    def __str__(self) -> str:
        text = f"{self.name}(moments=True)" if self.moments else self.name
        return text if self.ramps else f"at_once({text})"

    __repr__ = __str__


def constant() -> Rule:
    """The rate ignores the batch."""
    return Rule("constant")


def linear() -> Rule:
    """The rate is proportional to the batch. For SGD while the batch is far below the gradient noise scale."""
    return Rule("linear")


def sqrt(*, moments: bool = False) -> Rule:
    """The rate is proportional to the square root of the batch. For Adam and AdamW.

    ``moments=True`` also adjusts betas and epsilon in each update, for a batch k times the reference batch:
    1 − β → k(1 − β), ε → ε/√k.
    """
    return Rule("sqrt", moments=moments)


def adascale(*, moments: bool = False) -> Rule:
    """The rate is multiplied by AdaScale's gain, estimated from the gradient noise; the schedule advances by the gain.

    ``moments=True`` is for Adam and AdamW, which normalize the length of a step: the rate is multiplied by the square
    root of the gain, and betas and epsilon are adjusted as in ``sqrt``.
    """
    return Rule("adascale", moments=moments)


def ramped(rule: Rule | str) -> Rule:
    """``rule`` with a ramp (the default): a rise takes as many rounds as the momentum needs to forget the old batch."""
    return replace(of(rule), ramps=True)


def at_once(rule: Rule | str) -> Rule:
    """``rule`` without a ramp: every change takes effect in the same round."""
    return replace(of(rule), ramps=False)


def _every() -> Mapping[str, Rule]:
    bare = (constant(), linear(), sqrt(), sqrt(moments=True), adascale(), adascale(moments=True))
    return {str(rule): rule for each in bare for rule in (each, replace(each, ramps=False))}


LINEAR = linear()
RULES: Mapping[str, Rule] = _every()
"""Every rule, by ``str(rule)``."""


def of(value: object) -> Rule:
    """The rule that ``value`` is or names (a name alone: with a ramp). Raises ``UsageError`` for other values."""
    if isinstance(value, str) and value in NAMES:
        return Rule(value)
    if isinstance(value, Rule) and RULES.get(str(value)) == value:
        return value
    choices = ", ".join(map(repr, NAMES))
    raise UsageError(f"rates is {value!r}: choose one of {choices}, or a rule such as pliant.rates.linear()")


def gain(k: float, reference: int, noise_scale: float | None) -> float:
    """AdaScale's gain: how many updates with the reference batch one update with ``k`` times as many samples replaces.

    It is E|g|² at the reference batch over E|g|² at k times that, (S/B_ref + G²) / (S/kB_ref + G²): 1 if all gradients
    are equal, k if they are only noise, and 1 while the noise is unknown. For k < 1 it is k.
    """
    if k <= 1.0 or noise_scale is None:
        return min(k, 1.0)
    if math.isinf(noise_scale):
        return k
    return min(k, max(1.0, k * (noise_scale + reference) / (noise_scale + k * reference)))


def target(rule: Rule, k: float, *, reference: int = 1, noise_scale: float | None = None) -> float:
    """The factor that ``rule`` asks for when a batch is ``k`` times the reference batch."""
    match rule.name:
        case "constant":
            return 1.0
        case "linear":
            return k
        case "sqrt":
            return math.sqrt(k)
        case "adascale":
            worth = gain(k, reference, noise_scale)
            return math.sqrt(worth) if rule.moments else worth
        case name:
            raise ValueError(f"{name!r} is no rule")


def moments(betas: tuple[float, float], epsilon: float, factor: float) -> tuple[tuple[float, float], float]:
    """Adam's betas and epsilon in an update whose rate is ``factor`` = √k times the schedule's rate.

    If the batch is larger than the whole memory of a moment, it replaces the moment: β is 0.
    """
    k = factor * factor
    first, second = (max(0.0, 1.0 - k * (1.0 - beta)) for beta in betas)
    return (first, second), epsilon / factor


class Rate(msgspec.Struct, frozen=True):
    """The present factor, the filtered batch (None before the first round), and the step of the ramp."""

    factor: float = 1.0
    batch: float | None = None
    step: float = 0.0
    noise: float = 1.0
    """U: variance that the momentum buffer carries, 1 in the steady state of the reference batch"""


def ramp_rounds(target: float, factor: float, momentum: float) -> int:
    """Rounds a rise from ``factor`` to ``target`` takes, so that the noise stays within 5 % of its new steady state."""
    return math.ceil((1.2 + 0.45 * math.log2(max(1.0, target / factor))) / (1.0 - momentum))


def follow(
    rate: Rate, *, batch: int, reference: int, rule: Rule, momentum: float, noise_scale: float | None = None
) -> Rate:
    """The rate after a full round of ``batch`` samples. Short rounds at an epoch's end never come here."""
    filtered = float(batch) if rate.batch is None else _EMA_KEEP * rate.batch + (1.0 - _EMA_KEEP) * batch
    k = filtered / reference
    wanted, squared = target(rule, k, reference=reference, noise_scale=noise_scale), momentum * momentum
    noise = squared * rate.noise + (1.0 - squared) / k
    # Judged by the noise still in the buffer: many small rises in a row add as much noise as a large one. AdaScale's
    # target also rises with a new noise estimate at the same batch: such a rise is ramped, too, unless it is small.
    harmless = k * noise <= _EXCESS and (rule.name != "adascale" or wanted <= _EXCESS * rate.factor)
    if not rule.ramps or wanted <= rate.factor or harmless:
        return Rate(wanted, filtered, 0.0, noise)
    # A ramp keeps its first slope: dividing the remainder again in each round would never reach the target.
    step = max(rate.step, (wanted - rate.factor) / ramp_rounds(wanted, rate.factor, momentum))
    # A target that moves while the ramp runs can make it too steep; the noise itself is the bound.
    ceiling = wanted * min(1.0, math.sqrt(_EXCESS / (k * noise)))
    return Rate(min(rate.factor + step, max(rate.factor, ceiling)), filtered, step, noise)


def progress(rule: Rule, rate: Rate, *, batch: int, reference: int, short: bool) -> float:
    """By how many samples a round of an open batch advances the schedule.

    AdaScale counts an update by its gain, so that the schedule sees the steps that the reference batch would have made;
    a round cut short by the epoch's end counts at most its samples. All other rules count samples.
    """
    if rule.name != "adascale":
        return float(batch)
    worth = (rate.factor**2 if rule.moments else rate.factor) * reference
    return min(worth, float(batch)) if short else worth
