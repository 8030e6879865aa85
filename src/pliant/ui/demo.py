"""``pliant demo``: unequal workers train one model, with Pliant and with plain DDP.

Question  How much faster is training if no worker waits for slower ones?
Holds     Both train the same model on the same data with the same batch for the same epochs, on four emulated
          devices. All figures are measured, except the pace, which is set. No process is left behind; traffic stays on
          loopback.
Source    ours. Harvest: the group's samples/s, divided by the sum of the workers' own speeds during the time in which
          they do not wait, both measured in the same run.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pliant.coordinator.status import Status, WorkerStatus
from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit
from pliant.errors import RunEnded, UsageError
from pliant.launch import child, local
from pliant.ui import progress

PACES = (1.0, 1.0, 0.5, 0.25)
DEVICE = 1 / 3
"""A device of pace 1 is a third of a core. All four then need about one core together, so that on two cores, even if
they are not idle, the emulated devices limit the speed and not the scheduler."""
EPOCHS = 8
MORE_EPOCHS = 20
"""Most epochs after the measured ones: a worker is killed, and the demo ends an epoch after it is back."""
VICTIM = 1
BATCH = 128
SIZE = 16
LOOK_S = 0.1
PLAIN_EVERY_S = 5.0
"""As in ``ui.progress``."""
REPLAYED = 20
"""Rounds that are replayed at the end."""
GIVE_UP_S = 120.0
"""DDP takes a quarter of this on two cores."""
INTERRUPTED = 130
"""Exit status of a program ended by Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's samples, the time it computed, and the time it waited."""

    samples: int
    busy_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What a system achieved on the devices."""

    shares: list[Share]
    trained_s: float
    accuracy: float

    @property
    def samples_per_s(self) -> float:
        return sum(share.samples for share in self.shares) / self.trained_s

    @property
    def harvest(self) -> float:
        return self.samples_per_s / sum(share.samples / share.busy_s for share in self.shares if share.samples)


def main() -> int:
    """Run the demo; returns the exit status."""
    console = Console(highlight=False)
    paces = ", ".join(f"{pace:g}" for pace in PACES)
    console.print(f"Four workers of paces {paces} train a small CNN on digits, batch {BATCH}.")
    console.print(f"They are emulated: pace 1 is {DEVICE:.0%} of one core here.")
    with tempfile.TemporaryDirectory(prefix="pliant-demo-") as name:
        results = Path(name)
        _write_digits(results)
        console.print("\n[bold]Pliant[/bold]: the batch is shared out by measured pace, sums run in the background.")
        console.print(f"After {EPOCHS} epochs w{VICTIM} is killed. The others go on, and it comes back by itself.")
        outcome = local.run(_spec(results), ui=progress.Terminal())
        if outcome.exit_status != 0:
            return outcome.exit_status
        records = _records(outcome.directory)
        pliant = pliant_result(records, results)
        changes = changes_of(records, json.loads((results / "updates.json").read_text()))
        console.print("\n[bold]DDP[/bold]: equal shares, the same devices.")
        try:
            ddp = ddp_result(results)
            again = replayed(outcome.directory, results)
        except KeyboardInterrupt:
            return INTERRUPTED
    show(console, pliant, ddp)
    for change in changes:
        console.print(change, soft_wrap=True)
    problems = audit(records).problems
    found = "; ".join(problems[:3]) or "every sample was used exactly once per epoch"
    console.print(f"Audit of Pliant's journal: {found}.", soft_wrap=True)
    console.print(f"Replay of it on one process: {again}.", soft_wrap=True)
    ratio = pliant.samples_per_s / ddp.samples_per_s
    console.print(f"[bold]On the same devices Pliant trained {ratio:.1f} times as fast as DDP.[/bold]")
    return 1 if problems else 0


def replayed(directory: Path, results: Path) -> str:
    """Compute the first rounds of Pliant's run again in one process, and return how well they agree, in words.

    In float32 the order of sums makes a difference that grows from round to round; in float64 a whole run agrees to
    1e-9.
    """
    script = str(Path(__file__).with_name("demo_train.py"))
    command = [sys.executable, "-c", "from pliant.ui.cli import main; main()", "replay", "--json"]
    command += ["--until", str(REPLAYED), str(directory)]
    done = subprocess.run(
        [*command, script, *_own_arguments(results)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        return f"failed; its last line was: {said[-1]}"
    largest = found["largest"]["relative"] if found["largest"] else 0.0
    return (
        f"losses and gradient norms of {found['contributions']} contributions, {found['rounds']} rounds, "
        f"agree to {largest:.0e} (float32)"
    )


def _write_digits(results: Path) -> None:
    """Write the data to a file for the scripts: importing scikit-learn would cost each process 1 s of CPU."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError('the demo trains on scikit-learn\'s digits: pip install "pliant[demo]"') from None
    images, labels = load_digits(return_X_y=True)
    np.savez(results / "digits.npz", images=images, labels=labels)


