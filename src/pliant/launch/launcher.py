"""A launcher at work: the agent of a coordinator.

Question  What does a launcher do about each thing that happens: a message, a lost connection, the end of a process?
Holds     Nothing here waits. The loop around it (``launcher_loop``, or the simulator's) calls one method per event, and
          ``tick`` regularly; processes, clock and connection are handed in. What the coordinator must know it is told
          again after every reconnection: ends of processes, signals, notices. Whatever happens to the coordinator, a
          signal ends everything in the end, and a third one at once.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, assert_never

import msgspec

from pliant.control.agent_link import Unreachable
from pliant.control.messages import (
    Enlist,
    Enlisted,
    Exited,
    FromAgent,
    Hold,
    Interrupted,
    Kill,
    Note,
    Noticed,
    Over,
    Refuse,
    Start,
    StatusUpdate,
    Terminate,
    ToAgent,
)
from pliant.coordinator.status import Status
from pliant.errors import PliantError
from pliant.launch.coordinator_supervisor import CoordinatorSupervisor
from pliant.launch.job import JobSpec, Screen
from pliant.launch.worker_processes import SlotProcesses

TICK_S = 0.1
"""How often ``tick`` is to be called."""

RETRY_S = 0.2
"""Between two attempts to reach the coordinator."""

RECONNECT_S = 30.0
"""How long a coordinator on another machine may be away before its workers are ended."""

IDLE_RECONNECT_S = 2.0
"""The same for a launcher without a living worker: nothing is lost if it ends."""

JOIN_S = 60.0
"""A script that has not called ``join`` by then probably never will. Downloads and imports may take longer, so the
user is told, and nothing else is done."""

_NOT_JOINED = ("starting", "restarting", "ended")
"""States of a worker whose script may never have called ``join``."""

ALONE_S = 5.0
"""After a signal without a coordinator, and between SIGTERM and SIGKILL when the launcher itself ends the workers."""

PATIENCE = 3
"""Signals after which the launcher waits for no process any more; the second one made the coordinator kill."""


class Outbox(Protocol):
    """A connection to the coordinator, as far as a launcher sends on it."""

    def send(self, message: FromAgent, /) -> None: ...


class Launcher:
    """One launcher in one run. With a ``coordination`` it owns the run, and keeps the coordinator alive."""

    def __init__(
        self,
        spec: JobSpec,
        ui: Screen,
        directory: Path,
        address: str,
        slots: SlotProcesses,
        coordination: CoordinatorSupervisor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._ui = ui
        self._directory = directory
        self._address = address
        self._slots = slots
        self._coordination = coordination
        self._clock = clock
        slots.ended = self._exited
        if coordination is not None:
            coordination.died = self._coordinator_died
        self._link: Outbox | None = None
        self._lost_s = clock()
        self._last_word: Over | None = None
        self._signals: list[int] = []
        self._signalled_s = 0.0
        self._is_noticed = False
        self._reminded = False
        self._abandoned: tuple[Over, float] | None = None
        self.name = ""
        """given by the coordinator; empty before it has let this launcher in"""
        self.end: Over | None = None
        """how the run has ended for this launcher"""
        self.patience_s = 0.0
        """how long its workers may take to end by themselves then"""
        self.ended: Callable[[], None] = lambda: None
        """called when ``end`` is set"""
        self.status = Status(job=directory.name)

    # -- the connection

    def seek(self) -> None:
        """The launcher begins to look for a coordinator."""
        self._lost_s = self._clock()

    def enlist(self, version: str) -> Enlist:
        """The first message on a new connection."""
        return Enlist(
            agent=self.name,
            version=version,
            slots=self._slots.names,
            wanted=0 if self.name else self._spec.workers,
            owner=self._coordination is not None,
        )

    def held(self) -> None:
        """A coordinator is there, and still reads the journal."""
        self._lost_s = self._clock()

    def unreachable(self, error: Unreachable) -> None:
        """An attempt to reach the coordinator has failed. Raises the error where the launcher has not begun yet."""
        if self._coordination is not None:
            return
        if not self.name:
            raise error
        self._lose_hope(str(error), self._clock() - self._lost_s)

    def refused(self, error: PliantError) -> None:
        """A coordinator has refused this launcher. Raises the error where the launcher cannot even begin."""
        if not self.name:
            raise error
        self._close(Over(str(error), completed=False, exit_status=1))

    def connected(self, link: Outbox, answer: Enlisted | Over) -> None:
        """A coordinator has answered."""
        if isinstance(answer, Over):
            self._last_word = answer
            return
        self._link = link
        self._report(link, answer)

    def received(self, message: ToAgent) -> None:
        """A message of the coordinator has arrived."""
        match message:
            case Start(slot=slot):
                self._slots.start(slot)
            case Terminate(slot=slot):
                self._slots.terminate(slot)
            case Kill(slot=slot):
                self._slots.kill(slot)
            case Note(text=text):
                self._ui.note(text)
            case StatusUpdate(status=status):
                with contextlib.suppress(msgspec.DecodeError):
                    self.status = msgspec.json.decode(status, type=Status)
                    self._ui.progress(self.status)
            case Enlisted() | Hold():
                pass
            case Refuse(reason=reason):
                self._last_word = Over(reason, completed=False, exit_status=1)
            case Over():
                self._last_word = message
            case _:
                assert_never(message)

    @property
    def has_heard_the_end(self) -> bool:
        """Whether the coordinator has said its last word: the connection is to be closed."""
        return self._last_word is not None

    def disconnected(self) -> None:
        """Nothing can be sent any more."""
        self._link = None

    def closed(self) -> None:
        """The connection is closed, after the last word or without one."""
        if self._last_word is not None:
            # The workers have heard it too, and are on their way out.
            self._close(self._last_word, self._spec.grace_s)
        elif self._coordination is not None and self._coordination.is_dead:
            self._revive()

    def _report(self, link: Outbox, enlisted: Enlisted) -> None:
        """Start the slots of a new launcher; repeat what a new coordinator may not have heard."""
        if not self.name:
            self.name = enlisted.agent
            self._ui.started(self._directory, self._address)
            for slot in enlisted.slots:
                self._slots.start(slot)
        if self._coordination is not None:
            self._coordination.term = enlisted.term
        for exited in self._slots.exits.values():
            link.send(exited)
        for number in self._signals:
            link.send(Interrupted(number))
        if self._is_noticed:
            link.send(Noticed())

    def _lose_hope(self, why: str, away_s: float) -> None:
        """End, if the coordinator of another launcher's run is away for too long."""
        if not self._slots.alive and away_s > IDLE_RECONNECT_S:
            statuses = [exited.status for exited in self._slots.exits.values()]
            ended_well = bool(statuses) and not any(statuses)
            reason = "finished" if ended_well else f"lost the coordinator: {why}"
            self._close(Over(reason, completed=ended_well, exit_status=0 if ended_well else 1))
        elif away_s > RECONNECT_S:
            self._abandon(Over(f"lost the coordinator for {RECONNECT_S:g} s: {why}", completed=False, exit_status=1))

    # -- the coordinator's process

    def _coordinator_died(self) -> None:
        # A last word may still be on its way: with a connection, its closing decides.
        if self._link is None and self._last_word is None:
            self._revive()

    def _revive(self) -> None:
        """Start the coordinator again, unless that is hopeless."""
        assert self._coordination is not None
        why = self._coordination.hopeless()
        if self.end is not None:
            return
        if why is not None:
            self._close(Over(why, completed=False, exit_status=1))
        else:
            self._mend_directory()
            if self._coordination.has_lost_journal:
                self._ui.note("the run directory was lost, and the coordinator: what was written is not in the journal")
            self._coordination.start()
            self._ui.note("the coordinator died; restarted")

    # -- processes, signals, notices

    def _exited(self, exited: Exited) -> None:
        if self._link is not None:
            self._link.send(exited)

    def interrupted(self, number: int) -> None:
        """The launcher got a signal."""
        self._signals.append(number)
        self._signalled_s = self._clock()
        if len(self._signals) >= PATIENCE or not self.name:
            self._close(_by_signal(number))
        elif self._link is not None:
            self._link.send(Interrupted(number))

    def noticed(self) -> None:
        """This machine is about to be taken away."""
        self._is_noticed = True
        self._ui.note("this machine is about to be taken away (--notice-command): its workers leave")
        if self._link is not None:
            self._link.send(Noticed())

    # -- time

    def tick(self) -> None:
        """Show output that was held back; end the workers if the coordinator does not react to a signal."""
        self._slots.pause()
        self._remind()
        self._mend_directory()
        if self._signals:
            waited_s = self._clock() - self._signalled_s
            nobody = self._link is None and waited_s > ALONE_S
            if nobody or waited_s > 2 * (self._spec.grace_s + ALONE_S):
                self._abandon(_by_signal(self._signals[0]))
        if self._abandoned is not None:
            end, until_s = self._abandoned
            if not self.awaits_workers(until_s):
                self._close(end)

    def _mend_directory(self) -> None:
        if self._coordination is not None and self._coordination.make_again():
            self._ui.note("the run directory was removed; training goes on, and what can be made again there is")

    def _remind(self) -> None:
        """Say once that a process runs and has not joined: it may train alone for hours."""
        own = {worker.slot: worker.state for worker in self.status.workers if worker.slot in self._slots.names}
        if self._reminded or self._link is None or not own:
            return
        slots = self._slots.alive_for(JOIN_S)
        if any(state not in _NOT_JOINED for state in own.values()):
            # The script calls it. One that is started again later may take its time.
            self._reminded = True
        elif slots:
            self._reminded = True
            self._ui.note(
                f"{', '.join(slots)} {'has' if len(slots) == 1 else 'have'} run for {JOIN_S:g} s without calling "
                f"pliant.join: if {self._spec.script} trains already, each worker does so for itself; "
                "wrap its loop in `with pliant.join(model, optimizer, batch=…) as run:`"
            )

    # -- the end

    def _abandon(self, end: Over) -> None:
        """End the workers without the coordinator's help."""
        if self._abandoned is None and self.end is None:
            self._abandoned = end, self._clock() + min(self._spec.grace_s, ALONE_S)
            for slot in self._slots.alive:
                self._slots.terminate(slot)

    def awaits_workers(self, until_s: float) -> bool:
        """Whether processes that are about to end are still waited for."""
        return bool(self._slots.alive) and self._clock() < until_s and len(self._signals) < PATIENCE

    def awaits_coordinator(self, until_s: float) -> bool:
        """Whether the own coordinator is still waited for: it tells the other launchers that the run is over."""
        alive = self._coordination is not None and not self._coordination.is_dead
        return alive and self._last_word is not None and self._clock() < until_s

    def _close(self, end: Over, patience_s: float = 0.0) -> None:
        if self.end is None:
            self.patience_s = patience_s
            self.end = end
            self.ended()


def _by_signal(number: int) -> Over:
    reason = "interrupted (Ctrl-C)" if number == signal.SIGINT else f"ended by signal {number}"
    return Over(reason, completed=False, exit_status=128 + number)
