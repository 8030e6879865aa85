"""A worker whose weights are not those of the others, as real processes: healed once, then thrown out."""

from __future__ import annotations

import json

import pytest
from running import QUICK, Launcher, Running, records, searched

from pliant.core.journal.records import EndRecord, EraRecord, RoundRecord

pytestmark = pytest.mark.slow

PRELUDE = (
    QUICK
    + """
import hashlib, os, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import pliant

delay, again, where = int(sys.argv[1]), sys.argv[2] == "again", sys.argv[3]
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(256, 6), torch.randint(0, 3, (256,)))
me, count = os.environ["PLIANT_WORKER"], 0

def mark(name):
    Path(name).touch()

def disturb(run):
    '''One worker's weights, once; and once more when it computes again.'''
    drew_again = Path("drew-again").exists()
    if me == where and run.round > 3 and not Path("first").exists():
        change("first")
    elif me == where and again and drew_again and not Path("second").exists():
        change("second")

def change(name):
    with torch.no_grad():
        model[0].weight[3, 2] += 0.25
    mark(name)

def over(batch):
    wanted = "without" if again else "drew-again"
    return float(Path(wanted).exists()), 1.0

with pliant.join(model, optimizer, batch=16, delay=delay, state={"updates": 0}) as run:
    for epoch in run.epochs(400):
        for x, y in run.batches(data, size=4):
            if me == where and run.worker in dict(run._membership.worker.group.offences):
                mark("drew-again")
            if where not in run.roster:
                mark("without")
            run.backward(F.cross_entropy(model(x), y))
            time.sleep(0.001)
            if run.step():
                run.state["updates"] += 1
                disturb(run)
        if run.evaluate(over, [0], size=1):
            break
    worker = run.worker
parts = {
    "weights": model.parameters(),
    "buffers": model.buffers(),
    "moments": (t for p in model.parameters() for t in optimizer.state[p].values()),
    "state": [torch.tensor(run.state["updates"])],
}
for name, part in parts.items():
    print("final", worker, name, hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in part)).hexdigest()[:16])
"""
)


def ended_alike(run: Running, workers: int) -> None:
    """So many workers came to the end, with the same weights, buffers, moments and user's state."""
    lines = [line.partition("] final ")[2].split() for line in run.lines if "] final " in line]
    for part in ("weights", "buffers", "moments", "state"):
        held = {worker: digest for worker, name, digest in lines if name == part}
        assert len(held) == workers and len(set(held.values())) == 1, f"{part}: {held}\n{run.output}"


def named(run: Running) -> list[RoundRecord]:
    return [record for record in records(run) if isinstance(record, RoundRecord) and record.drift is not None]


def audited(launch: Launcher, drifts: int) -> None:
    audit = launch.command("audit", "job", "--json")
    assert audit.wait() == 0, audit.output
    said = json.loads(audit.output)
    assert (said["problems"], said["drifts"]) == ([], drifts)


# Of three the others are right, of two the leader; both delays, the leader and another.
@pytest.mark.parametrize(
    ("delay", "workers", "where"), [(0, 3, "w0"), (1, 2, "w1"), *searched((1, 3, "w1"), (0, 2, "w1"))]
)
def test_it_takes_the_state_over_and_computes_again(launch: Launcher, delay: int, workers: int, where: str) -> None:
    run = launch("", str(delay), "once", where, workers=workers)
    assert run.wait() == 0, run.output
    assert sum("weights differed from the others' after round" in line for line in run.lines) == 1, run.output
    assert f"pliant: {where}'s weights differed" in run.output
    (record,) = named(run)
    assert record.drift is not None and len(record.drift.healed) == 1 and not record.drift.expelled
    # Nobody has gone or come: one era, and the same names to the end.
    assert sum(isinstance(record, EraRecord) for record in records(run)) == 1
    ended_alike(run, workers)
    audited(launch, drifts=1)


@pytest.mark.parametrize(("delay", "workers", "where"), [(1, 3, "w0"), (1, 2, "w1"), *searched((0, 3, "w1"))])
def test_the_second_time_it_is_thrown_out(launch: Launcher, delay: int, workers: int, where: str) -> None:
    run = launch("", str(delay), "again", where, workers=workers)
    assert run.wait() == 0, run.output
    (line,) = [line for line in run.lines if "look for bad memory" in line]
    assert line.startswith(f"pliant: {where}'s weights differ from the others' after round"), line
    assert line.endswith(f"the run goes on without {where}"), line
    first, second = named(run)
    assert first.drift is not None and second.drift is not None
    assert first.drift.healed and not first.drift.expelled
    assert second.drift.expelled and not second.drift.healed
    last = records(run)[-1]
    assert isinstance(last, EndRecord) and last.completed
    # It is not started again.
    rosters = [record.roster for record in records(run) if isinstance(record, EraRecord)]
    assert [where in roster for roster in rosters] == [True, False]
    assert not any(name.startswith(f"{where}.") for roster in rosters for name in roster)
    ended_alike(run, workers - 1)
    audited(launch, drifts=2)