def _scripts_arguments(results: Path) -> tuple[str, ...]:
    job = ("--epochs", str(EPOCHS), "--batch", str(BATCH), "--size", str(SIZE), "--workers", str(len(PACES)))
    return (*job, "--results", str(results))


def _own_arguments(results: Path) -> tuple[str, ...]:
    """The arguments of Pliant's script."""
    return (*_scripts_arguments(results), "--more", str(MORE_EPOCHS), "--victim", f"w{VICTIM}")


def _spec(results: Path) -> local.JobSpec:
    return local.JobSpec(
        script="pliant.ui.demo_train",
        module=True,
        args=_own_arguments(results),
        workers=len(PACES),
        paces=tuple(DEVICE * pace for pace in PACES),
        directory=Path("runs", f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"),
    )


def _records(directory: Path) -> list[journal.Record]:
    with (directory / journal.JOURNAL).open("rb") as lines:
        return list(journal.read(lines))


def pliant_result(records: Sequence[journal.Record], results: Path) -> Result:
    """Samples and busy time of the measured epochs from the journal; idle is the rest of the time in their loops.

    Figures are per slot: on a very busy machine a worker may be lost here, too, and its successor goes on.
    """
    rosters = {r.era: r.roster for r in records if isinstance(r, journal.EraRecord)}
    measured = {r.phase for r in records if isinstance(r, journal.PhaseRecord) and r.epoch < EPOCHS}
    samples, busy_s = [0] * len(PACES), [0.0] * len(PACES)
    for record in records:
        if isinstance(record, journal.RoundRecord) and record.phase in measured:
            for name, ticket in zip(rosters[record.era], record.tickets, strict=True):
                samples[_place(name)] += ticket.samples
                busy_s[_place(name)] += ticket.busy_s
    figures = [_figures(path) for path in sorted(results.glob("w*.json"))]
    trained_s = max(figure["trained_s"] for figure in figures)
    shares = [Share(*each, max(0.0, trained_s - each[1])) for each in zip(samples, busy_s, strict=True)]
    return Result(shares, trained_s, figures[0]["accuracy"])


def _place(worker: str) -> int:
    """The index of a worker's device: w3 and its successor w3.2 have the fourth."""
    return int(worker.removeprefix("w").partition(".")[0])


def changes_of(records: Sequence[journal.Record], updates: Sequence[tuple[float, int]]) -> list[str]:
    """One line for every change of the roster: which workers, and how long the next update took."""
    gaps = [(later[0] - earlier[0], earlier[1], later[1]) for earlier, later in itertools.pairwise(updates)]
    usual_s = statistics.median([gap for gap, before, after in gaps if before == after] or [0.0])
    eras = [record for record in records if isinstance(record, journal.EraRecord)]
    lines: list[str] = []
    for old, new in itertools.pairwise(eras):
        pauses = [gap for gap, before, after in gaps if before < new.era <= after]
        lost, come = [n for n in old.roster if n not in new.roster], [n for n in new.roster if n not in old.roster]
        what = ", ".join([*(f"{name} died" for name in lost), *(f"{name} joined" for name in come)])
        if pauses:
            lines.append(f"{what}: the next update came after {pauses[0]:.2f} s (usually {usual_s:.2f} s).")
    return lines


def ddp_result(results: Path) -> Result:
    """Run DDP with one process per device and collect their measurements."""
    with _started(results) as processes:
        _follow(processes, results)
    figures = [_figures(results / f"ddp-{place}.json") for place in range(len(PACES))]
    shares = [
        Share(int(figure["samples"]), figure["trained_s"] - figure["waited_s"], figure["waited_s"])
        for figure in figures
    ]
    return Result(shares, max(figure["trained_s"] for figure in figures), figures[0]["accuracy"])


def _figures(path: Path) -> dict[str, float]:
    return json.loads(path.read_text())


@contextmanager
def _started(results: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """DDP's processes, each in its own process group; all are killed at the end of the ``with``."""
    processes: list[subprocess.Popen[bytes]] = []
    # ``child`` ends them with this process, even if that is killed.
    python = [sys.executable, child.__file__, str(os.getpid()), sys.executable]
    try:
        for place, pace in enumerate(PACES):
            own = ("--pace", str(DEVICE * pace), "--place", str(place))
            command = [*python, "-m", "pliant.ui.demo_ddp", *_scripts_arguments(results), *own]
            with (results / f"ddp-{place}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _follow(processes: Sequence[subprocess.Popen[bytes]], results: Path) -> None:
    """Show DDP's progress until all processes have ended."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    ends_s = time.monotonic() + GIVE_UP_S
    shown_s = float("-inf")
    with console.status("DDP starts") as line:
        while any(process.poll() is None for process in processes):
            if any(process.poll() not in (None, 0) for process in processes):
                break
            if time.monotonic() > ends_s:
                raise RunEnded(f"DDP did not end within {GIVE_UP_S:.0f} s; is the machine very busy? Try again")
            time.sleep(LOOK_S)
            if (results / "ddp.json").exists():
                text = progress.line(_ddp_status(_figures(results / "ddp.json")))
                line.update(text)
                if not console.is_terminal and time.monotonic() - shown_s >= PLAIN_EVERY_S:
                    shown_s = time.monotonic()
                    console.print(f"DDP: {text}")
    failed = [place for place, process in enumerate(processes) if process.poll() not in (None, 0)]
    if failed:
        said = (results / f"ddp-{failed[0]}.log").read_text(errors="replace").strip().splitlines() or ["nothing"]
        raise RunEnded(f"DDP's process {failed[0]} failed; its last line was: {said[-1]}")


def _ddp_status(figures: dict[str, Any]) -> Status:
    """DDP's progress as a status for the progress line."""
    return Status(
        job="ddp",
        era=1,
        workers=[WorkerStatus(name=str(place), state="training") for place in range(len(PACES))],
        epoch=figures["epoch"],
        epochs=EPOCHS,
        epoch_done=figures["done"],
        epoch_length=figures["length"],
        batch=BATCH,
        samples_per_s=figures["samples_per_s"],
        loss=figures["loss"],
    )


def show(console: Console, pliant: Result, ddp: Result) -> None:
    """Print the tables: each worker, then all together."""
    workers = Table("worker", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("pace", "Pliant:\nshare", "samples", "idle", "DDP:\nshare", "samples", "idle"):
        workers.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for place, pace in enumerate(PACES):
        workers.add_row(f"w{place}", f"{pace:g}", *_cells(pliant, place), *_cells(ddp, place))
    console.print(workers)
    whole = Table("all workers", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("Pliant", "DDP"):
        whole.add_column(name, justify="right")
    whole.add_row("samples/s", f"{pliant.samples_per_s:,.0f}", f"{ddp.samples_per_s:,.0f}")
    whole.add_row("seconds of training", f"{pliant.trained_s:.1f}", f"{ddp.trained_s:.1f}")
    whole.add_row("harvest", f"{pliant.harvest:.2f}", f"{ddp.harvest:.2f}")
    whole.add_row("accuracy", f"{pliant.accuracy:.3f}", f"{ddp.accuracy:.3f}")
    console.print(whole)
    console.print("Harvest: samples/s of the group over the sum of the workers' own speeds (samples")
    console.print("over the time in which they did not wait). At 1 no worker ever waits.")


def _cells(result: Result, place: int) -> tuple[str, str, str]:
    share = result.shares[place]
    part = share.samples / sum(each.samples for each in result.shares)
    waited = share.idle_s / (share.busy_s + share.idle_s)
    return f"{part:.0%}", f"{share.samples:,}", f"{share.idle_s:.1f} s {waited:3.0%}"
