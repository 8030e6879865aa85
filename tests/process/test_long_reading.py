"""A coordinator's successor reads the journal for longer than anybody is patient; nobody gives the run up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from running import Launcher, Running, coordinator_of, plain_environment, wait_for
from scenarios import SCRIPT, Scenario, check, fault

pytestmark = pytest.mark.slow

PATCH = Path(__file__).parent / "scripts" / "slow_reading"

SCENARIO = Scenario(
    # Each of them is only reached by a worker that trains. While the journal is read, nothing is said to any of them.
    [
        fault("w0", "updated", "nap", "patience-over"),
        fault("w1", "updated", "nap", "fault-0"),
        fault("w0", "evaluate", "nap", "fault-1"),
        fault("w1", "updated", "nap", "fault-2"),
    ],
    until=("read-on",),
    workers=1,
)


def command(launch: Launcher, *words: str) -> Running:
    """The ``pliant`` command, whose processes have the patch."""
    path = os.pathsep.join([str(PATCH), plain_environment()["PYTHONPATH"]])
    return launch.python("-W", "error", "-c", "from pliant.ui.cli import main; main()", *words, PYTHONPATH=path)


def test_nobody_gives_up_while_a_long_journal_is_read(launch: Launcher) -> None:
    """Neither workers nor a launcher on another machine; what they say meanwhile is heard afterwards, in order."""
    SCENARIO.write(launch.directory / "scenario.json")
    script = (str(SCRIPT), "scenario.json")
    run = command(launch, "run", "-n", "1", "--dir", "job", *script)
    wait_for(launch.directory / "joined-w0", run)
    address = (launch.directory / "job" / "address").read_text().strip()
    join = ("run", "--join", address, "--token-file", "job/token", "-n", "1", "--dir", "guest")
    guest = command(launch, *join, *script)
    wait_for(launch.directory / "drew-w1", run, guest)
    pids = [(launch.directory / f"pid-w{slot}").read_text() for slot in (0, 1)]
    before = coordinator_of(run)
    # Without it the whole journal has to be read.
    os.kill(before, signal.SIGSTOP)
    (launch.directory / "job" / "state.json").unlink()
    os.kill(before, signal.SIGKILL)
    wait_for(launch.directory / "reading", run, guest)
    refused = command(launch, "scale", "3", "--dir", "job")
    assert refused.wait() == 1 and "still reads the journal" in refused.output
    wait_for(launch.directory / "fault-3", run, guest)
    (launch.directory / "read-on").touch()
    check(launch, run, SCENARIO)
    assert guest.wait() == 0, guest.output
    assert [(launch.directory / f"pid-w{slot}").read_text() for slot in (0, 1)] == pids
    assert run.lines.count("pliant: the coordinator died; restarted") == 1
    assert not any("lost the coordinator" in line or "restarted:" in line for line in run.lines + guest.lines)
