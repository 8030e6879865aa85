"""A launcher at work: the agent of a coordinator.

Question  How does a launcher carry out what the coordinator wants, and what does it do when there is none?
Holds     What the coordinator must know it is told again after every reconnection: ends of processes, signals, notices.
          Whatever happens to the coordinator, a signal ends everything in the end, and a third one at once.
Source    ours; docs/design/0007-elastic.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import assert_never

import msgspec

from pliant.control.agent_link import AgentLink, Unreachable
from pliant.control.messages import (
    Enlist,
    Enlisted,
    Exited,
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
from pliant.launch import certificate_check
from pliant.launch.coordinator_supervisor import CoordinatorSupervisor
from pliant.launch.job import JobSpec, Screen
from pliant.launch.preemption import noticed
from pliant.launch.run_directory import Access
from pliant.launch.worker_processes import SlotProcesses

TICK_S = 0.1
"""How often what was held back is shown and time is let pass."""

ANSWER_S = 30.0
"""A coordinator next to n importing workers on a busy machine still answers within seconds."""

RETRY_S = 0.2

RECONNECT_S = 30.0
"""How long a coordinator on another machine may be away before its workers are ended."""

IDLE_RECONNECT_S = 2.0
"""The same for a launcher without a living worker: nothing is lost by going."""

JOIN_S = 60.0
"""A script that has not called ``join`` by then mostly never will; downloads and imports may take longer, so that it is
told and nothing is done about it."""

_NOT_JOINED = ("starting", "restarting", "ended")
"""States of a worker whose script may never have called ``join``."""

ALONE_S = 5.0
"""After a signal without a coordinator, and between SIGTERM and SIGKILL when the launcher itself ends the workers."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PATIENCE = 3
"""With this signal the launcher no longer waits for anybody; the second one made the coordinator kill."""


