"""A prepared process is a process as any other: compared with one that is executed anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prepared import Nursery
from running import LIMIT_S, Launcher, gone, hearing, plain_environment, processes_in

pytestmark = pytest.mark.slow

FACTS = """
import json, os, signal, sys, threading, warnings
from pathlib import Path
signals = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": globals().get("__file__"), "path": sys.path[0],
    "directory": os.getcwd(), "own": os.environ.get("OWN"), "foreign": "PYTEST_CURRENT_TEST" in os.environ,
    "signals": [str(each) for each in signals], "masked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd"))[:3], "stdin": sys.stdin.read(),
    "words": Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").split(b"\\0")[1:].__repr__(),
    "errors": any(each[0] == "error" and each[2] is Warning for each in warnings.filters),
    "threads": threading.active_count(), "main": threading.current_thread() is threading.main_thread(),
    "module": sys.modules["__main__"].__dict__ is globals(), "encoding": sys.stdout.encoding,
}))
"""
ENDS = {
    "the end": ("print('done')", 0),
    "a status": ("raise SystemExit(3)", 3),
    "a reason": ("raise SystemExit('no')", 1),
    "an error": ("def f():\n    raise ValueError('no')\nf()", 1),
    "a signal": ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "ctrl-c": ("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass", -signal.SIGINT),
    "what runs at the end": ("import atexit\natexit.register(lambda: print('at the end'))", 0),
    "a thread": ("import threading\nthreading.Timer(0.1, lambda: print('after')).start()", 0),
    "an abrupt end": ("import os\nprint('unseen')\nos._exit(7)", 7),
}


@pytest.fixture
def both(tmp_path: Path, nursery: Callable[[], Nursery]) -> Callable[..., list[tuple[int, str]]]:
    """Status and output of the same command, executed and prepared."""

    def run(*arguments: str) -> list[tuple[int, str]]:
        environment = {**plain_environment(), "OWN": "mine"}
        environment.pop("PYTEST_CURRENT_TEST", None)
        executed = subprocess.run(
            hearing([sys.executable, *arguments]),
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        prepared = nursery().run(arguments, tmp_path, environment, LIMIT_S)
        return [(done.returncode, done.stdout) for done in (executed, prepared)]

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ("facts.py", "one", "two"),
        ("-u", "facts.py"),
        ("-W", "error", "-c", FACTS, "one"),
        ("-P", "-m", "facts", "one"),
        ("-m", "facts"),
    ],
    ids=["script", "unbuffered", "code", "module, safe path", "module"],
)
def test_it_finds_what_a_new_interpreter_finds(
    tmp_path: Path, both: Callable[..., list[tuple[int, str]]], arguments: tuple[str, ...]
) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    if "-P" in arguments:
        # Without the directory itself it is found by name.
        arguments = ("-P", "-c", FACTS, *arguments[3:])
    executed, prepared = both(*arguments)
    assert executed[0] == 0, executed
    assert prepared == executed


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_new_interpreter_ends(
    tmp_path: Path, both: Callable[..., list[tuple[int, str]]], end: str
) -> None:
    code, status = ENDS[end]
    (tmp_path / "ends.py").write_text(code)
    executed, prepared = both("ends.py")
    assert executed[0] == prepared[0] == status
    assert prepared == executed


def test_a_worker_is_its_launchers_child_and_dies_with_it(launch: Launcher) -> None:
    run = launch(
        """
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "1000"])
        print("parent", os.getppid(), "leads", os.getsid(0) == os.getpid(), "pid", os.getpid(), flush=True)
        while True:
            time.sleep(1)
        """,
        workers=1,
    )
    words = run.until("parent").split()
    assert words[2:5] == [str(run.process.pid), "leads", "True"]
    worker = int(words[-1])
    assert worker in processes_in(run.directory)
    run.process.kill()
    assert run.process.wait() == -signal.SIGKILL
    gone(worker)
    # What the script has started is not the launcher's any more: as where the worker was executed.
    for pid in processes_in(run.directory):
        os.kill(pid, signal.SIGKILL)
        gone(pid)


def test_nothing_is_held_open(launch: Launcher) -> None:
    """The end of a script's output is the end of its process."""
    run = launch(
        """
        import os
        for number in range(64):
            try:
                print("holds", number, os.readlink(f"/proc/self/fd/{number}").split(":")[0])
            except OSError:
                pass
        """,
        workers=1,
    )
    assert run.wait() == 1
    assert [line for line in run.lines if " holds " in line] == [
        "[w0] holds 0 /dev/null",
        "[w0] holds 1 pipe",
        "[w0] holds 2 pipe",
    ]
