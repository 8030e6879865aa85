"""The coordinator's machine, and a launcher.

Question  Who starts, ends and restarts virtual processes, and what survives a crash of the coordinator?
Holds     The coordinator is the real one, fed with decoded messages and ticks. The disk survives its crash, perhaps
          with a torn last line; its term is higher every time. A launcher behaves as ``launch.launcher``: it reports
          ends, repeats them after a reconnection, and starts the coordinator again when it has died.
Source    ours; coordinator/service.py, launch/launcher.py, launch/worker_processes.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed

from pliant.control import messages
from pliant.coordinator.coordinator import Coordinator
from pliant.coordinator.journal import JournalFile
from pliant.coordinator.run_spec import RunSpec
from pliant.coordinator.service import TICK_S
from pliant.core.membership import events
from pliant.errors import UsageError
from pliant.testing.clock import Process, World
from pliant.testing.network import End, Network, Wire

_RETRY_S = 0.2


class _Path:
    """A file of the virtual disk, as far as ``JournalFile`` uses it."""

    parent = "virtual"

    def __init__(self) -> None:
        self.content = bytearray()
        self.exists = False

    def open(self, mode: str, buffering: int) -> Any:
        if mode == "rb":
            return io.BytesIO(bytes(self.content))
        if mode == "x+b" and self.exists:
            raise FileExistsError
        self.exists = True
        return _File(self)


class _VirtualStateFile:
    """The state file on the virtual disk."""

    def __init__(self) -> None:
        self.content = b""

    def read(self) -> bytes:
        return self.content

    def write(self, content: bytes) -> None:
        self.content = content


class _Journal(JournalFile):
    """What is written is on disk."""

    def sync(self, done: Callable[[bool], None], *, wait: bool = False) -> None:
        done(True)

    def keep(self, content: bytes) -> None:
        self._state.write(content)

    def mend(self) -> bool:
        return False


class _File(io.RawIOBase):
    """Unbuffered."""

    def __init__(self, path: _Path) -> None:
        self._path = path

    def write(self, data: Any) -> int:
        self._path.content += data
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        del self._path.content[size:]
        return len(self._path.content)

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset


class _Peer:
    """A connection, as the coordinator sees it."""

    def __init__(self, number: int, end: End) -> None:
        self.number = number
        self._end = end

    def send(self, message: Any) -> None:
        with contextlib.suppress(ConnectionClosed):
            self._end.send(messages.encode(message))

    def close(self) -> None:
        self._end.close()


class Host:
    """Where the coordinator runs."""

    def __init__(self, world: World, network: Network, charter: RunSpec) -> None:
        self.world = world
        self.network = network
        self.charter = charter
        self.disk = _Path()
        self._state = _VirtualStateFile()
        self.term = 0
        self.coordinator: Coordinator | None = None
        self.end: events.Ended | None = None
        self.restarts = 0
        self.asleep_until_s = 0.0
        self.appended: Callable[[Coordinator], None] = lambda coordinator: None
        self._numbers = itertools.count(1)
        self._ends: list[End] = []
        self._late: list[Callable[[], None]] = []
        self.start()

    def start(self) -> None:
        """Begin, or begin again under a higher term."""
        if self.coordinator is not None or self.end is not None:
            return
        self.term += 1
        world = self.world
        world.note("coordinator", self.term)
        try:
            if self.disk.content:
                if self.term % 3 == 0:
                    # The whole journal is read where there is no state, or a damaged one.
                    self._state.content = self._state.content[: -self.term]
                file, account = _Journal.reopened(self.disk, state=self._state)  # type: ignore[arg-type]
                self.coordinator = Coordinator.resumed(
                    self.charter, file, account, self.term, world.clock, 1e9 + world.now_s
                )
            else:
                self.disk.exists = False
                file = _Journal(self.disk, state=self._state)  # type: ignore[arg-type]
                self.coordinator = Coordinator(self.charter, file, world.clock, 1e9 + world.now_s, term=self.term)
        except UsageError:
            # The lost one had written the end.
            self.end = events.Ended("finished", True, 0)
            world.stop()
            return
        self.network.accept = self._accept
        self._tick(self.coordinator)

    def crash(self) -> None:
        """It dies; connections break, the disk stays."""
        if self.coordinator is None:
            return
        world = self.world
        world.note("crash", self.term)
        self.coordinator, self.network.accept = None, None
        if world.chance(0.5):
            # It died in the middle of writing.
            self.disk.content += b'{"kind":"round","era":1,"rou'[: world.random.randrange(1, 28)]
        for _, wire in list(self.network.wires):
            wire.break_off(near_s=world.between(0.0005, 0.01), far_s=1e9)
        self.restarts += 1

    def _tick(self, coordinator: Coordinator) -> None:
        if coordinator is not self.coordinator:
            return
        if self.world.now_s >= self.asleep_until_s:
            self._do(coordinator, lambda: coordinator.handle(events.Tick(), self.world.now_s))
        self.world.after(TICK_S, lambda: self._tick(coordinator))

    def sleep(self, seconds: float) -> None:
        """The coordinator's machine stands still for a while."""
        self.asleep_until_s = self.world.now_s + seconds
        self.world.at(self.asleep_until_s, self._wake)

    def _wake(self) -> None:
        late, self._late = self._late, []
        for action in late:
            action()

    def _do(self, coordinator: Coordinator, action: Callable[[], None]) -> None:
        if coordinator is not self.coordinator:
            return
        if self.world.now_s < self.asleep_until_s:
            self._late.append(lambda: self._do(coordinator, action))
            return
        action()
        self.appended(coordinator)
        if coordinator.end is not None and self.end is None:
            self.end = coordinator.end
            self.world.note("ended", self.end.reason, self.end.completed)

    def _accept(self, wire: Wire, agent: bool) -> None:
        coordinator, end = self.coordinator, wire.far
        assert coordinator is not None
        peer = _Peer(next(self._numbers), end)
        note, world = self.world.note, self.world

        def received(frame: bytes) -> None:
            if agent:
                told = messages.decode_from_agent(frame)
                note("from agent", type(told).__name__)
                self._do(coordinator, lambda: coordinator.agent_received(peer, told))
            else:
                said = messages.decode_from_worker(frame)
                if not isinstance(said, messages.Beat | messages.Put):
                    note("heard", peer.number, type(said).__name__)
                self._do(coordinator, lambda: coordinator.received(peer, said))

        def lost() -> None:
            self._do(coordinator, lambda: (coordinator.agent_closed if agent else coordinator.closed)(peer))

        end.received, end.lost = received, lost
        del world
        self._do(coordinator, lambda: (coordinator.agent_connected if agent else coordinator.connected)(peer))


