"""Processes of a launcher on this machine.

Question  How is a process started, read, signalled and cleaned up after?
Holds     A process leads its own process group. When it ends, the rest of the group is killed before the pid is
          released, so no signal can reach an unrelated process. It is killed with the launcher, however that ends. All
          output of a worker is in its log, byte for byte, as far as the disk has room for it.
Source    waitid(2) with WNOWAIT; DESIGN: our own processes are subprocesses, never forks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal

from pliant.launch import child
from pliant.launch.logs import Log
from pliant.launch.output import LastError, LineSplitter, SeenTracebacks, TracebackFilter, is_transports

Stream = Literal["stdout", "stderr"]
_CHUNK = 1 << 16


class OwnedProcess:
    """A running process. ``ended`` is called once, in the event loop, with its wait status."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        ended: Callable[[int], None],
        output: int | IO[bytes] = subprocess.PIPE,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self.process = subprocess.Popen(
            # Without site and the user's environment this first program takes some ten milliseconds.
            [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A file object without a buffer: reads return what is there.
            bufsize=0,
            start_new_session=True,
            pass_fds=descriptors,
        )
        threading.Thread(target=self._wait, name=f"wait-{self.process.pid}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether its end was not told yet."""
        return self.process.returncode is None

    def signal(self, number: int) -> None:
        """Signal the process itself, not its children: they end with it, and would print errors if signalled first."""
        if self.is_alive:
            # Not Popen.send_signal, which reaps a process that has just ended: its end would never be told.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and all its children."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def dispose(self) -> None:
        """Kill and reap the process unless it has ended; ``ended`` is not called any more."""
        if self.is_alive:
            self.kill()
            self.process.wait()

    def _wait(self) -> None:
        """In a thread: wait without reaping, so that the pid stays ours until the group is cleaned up."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        # The loop is closed when the launcher itself failed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self.is_alive:
            self.kill()
            self._ended(self.process.wait())


class WorkerProcess:
    """A worker's process. ``show`` is called with its lines, ``ended`` with its wait status, both in the event loop."""

    def __init__(
        self,
        slot: str,
        log: Path,
        seen: SeenTracebacks,
        show: Callable[[str, str, Stream], None],
        ended: Callable[[WorkerProcess, int], None],
    ) -> None:
        self.slot = slot
        self._log = Log(log)
        self._show = show
        self._ended = ended
        self._splitters: dict[Stream, LineSplitter] = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._tracebacks = TracebackFilter(seen)
        self._last_error = LastError()
        self._loop = asyncio.get_running_loop()
        self._pipes: dict[Stream, IO[bytes]] = {}
        self._owned: OwnedProcess | None = None

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start the command in a session of its own."""
        self._owned = OwnedProcess(command, environment, self._finish)
        process = self._owned.process
        assert process.stdout is not None and process.stderr is not None
        self._pipes = {"stdout": process.stdout, "stderr": process.stderr}
        for stream, pipe in self._pipes.items():
            os.set_blocking(pipe.fileno(), False)
            self._loop.add_reader(pipe.fileno(), self._read, stream)

    @property
    def pid(self) -> int:
        """0 before the start."""
        return self._owned.process.pid if self._owned is not None else 0

    @property
    def is_alive(self) -> bool:
        """Whether it was started and its end was not told yet."""
        return self._owned is not None and self._owned.is_alive

    @property
    def error(self) -> str:
        """Its last exception in one line, if it printed a traceback."""
        return self._last_error.text

    def signal(self, number: int) -> None:
        """Signal the worker itself."""
        if self._owned is not None:
            self._owned.signal(number)

    def kill(self) -> None:
        """Kill the worker and all its children."""
        if self._owned is not None:
            self._owned.kill()

    def pause(self) -> None:
        """Show lines that were held back until more output comes; restore the log if it was removed."""
        self._log.mend()
        self._show_all("stderr", self._tracebacks.quiet(time.monotonic()))

    def dispose(self) -> None:
        """Kill and reap the process unless it has ended; for launchers that fail themselves."""
        if self._owned is not None:
            self._owned.dispose()
        self._release()

    def _finish(self, status: int) -> None:
        for stream in tuple(self._pipes):
            while self._read(stream):
                pass
            self._end_stream(stream)
        self._release()
        self._ended(self, status)

    def _read(self, stream: Stream) -> bool:
        """Take what is in the pipe; False if there is nothing."""
        pipe = self._pipes.get(stream)
        chunk = pipe.read(_CHUNK) if pipe is not None else b""
        if chunk:
            # On a full disk it is only shown: the run goes on.
            self._log.write(chunk)
            now_s = time.monotonic()
            self._show_lines(stream, self._splitters[stream].feed(chunk, now_s), now_s)
            return True
        if chunk == b"" and pipe is not None:
            # End of file: without this the loop would call again and again.
            self._loop.remove_reader(pipe.fileno())
        return False

    def _show_lines(self, stream: Stream, lines: list[str], now_s: float) -> None:
        if stream == "stderr":
            lines = [line for line in lines if not is_transports(line)]
            for line in lines:
                self._last_error.feed(line)
            lines = [shown for line in lines for shown in self._tracebacks.feed(line, now_s)]
        self._show_all(stream, lines)

    def _show_all(self, stream: Stream, lines: list[str]) -> None:
        for line in lines:
            self._show(self.slot, line, stream)

    def _end_stream(self, stream: Stream) -> None:
        self._show_lines(stream, self._splitters[stream].end(), time.monotonic())
        if stream == "stderr":
            self._show_all(stream, self._tracebacks.end())

    def _release(self) -> None:
        for pipe in self._pipes.values():
            self._loop.remove_reader(pipe.fileno())
            pipe.close()
        self._pipes = {}
        self._log.close()
