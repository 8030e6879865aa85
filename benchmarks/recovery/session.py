"""One running group of processes, watched and disturbed from outside.

Question  Is the group whole and quiet, so that the next disturbance says something?
Holds     Every wait has an end, and says what it waited for. No process outlives the session. The runner looks ten
          times a second: what it measures is in the processes' own stamps, and its looking must not take their cores.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.clusters import Plan, phases
from benchmarks.processes import ROOT, reason, start, started
from benchmarks.recovery import options as recovery_options
from benchmarks.recovery.options import Options
from benchmarks.recovery.stamps import Trace, Traces

WORKERS = 4
BATCH = 64  # 16 samples, one micro-batch of 40 ms, for each of four workers: updates as often as they can be
DEVICE_MS = "40"
LOOK_S = 0.1
SETTLED_S = 90.0
SETTLED_UPDATES = 5
QUIET_S = 2.5  # beyond what ``disturbance`` takes as usual
RIVALS = ROOT / "build" / "rivals"  # where install.sh puts what must not meet the environment's own packages


class Trouble(Exception):
    """Something awaited did not happen."""


@dataclass(slots=True)
class Session:
    """The processes this runner started, and the stamps of all."""

    directory: Path
    processes: list[subprocess.Popen[bytes]]
    traces: Traces

    def until(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        """Look until it holds; ``Trouble`` names what did not come, with the last error any process wrote."""
        ends = time.monotonic() + timeout_s
        while True:
            self.traces.refresh()
            if condition():
                return
            if time.monotonic() > ends:
                raise Trouble(reason(self.directory, f"{what}: not within {timeout_s:g} s"))
            if all(process.poll() is not None for process in self.processes):
                raise Trouble(reason(self.directory, f"{what}: all processes ended"))
            time.sleep(LOOK_S)

    def settled(self, workers: int, quiet_s: float = 1.0, timeout_s: float = SETTLED_S) -> list[Trace]:
        """Wait until so many workers have trained together for a while."""

        def whole() -> bool:
            members = self.members()
            return len(members) == workers and all(_together_s(trace) >= quiet_s for trace in members)

        self.until(f"{workers} workers together", whole, timeout_s)
        return self.members()

    def members(self) -> list[Trace]:
        """Processes that run and are in the latest era."""
        alive = [trace for trace in self.traces.alive() if trace.steps]
        latest = max((trace.steps[-1].after.era for trace in alive), default=0)
        return [trace for trace in alive if trace.steps[-1].after.era == latest]

    def add(self, line: list[str]) -> subprocess.Popen[bytes]:
        """One more process; it ends with the session."""
        process = start(line, self.directory, len(self.processes))
        self.processes.append(process)
        return process


def _together_s(trace: Trace) -> float:
    """How long this process has trained in its present era; 0 before a few micro-batches of it."""
    era = trace.steps[-1].after.era
    same = [step for step in trace.steps[-200:] if step.after.era == era]
    return same[-1].ends_s - same[0].begins_s if len(same) >= SETTLED_UPDATES else 0.0


def recent(traces: list[Trace], since_s: float) -> list[Trace]:
    """The same processes with only their later steps: a long run's first steps say nothing and cost time."""
    return [replace(trace, steps=[step for step in trace.steps if step.ends_s >= since_s]) for trace in traces]


def send(pid: int, number: signal.Signals) -> float:
    """Signal one process; the moment right before."""
    at_s = time.monotonic()
    os.kill(pid, number)
    return at_s


def with_path(*first: Path) -> list[str]:
    """A command's beginning that sets the import path: the clone under test, and a rival's own directory."""
    env = shutil.which("env")
    assert env is not None
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([*(str(one) for one in first), str(ROOT), *([inherited] if inherited else [])])
    return [env, f"PYTHONPATH={path}"]


def pliant(*arguments: str) -> list[str]:
    """A command line of the ``pliant`` command."""
    return [*with_path(), sys.executable, "-c", "from pliant.ui.cli import main; main()", *arguments]


@contextmanager
def session(
    lines: Callable[[Path], list[list[str]]], model: str, options: Options, *, keep: bool = False
) -> Iterator[Session]:
    """Start the processes; ``keep``: their directory stays if anything goes wrong, and ``Trouble`` names it."""
    directory = Path(tempfile.mkdtemp(prefix="pliant-recovery-"))
    kept = False
    try:
        plan = Plan(model, WORKERS, BATCH, phases([(DEVICE_MS, 0.0, 1e9)], 0))
        (directory / "plan.json").write_bytes(msgspec.json.encode(plan))
        recovery_options.write(directory, options)
        with started(lines(directory), directory) as processes:
            yield Session(directory, processes, Traces(directory))
    except Trouble as trouble:
        kept = keep
        raise Trouble(f"{trouble} (kept: {directory})" if keep else str(trouble)) from trouble
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)
