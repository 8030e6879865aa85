"""Real training on four unequal processes: every sample once, the same weights everywhere.

A start of four torch processes costs seconds, so one job goes through many datasets, sizes and loaders.
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from running import QUICK, Launcher, Running, records

from pliant.core.journal.records import ExchangeRecord, PhaseEndRecord, PhaseRecord, RoundRecord

pytestmark = pytest.mark.slow

PACES = ("--pace", "1,1,0.5,0.25")

PRELUDE = (
    QUICK
    + """
import hashlib, os, sys, warnings
warnings.simplefilter("error")
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset
import pliant

torch.manual_seed(os.getpid())  # everybody starts elsewhere: the leader's weights count
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, track_running_stats=True), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
LOADERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}

class Indices(Dataset):
    '''Says which sample it is.'''
    def __init__(self, samples):
        generator = torch.Generator().manual_seed(samples)
        self.x = torch.randn(samples, 6, generator=generator)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], index % 3, index

def digest():
    tensors = [*model.parameters(), *model.buffers()]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]

def forward(x):
    # BatchNorm refuses to normalise one sample by itself.
    model.train(len(x) > 1)
    return model(x)

def train(run, samples, size, stop_after=None, **options):
    seen = []
    for x, y, index in run.batches(samples, size, **options):
        seen += index.tolist()
        run.backward(F.cross_entropy(forward(x), y))
        if run.step():
            updates.append(f"{run.round}:{digest_of_parameters()}")
        if stop_after is not None and len(seen) >= stop_after:
            break
    model.train()
    say("seen", len(samples), *seen)
    say("drained", digest())

updates = []

def digest_of_parameters():
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:8]

def correct(batch):
    x, y, index = batch
    return (model(x).argmax(1) == y).sum(), len(y)

def say(*words):
    print(*words)
"""
)

SIZES = """
with pliant.join(model, optimizer, {settings}) as run:
    for epoch in run.epochs(2):
        for samples in (1003, 50, 3, 1):
            train(run, Indices(samples), 16)
        say("evaluated", run.evaluate(correct, Indices(997), size=100))
        # An empty dataset is an epoch of nothing.
        train(run, Indices(0), 4)
    for options in {loaders}:
        train(run, Indices(203), 8, **options)
    say("facts", run.samples, run.progress, run.round)
    say("updates", *updates)
    say("end", digest())
"""


def said(run: Running, word: str) -> dict[str, list[list[str]]]:
    """What each worker said behind ``word``, in order."""
    found: dict[str, list[list[str]]] = defaultdict(list)
    for line in run.lines:
        worker, _, rest = line.partition("] ")
        if worker.startswith("[w") and rest.split(" ")[0] == word:
            found[worker[1:]].append(rest.split()[1:])
    return dict(found)


def assert_equal_everywhere(run: Running, word: str, workers: int = 4) -> list[list[str]]:
    """All workers said the same behind ``word``."""
    found = said(run, word)
    assert len(found) == workers, run.output
    first = found["w0"]
    assert all(words == first for words in found.values()), found
    return first


def assert_seen_once(run: Running, lengths: list[int]) -> None:
    """By what the loops themselves saw: per loop, each sample of the dataset once over all workers."""
    found = said(run, "seen")
    for loop, length in enumerate(lengths):
        assert all(int(words[loop][0]) == length for words in found.values())
        indices = sorted(int(index) for words in found.values() for index in words[loop][1:])
        assert indices == list(range(length)), f"loop {loop} over {length} samples"


def positions(run: Running) -> dict[int, tuple[PhaseRecord, list[int], list[int]]]:
    """By the journal's spans: per phase its record, the positions used and the positions cut, sorted."""
    phases: dict[int, tuple[PhaseRecord, list[int], list[int]]] = {}
    for record in records(run):
        if isinstance(record, PhaseRecord):
            assert record.phase == len(phases) + 1
            phases[record.phase] = (record, [], [])
        elif isinstance(record, RoundRecord | ExchangeRecord):
            spans = [span for ticket in record.tickets for span in ticket.spans]
            used = [position for start, stop in spans for position in range(start, stop)]
            assert len(used) == record.batch == sum(ticket.samples for ticket in record.tickets)
            phases[record.phase][1].extend(used)
        elif isinstance(record, PhaseEndRecord):
            phases[record.phase][2].extend(p for start, stop in record.cut for p in range(start, stop))
    for _, used, cut in phases.values():
        used.sort()
        cut.sort()
    return phases


def assert_used_once(run: Running) -> None:
    for record, used, cut in positions(run).values():
        assert sorted(used + cut) == list(range(record.limit)), record


def assert_proven(launch: Launcher) -> None:
    """``pliant audit`` agrees."""
    audit = launch.command("audit", "job", "--json")
    assert audit.wait() == 0, audit.output
    assert json.loads(audit.output)["problems"] == []


