"""DESIGN's layers: nothing imports up or sideways, and what a layer must not touch it does not name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "pliant"

BOTTOM = {"types", "errors", "bitmaps", "auth"}
SIBLINGS = {"core", "control", "tensors"}
PARTIES = {"worker", "coordinator", "replay"}
USER_SIDE = {"run", "facts", "micro_batches", "loop_exit", "data", "rates", "settings"}
ALLOWED = {
    **{layer: set[str]() for layer in BOTTOM},
    "environment": BOTTOM,
    "forking": BOTTOM,
    "core": BOTTOM,
    **dict.fromkeys(SIBLINGS - {"core"}, BOTTOM | {"forking"}),
    "worker": BOTTOM | SIBLINGS | {"environment"},
    # It stands in for the workers.
    "replay": BOTTOM | SIBLINGS | {"worker"},
    # Nothing of the workers: no torch.
    "coordinator": BOTTOM | {"core", "control"},
    "launch": BOTTOM | {"core", "control", "coordinator", "environment"},
    **dict.fromkeys(USER_SIDE, BOTTOM | SIBLINGS | USER_SIDE | {"worker", "environment"}),
    # The package itself hands out the user side's names: in a worker at once, else on first use.
    "pliant": BOTTOM | USER_SIDE | {"worker", "environment"},
    # The command starts runs; the demo's scripts are users and import the package.
    "ui": BOTTOM | SIBLINGS | USER_SIDE | PARTIES | {"environment", "launch", "pliant"},
    "testing": BOTTOM | SIBLINGS | USER_SIDE | PARTIES | {"environment", "launch", "ui", "pliant"},
}
"""layer → the layers it may import, besides itself"""

MOST_FILES = 18
"""in one folder: as many as somebody who looks for one reads through"""
WITHOUT_TORCH = {"core", "control", "coordinator", "launch"}

EFFECTS = {"torch", "numpy", "time", "random", "os", "socket", "threading", "logging", "asyncio"}
ENVIRONMENT = "environment.py"
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def layer_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return "pliant" if parts == ("__init__",) else parts[0]


def imported(tree: ast.AST, path: Path) -> Iterator[str]:
    """Full dotted names of everything a module imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # ``from . import x`` is resolved against the package of the module.
            package = ("pliant", *path.relative_to(SOURCE).parts[:-1])
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*start, *([node.module] if node.module else [])))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layers_imported(path: Path) -> set[str]:
    names = [name.split(".") for name in imported(ast.parse(path.read_text()), path)]
    own = [name[1] if len(name) > 1 else "pliant" for name in names if name[0] == "pliant"]
    # A name of the package itself (pliant.join) is an import of the package.
    return {name if name in ALLOWED else "pliant" for name in own}


def foreign(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(ast.parse(path.read_text()), path)} - {"pliant"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_imports_up_or_sideways(path: Path) -> None:
    layer = layer_of(path)
    assert layer in ALLOWED, f"{path} belongs to no layer of DESIGN"
    assert layers_imported(path) <= ALLOWED[layer] | {layer}


def test_core_has_no_effects() -> None:
    for path in modules():
        if layer_of(path) in {"core", *BOTTOM}:
            assert not foreign(path) & EFFECTS, path


WHOLE = {
    ("admission", "agent_arrived"),
    ("dealing", "contribution_limits"),
    ("dealing", "floating"),
    ("dealing", "without_crumbs"),
    ("allowance", "made_up"),
    ("shutdown", "living"),
    ("ledger", "granted_samples"),
    ("ledger", "remaining"),
    # Only where a value is infinite or undefined, and so is the sum.
    ("evaluation", "_added"),
    ("noise", "contributed"),
    ("postscripts", "read"),
    ("reachability", "_busiest"),
    ("reachability", "_is_last_holder"),
    ("rounds", "settled"),
    ("rounds", "_trained"),
    ("shares", "apportion"),
    ("shares", "entitlements"),
}
"""functions of core whose ``sum`` adds whole numbers"""


def test_core_sums_floats_exactly_rounded() -> None:
    """Python 3.12 made ``sum`` of floats another number than 3.11: a decision of all workers needs ``math.fsum``."""
    found: set[tuple[str, str]] = set()
    for path in modules():
        if layer_of(path) != "core":
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(isinstance(call, ast.Name) and call.id == "sum" for call in calls):
                    found.add((path.stem, function.name))
    assert found <= WHOLE, "use math.fsum, or name the function here if it adds whole numbers"
    assert found == WHOLE, "these do not add any more"


def module_of(path: Path) -> str:
    """The dotted name by which a file is imported."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Everything that is imported with a module, at once or later."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph.get(name, set())
    return found


def imports() -> dict[str, set[str]]:
    """module → the modules it names in imports, wherever in it; those of other projects by their first word.

    The package itself is left out: it loads the user's side in a worker only (tests/process/test_launch.py starts a
    launcher and a coordinator and looks).
    """
    own = {module_of(path) for path in modules()}
    graph: dict[str, set[str]] = {}
    for path in modules():
        named: set[str] = set()
        for name in imported(ast.parse(path.read_text()), path):
            if name.split(".")[0] != "pliant":
                named.add(name.split(".")[0])
                continue
            module = name if name in own else name.rpartition(".")[0]
            packages = module.split(".")
            named |= {".".join(packages[:length]) for length in range(2, len(packages) + 1)}
        graph[module_of(path)] = named & own | {name for name in named if not name.startswith("pliant")}
    return graph


def test_coordinators_and_launchers_never_reach_torch() -> None:
    """Not through any import, not even one within a function: torch takes seconds to load."""
    graph = imports()
    assert "torch" in reached("pliant.worker.loop", graph)
    for path in modules():
        if layer_of(path) in WITHOUT_TORCH:
            assert "torch" not in reached(module_of(path), graph), path


def test_no_folder_is_too_long_to_read_through() -> None:
    for folder in {path.parent for path in modules()}:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder


def test_a_package_says_in_one_line_what_it_answers() -> None:
    for path in modules():
        if path.name == "__init__.py" and path.parent != SOURCE:
            name = module_of(path).removeprefix("pliant.")
            text = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
            assert text.startswith((f"{name}: ", f"{name} ")) and len(text.split()) > 5, path


def test_one_module_reads_the_environment() -> None:
    for path in modules():
        if str(path.relative_to(SOURCE)) == ENVIRONMENT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = {node.attr} if isinstance(node, ast.Attribute) else set[str]()
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names |= {alias.name for alias in node.names}
            assert not names & {"environ", "environb", "getenv", "getenvb"}, f"{path}:{getattr(node, 'lineno', 0)}"


def test_nothing_unsafe_is_loaded() -> None:
    """No pickle on the wire or in files."""
    for path in modules():
        tree = ast.parse(path.read_text())
        assert not foreign(path) & UNSAFE, path
        assert not {"torch.load", "torch.save"} & set(imported(tree, path)), path
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in {"load", "save"}, f"{path}:{node.lineno}"


def test_every_module_says_what_it_is_for() -> None:
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


TWINS = {
    "Entered",
    "Failed",
    "Finished",
    "Interrupted",
    "Kill",
    "Leaving",
    "Note",
    "Refuse",
    "Start",
    "Stopped",
    "Terminate",
    "Unformed",
}
"""A message of the control channel and the event or effect that it stands for; ``Stopped`` is an error, too."""


def test_a_name_of_a_class_means_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in TWINS} == {}
    for name in TWINS:
        assert {"pliant.control.messages", "pliant.core.membership.events"} <= set(places[name]) and len(
            places[name]
        ) <= 2 + (name == "Stopped"), name
