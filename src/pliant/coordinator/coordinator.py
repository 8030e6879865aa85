"""The coordinator's loop.

Question  How are events from connections fed to ``core.membership.advance``, and its effects carried out?
Holds     One method takes one event; the clock is passed in. All decisions are made by ``core.membership.advance``.
          ``Connections`` knows which worker is at which connection, ``Recorder`` what is on disk, ``StatusBoard`` what
          users can read.
Source    ours; docs/protocol.md, docs/design/0007-elastic.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_never

from msgspec.structs import replace

from pliant.control import messages
from pliant.coordinator import convert
from pliant.coordinator.board import StatusBoard
from pliant.coordinator.connections import Connections, Peer
from pliant.coordinator.journal import go_back
from pliant.coordinator.journal_summary import JournalSummary
from pliant.coordinator.recorder import AGAIN_AFTER_S, JournalSink, Recorder
from pliant.coordinator.run_spec import RunSpec, checkpoints, inherited
from pliant.coordinator.state_keeper import StateKeeper
from pliant.coordinator.status import Status
from pliant.coordinator.store_relay import StoreRelay
from pliant.core.journal import records as journal
from pliant.core.membership import advance, events, processes
from pliant.core.membership import roster as members
from pliant.types import WorkerId

STATUS_EVERY_S = 0.2
"""How often launchers are sent the run's status."""

GAP_PATIENCE_S = 10.0
"""Added to ``dead_after``: after that no worker is left that could still send the missing records."""

INCOMPLETE = "the journal is incomplete"

INCOMPLETE_EXIT = 4
"""Exit status of a run that succeeded, but whose journal cannot prove it because a part of it was lost."""

END_PATIENCE_S = 60.0
"""How long a run that is over waits for its journal to be complete."""


