"""Workers that are added and let go from outside: ``--join``, ``scale``, ``drain``, signals."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from running import LIMIT_S, Launcher
from scenarios import SCRIPT, Scenario, check, start

pytestmark = pytest.mark.slow


def there(path: Path) -> None:
    """Wait until a file exists."""
    until_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < until_s, f"{path.name} never came"
        time.sleep(0.05)


def asked(launch: Launcher, *words: str) -> None:
    command = launch.command(*words, "--dir", "job")
    assert command.wait() == 0, command.output


def test_join_scale_and_drain(launch: Launcher) -> None:
    """One worker; a guest joins; one more is started; the leader is drained; the guest's launcher is interrupted."""
    scenario = Scenario(workers=1, until=("enough",), settings={"floating": 24, "delay": "auto"})
    run = start(launch, scenario)
    here = launch.directory
    there(here / "drew-w0")
    address = (here / "job" / "address").read_text().strip()
    guest = launch.command(
        "run", "--join", address, "--token-file", "job/token", "-n", "1", "--dir", "guest", str(SCRIPT), "scenario.json"
    )
    there(here / "drew-w1")
    asked(launch, "scale", "3")
    there(here / "drew-w2")
    asked(launch, "drain", "w0")
    there(here / "without-w0")
    guest.process.send_signal(signal.SIGINT)
    assert guest.wait() == 0, guest.output
    there(here / "without-w1")
    asked(launch, "scale", "2")
    there(here / "drew-w3")
    asked(launch, "scale", "1")
    run.until("left", times=3)
    (here / "enough").touch()
    check(launch, run, scenario)
    assert "Traceback" not in run.output + guest.output
