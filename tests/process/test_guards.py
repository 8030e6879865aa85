"""What scripts do every day and what no worker may do by itself, with real processes: told at once, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import QUICK, Launcher, Running, records

from pliant.core.journal.records import EndRecord, RoundRecord

pytestmark = pytest.mark.slow

PRELUDE = (
    QUICK
    + """
import os, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
import pliant

me = os.environ.get("PLIANT_WORKER", "alone")
torch.manual_seed(3)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(400, 6))

def loop(run, data=data, after=int, **options):
    for (x,) in run.batches(data, size=4, **options):
        run.backward(model(x).square().mean())
        run.step()
        after()
"""
)


def ends_in_one_line(run: Running, said: str) -> None:
    """The run ended with status 1; Pliant said why, once, and nobody printed a traceback."""
    assert run.wait() == 1, run.output
    assert "Traceback" not in run.output, run.output
    lines = [line for line in run.lines if said in line]
    assert len(lines) == 1 and lines[0].startswith("pliant: "), run.output
    last = records(run)[-1]
    assert isinstance(last, EndRecord) and not last.completed and said in last.reason


REFUSED = {
    "GAN": (
        """
        other = nn.Linear(6, 1)
        second = torch.optim.Adam(other.parameters())
        with pliant.join(model, optimizer, batch=16) as run:
            loop(run, after=second.step)
        """,
        "failed: a second optimizer (Adam) goes on from micro-batch to micro-batch",
    ),
    "Muon and AdamW": (
        """
        optimizer = torch.optim.SGD([model.weight], lr=0.01)
        second = torch.optim.AdamW([model.bias])
        with pliant.join(model, optimizer, batch=16) as run:
            loop(run, after=second.step)
        """,
        "failed: another optimizer (AdamW) changes parameters of the run",
    ),
    "scheduler.step()": (
        """
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        with pliant.join(model, optimizer, batch=16, scheduler=scheduler) as run:
            loop(run, after=scheduler.step)
        """,
        "failed: scheduler.step() was called by the script: remove it from the loop",
    ),
    "scheduler.step() of another scheduler": (
        """
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        with pliant.join(model, optimizer, batch=16) as run:
            for epoch in run.epochs(3):
                loop(run)
                scheduler.step()
        """,
        "failed: the learning rate was moved by a scheduler that join does not know of",
    ),
    "zip": (
        """
        with pliant.join(model, optimizer, batch=16) as run:
            for (x,), _ in zip(run.batches(data, size=4), run.batches(data, size=4)):
                run.backward(model(x).square().mean())
                run.step()
        """,
        "failed: batches was called while another loop over batches is open",
    ),
    "Accelerate": (
        """
        class AcceleratedOptimizer(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer
        with pliant.join(model, AcceleratedOptimizer(optimizer), batch=16) as run:
            loop(run)
        """,
        "failed: the optimizer is wrapped in AcceleratedOptimizer (Accelerate, Fabric)",
    ),
}


@pytest.mark.parametrize("habit", REFUSED)
def test_what_is_refused(launch: Launcher, habit: str) -> None:
    script, said = REFUSED[habit]
    ends_in_one_line(launch(script), said)


CHECKPOINTS = """
    where = Path(me if {apart} else "together").absolute()
    where.mkdir(exist_ok=True)
    os.chdir(where)
    with pliant.join(model, optimizer, batch=16, checkpoint="saved", checkpoint_every=0.01) as run:
        os.chdir("/")
        for epoch in run.epochs(3):
            loop(run)
        os.chdir(where)
"""


def test_a_relative_checkpoint_in_a_directory_per_process(launch: Launcher) -> None:
    run = launch(CHECKPOINTS.format(apart=True))
    ends_in_one_line(run, "settings differ: checkpoint is ")
    (said,) = [line for line in run.lines if "settings differ" in line]
    assert f"{run.directory}/w0/saved on w0" in said and f"{run.directory}/w1/saved on w1" in said
    assert "call pliant.join with the same arguments on every worker" in said


def test_a_relative_checkpoint_is_where_the_script_was_at_join(launch: Launcher) -> None:
    run = launch(CHECKPOINTS.format(apart=False))
    assert run.wait() == 0, run.output
    assert list((run.directory / "together" / "saved").rglob("manifest.json")), run.output


BAD_SAMPLE = """
    class Corrupt(Dataset):
        def __len__(self):
            return 400
        def __getitem__(self, index):
            if index == 137:
                raise ValueError("sample is corrupt")
            return (torch.ones(6),)

    {before}
        for epoch in run.epochs(3):
            loop(run, Corrupt(), num_workers={loaders})
"""


@pytest.mark.parametrize(
    ("loaders", "block"), [(0, False), (2, True)], ids=["without with", "with, in loader processes"]
)
def test_one_bad_sample_ends_the_run_once(launch: Launcher, loaders: int, block: bool) -> None:
    join = "pliant.join(model, optimizer, batch=16)"
    before = f"with {join} as run:" if block else f"run = {join}\n    if True:"
    run = launch(BAD_SAMPLE.format(before=before, loaders=loaders))
    assert run.wait() == 1, run.output
    assert sum('raise ValueError("sample is corrupt")' in line for line in run.lines) == 1, run.output
    (note,) = [line for line in run.lines if " was reading position " in line]
    assert "of epoch 0, dataset index 137" in note, run.output
    (said,) = [line for line in run.lines if line.startswith("pliant: ") and " could not read position " in line]
    assert said.endswith("of epoch 0, dataset index 137: ValueError: sample is corrupt"), said
    assert "go on" not in run.output and "joined" not in run.output, run.output
    last = records(run)[-1]
    assert isinstance(last, EndRecord) and not last.completed


def test_trouble_of_one_machine_is_not_the_samples(launch: Launcher) -> None:
    """Its memory, disk or network: the others go on, and it is started again."""
    run = launch(
        """
        class Flaky(Dataset):
            def __len__(self):
                return 400
            def __getitem__(self, index):
                if me == "w1" and index > 40 and not Path("raised").exists():
                    Path("raised").touch()
                    raise ConnectionResetError("the store is gone")
                return (torch.ones(6),)

        with pliant.join(model, optimizer, batch=16) as run:
            for epoch in run.epochs(3):
                loop(run, Flaky())
        """
    )
    assert run.wait() == 0, run.output
    assert "pliant: w1 failed (ConnectionResetError: the store is gone): w0 goes on" in run.lines, run.output
    assert sum(record.batch for record in records(run) if isinstance(record, RoundRecord)) >= 1200


@pytest.mark.parametrize("delay", [0, 1])
def test_weights_that_differ_from_the_start_are_found_at_once(launch: Launcher, delay: int) -> None:
    """The optimizer's own hook, on one worker only: told after a few rounds, and healed."""
    run = launch(
        f"""
        with pliant.join(model, optimizer, batch=16, delay={delay}) as run:
            done = []
            def once(*_):
                if me == "w1" and not done:
                    done.append(1)
                    with torch.no_grad():
                        model.weight[0, 0] += 1.0
            optimizer.register_step_post_hook(once)
            for epoch in run.epochs(2):
                loop(run)
        """
    )
    assert run.wait() == 0, run.output
    (said,) = [line for line in run.lines if "weights differed" in line]
    assert "w1's weights differed from the others' after round 1: it takes them over from w0" in said
    drifted = [record for record in records(run) if isinstance(record, RoundRecord) and record.drift is not None]
    assert [record.round <= 4 for record in drifted] == [True]
    audit = launch.command("audit", "job")
    assert audit.wait() == 0, audit.output


# -- a script without join

PLAIN = """
    print(me, "trains alone")
    while not Path("enough").exists():
        for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""


def test_a_script_that_does_not_join_is_told_of_while_it_runs(launch: Launcher) -> None:
    (launch.directory / "train.py").write_text(launch.prelude + "\nif True:\n" + PLAIN)
    soon = "import pliant.launch.launcher as agent; agent.JOIN_S = 1.0; from pliant.ui.cli import main; main()"
    run = launch.python("-W", "error", "-c", soon, "run", "-n", "2", "--dir", "job", "train.py")
    said = run.until("without calling pliant.join")
    assert said.startswith("pliant: w") and " run for 1 s without" in said, said
    assert "if train.py trains already, each worker does so for itself; wrap its loop in `with pliant.join(" in said
    Path(run.directory / "enough").touch()
    assert run.wait() == 1, run.output
    assert sum("without calling pliant.join" in line for line in run.lines) == 1, run.output


def test_who_has_joined_is_not_reminded(launch: Launcher) -> None:
    (launch.directory / "train.py").write_text(
        launch.prelude
        + """
with pliant.join(model, optimizer, batch=16) as run:
    print(me, "has joined")
    for epoch in run.epochs(1_000_000):
        loop(run)
        if run.evaluate(lambda batch: (float(Path("enough").exists()), 1), [0], size=1):
            break
"""
    )
    # What is a minute else is over for a worker that has joined when the screen shows the first rounds.
    soon = (
        "import pliant.launch.launcher as agent; agent.JOIN_S = 60.0\n"
        "def received(self, message, old=agent.Launcher.received):\n"
        "    old(self, message)\n"
        "    agent.JOIN_S = 0.0 if self.status.rounds else 60.0\n"
        "agent.Launcher.received = received\n"
        "from pliant.ui.cli import main; main()"
    )
    run = launch.python("-W", "error", "-c", soon, "run", "-n", "2", "--dir", "job", "train.py")
    run.until("samples/s", times=2)
    Path(run.directory / "enough").touch()
    assert run.wait() == 0, run.output
    assert "without calling" not in run.output


@pytest.mark.parametrize("delay", [1, "auto"])
def test_two_losses_at_one_update(launch: Launcher, delay: object) -> None:
    """Training and validation loss, one after the other, where ``step`` has returned True."""
    run = launch(
        f"""
        def loss(batch):
            (x,) = batch
            return model(x).square().mean(1).sum(), len(x)

        found = []
        with pliant.join(model, optimizer, batch=16, delay={delay!r}) as run:
            for (x,) in run.batches(data, size=4):
                run.backward(model(x).square().mean())
                if run.step() and run.round % 2 == 0:
                    found.append([run.evaluate(loss, data, size=30), run.evaluate(loss, data, size=40)])
            assert found and all(abs(first - second) < 1e-5 for first, second in found), found
        """
    )
    assert run.wait() == 0, run.output
