"""One worker's process on this machine.

Question  How is a worker started, listened to, signalled and cleaned up after?
Holds     A worker leads its own process group; when it ends, whatever is left of the group is killed before
          its pid is released, so no signal can reach a stranger. All output is in its log, byte for byte.
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
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal

from pliant.launch import child
from pliant.launch.output import LineSplitter, SeenTracebacks, TracebackFilter
from pliant.types import WorkerId

Stream = Literal["stdout", "stderr"]
_CHUNK = 1 << 16


class WorkerProcess:
    """A running worker. ``show`` gets its lines, ``ended`` its wait status, both in the event loop."""

    def __init__(
        self,
        worker: WorkerId,
        log: Path,
        seen: SeenTracebacks,
        show: Callable[[WorkerId, str, Stream], None],
        ended: Callable[[WorkerId, int], None],
    ) -> None:
        self.worker = worker
        self._log = log.open("ab")
        self._show = show
        self._ended = ended
        self._splitters: dict[Stream, LineSplitter] = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._tracebacks = TracebackFilter(seen)
        self._loop = asyncio.get_running_loop()
        self._pipes: dict[Stream, IO[bytes]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the command in a session of its own."""
        process = subprocess.Popen(
            # Without site and the user's environment this first program takes some ten milliseconds.
            [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A file object without a buffer: reads return what is there.
            bufsize=0,
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        self._process = process
        self._pipes = {"stdout": process.stdout, "stderr": process.stderr}
        for stream, pipe in self._pipes.items():
            os.set_blocking(pipe.fileno(), False)
            self._loop.add_reader(pipe.fileno(), self._read, stream)
        threading.Thread(target=self._wait, args=(process.pid,), name=f"wait-{self.worker}", daemon=True).start()

    def signal(self, number: int) -> None:
        """Signal the worker itself: its loaders follow it, and would complain if signalled first."""
        if self._process is not None and self._process.returncode is None:
            # Not Popen.send_signal, which reaps a worker that has just ended: its end would never be told.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the worker and all its children."""
        if self._process is not None and self._process.returncode is None:
            self._kill_group()

    def pause(self) -> None:
        """Show what was held back in hope of more."""
        self._show_all("stderr", self._tracebacks.quiet(time.monotonic()))

    def dispose(self) -> None:
        """Kill and reap, if that has not happened yet; for launchers that fail themselves."""
        if self._process is not None and self._process.returncode is None:
            self._kill_group()
            self._process.wait()
        self._release()

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self, pid: int) -> None:
        """In a thread: wait without reaping, so that the pid stays ours until the group is cleaned up."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        # The loop is closed when the launcher itself failed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._kill_group()
        status = self._process.wait()
        for stream in tuple(self._pipes):
            while self._read(stream):
                pass
            self._end_stream(stream)
        self._release()
        self._ended(self.worker, status)

    def _read(self, stream: Stream) -> bool:
        """Take what is in the pipe; False if there is nothing."""
        pipe = self._pipes.get(stream)
        chunk = pipe.read(_CHUNK) if pipe is not None else b""
        if chunk:
            self._log.write(chunk)
            self._log.flush()
            now_s = time.monotonic()
            self._show_lines(stream, self._splitters[stream].feed(chunk, now_s), now_s)
            return True
        if chunk == b"" and pipe is not None:
            # End of file: without this the loop would call again and again.
            self._loop.remove_reader(pipe.fileno())
        return False

    def _show_lines(self, stream: Stream, lines: list[str], now_s: float) -> None:
        if stream == "stderr":
            lines = [shown for line in lines for shown in self._tracebacks.feed(line, now_s)]
        self._show_all(stream, lines)

    def _show_all(self, stream: Stream, lines: list[str]) -> None:
        for line in lines:
            self._show(self.worker, line, stream)

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
