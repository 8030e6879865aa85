"""Scripts that follow every update, as real processes: averages, evaluations, deaths, newcomers, replay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from running import QUICK, Launcher, records, searched

from pliant.core.journal.records import PhaseRecord, RoundRecord

pytestmark = pytest.mark.slow

PRELUDE = (
    QUICK
    + """
import hashlib, json, os, signal, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
import pliant

torch.manual_seed(int(os.environ.get("PLIANT_WORKER", "w0")[1:]))  # everybody starts elsewhere: the leader counts
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
generator = torch.Generator().manual_seed(5)
samples = TensorDataset(torch.randn(200, 6, generator=generator), torch.randint(0, 3, (200,), generator=generator))
tested = TensorDataset(samples.tensors[0][:20], samples.tensors[1][:20])
SLOT = os.environ.get("PLIANT_WORKER", "")

def digest():
    tensors = [*ema.parameters(), *ema.buffers()]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]

def correct(batch):
    x, y = batch
    return (model(x).argmax(1) == y).sum(), len(y)

def train(run, size=8):
    for x, y in run.batches(samples, size):
        # BatchNorm refuses to normalise one sample by itself.
        model.train(len(x) > 1)
        run.backward(F.cross_entropy(model(x), y))
        run.step()
    model.train()
"""
)


@pytest.mark.parametrize("delay", [1, "auto", *searched(0)])
def test_an_average_is_the_same_everywhere_and_in_the_replay(launch: Launcher, delay: Any) -> None:
    run = launch(
        f"""
        state = {{"ema": ema, "updates": 0, "best": 0.0}}
        followed = []
        with pliant.join(model, optimizer, batch=24, delay={delay!r}, state=state) as run:
            @run.on_update
            def follow(update):
                ema.update_parameters(model)
                state["updates"] += 1
                assert state["updates"] == update.updates == run.updates
                if update.updates == 6:
                    run.clip_norm = 0.25
                if update.updates % 5 == 0 or update.ends_epoch:
                    state["best"] = max(state["best"], run.evaluate(correct, tested, size=4))
                followed.append([update.updates, digest(), update.ends_epoch, update.grad_norm > 0])
            for epoch in run.epochs(steps=20):
                train(run)
            print("ended", json.dumps([digest(), state["updates"], state["best"], run.updates]), flush=True)
        if not SLOT:
            Path("followed.json").write_text(json.dumps(followed))
        """,
        workers=3,
        options=("--pace", "1,1,0.5"),
    )
    assert run.wait() == 0, run.output
    ends = [json.loads(line.partition("ended ")[2]) for line in run.lines if "ended [" in line]
    assert len(ends) == 3 and ends[0] == ends[1] == ends[2]
    assert ends[0][1] == ends[0][3] == 20
    lines = records(run)
    rounds = [record for record in lines if isinstance(record, RoundRecord)]
    assert sum(record.applied for record in rounds) == 20
    assert rounds[-1].clip_norm == 0.25
    assert sum(isinstance(record, PhaseRecord) and record.task == "evaluate" for record in lines) == 6
    audit = launch.command("audit", "job/journal.jsonl")
    assert audit.wait() == 0, audit.output
    replay = launch.command("replay", "job/journal.jsonl", "train.py")
    assert replay.wait() == 0, replay.output
    followed = json.loads((launch.directory / "followed.json").read_text())
    assert [update[0] for update in followed] == list(range(1, 21))
    assert [update[0] for update in followed if update[2]] == [9, 18, 20]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_worker_that_dies_in_an_evaluation_and_its_successor(launch: Launcher, delay: int) -> None:
    """The successor's average is that of the others: it came with the state."""
    run = launch(
        f"""
        state = {{"ema": ema, "updates": 0}}

        def measure(batch):
            if SLOT == "w1" and run.updates >= 4 and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return correct(batch)

        def is_over(batch):
            return float(Path("followed-w1.2").exists()) * len(batch[0]), len(batch[0])

        with pliant.join(model, optimizer, batch=24, delay={delay}, state=state, dead_after=2.0) as run:
            @run.on_update
            def follow(update):
                ema.update_parameters(model)
                state["updates"] += 1
                assert state["updates"] == update.updates, (state["updates"], update)
                run.evaluate(measure, tested, size=4)
                Path(f"followed-{{run.worker}}").touch()
            @run.on_roster
            def look(before, now):
                print("roster", len(before), len(now), flush=True)
            for epoch in run.epochs(200):
                train(run)
                if run.evaluate(is_over, tested, size=4) == 1.0:
                    break
            print("ended", json.dumps([digest(), state["updates"], run.updates]), flush=True)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    ends = [json.loads(line.partition("ended ")[2]) for line in run.lines if "ended [" in line]
    assert len(ends) == 3 and ends[0] == ends[1] == ends[2]
    assert ends[0][1] == ends[0][2]
    assert any("roster 3 2" in line for line in run.lines)
    assert any("roster 2 3" in line for line in run.lines)
    audit = launch.command("audit", "job/journal.jsonl")
    assert audit.wait() == 0, audit.output


def test_spares_and_a_leaver_take_part_in_evaluations(launch: Launcher) -> None:
    """A batch of two for four workers, one of which goes in the middle."""
    run = launch(
        """
        with pliant.join(model, optimizer, batch=2, delay=1, state={"updates": 0}) as run:
            @run.on_update
            def follow(update):
                run.state["updates"] += 1
                assert run.state["updates"] == update.updates
                if update.updates % 7 == 0:
                    run.evaluate(correct, tested, size=4)
                if update.updates == 40 and SLOT == "w0":
                    run.leave()
            train(run, 1)
            print("ended", run.updates, run.state["updates"], flush=True)
        """,
        workers=4,
    )
    assert run.wait() == 0, run.output
    # What a leaver gives back may make a round more.
    counts = [line.partition("ended ")[2].split() for line in run.lines if "ended " in line]
    assert len(counts) == 3 and int(counts[0][0]) >= 100, run.output
    assert len({number for pair in counts for number in pair}) == 1, run.output


def test_a_worker_that_is_late_does_not_run_the_code_after_the_loop(launch: Launcher) -> None:
    """It was still taking the state over when the run ended: its weights are not the outcome."""
    run = launch(
        """
        if Path("killed").exists() and SLOT == "w1":
            from pliant.worker.elastic.catch_up import CatchUp
            def never(self, exchange):
                Path("taking-over").touch()
            CatchUp.pursue = never

        def is_over(batch):
            return float(Path("taking-over").exists()) * len(batch[0]), len(batch[0])

        with pliant.join(model, optimizer, batch=24, dead_after=2.0) as run:
            for epoch in run.epochs(1000):
                for x, y in run.batches(samples, 8):
                    model.train(len(x) > 1)
                    run.backward(F.cross_entropy(model(x), y))
                    if run.step() and run.round > 5 and SLOT == "w1" and not Path("killed").exists():
                        Path("killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                if run.evaluate(is_over, tested, size=4) == 1.0:
                    break
            print("after", run.worker, run.round, run.samples, flush=True)
        """,
        workers=2,
    )
    assert run.wait() == 0, run.output
    after = [line for line in run.lines if "after " in line]
    assert len(after) == 1 and "after w0" in after[0], run.output


def test_one_worker_is_first_before_join(launch: Launcher) -> None:
    run = launch(
        """
        print("first" if pliant.is_first() else "second", flush=True)
        with pliant.join(model, optimizer, batch=24) as run:
            train(run)
        """,
        workers=3,
    )
    assert run.wait() == 0, run.output
    assert sum("first" in line for line in run.lines) == 1
    assert sum("second" in line for line in run.lines) == 2
