"""The coordinator is killed, alone and together with others; training goes on."""

from __future__ import annotations

import pytest
from running import Launcher
from scenarios import Scenario, fault, passed_through

from pliant.launch import certificates

pytestmark = pytest.mark.slow

SCENARIOS = {
    # In training, while a newcomer asks for its place, and while it takes the state over.
    "while others join": Scenario(
        [
            fault("w0", "forward", "coordinator", "drew-w0", "drew-w1"),
            fault("w1", "forward", "kill", "fault-0"),
            fault("*", "joined", "coordinator", "fault-1"),
            fault("*", "installing", "coordinator", "fault-2"),
        ],
        until=("without-w1",),
        workers=2,
        optimizer="adamw",
    ),
    "together with a worker, under TLS": Scenario(
        [
            fault("w0", "evaluate", "coordinator,kill", "drew-w0", "drew-w1", "drew-w2"),
            fault("w1", "waiting", "coordinator,term", "without-w0"),
        ],
        until=("without-w1",),
        settings={"floating": 24},
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_goes_on(launch: Launcher, name: str) -> None:
    tls = ()
    if "TLS" in name:
        certificates.made(launch.directory / "certs", [], 1)
        tls = ("--tls-cert", "certs/coordinator.pem", "--tls-key", "certs/coordinator.key", "--tls-ca", "certs/ca.pem")
    run = passed_through(launch, SCENARIOS[name], *tls)
    assert "pliant: the coordinator died; restarted" in run.lines
