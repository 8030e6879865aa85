"""A model with more merged buffers than a machine word has bits (a ResNet-50 has 159), while workers come and go."""

from __future__ import annotations

import pytest
from running import QUICK, Launcher, records

from pliant.core.journal.audit import audit
from pliant.core.journal.records import EraRecord

pytestmark = pytest.mark.slow

PRELUDE = QUICK

SCRIPT = """
    import os, signal, time
    from pathlib import Path
    import torch
    from torch import nn
    import pliant

    torch.manual_seed(0)
    inputs = torch.randn(96, 4)
    samples = [(inputs[i], inputs[i].sum()[None]) for i in range(96)]
    model = nn.Sequential(nn.Linear(4, 6), *(nn.BatchNorm1d(6) for _ in range(30)), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    drew = set()

    def enough(batch):
        return float(Path("enough").exists()), 1

    with pliant.join(model, optimizer, batch=16, dead_after=3.0, checkpoint="kept", checkpoint_every=0.2) as run:
        for epoch in run.epochs(1000):
            for x, y in run.batches(samples, size=8):
                time.sleep(0.01)
                if run.worker not in drew:
                    drew.add(run.worker)
                    print("drew", run.worker, flush=True)
                if run.worker == "w1" and epoch == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                model.train(len(x) > 1)
                run.backward(nn.functional.mse_loss(model(x), y))
                run.step()
            model.train()
            print("epoch", epoch, run.worker, flush=True)
            if epoch >= 3 and run.evaluate(enough, [0], size=1):
                break
        total = sum(float(value.double().abs().sum()) for value in model.state_dict().values())
        print("end of", repr(total), flush=True)
"""


def test_one_dies_another_comes_and_all_have_the_same_statistics(launch: Launcher) -> None:
    run = launch(SCRIPT)
    run.until("drew w1.2")
    scaled = launch.command("scale", "3", "--dir", "job")
    assert scaled.wait() == 0, scaled.output
    run.until("drew w2")
    (launch.directory / "enough").touch()
    assert run.wait() == 0, run.output
    ends = [line.partition("end of ")[2] for line in run.lines if "end of " in line]
    assert len(ends) == 3 and len(set(ends)) == 1, run.output
    assert audit(records(run)).problems == []
    assert any(record.entries is not None for record in records(run) if isinstance(record, EraRecord))
    assert list((launch.directory / "kept").rglob("manifest.json"))
