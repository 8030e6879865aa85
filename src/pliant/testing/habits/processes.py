"""A script as real processes under ``pliant run``, with faults.

Question  Does a script train as it says where workers are killed and sent away?
Holds     The run ends with status 0, its journal is in order, everybody who came to the end has the same weights, and
          ``pliant replay`` computes the same ones again.
Source    ours; invariants 2, 3 and 4 of the design.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

import pliant
from pliant.coordinator.journal import history
from pliant.core.journal.audit import audit
from pliant.core.journal.records import JOURNAL
from pliant.environment import current_job, plain_environment
from pliant.errors import PliantError
from pliant.launch import requests
from pliant.run import Run
from pliant.testing.habits.kit import kit_of
from pliant.testing.habits.reference import ScriptMismatch
from pliant.testing.habits.script import DrawnScript
from pliant.testing.habits.values import Habits, packed, unpacked

LIMIT_S = 200.0
"""Far above what any of these takes; only a hang reaches it."""

_GROWS, _OVER = Path("awaited-grown"), Path("over")
_SCRIPT = "from pliant.testing.habits.processes import main\n\nmain()\n"
_PAUSE_S = 0.003
"""in each micro-batch of a real worker"""
_SLOW_S = 15.0
"""A slow save at most, where the others do not go on without it."""
_AWAITED_S, _PATIENCE = 0.2, 100
"""in so many while somebody is to come (back), so that it finds the run still there"""


def main() -> None:
    """The script that ``pliant run`` and ``pliant replay`` are given."""
    habits = unpacked(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    # Empty in a replay, and nobody dies there.
    job = current_job()
    slot = job.worker if job is not None else ""
    place = int(slot[1:]) if slot else 0
    kit = kit_of(habits, 0)
    script = DrawnScript(kit, place, pliant.join, Path.cwd())
    if slot:
        script.at_micro_batch = _Fate(habits, place).meet
        script.pause = _until_left_out
    script.train()
    if slot:
        digest = hashlib.sha256()
        for name, value in kit.state().items():
            if name.startswith(("model.", "outside.")):
                digest.update(value.contiguous().numpy().tobytes())
        Path(f"weights-{slot}-{os.getpid()}").write_text(digest.hexdigest())


class _Fate:
    """What happens to one worker."""

    def __init__(self, habits: Habits, place: int) -> None:
        self._habits = habits
        self._place = place
        self._patience = _PATIENCE

    def meet(self, run: Run) -> None:
        habits, here = self._habits, Path.cwd()
        if self._place >= habits.workers or "." in run.worker:
            (here / f"came-{run.worker}").touch()
        if habits.grows and run.round >= habits.grows:
            _GROWS.touch()
        lacking = len(list(here.glob("awaited-*"))) - len(list(here.glob("came-*")))
        self._patience -= lacking > 0
        time.sleep(_AWAITED_S if lacking > 0 and self._patience > 0 else _PAUSE_S)
        for number, fault in enumerate(habits.faults):
            if fault.worker == self._place and run.round >= fault.at and self._is_safe():
                with contextlib.suppress(FileExistsError):
                    (here / f"fault-{number}").touch(exist_ok=False)
                    if fault.signal == "kill":
                        (here / f"awaited-{number}").touch()
                    os.kill(os.getpid(), signal.SIGKILL if fault.signal == "kill" else signal.SIGTERM)

    def _is_safe(self) -> bool:
        """Where all are lost: whether there is something to go on from."""
        return not self._habits.checkpoints or _count("checkpoint") > 0


def _until_left_out(run: Run) -> None:
    """A save that is over when the others have gone on without this worker; or soon, where they had better wait."""
    eras = _count("era")
    deadline_s = time.monotonic() + _SLOW_S
    while len(run.roster) > 1 and time.monotonic() < deadline_s and _count("era") == eras:
        time.sleep(_PAUSE_S)


def _count(kind: str) -> int:
    """Records of this kind in the journal."""
    return Path("job", JOURNAL).read_bytes().count(b'"kind":"%s"' % kind.encode())


class Interpret(Protocol):
    """Runs a Python interpreter with these arguments to its end; raises ``subprocess.TimeoutExpired``."""

    def __call__(
        self, arguments: Sequence[str], directory: Path, environment: dict[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]: ...


def executed(
    arguments: Sequence[str], directory: Path, environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """A new interpreter."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def checked(habits: Habits, directory: Path, interpret: Interpret = executed) -> None:
    """Run the script; raises ``ScriptMismatch`` where something is not as it must be."""
    (directory / "train.py").write_text(_SCRIPT)
    (directory / "habits.json").write_text(packed(habits))
    paces = ",".join(map(str, habits.paces or (1.0,) * habits.workers))
    script = ("train.py", "habits.json")
    grows = threading.Thread(target=_grow, args=(directory, habits.workers + 1))
    if habits.grows:
        grows.start()
    try:
        _pliant(interpret, directory, "run", "-n", str(habits.workers), "--pace", paces, "--dir", "job", *script)
    finally:
        (directory / _OVER).touch()
        if habits.grows:
            grows.join()
    found = {path.name: path.read_text() for path in directory.glob("weights-*")}
    if not found or len(set(found.values())) > 1:
        raise ScriptMismatch(f"the workers end with other weights: {sorted(found.items())}")
    report = audit(history(directory / "job" / JOURNAL))
    if report.problems:
        raise ScriptMismatch(f"the journal is not in order: {report.problems}")
    _pliant(interpret, directory, "replay", "job", *script)


def _grow(directory: Path, workers: int) -> None:
    """Ask for so many workers when it is time."""
    while not (directory / _GROWS).exists():
        if (directory / _OVER).exists():
            return
        time.sleep(_PAUSE_S)
    # It may end meanwhile.
    with contextlib.suppress(PliantError):
        requests.post(requests.found(directory / "job", "", None), "/scale", {"workers": workers})


def _pliant(interpret: Interpret, directory: Path, *words: str) -> None:
    """Run the command; raises ``ScriptMismatch`` with all it said where it fails."""
    source = str(Path(pliant.__file__).resolve().parents[1])
    found = plain_environment()
    path = os.pathsep.join(filter(None, [source, found.get("PYTHONPATH", "")]))
    environment = {**found, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    arguments = ["-W", "error", "-c", "from pliant.ui.cli import main; main()", *words]
    try:
        done = interpret(arguments, directory, environment, LIMIT_S)
    except subprocess.TimeoutExpired as late:
        raise ScriptMismatch(f"pliant {words[0]} does not end:\n{late.stdout}") from None
    if done.returncode:
        raise ScriptMismatch(f"pliant {words[0]} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
