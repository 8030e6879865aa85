"""What the README shows works: its scripts run; its commands and those of the guide exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import GUIDE, README, ROOT, Block, blocks, commands, options

PAGES = (README, ROOT / "examples" / "README.md", *GUIDE)
TRAIN = "# train.py"
"""the first line of a script that runs alone and in a group; any other Python block runs alone"""
LIMIT_S = 200.0
"""Far above what a script on the front page takes; only a hang reaches it."""


def scripts() -> list[Block]:
    return blocks(README, "python")


def lines() -> list[tuple[str, str]]:
    """(place, command) of each line of a shell block that calls us; a line that ends in a backslash goes on."""
    shell = [block for page in PAGES for block in blocks(page, "bash", "console", "sh", "shell")]
    found = [
        (block.place, line.strip().removeprefix("$ ").removeprefix("exec "))
        for block in shell
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
    ]
    return [(place, line) for place, line in found if line.startswith(("pliant ", "make "))]


def test_the_readme_shows_a_whole_script() -> None:
    assert any(block.text.startswith(TRAIN) for block in scripts()), f"no Python block begins with {TRAIN!r}"


def ran(directory: Path, *command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        # More threads than cores would make a script that takes seconds take minutes.
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block", scripts(), ids=lambda block: block.place)
def test_a_script_runs_alone(block: Block, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block.text)
    ran(tmp_path, "train.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [block for block in scripts() if block.text.startswith(TRAIN)], ids=lambda block: block.place
)
def test_a_training_script_runs_in_a_group(block: Block, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block.text)
    pliant = ("-c", "from pliant.ui.cli import main; main()")
    ran(tmp_path, *pliant, "run", "-n", "2", "--dir", "job", "train.py")
    ran(tmp_path, *pliant, "audit", "job")


@pytest.mark.parametrize(("place", "line"), lines(), ids=[line for _, line in lines()])
def test_a_command_exists(place: str, line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in words if not word.startswith("-") and "=" not in word]
        assert set(wanted) <= set(targets), place
        return
    known = commands()
    name = program
    while words and f"{name} {words[0]}" in known:
        name, *words = f"{name} {words[0]}", *words[1:]
    if hasattr(known[name], "commands"):
        assert words[:1] and words[0] in options(known[name]) | {"--help"}, (
            f"{place}: {name} has no command {words[0]!r}"
        )
        return
    # Parses the options as the command would and raises what the user would be told; nothing is run.
    known[name].make_context(name, words)
