"""A training run of the convergence benchmark, from its processes to its curve."""

from __future__ import annotations

import pytest
from benchmarks.convergence import workload
from benchmarks.convergence.course import Course
from benchmarks.convergence.running import train
from benchmarks.convergence.systems.names import SYSTEMS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(workload.missing() is not None, reason=str(workload.missing())),
]


def test_pliant_and_ddp_learn_the_same_from_the_same_samples() -> None:
    course = Course("static", seed=0, images=512, epochs=1, every=256)
    ours, theirs = (train(SYSTEMS[name], course) for name in ("pliant_delay_0", "oracle"))
    assert ours.failure is None and theirs.failure is None
    assert ours.samples == theirs.samples == (256, 512)
    # Sums of unequal shares differ in their last bits only.
    assert ours.accuracy == pytest.approx(theirs.accuracy, abs=0.01)
    assert all(earlier < later for earlier, later in zip(ours.seconds, ours.seconds[1:], strict=False))
