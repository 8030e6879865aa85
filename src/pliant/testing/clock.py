"""One virtual clock, and processes that run on it one at a time.

Question  How can blocking code of many workers run deterministically, without real time passing?
Holds     Exactly one thread runs at any moment: it holds the baton and passes it on only at a virtual wait. Events
          happen in the order of their time; events of the same time in the order in which they were planned. All random
          numbers come from one seeded generator. So a seed and a version of the code give one history on any machine.
          A killed process gets ``Killed`` at its next wait; a paused one does not run, nor do its background actions.
Source    ours; the idea of FoundationDB's and TigerBeetle's simulators (STYLE).
"""

from __future__ import annotations

import heapq
import random
import threading
import zlib
from collections.abc import Callable
from typing import Any

# A worker that polls sees a change within this time.
_LOOK_S = 0.002
# It looks at its own deadlines at least this often.
_SELDOM_S = 0.25


class Killed(BaseException):
    """The virtual process was killed."""


class Timer:
    """A planned event."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None] | None) -> None:
        self.action = action

    def cancel(self) -> None:
        """Drop the event."""
        self.action = None


class World:
    """The clock, the planned events, and the process that holds the baton."""

    def __init__(self, seed: int | str, *, trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.events = 0
        self.log: list[str] | None = [] if trace else None
        self.checksum = 0
        """of all notes: equal for equal seeds"""
        self.counts: dict[str, int] = {}
        self.failure: BaseException | None = None
        self.stopped = False
        self.processes: list[Process] = []
        self._queue: list[tuple[float, int, Timer]] = []
        self._planned = 0
        self._next: Process | None = None
        self._main = threading.Lock()
        self._main.acquire()

    # -- events

    def at(self, time_s: float, action: Callable[[], None]) -> Timer:
        """Plan an event."""
        timer = Timer(action)
        self._planned += 1
        heapq.heappush(self._queue, (time_s if time_s > self.now_s else self.now_s, self._planned, timer))
        return timer

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Plan an event ``delay_s`` from now."""
        return self.at(self.now_s + delay_s, action)

    def note(self, kind: str, *what: Any) -> None:
        """Add to the history that something happened; notes are counted by kind."""
        counts = self.counts
        counts[kind] = counts.get(kind, 0) + 1
        text = f"{self.now_s:.6f} {kind} {what}"
        self.checksum = zlib.crc32(text.encode(), self.checksum)
        if self.log is not None:
            self.log.append(f"{self.now_s:10.4f}  {kind:<14} {' '.join(map(str, what))}")

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random.random() < probability

    def between(self, least: float, most: float) -> float:
        """A random number of that range."""
        return least + (most - least) * self.random.random()

    def fail(self, error: BaseException) -> None:
        """End the history with this error, unless another one came first."""
        if self.failure is None:
            self.failure = error
        self.stopped = True

    def stop(self) -> None:
        """End the history: it is complete."""
        self.stopped = True

    # -- the baton

    def run(self) -> None:
        """Run events until ``stop``; raises the error of ``fail``. Called by the thread that owns the world."""
        try:
            while not self.stopped:
                self._loop(None)
        finally:
            self.stopped = True
            for process in self.processes:
                process.unwind()
        if self.failure is not None:
            raise self.failure

    def _loop(self, me: Process | None) -> None:
        """Run events until it is the turn of ``me``; if that is None, until a process gives the baton back."""
        queue = self._queue
        while True:
            if self.stopped or not queue:
                if not self.stopped:
                    self.fail(AssertionError("nothing is left to happen"))
                if me is None:
                    return
                self._main.release()
                me.turn.acquire()
                return
            self.now_s, _, timer = heapq.heappop(queue)
            action = timer.action
            if action is None:
                continue
            self.events += 1
            try:
                action()
            except BaseException as error:
                self.fail(error)
            chosen, self._next = self._next, None
            if chosen is None:
                continue
            if chosen is me:
                return
            chosen.turn.release()
            if me is None:
                self._main.acquire()
            else:
                me.turn.acquire()
                return

    def give_turn(self, process: Process) -> None:
        """Have this process run after the present event."""
        assert self._next is None
        self._next = process

    def yield_baton(self, process: Process) -> None:
        """Called by the process's own thread: returns when it is its turn."""
        self._loop(process)

    def give_back(self) -> None:
        """A process has ended: the thread that owns the world goes on."""
        self._main.release()

    def resume_for_unwinding(self, process: Process) -> None:
        """Let a process end, and wait for that; called by the thread that owns the world."""
        process.turn.release()
        self._main.acquire()


