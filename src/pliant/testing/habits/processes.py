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
import time
from pathlib import Path

import torch

import pliant
from pliant.core.audit import audit
from pliant.run import Run
from pliant.runtime.environment import current_job, plain_environment
from pliant.runtime.journaling import history
from pliant.testing.habits.kit import kit_of
from pliant.testing.habits.reference import Mismatch
from pliant.testing.habits.script import Script
from pliant.testing.habits.values import Fault, Habits, packed, unpacked

LIMIT_S = 100.0
"""Far above what any of these takes; only a hang reaches it."""

_SCRIPT = "from pliant.testing.habits.processes import main\n\nmain()\n"
_PAUSE_S = 0.003
"""in each micro-batch of a real worker, so that a newcomer finds the run still there"""


def main() -> None:
    """The script that ``pliant run`` and ``pliant replay`` are given."""
    habits = unpacked(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    # Empty in a replay, and nobody dies there.
    job = current_job()
    slot = job.worker if job is not None else ""
    place = int(slot[1:]) if slot else 0
    kit = kit_of(habits, 0)
    script = Script(kit, place, pliant.join, Path.cwd())
    if slot:
        script.at_micro_batch = lambda run: _meet(run, habits.faults, place)
    script.train()
    if slot:
        digest = hashlib.sha256()
        for name, value in kit.state().items():
            if name.startswith(("model.", "outside.")):
                digest.update(value.contiguous().numpy().tobytes())
        Path(f"weights-{slot}-{os.getpid()}").write_text(digest.hexdigest())


def _meet(run: Run, faults: tuple[Fault, ...], place: int) -> None:
    time.sleep(_PAUSE_S)
    for number, fault in enumerate(faults):
        if fault.worker == place and run.round >= fault.at:
            with contextlib.suppress(FileExistsError):
                Path(f"fault-{number}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL if fault.signal == "kill" else signal.SIGTERM)


def checked(habits: Habits, directory: Path) -> None:
    """Run the script; raises ``Mismatch`` where something is not as it must be."""
    (directory / "train.py").write_text(_SCRIPT)
    (directory / "habits.json").write_text(packed(habits))
    paces = ",".join(map(str, habits.paces or (1.0,) * habits.workers))
    script = ("train.py", "habits.json")
    _pliant(directory, "run", "-n", str(habits.workers), "--pace", paces, "--dir", "job", *script)
    found = {path.name: path.read_text() for path in directory.glob("weights-*")}
    if not found or len(set(found.values())) > 1:
        raise Mismatch(f"the workers end with other weights: {sorted(found.items())}")
    report = audit(history(directory / "job" / "journal.jsonl"))
    if report.problems:
        raise Mismatch(f"the journal is not in order: {report.problems}")
    _pliant(directory, "replay", "job", *script)


def _pliant(directory: Path, *words: str) -> None:
    """Run the command; raises ``Mismatch`` with all it said where it fails."""
    source = str(Path(pliant.__file__).resolve().parents[1])
    found = plain_environment()
    path = os.pathsep.join(filter(None, [source, found.get("PYTHONPATH", "")]))
    environment = {**found, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", "-c", "from pliant.ui.cli import main; main()", *words]
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise Mismatch(f"pliant {words[0]} does not end:\n{late.stdout}") from None
    if done.returncode:
        raise Mismatch(f"pliant {words[0]} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
