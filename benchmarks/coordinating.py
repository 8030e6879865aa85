"""What the coordinator costs: CPU seconds per heartbeat, and how it grows with the workers.

Question  How much of a core does the coordinator need for the signs of life of so many workers?
Holds     The coordinator is the real one, with a journal in memory and connections that only encode. Time is passed in:
          two heartbeats per second and worker, a tick every 50 ms, as in a run; seconds are CPU seconds of this thread.
Source    docs/design/0020-coordinator-at-scale.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.results import Trial
from pliant.control import messages
from pliant.core import events, journal
from pliant.runtime.charter import Charter
from pliant.runtime.coordinator import Coordinator
from pliant.runtime.service import TICK_S

SIZES = (10, 100, 1000)
BEATS_PER_S = 2
SIGNATURE = messages.Signature("0", [("weight", [2], "float32")], {"batch": "8"})
QUICK_S, FULL_S = 5.0, 30.0

Say = Callable[[str], None]


@dataclass
class _Wire:
    """A connection that encodes what it is told."""

    number: int
    sent: int = 0

    def send(self, message: messages.FromCoordinator | messages.ToAgent) -> None:
        self.sent += len(messages.encode(message))

    def close(self) -> None: ...


class _Journal:
    """Forgets what it is given."""

    def append(self, records: list[journal.Record]) -> None: ...

    def records(self) -> list[journal.Record]:
        return []

    def close(self) -> None: ...


class Crowd:
    """A coordinator and so many workers in an era."""

    def __init__(self, workers: int) -> None:
        self.now_s, self._beats = 100.0, 0
        charter = Charter("job", "train.py", "0", workers=workers)
        self.coordinator = Coordinator(charter, _Journal(), lambda: self.now_s, 1e9)
        agent = _Wire(0)
        self.coordinator.agent_connected(agent)
        self.coordinator.agent_received(agent, messages.Enlist("", "0", [], workers, owner=True))
        self.wires = [_Wire(number) for number in range(1, workers + 1)]
        for slot, wire in enumerate(self.wires):
            self.coordinator.connected(wire)
            self.coordinator.received(wire, messages.Hello(f"w{slot}", 7, "0"))
        for slot, wire in enumerate(self.wires):
            self.coordinator.received(wire, messages.Ready(SIGNATURE, f"host:{slot}"))
        for wire in self.wires:
            self.coordinator.received(wire, messages.Entered(1, 0))

    def beat(self, wire: _Wire) -> None:
        """One worker's sign of life."""
        self._beats += 1
        self.coordinator.received(wire, messages.Beat(1, 1, self._beats, usual_s=0.1, active=True))

    def live(self, seconds: float) -> None:
        """Let time pass, with beats spread evenly."""
        until_s, place = self.now_s + seconds, 0.0
        per_tick = len(self.wires) * BEATS_PER_S * TICK_S
        while self.now_s < until_s:
            self.now_s += TICK_S
            upto = place + per_tick
            for number in range(int(place), int(upto)):
                self.beat(self.wires[number % len(self.wires)])
            place = upto
            self.coordinator.handle(events.Tick(), self.now_s)


def measure(seconds: float, say: Say) -> tuple[Trial, ...]:
    """Let crowds of several sizes live for so long."""
    trials: list[Trial] = []
    for size in SIZES:
        say(f"{size} workers for {seconds:g} s")
        began_s = time.thread_time()
        crowd = Crowd(size)
        formed_s = time.thread_time() - began_s
        crowd.live(1.0)
        began_s = time.thread_time()
        crowd.live(seconds)
        cpu_s = time.thread_time() - began_s
        beats = size * BEATS_PER_S * seconds
        figures = {"cpu_share": cpu_s / seconds, "beat_us": cpu_s / beats * 1e6, "formed_s": formed_s}
        trials.append(Trial("pliant", f"{size} workers", "heartbeats", 0, figures))
    return tuple(trials)
