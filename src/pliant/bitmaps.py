"""Sets of numbers as bytes.

Question  How is a set of parameters encoded so that it can be sent, compared and stored without conversion?
Holds     Bit i of the bytes, lowest first, stands for number i. Sets over the same numbers have the same length, and
          are equal if and only if their bytes are.
"""

from __future__ import annotations

from collections.abc import Iterable


def bitmap(numbers: Iterable[int], count: int) -> bytes:
    """The set of these numbers, which are below ``count``."""
    return sum(1 << number for number in set(numbers)).to_bytes((count + 7) // 8, "little")


def members(of: bytes) -> list[int]:
    """The numbers of a set, in their order."""
    bits = int.from_bytes(of, "little")
    return [number for number in range(bits.bit_length()) if bits >> number & 1]


def common(one: bytes, other: bytes) -> bytes:
    """The intersection of two sets."""
    if one == other:
        return one
    both = int.from_bytes(one, "little") & int.from_bytes(other, "little")
    return both.to_bytes(max(len(one), len(other)), "little")
