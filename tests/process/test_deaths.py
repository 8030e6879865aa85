"""Workers that die, hang, fall asleep or are asked to go, in every phase of the loop, as real processes.

Importing torch costs more than all the rest, so a run goes through several faults one after another, on the leader
first; who is started again comes back while the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from running import Launcher, shared_out
from scenarios import Scenario, fault, passed_through, rosters

pytestmark = pytest.mark.slow


def in_turn(*pairs: tuple[str, str], **settings: Any) -> Scenario:
    """w0 (the leader) does the first thing, w1 (who leads then) the second, and so on; the last one finishes."""
    faults = []
    after: Sequence[str] = ["under-way", *(f"drew-w{number}" for number in range(len(pairs) + 1))]
    for number, (at, does) in enumerate(pairs):
        faults.append(fault(f"w{number}", at, does, *after))
        after = [f"without-w{number}"]
    return Scenario(faults, until=tuple(after), workers=len(pairs) + 1, **settings)


SCENARIOS = {
    "fixed, overlap": in_turn(("forward", "kill"), ("backward", "stop"), ("waiting", "term")),
    "fixed, synchronous, AdamW": in_turn(
        ("waiting", "kill"), ("forward", "hang"), ("backward", "term"), settings={"delay": 0}, optimizer="adamw"
    ),
    "floating, nested evaluate": in_turn(
        ("nested", "kill"), ("nested", "stop"), ("nested", "term"), settings={"floating": 24}, nested=True
    ),
    "floating, synchronous, evaluate": in_turn(
        ("evaluate", "stop"),
        ("nested", "hang"),
        ("evaluate", "kill"),
        settings={"floating": 24, "delay": 0},
        nested=True,
    ),
    "loaders": in_turn(("loading", "kill"), ("loading", "stop"), ("loading", "term"), loaders=2),
    "loading and between epochs": in_turn(
        ("loading", "hang"), ("between", "kill"), ("between", "stop"), settings={"floating": 24}, optimizer="adamw"
    ),
    "before the first update": Scenario(
        [fault("w0", "forward", "kill"), fault("w1", "evaluate", "kill", "without-w0")]
    ),
    "evaluate, fixed, nested": in_turn(
        ("evaluate", "term"), ("evaluate", "hang"), ("between", "term"), nested=True, optimizer="adamw"
    ),
    "waiting": in_turn(("waiting", "stop"), ("backward", "kill"), ("updated", "raise"), settings={"floating": 24}),
}


@pytest.mark.parametrize(
    "name", shared_out(SCENARIOS, "floating, synchronous, evaluate", "loading and between epochs", "waiting")
)
def test_in_every_phase(launch: Launcher, name: str) -> None:
    run = passed_through(launch, SCENARIOS[name])
    survivor = f"w{SCENARIOS[name].workers - 1}"
    assert all(survivor in roster for roster in rosters(run)), "the last one was never lost"
