"""A launcher's machine.

Question  What does a launcher have to do with in the simulator?
Holds     ``Launcher``, ``SlotProcesses`` and ``CoordinatorSupervisor`` are the production code. Here are what
          ``launch.launcher_loop`` and the system are to them: a connection, processes that end and are reported, ticks.
Source    ours; launch/launcher_loop.py, launch/worker_processes.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

from websockets.exceptions import ConnectionClosed

from pliant.control import messages
from pliant.errors import Refused
from pliant.launch.coordinator_supervisor import CoordinatorSupervisor
from pliant.launch.job import JobSpec, Silent
from pliant.launch.launcher import RETRY_S, TICK_S, Launcher
from pliant.launch.worker_processes import ProcessEnded, SlotProcesses
from pliant.testing.clock import Process, World
from pliant.testing.hosts.coordinator_host import Host
from pliant.testing.network import End, Network

_VERSION = "sim"


class _VirtualSlotProcess:
    """A worker's process as its launcher sees it: ``launch.worker_processes.SlotProcess``."""

    error = ""

    def __init__(self, process: Process, signalled: Callable[[Process], None]) -> None:
        self.process = process
        self.slot, self.pid = process.name, process.pid
        self.is_alive = True
        self._signalled = signalled

    def signal(self, number: int) -> None:
        if self.process.alive:
            self.process.world.note("terminate", self.slot)
            self._signalled(self.process)

    def kill(self) -> None:
        self.process.kill(-9)

    def pause(self) -> None: ...

    def dispose(self) -> None: ...


class _VirtualAgentLink:
    """A launcher's connection: ``control.agent_link.AgentLink``."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.answered = False

    def send(self, message: messages.FromAgent) -> None:
        with contextlib.suppress(ConnectionClosed):
            self.end.send(messages.encode(message))


class VirtualLauncher:
    """The real launcher, on a virtual machine."""

    def __init__(
        self,
        world: World,
        network: Network,
        start: Callable[[str, int, Callable[[Process, int], None]], Process],
        signalled: Callable[[Process], None],
        *,
        workers: int,
        host: Host | None,
        grace_s: float,
    ) -> None:
        """``host``: where the coordinator of its own run is started; None: it joins another one's run."""
        self.world = world
        self._network = network
        self._start = start
        self._signalled = signalled
        self._pids = itertools.count(1000 if host is not None else 2000)
        self._link: _VirtualAgentLink | None = None
        self._refusal: messages.Over | None = None
        self.processes: dict[str, Process] = {}
        """the last one of each slot"""
        coordination = None
        if host is not None:
            coordination = CoordinatorSupervisor(host, clock=world.clock)
            coordination.start()
        slots = SlotProcesses(self._started, grace_s, world.after, world.clock)
        spec = JobSpec("script.py", workers=workers, grace_s=grace_s)
        self._launcher = Launcher(spec, Silent(), Path("sim"), "", slots, coordination, world.clock)
        world.after(0.0, self._connect)
        self._tick()

    @property
    def name(self) -> str:
        """Given by the coordinator; empty before it has let the launcher in."""
        return self._launcher.name

    @property
    def over(self) -> messages.Over | None:
        """How the run has ended for it."""
        return self._launcher.end or self._refusal

    def _tick(self) -> None:
        if self.over is None:
            self._launcher.tick()
            self.world.after(TICK_S, self._tick)

    # -- the connection

    def _connect(self) -> None:
        """The owner's listening socket outlives the coordinator: a connection waits for the next one."""
        if self.over is not None:
            return
        wire = self._network.dial(self, agent=True)
        if wire is None:
            self.world.after(RETRY_S, self._connect)
            return
        link = self._link = _VirtualAgentLink(wire.near)
        link.end.received = lambda frame: self._received(link, messages.decode_to_agent(frame))
        link.end.lost = lambda: self._lost(link)
        link.send(self._launcher.enlist(_VERSION))

    def _received(self, link: _VirtualAgentLink, message: messages.ToAgent) -> None:
        if link is not self._link:
            return
        if link.answered:
            self._launcher.received(message)
        else:
            self._enlisted(link, message)
        if self._launcher.has_heard_the_end:
            self._close(link)

    def _enlisted(self, link: _VirtualAgentLink, message: messages.ToAgent) -> None:
        match message:
            case messages.Enlisted() | messages.Over():
                link.answered = True
                self._launcher.connected(link, message)
            case messages.Refuse(reason=reason):
                self._refuse(Refused(reason))
            case _:
                pass

    def _refuse(self, error: Refused) -> None:
        try:
            self._launcher.refused(error)
        except Refused:
            # Its command ends with this line.
            self._refusal = messages.Over(str(error), completed=False, exit_status=1)

    def _close(self, link: _VirtualAgentLink) -> None:
        self._link = None
        self._launcher.disconnected()
        self._launcher.closed()
        if self.over is not None:
            self.world.note("over", self.over.reason)
        link.end.close()

    def _lost(self, link: _VirtualAgentLink) -> None:
        if link is not self._link:
            return
        self._link = None
        self._launcher.disconnected()
        self._launcher.closed()
        self._launcher.seek()
        self.world.after(RETRY_S, self._connect)

    # -- processes

    def _started(self, slot: str, place: int, ended: ProcessEnded) -> _VirtualSlotProcess:
        pid = next(self._pids)
        self.world.note("start", slot, pid)

        def over(process: Process, status: int) -> None:
            self.world.note("exit", process.name, process.pid, status)
            self.world.after(self.world.between(0.001, 0.02), lambda: tell(status))

        def tell(status: int) -> None:
            started.is_alive = False
            ended(started, status)

        process = self.processes[slot] = self._start(slot, pid, over)
        started = _VirtualSlotProcess(process, self._signalled)
        return started
