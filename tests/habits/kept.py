"""Scripts that failed once."""

from __future__ import annotations

from pliant.testing.habits import Habits

KEPT: list[Habits] = []

KEPT_PROCESSES: list[Habits] = []
"""as real processes"""
