"""Processes that begin with everything loaded, because they are forked from one that has loaded it.

Question  How do tests start hundreds of real processes when loading torch takes a second of processor time each?
Holds     A prepared process has its own pid, process group, environment, working directory, descriptors, signal
          dispositions, command line and exit, as if Python had been executed anew. It is forked from a process that
          has one thread and has run no operation of torch. A worker is a child of its launcher and dies with it.
Source    prctl(2), PR_SET_CHILD_SUBREAPER: a launcher adopts the workers that its nursery forks for it.

Two kinds of process serve requests and do nothing else: one *nursery* of a whole test session, whose children are what
a test starts, and one of each launcher among them, which is forked off before the launcher has a thread.
Whatever depends on being executed anew (what is loaded, interpreter options, a ``sitecustomize``) is tested with
``Launcher.prepared = False``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLI = "from pliant.ui.cli import main; main()"
_STARTS_PROCESSES = ("run", "demo")
_PADDING = 8192
"""bytes of a nursery's command line, in which a child writes its own"""
_MESSAGE = 1 << 20
_MOST_DESCRIPTORS = 16
_HIGH = 600
"""Received descriptors are moved above this before they get the numbers they are to have."""

Program = Callable[[], None]

_LOADED = (
    "torch",
    "torch._dynamo",  # what the first optimizer of a process loads
    "torch.optim.swa_utils",
    "torch.utils.data",
    "uvicorn.lifespan.off",
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.protocols.websockets.auto",
    "websockets.sync.client",
    "pliant.control.app",
    "pliant.control.server",
    "pliant.coordinator.service",
    "pliant.launch.launcher_loop",
    "pliant.launch.local",
    "pliant.replay.replayer",
    "pliant.run",
    "pliant.ui.cli",
)
"""what launchers, coordinators and workers load; nothing here may start a thread"""
_base_path: list[str] = []
"""where a nursery itself looks for modules, but for what its environment names"""
_base_filters: list[Any] = []
"""of warnings, before a launcher's own options"""


# what a process becomes


def interpreted(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The interpreter's options, and what is left: ``-m module …``, ``-c code …`` or ``script …``."""
    options: dict[str, Any] = {"unbuffered": False, "safe_path": False, "warnings": []}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        match rest.pop(0):
            case "-u":
                options["unbuffered"] = True
            case "-P":
                options["safe_path"] = True
            case "-W":
                options["warnings"].append(rest.pop(0))
            case other:
                raise ValueError(f"a prepared process knows no option {other}")
    return options, rest


def _program(arguments: Sequence[str], environment: dict[str, str]) -> Program:
    """What a new interpreter would do with these arguments, up to running the script; the answer runs it."""
    options, (first, *rest) = interpreted(arguments)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    for name, number in (("stdout", 1), ("stderr", 2)):
        plain = options["unbuffered"] or bool(environment.get("PYTHONUNBUFFERED")) or number == 2
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if plain else io.BufferedWriter(raw),  # type: ignore[arg-type] - as Python itself does for -u
            encoding="utf-8",
            errors="strict" if number == 1 else "backslashreplace",
            write_through=plain,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.warnoptions[:] = []
    warnings.filters[:] = _base_filters  # type: ignore[index] - a list
    for action in options["warnings"]:
        sys.warnoptions.append(action)
        warnings.simplefilter(action)
    if (threads := environment.get("OMP_NUM_THREADS")) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))
    own = environment.get("PYTHONPATH", "").split(os.pathsep)
    at = str(Path(first).resolve().parent) if first not in ("-m", "-c") else (os.getcwd() if first == "-m" else "")  # noqa: PTH109
    sys.path[:] = [*([] if options["safe_path"] else [at]), *filter(None, own), *_base_path]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if first == "-m":
        import runpy

        module, *words = rest
        sys.argv = [module, *words]
        return lambda: runpy._run_module_as_main(module)  # type: ignore[attr-defined] - what python -m does
    if first == "-c":
        code, *words = rest
        sys.argv = ["-c", *words]
        return lambda: exec(compile(code, "<string>", "exec"), main.__dict__)
    sys.argv = [first, *rest]
    file = os.path.abspath(first)  # noqa: PTH100 - as Python does it: links stay
    main.__dict__["__file__"] = file
    source = Path(file).read_bytes()
    return lambda: exec(compile(source, file, "exec"), main.__dict__)