class Launcher:
    """One launcher in one run. With a ``coordination`` it owns the run, and keeps the coordinator alive."""

    def __init__(
        self,
        spec: JobSpec,
        ui: Screen,
        directory: Path,
        access: Access,
        coordination: CoordinatorSupervisor | None = None,
    ) -> None:
        self._spec = spec
        self._ui = ui
        self._directory = directory
        self._access = access
        self._tls = certificate_check.asked(access)
        self._slots = SlotProcesses(spec, directory, access, ui.output, self._exited, owns=coordination is not None)
        self._coordination = coordination
        if coordination is not None:
            coordination.died = self._coordinator_died
        self._link: AgentLink | None = None
        self._name = ""
        self._signals: list[int] = []
        self._signalled_s = 0.0
        self._is_noticed = False
        self._reminded = False
        self._is_over = False
        self._patience_s = 0.0
        self._abandoning: asyncio.Task[None] | None = None
        self._end: asyncio.Future[Over] = asyncio.get_running_loop().create_future()
        self.status = Status(job=directory.name)

    async def followed(self) -> Over:
        """Serve the coordinator until the run is over for this launcher. Raises if it cannot even begin."""
        tasks = [asyncio.create_task(self._talk())]
        if self._spec.notice_command:
            tasks.append(asyncio.create_task(self._watch()))
        try:
            while not self._end.done():
                await asyncio.wait([self._end, *tasks], timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
                self._tick()
            end = self._end.result()
            await self._let_go(self._patience_s)
            await self._let_coordinator_go()
            self._ui.progress(self.status)
            return end
        finally:
            await _cancelled([*tasks, *([self._abandoning] if self._abandoning is not None else [])])

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take the launcher's signals as events. Outside the main thread Python has none."""
        loop = asyncio.get_running_loop()
        taken: list[int] = []
        for number in SIGNALS:
            # Who started us with nohup does not want to hear of it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(ValueError, RuntimeError):
                    loop.add_signal_handler(number, self.interrupted, number)
                    taken.append(number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    def interrupted(self, number: int) -> None:
        """The launcher got a signal."""
        self._signals.append(number)
        self._signalled_s = time.monotonic()
        if len(self._signals) >= PATIENCE or not self._name:
            self._close(_by_signal(number))
        elif self._link is not None:
            self._link.send(Interrupted(number))

    def dispose(self) -> None:
        """Leave no process behind, whatever happened."""
        self._slots.dispose()

    # the coordinator

    async def _talk(self) -> None:
        """Keep a connection until the run is over."""
        while not self._end.done():
            link, answer = await self._connected()
            try:
                end = answer
                if isinstance(answer, Enlisted):
                    self._link = link
                    self._report(link, answer)
                    end = await self._served(link)
                self._is_over = end is not None
            finally:
                self._link = None
                await link.close()
            if isinstance(end, Over):
                # The workers have heard it too, and are on their way out.
                self._close(end, self._spec.grace_s)
            elif self._coordination is not None and self._coordination.is_dead:
                self._revive()

    async def _connected(self) -> tuple[AgentLink, Enlisted | Over]:
        """Enlist; come back as often as there is hope that somebody answers."""
        lost_s = time.monotonic()

        def held() -> None:
            # Somebody is there, and reads the journal.
            nonlocal lost_s
            lost_s = time.monotonic()

        while True:
            enlist = Enlist(
                agent=self._name,
                version=version("pliant"),
                slots=self._slots.names,
                wanted=0 if self._name else self._spec.workers,
                owner=self._coordination is not None,
            )
            try:
                return await AgentLink.connect(
                    self._access.address, self._access.token, enlist, ANSWER_S, self._tls, held=held
                )
            except Unreachable as error:
                if self._coordination is None and not self._name:
                    raise
                if self._coordination is None:
                    self._lose_hope(str(error), time.monotonic() - lost_s)
            except PliantError as error:
                if not self._name:
                    raise
                self._close(Over(str(error), completed=False, exit_status=1))
            await asyncio.sleep(RETRY_S)

    def _lose_hope(self, why: str, away_s: float) -> None:
        """End, if the coordinator of somebody else's run is away for too long."""
        if not self._slots.alive and away_s > IDLE_RECONNECT_S:
            statuses = [exited.status for exited in self._slots.exits.values()]
            ended_well = bool(statuses) and not any(statuses)
            reason = "finished" if ended_well else f"lost the coordinator: {why}"
            self._close(Over(reason, completed=ended_well, exit_status=0 if ended_well else 1))
        elif away_s > RECONNECT_S:
            self._abandon(Over(f"lost the coordinator for {RECONNECT_S:g} s: {why}", completed=False, exit_status=1))

    def _report(self, link: AgentLink, enlisted: Enlisted) -> None:
        """Start what a new agent is to run; tell what a new coordinator may not know."""
        if not self._name:
            self._name = enlisted.agent
            self._ui.started(self._directory, self._access.address)
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

    async def _served(self, link: AgentLink) -> Over | None:
        """Carry out what the coordinator says; None when the connection is lost."""
        while (message := await link.receive()) is not None:
            end = self._carry_out(message)
            if end is not None:
                return end
        return None

    def _carry_out(self, message: ToAgent) -> Over | None:
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
                return Over(reason, completed=False, exit_status=1)
            case Over():
                return message
            case _:
                assert_never(message)
        return None

    def _coordinator_died(self) -> None:
        # A last word may still be on its way: with a connection, its closing decides.
        if self._link is None and not self._is_over:
            self._revive()

    def _revive(self) -> None:
        """Start the coordinator again, unless that is hopeless."""
        assert self._coordination is not None
        why = self._coordination.hopeless()
        if self._end.done():
            return
        if why is not None:
            self._close(Over(why, completed=False, exit_status=1))
        else:
            self._mend_directory()
            if self._coordination.has_lost_journal:
                self._ui.note("the run directory was lost, and the coordinator: what was written is not in the journal")
            self._coordination.start()
            self._ui.note("the coordinator died; restarted")

    # ends

    def _exited(self, exited: Exited) -> None:
        if self._link is not None:
            self._link.send(exited)

    def _tick(self) -> None:
        """Let time pass: for output that was held back, and for a signal that nobody else takes care of."""
        self._slots.pause()
        self._remind()
        self._mend_directory()
        if not self._signals:
            return
        waited_s = time.monotonic() - self._signalled_s
        nobody = self._link is None and waited_s > ALONE_S
        if nobody or waited_s > 2 * (self._spec.grace_s + ALONE_S):
            self._abandon(_by_signal(self._signals[0]))

    def _mend_directory(self) -> None:
        if self._coordination is not None and self._coordination.make_again():
            self._ui.note("the run directory was removed; training goes on, and what can be made again there is")

    def _remind(self) -> None:
        """Say, once, that a process runs and has not joined: it may be training alone for hours."""
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

    def _abandon(self, end: Over) -> None:
        """End the workers without the coordinator's help."""
        if self._abandoning is None and not self._end.done():
            self._abandoning = asyncio.create_task(self._abandoned(end))

    async def _abandoned(self, end: Over) -> None:
        for slot in self._slots.alive:
            self._slots.terminate(slot)
        await self._let_go(min(self._spec.grace_s, ALONE_S))
        self._close(end)

    async def _let_go(self, patience_s: float) -> None:
        """Wait for processes that are about to end; what is left afterwards ``dispose`` kills."""
        until_s = time.monotonic() + patience_s
        while self._slots.alive and time.monotonic() < until_s and len(self._signals) < PATIENCE:
            await asyncio.sleep(TICK_S)

    async def _let_coordinator_go(self) -> None:
        """It tells the other launchers, too, that the run is over, and ends."""
        until_s = time.monotonic() + (ALONE_S if self._is_over else 0.0)
        while self._coordination is not None and not self._coordination.is_dead and time.monotonic() < until_s:
            await asyncio.sleep(TICK_S / 10)

    def _close(self, end: Over, patience_s: float = 0.0) -> None:
        if not self._end.done():
            self._patience_s = patience_s
            self._end.set_result(end)

    async def _watch(self) -> None:
        """Wait for the notice that this machine goes away."""
        await noticed(self._spec.notice_command, self._spec.notice_every_s, self._ui.note)
        self._is_noticed = True
        self._ui.note("this machine is about to be taken away (--notice-command): its workers leave")
        if self._link is not None:
            self._link.send(Noticed())


def _by_signal(number: int) -> Over:
    reason = "interrupted (Ctrl-C)" if number == signal.SIGINT else f"ended by signal {number}"
    return Over(reason, completed=False, exit_status=128 + number)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
