"""What every measured process writes down, and how the runner reads it.

Question  When did which process compute, update and come to be ready?
Holds     One line per micro-batch, appended by one write: what a killed process wrote before is whole. Times are of the
          system-wide monotonic clock, so lines of different processes compare. The same form for every system.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "stamps-"


@dataclass(frozen=True, slots=True)
class View:
    """Which era a process is in, and how far it sees the group's training: a number that grows with every update."""

    era: int
    progress: int


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch: ``before`` is what the process saw on entering the loop's body, ``after`` at its end."""

    name: str
    leads: bool
    begins_s: float
    computed_s: float
    ends_s: float
    before: View
    after: View
    samples: int


@dataclass(slots=True)
class Absence:
    """The process was away in its own code, beginning right after the update of a round; no end: not yet."""

    begins_s: float
    round: int
    ends_s: float | None = None


class Stamps:
    """The writing side; one file per process."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"{PREFIX}{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def ready(self) -> None:
        """Imports are done and the model is made: what comes next is the system's own."""
        os.write(self._file, f"ready {time.monotonic():.6f}\n".encode())

    def step(self, step: Step) -> None:
        os.write(self._file, (_line(step) + "\n").encode())

    def away(self, round_: int) -> None:
        """From here on the script does something of its own."""
        os.write(self._file, f"away {time.monotonic():.6f} {round_}\n".encode())

    def back(self) -> None:
        os.write(self._file, f"back {time.monotonic():.6f}\n".encode())


def _line(step: Step) -> str:
    times = f"{step.begins_s:.6f} {step.computed_s:.6f} {step.ends_s:.6f}"
    views = " ".join(f"{view.era} {view.progress}" for view in (step.before, step.after))
    return f"step {step.name} {int(step.leads)} {times} {views} {step.samples}"


def _step(words: list[str]) -> Step:
    begins, computed, ends = (float(word) for word in words[3:6])
    eras = [int(word) for word in words[6:10]]
    before, after = View(eras[0], eras[1]), View(eras[2], eras[3])
    return Step(words[1], words[2] == "1", begins, computed, ends, before, after, int(words[10]))


@dataclass(slots=True)
class Trace:
    """All that one process has written so far."""

    pid: int
    ready_s: float | None = None
    steps: list[Step] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    _read: int = 0
    _rest: str = ""

    @property
    def name(self) -> str:
        return self.steps[-1].name if self.steps else ""

    def take(self, text: str) -> None:
        """Add what was appended to the file; a line that is still being written waits for its end."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            words = line.split()
            if words[0] == "ready":
                self.ready_s = float(words[1])
            elif words[0] == "away":
                self.absences.append(Absence(float(words[1]), int(words[2])))
            elif words[0] == "back":
                self.absences[-1].ends_s = float(words[1])
            else:
                self.steps.append(_step(words))

    def refresh(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        self.take(new.decode())


class Traces:
    """The reading side: every process of a directory, by its process number."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.by_pid: dict[int, Trace] = {}

    def refresh(self) -> "Traces":
        for path in self._directory.glob(f"{PREFIX}*"):
            pid = int(path.name.removeprefix(PREFIX))
            self.by_pid.setdefault(pid, Trace(pid)).refresh(path)
        return self

    def alive(self) -> list[Trace]:
        """Of processes that exist (a zombie does not compute any more)."""
        return [trace for trace in self.by_pid.values() if is_alive(trace.pid)]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
