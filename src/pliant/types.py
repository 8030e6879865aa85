"""Types of identifiers that all layers share.

Question  Which types stand for workers, eras, rounds and positions in signatures?
Holds     Identifiers are distinct types; this module imports nothing else of Pliant.
"""

from __future__ import annotations

from typing import NewType

WorkerId = NewType("WorkerId", str)
"""One process driving one device, e.g. ``w0``. Names are given by the launcher and never reused."""

Era = NewType("Era", int)
"""A numbered period with one fixed roster; numbers only grow."""

Round = NewType("Round", int)
"""One group-wide summation; numbers only grow."""

Phase = NewType("Phase", int)
"""One call of ``batches`` or ``evaluate``; the same number on all workers."""

Span = tuple[int, int]
"""Positions ``start <= p < stop`` of an epoch's order."""
