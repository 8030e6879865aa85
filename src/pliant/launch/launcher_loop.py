"""A launcher in an event loop.

Question  Which events of this machine does a launcher hear of, and what does it wait for?
Holds     All decisions are ``launcher.Launcher``'s. Here are its connection, its ticks, its signals and its end: the
          workers and the coordinator are waited for, for a limited time.
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

from pliant.control.agent_link import AgentLink, Unreachable
from pliant.control.messages import Enlisted, Over
from pliant.coordinator.status import Status
from pliant.errors import PliantError
from pliant.launch import certificate_check
from pliant.launch.coordinator_supervisor import CoordinatorSupervisor
from pliant.launch.job import JobSpec, Screen
from pliant.launch.launcher import ALONE_S, RETRY_S, TICK_S, Launcher
from pliant.launch.preemption import noticed
from pliant.launch.run_directory import Access
from pliant.launch.worker_processes import SlotProcesses, WorkerStarter

ANSWER_S = 30.0
"""A coordinator next to n importing workers on a busy machine still answers within seconds."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LauncherLoop:
    """Tells a launcher what happens; created in the event loop that it then runs in."""

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
        self._access = access
        self._tls = certificate_check.asked(access)
        loop = asyncio.get_running_loop()
        starter = WorkerStarter(spec, directory, access, ui.output, owns=coordination is not None)
        self._slots = SlotProcesses(starter.started, spec.grace_s, loop.call_later)
        self._launcher = Launcher(spec, ui, directory, access.address, self._slots, coordination)
        self._ended: asyncio.Future[None] = loop.create_future()
        self._launcher.ended = lambda: self._ended.set_result(None)

    @property
    def status(self) -> Status:
        """What the coordinator has last said of the run."""
        return self._launcher.status

    async def followed(self) -> Over:
        """Serve the coordinator until the run is over for this launcher. Raises if it cannot even begin."""
        launcher = self._launcher
        tasks = [asyncio.create_task(self._talk())]
        if self._spec.notice_command:
            tasks.append(asyncio.create_task(self._watch()))
        try:
            while (end := launcher.end) is None:
                await asyncio.wait([self._ended, *tasks], timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
                launcher.tick()
            until_s = time.monotonic() + launcher.patience_s
            while launcher.awaits_workers(until_s):
                await asyncio.sleep(TICK_S)
            until_s = time.monotonic() + ALONE_S
            while launcher.awaits_coordinator(until_s):
                await asyncio.sleep(TICK_S / 10)
            self._ui.progress(launcher.status)
            return end
        finally:
            await _cancelled(tasks)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take the launcher's signals as events. Outside the main thread Python has none."""
        loop = asyncio.get_running_loop()
        taken: list[int] = []
        for number in SIGNALS:
            # Who started us with nohup does not want to hear of it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(ValueError, RuntimeError):
                    loop.add_signal_handler(number, self._launcher.interrupted, number)
                    taken.append(number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    def dispose(self) -> None:
        """Leave no process behind, whatever happened."""
        self._slots.dispose()

    async def _talk(self) -> None:
        """Keep a connection until the run is over."""
        launcher = self._launcher
        while launcher.end is None:
            link, answer = await self._connected()
            try:
                launcher.connected(link, answer)
                while not launcher.has_heard_the_end and (message := await link.receive()) is not None:
                    launcher.received(message)
            finally:
                launcher.disconnected()
                await link.close()
            launcher.closed()

    async def _connected(self) -> tuple[AgentLink, Enlisted | Over]:
        """Enlist; come back as often as there is hope that a coordinator answers."""
        launcher, access = self._launcher, self._access
        launcher.seek()
        while True:
            enlist = launcher.enlist(version("pliant"))
            try:
                return await AgentLink.connect(
                    access.address, access.token, enlist, ANSWER_S, self._tls, held=launcher.held
                )
            except Unreachable as error:
                launcher.unreachable(error)
            except PliantError as error:
                launcher.refused(error)
            await asyncio.sleep(RETRY_S)

    async def _watch(self) -> None:
        """Wait for the notice that this machine goes away."""
        await noticed(self._spec.notice_command, self._spec.notice_every_s, self._ui.note)
        self._launcher.noticed()


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
