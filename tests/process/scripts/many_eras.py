"""Many eras in one process: ``python many_eras.py 200``.

Workers are threads and the coordinator is a few lines that issue planned and unplanned eras one after another; loop,
groups over gloo and handoff over TCP are the real ones. Two workers stay; a third one comes, is handed the state,
computes, and leaves, again and again. Prints a JSON object: threads, descriptors and memory early on and at the end,
and whether both workers hold the same weights.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import pliant
from pliant.control.link import Position
from pliant.control.mailbox import Mailbox
from pliant.control.messages import Broken, EraPlan, EraStart, Leave, Past, Push, Welcome, Written
from pliant.coordinator.journal import NumberedRecords
from pliant.core.journal import records as journal
from pliant.environment import Job
from pliant.worker import session
from pliant.worker.session import JoinRequest, Session

LIMIT_S = 60.0
STAYING = ("w0", "w1")
DATA = TensorDataset(torch.randn(960, 6), torch.randint(0, 3, (960,)))
OVER = threading.Event()
errors: list[BaseException] = []


class Line:
    """A worker's line to the coordinator in the same process."""

    local_address = "127.0.0.1"
    sends_lines = False

    def __init__(self, office: Office, name: str) -> None:
        self.office = office
        welcome = Welcome("job", name, 1, 5.0, office.written, office.era > 0, office.past())
        self.mailbox = Mailbox(welcome)
        self.position = Position()
        self.address = ""
        self.stopped_at: tuple[int, int] | None = None
        self.entered_era = 0
        self.is_ready = self.has_left = False

    @property
    def worker(self) -> str:
        return self.mailbox.worker

    def ready(self, signature: Any, address: str, call: Any) -> None:
        self.address, self.is_ready = address, True

    def stopped(self, era: int, exchange: int, *, active: bool, whole: bool = True, failed: str = "") -> None:
        self.stopped_at = (era, exchange if active else -1)

    def entered(self, era: int, exchange: int) -> None:
        self.entered_era = era

    def put(self, attempt: int, key: str, value: bytes) -> None:
        for line in list(self.office.lines.values()):
            line.mailbox.take(Push(attempt, {key: value}))

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        return self.mailbox.key(attempt, key, timeout_s)

    def keep(self, lines: Iterable[bytes], first: int) -> None:
        self.office.keep(list(lines), first)
        self.mailbox.take(Written(self.office.written))

    def keep_earlier(self, lines: Sequence[bytes], first: int) -> None:
        """What others have kept so far is theirs to tell."""

    def unwritten(self) -> list[bytes]:
        return []

    def plan(self, epochs: int | None, samples: int | None) -> None: ...

    def leaving(self, reason: str) -> None: ...

    def send_lines_again(self) -> None: ...

    def finish(self, *, left: bool, over: bool = False) -> None:
        self.has_left = left

    def fail(self, reason: str, *, shown: bool, fatal: bool = False) -> None:
        errors.append(RuntimeError(f"{self.worker}: {reason}"))

    def close(self) -> None: ...


