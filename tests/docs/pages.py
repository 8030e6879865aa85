"""The blocks of code that the documentation shows."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main

from pliant.ui.cli import app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = tuple(sorted((ROOT / "docs" / "guide").glob("*.md")))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    place: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """Those of a page in one of the languages; in a list they are indented."""
    text = page.read_text()
    found = re.finditer(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [
        Block(
            match[2], textwrap.dedent(match[3]), f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        )
        for match in found
        if match[2] in languages
    ]


def commands(command: Any = None, name: str = "pliant") -> dict[str, Any]:
    """All commands by their full names, groups included. Typer may bring a click of its own: no class is asked for."""
    command = typer.main.get_command(app) if command is None else command
    found = {name: command}
    for each, inner in getattr(command, "commands", {}).items():
        found |= commands(inner, f"{name} {each}")
    return found


def options(command: Any) -> set[str]:
    """Those of a command, in all spellings."""
    named = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    return {option for parameter in named for option in (*parameter.opts, *parameter.secondary_opts)}
