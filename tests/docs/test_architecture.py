"""The page that shows the way through the code names what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
STEPS = re.findall(r"\[`([\w.]+)`\]\(\.\./(src/[\w/]+\.py)\)", PAGE.read_text())


def defined(path: Path) -> set[str]:
    """Functions, classes, and methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_there_are_three_walks() -> None:
    assert len(re.findall(r"^## Walk \d", PAGE.read_text(), re.MULTILINE)) == 3
    assert len(STEPS) > 40


@pytest.mark.parametrize(("name", "path"), STEPS)
def test_a_step_names_what_is_there(name: str, path: str) -> None:
    assert name in defined(PAGE.parents[1] / path)


def test_every_package_has_its_line() -> None:
    package = PAGE.parents[1] / "src" / "pliant"
    rooms = {str(path.parent.relative_to(package)) for path in package.rglob("__init__.py")} - {"."}
    rooms -= {"testing/habits", "testing/hosts"}  # parts of what its line says
    assert rooms <= set(re.findall(r"`([\w/]+)/`", PAGE.read_text()))
