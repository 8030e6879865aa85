"""A training script that makes its own faults, each once, at a named point of the loop.

``python elastic.py scenario.json``: the scenario says which worker does what to itself where, and which files must
exist before the run may end. Every worker that holds the final state prints a digest of it behind the ``with`` block.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("error")
faulthandler.register(signal.SIGUSR1)  # where does it hang?

SCENARIO: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
PID = os.getpid()
SLOT = os.environ.get("PLIANT_WORKER", "w0")
TALLIED, TESTED = 96, 40
me = ""
"""this worker's name, once it has one"""

# -- faults


def mark(name: str) -> bool:
    """Make the file ``name``; False if it was there."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


PENDING = [
    (number, fault)
    for number, fault in enumerate(SCENARIO["faults"])
    if fault["who"] == "*" or fault["who"].split(".")[0] == SLOT
]


def reach(point: str) -> None:
    """Do what the scenario wants done here, the first time that its conditions hold."""
    for number, fault in PENDING:
        if fault["at"] != point or fault["who"] not in ("*", SLOT, me):
            continue
        if all(Path(name).exists() for name in fault["after"]) and mark(f"fault-{number}"):
            for deed in fault["does"]:
                strike(deed)


def strike(deed: str) -> None:
    word, _, whom = deed.partition(" ")
    match word:
        case "kill" if whom:
            os.kill(int(Path(f"pid-{whom}").read_text()), signal.SIGKILL)
        case "kill":
            os.kill(PID, signal.SIGKILL)
            time.sleep(60)
        case "stop":
            os.kill(PID, signal.SIGSTOP)
            time.sleep(0.01)
        case "nap" | "doze":
            # Too short to be noticed, or long enough to be taken off the roster.
            sleep_s = 0.4 if word == "nap" else 4.0
            subprocess.Popen(["sh", "-c", f"sleep {sleep_s}; kill -CONT {PID}"]).returncode = 0
            os.kill(PID, signal.SIGSTOP)
            time.sleep(0.01)
        case "term":
            os.kill(PID, signal.SIGTERM)
        case "hang":
            while True:
                time.sleep(0.1)
        case "leave":
            run.leave()
        case "raise":
            raise KeyError("mine")
        case "coordinator":
            os.kill(coordinator(), signal.SIGKILL)
        case "cut":
            cut()
        case _:
            raise ValueError(deed)


def coordinator() -> int:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"pliant.launch.coordinator_process" in words and (entry / "cwd").readlink() == Path.cwd():
                return int(entry.name)
    raise LookupError("no coordinator")


def cut() -> None:
    """Be out of the coordinator's reach until it has taken this worker off the roster."""
    from pliant.control import connect

    opened, until_s = connect.opened, time.monotonic() + 1.5

    def away(door: connect.Endpoint) -> Any:
        while time.monotonic() < until_s:
            time.sleep(0.05)
        return opened(door)

    connect.opened = away
    run._membership.enrolment.link.connection.socket.shutdown(2)


def at(owner: Any, name: str, point: str) -> None:
    """Reach ``point`` at the beginning of a function of Pliant's."""
    whole = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        reach(point)
        return whole(*arguments, **named)

    setattr(owner, name, watched)


reach("starting")

import quick  # noqa: E402, F401
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import pliant  # noqa: E402
from pliant.tensors import handoff  # noqa: E402
from pliant.worker import snapshot  # noqa: E402
from pliant.worker.elastic.catch_up import CatchUp  # noqa: E402
from pliant.worker.follow import Follower  # noqa: E402
from pliant.worker.poll import Poller  # noqa: E402

at(snapshot, "snapshot", "giving")
at(handoff, "_send_answer", "sending")
at(CatchUp, "_ask", "asking")
at(CatchUp, "_install", "installing")
at(Follower, "follow", "following")


def watch_waiting() -> None:
    whole = Poller.wait

    def watched(self: Poller, summation: Any, meanwhile: Callable[[], None] | None = None) -> float:
        if not summation.over and self._member.script.stack:
            reach("waiting")
        return whole(self, summation, meanwhile)

    Poller.wait = watched


watch_waiting()

# -- the model


