"""Scripts that failed once."""

from __future__ import annotations

from pliant.testing.habits import Habits

KEPT: list[Habits] = [
    # The optimizer's first state lost its memory format on all workers but the leader.
    Habits(model="cnn", channels_last=True, float32=True, optimizer="adagrad", kernel="fused", sizes=(4, 4)),
]

KEPT_PROCESSES: list[Habits] = []
"""as real processes"""
