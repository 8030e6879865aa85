"""The run directory is removed while a run trains, and workers and the coordinator die afterwards."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from running import Launcher, Running, coordinator_of, records, remove, wait_for
from scenarios import Scenario, check, fault, start

from pliant.core.journal import records as journal

pytestmark = pytest.mark.slow


def killed_and_back(launch: Launcher, run: Running, name: str) -> None:
    """The second worker is killed; the next one in its slot, so named, trains."""
    os.kill(int((launch.directory / "pid-w1").read_text()), signal.SIGKILL)
    wait_for(launch.directory / "without-w1", run)
    wait_for(launch.directory / f"drew-{name}", run)
    (launch.directory / "go-on").touch()


def logged(job: Path, slot: str) -> str:
    return (job / "logs" / f"{slot}.log").read_text()


def test_what_was_removed_in_training_is_made_again(launch: Launcher) -> None:
    scenario = Scenario(until=("go-on",), workers=2)
    run = start(launch, scenario)
    wait_for(launch.directory / "under-way", run)
    job = launch.directory / "job"
    remove(job)
    run.until("the run directory was removed; training goes on")
    run.printed("the run directory was lost; it is made again, and nothing is missing in the journal")
    killed_and_back(launch, run, "w1.2")
    # Nothing is missing, so that the exit status is 0: the journal is whole, from its first line on.
    check(launch, run, scenario)
    assert "final weights=" in logged(job, "w0") and "final weights=" in logged(job, "w1")
    assert {"journal.jsonl", "state.json", "token", "address", "charter.json", "term"} <= {
        path.name for path in job.iterdir()
    }


def test_a_journal_lost_with_its_coordinator_is_told_when_it_happens(launch: Launcher) -> None:
    scenario = Scenario([fault("w0", "updated", "coordinator", "removed")], until=("go-on",), workers=2)
    run = start(launch, scenario)
    wait_for(launch.directory / "under-way", run)
    job = launch.directory / "job"
    # Alive it would write it again.
    os.kill(coordinator_of(run), signal.SIGSTOP)
    remove(job)
    run.until("the run directory was removed; training goes on")
    (launch.directory / "removed").touch()
    run.until("the run directory was lost, and the coordinator: what was written is not in the journal")
    assert not (launch.directory / "go-on").exists()
    # Of the second coordinator.
    killed_and_back(launch, run, "w1.101")
    assert run.wait() == 4, run.output
    why = "the journal is incomplete: the run directory was lost with all that was written"
    assert any(why in line for line in run.lines), run.output
    assert "final weights=" in logged(job, "w0") and "final weights=" in logged(job, "w1")
    first, *_, last = records(run)
    assert isinstance(first, journal.RunRecord) and isinstance(last, journal.EndRecord) and why in last.reason
    audit = launch.command("audit", "job", "--json")
    assert audit.wait() == 3, audit.output
    found = json.loads(audit.output)
    assert not found["problems"] and not found["end_proved"] and "round" in found["proved"]
