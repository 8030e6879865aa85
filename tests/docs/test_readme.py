"""What the README shows works: its scripts run, its commands exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

from pliant.ui.cli import app

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "examples" / "README.md")
TRAIN = "# train.py"
"""the first line of a script that runs alone and in a group; any other Python block runs alone"""
LIMIT_S = 200.0
"""Far above what a script on the front page takes; only a hang reaches it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    place: str


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [
        Block(match[1], match[2], f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}")
        for match in found
        if match[1] in languages
    ]


def scripts() -> list[Block]:
    return blocks(PAGES[0], "python")


def commands() -> list[tuple[str, str]]:
    """(place, command) of each line of a shell block that calls us."""
    shell = [block for page in PAGES for block in blocks(page, "bash", "console", "sh", "shell")]
    lines = [(block.place, line.strip().removeprefix("$ ")) for block in shell for line in block.text.splitlines()]
    return [(place, line) for place, line in lines if line.startswith(("pliant ", "make "))]


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


@pytest.mark.parametrize(("place", "line"), commands(), ids=[line for _, line in commands()])
def test_a_command_exists(place: str, line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in words if not word.startswith("-") and "=" not in word]
        assert set(wanted) <= set(targets), place
        return
    group = typer.main.get_command(app)
    known = getattr(group, "commands", {})
    if words[0].startswith("-"):
        assert words[0] in {option for parameter in group.params for option in parameter.opts} | {"--help"}, place
        return
    assert words[0] in known, f"{place}: pliant has no command {words[0]!r}"
    # Parses the options as the command would and raises what the user would be told; nothing is run.
    known[words[0]].make_context(words[0], words[1:])
