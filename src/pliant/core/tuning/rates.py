"""How the learning rate follows the batch.

Question  By which factor is the schedule's rate multiplied in this round?
Holds     A fixed batch always has factor 1. A rising factor is ramped, because the momentum buffer still
          carries the noise of the old batch; a falling one takes effect at once. The ramp works on whatever target
          the rule gives, and that lies between 1 and the batch in reference batches.
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

# The open batch fluctuates from round to round by about one micro-batch of every worker; a memory of ten
# rounds takes that out and still follows a change of roster within the ramp's own length.
_EMA_KEEP = 0.9

# A rise that leaves the noise of an update below this multiple of its new steady state needs no ramp.
_EXCESS = 1.05

NAMES = ("constant", "linear", "sqrt", "adascale")


class Rule(msgspec.Struct, frozen=True):
    """How the rate follows the batch; made by the functions of this module. Its text is its name in the journal."""

    name: str
    moments: bool = False
    """Adam's betas and epsilon follow, too"""
    ramps: bool = True
    """a rise is spread over rounds"""

    def __str__(self) -> str:
        text = f"{self.name}(moments=True)" if self.moments else self.name
        return text if self.ramps else f"at_once({text})"

    __repr__ = __str__


def constant() -> Rule:
    """The rate ignores the batch."""
    return Rule("constant")


def linear() -> Rule:
    """The rate grows with the batch: SGD, while the batch is far below the noise scale."""
    return Rule("linear")


def sqrt(*, moments: bool = False) -> Rule:
    """The rate grows with the root of the batch: Adam and AdamW.

    ``moments``: in each update their betas and epsilon follow as well: 1 − β → k(1 − β), ε → ε/√k.
    """
    return Rule("sqrt", moments=moments)


def adascale(*, moments: bool = False) -> Rule:
    """The rate grows by as much as the gradient's noise allows, and the schedule by what that was worth.

    ``moments``: for Adam and AdamW, whose steps have a length of their own: the rate grows with the root of the gain,
    betas and epsilon follow as in ``sqrt``.
    """
    return Rule("adascale", moments=moments)


def ramped(rule: Rule | str) -> Rule:
    """A rise is spread over as many rounds as the momentum needs to forget the old batch: the default."""
    return replace(of(rule), ramps=True)


def at_once(rule: Rule | str) -> Rule:
    """No ramp: every change takes effect in the round that brings it."""
    return replace(of(rule), ramps=False)


def _every() -> Mapping[str, Rule]:
    bare = (constant(), linear(), sqrt(), sqrt(moments=True), adascale(), adascale(moments=True))
    return {str(rule): rule for each in bare for rule in (each, replace(each, ramps=False))}


LINEAR = linear()
RULES: Mapping[str, Rule] = _every()
"""Every rule there is, by its text."""


def of(value: object) -> Rule:
    """The rule that ``value`` is, or names; a bare name is ramped."""
    if isinstance(value, str) and value in NAMES:
        return Rule(value)
    if isinstance(value, Rule) and RULES.get(str(value)) == value:
        return value
    choices = ", ".join(map(repr, NAMES))
    raise UsageError(f"rates is {value!r}: choose one of {choices}, or a rule such as pliant.rates.linear()")


def gain(k: float, reference: int, noise_scale: float | None) -> float:
    """AdaScale's gain: how many updates of the reference batch one update on ``k`` times its samples is worth.

    E|g|² at the reference batch over E|g|² at k of them, (S/B_ref + G²) / (S/kB_ref + G²): 1 where all gradients are
    equal, k where they are noise alone, and 1 while nothing is known. Below the reference batch the rate falls with it.
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
    """Adam's betas and epsilon in an update whose rate is ``factor`` times the schedule's, as √k: k is its square.

    A batch that holds more than a moment's whole memory replaces it: β is 0 then.
    """
    k = factor * factor
    first, second = (max(0.0, 1.0 - k * (1.0 - beta)) for beta in betas)
    return (first, second), epsilon / factor


class Rate(msgspec.Struct, frozen=True):
    """The factor now, the filtered batch behind it (None before the first round), the ramp's step."""

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
    # Judged by what the buffer still carries: many small rises in a row are as noisy as a large one. AdaScale's target
    # also rises with what it learns, while the batch stands still: more than a little of that takes its time, too.
    harmless = k * noise <= _EXCESS and (rule.name != "adascale" or wanted <= _EXCESS * rate.factor)
    if not rule.ramps or wanted <= rate.factor or harmless:
        return Rate(wanted, filtered, 0.0, noise)
    # A ramp keeps its first slope: dividing what is left anew each round would never arrive.
    step = max(rate.step, (wanted - rate.factor) / ramp_rounds(wanted, rate.factor, momentum))
    # A target that moves while the ramp runs can make it too steep; the noise itself is the bound.
    ceiling = wanted * min(1.0, math.sqrt(_EXCESS / (k * noise)))
    return Rate(min(rate.factor + step, max(rate.factor, ceiling)), filtered, step, noise)


def progress(rule: Rule, rate: Rate, *, batch: int, reference: int, short: bool) -> float:
    """By how many samples a round of an open batch moves the schedule on.

    AdaScale counts updates by their gain, so that the schedule sees the steps that the reference batch would have made;
    a round cut short by the epoch's end is worth no more than its samples. All other rules count samples.
    """
    if rule.name != "adascale":
        return float(batch)
    worth = (rate.factor**2 if rule.moments else rate.factor) * reference
    return min(worth, float(batch)) if short else worth