class Coordinator:
    """Feeds events to ``core.membership.advance`` and carries out its effects. It is the ``CoordinatorApi`` of
    ``control.app``."""

    def __init__(
        self,
        charter: RunSpec,
        journal_file: JournalSink,
        clock: Callable[[], float],
        started_unix_s: float,
        *,
        term: int = 1,
        account: JournalSummary | None = None,
        rewind: bool = False,
    ) -> None:
        now_s = clock()
        self.charter = charter
        self.end: events.Ended | None = None
        """how the run ended; None while it goes on"""
        self._clock = clock
        self._account = account or JournalSummary(charter.job, term)
        """summary of all records, written or waiting to be written"""
        self._bulletin = StatusBoard(self._account, started_unix_s - now_s)
        self._recorder = Recorder(journal_file, now_s, self._account.written)
        self._workers = Connections[WorkerId]()
        self._agents = Connections[events.AgentId]()
        self._formation = StoreRelay(self._workers)
        self._ending: tuple[events.Ended, float] | None = None
        """the end of a run that waits for its journal to be written, and until when it waits"""
        self._shown_s = now_s
        self._beats: list[tuple[events.Heartbeat, float]] = []
        """heartbeats since the last event: they are processed with the next one, at the latest with the next tick"""
        self._keeper = StateKeeper(self._recorder, self._account, clock, now_s)
        if account is None:
            self._state = advance.gathered(charter.rules, term, charter.dead_after_s, now_s)
            self._write([charter.record(started_unix_s)])
        else:
            account.begin_term(charter.job, term, now_s, rewind=rewind)
            legacy = inherited(charter, account, term, now_s, rewind=rewind)
            self._state, self.end = legacy.state, legacy.end
            if self.end is None:
                # It is not known whether the lost coordinator has synced its last records.
                self._recorder.sync_now()
                self._keeper.keep(now_s)

    @classmethod
    def resumed(
        cls,
        charter: RunSpec,
        journal_file: JournalSink,
        account: JournalSummary,
        term: int,
        clock: Callable[[], float],
        started_unix_s: float,
        *,
        rewind: bool = False,
    ) -> Coordinator:
        """A coordinator that replaces a lost one and continues its journal; ``rewind``: all workers are lost, too."""
        return cls(charter, journal_file, clock, started_unix_s, term=term, account=account, rewind=rewind)

    # events

    def handle(self, event: events.Event, now_s: float) -> None:
        """Process one event and carry out its effects."""
        # Heartbeats first, in their order: they are older than the event.
        beats, self._beats = self._beats, []
        self._state, effects = advance.advance(advance.heard(self._state, beats), event, now_s)
        for effect in effects:
            self._carry_out(effect, now_s)
        if isinstance(event, events.Tick):
            self._formation.flush()
            self._note(self._recorder.flush(now_s), now_s)
            if self.end is None:
                self._note(self._recorder.mend(now_s), now_s)
            self._recorder.sync(now_s)
            self._mind_the_gap(now_s)
            self._name_checkpoints(now_s)
            if self.end is None and self._keeper.is_due(now_s):
                self._keeper.keep(now_s)
            if self._ending is not None:
                self._end_if_written(*self._ending, now_s)
            self._bulletin.tally.tick(now_s)
            self._tell(now_s)

    def connected(self, peer: Peer) -> None:
        """A worker's connection was opened; its first message must be ``Hello``."""
        self._workers.opened(peer)

    def received(self, peer: Peer, message: messages.FromWorker) -> None:
        """Process one message from a worker."""
        worker = self._workers.name_at(peer.number)
        if isinstance(message, messages.Hello):
            self.handle(convert.arrival(peer.number, message), self._clock())
        elif worker is not None:
            self._heard(worker, message, self._clock())

    def closed(self, peer: Peer) -> None:
        """A worker's connection was closed."""
        worker = self._workers.closed(peer)
        if worker is not None:
            self.handle(events.ConnectionLost(worker, peer.number), self._clock())

    def agent_connected(self, peer: Peer) -> None:
        """A launcher's connection was opened."""
        self._agents.opened(peer)

    def agent_received(self, peer: Peer, message: messages.FromAgent) -> None:
        """Process one message from a launcher."""
        now_s = self._clock()
        agent = self._agents.name_at(peer.number)
        if not isinstance(message, messages.Enlist):
            # Without a name the launcher has not introduced itself.
            if agent is not None:
                self.handle(convert.agent_event(agent, message), now_s)
        elif self.end is not None:
            self._send_over(peer, self.end)
        elif agent is None:
            self.handle(convert.enlistment(peer.number, message), now_s)

    def agent_closed(self, peer: Peer) -> None:
        """A launcher's connection was closed."""
        agent = self._agents.closed(peer)
        if agent is not None:
            self.handle(events.AgentLost(agent, peer.number), self._clock())

    # requests of users

    def scale(self, workers: int) -> tuple[int, str]:
        """Ask for this number of workers; returns an HTTP status and one line."""
        refusal = processes.scale_refusal(self._state, workers)
        if refusal is not None:
            return 422, refusal
        self.handle(events.Scaled(workers), self._clock())
        return 200, f"{workers} workers are wanted"

    def drain(self, worker: str) -> tuple[int, str]:
        """Ask a worker to leave; returns an HTTP status and one line."""
        slot, refusal = processes.drain_refusal(self._state, worker)
        if slot is None:
            return 404, refusal
        if refusal:
            return 409, refusal
        self.handle(events.Drained(slot), self._clock())
        return 200, f"{worker} leaves after its round"

    def status(self) -> bytes:
        """The run's status as JSON."""
        self._bulletin.describe(self._state)
        return self._bulletin.status()

    def happenings(self) -> bytes:
        """The last notable events as a JSON list, one per line, newest last."""
        return self._bulletin.happenings()

    def figures(self) -> Mapping[str, float]:
        """The run's numbers for the metrics endpoint."""
        self._bulletin.describe(self._state)
        return self._bulletin.figures()

    @property
    def current(self) -> Status:
        """The run's status; the same object until the run goes back to a checkpoint."""
        self._bulletin.describe(self._state)
        return self._bulletin.current

    @property
    def state(self) -> members.Roster:
        """The state of the decisions; for tests and simulations."""
        return self._state

    @property
    def written(self) -> int:
        """How many of the workers' records are on disk."""
        return self._recorder.on_disk

    @property
    def has_agents(self) -> bool:
        """Whether a launcher is connected."""
        return len(self._agents) > 0

    # messages of workers

    def _heard(self, worker: WorkerId, message: messages.FromWorker, now_s: float) -> None:
        match message:
            case messages.Put():
                refusal = self._formation.push(worker, message)
                if refusal is not None:
                    self.handle(events.Failed(worker, refusal), now_s)
            case messages.Lines():
                self._record(worker, message, now_s)
            case messages.Plan(epochs=epochs, samples=samples):
                self._take_plan(worker, epochs, samples)
            case messages.Saved():
                self._recorder.save(message)
            case messages.Hello():
                pass
            case messages.Beat():
                self._beats.append((convert.beat(worker, message), now_s))
            case _:
                self.handle(convert.event(worker, message, self._bulletin.tally.calls), now_s)

    def _record(self, worker: WorkerId, lines: messages.Lines, now_s: float) -> None:
        """Write a worker's journal records."""
        taken = self._recorder.taken(lines.first, lines.records)
        if isinstance(taken, str):
            self.handle(events.Failed(worker, taken), now_s)
            return
        if lines.records:
            # Workers send records after all have settled an exchange: there is a state that a new start would lose.
            self._state = replace(self._state, settled=max(self._state.settled, 1))
        self._write(taken)

    def _write(self, records: list[journal.Record]) -> None:
        if self._bulletin.current.ended is not None or not records:
            return
        now_s = self._clock()
        records = [self._bulletin.dated(record, now_s) for record in records]
        self._note(self._recorder.write(records, now_s), now_s)
        for record in records:
            if isinstance(record, journal.RewindRecord):
                go_back(self._account, record, self._recorder.since)
            for note in self._bulletin.add(record, now_s):
                self._note(note, now_s)
            if isinstance(record, journal.RewindRecord):
                self._state = replace(self._state, checkpoints=checkpoints(self._account))
                text = f"going on from checkpoint {record.name}, after {self._bulletin.current.rounds} rounds"
                self._note(events.Note("rewound", text), now_s)
        if any(isinstance(record, journal.EraRecord | journal.RewindRecord) for record in records):
            self._keeper.keep(now_s)

    def _name_checkpoints(self, now_s: float) -> None:
        """Journal the checkpoints whose preceding records are safely on disk: only then do they exist."""
        due = self._recorder.checkpoints_due()
        if not due:
            return
        known = self._state.checkpoints
        for saved in due:
            if saved.name not in known:
                self._write([journal.CheckpointRecord(saved.name, saved.records, saved.round)])
                known = (saved.name, *known)[: members.CHECKPOINTS_KEPT]
        # Older checkpoints are removed because of these records, so they must survive a power cut.
        self._recorder.sync_now()
        self._state = replace(self._state, checkpoints=known)
        self._send_members(messages.Named(list(known)))
        self._keeper.keep(now_s)

    def _mind_the_gap(self, now_s: float) -> None:
        """Ask the workers for missing records; after a while, go on without them."""
        first = self._recorder.gap(now_s)
        if first is not None:
            self._send_members(messages.Again(first))
        found = self._recorder.missing(now_s, self._state.dead_after_s + GAP_PATIENCE_S)
        if found:
            text = f"{INCOMPLETE}: records that the workers have forgotten are not on disk; training goes on"
            self._note(events.Note("journal", text), now_s)
            self._write(found)

    # effects

    def _carry_out(self, effect: events.Effect, now_s: float) -> None:
        match effect:
            case events.Admit() | events.Refuse() | events.Dismiss() | events.Close():
                self._answer(effect)
            case events.StartEra() | events.PlanEra() | events.BreakEra():
                self._announce(effect)
            case events.Finishes(worker=worker):
                self._write([journal.FinishingRecord(worker)])
            case events.VoidPlan(era=era, to=to):
                self._workers.send(messages.Void(self._state.term, era), to)
            case events.AskToLeave(worker=worker, reason=reason):
                self._workers.send(messages.Leave(reason), (worker,))
            case events.StopAll(reason=reason):
                self._workers.send_all(messages.Stop(reason))
            case events.Enroll():
                self._enroll(effect, now_s)
            case events.Start(agent=agent, slot=slot):
                self._agents.send(messages.Start(slot), (agent,))
            case events.Terminate(agent=agent, slot=slot):
                self._agents.send(messages.Terminate(slot), (agent,))
            case events.Kill(agent=agent, slot=slot):
                self._agents.send(messages.Kill(slot), (agent,))
            case events.ReleaseAgent(agent=agent, reason=reason, exit_status=status):
                self._agents.send(messages.Over(reason, completed=status == 0, exit_status=status), (agent,))
            case events.Note():
                self._note(effect, now_s)
            case events.Ended():
                self._end(effect)
            case _:
                assert_never(effect)

    def _answer(self, effect: events.Admit | events.Refuse | events.Dismiss | events.Close) -> None:
        """Admit or turn away a connection of a worker or a launcher."""
        peer = self._workers.at(effect.peer) or self._agents.at(effect.peer)
        if peer is None:
            return
        match effect:
            case events.Admit(worker=worker, running=running):
                self._workers.introduce(peer, worker)
                peer.send(self._welcome(worker, running))
                return
            case events.Refuse(reason=reason, again=again):
                peer.send(messages.Refuse(reason, again))
            case events.Dismiss(reason=reason, completed=completed):
                peer.send(messages.Stop(reason, completed))
            case events.Close():
                pass
        self._workers.forget(peer)
        self._agents.forget(peer)
        peer.close()

    def _welcome(self, worker: WorkerId, running: bool) -> messages.Welcome:
        return messages.Welcome(
            job=self.charter.job,
            worker=worker,
            term=self._state.term,
            dead_after_s=self._state.dead_after_s,
            written=self._recorder.acknowledged,
            running=running,
            past=list(self._bulletin.tally.past) if self._knows_past() else [],
            rewinds=self._state.rewinds,
        )

    def _take_plan(self, worker: WorkerId, epochs: int | None, samples: int | None) -> None:
        """Note the script's plan; a newcomer's only if there is none yet, because the newcomer may be refused."""
        known = self._bulletin.tally.status
        newcomer = members.worker_of(self._state, worker)
        is_member = newcomer is not None and isinstance(newcomer.standing, members.EraMember)
        if is_member or (known.epochs is None and known.samples_planned is None):
            self._bulletin.tally.plan(epochs, samples)

    def _knows_past(self) -> bool:
        """Whether the finished calls in the journal are final; otherwise newcomers learn them as members.

        They are not before the first era, nor, if the run can go back to a checkpoint, until the era in force has
        journaled where it began.
        """
        state = self._state
        if isinstance(state.stage, members.Gathering):
            return False
        return not state.checkpoints or self._bulletin.tally.recorded_era >= members.era_of(state.course)

    def _announce(self, effect: events.StartEra | events.PlanEra | events.BreakEra) -> None:
        term = self._state.term
        match effect:
            case events.BreakEra():
                self._formation.invite(convert.broken(effect, term), effect)
                return
            case events.PlanEra():
                message = convert.planned(effect, term)
            case events.StartEra():
                if effect.checkpoints:
                    self._recorder.forget_early()
                message = convert.started(effect, term, self._recorder.known, self._account.last_round)
        self._formation.invite(message, effect)
        self._acknowledge()

    def _enroll(self, effect: events.Enroll, now_s: float) -> None:
        peer = self._agents.at(effect.peer)
        if peer is None:
            # It disconnected while it had to wait.
            self.handle(events.AgentLost(effect.agent, effect.peer), now_s)
            return
        self._agents.introduce(peer, effect.agent)
        peer.send(messages.Enlisted(self.charter.job, effect.agent, self._state.term, list(effect.slots)))

    def _note(self, note: events.Note | None, now_s: float) -> None:
        """Publish a note, if there is one."""
        if note is None:
            return
        text = self._bulletin.note(note, now_s)
        if not note.quiet:
            self._agents.send_all(messages.Note(text))

    def _end(self, end: events.Ended) -> None:
        # Records that were asked for and have not arrived by now will not arrive.
        self._write(self._recorder.missing(self._clock(), AGAIN_AFTER_S))
        if self._account.missing:
            reason = f"{end.reason}, but {INCOMPLETE}: {self._account.missing_why or 'records are missing'}"
            end = events.Ended(reason, end.completed, end.exit_status or INCOMPLETE_EXIT)
        status = self._bulletin.current
        self._write(
            [journal.EndRecord(end.reason, end.completed, end.exit_status, status.rounds, status.samples_total)]
        )
        now_s = self._clock()
        self._end_if_written(end, now_s + END_PATIENCE_S, now_s)

    def _end_if_written(self, end: events.Ended, until_s: float, now_s: float) -> None:
        """End the run once its journal is completely written: without a journal it proves nothing."""
        if not self._recorder.is_whole:
            if now_s < until_s:
                self._ending = end, until_s
                return
            reason = f"{end.reason}; its journal could not be written to the end"
            end = events.Ended(reason, False, end.exit_status or INCOMPLETE_EXIT)
        self._recorder.sync_now()
        self._keeper.keep(now_s)
        self._recorder.close()
        self.end, self._ending = end, None
        for peer in self._agents.introduced():
            self._send_over(peer, end)

    def _send_over(self, peer: Peer, end: events.Ended) -> None:
        peer.send(messages.StatusUpdate(self.status()))
        peer.send(messages.Over(end.reason, end.completed, end.exit_status))

    # periodic messages

    def _tell(self, now_s: float) -> None:
        if self._recorder.is_news:
            self._acknowledge()
        if now_s - self._shown_s >= STATUS_EVERY_S and self.end is None:
            self._shown_s = now_s
            self._agents.send_all(messages.StatusUpdate(self.status()))

    def _acknowledge(self) -> None:
        """Tell all members what is on disk."""
        self._send_members(self._recorder.told())

    def _send_members(self, message: messages.Written | messages.Again | messages.Named) -> None:
        self._workers.send(message, [worker.name for worker, _ in members.members_of(self._state)])