class VirtualLauncher:
    """A launcher with its processes."""

    def __init__(
        self,
        world: World,
        network: Network,
        start: Callable[[str, int, Callable[[Process, int], None]], Process],
        *,
        workers: int,
        owner: bool,
        host: Host | None,
        grace_s: float,
    ) -> None:
        self.world = world
        self._network = network
        self._start = start
        self._workers = workers
        self._owner = owner
        self._host = host
        self._grace_s = grace_s
        self._name = ""
        self._end: End | None = None
        self._pids = itertools.count(1000 if owner else 2000)
        self.processes: dict[str, Process] = {}
        self.exits: dict[str, messages.Exited] = {}
        self.over: messages.Over | None = None
        world.after(0.0, self._connect)

    # -- the coordinator

    def _connect(self) -> None:
        if self.over is not None:
            return
        wire = self._network.dial(self, agent=True)
        if wire is None:
            self.world.after(_RETRY_S, self._connect)
            return
        end = self._end = wire.near
        end.received = lambda frame: self._received(end, messages.decode_to_agent(frame))
        end.lost = lambda: self._lost(end)
        names = list(self.processes)
        wanted = 0 if self._name else self._workers
        self._send(messages.Enlist(self._name, self._version, names, wanted, self._owner))

    _version = "sim"

    def _lost(self, end: End) -> None:
        if end is self._end:
            self._end = None
            self.world.after(_RETRY_S, self._connect)

    def _send(self, message: messages.FromAgent) -> None:
        if self._end is not None:
            with contextlib.suppress(ConnectionClosed):
                self._end.send(messages.encode(message))

    def _received(self, end: End, message: messages.ToAgent) -> None:
        if end is not self._end:
            return
        match message:
            case messages.Enlisted(agent=agent, slots=slots):
                if not self._name:
                    self._name = agent
                    for slot in slots:
                        self.start(slot)
                for exited in self.exits.values():
                    self._send(exited)
            case messages.Start(slot=slot):
                self.start(slot)
            case messages.Terminate(slot=slot):
                self.terminate(slot)
            case messages.Kill(slot=slot):
                if slot in self.processes:
                    self.processes[slot].kill(-9)
            case messages.Over():
                self.over = message
                self.world.note("over", message.reason)
                end.close()
            case messages.Refuse(reason=reason):
                self.over = messages.Over(reason, completed=False, exit_status=1)
            case _:
                pass

    # -- processes

    def start(self, slot: str) -> None:
        """Start the slot's process, unless it runs."""
        if slot in self.processes and self.processes[slot].alive:
            return
        pid = next(self._pids)
        self.exits.pop(slot, None)
        self.world.note("start", slot, pid)
        self.processes[slot] = self._start(slot, pid, self._ended)

    def _ended(self, process: Process, status: int) -> None:
        self.world.note("exit", process.name, process.pid, status)
        exited = messages.Exited(process.name, process.pid, status)

        def tell() -> None:
            if self.processes.get(process.name) is process:
                self.exits[process.name] = exited
                self._send(exited)

        self.world.after(self.world.between(0.001, 0.02), tell)

    def terminate(self, slot: str) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        process = self.processes.get(slot)
        if process is None or not process.alive:
            return
        self.world.note("terminate", slot)
        self.signal(process)
        self.world.after(self._grace_s, lambda: process.kill(-9))

    signal: Callable[[Process], None] = staticmethod(lambda process: process.kill(-15))

    def revive(self) -> None:
        """The coordinator has died: start it again."""
        if self._host is not None:
            self._host.start()
