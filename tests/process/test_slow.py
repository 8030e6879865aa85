"""Slow is not hung, as real processes: long saves, long first steps, pauses of all at once, and a real deadlock."""

from __future__ import annotations

import json

import pytest
from running import QUICK, Launcher, records
from safetensors import safe_open

from pliant.core.journal import EraRecord

pytestmark = pytest.mark.slow

PRELUDE = (
    QUICK
    + """
import itertools, json, os, signal, sys, threading, time, warnings
from pathlib import Path
warnings.simplefilter("error")
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import pliant

model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
generator = torch.Generator().manual_seed(5)
samples = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
SLOT, PID = os.environ.get("PLIANT_WORKER", ""), os.getpid()

def once(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def until(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)

def all_see(run, name):
    # The same answer on all, whoever looks.
    return run.evaluate(lambda _: (float(Path(name).exists()), 1), TensorDataset(torch.zeros(1)), size=1) > 0

def step(run, x, y):
    time.sleep(0.01)
    run.backward(F.cross_entropy(model(x), y))
    return run.step()
"""
)


def audited(launch: Launcher) -> None:
    audit = launch.command("audit", "job/journal.jsonl")
    assert audit.wait() == 0, audit.output


@pytest.mark.parametrize("word", [True, False], ids=["busy", "without a word"])
def test_the_others_go_on_while_the_leader_saves(launch: Launcher, word: bool) -> None:
    """The save ends only when the others have made updates without it, and have saved themselves."""
    run = launch(
        f"""
        def save(run):
            until("later")
            run.save("model.safetensors")

        with pliant.join(model, optimizer, batch=16, dead_after=3.0) as run:
            for epoch in itertools.count():
                for x, y in run.batches(samples, 2):
                    if step(run, x, y) and run.is_leader and run.updates >= 3 and SLOT == "w0" and once("saving"):
                        Path("round").write_text(str(run.round))
                        if {word}:
                            with run.busy("uploading", 60.0):
                                save(run)
                        else:
                            save(run)
                        Path("saved").write_text(str(run.round))
                    if Path("round").exists() and run.is_leader and SLOT != "w0":
                        if run.round >= int(Path("round").read_text()) + 5 and once("written"):
                            run.save("model.safetensors")
                            Path("later").touch()
                    if SLOT == "w0" and run.worker != "w0":
                        Path("back").touch()
                if all_see(run, "back"):
                    break
            print("ended", SLOT, PID, run.round, flush=True)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    why = "(uploading)" if word else "while others wait)"
    assert any("w0 is left out" in line and why in line for line in run.lines), run.output
    assert not any("killed" in line or "was lost" in line for line in run.lines), run.output
    assert sum("ended w" in line for line in run.lines) == 3
    # Its own round was named, and what the next leader had written since is still there.
    assert any("holds a later round already" in line for line in run.lines), run.output
    first = int((launch.directory / "round").read_text())
    assert int((launch.directory / "saved").read_text()) == first
    with safe_open(str(launch.directory / "model.safetensors"), framework="pt") as file:
        assert int(file.metadata()["round"]) >= first + 5
    audited(launch)


def test_the_only_holder_is_waited_for(launch: Launcher) -> None:
    """A newcomer that holds nothing has nobody killed, however long it waits."""
    run = launch(
        """
        with pliant.join(model, optimizer, batch=8, dead_after=4.0, hung_after=4.0) as run:
            for epoch in itertools.count():
                for x, y in run.batches(samples, 4):
                    if step(run, x, y) and SLOT == "w0" and run.updates >= 3 and once("saving"):
                        print("saving now", flush=True)
                        until("welcomed")
                        time.sleep(6.0)
                    if len(run.roster) == 2 and run.batch == 8 and SLOT == "w1":
                        Path("done").touch()
                if all_see(run, "done"):
                    break
            print("ended", SLOT, PID, flush=True)
        """,
        workers=1,
    )
    run.until("saving now")
    scaled = launch.command("scale", "2", "--dir", "job")
    assert scaled.wait() == 0, scaled.output
    (launch.directory / "welcomed").touch()
    assert run.wait() == 0, run.output
    assert not any("lost" in line or "left out" in line or "killed" in line for line in run.lines), run.output
    assert [record.roster for record in records(run) if isinstance(record, EraRecord)] == [["w0"], ["w0", "w1"]]


def test_a_pause_of_all_at_once_and_long_first_steps(launch: Launcher) -> None:
    """Compilation, autotuning, an upload on every worker: who is done first waits for the others."""
    run = launch(
        """
        with pliant.join(model, optimizer, batch=16, dead_after=3.0, delay=1) as run:
            for epoch in run.epochs(1):
                for number, (x, y) in enumerate(run.batches(samples, 4)):
                    if number == 0:
                        time.sleep(4.0 * int(SLOT[1:]))
                    step(run, x, y)
                time.sleep(3.5)
            print("ended", SLOT, PID, flush=True)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    assert not any("lost" in line or "left out" in line or "killed" in line for line in run.lines), run.output
    assert len([record for record in records(run) if isinstance(record, EraRecord)]) == 1


def test_a_deadlock_is_left_out_and_killed_in_the_end(launch: Launcher) -> None:
    run = launch(
        """
        with pliant.join(model, optimizer, batch=16, dead_after=3.0, hung_after=8.0) as run:
            for epoch in itertools.count():
                for x, y in run.batches(samples, 2):
                    step(run, x, y)
                    if SLOT == "w1" and run.updates >= 4 and once("hung"):
                        Path("round").write_text(str(run.round))
                        lock = threading.Lock()
                        lock.acquire()
                        lock.acquire()
                    if SLOT == "w0" and len(run.roster) == 2 and Path("hung").exists():
                        Path("without").touch()
                    if SLOT == "w1" and Path("without").exists() and run.worker != "w1":
                        Path("again").touch()
                if all_see(run, "again"):
                    break
            print("ended", json.dumps([SLOT, PID]), flush=True)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    assert any("w1 is left out (no progress for" in line for line in run.lines), run.output
    assert len({json.loads(line.partition("ended ")[2])[1] for line in run.lines if "ended [" in line}) == 3
    audited(launch)


def test_a_save_at_the_end_is_waited_for(launch: Launcher) -> None:
    """The others have nothing left to compute; and one that was left out before finishes what it is doing."""
    run = launch(
        """
        with pliant.join(model, optimizer, batch=16, dead_after=3.0) as run:
            for epoch in run.epochs(3):
                for x, y in run.batches(samples, 2):
                    step(run, x, y)
                    if SLOT == "w2" and run.updates >= 2 and once("away"):
                        with run.busy("uploading", 60.0):
                            until("finishing")
                            # Beyond every grace that a process is given when it is not needed any more.
                            time.sleep(12.0)
                            Path("uploaded").touch()
            if run.is_leader:
                Path("finishing").touch()
                with run.busy("saving"):
                    time.sleep(3.0)
                run.save("model.safetensors")
            print("ended", SLOT, flush=True)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    assert (launch.directory / "uploaded").exists(), run.output
    assert (launch.directory / "model.safetensors").exists()
    assert sum("is left out" in line for line in run.lines) == 1, run.output
    audited(launch)
