"""Workers that come (back) while others die, leave or hand the state on, as real processes."""

from __future__ import annotations

import pytest
from running import Launcher, shared_out
from scenarios import Scenario, fault, passed_through

pytestmark = pytest.mark.slow

ALL = ("drew-w0", "drew-w1", "drew-w2")

SCENARIOS = {
    # The donor dies while it copies what w2.2 asked for, its successor while it installs, the next one is asked to go.
    "handing over": Scenario(
        [
            fault("w2", "forward", "kill", *ALL),
            fault("*", "giving", "kill", "joined-w2.2"),
            fault("*", "installing", "kill", "fault-1", "drew-w2.2"),
            fault("*", "following", "term", "fault-2"),
        ],
        until=("drew-w2.2",),
    ),
    # The same with sleepers, who wake up, are refused, and come back by themselves, as often as they sleep.
    "handing over, asleep": Scenario(
        [
            fault("w2", "nested", "doze", "under-way", *ALL),
            fault("*", "sending", "doze", "without-w2"),
            fault("*", "following", "doze", "fault-1", "drew-w2.2"),
            fault("*", "installing", "doze", "fault-2"),
            fault("*", "following", "term", "fault-3"),
        ],
        until=("drew-w2.2",),
        settings={"floating": 24},
        nested=True,
        optimizer="adamw",
    ),
    "down to one and up again": Scenario(
        [fault("w0", "forward", "kill w1,kill", *ALL)], until=("drew-w0.2", "drew-w1.2"), settings={"delay": 0}
    ),
    # Two die with the leader: the last one goes on alone, then with all of them, and leaves to them.
    "up again and the old one goes": Scenario(
        [fault("w0", "waiting", "kill w1,kill", *ALL), fault("w2", "updated", "leave", "drew-w0.2", "drew-w1.2")],
        until=("without-w2",),
        settings={"floating": 24},
        optimizer="adamw",
        loaders=2,
    ),
    # One process goes through several names: it is cut off, refused, and comes back by itself.
    "sleepers that wake up": Scenario(
        [
            fault("w1", "forward", "nap", *ALL),
            fault("w1", "backward", "cut", "fault-0"),
            fault("w0", "waiting", "cut", "drew-w1.2"),
            fault("w2", "evaluate", "cut", "drew-w0.2"),
            fault("w1.2", "nested", "cut", "drew-w2.2"),
            fault("w0.2", "between", "cut", "drew-w1.3"),
        ],
        until=("drew-w0.3",),
        nested=True,
    ),
    "a schedule that follows results": Scenario(
        [
            fault("w1", "evaluate", "kill", *ALL),
            fault("w0", "between", "kill", "drew-w1.2"),
        ],
        until=("drew-w0.2",),
        settings={"floating": 24},
        schedule="plateau",
    ),
    "before it joins": Scenario(
        [
            fault("w1", "forward", "kill", "drew-w0", "drew-w1"),
            fault("w1", "joined", "kill", "without-w1"),
            fault("w1", "starting", "kill", "fault-1"),
        ],
        until=("drew-w1.3",),
        workers=2,
    ),
}


@pytest.mark.parametrize("name", shared_out(SCENARIOS, "handing over", "down to one and up again"))
def test_while_others_come_and_go(launch: Launcher, name: str) -> None:
    passed_through(launch, SCENARIOS[name])
