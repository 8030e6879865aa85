"""Scripts that failed once."""

from __future__ import annotations

from pliant.testing.habits import Habits
from pliant.testing.habits.values import Event

KEPT: list[Habits] = [
    # The optimizer's first state lost its memory format on all workers but the leader.
    Habits(model="cnn", channels_last=True, float32=True, optimizer="adagrad", kernel="fused", sizes=(4, 4)),
    # Alone with a scaler, the only pass of an update did not fit into memory.
    Habits(scaler=True, batch=3, sizes=(5,), events=(Event(at=3, what="oom"),)),
]

KEPT_PROCESSES: list[Habits] = []
"""as real processes"""
