"""Everybody is lost at once, and the run goes on from its last checkpoint: with its launcher, and with another one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from running import Launcher, Running, gone, records

from pliant.core.journal import records as journal
from pliant.core.journal.audit import audit

pytestmark = pytest.mark.slow

SCRIPT = """
    import os, time
    import torch
    from torch import nn
    import pliant

    torch.manual_seed(0)
    inputs = torch.randn(240, 4, dtype=torch.float64)
    samples = [(inputs[i], inputs[i].sum()[None]) for i in range(240)]
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    print("pid", os.getpid(), flush=True)
    settings = dict(checkpoint="kept", checkpoint_every=0.2, dead_after=3.0)
    with pliant.join(model, optimizer, batch=24, state={"updates": 0, "epochs": 0}, **settings) as run:
        for epoch in run.epochs(9):
            for x, y in run.batches(samples, size=4):
                time.sleep(0.01)
                run.backward(nn.functional.mse_loss(model(x), y))
                if run.step():
                    run.state["updates"] += 1
            error = run.evaluate(lambda batch: (float((model(batch[0]) - batch[1]).square().sum()), len(batch[0])),
                                 samples, size=40)
            run.state["epochs"] += 1
            print("epoch", epoch, run.state["epochs"], flush=True)
        weights = sum(float(p.detach().abs().sum()) for p in model.parameters())
        print("end", run.state, repr(error), repr(weights), flush=True)
        run.save("model.safetensors")
"""


def pids(run: Running, workers: int) -> list[int]:
    """Of the workers, as they start."""
    return [int(run.until("pid ").rpartition(" ")[2]) for _ in range(workers)]


def started(run: Running) -> list[int]:
    """All processes that have called themselves a worker so far."""
    return [int(line.rpartition(" ")[2]) for line in run.lines if "] pid " in line]


def kept(directory: Path) -> list[Path]:
    """The checkpoints on disk, oldest first."""
    return sorted(path.parent for path in (directory / "kept" / "job").glob("*/manifest.json"))


def ends(run: Running) -> set[str]:
    """What the workers ended with; without their names all lines are to be equal."""
    return {line.partition("] ")[2] for line in run.lines if "] end {" in line}


def test_a_run_outlives_all_of_its_workers_and_its_launcher(launch: Launcher) -> None:
    first = launch(SCRIPT, workers=3)
    workers = pids(first, 3)
    first.until("epoch 1 2")
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert "nobody is left who holds the model's state; the run goes on from its last checkpoint" in first.until(
        "nobody"
    )
    first.until("going on from checkpoint")
    # That of the second life: the one before may have printed it, too.
    first.until("epoch 4 5")
    living = [pid for pid in started(first) if pid not in workers]
    first.process.kill()
    for pid in living:
        gone(pid)
    names = [record.name for record in records(first) if isinstance(record, journal.CheckpointRecord)]
    newest = launch.directory / "kept" / "job" / names[-1] / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)

    second = launch.command("run", "-n", "2", "--dir", "job", "--resume", "train.py")
    assert second.wait() == 0, second.output
    assert f"{names[-1]} are damaged; going on from the one before it" in second.output
    assert len(ends(second)) == 1, second.output
    assert "'epochs': 9" in next(iter(ends(second)))
    written = records(second)
    rewinds = [record for record in written if isinstance(record, journal.RewindRecord)]
    assert len(rewinds) == 2 and rewinds[1].name == names[-2]
    report = audit(written)
    assert report.problems == [] and report.summary["completed"] and report.summary["samples"] == 9 * 240
    assert len(kept(launch.directory)) <= 4, "older ones are removed"
    assert (launch.directory / "model.safetensors").exists()

    third = launch.command("run", "-n", "2", "--dir", "job", "--resume", "train.py")
    assert third.wait() != 0
    assert "has come to its end; there is nothing to go on with" in third.output


def test_there_is_nothing_to_go_on_from(launch: Launcher) -> None:
    run = launch(SCRIPT.replace('checkpoint="kept", checkpoint_every=0.2, ', ""), workers=1)
    (worker,) = pids(run, 1)
    run.until("epoch 0 1")
    run.process.kill()
    gone(worker)
    again = launch.command("run", "--dir", "job", "--resume", "train.py")
    assert again.wait() != 0
    assert "has no checkpoint to go on from" in again.output
    unnamed = launch.command("run", "--resume", "train.py")
    assert unnamed.wait() != 0
    assert "give the run's directory with --dir" in unnamed.output
