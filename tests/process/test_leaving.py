"""Workers that are added and let go from outside: ``--join``, ``scale``, ``drain``, signals."""

from __future__ import annotations

import signal
import time

import pytest
from running import LIMIT_S, Launcher, Running
from scenarios import SCRIPT, Scenario, check, start

pytestmark = pytest.mark.slow


def there(run: Running, name: str) -> None:
    """Wait until a file of the run exists."""
    until_s = time.monotonic() + LIMIT_S
    path = run.directory / name
    while not path.exists():
        over = run.process.poll() is not None and run.wait() is not None
        assert not over and time.monotonic() < until_s, f"{name} never came:\n{run.output}"
        time.sleep(0.05)


def asked(launch: Launcher, *words: str) -> None:
    command = launch.command(*words, "--dir", "job")
    assert command.wait() == 0, command.output


def test_join_scale_and_drain(launch: Launcher) -> None:
    """One worker; a guest joins; one more is started; the leader is drained; the guest's launcher is interrupted."""
    scenario = Scenario(workers=1, until=("enough",), settings={"floating": 24, "delay": "auto"})
    run = start(launch, scenario)
    here = launch.directory
    there(run, "drew-w0")
    address = (here / "job" / "address").read_text().strip()
    guest = launch.command(
        "run", "--join", address, "--token-file", "job/token", "-n", "1", "--dir", "guest", str(SCRIPT), "scenario.json"
    )
    there(run, "drew-w1")
    asked(launch, "scale", "3")
    there(run, "drew-w2")
    asked(launch, "drain", "w0")
    there(run, "without-w0")
    guest.process.send_signal(signal.SIGINT)
    assert guest.wait() == 0, guest.output
    there(run, "without-w1")
    asked(launch, "scale", "2")
    there(run, "drew-w3")
    asked(launch, "scale", "1")
    run.until("left", times=3)
    (here / "enough").touch()
    check(launch, run, scenario)
    assert "Traceback" not in run.output + guest.output
