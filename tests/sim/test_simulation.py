"""The protocol under seeded faults: the real coordinator and workers in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pliant.testing.__main__ import main, scene_of, simulate, simulate_in_processes, simulated
from pliant.testing.scenes import NAMES
from sim.bugs import BUGS, broken

SEEDS = Path(__file__).with_name("seeds.txt")
MOST = 2000
"""seeds within which every deliberate bug must be found"""


def kept() -> list[tuple[str, int]]:
    """Every seed that ever failed: scene and number."""
    lines = [line.partition("#")[0].split() for line in SEEDS.read_text().splitlines()]
    return [(line[0], int(line[1])) for line in lines if line]


def test_a_hundred_seeds_hold() -> None:
    summary = simulate(range(100))
    assert summary.failures == []
    assert summary.completed > 60


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_seeds_hold() -> None:
    summary = simulate_in_processes(1000, 2000)
    assert summary.failures == []
    assert summary.seeds == 2000


@pytest.mark.slow
@pytest.mark.parametrize(("scene", "seed"), kept())
def test_seeds_that_once_failed_hold(scene: str, seed: int) -> None:
    assert simulated(scene, seed).error is None


@pytest.mark.parametrize("scene", NAMES)
def test_a_seed_has_one_history(scene: str) -> None:
    first, second = simulated(scene, 3), simulated(scene, 3)
    assert (first.checksum, first.events, first.virtual_s) == (second.checksum, second.events, second.virtual_s)
    assert simulated(scene, 4).checksum != first.checksum


def test_a_trace_changes_nothing() -> None:
    traced, plain = simulated("everything", 5, trace=True), simulated("everything", 5)
    assert traced.checksum == plain.checksum
    assert traced.log
    assert not plain.log


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", BUGS)
def test_a_deliberate_bug_is_found(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    scene, _ = BUGS[bug]
    for seed in range(MOST):
        with broken(bug):
            error = simulated(scene, seed).error
        if error is not None:
            with capsys.disabled():
                print(f"\n{bug}: found after {seed + 1} seeds of {scene}: {error[:100]}")
            return
    pytest.fail(f"{bug} was not found within {MOST} seeds")


def test_the_command_prints_how_to_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--start", "3", "--seeds", "1", "--scene", "kills", "--trace"]) == 0
    assert "all well" in capsys.readouterr().out
    assert scene_of(3, "kills") == "kills"
