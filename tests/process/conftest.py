"""A run that a test starts leaves no process behind; its processes start quickly."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prepared import Nursery
from running import Launcher, gone, plain_environment, processes_in


@pytest.fixture(scope="session", autouse=True)
def _quick_processes() -> Iterator[None]:
    """Most of what these tests cost is loading torch, hundreds of times; see scripts/quick.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "scripts"), prepend=os.pathsep)
        # Without compiled files every process would compile Pliant anew.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[Callable[[], Nursery]]:
    """The process that others are forked from, started with its first use."""
    made: list[Nursery] = []

    def get() -> Nursery:
        if sys.platform != "linux":
            pytest.skip("prepared processes are Linux processes")
        if not made:
            made.append(Nursery(plain_environment()))
        return made[0]

    yield get
    for each in made:
        each.close()


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest, nursery: Callable[[], Nursery]) -> Iterator[Launcher]:
    """Starts runs in one directory; a module's PRELUDE is put before all its scripts.

    A module with PREPARED = False is about how processes begin: its own are executed anew.
    """
    prepared = getattr(request.module, "PREPARED", True) and sys.platform == "linux"
    launcher = Launcher(tmp_path, getattr(request.module, "PRELUDE", ""), nursery if prepared else None)
    yield launcher
    killed = [run.close() for run in launcher.runs]
    if any(killed):
        # After a failure: a worker whose launcher is killed dies with it, but the kernel may need a moment.
        for pid in processes_in(tmp_path):
            gone(pid)
    assert not processes_in(tmp_path), "a process was left behind"
