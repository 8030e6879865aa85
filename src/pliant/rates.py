"""The rules by which the learning rate follows the batch, for ``join(rates=…)``.

Question  Which rules are there, and how are they combined?
Holds     A rule is a small frozen value, the same on all workers; its text is written into the journal.
Source    docs/guide/rates.md says which rule to use when; docs/design/0008-rates.md gives the reasons.
"""

from pliant.core.tuning.rates import Rule, adascale, at_once, constant, linear, ramped, sqrt

__all__ = ["Rule", "adascale", "at_once", "constant", "linear", "ramped", "sqrt"]
