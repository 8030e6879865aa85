"""The coordinator's loop.

Question  How do messages become events, and how are the effects carried out?
Holds     One method takes one event; the clock is passed in. All decisions are ``core.roster``'s. Workers' records are
          written by number, each once and in order, and acknowledged when they are handed to the system.
Source    ours; docs/protocol.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import msgspec
from msgspec.structs import replace

from pliant.control import messages
from pliant.core import events, journal, members, roster, slots
from pliant.core.journal import FROM_WORKERS
from pliant.errors import JournalError
from pliant.runtime import translation
from pliant.runtime.journaling import JournalFile, Numbered
from pliant.runtime.status import Status, Tally
from pliant.types import WorkerId

__all__ = ["Charter", "Coordinator", "Journal", "JournalFile", "Peer"]

WRITTEN_EVERY_S = 0.2
"""How often members are told what is on disk, at most: they only have to keep what is not."""

STATUS_EVERY_S = 0.2
"""How often launchers are told how the run is getting on."""

EVENTS_KEPT = 1000

SAVED_WAITING = 10
"""Checkpoints that wait for the records that lead to them; one worker at a time writes one."""

COMPLAINS_EVERY_S = 10.0
"""How often the user is told that the journal cannot be written."""

END_PATIENCE_S = 60.0
"""How long a run that is over waits for its journal to be whole."""

KEYS_BYTES = 64 << 20
"""Of the keys under which one group is formed: a member puts some 150 bytes for each other one."""

EARLY_BYTES = 64 << 20
"""Of journal records that wait for their predecessors; whoever sends them keeps and repeats what is not written."""

LEAST_DEAD_AFTER_S = 0.1
"""Below it every worker would be lost at once, whatever a script says."""


@dataclass(frozen=True, slots=True)
class Charter:
    """What is fixed for a run before it starts. ``workers`` is how many its launcher begins with."""

    job: str
    script: str
    version: str
    workers: int = 1
    dead_after_s: float = members.DEAD_AFTER_S
    min_workers: int = 1
    max_workers: int | None = None
    grace_s: float = members.GRACE_S
    script_digest: str = ""
    arguments_digest: str = ""

    @property
    def rules(self) -> members.Rules:
        """What the decisions depend on."""
        return members.Rules(self.script, self.version, self.min_workers, self.max_workers, self.grace_s)


class Peer(Protocol):
    """One connection. ``send`` and ``close`` return at once."""

    @property
    def number(self) -> int: ...
    def send(self, message: messages.FromCoordinator | messages.ToAgent) -> None: ...
    def close(self) -> None: ...


class Journal(Protocol):
    """Where records are appended: a ``JournalFile``, or a list in a simulation."""

    def append(self, records: list[journal.Record]) -> None: ...
    def records(self) -> list[journal.Record]: ...
    def close(self) -> None: ...


class Happening(msgspec.Struct, frozen=True):
    """One notable event of a run, for people and programs."""

    unix_s: float
    kind: str
    worker: str
    text: str


class Coordinator:
    """Feeds ``core.roster`` and carries out what it decides. It is the ``Desk`` of ``control.app``."""

    def __init__(
        self,
        charter: Charter,
        journal_file: Journal,
        clock: Callable[[], float],
        started_unix_s: float,
        *,
        term: int = 1,
        records: Sequence[journal.Record] | None = None,
        rewind: bool = False,
    ) -> None:
        now_s = clock()
        self.charter = charter
        self.end: events.Ended | None = None
        """how the run ended; None while it goes on"""
        self._journal = journal_file
        self._clock = clock
        self._unix_offset_s = started_unix_s - now_s
        self._tally = Tally(charter.job, term)
        self._lines = Numbered()
        self._unwritten: list[journal.Record] = []
        """the disk did not take them: full, or not there"""
        self._complained_s = float("-inf")
        self._last_round = 0
        """the highest number of a round that was ever written"""
        self._ending: tuple[events.Ended, float] | None = None
        """the end that waits for the journal, and until when"""
        self._saved: list[messages.Saved] = []
        """complete, but what they are of is not on disk yet"""
        self._told = 0
        self._told_s = self._shown_s = now_s
        self._peers: dict[int, Peer] = {}
        self._worker_of: dict[int, WorkerId] = {}
        self._peer_of: dict[WorkerId, Peer] = {}
        self._agents: dict[int, Peer] = {}
        self._agent_of: dict[int, events.AgentId] = {}
        self._agent_peer: dict[events.AgentId, Peer] = {}
        self._keys: dict[int, dict[str, bytes]] = {}
        self._keys_bytes = 0
        self._rosters: dict[int, tuple[WorkerId, ...]] = {}
        self._happenings: deque[Happening] = deque(maxlen=EVENTS_KEPT)
        if records is None:
            self._state = roster.gathered(charter.rules, term, charter.dead_after_s, now_s)
            started = journal.RunRecord(
                charter.job,
                charter.version,
                started_unix_s,
                script=charter.script_digest,
                arguments=charter.arguments_digest,
            )
            self._write([started])
        else:
            self._state = self._resumed(records, term, now_s, rewind=rewind)

    @classmethod
    def resumed(
        cls,
        charter: Charter,
        journal_file: Journal,
        records: Sequence[journal.Record],
        term: int,
        clock: Callable[[], float],
        started_unix_s: float,
        *,
        rewind: bool = False,
    ) -> Coordinator:
        """One that takes a lost one's place, with what that one had written; ``rewind``: nobody else is left either."""
        return cls(charter, journal_file, clock, started_unix_s, term=term, records=records, rewind=rewind)

    def _resumed(self, records: Sequence[journal.Record], term: int, now_s: float, *, rewind: bool) -> members.Roster:
        self._last_round = max(map(_number, records), default=0)
        history = journal.effective(records)
        if rewind:
            # That it ended, not well, is over.
            history = [record for record in history if not isinstance(record, journal.EndRecord)]
        self._tally.resume(history, now_s)
        self._lines = Numbered(sum(isinstance(record, FROM_WORKERS) for record in records))
        self._told = self._lines.written
        last = next((record for record in reversed(records) if isinstance(record, journal.EraRecord)), None)
        names = [WorkerId(name) for name in last.roster] if last is not None else []
        era = last.era if last is not None else 0
        # What is written was settled: nobody may begin anew.
        settled = max(self._tally.status.rounds, min(1, self._lines.written))
        rules, dead_after_s = self.charter.rules, self.charter.dead_after_s
        state = roster.resumed(rules, term, dead_after_s, now_s, era, names, settled)
        rewinds = sum(isinstance(record, journal.RewindRecord) for record in records)
        state = replace(state, checkpoints=_named(history), rewinds=rewinds)
        if rewind:
            return roster.rewound(state)
        match records[-1]:
            case journal.EndRecord(reason=reason, completed=completed, exit_status=status):
                # It died while it said goodbye.
                self.end = events.Ended(reason, completed, status)
                return roster.ended(state, reason, completed=completed, exit_status=status)
            case _:
                return state

    # events

    def handle(self, event: events.Event, now_s: float) -> None:
        """Take one event and carry out what follows from it."""
        self._state, effects = roster.advance(self._state, event, now_s)
        for effect in effects:
            self._carry_out(effect, now_s)
        if effects or isinstance(event, events.Tick):
            self._describe()
        if isinstance(event, events.Tick):
            self._flush(now_s)
            self._name_checkpoints()
            if self._ending is not None:
                self._end_if_written(*self._ending, now_s)
            self._tally.tick(now_s)
            self._tell(now_s)

    def connected(self, peer: Peer) -> None:
        """A worker's connection was opened; it has to introduce itself before anything else."""
        self._peers[peer.number] = peer

    def received(self, peer: Peer, message: messages.FromWorker) -> None:
        """One message of a worker."""
        worker = self._worker_of.get(peer.number)
        if isinstance(message, messages.Hello):
            self.handle(translation.arrival(peer.number, message), self._clock())
        elif worker is not None:
            self._heard(worker, message, self._clock())

    def closed(self, peer: Peer) -> None:
        """A worker's connection is gone."""
        self._peers.pop(peer.number, None)
        worker = self._worker_of.pop(peer.number, None)
        if worker is not None:
            if self._peer_of.get(worker) is peer:
                del self._peer_of[worker]
            self.handle(events.ConnectionLost(worker, peer.number), self._clock())

    def agent_connected(self, peer: Peer) -> None:
        """A launcher's connection was opened."""
        self._agents[peer.number] = peer

    def agent_received(self, peer: Peer, message: messages.FromAgent) -> None:
        """One message of a launcher."""
        now_s = self._clock()
        agent = self._agent_of.get(peer.number)
        match message:
            case messages.Enlist():
                if self.end is not None:
                    self._send_over(peer, self.end)
                elif agent is None:
                    self.handle(translation.enlistment(peer.number, message), now_s)
            case messages.Exited(slot=slot, pid=pid, status=status, error=error) if agent is not None:
                self.handle(
                    events.ProcessExited(agent, events.SlotId(slot), pid, status, translation.first_line(error)), now_s
                )
            case messages.Interrupted(signal=signal) if agent is not None:
                self.handle(events.Interrupted(agent, signal), now_s)
            case messages.Noticed() if agent is not None:
                self.handle(events.Noticed(agent), now_s)
            case _:
                # Nobody has introduced it.
                pass

    def agent_closed(self, peer: Peer) -> None:
        """A launcher's connection is gone."""
        self._agents.pop(peer.number, None)
        agent = self._agent_of.pop(peer.number, None)
        if agent is not None:
            if self._agent_peer.get(agent) is peer:
                del self._agent_peer[agent]
            self.handle(events.AgentLost(agent, peer.number), self._clock())

    # people

    def scale(self, workers: int) -> tuple[int, str]:
        """Have so many workers; an HTTP status and one line."""
        refusal = slots.scale_refusal(self._state, workers)
        if refusal is not None:
            return 422, refusal
        self.handle(events.Scaled(workers), self._clock())
        return 200, f"{workers} workers are wanted"

    def drain(self, worker: str) -> tuple[int, str]:
        """Let a worker leave; an HTTP status and one line."""
        slot, refusal = slots.drain_refusal(self._state, worker)
        if slot is None:
            return 404, refusal
        if refusal:
            return 409, refusal
        self.handle(events.Drained(slot), self._clock())
        return 200, f"{worker} leaves after its round"

    def status(self) -> bytes:
        """The run's status as JSON."""
        return msgspec.json.encode(self.current)

    def happenings(self) -> bytes:
        """The last notable events as a JSON list, one per line, newest last."""
        return b"[" + b",\n ".join(msgspec.json.encode(happening) for happening in self._happenings) + b"]\n"

    @property
    def current(self) -> Status:
        """The run's status; the same object until the run goes back to a checkpoint."""
        return self._tally.status

    @property
    def state(self) -> members.Roster:
        """What the decisions are based on; for tests and simulations."""
        return self._state

    @property
    def written(self) -> int:
        """How many records of workers are on disk."""
        return self._on_disk

    @property
    def has_agents(self) -> bool:
        """Whether a launcher is connected."""
        return bool(self._agents)

    def figures(self) -> Mapping[str, float]:
        """The run's numbers for its metrics."""
        status = self.current
        known = {"batch": status.batch, "rate": status.rate, "loss": status.loss}
        return {
            "samples": status.samples_total,
            "rounds": status.rounds,
            "eras": status.eras,
            "restarts": status.restarts,
            "era": status.era,
            "term": status.term,
            "workers": sum(worker.state == "training" for worker in status.workers),
            **{name: value for name, value in known.items() if value is not None},
        }

    # what workers say

    def _heard(self, worker: WorkerId, message: messages.FromWorker, now_s: float) -> None:
        match message:
            case messages.Put(attempt=attempt, key=key, value=value):
                self._push(worker, messages.Push(attempt, key, value), now_s)
            case messages.Lines(first=first, records=records):
                self._record(worker, first, records, now_s)
            case messages.Plan(epochs=epochs, samples=samples):
                self._tally.plan(epochs, samples)
            case messages.Saved():
                self._saved = [*self._saved, message][-SAVED_WAITING:]
                self._name_checkpoints()
            case messages.Hello():
                pass
            case _:
                self.handle(self._event(worker, message), now_s)

    def _event(self, worker: WorkerId, message: messages.FromWorker) -> events.OfWorker:
        match message:
            case messages.Ready():
                return self._offer(worker, message)
            case messages.Beat():
                m = message
                return events.Beaten(worker, m.round, m.progress, m.waiting, m.usual_s, m.active, m.era)
            case messages.Leaving(reason=reason):
                return events.Leaving(worker, translation.first_line(reason))
            case messages.Stopped(era=era, exchange=exchange, active=active, failed=failed):
                return events.Stopped(worker, era, exchange, active, translation.first_line(failed))
            case messages.Entered(era=era, exchange=exchange):
                return events.Entered(worker, era, exchange)
            case messages.Failed(reason=reason, fatal=fatal, own=own):
                return events.Failed(worker, translation.first_line(reason) or "no reason given", fatal, own)
            case messages.Finished(left=left):
                return events.Finished(worker, left)
            case messages.Hello() | messages.Put() | messages.Lines() | messages.Plan() | messages.Saved():
                raise AssertionError("not an event of the roster")
            case _:
                assert_never(message)

    def _offer(self, worker: WorkerId, ready: messages.Ready) -> events.Offered:
        try:
            dead_after_s = float(ready.signature.settings["dead_after"])
        except (KeyError, ValueError):
            dead_after_s = 0.0
        length: int | None = None
        recorded: int | None = None
        call, calls = ready.call, self._tally.calls
        # Where the tasks differ, the group says so when the call is made.
        if call is not None and 0 <= call.place < len(calls) and calls[call.place].task == call.task:
            length, recorded = call.length, calls[call.place].length
        given_s = dead_after_s if dead_after_s >= LEAST_DEAD_AFTER_S else None
        return events.Offered(worker, translation.terms(ready.signature), ready.address, given_s, length, recorded)

    def _push(self, sender: WorkerId, push: messages.Push, now_s: float) -> None:
        """Hand a key on to the members of its attempt; kept for those who come back to it."""
        if sender not in self._rosters.get(push.attempt, ()):
            return
        keys = self._keys[push.attempt]
        keys[push.key] = push.value
        self._keys_bytes += len(push.key) + len(push.value)
        if self._keys_bytes > KEYS_BYTES:
            del keys[push.key]
            self.handle(events.Failed(sender, f"put more than {KEYS_BYTES} bytes to form one group"), now_s)
            return
        self._send(push, (name for name in self._rosters[push.attempt] if name != sender))

    def _record(self, worker: WorkerId, first: int, payloads: list[bytes], now_s: float) -> None:
        try:
            records = [journal.decode(payload) for payload in payloads]
        except JournalError as error:
            self.handle(events.Failed(worker, f"sent what is {error}"), now_s)
            return
        if not all(isinstance(record, FROM_WORKERS) for record in records):
            self.handle(events.Failed(worker, "sent journal records that are not its own to write"), now_s)
            return
        size = sum(map(len, payloads))
        if first > self._lines.written and self._lines.early_bytes + size > EARLY_BYTES:
            self.handle(events.Failed(worker, "sent too many journal records out of order"), now_s)
            return
        if records:
            # Lines leave a worker when everybody has settled an exchange: there is a state that a new start would lose.
            self._state = replace(self._state, settled=max(self._state.settled, 1))
        self._write(self._lines.taken(first, records, size))
        self._name_checkpoints()

    def _write(self, records: list[journal.Record]) -> None:
        if self.current.ended is not None or not records:
            return
        now_s = self._clock()
        self._unwritten += records
        self._flush(now_s)
        for record in records:
            self._last_round = max(self._last_round, _number(record))
            if isinstance(record, journal.RewindRecord):
                self._rewind(now_s)
                text = f"going on from checkpoint {record.name}, after {self.current.rounds} rounds"
                self._note(events.Note("rewound", text), now_s)
                continue
            self._tally.add(record, now_s)
            if isinstance(record, journal.RoundRecord) and record.delay is not None:
                self._note(events.Note("delay", translation.verdict(record)), now_s)
            if isinstance(record, journal.RoundRecord) and record.drift is not None:
                for worker, text in translation.drifted(record.drift, self._tally.roster):
                    self._note(events.Note("drift", text, WorkerId(worker)), now_s)

    def _flush(self, now_s: float) -> None:
        """Hand to the disk what it has not taken yet. The workers keep their lines until it has."""
        if not self._unwritten:
            return
        try:
            self._journal.append(self._unwritten)
        except OSError as error:
            if now_s - self._complained_s >= COMPLAINS_EVERY_S:
                self._complained_s = now_s
                text = f"cannot write the journal: {error.strerror}; training goes on, and it is tried again"
                self._note(events.Note("journal", text), now_s)
            return
        if self._complained_s > float("-inf"):
            self._complained_s = float("-inf")
            self._note(events.Note("journal", "the journal is written again, and nothing is missing in it"), now_s)
        self._unwritten = []

    @property
    def _on_disk(self) -> int:
        """How many of the workers' records the disk has taken."""
        return self._lines.written - sum(isinstance(record, FROM_WORKERS) for record in self._unwritten)

    def _name_checkpoints(self) -> None:
        """Checkpoints exist from here on, where the disk has everything that leads to them."""
        due = [saved for saved in self._saved if saved.records <= self._on_disk]
        known = self._state.checkpoints
        for saved in due:
            self._saved.remove(saved)
            if saved.name not in known:
                self._write([journal.CheckpointRecord(saved.name, saved.records, saved.round)])
                known = (saved.name, *known)[: members.CHECKPOINTS_KEPT]
        if due:
            self._state = replace(self._state, checkpoints=known)
            self._send(messages.Named(list(known)), [worker.name for worker, _ in members.members_of(self._state)])

    def _rewind(self, now_s: float) -> None:
        """The run has gone back: so do its figures."""
        before = self._tally.status
        self._tally = Tally(self.charter.job, self._state.term)
        self._tally.plan(before.epochs, before.samples_planned)
        history = journal.effective([*self._journal.records(), *self._unwritten])
        self._tally.resume(history, now_s)
        self._state = replace(self._state, checkpoints=_named(history))

    # effects

    def _carry_out(self, effect: events.Effect, now_s: float) -> None:
        match effect:
            case events.Admit() | events.Refuse() | events.Dismiss() | events.Close():
                self._answer(effect)
            case events.StartEra() | events.PlanEra() | events.BreakEra():
                self._announce(effect)
            case events.AskToLeave(worker=worker, reason=reason):
                self._send(messages.Leave(reason), (worker,))
            case events.StopAll(reason=reason):
                self._send(messages.Stop(reason), tuple(self._peer_of))
            case events.Enroll():
                self._enroll(effect, now_s)
            case events.Start(agent=agent, slot=slot):
                self._send_agent(agent, messages.Start(slot))
            case events.Terminate(agent=agent, slot=slot):
                self._send_agent(agent, messages.Terminate(slot))
            case events.Kill(agent=agent, slot=slot):
                self._send_agent(agent, messages.Kill(slot))
            case events.ReleaseAgent(agent=agent, reason=reason, exit_status=status):
                self._send_agent(agent, messages.Over(reason, completed=status == 0, exit_status=status))
            case events.Note():
                self._note(effect, now_s)
            case events.Ended():
                self._end(effect)
            case _:
                assert_never(effect)

    def _answer(self, effect: events.Admit | events.Refuse | events.Dismiss | events.Close) -> None:
        """Say yes or no to a connection, of a worker or of a launcher."""
        peer = self._peers.get(effect.peer) or self._agents.get(effect.peer)
        if peer is None:
            return
        match effect:
            case events.Admit(worker=worker, running=running):
                self._worker_of[peer.number] = worker
                self._peer_of[worker] = peer
                peer.send(self._welcome(worker, running))
                return
            case events.Refuse(reason=reason, again=again):
                peer.send(messages.Refuse(reason, again))
            case events.Dismiss(reason=reason, completed=completed):
                peer.send(messages.Stop(reason, completed))
            case events.Close():
                pass
        self._forget(peer)
        peer.close()

    def _forget(self, peer: Peer) -> None:
        """Whatever it still says does not count."""
        worker = self._worker_of.pop(peer.number, None)
        if worker is not None and self._peer_of.get(worker) is peer:
            del self._peer_of[worker]
        agent = self._agent_of.pop(peer.number, None)
        if agent is not None and self._agent_peer.get(agent) is peer:
            del self._agent_peer[agent]

    def _welcome(self, worker: WorkerId, running: bool) -> messages.Welcome:
        return messages.Welcome(
            job=self.charter.job,
            worker=worker,
            term=self._state.term,
            dead_after_s=self._state.dead_after_s,
            written=self._on_disk,
            running=running,
            # Before the first era, or the first one after a loss of all, nothing is past for certain.
            past=[] if isinstance(self._state.stage, members.Gathering) else list(self._tally.past),
            rewinds=self._state.rewinds,
        )

    def _announce(self, effect: events.StartEra | events.PlanEra | events.BreakEra) -> None:
        term, names = self._state.term, translation.texts(effect.roster)
        if isinstance(effect, events.BreakEra):
            broken = messages.Broken(term, effect.era, effect.reason, effect.attempt, names)
            self._invite(broken, effect.attempt, effect.roster, effect.to)
            return
        addresses = translation.addressed(dict(effect.addresses))
        match effect:
            case events.StartEra(era=era, attempt=attempt, donor=donor, exchange=exchange):
                if effect.checkpoints:
                    # What lost workers had still to say is void.
                    self._lines, self._saved = Numbered(self._lines.written), []
                message = messages.EraStart(
                    term,
                    era,
                    attempt,
                    names,
                    donor,
                    exchange,
                    addresses,
                    self._lines.written,
                    list(effect.checkpoints),
                    self._last_round,
                )
            case events.PlanEra(era=era, attempt=attempt, donor=donor):
                message = messages.EraPlan(term, era, attempt, names, donor, addresses)
        self._invite(message, attempt, effect.roster, effect.to)
        self._acknowledge(self._clock())

    def _invite(
        self,
        message: messages.EraStart | messages.EraPlan | messages.Broken,
        attempt: int,
        roster: tuple[WorkerId, ...],
        to: tuple[WorkerId, ...],
    ) -> None:
        """Tell of a group to be formed, and what its members have said about it so far."""
        if attempt not in self._rosters:
            # Nothing that is formed now can be of an older attempt.
            self._rosters, self._keys, self._keys_bytes = {attempt: roster}, {attempt: {}}, 0
        self._send(message, to)
        for key, value in self._keys[attempt].items():
            self._send(messages.Push(attempt, key, value), to)

    def _enroll(self, effect: events.Enroll, now_s: float) -> None:
        peer = self._agents.get(effect.peer)
        if peer is None:
            # It went while it had to wait.
            self.handle(events.AgentLost(effect.agent, effect.peer), now_s)
            return
        self._agent_of[peer.number] = effect.agent
        self._agent_peer[effect.agent] = peer
        peer.send(messages.Enlisted(self.charter.job, effect.agent, self._state.term, list(effect.slots)))

    def _note(self, note: events.Note, now_s: float) -> None:
        text = translation.printable(note.text)
        self._happenings.append(Happening(now_s + self._unix_offset_s, note.kind, note.worker, text))
        if not note.quiet:
            for peer in self._agent_peer.values():
                peer.send(messages.Note(text))

    def _end(self, end: events.Ended) -> None:
        self._write([journal.EndRecord(end.reason, end.completed, end.exit_status)])
        now_s = self._clock()
        self._end_if_written(end, now_s + END_PATIENCE_S, now_s)

    def _end_if_written(self, end: events.Ended, until_s: float, now_s: float) -> None:
        """Be over once the journal is whole; a run without one proves nothing."""
        if self._unwritten and now_s < until_s:
            self._ending = end, until_s
            return
        if self._unwritten:
            end = events.Ended(
                f"{end.reason}; its journal could not be written to the end", False, end.exit_status or 1
            )
        self._journal.close()
        self.end, self._ending = end, None
        self._describe()
        for peer in list(self._agent_peer.values()):
            self._send_over(peer, end)

    def _send_over(self, peer: Peer, end: events.Ended) -> None:
        peer.send(messages.StatusUpdate(self.status()))
        peer.send(messages.Over(end.reason, end.completed, end.exit_status))

    def _send(self, message: messages.FromCoordinator, to: Iterable[WorkerId]) -> None:
        for name in to:
            peer = self._peer_of.get(name)
            if peer is not None:
                peer.send(message)

    def _send_agent(self, agent: events.AgentId, message: messages.ToAgent) -> None:
        peer = self._agent_peer.get(agent)
        if peer is not None:
            peer.send(message)

    # what is told now and then

    def _tell(self, now_s: float) -> None:
        if self._on_disk > self._told and now_s - self._told_s >= WRITTEN_EVERY_S:
            self._acknowledge(now_s)
        if now_s - self._shown_s >= STATUS_EVERY_S and self.end is None:
            self._shown_s = now_s
            status = messages.StatusUpdate(self.status())
            for peer in self._agent_peer.values():
                peer.send(status)

    def _acknowledge(self, now_s: float) -> None:
        """Tell all members what is on disk."""
        self._told, self._told_s = self._on_disk, now_s
        names = [worker.name for worker, _ in members.members_of(self._state)]
        self._send(messages.Written(self._told), names)

    def _describe(self) -> None:
        status = self.current
        for slot in self._state.slots:
            worker = members.worker_in(self._state, slot.name)
            name = worker.name if worker is not None else translation.last_name(slot)
            self._tally.describe(slot.name, name, translation.word(slot, worker), slot.restarts)
        match self._state.course:
            case members.Steady(era=era) | members.Planned(era=era):
                status.era = max(status.era, era)
            case _:
                pass
        status.restarts = sum(slot.restarts for slot in self._state.slots)


def _number(record: journal.Record) -> int:
    """Of the round that the record is about, or passes over."""
    return int(getattr(record, "void", 0) or getattr(record, "round", 0))


def _named(history: Sequence[journal.Record]) -> tuple[str, ...]:
    """The checkpoints that exist, newest first."""
    names = [record.name for record in reversed(history) if isinstance(record, journal.CheckpointRecord)]
    return tuple(names[: members.CHECKPOINTS_KEPT])
