"""Slow is not hung, as real processes: long saves, long first steps, pauses of all at once, and a real deadlock."""

from __future__ import annotations

import json

import pytest
from running import QUICK, Launcher, records
from safetensors import safe_open

from pliant.core.journal.records import EraRecord, RoundRecord

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


def state_of(launch: Launcher, worker: str) -> str:
    """What the coordinator says that this worker is doing; empty: it does not know it yet."""
    asked = launch.command("status", "--json", "--dir", "job")
    assert asked.wait() == 0, asked.output
    told = json.loads(asked.output)["workers"]
    return next((each["state"] for each in told if each["name"] == worker), "")


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


def test_the_leader_saves_in_what_follows_an_update(launch: Launcher) -> None:
    """The others wait at the ``evaluate`` after the save; the leader comes to it when they are far beyond it."""
    run = launch(
        """
        state = {"updates": 0}
        with pliant.join(model, optimizer, batch=16, dead_after=3.0, state=state) as run:

            @run.on_update
            def follow(update):
                state["updates"] += 1
                assert state["updates"] == update.updates, (SLOT, state, update)
                if SLOT == "w0" and run.is_leader and update.updates == 6:
                    with run.busy("saving it all", 60.0):
                        until("later")
                    run.save("model.safetensors")
                if SLOT != "w0" and run.is_leader and update.updates == 12:
                    Path("later").touch()
                if update.updates % 3 == 0:
                    assert run.evaluate(lambda batch: (float(batch[0].sum()), len(batch[0])), eights, size=2) == 1.0

            eights = TensorDataset(torch.ones(8))
            for epoch in itertools.count():
                for x, y in run.batches(samples, 2):
                    step(run, x, y)
                    if SLOT == "w0" and run.worker != "w0":
                        Path("back").touch()
                if all_see(run, "back"):
                    break
            print("ended", json.dumps([SLOT, PID, state["updates"], run.updates]), flush=True)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    assert any("w0 is left out (saving it all)" in line for line in run.lines), run.output
    assert sum("is left out" in line for line in run.lines) == 1, run.output
    assert not any("killed" in line or "was lost" in line for line in run.lines), run.output
    made = [record for record in records(run) if isinstance(record, RoundRecord) and record.applied]
    ends = [json.loads(line.partition("ended ")[2]) for line in run.lines if "ended [" in line]
    assert sorted(slot for slot, *_ in ends) == ["w0", "w1", "w2"]
    assert {tuple(counts) for _, _, *counts in ends} == {(len(made), len(made))}
    with safe_open(str(launch.directory / "model.safetensors"), framework="pt") as file:
        assert int(file.metadata()["round"]) == made[5].round
    audited(launch)


@pytest.mark.parametrize("overtaken", [False, True], ids=["alone", "overtaken"])
def test_a_save_that_itself_takes_long(launch: Launcher, overtaken: bool) -> None:
    """What it writes is whole and of its own round, while the others are beyond that; the later round stays."""
    run = launch(
        f"""
        from safetensors.torch import load_file, save_file
        from pliant.tensors import weights

        def slow_disk(tensors, *arguments, **options):
            until("later")
            save_file(tensors, *arguments, **options)

        def save(run, name):
            shown = {{name: tensor.clone() for name, tensor in model.state_dict().items()}}
            Path(name).write_text(str(run.round))
            run.save("model.safetensors")
            return shown

        def same(shown):
            found = load_file("model.safetensors")
            return shown.keys() == found.keys() and all(torch.equal(found[name], shown[name]) for name in shown)

        with pliant.join(model, optimizer, batch=16, dead_after=3.0) as run:
            for epoch in itertools.count():
                for x, y in run.batches(samples, 2):
                    updated = step(run, x, y)
                    if updated and SLOT == "w0" and run.is_leader and run.updates >= 3 and once("saving"):
                        weights.save_file = slow_disk
                        shown = save(run, "first")
                        Path("saved").write_text(str(same(shown)))
                    if updated and SLOT != "w0" and run.is_leader and Path("first").exists():
                        first = Path("first").read_text()
                        if first and run.round >= int(first) + 5 and once("beyond"):
                            if {overtaken}:
                                Path("saved later").write_text(str(same(save(run, "second"))))
                            Path("later").touch()
                    if Path("saved").exists() and SLOT == "w0" and run.worker != "w0":
                        Path("back").touch()
                if all_see(run, "back"):
                    break
            print("ended", SLOT, PID, flush=True)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    assert any("w0 is left out (saving model.safetensors)" in line for line in run.lines), run.output
    assert not any("killed" in line or "was lost" in line for line in run.lines), run.output
    assert any("holds a later round already" in line for line in run.lines) is overtaken
    with safe_open(str(launch.directory / "model.safetensors"), framework="pt") as file:
        named = (launch.directory / ("second" if overtaken else "first")).read_text()
        assert file.metadata()["round"] == named
    assert (launch.directory / "saved").read_text() == str(not overtaken)
    assert not overtaken or (launch.directory / "saved later").read_text() == "True"
    assert not list(launch.directory.glob(".model.safetensors.*")), "a part was left behind"
    audited(launch)


def test_the_only_holder_is_waited_for(launch: Launcher) -> None:
    """A newcomer that holds nothing has nobody killed, however long it waits."""
    run = launch(
        """
        if SLOT == "w1":
            Path("joining").touch()
        with pliant.join(model, optimizer, batch=8, dead_after=4.0, hung_after=4.0) as run:
            for epoch in itertools.count():
                for x, y in run.batches(samples, 4):
                    if step(run, x, y) and SLOT == "w0" and run.updates >= 3 and once("saving"):
                        print("saving now", flush=True)
                        # Twice as long as either limit, from when the newcomer is known to wait.
                        until("joining", "arrived")
                        time.sleep(8.0)
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
    # From its plan on it is a member, and waits for the only one that could begin the new era.
    while state_of(launch, "w1") != "training":
        assert run.process.poll() is None
    (launch.directory / "arrived").touch()
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


def test_all_are_in_their_own_code_in_mid_loop(launch: Launcher) -> None:
    """Who comes back first has only just begun to wait, however long the others have been away: see each limit."""
    run = launch(
        """
        with pliant.join(model, optimizer, batch=16, dead_after=10.0) as run:
            # The second epoch has four updates, too: by its second one a usual step is known.
            for epoch in run.epochs(3):
                for x, y in run.batches(samples, 2):
                    step(run, x, y)
                    if run.updates >= 6 and once("away " + SLOT):
                        until(*(f"away w{number}" for number in range(4)))
                        time.sleep(14.0 + 0.5 * int(SLOT[1:]))
                        print("back", SLOT, PID, run.updates, flush=True)
            print("ended", SLOT, PID, run.updates, flush=True)
        """,
        workers=4,
    )
    assert run.wait() == 0, run.output
    assert not any("lost" in line or "left out" in line or "killed" in line for line in run.lines), run.output
    back, ended = (
        {tuple(line.partition(f"{word} w")[2].split()[:2]) for line in run.lines if f"{word} w" in line}
        for word in ("back", "ended")
    )
    assert len(back) == 4, run.output
    assert back == ended
    # In the middle of that epoch.
    assert all(int(line.split()[-1]) in (6, 7) for line in run.lines if "back w" in line), run.output
    assert len([record for record in records(run) if isinstance(record, EraRecord)]) == 1
    audited(launch)


def test_a_deadlock_is_left_out_and_killed_in_the_end(launch: Launcher) -> None:
    """When, by clocks of the run: the coordinator's in what it says, and the one that all processes share."""
    run = launch(
        """
        def note(name):
            if once(name + " at"):
                Path(name + " at").write_text(str(time.monotonic()))
                Path(name).touch()

        if SLOT == "w1" and Path("hung").exists():
            note("started")
        with pliant.join(model, optimizer, batch=16, dead_after=3.0, hung_after=30.0) as run:
            for epoch in itertools.count():
                for x, y in run.batches(samples, 2):
                    updated = step(run, x, y)
                    if SLOT == "w1" and run.updates >= 4 and not Path("hung").exists():
                        note("hung")
                        lock = threading.Lock()
                        lock.acquire()
                        lock.acquire()
                    if updated and SLOT == "w0" and len(run.roster) == 2 and Path("hung").exists():
                        note("without")
                    if SLOT == "w1" and Path("without").exists() and run.worker != "w1":
                        Path("again").touch()
                if all_see(run, "again"):
                    break
            print("ended", json.dumps([SLOT, PID]), flush=True)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    said = next(line for line in run.lines if "w1 is left out (no progress for" in line)
    assert 3.0 <= float(said.partition("no progress for ")[2].split()[0]) < 30.0, said
    assert len({json.loads(line.partition("ended ")[2])[1] for line in run.lines if "ended [" in line}) == 3
    hung, without, started = (
        float((launch.directory / f"{name} at").read_text()) for name in ("hung", "without", "started")
    )
    # The others went on before the process was killed, however slow the machine, and that was not before hung_after.
    assert without - hung < 30.0
    assert started - hung >= 30.0
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
