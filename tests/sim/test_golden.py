"""What happens under a seed is what happened when it was recorded; see ``golden``."""

from __future__ import annotations

import pytest

from pliant.testing.scenes import NAMES
from sim.golden import SEEDS, checksum, recorded


def test_every_scene_is_recorded() -> None:
    assert list(recorded()) == list(NAMES)
    assert {len(checksums) for checksums in recorded().values()} == {SEEDS}


@pytest.mark.parametrize("scene", NAMES)
def test_two_seeds_have_the_recorded_history(scene: str) -> None:
    assert [checksum(scene, seed) for seed in range(2)] == recorded()[scene][:2]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", NAMES)
def test_all_seeds_have_the_recorded_history(scene: str) -> None:
    assert [checksum(scene, seed) for seed in range(SEEDS)] == recorded()[scene]
