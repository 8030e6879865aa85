"""float16 and bfloat16 with a GradScaler, as real processes: alone, with spares, newcomers, deaths and checkpoints."""

from __future__ import annotations

import signal
import textwrap

import pytest
from running import QUICK, Launcher, Running, records, searched

from pliant.core.journal.audit import audit
from pliant.core.journal.records import RoundRecord

pytestmark = pytest.mark.slow

PRELUDE = QUICK

SCRIPT = """
    import json, os, signal, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    import pliant

    scene = json.loads(sys.argv[1])
    torch.manual_seed(0)
    inputs = torch.randn(96, 4)
    samples = [(inputs[i], inputs[i].sum()[None]) for i in range(96)]
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=4)
    settings = {"batch": 8, "dead_after": 3.0, **scene.get("join", {})}
    kind = getattr(torch, scene.get("dtype", "float16"))

    def error(batch):
        with torch.autocast("cpu", dtype=kind):
            return float((model(batch[0]) - batch[1]).float().square().sum()), len(batch[0])

    drew = set()

    def enough(batch):
        return float(all(Path(name).exists() for name in scene.get("until", []))), 1

    def die_once(name):
        if not Path(name).exists():
            Path(name).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with pliant.join(model, optimizer, scaler=scaler, **settings) as run:
        for epoch in run.epochs(1000):
            for x, y in run.batches(samples, size=scene.get("size", 4)):
                time.sleep(scene.get("sleep_s", 0.0))
                if run.worker not in drew:
                    drew.add(run.worker)
                    print("drew", run.worker, flush=True)
                if scene.get("dies") == run.worker and epoch == 2:
                    die_once("died")
                with torch.autocast("cpu", dtype=kind):
                    loss = nn.functional.mse_loss(model(x).float(), y)
                run.backward(loss)
                if run.step():
                    print("updated", scaler.get_scale(), flush=True)
            loss = run.evaluate(error, samples, size=16)
            print("epoch", epoch, run.worker, flush=True)
            if epoch >= 5 and run.evaluate(enough, [0], size=1):
                break
        weights = sum(float(p.detach().abs().sum()) for p in model.parameters())
        print("end", scaler.state_dict(), repr(loss), repr(weights), flush=True)
"""


def ends(run: Running) -> list[str]:
    """What the workers ended with, without their names."""
    return [line.rpartition("end {")[2] for line in run.lines if "end {" in line]


def all_alike(run: Running, workers: int) -> None:
    assert run.wait() == 0, run.output
    assert len(ends(run)) == workers and len(set(ends(run))) == 1, run.output
    assert audit(records(run)).problems == []
    rounds = [record for record in records(run) if isinstance(record, RoundRecord)]
    for record in rounds:
        assert len({ticket.scale for ticket in record.tickets if ticket.samples}) <= 1, "a round has one scale"
    assert len({ticket.scale for record in rounds for ticket in record.tickets}) > 2, "it moved"


def alone(launch: Launcher, script: str, argument: str) -> Running:
    """The script without a launcher, to its end."""
    (launch.directory / "train.py").write_text(PRELUDE + textwrap.dedent(script))
    run = launch.python("-W", "error", "train.py", argument)
    run.wait()
    return run


@pytest.mark.parametrize("delay", [1, *searched(0)])
def test_alone_it_goes_on_from_its_checkpoint_with_the_same_scale(launch: Launcher, delay: int) -> None:
    whole = alone(launch, SCRIPT, f'{{"join": {{"delay": {delay}}}}}')
    settings = f'{{"delay": {delay}, "checkpoint": "kept", "checkpoint_every": 0.02}}'
    scene = f'{{"dies": "w0", "sleep_s": 0.01, "join": {settings}}}'
    assert alone(launch, SCRIPT, scene).process.returncode == -signal.SIGKILL
    again = alone(launch, SCRIPT, scene)
    assert again.output.count("updated") < whole.output.count("updated"), "it did not begin anew"
    assert ends(whole) and ends(again) == ends(whole), again.output


def test_a_spare_of_the_first_round_follows_the_scale(launch: Launcher) -> None:
    all_alike(launch(SCRIPT, '{"size": 1, "join": {"batch": 1, "delay": 1}}'), 2)


@pytest.mark.parametrize(("delay", "dtype"), [(0, "bfloat16"), (1, "float16")])
def test_one_dies_and_another_comes(launch: Launcher, delay: int, dtype: str) -> None:
    """The last two take the scale over from a peer."""
    settings = f'{{"delay": {delay}, "checkpoint": "kept", "checkpoint_every": 0.3}}'
    scene = f'{{"dies": "w1", "sleep_s": 0.01, "dtype": "{dtype}", "until": ["died", "scaled"], "join": {settings}}}'
    run = launch(SCRIPT, scene)
    run.until("drew w1.2")
    scaled = launch.command("scale", "3", "--dir", "job")
    assert scaled.wait() == 0, scaled.output
    run.until("drew w2")
    (launch.directory / "scaled").touch()
    all_alike(run, 3)
    assert list((launch.directory / "kept").rglob("manifest.json"))


@pytest.mark.parametrize("delay", [0, *searched(1)])
def test_a_job_goes_on_from_its_checkpoint(launch: Launcher, delay: int) -> None:
    settings = f'{{"delay": {delay}, "checkpoint": "kept", "checkpoint_every": 0.1}}'
    scene = f'{{"sleep_s": 0.01, "until": ["resumed"], "join": {settings}}}'
    first = launch(SCRIPT, scene)
    first.until("epoch 3")
    first.process.terminate()
    first.wait()
    (launch.directory / "resumed").touch()
    second = launch.command("run", "-n", "2", "--dir", "job", "--resume", "train.py", scene)
    all_alike(second, 2)
    assert "going on from checkpoint" in second.output


HABITS = """
    import sys
    import torch
    from torch import nn
    import pliant

    samples = [(torch.ones(4), torch.ones(1)) for _ in range(32)]
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    with pliant.join(model, optimizer, batch=8, scaler=scaler) as run:
        for epoch in run.epochs(3):
            for x, y in run.batches(samples, size=4):
                loss = nn.functional.mse_loss(model(x), y)
                exec(sys.argv[1])
"""


def test_what_is_left_over_in_a_job_is_refused_in_one_line(launch: Launcher) -> None:
    run = launch(HABITS, "run.backward(scaler.scale(loss)); run.step()")
    assert run.wait() == 1
    assert "write run.backward(loss) with the plain loss" in run.output and "Traceback" not in run.output
