"""Faults at random moments, of every kind that this machine lets us do; then everything must be in order."""

from __future__ import annotations

import pytest
from benchmarks.chaos.faults import NAMES
from benchmarks.chaos.schedule import Plan, measure
from benchmarks.chaos.stage import knows

pytestmark = pytest.mark.slow

SEED, KINDS = 6, frozenset(NAMES) - {"total", "launcher"}
"""draws kills, a stop, a drain, joins, a scaling, the coordinator, full disks and a cut link"""


def test_a_minute_of_chaos() -> None:
    said: list[str] = []
    outcome = measure(Plan(seconds=20.0, seed=SEED, every_s=2.0, undisturbed=0, kinds=KINDS), said.append)
    told = "\n".join([*said, *outcome.notes])
    run = outcome.trials[-1]
    assert run.act == "chaos" and run.failure is None, told
    found = run.figures
    assert found["faults"] >= 6 and found["eras"] >= 3, told
    assert found["problems"] == 0, told
    assert found["finished"] >= 2 and found["other_weights"] == 0, told
    assert found["left_processes"] == found["left_sockets"] == found["left_files"] == 0, told
    assert found["accuracy"] > 50, told
    if knows("replay"):
        assert found["replay"] <= 1e-9, told
