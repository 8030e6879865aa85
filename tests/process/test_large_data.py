"""A dataset of a thousand million samples, as real processes: nobody keeps a table of it, a newcomer not either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import QUICK, Launcher

pytestmark = pytest.mark.slow
PREPARED = False

MOST_MB = 200
"""What a worker may grow by from `join` to its end. A table of the positions takes 8,000."""

PRELUDE = (
    QUICK
    + """
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset
import pliant

SLOT = os.environ["PLIANT_WORKER"]
torch.manual_seed(3)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

class Many(Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        return torch.full((6,), float(index % 7))

class Backwards:
    '''An order that is computed as it is read.'''
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, position):
        return self.n - 1 - position

def order(epoch, n):
    with open(f"orders-{SLOT}", "a") as file:
        file.write(f"{epoch} {n}\\n")
    return Backwards(n)

def peak_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

def newcomer_has_drawn(_):
    return float(Path("drew-w2").exists()), 1
"""
)


@pytest.mark.parametrize("own", [False, True], ids=["the seed's order", "the user's order"])
def test_two_workers_and_a_third_in_mid_run(launch: Launcher, own: bool) -> None:
    run = launch(
        f"""
        before, first = peak_mb(), None
        with pliant.join(model, optimizer, batch=16, order={"order" if own else None}) as run:
            for epoch in run.epochs(steps=100_000):
                for x in run.batches(Many(), size=4):
                    first = first or peak_mb()
                    Path(f"drew-{{SLOT}}").touch()
                    if epoch >= 3 and not Path("drew-w2").exists():
                        if run.is_leader:
                            print("epoch 3 has begun", flush=True)
                        time.sleep(0.02)
                    run.backward(model(x).square().mean())
                    if run.step() and run.updates % 4 == 0:
                        break
                if run.evaluate(newcomer_has_drawn, [0], size=1):
                    break
        Path(f"memory-{{SLOT}}").write_text(json.dumps([before, first, peak_mb()]))
        """
    )
    run.until("epoch 3 has begun")
    scaled = launch.command("scale", "3", "--dir", "job")
    assert scaled.wait() == 0, scaled.output
    assert run.wait() == 0, run.output
    for slot in ("w0", "w1", "w2"):
        before, first, last = json.loads((launch.directory / f"memory-{slot}").read_text())
        assert first - before < MOST_MB and last - before < MOST_MB, f"{slot}: {before}, {first}, {last} MB"
    if own:
        _made_once(launch.directory)
    audit = launch.command("audit", "job")
    assert audit.wait() == 0, audit.output


def _made_once(directory: Path) -> None:
    """Each worker has asked for the order of each epoch once, the newcomer for none that was past."""
    asked: dict[str, list[int]] = {}
    for slot in ("w0", "w1", "w2"):
        lines = [line.split() for line in (directory / f"orders-{slot}").read_text().splitlines()]
        assert {int(samples) for _, samples in lines} == {10**9}
        asked[slot] = [int(epoch) for epoch, _ in lines]
    last = asked["w0"][-1]
    assert asked["w0"] == asked["w1"] == list(range(last + 1))
    # It may come between two epochs: what it asks for has no gap, and begins after it was called for.
    assert asked["w2"] == list(range(asked["w2"][0], last + 1)) and asked["w2"][0] >= 3, asked["w2"]
