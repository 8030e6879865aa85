"""The run that chaos is let loose on: its launchers, its workers, its files.

Question  Who is there right now, how are they reached, and what is left of them afterwards?
Holds     Every process carries a mark in its environment that children inherit: whatever has it is ours, and nothing
          else is ever signalled. Whatever happens, none outlives the stage. All temporary files go to a directory of
          our own.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from safetensors.torch import save_file

import pliant
from benchmarks.chaos import train
from benchmarks.chaos.disk import Disk, NoDisk, disk
from benchmarks.chaos.network import Here, hosts
from benchmarks.namespaces import NoNetwork
from benchmarks.processes import ROOT
from benchmarks.recovery.stamps import is_alive
from benchmarks.waiting import wait_for
from pliant.coordinator.status import Status
from pliant.core.journal.records import JOURNAL
from pliant.launch import requests, run_directory

MARK = "PLIANT_CHAOS_MARK"
SLOT = b"PLIANT_WORKER="
HOSTS = 3
DEVICE_MS = "60"  # of a micro-batch, nearly all of it asleep: five workers and more on two cores
GRACE_S = 10.0
START_S = 120.0
END_S = 120.0
GONE_S = 10.0
RECENT_S = 1.5
TRAINED = 1437


class Trouble(Exception):
    """The run did not do what it had to."""


def cli(*words: str) -> list[str]:
    """A command line of the ``pliant`` command."""
    return [sys.executable, "-c", "from pliant.ui.cli import main; main()", *words]


def knows(option: str, *words: str) -> bool:
    """Whether the ``pliant`` command has such an option or command."""
    told = subprocess.run([*cli(*words), "--help"], capture_output=True, text=True, check=False, env=environment(""))
    return option in told.stdout


def environment(mark: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
    path = [str(Path(pliant.__file__).resolve().parents[1]), str(ROOT), found.get("PYTHONPATH", "")]
    return {
        **found,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        MARK: mark,
    }


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """Of all live processes that can be looked into."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                yield int(entry.name), (entry / "environ").read_bytes().split(b"\0")


def marked(mark: str) -> list[int]:
    """Live processes that carry the mark."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid, found in _environments() if wanted in found and is_alive(pid)]


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that trains."""

    slot: str
    pid: int
    host: str


@dataclass(slots=True)
class Launched:
    """A launcher on a host."""

    host: str
    process: subprocess.Popen[bytes]


