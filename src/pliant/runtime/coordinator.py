"""The coordinator's loop.

Question  How do messages and process ends become events, and how are the effects carried out?
Holds     One method takes one event; the clock is passed in. All decisions are ``core.roster``'s. The journal
          is written here only, in whole lines, each batch handed to the system before the next event is taken.
Source    ours; docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, assert_never

import msgspec

from pliant.control import messages
from pliant.control.app import Peer
from pliant.core import events, journal, members, roster
from pliant.core.terms import Terms
from pliant.errors import JournalError, UsageError
from pliant.runtime.status import Status, Tally
from pliant.types import WorkerId

_FROM_WORKERS = (
    journal.PolicyRecord,
    journal.PhaseRecord,
    journal.RoundRecord,
    journal.ExchangeRecord,
    journal.PhaseEndRecord,
)
"""Runs, eras and ends are the coordinator's own to write."""


@dataclass(frozen=True, slots=True)
class Charter:
    """What is fixed for a run before it starts."""

    job: str
    script: str
    workers: tuple[WorkerId, ...]
    version: str
    dead_after_s: float = members.DEAD_AFTER_S


class Processes(Protocol):
    """The launcher, as the coordinator sees it."""

    def terminate(self, worker: WorkerId) -> None: ...
    def kill(self, worker: WorkerId) -> None: ...
    def note(self, text: str) -> None: ...
    def ended(self, end: events.Ended) -> None: ...


