"""Up to which batch larger rounds raise goodput.

Question  Up to which batch does a larger round speed up the training, and not only the count of samples?
Holds     Pure functions of what the tickets measured. Goodput is samples/s times statistical efficiency; it has one
          maximum. The answer changes only by more than a tenth. It is never below the reference batch, nor below the
          samples that are computed anyway during the summation or the slowest micro-batch: no worker has to wait.
Source    Pollux (Qiao et al. 2021) for goodput and efficiency; the closed form is ours, docs/design/0008-rates.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pliant.core import dealing
from pliant.core.tuning.pace import Pacing

# Factor by which the best batch must move before the answer changes: measured times scatter this much.
_HYSTERESIS = 1.1


def efficiency(batch: float, reference: int, noise_scale: float) -> float:
    """Statistical efficiency of a sample in a round of ``batch``, relative to one in a round of the reference batch."""
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + reference) / (noise_scale + batch)


def shortest_s(pacing: Pacing, sizes: Sequence[int]) -> float:
    """How long a round lasts at least: as long as the summation of the last one, or as the longest micro-batch."""
    cut = dealing.micro_batch_sizes(pacing, None, sizes)
    return max(pacing.sum_s, *(size / pace for size, pace in zip(cut, pacing.paces(), strict=True)))


def goodput(batch: float, pacing: Pacing, sizes: Sequence[int], reference: int, noise_scale: float) -> float:
    """Samples per second in rounds of ``batch`` samples, weighted by their statistical efficiency.

    A round lasts as long as all workers together take for its samples, plus its cost, but at least ``shortest_s``.
    """
    round_s = max(batch / math.fsum(pacing.paces()) + pacing.cost_s, shortest_s(pacing, sizes))
    return batch / round_s * efficiency(batch, reference, noise_scale)


def best_batch(pacing: Pacing, sizes: Sequence[int], noise_scale: float) -> float:
    """The batch with the highest goodput: √(c·P·B_noise), or what fits into the shortest round if that is more."""
    together = math.fsum(pacing.paces())
    meanwhile = (shortest_s(pacing, sizes) - pacing.cost_s) * together
    return max(math.sqrt(pacing.cost_s * together * noise_scale), meanwhile)


def paying(
    before: int | None, pacing: Pacing, sizes: Sequence[int], reference: int, noise_scale: float | None
) -> int | None:
    """The largest round, in samples, that still raises goodput; None: any, or not known.

    ``before`` is the last answer.
    """
    if noise_scale is None or not pacing.measured:
        return before
    if math.isinf(noise_scale):
        return None
    # With less than a full micro-batch for each worker, micro-batches would have to be cut.
    least = max(reference, len(sizes) * max(sizes))
    best = max(least, math.ceil(best_batch(pacing, sizes, noise_scale)))
    if before is not None and before / _HYSTERESIS <= best <= before * _HYSTERESIS:
        return before
    return best
