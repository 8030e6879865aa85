"""Whoever starts a run leaves no process behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Launcher, processes_in


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Starts runs in one directory; a module's PRELUDE is put before all its scripts."""
    launcher = Launcher(tmp_path, getattr(request.module, "PRELUDE", ""))
    yield launcher
    for run in launcher.runs:
        run.close()
    assert not processes_in(tmp_path), "a process was left behind"
