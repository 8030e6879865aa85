"""``make test`` runs every test, in lots of about the same length."""

from __future__ import annotations

from pathlib import Path

import pytest

import lots

FILES = set(Path(lots.__file__).parent.rglob("test_*.py"))


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_every_test_is_in_one_lot(number: int) -> None:
    made = lots.divided(lots.units(), number)
    assert len(made) == number and all(made)
    paths = [lots.TESTS / unit for lot in made for unit in lot]
    held = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    assert sorted(held) == sorted(FILES)


def test_lots_take_about_the_same_time_and_know_what_there_is() -> None:
    assert set(lots.SECONDS) <= set(lots.units()), "tests that are gone have seconds in tests/lots.py"
    loads = [sum(lots.SECONDS.get(unit, lots.UNKNOWN_S) for unit in lot) for lot in lots.divided(lots.units(), 3)]
    loads[0] += lots.FIRST_S
    assert max(loads) - min(loads) <= max(lots.SECONDS.values()) / 2
