"""Where more samples per round stop paying.

Question  Up to which batch does a longer round bring the training on, and not only the count of samples?
Holds     Pure functions of what the tickets said. Goodput is samples/s times what a sample is worth, with one maximum.
          The answer moves only by more than a tenth. It lies never below the reference batch, nor below what is
          computed anyway while the sum is under way or the slowest micro-batch takes: nobody waits for its sake.
Source    Pollux (Qiao et al. 2021) for goodput and efficiency; the closed form is ours, docs/design/0008-rates.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pliant.core import dealing
from pliant.core.tuning.pace import Pacing

# What the answer may be off before it moves: measured times scatter by as much.
_HYSTERESIS = 1.1


def efficiency(batch: float, reference: int, noise_scale: float) -> float:
    """What a sample in a round of ``batch`` is worth beside one in a round of the reference batch."""
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + reference) / (noise_scale + batch)


def shortest_s(pacing: Pacing, sizes: Sequence[int]) -> float:
    """How long a round lasts at least: the summation beside it, or the longest micro-batch in it."""
    cut = dealing.micro_batch_sizes(pacing, None, sizes)
    return max(pacing.sum_s, *(size / pace for size, pace in zip(cut, pacing.paces(), strict=True)))


def goodput(batch: float, pacing: Pacing, sizes: Sequence[int], reference: int, noise_scale: float) -> float:
    """Samples per second in rounds of ``batch`` samples, in samples of the reference batch.

    A round lasts as long as its samples take all workers together, and its cost; but no less than the shortest one.
    """
    round_s = max(batch / math.fsum(pacing.paces()) + pacing.cost_s, shortest_s(pacing, sizes))
    return batch / round_s * efficiency(batch, reference, noise_scale)


def best_batch(pacing: Pacing, sizes: Sequence[int], noise_scale: float) -> float:
    """The batch with the highest goodput: √(c·P·B_noise), or what the shortest round has room for."""
    together = math.fsum(pacing.paces())
    meanwhile = (shortest_s(pacing, sizes) - pacing.cost_s) * together
    return max(math.sqrt(pacing.cost_s * together * noise_scale), meanwhile)


def paying(
    before: int | None, pacing: Pacing, sizes: Sequence[int], reference: int, noise_scale: float | None
) -> int | None:
    """Up to how many samples per round pay; None: any number, or not known. ``before``: the last answer."""
    if noise_scale is None or not pacing.measured:
        return before
    if math.isinf(noise_scale):
        return None
    # Below a micro-batch of everybody they would have to be cut.
    least = max(reference, len(sizes) * max(sizes))
    best = max(least, math.ceil(best_batch(pacing, sizes, noise_scale)))
    if before is not None and before / _HYSTERESIS <= best <= before * _HYSTERESIS:
        return before
    return best