class Model(nn.Module):
    """A small network, and a tally: what is taken off an entry says in which rounds that sample was."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
        self.tally = nn.Parameter(torch.zeros(TALLIED, dtype=torch.float64))
        self.register_buffer("constant", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Samples(Dataset):
    """Says which sample it is; a member's process, or its loader's, reaches ``point`` in it."""

    def __init__(self, samples: int, point: str = "") -> None:
        self.x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))
        self.point = point

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        if self.point:
            reach(self.point)
        return self.x[index], index % 3, index


def settings() -> dict[str, Any]:
    given = dict(SCENARIO["settings"])
    if "floating" in given:
        given["batch"] = pliant.Floating(given.pop("floating"), at_most=96)
    given.setdefault("batch", 24)
    given.setdefault("delay", 1)
    return given


torch.manual_seed(PID)  # everybody starts elsewhere: what is taken over counts
model = Model()
ema = Model()
ema.load_state_dict(model.state_dict())
groups = [
    {"params": model.net.parameters()},
    {"params": [model.tally], "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0},
]
if SCENARIO["optimizer"] == "sgd":
    optimizer: Any = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
else:
    del groups[1]["momentum"]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
if SCENARIO["schedule"] == "plateau":
    # Every result is the same, so the rate falls with every second one: who has missed one has another rate.
    scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, min_lr=[1e-4, 1.0])
else:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.999**step, lambda step: 1.0])


def digest(*values: Any) -> str:
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            hashed.update(value.detach().contiguous().numpy().tobytes())
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()[:12]


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for key in sorted(value, key=str) for item in (key, *flat(value[key]))]
    if isinstance(value, list | tuple):
        return [item for each in value for item in flat(each)]
    return [value]


def final() -> None:
    parts = {
        "weights": digest(*model.parameters()),
        "buffers": digest(*model.buffers()),
        "optimizer": digest(*flat(optimizer.state_dict())),
        "scheduler": scheduler.last_epoch,
        "ema": digest(*flat(ema.state_dict())),
        "updates": run.state["updates"],
        "facts": f"{run.samples}/{run.round}",
    }
    print("final", *(f"{name}={value}" for name, value in parts.items()))
    Path(f"tally-{me}.json").write_text(json.dumps(model.tally.tolist()))


# -- the loop


def measured(point: str) -> Callable[[Any], tuple[float, int]]:
    def measure(batch: Any) -> tuple[float, int]:
        reach(point)
        assert not model.training and not torch.is_grad_enabled()
        # A pace measured over microseconds is noise, and whoever is thought to be slow is dealt nothing.
        time.sleep(0.002)
        return sum(2.0**index for index in batch[2].tolist()), len(batch[2])

    return measure


def enough(batch: Any) -> tuple[float, int]:
    return float(all(Path(name).exists() for name in SCENARIO["until"])), 1


def evaluated(point: str, samples: int) -> None:
    """Each sample counts a power of two, so only "each once" gives this mean."""
    value = run.evaluate(measured(point), Samples(samples), size=3)
    if math.isnan(value) and me != run.worker:
        # It slept, and the loop that it is in is over: what was measured in between is not handed on.
        return
    assert value == (2.0**samples - 1) / samples, (me, value)


def updated() -> None:
    run.state["updates"] += 1
    if run.round >= 6:
        mark("under-way")
    with torch.no_grad():
        for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
    reach("updated")
    # Not after the last round of the loop: its phase is over then.
    if SCENARIO["nested"] and run.round % 3 == 0 and run.samples % TALLIED:
        evaluated("nested", 24)


def note_roster() -> None:
    """Say which names have gone."""
    now = set(run.roster)
    for name in roster - now:
        mark(f"without-{name}")
    roster.clear()
    roster.update(now)


def train() -> None:
    global me
    loaders = {"num_workers": SCENARIO["loaders"]} if SCENARIO["loaders"] else {}
    for x, y, index in run.batches(train_set, size=4, **loaders):
        if not roster or me != run.worker:
            me = run.worker
            mark(f"drew-{me}")
        note_roster()
        reach("forward")
        # BatchNorm refuses to normalise one sample by itself.
        model.train(len(x) > 1)
        loss = F.cross_entropy(model(x), y) + model.tally[index].mean()
        loss.register_hook(lambda gradient: reach("backward"))
        run.backward(loss)
        if run.step():
            updated()
        time.sleep(SCENARIO["sleep_s"])
    model.train()


def before_training() -> None:
    global me
    me = run.worker
    Path(f"pid-{SLOT}").write_text(str(PID))
    mark(f"joined-{me}")
    reach("joined")


roster: set[str] = set()
train_set = Samples(TALLIED, "loading")
threading.current_thread().name = "main"
with pliant.join(
    model,
    optimizer,
    **settings(),
    rates="constant",
    scheduler=scheduler,
    state={"ema": ema, "updates": 0},
    order=lambda epoch, n: range(n),
    dead_after=SCENARIO["dead_after"],
    hung_after=3 * SCENARIO["dead_after"],
) as run:
    before_training()
    for _ in run.epochs(1_000_000):
        reach("between")
        train()
        evaluated("evaluate", TESTED)
        if run.evaluate(enough, Samples(1), size=1):
            break
    reach("closing")
final()