@dataclass(slots=True)
class Stage:
    """One run and its surroundings. ``out`` is the working directory of all its processes."""

    work: Path
    run: Path
    seed: int
    network: Here
    disk: Disk | None
    checkpoints: Path | None
    device_ms: str = DEVICE_MS
    keep: bool = False
    """its files stay: something is wrong with them"""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    launchers: list[Launched] = field(default_factory=list)
    _owners: list[int] = field(default_factory=list)
    """which of them have owned the run, the present one last"""
    known: dict[int, Worker] = field(default_factory=dict)
    """all workers that were ever seen, by process number"""

    @property
    def out(self) -> Path:
        return self.work / "out"

    @property
    def journal(self) -> Path:
        return self.run / JOURNAL

    @property
    def owner(self) -> subprocess.Popen[bytes]:
        return self.launchers[self._owners[-1]].process

    @property
    def joined(self) -> list[Launched]:
        """The launchers that only joined."""
        return [one for number, one in enumerate(self.launchers) if number not in self._owners]

    @property
    def script(self) -> list[str]:
        """The script with its arguments."""
        words = [str(Path(train.__file__).resolve()), str(self.work / "digits.safetensors"), str(self.seed)]
        return words if self.checkpoints is None else [*words, str(self.checkpoints)]

    # starting

    def start(self, workers: int, *options: str) -> None:
        """The owner of the run."""
        words = ["run", "-n", str(workers), "--dir", str(self.run), "--grace", str(GRACE_S), *options]
        if self.network.hosts[0]:
            words += ["--host", self.network.address, *(["--insecure"] if knows("--insecure", "run") else [])]
        before = self._address()
        self._owners.append(len(self.launchers))
        self._launch(self.network.hosts[0], cli(*words, *self.script))
        if not wait_for(lambda: self._address() != before or self.ended, START_S) or self.ended:
            raise Trouble(f"the run did not start: {self.last_words()}")

    def resume(self) -> None:
        """Kill the owner, with its workers and the coordinator, and let another one go on with the run."""
        self.owner.kill()
        self.owner.wait()
        self.start(3, "--resume")

    def _address(self) -> str:
        file = self.run / run_directory.ADDRESS
        return file.read_text() if file.exists() else ""

    def join(self, host: str) -> None:
        """One more worker, from that host."""
        access, number = run_directory.access(self.run), len(self.launchers)
        words = ["run", "--join", access.address, "--token-file", str(self.run / run_directory.TOKEN), "-n", "1"]
        words += ["--dir", str(self.work / f"joined-{number}"), "--grace", str(GRACE_S)]
        self._launch(host, cli(*words, *self.script))

    def _launch(self, host: str, line: list[str]) -> None:
        surrounding = {**environment(self.mark), "TMPDIR": str(self.work / "tmp")}
        # torch leaves an empty directory where it would keep compiled code.
        surrounding |= {"CHAOS_DEVICE_MS": self.device_ms, "TORCHINDUCTOR_CACHE_DIR": str(self.work / "compiled")}
        with (self.work / f"launcher-{len(self.launchers)}.log").open("wb") as log:
            process = subprocess.Popen(
                self.network.at(host, line),
                env=surrounding,
                cwd=self.out,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers.append(Launched(host, process))

    # looking

    @property
    def ended(self) -> bool:
        return self.owner.poll() is not None

    def last_words(self) -> str:
        log = self.work / f"launcher-{self._owners[-1]}.log"
        lines = log.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) or "it said nothing"

    def workers(self) -> list[Worker]:
        """The live processes of all slots, those that have just been started too, in the order of the slots."""
        wanted, found = f"{MARK}={self.mark}".encode(), list[Worker]()
        for pid, variables in _environments():
            slots = [each.removeprefix(SLOT) for each in variables if each.startswith(SLOT)]
            if slots and wanted in variables and is_alive(pid):
                if pid not in self.known:
                    self.known[pid] = Worker(slots[0].decode(), pid, self._host_of(pid))
                found.append(self.known[pid])
        return sorted(found, key=lambda worker: (int(worker.slot.removeprefix("w") or 0), worker.pid))

    def trains(self, worker: Worker) -> bool:
        """Whether it has computed within the last moments: it holds the state."""
        with suppress(OSError):
            return time.time() - (self.out / f"stamps-{worker.pid}").stat().st_mtime < RECENT_S
        return False

    def _host_of(self, pid: int) -> str:
        """By its launcher; the owner's host if that cannot be told."""
        with suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            for launched in self.launchers:
                if launched.process.pid == parent:
                    return launched.host
        return self.network.hosts[0]

    def coordinator(self) -> int | None:
        """Its process number, if there is one right now."""
        for pid in marked(self.mark):
            with suppress(OSError):
                if b"pliant.launch.coordinator_process" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return pid
        return None

    def status(self) -> Status | None:
        """What the coordinator says; None if nobody answers."""
        with suppress(Exception):
            return msgspec.json.decode(self.ask(lambda access: requests.get(access, "/status")), type=Status)
        return None

    def ask(self, question: Callable[[run_directory.Access], bytes]) -> bytes:
        """Put a question to the coordinator, as a person's command does."""
        access = run_directory.access(self.run)
        return self.network.ask(lambda: question(access))

    # ending

    def finish(self, epoch: int) -> None:
        """Let the run end after that epoch."""
        partial = self.out / "last-epoch.partial"
        partial.write_text(str(epoch))
        partial.rename(self.out / "last-epoch")

    def await_end(self) -> None:
        """Until every launcher has ended by itself."""
        if not wait_for(lambda: all(each.process.poll() is not None for each in self.launchers), END_S):
            raise Trouble(f"the run did not end within {END_S:g} s: {self.last_words()}")
        if self.owner.returncode:
            raise Trouble(f"the run ended with status {self.owner.returncode}: {self.last_words()}")

    def dump(self) -> None:
        """Let every worker write down where it is."""
        for worker in self.workers():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def sweep(self) -> int:
        """End whatever is left of us; how many there were after a moment's patience."""
        over = all(each.process.poll() is not None for each in self.launchers)
        wait_for(lambda: not marked(self.mark), GONE_S if over else 0.0)
        left = marked(self.mark)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launched in self.launchers:
            launched.process.wait()
        return len(left)


def write_digits(path: Path) -> None:
    """Handwritten digits, 8 × 8: 1437 to train on, 360 to test with."""
    import torch
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    inputs, classes = torch.as_tensor(pixels).double() / 8 - 1, torch.as_tensor(labels).long()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    inputs, classes = inputs[order], classes[order]
    first = {"pixels": inputs[:TRAINED], "labels": classes[:TRAINED]}
    rest = {"test_pixels": inputs[TRAINED:], "test_labels": classes[TRAINED:]}
    save_file({name: tensor.contiguous() for name, tensor in (first | rest).items()}, path)


@contextmanager
def stage(seed: int, notes: list[str], *, surroundings: bool = True, checkpoints: bool = False) -> Iterator[Stage]:
    """A stage with a network and a disk of its own, where this machine lets us; ``notes`` gets what it does not.

    If anything goes wrong its files stay, and ``Trouble`` names them.
    """
    work = Path(tempfile.mkdtemp(prefix="pliant-chaos-"))
    for name in ("out", "tmp"):
        (work / name).mkdir()
    write_digits(work / "digits.safetensors")
    with ExitStack() as stack:
        network: Here = Here()
        medium: Disk | None = None
        if surroundings:
            try:
                network = stack.enter_context(hosts(HOSTS))
            except NoNetwork as error:
                notes.append(f"no links were cut: {error}")
            try:
                medium = stack.enter_context(disk(work / "disk"))
            except NoDisk as error:
                notes.append(f"no disk was filled: {error}")
        place = medium.path if medium is not None else work
        built = Stage(work, place / "run", seed, network, medium, place / "checkpoints" if checkpoints else None)
        try:
            yield built
        except BaseException as error:
            built.dump()
            built.sweep()
            _copied(place, work)
            if isinstance(error, Trouble):
                raise Trouble(f"{error} (kept: {work})") from error
            raise
        built.sweep()
        if built.keep:
            _copied(place, work)
    if not built.keep:
        shutil.rmtree(work, ignore_errors=True)


def _copied(place: Path, work: Path) -> None:
    """What is on a disk of our own goes with it."""
    if place != work:
        shutil.copytree(place, work / "kept", dirs_exist_ok=True)