class Office:
    """Issues eras, and keeps of the journal what a newcomer is told."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.era = 0
        self._numbered = NumberedRecords()
        self._lock = threading.Lock()
        self._tasks: dict[int, tuple[str, int]] = {}
        self._past: list[Past] = []

    @property
    def written(self) -> int:
        return self._numbered.written

    def past(self) -> list[Past]:
        with self._lock:
            return list(self._past)

    def keep(self, lines: list[bytes], first: int) -> None:
        """Every worker keeps every line; of each number the first one is read, after those before it."""
        with self._lock:
            for record in self._numbered.taken(first, [journal.decode(line) for line in lines]):
                match record:
                    case journal.PhaseRecord(phase=phase, task=task, epoch=epoch):
                        self._tasks[phase] = (task, epoch)
                    case journal.PhaseEndRecord(phase=phase, result=result):
                        self._past.append(Past(*self._tasks.pop(phase), result))
                    case _:
                        pass

    def _tell(self, message: Any) -> None:
        for line in self.lines.values():
            line.mailbox.take(message)

    def _addresses(self) -> dict[str, str]:
        return {name: line.address for name, line in self.lines.items()}

    def _all_entered(self) -> None:
        wait(lambda: all(line.entered_era >= self.era for line in self.lines.values()), f"era {self.era}")

    def start(self, exchange: int, donor: str) -> None:
        self.era += 1
        self._tell(EraStart(1, self.era, self.era, list(self.lines), donor, exchange, self._addresses()))
        self._all_entered()

    def plan(self, roster: list[str]) -> None:
        self.era += 1
        donor = next(name for name in roster if self.lines[name].position.active)
        self._tell(EraPlan(1, self.era, self.era, roster, donor, self._addresses()))

    def come(self, name: str) -> None:
        """A newcomer is taken in, and takes the state over."""
        thread = worker(self, name)
        wait(lambda: name in self.lines and self.lines[name].is_ready, f"{name} is ready")
        self.plan(list(self.lines))
        self._all_entered()
        wait(lambda: self.lines[name].position.active, f"{name} is active")
        newcomers[name] = thread

    def go(self, name: str) -> None:
        """It leaves in good order."""
        line = self.lines[name]
        # The last one that holds the state is not let go.
        wait(lambda: all(self.lines[other].position.active for other in STAYING), "the others hold the state")
        line.mailbox.take(Leave("asked"))
        self.plan([other for other in self.lines if other != name])
        wait(lambda: line.has_left, f"{name} has left")
        del self.lines[name]
        self._all_entered()
        newcomers.pop(name).join(LIMIT_S)

    def break_up(self) -> None:
        """Everybody stops, and a new era begins with the same members."""
        for line in self.lines.values():
            line.stopped_at = None
        self._tell(Broken(1, self.era, "for the test"))
        wait(lambda: all(line.stopped_at for line in self.lines.values()), "all have stopped")
        at = {name: line.stopped_at[1] for name, line in self.lines.items() if line.stopped_at}
        donor = max(at, key=lambda name: at[name])
        self.start(at[donor], donor)


newcomers: dict[str, threading.Thread] = {}


def wait(ask: Callable[[], Any], what: str) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not ask():
        if errors:
            raise errors[0]
        if time.monotonic() > until_s:
            raise TimeoutError(what)
        time.sleep(0.001)


digests: dict[str, str] = {}


def script(office: Office, name: str) -> None:
    def enroll(offer: JoinRequest) -> Session:
        line = Line(office, name)
        office.lines[name] = line
        job = Job("127.0.0.1:1", "token", name)
        return session.build(lambda: line, lambda link: session.job_parts(job, link, offer))  # type: ignore[arg-type]

    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"updates": 0}
    with session.appointed(enroll), pliant.join(model, optimizer, batch=24, delay=1, state=state) as run:
        for _ in run.epochs(1_000_000):
            for x, y in run.batches(DATA, size=4):
                model.train(len(x) > 1)
                run.backward(nn.functional.cross_entropy(model(x), y))
                if run.step():
                    run.state["updates"] += 1
                time.sleep(0.001)
            model.train()
            if run.evaluate(lambda batch: (float(OVER.is_set()), 1), TensorDataset(torch.zeros(1)), size=1):
                break
    tensors = [*model.parameters(), *model.buffers()]
    hashed = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))
    digests[name] = f"{hashed.hexdigest()[:12]} {run.state['updates']} {run.round} {run.samples}"


def worker(office: Office, name: str) -> threading.Thread:
    def body() -> None:
        try:
            script(office, name)
        except pliant.Left:
            pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread


def undertakers() -> int:
    """Groups that were left and whose gloo threads have not ended yet: two of these, one of ours, four descriptors."""
    return sum(thread.name == "pliant-undertaker" for thread in threading.enumerate())


def measured() -> dict[str, int]:
    """Threads, descriptors and KB of memory, without what gloo still keeps of groups that were left.

    It forgets to end a sum whose connections broke in its middle, and ends it by a timeout of a minute.
    """
    gc.collect()
    until_s = time.monotonic() + 2.0
    while undertakers() and time.monotonic() < until_s:
        time.sleep(0.05)
    left = undertakers()
    lines = Path("/proc/self/status").read_text().splitlines()
    memory = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())) - 3 * left,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())) - 4 * left,
        "memory": memory,
        "left": left,
    }


def main(eras: int) -> None:
    torch.set_num_threads(1)
    office = Office()
    threads = [worker(office, name) for name in STAYING]
    wait(lambda: len(office.lines) == 2 and all(line.is_ready for line in office.lines.values()), "two workers")
    office.lines = {name: office.lines[name] for name in STAYING}
    office.start(0, "w0")
    early: dict[str, int] = {}
    number = 1
    while office.era < eras:
        number += 1
        office.come(f"w2.{number}")
        office.break_up()
        office.go(f"w2.{number}")
        office.break_up()
        if not early and office.era >= eras // 4:
            early = measured()
    late = measured()
    OVER.set()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    print(json.dumps({"eras": office.era, "early": early, "late": late, "digests": digests}))


main(int(sys.argv[1]))
