"""``evaluate`` on real processes while workers die: means, and every sample's output once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from running import QUICK, Launcher, records, shared_out

from pliant.core.journal.records import EraRecord, ExchangeRecord, PhaseEndRecord

pytestmark = pytest.mark.slow

SCRIPT = (
    QUICK
    + """
import json, math, os, signal, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import pliant
from pliant.core.tickets import Kind

scene = json.loads(sys.argv[1])
me = os.environ["PLIANT_WORKER"]
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def samples(count):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long(), torch.arange(count))

train_set, test_set = samples(96), samples(150)

def say(*words):
    print(*words, flush=True)

def die(where):
    '''Once, on one worker.'''
    if where == scene["where"] and me == scene["victim"] and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

def settled_in_this_call():
    return any(phase.kind is Kind.EVALUATE and any(phase.took_part) for phase in run._worker.group.open)

def sums(batch):
    x, y, _ = batch
    logits = model(x)
    return {"accuracy": ((logits.argmax(1) == y).sum(), len(y)), "loss": (F.cross_entropy(logits, y), 1)}

def outputs(batch):
    x, _, index = batch
    time.sleep(0.002)
    if settled_in_this_call():
        die("gathering")
    # As many numbers as the sample's place says: no two workers' outputs have one shape.
    return {"logits": model(x), "index": index, "ragged": [torch.ones(int(i) % 5) for i in index]}

def check(found, where):
    '''Every sample once, in order, computed with the weights of this moment.'''
    assert [int(each["index"]) for each in found] == list(range(len(test_set)))
    assert [len(each["ragged"]) for each in found] == [i % 5 for i in range(len(test_set))]
    with torch.no_grad():
        assert torch.allclose(torch.stack([each["logits"] for each in found]), model(test_set.tensors[0]), atol=1e-5)
    say("whole", where, run.worker)

def finished(batch):
    return float(Path("died").exists() and Path("drew-again").exists()), 1

with pliant.join(model, optimizer, batch=12, delay=scene["delay"], state={"updates": 0}, dead_after=30.0) as run:
    for epoch in run.epochs(1_000_000):
        for x, y, _ in run.batches(train_set, size=3):
            if run.worker.startswith(scene["victim"] + "."):
                Path("drew-again").touch()
            run.backward(F.cross_entropy(model(x), y))
            if run.step():
                run.state["updates"] += 1
                if run.state["updates"] % 3 == 0:
                    train = run.evaluate(sums, train_set, size=5)
                    if run.round > 8:
                        die("between")
                    test = run.evaluate(sums, test_set, size=5)
                    third = run.evaluate(lambda batch: (len(batch[1]), 1), test_set, size=5)
                    assert all(math.isfinite(each["loss"]) or math.isnan(each) for each in (train, test))
        means = run.evaluate(sums, test_set, size=4)
        assert list(means) == ["accuracy", "loss"] and 0.0 <= means["accuracy"] <= 1.0, means
        found = run.evaluate(outputs, test_set, size=2, gather=True, everywhere=scene.get("everywhere", False))
        if found is not None:
            check(found, epoch)
        say("means", epoch, repr(means))
        if run.evaluate(finished, [0], size=1):
            break
"""
)

SCENES: dict[str, dict[str, Any]] = {
    "a worker dies while outputs are gathered": {"where": "gathering", "victim": "w2", "delay": 1},
    "the leader dies while outputs are gathered": {"where": "gathering", "victim": "w0", "delay": 1},
    "outputs everywhere": {"where": "gathering", "victim": "w1", "delay": "auto", "everywhere": True},
    "a worker dies between two calls": {"where": "between", "victim": "w1", "delay": 1},
    "the leader dies between two calls": {"where": "between", "victim": "w0", "delay": 0},
}


@pytest.mark.parametrize(
    "name", shared_out(SCENES, "a worker dies while outputs are gathered", "a worker dies between two calls")
)
def test_a_kill_in_the_middle(launch: Launcher, name: str) -> None:
    scene = SCENES[name]
    (launch.directory / "train.py").write_text(SCRIPT)
    run = launch.command("run", "-n", "3", "--dir", "job", "train.py", json.dumps(scene))
    assert run.wait() == 0, run.output
    said = [line.partition("] ")[2].split() or line.split() for line in run.lines]
    epochs = sorted({int(words[1]) for words in said if words[:1] == ["means"]})
    whole = [(int(words[1]), words[2]) for words in said if words[:1] == ["whole"]]
    found = records(run)
    if scene["where"] == "gathering":
        # What the victim had computed was settled, and in another era than the rest.
        eras = {r.phase: {e.era for e in found if isinstance(e, ExchangeRecord) and e.phase == r.phase and e.batch}
                for r in found if isinstance(r, ExchangeRecord)}  # fmt: skip
        assert any(len(each) > 1 for each in eras.values()), "nobody died in the middle"
    assert sum(isinstance(record, EraRecord) and record.entries is not None for record in found) >= 1
    for epoch in epochs:
        winners = [worker for where, worker in whole if where == epoch]
        assert len(winners) >= 2 if scene.get("everywhere") else len(winners) == 1, (epoch, winners, run.output)
        # A newcomer's call returns what was recorded of it.
        means = {" ".join(words[2:]) for words in said if words[:2] == ["means", str(epoch)]}
        assert len(means) == 1, run.output
    assert "drew-again" in {path.name for path in launch.directory.iterdir()}
    ends = [record for record in found if isinstance(record, PhaseEndRecord) and record.results]
    assert ends and all(set(record.results) == {"accuracy", "loss"} for record in ends)
    assert all(record.result == record.results["loss"] for record in ends)
    audit = launch.command("audit", "job")
    assert audit.wait() == 0, audit.output
    # What was gathered is neither in the journal nor anywhere else on disk.
    assert b"ragged" not in (launch.directory / "job" / "journal.jsonl").read_bytes()