def _write_command_line(arguments: Sequence[str]) -> None:
    """So that /proc shows the process under its own name."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, arguments))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _take_descriptors(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Give the received descriptors the wanted numbers; close all others."""
    import fcntl

    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in received]
    os.closerange(3, _HIGH)
    for descriptor, number in zip(moved, wanted, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    os.closerange(_HIGH, _HIGH + 2 * _MOST_DESCRIPTORS)


def _become(channel: socket.socket, request: dict[str, Any], received: Sequence[int]) -> Program:
    """Turn this newly forked process into what was asked for."""
    channel.detach()
    _take_descriptors(received, request["descriptors"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _write_command_line([sys.executable, *request["arguments"]])
    return _program(request["arguments"], request["environment"])


# the nurseries


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request and its descriptors; None when there is nobody any more who could ask."""
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE, _MOST_DESCRIPTORS)
    except ConnectionError:
        return None
    return (json.loads(data), list(descriptors)) if data else None


def _serve_session(channel: socket.socket) -> Program:
    """Fork what tests ask for and say how it ended. Returns in the child, with what it is to run."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    watched: dict[int, int] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != channel.fileno():
                pid = watched.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                channel.send(json.dumps({"ended": pid, "status": status}).encode())
                continue
            asked = _receive(channel)
            if asked is None:
                os._exit(0)
            request, received = asked
            pid = os.fork()
            if pid == 0:
                program = _become(channel, request, received)
                return _with_nursery(program) if _starts_processes(request["arguments"]) else program
            for number in received:
                os.close(number)
            watched[os.pidfd_open(pid)] = pid
            poll.register(next(reversed(watched)), select.POLLIN)
            channel.send(json.dumps({"started": pid}).encode())


def _starts_processes(arguments: Sequence[str]) -> bool:
    _, (first, *rest) = interpreted(arguments)
    return first == "-c" and rest[0] == _CLI and rest[1:2] != [] and rest[1] in _STARTS_PROCESSES


def _with_nursery(program: Program) -> Program:
    """For a launcher: what it starts is forked from a nursery of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        # Not where a test looks for processes that were left behind: it ends by itself a moment after its launcher.
        os.chdir("/")
        os.setsid()
        return _serve_launcher(theirs, launcher)
    theirs.close()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    import pliant.launch.process

    replaced = types.SimpleNamespace(**vars(subprocess))
    # The descriptor alone: at the process's end Python would complain of a socket that was not closed.
    channel = ours.detach()
    replaced.Popen = lambda command, **options: _WorkerPopen(socket.socket(fileno=os.dup(channel)), command, **options)
    pliant.launch.process.subprocess = replaced  # type: ignore[assignment]
    return program


def _serve_launcher(channel: socket.socket, launcher: int) -> Program:
    """Fork what the launcher asks for, as its child. Returns in the child, with what it is to run."""
    while True:
        asked = _receive(channel)
        if asked is None:
            os._exit(0)
        request, received = asked
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for number in received:
                os.close(number)
            continue
        if os.fork():
            os._exit(0)
        # The one in between ends, and the launcher adopts this process.
        while os.getppid() != launcher:
            if not _runs(launcher):
                os._exit(1)
            time.sleep(0.0005)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(1)
        os.setsid()
        channel.send(str(os.getpid()).encode())
        return _become(channel, request, received)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _WorkerPopen:
    """What a launcher needs of ``subprocess.Popen``."""

    def __init__(
        self,
        channel: socket.socket,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdin: int,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        bufsize: int,
        start_new_session: bool,
        pass_fds: Sequence[int],
    ) -> None:
        assert stdin == subprocess.DEVNULL and bufsize == 0 and start_new_session
        # python -I -S child.py PID python …: the first program does here what the nursery has done.
        arguments = list(command[6:])
        nothing = os.open(os.devnull, os.O_RDONLY)
        pipes = [os.pipe() if output == subprocess.PIPE else None for output in (stdout, stderr)]
        writing = [
            pipe[1] if pipe is not None else output.fileno()  # type: ignore[union-attr] - a file if not a pipe
            for pipe, output in zip(pipes, (stdout, stderr), strict=True)
        ]
        request = {
            "arguments": arguments,
            "environment": env,
            "directory": os.getcwd(),  # noqa: PTH109
            "descriptors": [0, 1, 2, *pass_fds],
        }
        with channel:
            socket.send_fds(channel, [json.dumps(request).encode()], [nothing, *writing, *pass_fds])
            os.close(nothing)
            for pipe in pipes:
                if pipe is not None:
                    os.close(pipe[1])
            self.pid = int(channel.recv(64))
        self.stdout, self.stderr = (open(pipe[0], "rb", 0) if pipe is not None else None for pipe in pipes)  # noqa: SIM115, PTH123
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


# the tests' side


class PreparedProcess:
    """What a test needs of ``subprocess.Popen``."""

    def __init__(self, nursery: Nursery, pid: int, stdout: IO[Any] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._nursery = nursery

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._nursery.status(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._nursery.status(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The session's nursery, as tests see it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.path = environment.get("PYTHONPATH", "")
        """where its processes look for modules, and so for a ``sitecustomize``"""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), "x" * _PADDING]
            # OpenBLAS would start a thread while it is loaded.
            found = {**environment, "OPENBLAS_NUM_THREADS": "1"}
            found.pop("OMP_NUM_THREADS", None)
            self.process = subprocess.Popen(command, env=found, pass_fds=[theirs.fileno()])
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._closed = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def start(
        self, arguments: Sequence[str], directory: Path, environment: dict[str, str], output: int, errors: int
    ) -> int:
        """The pid of a new process."""
        request = {
            "arguments": list(arguments),
            "environment": environment,
            "directory": str(directory),
            "descriptors": [0, 1, 2],
        }
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            with self._asking:
                socket.send_fds(self._channel, [json.dumps(request).encode()], [nothing, output, errors])
                with self._changed:
                    self._changed.wait_for(lambda: self._started or self._closed)
                    if not self._started:
                        raise RuntimeError("the process that others are forked from has ended")
                    return self._started.pop()
        finally:
            os.close(nothing)

    def popen(self, arguments: Sequence[str], directory: Path, environment: dict[str, str]) -> PreparedProcess:
        """A new process whose output and errors are read as text from one pipe."""
        reading, writing = os.pipe()
        try:
            pid = self.start(arguments, directory, environment, writing, writing)
        finally:
            os.close(writing)
        return PreparedProcess(self, pid, open(reading))  # noqa: PTH123 - closed by who reads it

    def run(
        self, arguments: Sequence[str], directory: Path, environment: dict[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run``, with output and errors in one."""
        process = self.popen(arguments, directory, environment)
        read: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: read.append(process.stdout.read()))  # type: ignore[union-attr]
        reader.start()
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            process.kill()
            process.wait()
            reader.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout_s, output="".join(read)) from late
        finally:
            reader.join()
            process.stdout.close()
        return subprocess.CompletedProcess(list(arguments), status, "".join(read), "")

    def status(self, pid: int, timeout_s: float | None) -> int | None:
        """The exit status, once there is one."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._ended or self._closed, timeout_s)
            return os.waitstatus_to_exitcode(self._ended[pid]) if pid in self._ended else None

    def close(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._channel.close()
        self.process.wait()

    def _listen(self) -> None:
        while data := self._hear():
            said = json.loads(data)
            with self._changed:
                if "started" in said:
                    self._started.append(said["started"])
                else:
                    self._ended[said["ended"]] = said["status"]
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _hear(self) -> bytes:
        try:
            return self._channel.recv(_MESSAGE)
        except OSError:
            return b""


def _main() -> Program:
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in _LOADED:
        importlib.import_module(name)
    alive = [thread.name for thread in threading.enumerate()]
    assert len(alive) == 1 and len(os.listdir("/proc/self/task")) == 1, f"a nursery has one thread: {alive}"  # noqa: PTH208
    own = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)}  # noqa: PTH100
    _base_path[:] = [entry for entry in sys.path[1:] if os.path.abspath(entry) not in own]  # noqa: PTH100
    _base_filters[:] = warnings.filters
    gc.collect()
    gc.freeze()
    return _serve_session(channel)


def _run(program: Program) -> None:
    """Run it as an interpreter would, to its end; all but taking every module apart, which writes to all memory."""
    status: Any = 0
    try:
        program()
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        # Where what runs at the end looks for the script's error.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined] - waits for threads, as an interpreter's end does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    _run(_main())
