"""``break`` is told from an exception, by every Python that is there; and what is done where it cannot be told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pliant
from pliant import loop_exit

VERSIONS = [(3, minor) for minor in range(11, 16)]
"""from ``requires-python`` on, and those to come"""


def interpreter(version: tuple[int, int]) -> str | None:
    """Some Python of this version, with or without torch."""
    name = f"{version[0]}.{version[1]}"
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(str(path) for path in versions.glob(f"{name}.*/bin/python"))
    for python in (sys.executable, *installed, shutil.which(f"python{name}")):
        # Some of these names stand for whichever version was chosen last.
        if python is not None and subprocess.run(
            [python, "--version"], capture_output=True, text=True
        ).stdout.startswith(f"Python {name}."):
            return python
    return None


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}.{version[1]}")
def test_each_way_out_of_a_loop_is_told(version: tuple[int, int]) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version[0]}.{version[1]} here")
    ways = Path(__file__).with_name("ways_out.py")
    told = subprocess.run(
        [python, "-W", "error", str(ways), str(loop_exit.__file__)], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0 and not told.stderr, told.stderr
    answer = json.loads(told.stdout)
    assert tuple(answer["version"]) == version
    assert answer["can_tell"]
    for mode, found in answer["found"].items():
        assert len(found) > 20
        for way, (said, times) in found.items():
            expected = version >= (3, 13) if way.startswith("wrapped_") else way.startswith("by_")
            assert said == [expected], f"{mode}: {way}"
            assert times >= 100


def test_an_instruction_that_is_none_drops_nothing() -> None:
    code = interpreter.__code__
    # Before a frame has begun, and behind its end.
    assert not loop_exit.drops_iterator(code, -1)
    assert not loop_exit.drops_iterator(code, len(code.co_code))


@pytest.fixture
def unknown_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An interpreter that leaves loops by other instructions."""
    monkeypatch.setattr(loop_exit, "_DROPS", frozenset[int]())
    loop_exit.can_tell.cache_clear()
    yield
    loop_exit.can_tell.cache_clear()
    loop_exit._say_so.cache_clear()


def trained() -> tuple[list[int], dict[str, torch.Tensor], float]:
    """Samples right after each epoch's loop, of which the first is left early; the final weights; a mean."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(100, 6, generator=generator)
    samples = TensorDataset(x, torch.randint(0, 3, (100,), generator=generator))
    model, seen = nn.Linear(6, 3), list[int]()

    def measure(batch: Any) -> tuple[float, int]:
        return float(F.cross_entropy(model(batch[0]), batch[1], reduction="sum")), len(batch[1])

    mean = 0.0
    with pliant.join(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=20) as run:
        for epoch in run.epochs(3):
            for index, (x, y) in enumerate(run.batches(samples, size=5)):
                run.backward(F.cross_entropy(model(x), y))
                run.step()
                if epoch != 1 and index == 9:
                    break
            seen.append(run.samples)
            mean = run.evaluate(measure, samples, size=50)
    return seen, {name: value.clone() for name, value in model.state_dict().items()}, mean


def test_an_unknown_python_ends_the_loop_with_the_next_call_and_says_so(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    seen, weights, mean = trained()
    assert seen == [50, 150, 200]
    assert not capsys.readouterr().err
    request.getfixturevalue("unknown_python")
    assert not loop_exit.can_tell()
    later, same_weights, same_mean = trained()
    assert [later[1], mean] == [150, same_mean]
    assert later[0] < 50 and later[2] < 200
    assert all(torch.equal(weights[name], value) for name, value in same_weights.items())
    said = capsys.readouterr().err
    assert said.count("it cannot be told how a loop over run.batches(…) is left") == 1
    assert "call one before you use the weights" in said
