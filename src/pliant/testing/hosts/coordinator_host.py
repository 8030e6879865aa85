"""The coordinator's machine.

Question  What survives a crash of the coordinator?
Holds     The coordinator is the real one, fed with decoded messages and ticks. The disk survives its crash, perhaps
          with a torn last line; its term is higher every time.
Source    ours; coordinator/service.py, launch/coordinator_supervisor.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed

from pliant.control import messages
from pliant.coordinator import service
from pliant.coordinator.coordinator import Coordinator
from pliant.coordinator.journal import JournalFile
from pliant.coordinator.run_spec import RunSpec
from pliant.core.membership import events
from pliant.errors import UsageError
from pliant.testing.clock import World
from pliant.testing.network import End, Network, Wire


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


class _CoordinatorProcess:
    """A coordinator's process, as its supervisor sees it."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self.is_alive = True
        self._ended = ended

    def tell(self) -> None:
        """The system reports its end."""
        if self.is_alive:
            self.is_alive = False
            self._ended(-9)

    def dispose(self) -> None: ...


class Host:
    """Where the coordinator runs: ``launch.coordinator_supervisor.CoordinatorHost``."""

    has_journal = True
    log = "coordinator.log"

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
        self._process = _CoordinatorProcess(lambda status: None)

    def make_again(self) -> bool:
        """The virtual run directory is never removed."""
        return False

    def last_words(self) -> str:
        """Nothing is written to the log."""
        return ""

    def begin(self, how: str, term: int, ended: Callable[[int], None]) -> _CoordinatorProcess:
        """Start a coordinator, under a higher term than any before; none once the run has ended."""
        self._process = _CoordinatorProcess(ended)
        if self.end is None:
            self._start()
        return self._process

    def _start(self) -> None:
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

    def crash(self, told_s: float) -> None:
        """It dies: connections break, the disk stays. Its supervisor is told of it after so many seconds."""
        process = self._process
        if self.coordinator is not None:
            self._die()
        self.world.after(told_s, process.tell)

    def _die(self) -> None:
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
        self.world.after(service.TICK_S, lambda: self._tick(coordinator))

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
