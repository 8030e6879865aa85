"""Groups come and go in living processes: whatever becomes of the others, nothing is left of a group that was left."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import members
import pytest
from running import searched

LIMIT_S = 240.0
"""Only a hang reaches it."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="needs Linux")]


class Processes:
    """The processes of one test; none outlives it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, members.__file__, str(self._directory), *map(str, arguments)]
        # With an arena per thread, as glibc has it on many cores, memory would grow with the threads that ever were.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self._all.append(process)
        return process

    def lives(self, first: int, last: int) -> list[dict[str, Any]]:
        """What the members printed that lived through the attempts from ``first`` to ``last``."""
        return results([self.start(place, first, last) for place in range(members.MEMBERS - 1)])

    def close(self) -> None:
        for process in self._all:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.communicate()


def results(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
        # torch and gloo themselves tell of members that died while they connected.
        theirs = ("ProcessGroupGloo.cpp", "/gloo/transport/")
        assert not [line for line in errors.splitlines() if not any(each in line for each in theirs)], errors
    return [json.loads(output) for output, _ in outputs]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    (tmp_path / "13-child may go").touch()
    started.close()


def assert_nothing_is_left(lives: Sequence[dict[str, Any]]) -> None:
    for life in lives:
        before, after = life["before"], life["after"]
        assert after["descriptors"] == before["descriptors"], life
        assert after["threads"] <= before["threads"], life
        # The caller's part is a few system calls per member; who waited for gloo would wait for its timeout.
        assert statistics.median(life["leave_s"]) < 1.0


def test_nothing_is_left_of_groups_whose_members_hang_die_or_stay_away(processes: Processes) -> None:
    for attempt in members.FATES:
        processes.start("victim", attempt)
    assert_nothing_is_left(processes.lives(0, 60))


@pytest.mark.parametrize("groups", [300, *searched(1000)])
def test_many_groups_do_not_grow_a_process(processes: Processes, groups: int) -> None:
    lives = processes.lives(100, 100 + groups)
    assert_nothing_is_left(lives)
    for life in lives:
        # A leaked sum would be 2.4 MB, a leaked group's threads some 100 kB.
        assert life["after"]["kilobytes"] - life["before"]["kilobytes"] < 16 * 1024, life
