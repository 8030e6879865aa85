"""The progress line of a run.

Question  What does a user want to see at a glance, and where is the workers' output printed meanwhile?
Holds     On a terminal the line stays below all output and is never torn. Elsewhere a plain line is written
          every few seconds, at each epoch's end and at each evaluation. Standard output carries only the workers'
          own output.
Source    ours.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from pliant.coordinator.status import Status
from pliant.launch.job import JobOutcome
from pliant.launch.process import Stream

if TYPE_CHECKING:
    from rich.live import Live

PLAIN_EVERY_S = 5.0
"""Interval of lines in a log: short enough to see progress, long enough to stay readable."""

REDRAW_S = 0.1

TRAINING = ("training", "finished")
CHANGING = ("starting", "waiting", "unreachable", "restarting", "leaving")
GONE = ("left", "failed", "ended")
"""The words of ``coordinator.convert`` for a worker's state."""

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def line(status: Status) -> str:
    """A run's status in one line."""
    if status.era == 0:
        expected = [worker.state for worker in status.workers if worker.state not in GONE]
        return f"{expected.count('waiting')} of {len(expected)} workers are ready"
    parts = [_epoch(status)]
    if status.is_evaluating:
        parts.append("evaluating")
    parts.append(f"{status.samples_per_s:,.0f} samples/s")
    if status.batch is not None:
        parts.append(f"batch {status.batch}")
    if status.noise_scale is not None:
        parts.append(f"noise {status.noise_scale:,.0f}")
    if status.rate is not None:
        parts.append(f"rate {status.rate:.4g}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.eta_s is not None:
        parts.append(f"{duration(status.eta_s)} left")
    parts.append(_workers(status))
    if status.skipped:
        parts.append(f"{status.skipped} skipped")
    if status.result is not None:
        parts.append(f"evaluated {status.result:.4f}")
    return " · ".join(parts)


def summary(status: Status, elapsed_s: float) -> str:
    """A finished run in one line."""
    parts = [f"{status.samples_total:,} samples in {status.rounds:,} rounds and {duration(elapsed_s)}"]
    if status.skipped:
        parts.append(f"{status.skipped} skipped")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.result is not None:
        parts.append(f"evaluated {status.result:.4f}")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _workers(status: Status) -> str:
    """How many workers compute, and how many are about to join or leave."""
    states = [worker.state for worker in status.workers]
    parts = [f"{sum(state in TRAINING for state in states)} workers"]
    if status.spares:
        parts.append(f"{status.spares} spare")
    parts += [f"{states.count(state)} {state}" for state in CHANGING if state in states]
    return ", ".join(parts)


def _epoch(status: Status) -> str:
    whole = f"/{status.epochs}" if status.epochs is not None else ""
    part = f" {100 * status.epoch_done / status.epoch_length:.0f}%" if status.epoch_length else ""
    return f"epoch {status.epoch + 1}{whole}{part}"


class Terminal:
    """Shows a run on this process's standard streams; a ``launch.local.Screen``."""

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        if isinstance(self._stdout, io.TextIOWrapper):
            # Characters that this terminal cannot show must not end the run.
            self._stdout.reconfigure(errors="replace")
        self._console = Console(file=self._stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._drawn_s = float("-inf")
        self._landmark = (0, 0)
        self._started_s = time.monotonic()

    def started(self, directory: Path, address: str) -> None:
        """The run begins."""
        self._started_s = time.monotonic()
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def output(self, worker: str, text: str, stream: Stream) -> None:
        """Print one line of a worker's output."""
        target = self._stdout if stream == "stdout" else self._stderr
        if self._live is not None and target.isatty():
            self._console.print(_prefixed(worker, text))
            return
        try:
            target.write(f"[{worker}] {text}\n")
            target.flush()
        except BrokenPipeError:
            # The reader has closed the pipe; the logs still have everything.
            pass

    def note(self, text: str) -> None:
        """Print one line from Pliant itself."""
        self._console.print(Text(f"pliant: {text}"))

    def progress(self, status: Status) -> None:
        """Show the run's progress; called often."""
        now_s = time.monotonic()
        if self._live is not None:
            if now_s - self._drawn_s >= REDRAW_S:
                self._drawn_s = now_s
                shown = Text(line(status), style="bold", no_wrap=True, overflow="ellipsis")
                self._live.update(shown, refresh=True)
            return
        if status.round == 0:
            return
        landmark = (status.epoch, status.results)
        if landmark != self._landmark or now_s - self._drawn_s >= PLAIN_EVERY_S:
            self._drawn_s, self._landmark = now_s, landmark
            self.note(line(status))

    def ended(self, outcome: JobOutcome) -> None:
        """The run is over."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if outcome.completed and outcome.status.round:
            self.note(summary(outcome.status, time.monotonic() - self._started_s))
        if outcome.exit_status != 0:
            self.note(outcome.reason)
        self.note(f"the run is in {_near(outcome.directory)}")


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _prefixed(worker: str, text: str) -> Text:
    # All workers of a slot (w2, w2.3) have the same colour.
    digits = "".join(letter for letter in worker.partition(".")[0] if letter.isdigit())
    colour = _COLOURS[int(digits or 0) % len(_COLOURS)]
    return Text.assemble((f"[{worker}] ", colour), Text.from_ansi(text))
