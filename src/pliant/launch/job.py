"""A launcher's settings, screen and outcome.

Question  What can a user set for a run, and what is the user shown?
Holds     Settings are checked once, before anything is created or started; a mistake is reported in one line.
Source    ours; DESIGN, the user's interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pliant.coordinator.status import Status
from pliant.core.membership.roster import DEAD_AFTER_S
from pliant.errors import UsageError
from pliant.launch.process import Stream
from pliant.launch.run_directory import HOST, NO_TLS, Trust

GRACE_S = 30.0
"""A worker that is asked to leave finishes its round, and may hand its state on or save it."""

NOTICE_EVERY_S = 5.0
"""AWS recommends this interval, and gives two minutes; GCP gives 30 seconds."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What to run. ``paces`` and ``sizes`` have one value per worker, one for all, or are empty."""

    script: str
    args: tuple[str, ...] = ()
    workers: int = 1
    paces: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    directory: Path | None = None
    resume: bool = False
    """go on with the run in ``directory`` from its last checkpoint"""
    host: str = HOST
    port: int = 0
    module: bool = False
    """``script`` is the name of a module, as for ``python -m``"""
    dead_after_s: float = DEAD_AFTER_S
    min_workers: int = 1
    max_workers: int | None = None
    grace_s: float = GRACE_S
    """how long a worker that was told to leave may take before it is killed"""
    notice_command: str = ""
    """exits with 0 when this machine is about to go away"""
    notice_every_s: float = NOTICE_EVERY_S
    trust: Trust = NO_TLS
    """the coordinator's certificate; not for ``join``"""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a run ended."""

    exit_status: int
    status: Status
    directory: Path
    reason: str
    completed: bool


class Screen(Protocol):
    """Where a run's output and progress are shown."""

    def started(self, directory: Path, address: str) -> None: ...
    def output(self, worker: str, text: str, stream: Stream) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, status: Status) -> None: ...
    def ended(self, outcome: JobOutcome) -> None: ...


class Silent:
    """Shows nothing; the logs and the outcome have everything."""

    def started(self, directory: Path, address: str) -> None: ...
    def output(self, worker: str, text: str, stream: Stream) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, status: Status) -> None: ...
    def ended(self, outcome: JobOutcome) -> None: ...


def check(spec: JobSpec) -> None:
    """Raise ``UsageError`` if the job cannot be run."""
    if not spec.module and not Path(spec.script).is_file():
        raise UsageError(f"no script at {spec.script}; give the path of the training script")
    if spec.workers < 1:
        raise UsageError(f"{spec.workers} workers cannot train; give at least one with -n")
    for what, values in (("--pace", spec.paces), ("--size", spec.sizes)):
        if len(values) not in (0, 1, spec.workers):
            raise UsageError(
                f"{what} has {len(values)} values for {spec.workers} workers; give one each, or one for all"
            )
    if any(not 0.0 < pace <= 1.0 for pace in spec.paces):
        raise UsageError("--pace takes numbers above 0 and at most 1: the part of its speed a worker keeps")
    if any(size < 1 for size in spec.sizes):
        raise UsageError("--size takes positive whole numbers: the samples of a worker's micro-batch")
    _check_limits(spec)


def _check_limits(spec: JobSpec) -> None:
    if spec.min_workers < 1:
        raise UsageError(f"--min-workers is {spec.min_workers}; give at least 1")
    if spec.max_workers is not None and spec.max_workers < max(spec.min_workers, spec.workers):
        raise UsageError(
            f"--max-workers is {spec.max_workers} but {max(spec.min_workers, spec.workers)} are wanted; "
            "give no less than -n and --min-workers"
        )
    if not spec.grace_s >= 0.0:
        raise UsageError(f"--grace is {spec.grace_s:g}; give seconds, 0 or more")
    if not spec.notice_every_s > 0.0:
        raise UsageError(f"--notice-every is {spec.notice_every_s:g}; give a positive number of seconds")


def each(values: Sequence[Item], place: int, default: Item) -> Item:
    """The value for worker number ``place`` here; workers beyond the end of the list get ``default``."""
    if len(values) == 1:
        return values[0]
    return values[place] if place < len(values) else default
