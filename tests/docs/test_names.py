"""The public names: exported, importable, documented; and every keyword, member, command, option and variable."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
from pages import ROOT, commands, options

import pliant
from pliant.environment import Job, environment_of

FACTS = {
    "batch", "clip_norm", "delay", "efficiency", "era", "grad_norm", "is_leader", "loss", "noise_scale", "progress",
    "rate", "roster", "round", "samples", "scheduled", "updates", "worker",
}  # fmt: skip
VERBS = {
    "backward", "batches", "busy", "close", "epochs", "evaluate", "leave", "on_roster", "on_update", "plain_weights",
    "save", "step",
}  # fmt: skip
"""the interface that scripts rely on"""

MOST_KEYWORDS = 17
KEYWORDS = {
    name: parameter
    for name, parameter in inspect.signature(pliant.join).parameters.items()
    if name not in {"model", "optimizer"}
}

REFERENCE = ROOT / "docs" / "guide" / "reference.md"


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


MEMBERS = {
    name: value
    for defined in reversed(pliant.Run.__mro__[:-1])
    for name, value in vars(defined).items()
    if not name.startswith("_")
}
"""what ``Run`` offers, wherever it is defined"""


def test_each_member_of_run_has_a_docstring() -> None:
    for name, value in MEMBERS.items():
        assert inspect.getdoc(value), f"Run.{name} has no docstring"


def test_run_has_this_interface() -> None:
    assert {name for name, value in MEMBERS.items() if isinstance(value, property)} == FACTS
    assert {name for name, value in MEMBERS.items() if callable(value)} == VERBS
    assert set(MEMBERS) == FACTS | VERBS


def test_only_the_bound_of_the_norm_can_be_set() -> None:
    assert {name for name in FACTS if MEMBERS[name].fset is not None} == {"clip_norm"}


def test_join_has_few_keywords() -> None:
    assert len(KEYWORDS) <= MOST_KEYWORDS
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in KEYWORDS.values())


def section(heading: str) -> str:
    """What the reference has under a heading, up to the next one."""
    found = re.search(
        rf"^#+ {re.escape(heading)}[^\n]*\n(.*?)(?=^#|\Z)", REFERENCE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None, f"docs/guide/reference.md has no heading {heading!r}"
    return found[1]


def rows(heading: str) -> dict[str, list[str]]:
    """The lines of the table under a heading, by what is written as code in the first column."""
    lines = [line for line in section(heading).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {name: others for first, *others in cells for name in re.findall(r"`([^`(]+)[^`]*`", first)}


def test_the_reference_has_the_public_names() -> None:
    assert set(rows("`pliant`")) == {f"pliant.{name}" for name in pliant.__all__}


def test_the_reference_has_the_keywords_of_join_with_their_defaults() -> None:
    found = rows("`join`")
    assert list(found) == list(KEYWORDS)
    for name, parameter in KEYWORDS.items():
        required = parameter.default is inspect.Parameter.empty
        # Strings are written with double quotes.
        default = "required" if required else f"`{parameter.default!r}`".replace("'", '"')
        assert found[name][1] == default, name


def test_the_reference_has_the_members_of_run() -> None:
    assert set(rows("Facts")) == {f"run.{name}" for name in FACTS | {"state"}}
    assert set(rows("Verbs")) == {f"run.{name}" for name in VERBS}


@pytest.mark.parametrize("value", [pliant.Floating, pliant.Update], ids=lambda value: value.__name__)
def test_the_reference_has_the_fields_of(value: Any) -> None:
    assert list(rows(f"`{value.__name__}`")) == [field.name for field in dataclasses.fields(value)]


def test_the_reference_has_the_rules() -> None:
    assert set(rows("`rates`")) == {f"pliant.rates.{name}" for name in pliant.rates.__all__}


COMMANDS = commands()
GROUPS = {name for name, command in COMMANDS.items() if hasattr(command, "commands")}


def test_the_reference_has_the_commands() -> None:
    headings = re.findall(r"^### `(pliant [a-z ]+?)(?: [A-Z\[][^`]*)?`$", REFERENCE.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(set(COMMANDS) - GROUPS)
    assert {"pliant", "pliant certs"} == GROUPS
    assert options(COMMANDS["pliant"]) == {"--version"}
    assert "`pliant --version`" in section("Commands")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - GROUPS))
def test_the_reference_has_the_options_of(name: str) -> None:
    assert set(rows(f"`{name}")) == options(COMMANDS[name])


def test_the_reference_has_the_variables() -> None:
    whole = Job("", "", "", size=1, authority="ca.pem", directory="runs/a")
    assert set(rows("Environment")) - {"OMP_NUM_THREADS"} == set(environment_of(whole))
