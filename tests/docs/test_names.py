"""The public names: exported, importable, documented."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import pliant

README = Path(__file__).parents[2] / "README.md"

FACTS = {"worker", "roster", "era", "round", "samples", "batch", "rate", "is_leader", "progress"}
VERBS = {"epochs", "batches", "backward", "step", "evaluate", "plain_weights", "save", "close"}
"""DESIGN's interface; ``leave`` comes with elasticity"""


def test_all_is_what_can_be_imported() -> None:
    assert list(pliant.__all__) == sorted(set(pliant.__all__))
    for name in pliant.__all__:
        assert getattr(pliant, name) is not None
    namespace: dict[str, object] = {}
    exec("from pliant import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(pliant.__all__)


def test_nothing_else_is_public() -> None:
    """Submodules become attributes when imported; a class or function only by being exported."""
    public = {
        name
        for name, value in vars(pliant).items()
        if not name.startswith("_") and not inspect.ismodule(value) and getattr(value, "__module__", "") != "typing"
    }
    assert public - {"TYPE_CHECKING"} <= set(pliant.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pliant.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", pliant.__all__)
def test_each_name_has_a_docstring(name: str) -> None:
    value = getattr(pliant, name)
    assert inspect.getdoc(value) and value.__doc__, f"pliant.{name} has no docstring"


def test_each_member_of_run_has_a_docstring() -> None:
    for name, value in vars(pliant.Run).items():
        if not name.startswith("_"):
            assert inspect.getdoc(value), f"Run.{name} has no docstring"


def test_run_has_designs_interface() -> None:
    for name in FACTS:
        assert isinstance(vars(pliant.Run)[name], property), f"Run.{name} is not a read-only fact"
    for name in VERBS:
        assert callable(vars(pliant.Run)[name]), f"Run.{name} cannot be called"


@pytest.mark.parametrize("name", pliant.__all__)
def test_each_name_is_in_the_readme(name: str) -> None:
    # Written as code: ``Run`` and ``join`` are also words.
    assert re.search(rf"(pliant\.|`){name}\b", README.read_text()), f"README does not mention pliant.{name}"
