"""The library's rate decisions, as the lab uses them.

Question  By which factor is the schedule's rate multiplied in a round of this batch?
Holds     Every call of the library's rate code from the lab is in this module. A rule that the lab cannot follow is
          named here and skipped by the experiments.
Source    pliant.core.rates.
"""

from pliant.core import rates

FIXED = "fixed"
"""not a rule but the truth to compare with: the reference batch throughout"""

NAMES = {
    FIXED: "fixed reference batch",
    "none": "no scaling",
    "linear_at_once": "linear, at once",
    "linear": "linear, ramped",
    "adascale": "AdaScale, ramped",
    "sqrt_at_once": "√k, at once",
    "sqrt": "√k, ramped",
}
_RULES = {"none": rates.constant(), FIXED: rates.constant(), "linear": rates.linear(), "sqrt": rates.sqrt()}
AT_ONCE = "_at_once"


def available(name: str) -> bool:
    """Whether the lab can follow it: AdaScale has a gain of its own for every seed, and seeds are stacked here."""
    return name.removesuffix(AT_ONCE) in _RULES


class Follower:
    """The factor of one run, round after round."""

    def __init__(self, name: str, *, reference: int, momentum: float) -> None:
        self._rule = _RULES[name.removesuffix(AT_ONCE)]
        self._at_once = name.endswith(AT_ONCE)
        self._reference, self._momentum = reference, momentum
        self._rate = rates.Rate()
        self.factor = 1.0
        """of the last full round: what is known while the next one is computed"""

    def follow(self, batch: int) -> float:
        """The factor for the update of a full round of ``batch`` samples."""
        if self._at_once:
            # Not ``rates.at_once``, which follows the filtered batch: what is compared with has no filter either.
            self.factor = rates.target(self._rule, batch / self._reference)
        else:
            self._rate = rates.follow(
                self._rate, batch=batch, reference=self._reference, rule=self._rule, momentum=self._momentum
            )
            self.factor = self._rate.factor
        return self.factor
