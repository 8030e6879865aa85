"""Layers that are frozen, unfrozen and added while workers come, go and are lost, as real processes."""

from __future__ import annotations

import os
import signal
import textwrap

import pytest
from running import QUICK, Launcher, Running, gone, records, searched

from pliant.core.journal.records import RoundRecord

pytestmark = pytest.mark.slow

PRELUDE = QUICK

SCRIPT = """
    import os, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    import torch.nn.functional as F
    import pliant

    delay, optimizer, memory = sys.argv[1] if sys.argv[1] == "auto" else int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    samples = [(torch.randn(3, 6, 6), i % 3) for i in range(240)]
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    if memory == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    head = nn.Parameter(torch.randn(3, 3))
    outer = [*model[0].parameters(), *model[1].parameters(), *model[6].parameters(), head]
    if optimizer == "adamw":
        optimizer = torch.optim.AdamW(outer, lr=0.01, fused=memory == "channels_last")
    else:
        optimizer = torch.optim.SGD(outer, lr=0.02, momentum=0.9)
    print("pid", os.getpid(), flush=True)

    def change(number):
        if number == 0:
            model[0].requires_grad_(False)
        elif number == 1:
            optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.005})
        elif number == 2:
            model[0].requires_grad_(True)
        elif number == 3:
            for p in model[1].parameters():
                p.requires_grad, p.grad = False, None

    def correct(batch):
        return (model(batch[0]) @ head).argmax(1).eq(batch[1]).sum(), len(batch[1])

    def enough(batch):
        # A replay finds what the run has found.
        if "PLIANT_WORKER" in os.environ:
            Path(f"enough-{run.round}").write_text(str(float(os.path.exists("enough"))))
        return float(Path(f"enough-{run.round}").read_text()), 1

    state = {"changes": 0, "last": 0}
    settings = dict(delay=delay, dead_after=5.0, checkpoint="kept", checkpoint_every=0.3)
    with pliant.join(model, optimizer, batch=24, state=state, **settings) as run:
        drew = False
        for epoch in run.epochs(100_000):
            if epoch == 1:
                model[6].bias.requires_grad_(False)
            for x, y in run.batches(samples, size=6):
                time.sleep(0.005)
                if not drew:
                    drew = print("drew", run.worker, flush=True) or True
                if memory == "channels_last":
                    x = x.to(memory_format=torch.channels_last)
                run.backward(F.cross_entropy(model(x) @ head, y))
                if run.step() and state["changes"] < 4 and run.round >= state["last"] + 7:
                    change(state["changes"])
                    state["changes"] += 1
                    state["last"] = run.round
                    print("changed", state["changes"], run.worker, run.round, flush=True)
            run.evaluate(correct, samples, size=80)
            if run.evaluate(enough, [0], size=1):
                break
        weights = [float(p.detach().double().abs().sum()) for p in [*model.parameters(), head]]
        needs = "".join(str(int(p.requires_grad)) for p in [*model.parameters(), head])
        print("end", repr(sum(weights)), needs, len(optimizer.param_groups), state["changes"], flush=True)
"""

CASES = [("1", "adamw", "channels_last"), ("auto", "sgd", "contiguous"), *searched((("0", "sgd", "contiguous"),))]


def begun(launch: Launcher, case: tuple[str, str, str], workers: int) -> Running:
    (launch.directory / "train.py").write_text(launch.prelude + textwrap.dedent(SCRIPT))
    return launch.command("run", "-n", str(workers), "--dir", "job", "train.py", *case)


def same_end(launch: Launcher, run: Running, ends: int) -> None:
    (launch.directory / "enough").touch()
    assert run.wait() == 0, run.output
    said = {line.partition("] end ")[2] for line in run.lines if "] end " in line}
    assert len(said) == 1, said
    assert said.pop().split()[1:] == ["110011101", "2", "4"], run.output
    assert sum("] end " in line for line in run.lines) >= ends, run.output
    assert "bad memory" not in run.output
    audit = launch.command("audit", "job")
    assert audit.wait() == 0, audit.output


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_newcomers_train_what_the_others_train(launch: Launcher, case: tuple[str, str, str]) -> None:
    """One is killed and comes back after the second change, one more joins after the last."""
    run = begun(launch, case, 2)
    run.until("changed 2", times=2)
    victim = int(run.printed("[w1] pid ").rpartition(" ")[2])
    os.kill(victim, signal.SIGKILL)
    gone(victim)
    run.until("drew w1.2")
    run.printed("changed 4")
    assert launch.command("scale", "3", "--dir", "job").wait() == 0
    run.until("drew w2")
    same_end(launch, run, ends=3)
    again = launch.python(
        "-W",
        "error",
        "-c",
        "from pliant.ui.cli import main; main()",
        "replay",
        "job",
        "train.py",
        *case,
        OMP_NUM_THREADS="1",
    )
    assert again.wait() == 0, again.output


SMALL = """
    import os
    import torch
    from torch import nn
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset
    import pliant

    me = int(os.environ["PLIANT_WORKER"][1:])
    torch.manual_seed(me)  # each starts elsewhere: the leader's values count
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    outside = nn.Parameter(torch.full((3,), 1.0 + me, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    samples = TensorDataset(torch.randn(96, 6, generator=generator).double(), torch.arange(96) % 3)
"""


def ends_alike(launch: Launcher, script: str, word: str) -> list[str]:
    """The parts behind ``word`` of what both workers printed, which are the same."""
    run = launch(SMALL + script)
    assert run.wait() == 0, run.output
    said = [line.partition(f"{word} ")[2] for line in run.lines if f"{word} " in line]
    assert len(said) == 2 and said[0] == said[1], run.output
    assert "weights differed" not in run.output
    audit = launch.command("audit", "job")
    assert audit.wait() == 0, audit.output
    return said[0].split()


def test_parameters_outside_the_model_are_the_leaders_from_the_start(launch: Launcher) -> None:
    script = """
    first = None
    with pliant.join(model, optimizer, batch=16, delay=1) as run:
        for x, y in run.batches(samples, size=4):
            first = outside.tolist() if first is None else first
            run.backward(F.cross_entropy(model(x) * outside, y))
            run.step()
        print("outside", first[0], repr(outside.sum().item()), flush=True)
    """
    first, last = ends_alike(launch, script, "outside")
    assert float(first) == 1.0 and float(last) != 3.0


def test_a_backward_pass_out_of_memory_that_the_script_catches_is_not_half_counted(launch: Launcher) -> None:
    """The last layer already has its gradient when it fails; the micro-batch's samples weigh nothing."""
    script = """
    failed = 0

    def refuse(gradient):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    with pliant.join(model, optimizer, batch=16, delay=0) as run:
        for drawn, (x, y) in enumerate(run.batches(samples, size=4)):
            hidden = model[0](x)
            if me == 1 and drawn == 1:
                hidden.register_hook(refuse)
            try:
                run.backward(F.cross_entropy(model[1:](hidden) * outside, y))
            except torch.OutOfMemoryError:
                failed += 1
                continue
            run.step()
        if failed:
            print("caught", failed, flush=True)
        print("weights", repr(sum(p.sum().item() for p in model.parameters())), run.samples, flush=True)
    """
    _, counted = ends_alike(launch, script, "weights")
    assert counted == "96"
    assert sum("caught 1" in line for line in launch.runs[0].lines) == 1, launch.runs[0].output
    rounds = [record for record in records(launch.runs[0]) if isinstance(record, RoundRecord)]
    assert sum(record.batch for record in rounds) == 96
    assert len([record for record in rounds if record.weight < record.batch]) == 1
