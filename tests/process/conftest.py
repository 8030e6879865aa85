"""A run that a test starts leaves no process behind; its processes start quickly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Launcher, gone, processes_in


@pytest.fixture(scope="session", autouse=True)
def _quick_processes() -> Iterator[None]:
    """Most of what these tests cost is loading torch, hundreds of times; see scripts/quick.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "scripts"), prepend=os.pathsep)
        # Without compiled files every process would compile Pliant anew.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Starts runs in one directory; a module's PRELUDE is put before all its scripts."""
    launcher = Launcher(tmp_path, getattr(request.module, "PRELUDE", ""))
    yield launcher
    killed = [run.close() for run in launcher.runs]
    if any(killed):
        # After a failure: a worker whose launcher is killed dies with it, but the kernel may need a moment.
        for pid in processes_in(tmp_path):
            gone(pid)
    assert not processes_in(tmp_path), "a process was left behind"
