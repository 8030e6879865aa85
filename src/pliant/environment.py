"""The environment variables of a job.

Question  Is this process a worker of a job, and of which job?
Holds     This is the only module that reads the environment. The token is passed in it, never on a command line.
Source    ours; DESIGN: "alone if no job is named in the environment".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pliant.errors import UsageError

__all__ = [
    "Job",
    "current_job",
    "environment_of",
    "given_authority",
    "given_token",
    "is_first",
    "is_worker",
    "job_from",
    "plain_environment",
    "worker_environment",
]

_ADDRESS, _TOKEN, _WORKER = "PLIANT_ADDRESS", "PLIANT_TOKEN", "PLIANT_WORKER"
_AUTHORITY = "PLIANT_TLS_CA"
_PACE, _SIZE, _GRACE, _DIRECTORY = "PLIANT_PACE", "PLIANT_SIZE", "PLIANT_GRACE", "PLIANT_DIRECTORY"
_OF_A_JOB = (_ADDRESS, _TOKEN, _AUTHORITY, _WORKER, _PACE, _SIZE, _GRACE, _DIRECTORY)
_FIRST = "w0"
"""The slot that every job begins with."""
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Job:
    """The job that a worker belongs to. ``worker`` is its slot, the first part of the name the coordinator gives it.

    ``pace`` below 1 emulates a slower device. ``size`` overrides the ``size`` of ``batches``. ``grace_s`` is how long
    the worker may take to leave when it is asked to. ``authority`` is the file with the certificate authority, if the
    coordinator uses TLS. ``directory`` is the run directory, if this process can write to it.
    """

    address: str
    token: str
    worker: str
    pace: float = 1.0
    size: int | None = None
    grace_s: float = 30.0
    authority: str = ""
    directory: str = ""


def is_worker() -> bool:
    """Whether a launcher has started this process as a worker."""
    return _WORKER in os.environ


def is_first() -> bool:
    """Whether this process is the first worker of its job; may be called before ``join``. True for a script alone.

    Use it for work that one process does before all others train: a download, ``dataset.map``. The first worker is the
    one in the job's first slot, ``w0``, also after a restart. Inside the run use ``run.is_leader`` to print and write.
    """
    return os.environ.get(_WORKER, _FIRST) == _FIRST


def current_job() -> Job | None:
    """The job of this process; None if it runs alone."""
    return job_from(os.environ)


def job_from(environ: Mapping[str, str]) -> Job | None:
    """The job that the variables name; None if they name none."""
    named = [name for name in (_ADDRESS, _TOKEN, _WORKER) if environ.get(name)]
    if not named:
        return None
    missing = [name for name in (_ADDRESS, _TOKEN, _WORKER) if name not in named]
    if missing:
        raise UsageError(
            f"{', '.join(named)} is set but {', '.join(missing)} is not; "
            "let `pliant run` start the script, or unset all PLIANT_ variables to run it alone"
        )
    return Job(
        address=environ[_ADDRESS],
        token=environ[_TOKEN],
        worker=environ[_WORKER],
        pace=_pace(environ.get(_PACE, "1")),
        size=_size(environ.get(_SIZE, "")),
        grace_s=float(environ.get(_GRACE, "30")),
        authority=environ.get(_AUTHORITY, ""),
        directory=environ.get(_DIRECTORY, ""),
    )


def environment_of(job: Job) -> dict[str, str]:
    """The variables that name the job; the inverse of ``job_from``."""
    variables = {_ADDRESS: job.address, _TOKEN: job.token, _WORKER: job.worker}
    variables |= {_PACE: repr(job.pace), _GRACE: repr(job.grace_s)}
    if job.size is not None:
        variables[_SIZE] = str(job.size)
    if job.authority:
        variables[_AUTHORITY] = job.authority
    if job.directory:
        variables[_DIRECTORY] = job.directory
    return variables


def worker_environment(job: Job, workers_here: int) -> dict[str, str]:
    """The whole environment for a worker's process, one of ``workers_here`` on this machine."""
    inherited = plain_environment()
    # Without a limit every worker would start a thread per core, and the workers would slow each other down.
    threads = max(1, _cores() // workers_here)
    inherited.setdefault(_THREADS, str(threads))
    return {**inherited, **environment_of(job)}


def plain_environment() -> dict[str, str]:
    """The environment without the variables that make a process a worker."""
    return {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}


def given_token() -> str:
    """The token for joining a run from another machine; empty if none is set."""
    return os.environ.get(_TOKEN, "").strip()


def given_authority() -> str:
    """The file with the certificate authority of a run on another machine; empty if none is set."""
    return os.environ.get(_AUTHORITY, "").strip()


def _cores() -> int:
    """How many cores this process may use; a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pace(text: str) -> float:
    try:
        pace = float(text)
    except ValueError:
        pace = 0.0
    if not 0.0 < pace <= 1.0:
        raise UsageError(f"{_PACE} is {text!r}; give a number above 0 and at most 1")
    return pace


def _size(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{_SIZE} is {text!r}; give a positive whole number of samples")
    return int(text)
