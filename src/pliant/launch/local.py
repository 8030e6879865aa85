"""Starts a run on this machine, or adds workers of this machine to another run.

Question  How does one command start or join a job, follow it, end it and clean up after it?
Holds     When ``run`` or ``join`` returns, however it ends, no process it started is left. The exit status is the
          script's own. The token is in the workers' environment and in a file that only its owner can read.
Source    ours; DESIGN, the user's interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pliant.control.handshake import address_of
from pliant.control.messages import Over
from pliant.core.journal import records as journal
from pliant.launch import certificate_check, run_directory
from pliant.launch.coordinator_supervisor import CoordinatorSupervisor, LocalCoordinator
from pliant.launch.job import JobOutcome, JobSpec, Screen, Silent, check
from pliant.launch.process import Stream
from pliant.launch.run_directory import HOST, NO_TLS, Access, Trust, newest

if TYPE_CHECKING:
    from pliant.launch.launcher_loop import LauncherLoop

__all__ = [
    "HOST",
    "NO_TLS",
    "Access",
    "JobOutcome",
    "JobSpec",
    "Screen",
    "Silent",
    "Stream",
    "Trust",
    "join",
    "join_job",
    "newest",
    "run",
    "run_job",
]


def run(spec: JobSpec, *, ui: Screen | None = None) -> JobOutcome:
    """Run a job to its end."""
    return asyncio.run(run_job(spec, ui=ui or Silent()))


def join(spec: JobSpec, access: Access, *, ui: Screen | None = None) -> JobOutcome:
    """Give a running job more workers, until it ends or they are to leave."""
    return asyncio.run(join_job(spec, access, ui=ui or Silent()))


async def run_job(spec: JobSpec, *, ui: Screen) -> JobOutcome:
    """Run a job to its end in this event loop."""
    check(spec)
    if spec.resume:
        run_directory.expect_checkpoint(spec.directory)
    elif spec.directory is not None:
        run_directory.refuse_journal(spec.directory)
    run_directory.check_exposure(spec.host, spec.trust)
    certificate_check.served(spec.trust, spec.host)
    with run_directory.bound(spec.host, spec.port) as listener:
        directory = run_directory.made(spec.directory, spec.script)
        authority = Path(spec.trust.authority) if spec.trust.tls else None
        address = address_of(spec.host, listener.getsockname()[1])
        access = Access(address, secrets.token_urlsafe(32), authority)
        charter = _charter(spec, directory)

        def publish() -> None:
            run_directory.publish(directory, access)
            run_directory.write_trust(directory, spec.trust)
            (directory / run_directory.CHARTER).write_bytes(charter)

        publish()
        how = "rewind" if spec.resume else "start"
        host = LocalCoordinator(directory, listener, publish)
        with contextlib.closing(CoordinatorSupervisor(host, how)) as coordination:
            coordination.start()
            return await _followed(_agent(spec, ui, directory, access, coordination), ui, directory)


async def join_job(spec: JobSpec, access: Access, *, ui: Screen) -> JobOutcome:
    """Be an agent of the run at ``access`` in this event loop."""
    check(spec)
    directory = run_directory.made(spec.directory, spec.script)
    try:
        return await _followed(_agent(spec, ui, directory, access), ui, directory)
    finally:
        # Who was not let in has nothing to keep; a directory with something in it stays.
        with contextlib.suppress(OSError):
            (directory / run_directory.LOGS).rmdir()
            directory.rmdir()


def _agent(
    spec: JobSpec, ui: Screen, directory: Path, access: Access, coordination: CoordinatorSupervisor | None = None
) -> LauncherLoop:
    # Loaded now: the coordinator's process loads its own share meanwhile, and no worker starts before both are done.
    from pliant.launch.launcher_loop import LauncherLoop

    return LauncherLoop(spec, ui, directory, access, coordination)


async def _followed(agent: LauncherLoop, ui: Screen, directory: Path) -> JobOutcome:
    try:
        with agent.signals():
            end: Over = await agent.followed()
    finally:
        agent.dispose()
    outcome = JobOutcome(end.exit_status, agent.status, directory, end.reason, end.completed)
    ui.ended(outcome)
    return outcome


def _charter(spec: JobSpec, directory: Path) -> bytes:
    """The run's specification, for the coordinator and its replacements; see ``launch.coordinator_process``."""
    # Not encoded from a Charter: its module brings the server along, which takes longer to load than all of this.
    charter = {
        "job": directory.name,
        "script": Path(spec.script).name,
        "script_digest": "" if spec.module else journal.digest_of(Path(spec.script).read_bytes()),
        "arguments_digest": journal.digest_of(*(argument.encode() for argument in spec.args)),
        "workers": spec.workers,
        "dead_after_s": spec.dead_after_s,
        "min_workers": spec.min_workers,
        "max_workers": spec.max_workers,
    }
    return msgspec.json.encode(charter)
