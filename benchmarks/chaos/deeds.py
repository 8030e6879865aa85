"""Faults carried out.

Question  Who is hit, and is anything left that can go on?
Holds     What was stopped, cut off or filled is put right after its time, and everything is at the end. Without
          checkpoints two workers that train are left alone by every fault: nobody else holds the state. A fault that
          finds nobody it may hit, or too few workers, brings workers instead, and is counted as what was done.
"""

import heapq
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.stage import Stage, Worker
from benchmarks.chaos.train import DEAD_AFTER_S
from benchmarks.waiting import POLL_S
from pliant.coordinator.status import Status
from pliant.errors import PliantError
from pliant.launch import requests

FEWEST, MOST = 4, 6
SAFE = 2  # workers that train and are left alone
_GONE = ("left", "finished", "failed", "ended")


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that happened: what, when (system-wide clock), for how long."""

    kind: str
    at_s: float
    held_s: float
    drawn: str


@dataclass(slots=True)
class Deeds:
    """Strikes, and puts right what is due."""

    stage: Stage
    total_losses: bool
    done: list[Done] = field(default_factory=list)
    nothing: int = 0
    """faults that found nobody to hit"""
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _over: threading.Event = field(default_factory=threading.Event)
    _stopped: set[int] = field(default_factory=set)
    _cut: set[str] = field(default_factory=set)
    _full: int = 0
    _number: int = 0
    _asked_at: int = -1
    _answer: Status | None = None

    @property
    def holding(self) -> bool:
        """Whether anything is stopped, cut off or full right now."""
        return bool(self._due)

    def strike(self, fault: Fault) -> None:
        """Do it now, or what takes its place."""
        deed = {
            "kill": self._kill,
            "storm": self._storm,
            "host": self._host,
            "nap": self._stop,
            "doze": self._stop,
            "term": self._term,
            "drain": self._drain,
            "scale": self._scale,
            "join": self._join,
            "coordinator": self._coordinator,
            "disk": self._disk,
            "blink": self._link,
            "cut": self._link,
            "total": self._total,
            "launcher": self._launcher,
        }[fault.kind]
        self._asked_at = -1
        did = deed(fault)
        at_s = time.monotonic()
        if did is None:
            self.nothing += 1
        else:
            held_s = fault.length * DEAD_AFTER_S if did == fault.kind else 0.0
            self.done.append(Done(did, at_s, held_s, fault.kind))

    @contextmanager
    def tended(self) -> Iterator[None]:
        """A thread puts right what is due, whatever else waits for an answer; everything at the end."""
        tending = threading.Thread(target=self._tend)
        tending.start()
        try:
            yield
        finally:
            self._over.set()
            tending.join()

    def _tend(self) -> None:
        while not self._over.wait(POLL_S):
            self._put_right(time.monotonic())
        self._put_right(math.inf)

    def _put_right(self, until_s: float) -> None:
        with self._lock:
            while self._due and self._due[0][0] <= until_s:
                heapq.heappop(self._due)[2]()

    def _later(self, length: float, right: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (time.monotonic() + length * DEAD_AFTER_S, self._number, right))

    # who

    def _free(self) -> list[Worker]:
        """Those that nothing else is being done to."""
        return [one for one in self.stage.workers() if one.pid not in self._stopped and one.host not in self._cut]

    def _victims(self, fault: Fault) -> list[Worker]:
        """Those that may be lost now: all, or with nothing to fall back on all but two that train."""
        free = self._free()
        if self.total_losses:
            return free
        status = self._status()
        training = {each.slot for each in status.workers if each.state == "training"} if status is not None else set()
        # The owner's host is never cut off, so these can go on whatever happens to the links.
        able = [one for one in free if one.slot in training and one.host == self.stage.network.hosts[0]]
        able = [one for one in able if self.stage.trains(one)]
        turned = int(fault.pick * 97) % max(1, len(able))
        safe = [*able[turned:], *able[:turned]][:SAFE]
        return [one for one in free if one not in safe] if len(safe) == SAFE else []

    def _wanted(self) -> int:
        """How many workers the run is to have."""
        status = self._status()
        return sum(each.state not in _GONE for each in status.workers) if status is not None else FEWEST

    def _status(self) -> Status | None:
        """As of this fault: without a coordinator the answer takes its time."""
        if self._asked_at != len(self.done):
            self._asked_at, self._answer = len(self.done), self.stage.status()
        return self._answer

    # what

    def _kill(self, fault: Fault) -> str | None:
        victims = self._victims(fault)
        if not victims:
            return self._more(fault)
        return self._signal(victims[int(fault.pick * len(victims))], signal.SIGKILL, "kill")

    def _storm(self, fault: Fault) -> str | None:
        victims = self._victims(fault)
        if not self.total_losses and not victims:
            return self._more(fault)
        victims = victims if not self.total_losses else victims[SAFE:]
        for victim in victims:
            self._signal(victim, signal.SIGKILL, "storm")
        return "storm"

    def _total(self, fault: Fault) -> str | None:
        for worker in self.stage.workers():
            self._signal(worker, signal.SIGKILL, "total")
        return "total"

    def _launcher(self, fault: Fault) -> str | None:
        with self._lock:
            full = bool(self._full)
        if full:
            # Nobody can start anything on a full disk; the next one may.
            return None
        self.stage.resume()
        return "launcher"

    def _host(self, fault: Fault) -> str | None:
        joined = [one for one in self.stage.joined if one.process.poll() is None]
        if not joined or self._wanted() <= FEWEST:
            return self._more(fault)
        # ``ip netns exec`` becomes the launcher: its number is the launcher's.
        joined[int(fault.pick * len(joined))].process.kill()
        return "host"

    def _stop(self, fault: Fault) -> str | None:
        victims = self._victims(fault)
        if not victims:
            return self._more(fault)
        victim = victims[int(fault.pick * len(victims))]

        def go_on() -> None:
            self._stopped.discard(victim.pid)
            self._signal(victim, signal.SIGCONT, "")

        with self._lock:
            self._stopped.add(victim.pid)
            self._later(fault.length, go_on)
            return self._signal(victim, signal.SIGSTOP, fault.kind)

    def _term(self, fault: Fault) -> str | None:
        victims = self._victims(fault)
        if not victims or self._wanted() <= FEWEST:
            return self._more(fault)
        return self._signal(victims[int(fault.pick * len(victims))], signal.SIGTERM, "term")

    def _drain(self, fault: Fault) -> str | None:
        status, slots = self._status(), {one.slot for one in self._victims(fault)}
        names = [one.name for one in status.workers if one.state == "training" and one.slot in slots] if status else []
        if not names or self._wanted() <= FEWEST:
            return self._more(fault)
        return self._asked("drain", "/drain", {"worker": names[int(fault.pick * len(names))]})

    def _scale(self, fault: Fault) -> str | None:
        return self._asked("scale", "/scale", {"workers": FEWEST + int(fault.pick * (MOST - FEWEST + 1))})

    def _join(self, fault: Fault) -> str | None:
        if self._wanted() >= MOST:
            return self._drain(fault)
        there = {worker.host for worker in self.stage.workers()}
        away = self.stage.network.hosts[1:] or self.stage.network.hosts
        away = [host for host in away if host not in there] or away
        self.stage.join(away[int(fault.pick * len(away))])
        return "join"

    def _more(self, fault: Fault) -> str | None:
        """In place of a fault that would leave too few."""
        if self._wanted() >= MOST:
            return None
        there = {worker.host for worker in self.stage.workers()}
        if set(self.stage.network.hosts) - there:
            return self._join(fault)
        return self._asked("scale", "/scale", {"workers": MOST})

    def _asked(self, kind: str, path: str, wish: dict[str, object]) -> str | None:
        try:
            self.stage.ask(lambda access: requests.post(access, path, wish))
        except PliantError:
            # There is no coordinator right now, or it does not want to.
            return None
        return kind

    def _coordinator(self, fault: Fault) -> str | None:
        pid = self.stage.coordinator()
        if pid is None:
            return None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return "coordinator"

    def _disk(self, fault: Fault) -> str | None:
        medium = self.stage.disk
        if medium is None:
            return None

        def empty() -> None:
            self._full -= 1
            if not self._full:
                medium.empty()

        with self._lock:
            self._full += 1
            self._later(fault.length, empty)
            medium.fill()
        return "disk"

    def _link(self, fault: Fault) -> str | None:
        there = {worker.host for worker in self.stage.workers()}
        joined = [host for host in self.stage.network.hosts[1:] if host not in self._cut and host in there]
        if not joined:
            return self._join(fault)
        host = joined[int(fault.pick * len(joined))]

        def restore() -> None:
            self._cut.discard(host)
            self.stage.network.restore(host)

        with self._lock:
            self._cut.add(host)
            self._later(fault.length, restore)
            self.stage.network.cut(host)
        return fault.kind

    def _signal(self, worker: Worker, number: signal.Signals, kind: str) -> str:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)
        return kind
