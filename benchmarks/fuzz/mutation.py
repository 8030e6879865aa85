"""Hostile input from valid input.

Question  What may somebody send who knows the form, or who knows nothing?
Holds     Everything follows from the ``Random`` that is passed in. Half of it is well formed, so that it gets past
          the decoders; the other half is truncated, flipped, spliced and overlong bytes.
Source    ours.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

INTEGERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 255, 2**31 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 5e-324, 1e-9, 1.0, 1e18, 1.7976931348623157e308)
TEXTS = (
    "",
    "w0",
    "w2",
    "w2.2",
    "w2.99999999999999999999",
    "a0",
    "a1",
    "w" + "9" * 5000,
    "0.1.0",
    "\x00",
    "\n\r\x1b[2J",
)
TEXTS += ("w²", "w٣", "\ud7ff\U0010ffff", "x" * 10_000, "../../etc/passwd", "nan", "inf", "1e999", "-1", "train", "{}")
DEEP = 3_000
"""Nesting beyond any recursion that a reader may do."""


def choice(chance: Random, mutations: Sequence[Callable[[], Any]]) -> Any:
    """What one of them returns."""
    return mutations[chance.randrange(len(mutations))]()


def bent(chance: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """The bytes after one to three blows."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        data = _struck(chance, data, corpus)
    return data


def _struck(chance: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    if not data:
        return chance.randbytes(chance.randrange(1, 9))
    at, other = chance.randrange(len(data)), chance.choice(corpus)
    until = min(len(data), at + 1 + int(chance.expovariate(0.1)))
    match chance.randrange(10):
        case 0:
            return data[:at]
        case 1 | 2:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 3:
            return data[:at] + chance.randbytes(1) + data[at + 1 :]
        case 4:
            return data[:at] + chance.randbytes(chance.randrange(1, 17)) + data[at:]
        case 5:
            return data[:at] + data[until:]
        case 6:
            return data[:until] + data[at:until] * chance.choice((1, 1, 2, 50)) + data[until:]
        case 7:
            return data[:at] + other[chance.randrange(len(other) + 1) :]
        case 8:
            return data[at:]
        case _:
            # A length or a number at its bounds.
            edge = chance.choice((b"\xff", b"\x00", b"\x7f", b"\x80", b"\xc1", b"\xdd", b"\xdf", b"\xc6", b"9", b"-"))
            return data[:at] + edge * chance.choice((1, 2, 4, 8)) + data[until:]


def leaf(chance: Random) -> Any:
    """A value that no honest peer would send there."""
    match chance.randrange(8):
        case 0 | 1 | 2:
            return chance.choice(INTEGERS)
        case 3 | 4:
            return chance.choice(FLOATS)
        case 5 | 6:
            return chance.choice(TEXTS)
        case _:
            return chance.choice((None, True, False, b"", b"\xff" * 16, [], {}, [[]], {"a": 1}))


def alike(chance: Random, value: Any) -> Any:
    """A hostile value of the same type, which a typed decoder lets pass."""
    match value:
        case bool():
            return not value
        case int():
            return chance.choice((*INTEGERS, value + 1, value - 1, value * 2 if abs(value) < 2**62 else 0))
        case float():
            return chance.choice((*FLOATS, value * 2, -value))
        case str():
            return chance.choice((*TEXTS, value * 2, value[:-1], value + "9" * chance.choice((1, 20, 5000))))
        case bytes():
            return chance.choice((b"", value * 2, value[:-1], chance.randbytes(64), bytes(10_000)))
        case None:
            return chance.choice((0, 0.0, "", False, 1))
        case _:
            return leaf(chance)


def deformed(chance: Random, value: Any) -> Any:
    """The nested value with one place changed, dropped, repeated or swapped; the original stays as it is."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.85:
        if isinstance(value, dict):
            return _deformed_dict(chance, value)
        return _deformed_list(chance, value)
    return alike(chance, value) if chance.random() < 0.9 else leaf(chance)


def _deformed_dict(chance: Random, value: dict[Any, Any]) -> dict[Any, Any]:
    key = chance.choice(list(value))
    changed = dict(value)
    match chance.randrange(12):
        case 0:
            del changed[key]
        case 1:
            changed[leaf_key(chance)] = leaf(chance)
        case 2:
            other = chance.choice(list(value))
            changed[key], changed[other] = changed[other], changed[key]
        case _:
            changed[key] = deformed(chance, value[key])
    return changed


def _deformed_list(chance: Random, value: list[Any]) -> list[Any]:
    at = chance.randrange(len(value))
    changed = list(value)
    match chance.randrange(12):
        case 0:
            del changed[at]
        case 1:
            changed.insert(at, leaf(chance))
        case 2:
            changed[at:at] = [value[at]] * chance.choice((1, 1, 300))
        case 3:
            other = chance.randrange(len(value))
            changed[at], changed[other] = changed[other], changed[at]
        case _:
            changed[at] = deformed(chance, value[at])
    return changed


def leaf_key(chance: Random) -> str:
    """A name for a field that nobody has asked for."""
    return chance.choice(("", "kind", "type", "crc", "version", "x", "w0", "__class__"))