@pytest.mark.parametrize(
    "settings",
    [
        "batch=256",
        "batch=256, delay=0",
        "batch=pliant.Floating(256), delay=1",
        "batch=pliant.Floating(64, at_most=128), delay=1, correction='none'",
    ],
)
def test_every_sample_once_whatever_the_sizes(launch: Launcher, settings: str) -> None:
    run = launch(SIZES.format(settings=settings, loaders="({}, LOADERS, PERSISTENT)"), workers=4, options=PACES)
    assert run.wait() == 0, run.output
    lengths = [1003, 50, 3, 1, 0] * 2 + [203] * 3
    assert_seen_once(run, lengths)
    assert_used_once(run)
    trained = [record for record, _, _ in positions(run).values() if record.task == "train"]
    assert [record.length for record in trained] == lengths
    assert_proven(launch)
    assert_equal_everywhere(run, "drained")
    assert_equal_everywhere(run, "end")
    evaluated = assert_equal_everywhere(run, "evaluated")
    assert len(evaluated) == 2 and all(0.0 <= float(words[0]) <= 1.0 for words in evaluated)
    facts = assert_equal_everywhere(run, "facts")
    rounds = [record for record in records(run) if isinstance(record, RoundRecord)]
    assert facts == [[str(sum(lengths)), "3.0", str(len(rounds))]]
    assert_updates_agree(run)
    if "Floating" not in settings:
        assert_batches_exact(rounds, trained)


def assert_updates_agree(run: Running) -> None:
    """Wherever ``step`` returned True, all workers held the same weights."""
    seen: dict[str, str] = {}
    for ((*words,),) in said(run, "updates").values():
        for word in words:
            number, _, weights = word.partition(":")
            assert seen.setdefault(number, weights) == weights, f"round {number}"
    assert seen


def assert_batches_exact(rounds: list[RoundRecord], phases: list[PhaseRecord]) -> None:
    """With a fixed batch every round but the last of a phase has exactly that many samples."""
    for phase in phases:
        batches = [record.batch for record in rounds if record.phase == phase.phase]
        whole, rest = divmod(phase.length, 256)
        assert batches == [256] * whole + [rest] * (rest > 0), phase


def test_sizes_spares_breaks_and_a_number_of_samples(launch: Launcher) -> None:
    """Each worker's own micro-batch size, a batch below the number of workers, a break, an end inside an epoch."""
    run = launch(
        """
        with pliant.join(model, optimizer, batch=3) as run:
            for epoch in run.epochs(samples=400):
                if epoch == 0:
                    # One worker leaves its loop: the phase ends for all.
                    train(run, Indices(120), 4, stop_after=8 if run.worker == "w1" else None)
                    # An exception that the script itself catches ends a loop as well.
                    try:
                        for x, y, index in run.batches(Indices(60), 4):
                            run.backward(F.cross_entropy(forward(x), y))
                            if run.step() and run.worker == "w0":
                                raise KeyError
                    except KeyError:
                        pass
                else:
                    train(run, Indices(97), 4)
                say("sizes", run.batch)
                say("evaluated", run.evaluate(correct, Indices(10), size=3))
            say("facts", run.samples)
            say("end", digest())
        """,
        workers=4,
        options=(*PACES, "--size", "8,4,2,1"),
    )
    assert run.wait() == 0, run.output
    assert_used_once(run)
    assert_proven(launch)
    assert_equal_everywhere(run, "end")
    assert_equal_everywhere(run, "evaluated")
    assert assert_equal_everywhere(run, "facts") == [["400"]]
    phases = [record for record, _, _ in positions(run).values()]
    assert all(phase.sizes == [8, 4, 2, 1] for phase in phases)
    cut = [len(left) for phase, _, left in positions(run).values() if phase.task == "train"]
    assert cut[0] > 0 and cut[1] > 0 and not any(cut[2:])
    assert phases[-2].limit < phases[-2].length == 97
    # Three samples are enough for three workers: one waits, and is shown.
    assert "1 spare" in run.output
    rounds = [record for record in records(run) if isinstance(record, RoundRecord)]
    assert all(sum(ticket.samples > 0 for ticket in record.tickets) <= 3 for record in rounds)


def test_evaluate_after_the_last_update_of_a_synchronous_loop(launch: Launcher) -> None:
    """``step`` returns True for the last round of a loop too, and an evaluate in the loop's body is legal there."""
    script = """
with pliant.join(model, optimizer, batch=8, delay=0) as run:
    for x, y, index in run.batches(Indices(16), 8):
        run.backward(F.cross_entropy(forward(x), y))
        if run.step():
            say("evaluated", run.round, run.evaluate(lambda batch: (len(batch[2]), len(batch[2])), Indices(5), 2))
"""
    (launch.directory / "train.py").write_text(PRELUDE + script)
    run = launch.python("train.py")
    assert run.wait() == 0, run.output
    assert run.lines == ["evaluated 1 1.0", "evaluated 2 1.0"]