class Process:
    """A virtual process: one thread, and events that belong to it."""

    look_s = _LOOK_S
    """at most so much later it sees what it waits for"""

    def __init__(self, world: World, name: str, pid: int, body: Callable[[Process], int]) -> None:
        self.world = world
        self.name = name
        self.pid = pid
        self.turn = threading.Lock()
        self.turn.acquire()
        self.alive = True
        self.started = False
        self.finished = False
        """its thread has ended"""
        self.paused = False
        self.hung_until_s = 0.0
        self.unreachable = False
        """cut off from other processes' data ports, in both directions"""
        self.walled = ""
        """``in``: no process can connect to its data port; ``out``: it cannot connect to any other data port"""
        self.parted: set[str] = set()
        """names of the processes whose data ports it cannot connect to"""
        self.ended: list[Callable[[int], None]] = []
        """functions that are called with the exit status when it has ended"""
        self.changed: list[Callable[[], None]] = []
        """functions that are called when it is paused, resumed, cut off or reachable again"""
        self._body = body
        self._wake: Timer | None = None
        self._idle = False
        self._due = False
        self._deferred: list[Callable[[], None]] = []
        world.processes.append(self)

    def start(self) -> None:
        """Begin to run, as one of the next events."""
        self.world.after(0.0, self._start)

    def _start(self) -> None:
        if self.alive:
            self.started = True
            _idle_thread().give(self._run)
            self.world.give_turn(self)

    def _run(self) -> None:
        self.turn.acquire()
        status = 1
        try:
            status = self._body(self)
        except Killed:
            pass
        except BaseException as error:
            if self.alive:
                self.world.fail(error)
        self.finished = True
        if self.alive:
            self.alive = False
            for told in self.ended:
                told(status)
        self.world.give_back()

    # -- called by its own thread

    def compute(self, seconds: float) -> None:
        """Be busy for a while."""
        self._check()
        self._wake = self.world.after(seconds, self._resume)
        self._wait()

    def idle(self, seconds: float) -> None:
        """Sleep between two polls; polls that could not see a change are left out."""
        self._check()
        self._idle = True
        self._wake = self.world.after(max(seconds, _SELDOM_S), self._resume)
        self._wait()

    def _wait(self) -> None:
        self.world.yield_baton(self)
        self._check()

    def _check(self) -> None:
        if not self.alive:
            raise Killed

    # -- called by events

    def notice(self) -> None:
        """Wake it soon if it is idle: something has changed that it may be waiting for."""
        if self._idle and self.alive:
            self._idle = False
            if self._wake is not None:
                self._wake.cancel()
            self._wake = self.world.after(self.world.random.random() * self.look_s, self._resume)

    def _resume(self) -> None:
        world = self.world
        if not self.alive:
            return
        if self.paused:
            self._due = True
            return
        if world.now_s < self.hung_until_s:
            self._wake = world.at(self.hung_until_s, self._resume)
            return
        self._idle, self._wake = False, None
        world.give_turn(self)

    def in_background(self, action: Callable[[], None]) -> None:
        """Run an action of the process: at once, or after a pause; not after its end."""
        if self.paused:
            self._deferred.append(action)
        elif self.alive:
            action()

    def kill(self, status: int) -> None:
        """End it, whatever it is doing."""
        if not self.alive:
            return
        self.alive = False
        if self._wake is not None:
            self._wake.cancel()
        if self.started and not self.finished:
            self.world.after(0.0, lambda: self.world.give_turn(self) if not self.finished else None)
        for told in self.ended:
            told(status)

    def pause(self) -> None:
        """Stop it where it is (SIGSTOP)."""
        if self.alive and not self.paused:
            self.paused = True
            for told in self.changed:
                told()

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        if not self.paused:
            return
        self.paused = False
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            if self.alive:
                action()
        if self._due and self.alive:
            self._due = False
            self._wake = self.world.after(0.0, self._resume)
        for told in self.changed:
            told()

    def cut_off(self, unreachable: bool) -> None:
        """Cut the process off from the others' data, or connect it again."""
        self.unreachable = unreachable
        for told in self.changed:
            told()

    def unwind(self) -> None:
        """End the thread: the world has ended."""
        self.alive = False
        if self.started and not self.finished:
            self.world.resume_for_unwinding(self)


# -- threads, reused

_idle: list[_Hand] = []


class _Hand:
    """A thread that runs one process after another."""

    def __init__(self) -> None:
        self._work = threading.Lock()
        self._work.acquire()
        self._body: Callable[[], None] | None = None
        threading.Thread(target=self._serve, name="pliant-virtual", daemon=True).start()

    def give(self, body: Callable[[], None]) -> None:
        self._body = body
        self._work.release()

    def _serve(self) -> None:
        while True:
            self._work.acquire()
            body, self._body = self._body, None
            assert body is not None
            _idle_after(self, body)


def _idle_after(hand: _Hand, body: Callable[[], None]) -> None:
    body()
    _idle.append(hand)


def _idle_thread() -> _Hand:
    return _idle.pop() if _idle else _Hand()
