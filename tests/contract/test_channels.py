"""Every implementation of a group keeps what ``Channel`` and ``Summation`` promise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import channels
import pytest
from channels import PROMISES, End, alone, in_virtual_time, outcome

MEMBERS = 3
SEEDS = 20

promises = pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where three processes have written how it went."""
    directory = tmp_path_factory.mktemp("channels")
    command = [sys.executable, channels.__file__, str(directory)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([*command, str(place), str(MEMBERS)], env=environment, stderr=subprocess.PIPE, text=True)
        for place in range(MEMBERS)
    ]
    said = [process.communicate(timeout=240)[1] for process in running]
    assert [process.returncode for process in running] == [0] * MEMBERS, said
    return directory


@promises
def test_over_gloo(promise: Callable[[End], None], over_gloo: Path) -> None:
    assert [outcome(over_gloo, promise.__name__, place).read_text() for place in range(MEMBERS)] == [""] * MEMBERS


@promises
def test_alone(promise: Callable[[End], None]) -> None:
    alone(promise)


@promises
@pytest.mark.parametrize("members", [2, MEMBERS])
def test_in_virtual_time(promise: Callable[[End], None], members: int) -> None:
    for seed in range(SEEDS):
        in_virtual_time(promise, seed, members)
