"""Several workers as threads of one process.

Question  How can a test run a group without processes, a launcher or a coordinator?
Holds     Only the control channel is replaced: the store over which the group is formed is a dictionary, and nobody
          keeps a journal. Each thread appoints for itself how ``join`` finds the group: threads do not inherit a
          context. Rounds, exchanges over gloo, dealing and updates are the real ones. torch's random
          generators belong to the process, so models with dropout draw from a mixture here.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.core.group_state import GroupState, founded
from pliant.core.regrouping import Entry
from pliant.core.rounds import Settled
from pliant.core.tickets import Kind, Ticket
from pliant.errors import RunEnded
from pliant.run import Run, join
from pliant.tensors.process_group import gloo as groups
from pliant.types import WorkerId
from pliant.worker.elastic.enrolment import Solo
from pliant.worker.journal import LineSink
from pliant.worker.loop import Worker
from pliant.worker.session import JoinRequest, Session, appointed, formed, taken_over

_attempts = itertools.count(1)


class MemoryStore:
    """A store in memory, shared by all threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, attempt: int, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, attempt: int, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(key)
            return self._values[key]


@dataclass
class WorkerRecord:
    """What one worker has settled, round by round."""

    outcomes: list[Settled] = field(default_factory=list)
    tickets: list[list[Ticket]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    overlaps: list[bool] = field(default_factory=list)
    """whether the round's contributions were computed beside the sum before it"""


class _Recorder:
    """A journal in memory; stops its worker when another one has failed."""

    def __init__(self, record: WorkerRecord, failed: threading.Event) -> None:
        self._record = record
        self._failed = failed
        self._overlaps = False

    records = certain = 0

    def check(self) -> None:
        if self._failed.is_set():
            raise RunEnded("another worker of the test failed")

    def era(self, group: GroupState, entries: Sequence[Entry] | None, *, sends: bool) -> None: ...

    def joined(self, records: int) -> None: ...

    def moved(self, link: LineSink) -> None: ...

    def confirmed(self) -> None: ...

    def rewound(self, name: str, records: int, worker: str, round_: int) -> None: ...

    def opened(self, group: GroupState, openings: list[Ticket]) -> None:
        self._overlaps = group.overlaps(Kind.TRAIN)

    def settled(self, group: GroupState, outcome: Settled, handed_in: list[Ticket], rate: float) -> None:
        self._record.outcomes.append(outcome)
        self._record.tickets.append(handed_in)
        self._record.rates.append(rate)
        self._record.overlaps.append(self._overlaps)
        self._overlaps = group.overlaps(Kind.TRAIN)


class Together:
    """One worker's handle inside ``together``: its ``join`` is ``pliant.join`` into the group of threads."""

    def __init__(self, place: int, roster: Sequence[WorkerId], channel: MemoryStore, attempt: int, pace: float) -> None:
        self.place = place
        self.record = WorkerRecord()
        self._roster = tuple(roster)
        self._channel = channel
        self._attempt = attempt
        self._pace = pace
        self._failed = threading.Event()

    def join(self, *arguments: Any, **settings: Any) -> Run:
        """``pliant.join`` with the same arguments."""
        with appointed(self._enrolled):
            return join(*arguments, **settings)

    def _enrolled(self, offer: JoinRequest) -> Session:
        me, members = self._roster[self.place], len(self._roster)
        exchange: groups.Alone | groups.Gloo = groups.Alone()
        if members > 1:
            exchange = formed(self._channel, self._attempt, self.place, members, "127.0.0.1", offer)
            taken_over(exchange, offer)
        group = founded(offer.policy, 1, self._roster)
        witness = _Recorder(self.record, self._failed)
        training = offer.prepared(members > 1)
        worker = Worker(me, group, exchange, training, witness, Solo(), check=witness.check, pace=self._pace)
        return Session(worker, None, offer.carried)


def together(
    workers: int, script: Callable[[Together], Any], *, paces: Sequence[float] | None = None, timeout_s: float = 120.0
) -> list[Any]:
    """Run ``script(handle)`` on each of ``workers`` threads; their results, or the first real error raised."""
    roster = [WorkerId(f"w{place}") for place in range(workers)]
    channel, attempt, failed = MemoryStore(), next(_attempts), threading.Event()
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def body(place: int) -> None:
        handle = Together(place, roster, channel, attempt, paces[place] if paces else 1.0)
        handle._failed = failed
        try:
            results[place] = script(handle)
        except BaseException as error:
            errors.append(error)
            failed.set()

    threads = [threading.Thread(target=body, args=(place,), daemon=True) for place in range(workers)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            failed.set()
            errors.append(TimeoutError(f"a worker did not end within {timeout_s:g} s"))
            break
    real = [error for error in errors if not isinstance(error, RunEnded)]
    if errors:
        raise (real or errors)[0]
    return results
