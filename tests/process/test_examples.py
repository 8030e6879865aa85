"""Every example runs alone and on unequal workers, and its journal proves each sample used once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prepared import Nursery
from running import plain_environment

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LIMIT_S = 200.0
"""An example takes some ten seconds; only a hang, or a very busy machine, reaches it."""
PLIANT = ("-c", "from pliant.ui.cli import main; main()")


def ran(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def few_epochs(example: Path) -> list[str]:
    return ["--epochs", "2"] if "--epochs" in example.read_text() else []


def test_there_are_examples() -> None:
    assert [example.stem for example in EXAMPLES] == ["characters", "digits_cnn", "minimal"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_runs_alone(example: Path, tmp_path: Path) -> None:
    done = ran(tmp_path, str(example), *few_epochs(example))
    assert "epoch 2: " in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_runs_on_unequal_workers(example: Path, tmp_path: Path, nursery: Callable[[], Nursery]) -> None:
    paces = "1,1,0.5,0.25" if example.stem == "minimal" else "1,0.5"
    options = ("-n", str(len(paces.split(","))), "--pace", paces, "--dir", "job")
    command = (*PLIANT, "run", *options, str(example), *few_epochs(example))
    done = nursery().run(command, tmp_path, plain_environment(), LIMIT_S)
    assert done.returncode == 0, done.stdout
    assert "[w0] epoch 2: " in done.stdout
    assert "[w1]" not in done.stdout, "only the leader prints"
    audited = ran(tmp_path, *PLIANT, "audit", "job")
    assert "every sample is accounted for" in audited.stdout


def test_the_smallest_script_fits_on_a_screen() -> None:
    minimal = next(example for example in EXAMPLES if example.stem == "minimal")
    assert len(minimal.read_text().splitlines()) <= 30