class JournalFile:
    """Appends checksummed lines to a new file."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise UsageError(
                f"{path} already holds the journal of a run; give another --dir, or move that run away"
            ) from error
        self._chain = 0

    def append(self, records: list[journal.Record]) -> None:
        """Hand whole lines to the system."""
        lines: list[bytes] = []
        for record in records:
            text, self._chain = journal.line(journal.encode(record), self._chain)
            lines.append(text)
        # Unbuffered: what could not be written now must not turn up behind what comes later.
        self._file.write(b"".join(lines))

    def close(self) -> None:
        """Nothing can be appended any more."""
        self._file.close()


class Coordinator:
    """Feeds ``core.roster`` and carries out what it decides. It is the ``Desk`` of ``control.app``."""

    def __init__(
        self,
        charter: Charter,
        journal_file: JournalFile,
        processes: Processes,
        clock: Callable[[], float],
        started_unix_s: float,
    ) -> None:
        self.charter = charter
        self._journal = journal_file
        self._processes = processes
        self._clock = clock
        self._state = roster.gathered(charter.workers, charter.script, charter.version, charter.dead_after_s)
        self._tally = Tally(charter.job, [member.worker for member in self._state.members])
        self._peers: dict[int, Peer] = {}
        self._worker_of: dict[int, WorkerId] = {}
        self._peer_of: dict[WorkerId, Peer] = {}
        self._write([journal.RunRecord(charter.job, charter.version, started_unix_s)])

    # events

    def handle(self, event: events.Event, now_s: float) -> None:
        """Take one event and carry out what follows from it."""
        self._state, effects = roster.advance(self._state, event, now_s)
        for effect in effects:
            self._carry_out(effect)
        self._describe()
        self._tally.tick(now_s)

    def connected(self, peer: Peer) -> None:
        """A connection was opened; it has to introduce itself before anything else."""
        self._peers[peer.number] = peer

    def received(self, peer: Peer, message: messages.FromWorker) -> None:
        """One message of a worker."""
        worker = self._worker_of.get(peer.number)
        if isinstance(message, messages.Hello):
            arrived = events.Arrived(peer.number, WorkerId(message.worker), message.version)
            self.handle(arrived, self._clock())
        elif worker is not None:
            self._heard(worker, message)

    def closed(self, peer: Peer) -> None:
        """A connection is gone."""
        del self._peers[peer.number]
        worker = self._worker_of.pop(peer.number, None)
        if worker is not None:
            del self._peer_of[worker]
            self.handle(events.ConnectionLost(worker), self._clock())

    # answers

    def status(self) -> bytes:
        """The run's status as JSON."""
        return msgspec.json.encode(self.current)

    @property
    def current(self) -> Status:
        """The run's status; the same object all the time."""
        return self._tally.status

    def figures(self) -> Mapping[str, float]:
        """The run's numbers for its metrics."""
        status = self.current
        known = {"batch": status.batch, "rate": status.rate, "loss": status.loss}
        return {
            "samples": status.samples_total,
            "rounds": status.rounds,
            "workers": sum(worker.state == "training" for worker in status.workers),
            **{name: value for name, value in known.items() if value is not None},
        }

    def _heard(self, worker: WorkerId, message: messages.FromWorker) -> None:
        now_s = self._clock()
        match message:
            case messages.Hello():
                pass
            case messages.Ready(signature=signature):
                self.handle(_offer(worker, signature), now_s)
            case messages.Put(attempt=attempt, key=key, value=value):
                self._push(worker, messages.Push(attempt, key, value))
            case messages.Beat(round=number, progress=progress):
                self.handle(events.Beaten(worker, number, progress), now_s)
            case messages.Lines(records=records):
                self._record(worker, records, now_s)
            case messages.Failed(reason=reason):
                # The rest of a long message is in the worker's own output.
                first_line = next(iter(reason.strip().splitlines()), "no reason given")
                self.handle(events.Failed(worker, first_line), now_s)
            case messages.Finished():
                self.handle(events.Finished(worker), now_s)
            case messages.Plan(epochs=epochs, samples=samples):
                self._tally.plan(epochs, samples)
            case _:
                assert_never(message)

    def _push(self, sender: WorkerId, push: messages.Push) -> None:
        stage = self._state.stage
        if not isinstance(stage, members.Running) or push.attempt != stage.attempt:
            return
        for worker, peer in self._peer_of.items():
            if worker != sender:
                peer.send(push)

    def _record(self, worker: WorkerId, payloads: list[bytes], now_s: float) -> None:
        try:
            records = [journal.decode(payload) for payload in payloads]
        except JournalError as error:
            self.handle(events.Failed(worker, f"sent what is {error}"), now_s)
            return
        foreign = [record for record in records if not isinstance(record, _FROM_WORKERS)]
        if foreign or worker != self._state.members[0].worker:
            self.handle(events.Failed(worker, "sent journal records that are not its own to write"), now_s)
            return
        self._write(records)

    def _write(self, records: list[journal.Record]) -> None:
        if self.current.ended is not None:
            return
        now_s = self._clock()
        for record in records:
            self._tally.add(record, now_s)
        try:
            self._journal.append(records)
        except OSError as error:
            reason = f"cannot write the journal: {error.strerror}; a run without one proves nothing, so it ends"
            self.handle(events.Hindered(reason), now_s)

    # effects

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Admit(peer=number, worker=worker):
                self._worker_of[number] = worker
                self._peer_of[worker] = self._peers[number]
                self._peers[number].send(messages.Welcome(self.charter.job, self._state.dead_after_s))
            case events.Refuse(peer=number, reason=reason):
                self._send_last(number, messages.Refuse(reason))
            case events.Dismiss(peer=number, reason=reason):
                self._send_last(number, messages.Stop(reason))
            case events.StartEra(era=era, attempt=attempt, roster=names):
                self._write([journal.EraRecord(era, list(names))])
                self._send_all(messages.EraStart(era, attempt, list(names)))
            case events.Release(worker=worker):
                if worker in self._peer_of:
                    self._peer_of[worker].close()
            case events.StopAll(reason=reason):
                self._send_all(messages.Stop(reason))
            case events.Terminate(worker=worker):
                self._processes.terminate(worker)
            case events.Kill(worker=worker):
                self._processes.kill(worker)
            case events.Note(text=text):
                self._processes.note(text)
            case events.Ended():
                self._end(effect)
            case _:
                assert_never(effect)

    def _end(self, end: events.Ended) -> None:
        self._write([journal.EndRecord(end.reason, end.completed)])
        self._journal.close()
        self._processes.ended(end)

    def _send_last(self, number: int, message: messages.FromCoordinator) -> None:
        self._peers[number].send(message)
        self._peers[number].close()

    def _send_all(self, message: messages.FromCoordinator) -> None:
        for peer in self._peer_of.values():
            peer.send(message)

    def _describe(self) -> None:
        for member in self._state.members:
            self._tally.state(member.worker, _word(member))


def _word(member: members.Member) -> str:
    match member.link, member.process:
        case members.Done(), _:
            return "finished"
        case members.Broken(), _:
            return "failed"
        case members.Cut(), _:
            return "lost"
        case _, members.Exited():
            return "ended"
        case members.Away(), _:
            return "starting"
        case members.Training(), _:
            return "training"
        case ((members.Greeted() | members.Waiting()), _):
            return "waiting"


def _offer(worker: WorkerId, signature: messages.Signature) -> events.Offered:
    parameters = tuple((name, tuple(shape), dtype) for name, shape, dtype in signature.parameters)
    terms = Terms(signature.version, parameters, tuple(sorted(signature.settings.items())))
    try:
        dead_after_s = float(signature.settings["dead_after"])
    except (KeyError, ValueError):
        dead_after_s = None
    return events.Offered(worker, terms, dead_after_s)
