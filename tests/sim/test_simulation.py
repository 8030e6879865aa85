"""The protocol under seeded faults: the real coordinator and workers in virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from pliant.testing.__main__ import main, scene_of, simulate, simulate_in_processes, simulated
from pliant.testing.scenes import NAMES, drawn
from sim.bugs import BUGS, broken

SEEDS = Path(__file__).with_name("seeds.txt")
MOST = 2000
"""seeds within which every deliberate bug must be found"""

FIRST = {
    "reuse_attempt": 6,
    "settle_after_stopped": 36,
    "early_newcomer": 3,
    "early_lines": 25,
    "early_eviction": 12,
    "leaver_draws_on": 60,
    "no_catching_up": 170,
    "keep_every_round": 3,
    "update_while_copied": 8,
    "half_settled": 36,
    "forgotten_pledge": 141,
    "nobody_left_out": 5,
    "tried_at_once": 18,
    "forgets_weights": 39,
    "link_knows_better": 248,
    "leads_on": 49,
}
"""the first seed under which each shows; 0 where none is named. One that does not show it any more costs a search."""


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
def test_some_hundred_seeds_hold_on_all_cores() -> None:
    """`make soak` runs thousands."""
    summary = simulate_in_processes(1000, 400)
    assert summary.failures == []
    assert summary.seeds == 400


@pytest.mark.slow
@pytest.mark.parametrize(("scene", "seed"), kept())
def test_seeds_that_once_failed_hold(scene: str, seed: int) -> None:
    assert simulated(scene, seed).error is None


@pytest.mark.parametrize("seed", [3, 17, 24])
def test_spares_come_to_the_end_of_a_script_whose_last_call_is_a_loop(seed: int) -> None:
    assert not drawn("spares", seed).tested
    assert simulated("spares", seed).error is None


def test_who_was_away_in_an_evaluate_waits_until_those_who_compute_now_open_one() -> None:
    """It was the only one to compute, and spares have taken its place."""
    assert simulated("spares", 70163).error is None


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


def found(bug: str, seeds: Iterable[int]) -> int | None:
    """The first of the seeds under which the bug shows."""
    scene, _ = BUGS[bug]
    for seed in seeds:
        with broken(bug):
            if simulated(scene, seed).error is not None:
                return seed
    return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", BUGS)
def test_a_deliberate_bug_is_found(bug: str) -> None:
    """Where it was found first it is looked for first."""
    seed = found(bug, (FIRST.get(bug, 0), *range(MOST)))
    assert seed is not None, f"{bug} was not found within {MOST} seeds"
    assert simulated(BUGS[bug][0], seed).error is None, "the seed fails without the bug, too"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", BUGS)
def test_a_deliberate_bug_is_found_anew(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From the first seed on: how well does the simulator search?"""
    seed = found(bug, range(MOST))
    assert seed is not None, f"{bug} was not found within {MOST} seeds"
    with capsys.disabled():
        print(f"\n{bug}: found after {seed + 1} seeds of {BUGS[bug][0]}")


def test_the_command_prints_how_to_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--start", "3", "--seeds", "1", "--scene", "kills", "--trace"]) == 0
    assert "all well" in capsys.readouterr().out
    assert scene_of(3, "kills") == "kills"
