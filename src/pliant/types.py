"""Types that all layers share: of identifiers, and of values that users bring.

Question  Which types stand for workers, eras, rounds and positions in signatures? How is a value of any type told to be
          a dict, a mapping, a list or a tuple?
Holds     Identifiers are distinct types; this module imports nothing else of Pliant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NewType, TypeGuard

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


# What these say lets a type checker go on: after ``isinstance(value, dict)`` it knows nothing of the keys and values.


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Whether it is a dict, of whatever."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether it is a mapping, of whatever."""
    return isinstance(value, Mapping)


def is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Whether it is a tuple, of whatever."""
    return isinstance(value, tuple)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a list, of whatever."""
    return isinstance(value, list)


def is_list_or_tuple(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether it is one of these, of whatever."""
    return isinstance(value, list | tuple)
