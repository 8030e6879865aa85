"""Drawn training scripts as real processes, with workers killed and sent away: audited, and computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prepared import Nursery
from running import processes_in

from habits.kept import KEPT_PROCESSES, SLOW_PROCESSES
from pliant.coordinator.journal import history
from pliant.core.journal.records import EraRecord
from pliant.testing.habits import Habits, command, processes

pytestmark = pytest.mark.slow

SCRIPTS, SEED = 8, 77


def check(habits: Habits, directory: Path, nursery: Callable[[], Nursery]) -> None:
    try:
        processes.checked(habits, directory, nursery().run)
    except Exception as error:
        error.add_note(f"{habits}\n{command.again(habits, processes.checked)}")
        raise
    finally:
        assert not processes_in(directory), "a process was left behind"


@pytest.mark.parametrize("habits", command.drawn(SCRIPTS, SEED, processes=True), ids=range(SCRIPTS))
def test_drawn_scripts(tmp_path: Path, habits: Habits, nursery: Callable[[], Nursery]) -> None:
    check(habits, tmp_path, nursery)


@pytest.mark.parametrize("habits", KEPT_PROCESSES)
def test_scripts_that_failed_once(tmp_path: Path, habits: Habits, nursery: Callable[[], Nursery]) -> None:
    check(habits, tmp_path, nursery)


@pytest.mark.parametrize("habits", SLOW_PROCESSES, ids=["in on_update", "in the body"])
def test_slow_saves_and_what_follows(tmp_path: Path, habits: Habits, nursery: Callable[[], Nursery]) -> None:
    check(habits, tmp_path, nursery)
    eras = [record for record in history(tmp_path / "job" / "journal.jsonl") if isinstance(record, EraRecord)]
    assert any("w0" not in record.roster for record in eras), "nobody was left out"
